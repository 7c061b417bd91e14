"""Sparse attention's index keys: how they lie in pages, the lightning indexer over them, and the top-k that it selects.

Owns: the three storage formats of index-K, reading and writing them page by page, the reference scores and a top-k that
ties cannot make ambiguous. Must not: allocate memory, move pages between pools, or import torch: numpy alone, so that a
sidecar's host and a test compute the same.

The indexer is that of DeepSeek V3.2 (arXiv:2512.02556, section 2.1): for a query token with ``H`` heads,

    score[t] = Σ_h weight[h] · relu(query[h] · key[t])        for every t up to the query's own position

and attention sees only the ``k`` tokens with the highest scores. ``weight`` holds whatever the model folds into it (its
own factor, H^-½, D^-½). Keys are widened to fp32 whatever they are stored as, and everything is accumulated in fp32.

Storage, per page of ``page_tokens`` tokens in one plane:

    fp32, bf16    [page_tokens, dim], row after row
    fp8           planar: [page_tokens, dim] e4m3 keys first, then [page_tokens] fp32 scales; key = code × scale.
                  With 64 tokens and 128 dimensions 8192 + 256 bytes, as FlashMLA's and vLLM's index cache has it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from .layout import PoolLayout

Dtype = Literal["fp8", "bf16", "fp32"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)
TOP_K: Final = (512, 2048)  # what the models that are known select: DeepSeek V4, DeepSeek V3.2
E4M3_MAX: Final = 448.0
SMALLEST_AMAX: Final = 1e-4  # below it a key's scale stops shrinking, so that it stays a normal fp32
BLOCK: Final = 8192  # tokens that are scored at a time: bounds the memory of the products

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int32]
Table = npt.NDArray[np.integer[Any]]


def _e4m3_values() -> Floats:
    """The number of each code, by the OCP 8-bit floating point specification: e4m3 without infinities, 0x7f is NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    number = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    number = np.where(codes & 0x7F == 0x7F, np.nan, number)
    return np.where(codes & 0x80, -number, number).astype(np.float32)


_E4M3: Final = _e4m3_values()


def to_e4m3(numbers: Floats) -> Bytes:
    """Each number as the nearest e4m3 code, ties to even; beyond ±448 the largest, NaN stays NaN."""
    size = np.minimum(np.abs(numbers), np.float32(E4M3_MAX))
    bits = size.view(np.uint32)
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20).astype(np.int32) - (120 << 3)  # 3 bits of mantissa, bias 127 → 7
    code = np.where(size < 2.0**-6, np.rint(size * np.float32(2.0**9)), normal)
    code = np.where(np.isnan(numbers), 0x7F, code) + np.where(np.signbit(numbers), 0x80, 0)
    return code.astype(np.uint8)


def from_e4m3(codes: Bytes) -> Floats:
    return _E4M3[codes]


