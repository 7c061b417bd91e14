"""What is probed: documents with needles in them, and rooms whose prompts begin with a document.

Owns: every key, query, token id and page table, as a function of names and numbers, so that processes that never talk to
each other agree on them. Must not: touch a pool.

A *document* is a context of random keys with one planted needle, or with many copies of it: a key in the direction that its
query looks for, strong enough to be selected. Rooms of the same document share their first tokens and differ in the rest, as
requests with a common prefix do. Copies of a needle have equal scores, more of them than a top-512 holds: which ones are
selected is then up to the order of ties alone, and that must not depend on where the pages lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pdxfer.pools.dsa import TOP_K, Bytes, Floats, IndexFormat, IndexPlane, Positions, index_scores, top_k

CONTEXTS: Final = (955, 4500, 16384, 65536)
POSITIONS: Final = ("start", "middle", "last 30")
COPIES: Final = 600  # of a repeated needle
HEADS: Final = 64
LAYERS: Final = 2
SHARED: Final = 0.75  # of its tokens that a document's rooms have in common
VOCABULARY: Final = 129_280
STRENGTH: Final = 3.0  # standard deviations of all scores that a needle stands above the least score that is selected
LAST: Final = 30

Tables = dict[str, npt.NDArray[np.int64]]


class Document(NamedTuple):
    """Keys of ``context`` tokens with ``copies`` needles at a position of POSITIONS."""

    context: int
    position: str
    copies: int

    @property
    def name(self) -> str:
        return f"{self.context}-{self.position.replace(' ', '')}-{self.copies}"

    @property
    def shared(self) -> int:
        """Tokens that all its rooms begin with."""
        return int(self.context * SHARED)

    def places(self) -> npt.NDArray[np.int64]:
        """Token positions of the needles: copies stand between other keys, since rooms must differ in all their parts."""
        if self.copies == 1:
            jitter = seed_of(self.name) % LAST
            at = {"start": jitter, "middle": self.context // 2, "last 30": self.context - 1 - jitter}[self.position]
            return np.array([at])
        span = min(self.context, 2 * self.copies)
        first = {"start": 0, "middle": (self.context - span) // 2, "last 30": self.context - span}[self.position]
        return np.linspace(first, first + span - 1, min(self.copies, span)).astype(np.int64)


class Room(NamedTuple):
    """One request: a document's shared tokens, then its own."""

    document: Document
    number: int

    @property
    def name(self) -> str:
        return f"{self.document.name}-{self.number}"


