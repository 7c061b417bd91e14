"""An engine without a model: its cache is a function of (room, pool, plane, token, byte), so that every byte can be checked.

Owns: that function, and the tokens that come of it. Must not: know sidecars or HTTP.

Two pools, as a sparse-attention model has them: "kv" (MLA, bf16) and "index_k" (DSA index keys, bf16, 256 bytes a token and
layer). Pages that nobody has are filled with POISON: a write that comes late shows when they are taken again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from pdxfer.pools import PoolLayout, SharedPool

from .engine import CHUNK_TOKENS, Sequence, pages_for

POISON: Final = 0xA5
KV_ROW: Final = 576  # bf16 elements of a token and layer
INDEX_ROW: Final = 128
VOCABULARY: Final = b"abcdefghijklmnopqrstuvwxyz "
BLOCK_PAGES: Final = 64  # pages that are filled or checked at once: keeps the working set in the cache

Words = npt.NDArray[np.uint64]


def _mix(x: Words) -> Words:
    """A finaliser that spreads every input bit over the word (of splitmix64). Works in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def expected(seed: int, pool: int, plane: int, first: int, tokens: int, row_bytes: int) -> Words:
    """The cache of tokens ``first … first + tokens`` in one plane, as words ``[tokens, row_bytes / 8]``."""
    key = xxhash.xxh3_64_intdigest(f"{pool}/{plane}".encode(), seed)
    rows = np.arange(first, first + tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    columns = np.arange(row_bytes // 8, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return _mix(_mix(rows)[:, None] + columns[None, :])


def room_seed(room: str, epoch: int) -> int:
    """Two rooms never have equal bytes, so that pages of the wrong room are wrong bytes."""
    return xxhash.xxh3_64_intdigest(f"{room}/{epoch}".encode())


def token_seed(prompt: Seq[int]) -> int:
    """Equal prompts have equal answers."""
    return xxhash.xxh3_64_intdigest(np.asarray(prompt, dtype="<i8").data)


def token_at(seed: int, position: int) -> int:
    """The answer's token number ``position``."""
    return VOCABULARY[xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed) % len(VOCABULARY)]


class SyntheticEngine:
    """See ``engine.Engine``. ``step_delay`` seconds pass in each decode step, ``token_delay`` for each token of a prefill."""

    name = "synthetic"
    ends: frozenset[int] = frozenset()

    def __init__(
        self,
        num_pages: int,
        *,
        page_tokens: int = 16,
        layers: int = 4,
        context: int = 8192,
        step_delay: float = 0.03,
        token_delay: float = 10e-6,
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.context = context
        self.step_delay = step_delay
        self.token_delay = token_delay
        shapes = {"kv": KV_ROW, "index_k": INDEX_ROW}
        self.pools = [
            SharedPool.allocate(PoolLayout(name, "bfloat16", (page_tokens, row), page_tokens, layers), num_pages)
            for name, row in shapes.items()
        ]
        self._rows = [2 * row for row in shapes.values()]  # bytes
        self._planes = [[plane.view(np.uint64) for plane in pool.pages()] for pool in self.pools]
        self.poison(range(num_pages))

    def prefill(self, seq: Sequence) -> Iterator[int]:
        seq.seed = token_seed(seq.prompt)
        total = len(seq.prompt)
        while seq.length < total:
            end = min(total, seq.length + CHUNK_TOKENS - CHUNK_TOKENS % self.page_tokens)
            if self.token_delay:
                time.sleep(self.token_delay * (end - seq.length))
            done = seq.length // self.page_tokens
            ready = pages_for(end, self.page_tokens)
            for index, words, plane in self._blocks(seq, done, ready):
                plane[index] = words
            seq.length = end
            if end == total:
                seq.tokens.append(token_at(seq.seed, 0))
            yield ready

    def decode_step(self, batch: Seq[Sequence]) -> None:
        if self.step_delay:
            time.sleep(self.step_delay)
        for seq in batch:
            page, at = divmod(seq.length, self.page_tokens)
            if at == 0:
                self._fill(seq, page)
            seq.length += 1
            seq.tokens.append(token_at(seq.seed, len(seq.tokens)))

    def wrong_bytes(self, seq: Sequence) -> int:
        wrong = 0
        for index, words, plane in self._blocks(seq, 0, pages_for(seq.length, self.page_tokens)):
            found = plane[index]
            if not np.array_equal(found, words):
                wrong += int(np.count_nonzero(found.view(np.uint8) != words.view(np.uint8)))
        return wrong

    def poison(self, pages: Seq[int]) -> None:
        index = np.asarray(pages, dtype=np.intp)
        for planes in self._planes:
            for plane in planes:
                plane.view(np.uint8)[index] = POISON

    def late_bytes(self, pages: Seq[int]) -> int:
        index = np.asarray(pages, dtype=np.intp)
        word = np.uint64(int.from_bytes(bytes([POISON] * 8), "little"))
        wrong = 0
        for planes in self._planes:
            for plane in planes:
                found = plane[index]
                if not (found == word).all():
                    wrong += int(np.count_nonzero(found.view(np.uint8) != POISON))
        return wrong

    def _fill(self, seq: Sequence, page: int) -> None:
        for index, words, plane in self._blocks(seq, page, page + 1):
            plane[index] = words

    def _blocks(self, seq: Sequence, first: int, end: int) -> Iterator[tuple[npt.NDArray[np.intp], Words, Words]]:
        """The sequence's pages ``first … end`` in every plane, some at a time: (pages, right words, plane)."""
        seed = room_seed(seq.room, seq.epoch)
        for pool, planes in enumerate(self._planes):
            row = self._rows[pool]
            for number, plane in enumerate(planes):
                for page in range(first, end, BLOCK_PAGES):
                    last = min(end, page + BLOCK_PAGES)
                    words = expected(seed, pool, number, page * self.page_tokens, (last - page) * self.page_tokens, row)
                    yield np.asarray(seq.pages[page:last], dtype=np.intp), words.reshape(last - page, -1), plane
