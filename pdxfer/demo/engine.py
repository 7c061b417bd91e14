"""What a worker needs of an engine, and what it knows of one request.

Owns: Sequence, the Engine protocol, and the digest of a request's cache. Must not: know models, sockets or sidecars.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import xxhash

from pdxfer.pools import SharedPool

CHUNK_TOKENS: Final = 512  # a longer prompt is computed, and pushed, in pieces of so many tokens


@dataclass
class Sequence:
    """One request in an engine. ``pages[i]`` holds the tokens ``i * page_tokens …``, in every pool."""

    room: str
    epoch: int
    prompt: list[int]  # empty on the decode side, which never sees it
    pages: list[int]
    max_tokens: int
    length: int = 0  # tokens whose cache is in the pages
    seed: int = 0  # of what is generated; travels in aux. Only the synthetic engine needs it
    tokens: list[int] = field(default_factory=list)  # generated ones

    @property
    def last(self) -> int:
        """The newest token: the next step's input."""
        return self.tokens[-1]


class Engine(Protocol):
    """Called from one thread at a time; every call may compute for long."""

    name: str
    pools: list[SharedPool]
    page_tokens: int
    num_pages: int
    context: int  # the most tokens that a request may have
    ends: frozenset[int]  # tokens that end an answer

    def prefill(self, seq: Sequence) -> Iterator[int]:
        """Compute the prompt's cache into the pages. Yields after each piece how many pages are complete, the last time
        all of them; then ``seq.tokens`` has the first token."""
        ...

    def decode_step(self, batch: Seq[Sequence]) -> None:
        """Append one token to every sequence, in one forward."""
        ...

    def wrong_bytes(self, seq: Sequence) -> int:
        """How many bytes of the sequence's cache are not what they must be; 0 where that cannot be told."""
        ...

    def poison(self, pages: Seq[int]) -> None:
        """Pages were given back: fill them so that a late write shows, where that is worth its time."""
        ...

    def late_bytes(self, pages: Seq[int]) -> int:
        """Pages are taken again: how many bytes were written after ``poison``."""
        ...


def pages_for(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def kv_digest(pools: Seq[SharedPool], pages: Seq[int]) -> str:
    """xxh3-128 over all bytes of these pages, plane by plane in the order of the tokens: equal on both sides, or torn."""
    digest = xxhash.xxh3_128()
    index = np.asarray(pages, dtype=np.intp)
    for pool in pools:
        for plane in pool.pages():
            digest.update(plane[index].data)
    return digest.hexdigest()
