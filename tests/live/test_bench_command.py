"""`pdxfer bench`, small: it runs from end to end, compares bytes, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bench(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "pdxfer", "bench", "--page-bytes", "4K", "--planes", "4", "--room-bytes", "128K", "--rooms", "6",
        "--rounds", "1", "--concurrency", "1,3", "--json", str(out),
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    (outcome,) = json.loads(out.read_text())["outcomes"]
    assert (outcome["page_bytes"], outcome["planes"], outcome["pages"]) == (4096, 4, 8)
    assert [(f["concurrency"], f["way"]) for f in outcome["figures"]] == [
        (c, way) for way in ("pdxfer", "one descriptor", "per page", "per page, spinning") for c in (1, 3)
    ]
    assert all(f["gigabytes_per_second"] > 0 and 0 < f["p50_ms"] <= f["p99_ms"] for f in outcome["figures"])
    assert outcome["one_page"]["rooms"] == 200
    assert outcome["rooms_checked_whole"] == 2 * (1 + 3) + 1
    assert outcome["cells_checked"] > outcome["rooms_checked_whole"] * 4
    assert "none wrong" in found.stdout
    assert list(tmp_path.iterdir()) == [out]


def test_bench_mirror(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "pdxfer", "bench", "mirror", "--page-bytes", "4K", "--planes", "4", "--operation-bytes", "64K", "--operations", "6",
        "--rounds", "1", "--concurrency", "1,3", "--entries", "5000", "--json", str(out),
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(out.read_text())
    (outcome,) = result["outcomes"]
    assert (outcome["entry_bytes"], outcome["blocks"], outcome["blocks_checked"]) == (4 * 4096, 4, 4 * (1 + 3))
    assert [(f["concurrency"], f["way"]) for f in outcome["figures"]] == [
        (c, way) for c in (1, 3) for way in ("store", "load", "memcpy")
    ]
    assert all(f["gigabytes_per_second"] > 0 and 0 < f["p50_ms"] <= f["p99_ms"] for f in outcome["figures"])
    assert result["lookup"]["blocks"] == 2048 and result["lookup"]["p50_ms"] > 0
    assert result["index"]["bytes_per_entry"] > 0
    assert "none wrong" in found.stdout
    assert list(tmp_path.iterdir()) == [out]
