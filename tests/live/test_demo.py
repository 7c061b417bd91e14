"""The whole demo with the synthetic engine: real processes, real transfers, real faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdxfer.demo.processes import alive, birth

pytest.importorskip("nixl", reason="the demo moves real bytes")

KEYS = {
    "fault", "sessions", "done", "aborted", "failed", "unresolved", "recovery_seconds", "pages_leaked",
    "slots_leaked", "wrong_bytes",
}  # fmt: skip


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(
        [sys.executable, "-m", "pdxfer", "demo", "--quick", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.timeout(180)
def test_the_quick_demo_passes(tmp_path: Path) -> None:
    demo = start(
        tmp_path, "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"),
        "--rounds", "1", "--keep-logs", str(tmp_path / "logs"),
    )  # fmt: skip
    printed, _ = demo.communicate(timeout=170)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["verdict"] == "pass", printed
    assert demo.returncode == 0 and "PASS" in printed
    assert found["parity"]["identical"] == found["parity"]["prompts"] == 8
    assert len(found["rounds"]) == 5
    for item in found["rounds"]:
        assert set(item) >= KEYS and item["injected"], item
        assert item["done"] + item["aborted"] + item["failed"] == item["sessions"], item
    svg = (tmp_path / "out.html").read_text()
    assert svg.count('class="fault"') >= 5
    assert os.listdir(tmp_path / "tmp") == []
    assert (tmp_path / "logs" / "sidecar-p.log").stat().st_size


@pytest.mark.timeout(90)
@pytest.mark.parametrize("after", ["starting", "step 2"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, after: str) -> None:
    demo = start(tmp_path, "--keep-logs", str(tmp_path / "logs"))
    assert demo.stdout is not None
    for line in demo.stdout:
        if after in line:
            break
    time.sleep(0.7)  # into the middle of what was announced
    children = descendants(demo.pid)
    assert children
    demo.send_signal(signal.SIGINT)
    rest, _ = demo.communicate(timeout=40)
    assert demo.returncode == 130, rest
    assert [pid for pid, born in children.items() if alive(pid, born)] == [], rest
    assert os.listdir(tmp_path / "tmp") == []


def descendants(root: int) -> dict[int, str]:
    """Every process below this one: pid -> its birth."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(stat[1])
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        one = todo.pop()
        for pid, parent in parents.items():
            if parent == one and pid not in found:
                found[pid] = birth(pid)
                todo.append(pid)
    return found
