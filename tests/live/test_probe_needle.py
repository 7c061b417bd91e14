"""`pdxfer probe` between real sidecars, small: every path is identical, and a key that is changed on its way is seen."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer.probe import needle, paths

ROOT = Path(__file__).parents[2]


def pdxfer(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pdxfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, env=environment, check=False)


def test_every_path_selects_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = pdxfer(tmp_path, "probe", "needle", "--contexts", "955,2100", "--concurrency", "8", "--json", str(out))
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads(out.read_text())
    assert result["identical"] is True
    expected = {(path, dtype, c) for path in paths.PATHS for dtype in ("bf16", "fp8") for c in (8,)}
    assert {(run["path"], run["dtype"], run["concurrency"]) for run in result["runs"]} == expected
    for run in result["runs"]:
        assert (run["rooms"], run["sets"], run["differ"], run["wrong_rooms"]) == (18, 144, 0, 0)
        assert all(case["needles"]["512"][0] == case["needles"]["512"][1] > 0 for case in run["cases"])
    assert list(tmp_path.iterdir()) == [out]


async def shifted(stage: paths.Stage) -> paths.Found:
    """The transfer is right, but the prefill worker sends from other pages than those that it has filled."""
    await paths.ask(stage.prefill, "place", paths.MOVED, True)
    return await paths.transfer(stage)


def test_a_path_that_changes_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a probe that could not fail."""
    monkeypatch.setitem(paths.PATHS, "shifted", paths.Path("shifted", "poison is sent in place of keys", shifted))
    options = needle.Options(("nixl", "shifted"), ("fp32",), (700,), (1,), 16)
    result = asyncio.run(needle.run(options, lambda text: None))
    right, wrong = result.runs
    assert right.identical
    assert not wrong.identical
    assert wrong.wrong_rooms == wrong.rooms
    assert wrong.differ > 0