class Plan(NamedTuple):
    """Rooms of one run, ``concurrency`` of them at a time, with their keys stored as ``form`` in ``layers`` planes."""

    form: IndexFormat
    concurrency: int
    rooms: tuple[Room, ...]
    layers: int = LAYERS

    def pages(self) -> int:
        """Of a pool that holds every room without any sharing."""
        return sum(-(-room.document.context // self.form.page_tokens) for room in self.rooms)

    def tables(self, seed: int, *, sharing: bool) -> Tables:
        """Pages of each room, scattered over the pool. With ``sharing`` the whole pages of shared tokens are the same for
        all rooms of a document."""
        free = iter(np.random.default_rng(seed).permutation(self.pages()).tolist())
        found: Tables = {}
        common: dict[Document, list[int]] = {}
        for room in self.rooms:
            needed = -(-room.document.context // self.form.page_tokens)
            begin = common.get(room.document, [])
            table = [*begin, *(next(free) for _ in range(needed - len(begin)))]
            if sharing and room.document not in common:
                common[room.document] = table[: room.document.shared // self.form.page_tokens]
            found[room.name] = np.asarray(table, np.int64)
        return found


def documents(contexts: Sequence[int]) -> list[Document]:
    return [
        Document(context, position, copies) for context in contexts for copies in (1, COPIES) for position in POSITIONS
    ]


def plan(form: IndexFormat, contexts: Sequence[int], concurrency: int) -> Plan:
    """Every document has a room, and those of the shorter contexts have more, until there are ``concurrency``: at least half
    as many again as documents, so that prefixes are reused also one at a time."""
    every = documents(contexts)
    counts = dict.fromkeys(every, 1)
    short = every[: max(1, len(every) // 2)]
    for extra in range(max(concurrency, len(every) + len(every) // 2) - len(every)):
        counts[short[extra % len(short)]] += 1
    rooms = [Room(document, number) for document, count in counts.items() for number in range(count)]
    order = np.random.default_rng(concurrency).permutation(len(rooms))  # reuse comes at any distance
    return Plan(form, concurrency, tuple(rooms[i] for i in order))


# what is in them ---------------------------------------------------------------------------------------------------


def seed_of(*parts: object) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def noise(name: str, layer: int, tokens: int, dim: int) -> Floats:
    """Random keys: the first so many are the same however many are asked for."""
    return np.random.default_rng(seed_of(name, layer)).standard_normal((tokens, dim), np.float32)


def query(name: str, layer: int, dim: int) -> tuple[Floats, Floats]:
    """A query ``[HEADS, dim]`` and its heads' weights, positive, with the model's factors folded in."""
    random = np.random.default_rng(seed_of(name, layer, "query"))
    weights = np.abs(random.standard_normal(HEADS, np.float32)) * np.float32((HEADS * dim) ** -0.5)
    return random.standard_normal((HEADS, dim), np.float32), weights


def direction(heads: Floats, weights: Floats) -> tuple[Floats, float]:
    """The key of length 1 that this query looks for, and its score."""
    along = weights @ heads
    unit = (along / np.linalg.norm(along)).astype(np.float32)
    return unit, float(index_scores(heads[None], weights[None], unit[None])[0, 0])


def needle(heads: Floats, weights: Floats, scores: Floats, k: int, strength: float) -> Floats:
    """A key whose score is ``strength`` standard deviations of ``scores`` above the k-th of them."""
    unit, gain = direction(heads, weights)
    level = np.partition(scores, max(0, len(scores) - k))[max(0, len(scores) - k)]
    return unit * np.float32((level + strength * scores.std()) / gain)


def document_needle(document: Document, layer: int, dim: int) -> Floats:
    """The same for all rooms of a document."""
    heads, weights = query(document.name, layer, dim)
    sample = noise(document.name, layer, 955, dim)
    return needle(heads, weights, index_scores(heads[None], weights[None], sample)[0], 1, STRENGTH)


def keys_of(room: Room, layer: int, dim: int) -> Floats:
    """A room's keys in one layer, ``[context, dim]``, needles and all."""
    document = room.document
    keys = noise(document.name, layer, document.shared, dim)
    keys = np.concatenate([keys, noise(room.name, layer, document.context - document.shared, dim)])
    keys[document.places()] = document_needle(document, layer, dim)
    return keys


def token_ids(room: Room) -> npt.NDArray[np.int64]:
    """The prompt that has these keys: rooms with equal first tokens have equal first keys."""
    document = room.document
    parts = [(document.name, document.shared), (room.name, document.context - document.shared)]
    return np.concatenate(
        [np.random.default_rng(seed_of(name, "tokens")).integers(0, VOCABULARY, count) for name, count in parts]
    )


# what is compared --------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """What one room's queries select, and a digest of the stored keys that they were computed from."""

    sets: tuple[Positions, ...]  # by layer, then by query, then by k in TOP_K
    digest: tuple[str, ...]  # by layer: of the keys' stored bytes in the order of the tokens


def asked_from(context: int) -> tuple[int, int]:
    """The token positions of a room's two queries: one in prefill, which must not see what comes after it, and the last."""
    return context // 2, context - 1


def selection(room: Room, planes: Sequence[IndexPlane], table: npt.NDArray[np.int64]) -> Selection:
    """Compute it from the pages."""
    sets: list[Positions] = []
    digests = []
    context = room.document.context
    for layer, plane in enumerate(planes):
        rows: Bytes = plane.rows(table, context)
        digests.append(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).data))
        heads, weights = query(room.document.name, layer, plane.form.dim)
        scores = index_scores(heads[None], weights[None], plane.form.decode(rows))[0]
        sets += [top_k(scores[: at + 1], k) for at in asked_from(context) for k in TOP_K]
    return Selection(tuple(sets), tuple(digests))


def found_needles(room: Room, selected: Selection, k: int) -> tuple[int, int]:
    """How many needles the last query selects in its top ``k``, over all layers, and how many it could."""
    places = room.document.places()
    per_layer = len(TOP_K) * 2
    at = len(TOP_K) + TOP_K.index(k)
    sets = [selected.sets[start + at] for start in range(0, len(selected.sets), per_layer)]
    return sum(int(np.isin(places, one).sum()) for one in sets), len(sets) * min(k, len(places))
