"""``pdxfer chaos sim`` and ``pdxfer chaos replay``: what they print, and what they say to a wrong argument."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdxfer.chaos.mutants.sim import MUTANTS
from pdxfer.chaos.sim import many, run
from pdxfer.cli import cli

ROOT = Path(__file__).parents[2]


def pdxfer(*args: str) -> Result:
    return CliRunner().invoke(cli, ["chaos", *args])


def test_one_line_and_json(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    result = pdxfer("sim", "--seeds", "5", "--start", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("5 seeds from 3: 5 held, 0 failed;")
    assert len(result.stdout.splitlines()) == 1
    found = json.loads(file.read_text())
    assert found["sum"]["seeds"] == 5
    assert found["sum"]["ends"]["done"] > 0
    assert found["replay"] == []


def test_several_processes_make_the_same_runs() -> None:
    one, two = many.Sum(), many.Sum()
    for part in many.sweep(0, 60):
        one.add(part)
    for part in many.sweep(0, 60, jobs=2):
        two.add(part)
    assert (one.steps, one.ends, one.struck) == (two.steps, two.ends, two.struck)


def test_a_failing_seed_prints_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with MUTANTS["no_tombstone"].in_force():
        seed = many.hunt(most=50).seed
        result = pdxfer("sim", "--seeds", "1", "--start", str(seed))
        assert result.exit_code == 1
        command = next(line for line in result.stdout.splitlines() if line.startswith("  pdxfer chaos replay"))
        again = pdxfer(*command.split()[2:])
        assert again.exit_code == 1
    assert pdxfer(*command.split()[2:]).exit_code == 0  # without the bug


def test_a_fault_that_does_not_matter_is_left_out() -> None:
    mutant = MUTANTS["abort_of_a_worker_unhandled"].in_force
    seed = many.hunt(mutant, most=100).seed
    only = run.shrink(seed, mutant=mutant)
    assert not run.run(seed, only=only, mutant=mutant).ok
    for one in only:
        assert run.run(seed, only=[i for i in only if i != one], mutant=mutant).ok


def test_the_timeline() -> None:
    seed = next(s for s in range(50) if run.drawn(s))
    result = pdxfer("replay", str(seed), "--only", "0", "--room", "room-0")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-1] == f"seed {seed}: every invariant held"
    assert any("room-0" in line for line in lines)
    assert not any("room-1/" in line and "room-0" not in line for line in lines)


def test_mutants_as_a_table() -> None:
    result = pdxfer("sim", "--seeds", "5", "--mutants", "end_reported_twice")
    assert result.exit_code == 0, result.output
    assert "| `end_reported_twice` |" in result.output
    assert "1 mutants: 1 caught" in result.output


def test_many_nodes() -> None:
    result = run.run(1, nodes=20)
    assert result.ok, result.violation
    assert result.ends["done"] > 20


@pytest.mark.parametrize(
    "args",
    [
        ("sim", "no_tombstone"),
        ("sim", "--mutants", "none_such"),
        ("sim", "--mutants", "--nodes", "3"),
        ("sim", "--seeds", "0"),
        ("sim", "--json", "/nowhere/at/all.json"),
        ("replay",),
        ("replay", "x"),
        ("replay", "1", "--only", "99"),
        ("replay", "1", "--only", "a"),
        ("replay", "1", "--mutant", "none_such"),
    ],
)
def test_wrong_arguments(args: tuple[str, ...]) -> None:
    result = pdxfer(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


def test_it_needs_little() -> None:
    """A machine for many seeds has neither zmq nor NIXL, and no metrics."""
    code = (
        "import sys\n"
        "for name in ('zmq', 'nixl', 'nixl_cu12', 'prometheus_client', 'torch', 'httpx'): sys.modules[name] = None\n"
        "sys.argv = ['pdxfer', 'chaos', 'sim', '--seeds', '2', '--jobs', '2']\n"
        "from pdxfer.cli import main\n"
        "main()\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    assert "2 held" in found.stdout