def to_bf16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Each number rounded once to bf16, ties to even, as its bits; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class IndexFormat:
    """How index keys are stored. ``dim`` is a key's length, ``page_tokens`` the tokens of a page."""

    dtype: Dtype
    page_tokens: int = 64
    dim: int = 128

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"index-K dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.page_tokens < 1 or self.dim < 4 or self.dim % 4:
            raise ValueError(
                f"index-K pages of {self.page_tokens} tokens with keys of {self.dim}: expected at least one token and a"
                " positive multiple of 4"
            )

    @property
    def key_bytes(self) -> int:
        """Of one key without its scale."""
        return self.dim * {"fp8": 1, "bf16": 2, "fp32": 4}[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Of one key with its scale: 132, 256 and 512 for 128 dimensions."""
        return self.key_bytes + (4 if self.dtype == "fp8" else 0)

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.token_bytes

    def layout(self, layers: int, name: str = "index_k") -> PoolLayout:
        """The pool's layout. A planar page is bytes to everybody who only moves it."""
        if self.dtype == "fp8":
            row = f"planar:{self.dim}xfloat8_e4m3fn+1xfloat32"
            return PoolLayout(name, "uint8", (self.page_bytes,), self.page_tokens, layers, row=row)
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[self.dtype]
        return PoolLayout(name, dtype, (self.page_tokens, self.dim), self.page_tokens, layers)

    def encode(self, keys: Floats) -> Bytes:
        """Keys ``[tokens, dim]`` as stored rows ``[tokens, token_bytes]``, each key followed by its scale if it has one."""
        if keys.ndim != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys of shape {keys.shape}, expected [tokens, {self.dim}]")
        keys = np.ascontiguousarray(keys, np.float32)
        if self.dtype == "fp32":
            return keys.view(np.uint8)
        if self.dtype == "bf16":
            return to_bf16(keys).view(np.uint8)
        amax = np.maximum(np.abs(keys).max(axis=1), np.float32(SMALLEST_AMAX))
        scale = (amax / np.float32(E4M3_MAX)).astype(np.float32)
        return np.concatenate([to_e4m3(keys / scale[:, None]), scale[:, None].view(np.uint8)], axis=1)

    def decode(self, rows: Bytes) -> Floats:
        """Stored rows ``[tokens, token_bytes]`` as fp32 keys ``[tokens, dim]``; the product with the scale is rounded once."""
        if self.dtype == "fp32":
            return rows.view(np.float32)
        if self.dtype == "bf16":
            return from_bf16(rows.view(np.uint16))
        scale = np.ascontiguousarray(rows[:, self.dim :]).view(np.float32)
        found: Floats = from_e4m3(rows[:, : self.dim]) * scale
        return found


class IndexPlane:
    """The index keys of one layer: ``pages`` is the plane's memory, ``[num_pages, page_bytes]`` bytes (SharedPool.pages)."""

    def __init__(self, pages: Bytes, form: IndexFormat) -> None:
        if pages.ndim != 2 or pages.shape[1] != form.page_bytes:
            raise ValueError(
                f"a plane of shape {pages.shape}, expected [pages, {form.page_bytes}] for {form.dtype} index keys"
                f" ({form.page_tokens} tokens of {form.token_bytes} bytes)"
            )
        self.pages = pages
        self.form = form

    def write(self, table: Table, first: int, keys: Floats) -> None:
        """Store keys of tokens ``first …`` of the sequence whose pages are ``table``, in the order of its tokens."""
        self.write_rows(table, first, self.form.encode(keys))

    def read(self, table: Table, tokens: int) -> Floats:
        """The first ``tokens`` keys of a sequence, in fp32."""
        return self.form.decode(self.rows(table, tokens))

    def write_rows(self, table: Table, first: int, rows: Bytes) -> None:
        """``write`` for rows that are encoded already."""
        form = self.form
        end = first + len(rows)
        self._check(table, end)
        for place in range(first // form.page_tokens, -(-end // form.page_tokens)):
            low, high = max(first, place * form.page_tokens), min(end, (place + 1) * form.page_tokens)
            at, until = low - place * form.page_tokens, high - place * form.page_tokens
            page, part = self.pages[table[place]], rows[low - first : high - first]
            page[at * form.key_bytes : until * form.key_bytes] = part[:, : form.key_bytes].ravel()
            if form.dtype == "fp8":
                scales = form.page_tokens * form.key_bytes
                page[scales + 4 * at : scales + 4 * until] = part[:, form.key_bytes :].ravel()

    def rows(self, table: Table, tokens: int) -> Bytes:
        """The stored bytes of the first ``tokens`` keys, ``[tokens, token_bytes]``: the same whatever the page size is."""
        form = self.form
        self._check(table, tokens)
        pages = self.pages[np.asarray(table[: -(-tokens // form.page_tokens)], np.intp)]
        split = form.page_tokens * form.key_bytes
        keys = pages[:, :split].reshape(-1, form.key_bytes)[:tokens]
        if form.dtype != "fp8":
            return np.ascontiguousarray(keys)
        return np.concatenate([keys, pages[:, split:].reshape(-1, 4)[:tokens]], axis=1)

    def _check(self, table: Table, tokens: int) -> None:
        needed = -(-tokens // self.form.page_tokens)
        if tokens < 0 or needed > len(table):
            raise ValueError(
                f"{tokens} tokens need {needed} pages of {self.form.page_tokens}, the table has {len(table)}"
            )
        used = np.asarray(table[:needed])
        if used.size and (int(used.min()) < 0 or int(used.max()) >= len(self.pages)):
            raise ValueError(
                f"page {int(used.max())} (least {int(used.min())}), the plane has 0 … {len(self.pages) - 1}"
            )


def index_scores(queries: Floats, weights: Floats, keys: Floats) -> Floats:
    """Scores ``[queries, tokens]`` of queries ``[queries, heads, dim]`` with ``weights`` ``[queries, heads]`` and keys
    ``[tokens, dim]``: Σ_h weight[h] · relu(query[h] · key), in fp32 throughout.

    Equal inputs have equal scores, bit for bit: tokens are scored in blocks that do not depend on how many there are.
    """
    if queries.ndim != 3 or weights.shape != queries.shape[:2] or keys.ndim != 2 or keys.shape[1] != queries.shape[2]:
        raise ValueError(
            f"queries {queries.shape}, weights {weights.shape}, keys {keys.shape}: expected [queries, heads, dim],"
            " [queries, heads] and [tokens, dim]"
        )
    queries, weights = np.asarray(queries, np.float32), np.asarray(weights, np.float32)
    found = np.empty((len(queries), len(keys)), np.float32)
    for start in range(0, len(keys), BLOCK):
        block = np.asarray(keys[start : start + BLOCK], np.float32).T
        for number, (query, weight) in enumerate(zip(queries, weights, strict=True)):
            products = query @ block
            np.maximum(products, 0, out=products)
            found[number, start : start + BLOCK] = weight @ products
    return found


def top_k(scores: Floats, k: int) -> Positions:
    """The positions of the ``k`` highest of ``scores`` ``[tokens]``, ascending; all of them when there are no more.

    Among equal scores the lowest position wins, so a set has one answer. NaN is below everything.
    """
    if scores.ndim != 1 or k < 1:
        raise ValueError(f"scores of shape {scores.shape} and k {k}: expected [tokens] and at least 1")
    if k >= len(scores):
        return np.arange(len(scores), dtype=np.int32)
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    level = np.partition(ranked, len(ranked) - k)[len(ranked) - k]
    above = np.flatnonzero(ranked > level)
    equal = np.flatnonzero(ranked == level)[: k - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int32)


def select(queries: Floats, weights: Floats, keys: Floats, positions: Table, k: int) -> list[Positions]:
    """What each query attends to: the top ``k`` of the tokens up to its own position (causal), as ``top_k`` has it."""
    if len(positions) != len(queries) or (len(positions) and not 0 <= min(positions) <= max(positions) < len(keys)):
        raise ValueError(
            f"positions {positions}: expected one of 0 … {len(keys) - 1} for each of {len(queries)} queries"
        )
    scores = index_scores(queries, weights, keys)
    return [top_k(row[: int(at) + 1], k) for row, at in zip(scores, positions, strict=True)]
