"""The original corruption of index keys: each of its causes shows against the mutant that has it, and never against pdxfer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_before_is_wrong_and_after_never_is(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "pdxfer", "chaos", "corruption", "--concurrency", "1,60", "--requests", "200", "--dtype", "bf16",
        "--json", str(out),
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    outcomes = json.loads(out.read_text())["outcomes"]
    assert [(o["build"], o["concurrency"], o["requests"]) for o in outcomes] == [
        (build, n, 200) for build in ("off", "sized for fp8", "no ledger", "after") for n in (1, 60)
    ]

    def count(build: str, what: str) -> int:
        return sum(o[what] for o in outcomes if o["build"] == build)

    for build in ("off", "after"):
        assert count(build, "wrong_bytes") == count(build, "wrong_top") == 0
    assert count("after", "reused") > 1000 and count("off", "reused") == 0
    assert count("after", "noticed") == 0
    for build in ("sized for fp8", "no ledger"):
        assert count(build, "wrong_bytes") and count(build, "wrong_top"), build
