"""How well each storage format finds a needle, without any transfer.

Owns: needles of graded strength, and what each format selects of them. Must not: know paths or processes.

A needle that is not selected before a transfer cannot be selected after it. So this says what to expect of a format itself:
fp32 is the reference, and a needle that fp32 does not select is weaker than ``k`` other tokens: the limit of the model's own
selection. A needle that fp32 selects and another format does not is lost to rounding. Neither is a fault of a transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdxfer.pools.dsa import DTYPES, TOP_K, Dtype, Floats, IndexFormat, index_scores, top_k

from .cases import POSITIONS, Document, needle, noise, query

# How far a needle stands above the least score that is selected, in standard deviations of all scores: the weakest three
# are out of reach in fp32 already, the others are not.
STRENGTHS: Final = (-1.0, -0.1, -0.01, 0.01, 0.1, 0.3, 1.0, 3.0)
DIM: Final = 128


@dataclass
class Row:
    """One context, position, format and k."""

    context: int
    position: str
    dtype: Dtype
    k: int
    needles: int = 0
    found: int = 0
    as_fp32: int = 0  # needles with the same answer as in fp32
    overlap: float = 0.0  # of the selected tokens, the share that fp32 selects too; mean over the needles


def measure(contexts: Sequence[int], positions: Sequence[str] = POSITIONS) -> list[Row]:
    """A row for every context, position, format and k that leaves something out."""
    rows = []
    for context in contexts:
        base = noise("recall", context, context, DIM)
        rounded = {dtype: _as_stored(base, dtype) for dtype in DTYPES}
        for position in positions:
            place = int(Document(context, position, 1).places()[0])
            for k in (k for k in TOP_K if k < context):
                rows += _one(rounded, context, position, place, k)
    return rows


def _as_stored(keys: Floats, dtype: Dtype) -> Floats:
    form = IndexFormat(dtype, dim=DIM)
    return form.decode(form.encode(keys))


def _one(rounded: Mapping[Dtype, Floats], context: int, position: str, place: int, k: int) -> list[Row]:
    rows = {dtype: Row(context, position, dtype, k) for dtype in DTYPES}
    overlap = dict.fromkeys(DTYPES, 0.0)
    for number, strength in enumerate(STRENGTHS):
        heads, weights = query(f"recall-{context}-{position}-{number}", 0, DIM)
        exact = index_scores(heads[None], weights[None], rounded["fp32"])[0]
        key = needle(heads, weights, np.delete(exact, place), k, strength)[None]
        sets = {}
        for dtype in DTYPES:
            scores = exact if dtype == "fp32" else index_scores(heads[None], weights[None], rounded[dtype])[0]
            scores = scores.copy()
            scores[place] = index_scores(heads[None], weights[None], _as_stored(key, dtype))[0, 0]
            sets[dtype] = top_k(scores, k)
        for dtype, row in rows.items():
            hit = place in sets[dtype]
            row.needles += 1
            row.found += hit
            row.as_fp32 += hit == (place in sets["fp32"])
            overlap[dtype] += len(np.intersect1d(sets[dtype], sets["fp32"], assume_unique=True)) / k
    for dtype, row in rows.items():
        row.overlap = overlap[dtype] / row.needles
    return list(rows.values())
