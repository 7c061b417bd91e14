"""The result of ``pdxfer probe needle`` as a picture: what each path leaves identical, and what each format finds.

Owns: the drawing. Must not: compute figures; matplotlib is imported here alone, so that nobody else needs it.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from .needle import Result

matplotlib.use("agg")  # no screen is asked for
WIDTH = 12.0  # inches
SHADES = LinearSegmentedColormap.from_list("identical", ["#d1495b", "#f6d8a8", "#bfe3c0"])


def draw(result: Result, file: Path) -> None:
    """Write a PNG. Raises OSError."""
    runs = result.runs
    cases = [(case.context, case.copies, case.position) for case in runs[0].cases]
    figure = Figure(figsize=(WIDTH, 3.8 + 0.28 * len(runs) + 2.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=[max(2.0, 0.28 * len(runs)), 2.6])
    share = np.array(
        [[1 - max(case.differ / case.sets, case.wrong_rooms / case.rooms) for case in run.cases] for run in runs]
    )
    top.imshow(share, vmin=0.0, vmax=1.0, cmap=SHADES, aspect="auto")
    for row, column in np.ndindex(share.shape):
        case = runs[row].cases[column]
        top.text(column, row, f"{case.sets - case.differ}/{case.sets}", ha="center", va="center", fontsize=7)
    top.set_yticks(range(len(runs)), [f"{run.path}, {run.dtype}, C={run.concurrency}" for run in runs], fontsize=8)
    labels = [f"{context}, {position}, ×{copies}" for context, copies, position in cases]
    top.set_xticks(range(len(cases)), labels, fontsize=7, rotation=90)
    top.set_title(
        "top-k sets that are the same after the path as before, by context, position and number of needles", fontsize=10
    )
    groups = list(dict.fromkeys((row.context, row.k) for row in result.recall))
    formats = list(dict.fromkeys(row.dtype for row in result.recall))
    for number, dtype in enumerate(formats):
        rows = [[r for r in result.recall if (r.context, r.k) == group and r.dtype == dtype] for group in groups]
        found = [100 * sum(r.found for r in of) / sum(r.needles for r in of) for of in rows]
        at = np.arange(len(groups)) + (number - (len(formats) - 1) / 2) * 0.25
        bars = bottom.bar(at, found, 0.23, label=f"{dtype}{' (reference)' if dtype == 'fp32' else ''}")
        overlap = [100 * float(np.mean([r.overlap for r in of])) for of in rows]
        bottom.bar_label(bars, [f"{o:.1f}" for o in overlap], fontsize=7)
    bottom.set_xticks(range(len(groups)), [f"{context} tokens\ntop {k}" for context, k in groups], fontsize=8)
    bottom.set_ylim(0, 115)
    bottom.set_ylabel("% of graded needles found")
    bottom.set_title(
        "needles found by storage format, without any transfer (above a bar: % of tokens as in fp32)", fontsize=10
    )
    bottom.legend(fontsize=8, ncols=len(formats))
    figure.savefig(file, format="png", dpi=110)
