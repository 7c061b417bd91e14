"""Live chaos without processes: the table of scenarios, what the judge makes of records, and the forms of a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdxfer.chaos.live import corruption, inventory, judge, show, suite
from pdxfer.chaos.live.growth import growth
from pdxfer.chaos.live.judge import Evidence
from pdxfer.chaos.live.records import NEVER, Leg, Trip, Writer, read_legs, read_trips
from pdxfer.chaos.live.scenarios import SCENARIOS, Scenario
from pdxfer.chaos.live.verdict import Result, Row, percentile
from pdxfer.chaos.live.wedge import Outcome, as_expected
from pdxfer.chaos.mutants import mirror  # noqa: F401 - it registers its bugs
from pdxfer.chaos.mutants.live import BUGS
from pdxfer.cli import cli
from pdxfer.core.reasons import ENDS, REFUSALS
from pdxfer.demo.page import Mark, Point, Timeline

ROOT = Path(__file__).parents[2]
KILL = SCENARIOS["prefill-worker-kill"]


def leg(
    room: str, opened: float, ended: float = NEVER, *, sending: bool = True, reason: str = "done", **more: object
) -> Leg:
    state = ENDS[reason].state if reason in ENDS else ""
    worker = "prefill-0" if sending else "decode-0"
    return Leg(worker, 10 + sending, room, 0, sending, opened, ended=ended, state=state, reason=reason, **more)  # type: ignore[arg-type]


def judged(scenario: Scenario = KILL, **found: object) -> Result:
    seen = Evidence(
        struck=100.0,
        ceased=100.0,
        stopped=110.0,
        now=120.0,
        home=1.0,
        probes=1,
        probe=[Trip("a", 112, 113, "done", "done")],
    )
    for name, value in found.items():
        setattr(seen, name, value)
    result = Result(scenario.name, scenario.about, 16, injected=True)
    judge.fill(result, scenario, seen)
    return result


def row(result: Result, what: str) -> Row:
    return next(r for r in result.rows if r.what.startswith(what))


# the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda s: s.name)
def test_every_scenario_has_a_control_and_keeps_its_untouched_rooms_off(scenario: Scenario) -> None:
    assert scenario.mutant in BUGS
    assert scenario.concurrency
    struck = set(scenario.nodes)
    assert not struck & {node for _, node in scenario.untouched}
    assert scenario.fault(4).rows == []
    allowed = scenario.keeps or frozenset()
    assert allowed <= ENDS.keys() | REFUSALS.keys() | {"sidecar_unavailable", "unreachable"}


@pytest.mark.parametrize("name", BUGS)
def test_a_mutant_fits_the_product(name: str) -> None:
    """What it replaces is still there: the launcher comes as far as the command line."""
    command = [sys.executable, "-m", "pdxfer.chaos.mutants", name, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"mutant {name}" in done.stderr


def test_no_mutant_is_without_a_scenario() -> None:
    experiments = {build for build in corruption.BUILDS.values() if build}
    assert {s.mutant for s in SCENARIOS.values()} | experiments == BUGS.keys()


def test_orders() -> None:
    some = [SCENARIOS["reuse"], SCENARIOS["quarantine"]]
    assert [(o.scenario.name, o.sessions) for o in suite.orders(some, (1, 80))] == [
        ("reuse", 1),
        ("reuse", 80),
        ("quarantine", 80),
    ]
    assert len(suite.orders(some, (16,), 3)) == 6
    controls = suite.orders(some, control=True)
    assert [(o.sessions, o.kind.mutant) for o in controls] == [(16, "no_tombstone"), (16, "quarantine_forgotten")]
    assert suite.orders(some, (1,))[0].kind.mutant == ""


# the judge ---------------------------------------------------------------------------------------------------------


def test_rooms_that_the_fault_has_hit() -> None:
    legs = [
        leg("before", 90, 95),
        leg("open", 99, 103, reason="worker_lost"),
        leg("through", 99, 104),
        leg("later", 101, 102),
        leg("cost", 101, 104, reason="peer_lost"),
        leg("refused", 101, 101, reason="draining"),
        leg("reuse-1", 99, 119, reason="aborted"),
    ]
    legs[-2].state = "REFUSED"
    others = [leg(x.room, x.opened - 0.5, x.opened + 0.1, sending=False) for x in legs]
    result = judged(legs=legs + others)
    found = row(result, "affected room")
    assert sorted(found.values) == [3.0, 3.0, 4.0]
    assert found.passed
    assert result.hit == 2


@pytest.mark.parametrize("sending", [True, False])
def test_a_room_that_its_other_worker_never_opened_is_the_routers(sending: bool) -> None:
    asked = leg("a", 99, 119, sending=sending, reason="aborted")
    assert not row(judged(legs=[asked]), "affected room").applies
    assert not row(judged(legs=[asked, leg("a", 98, 101, sending=not sending)]), "affected room").passed


def test_a_room_without_an_end_fails_unless_its_worker_died() -> None:
    legs = [leg("open", 99, reason=""), leg("open", 90, 99.5, sending=False)]
    assert not row(judged(legs=legs), "affected room").passed
    assert row(judged(legs=legs, exits={11: 100.5}), "affected room").values == [0.5]
    assert row(judged(legs=legs, frozen={11: 102.0}), "affected room").values == [2.0]
    assert judged(legs=legs).ends == {"NOT ENDED": 1, "done": 1}


def test_aborts_count_unless_their_own_sidecar_was_struck() -> None:
    legs = [leg(f"r{i}", 99, 101.2, reason="aborted", aborted=101.0) for i in range(30)]
    found = row(judged(legs=legs), "abort asked")
    assert found.gate and not found.passed
    assert not row(judged(legs=legs, disturbed=["prefill-0"]), "abort asked").applies
    assert not row(judged(legs=legs[:3]), "abort asked").gate


def test_rooms_that_must_not_be_lost() -> None:
    scenario = SCENARIOS["bootstrap-exception"]
    legs = [leg("a", 99, 101), leg("b", 99, 101, reason="peer_lost")]
    found = row(judged(scenario, legs=legs), "rooms lost")
    assert found.values == [1.0] and found.note == "1 peer_lost"


def test_what_must_serve_again_and_did_not() -> None:
    scenario = SCENARIOS["prefill-engine-kill"]
    assert row(judged(scenario, serving={("engine", "p"): 1.5}), "engine of p").passed
    found = row(judged(scenario, serving={("engine", "p"): None}), "engine of p")
    assert found.verdict == "NOT MEASURED" and not found.passed


def test_the_p99_is_judged_only_where_chance_does_not_explain_it() -> None:
    calm = [Trip("a", 50 + i / 10, 50.01 + i / 10 + i % 7 / 1000, "done", "done") for i in range(200)]
    same = [Trip("b", 101 + i / 100, 101.01 + i / 100 + i % 7 / 1000, "done", "done") for i in range(200)]
    slow = [Trip("c", 101 + i / 100, 101.1 + i / 100, "done", "done") for i in range(200)]
    assert row(judged(untouched=[*calm, *same]), "p99").verdict == "pass"
    assert row(judged(untouched=[*calm, *slow]), "p99").verdict == "FAIL"
    busy = row(judged(untouched=[*calm, *slow], others=(0.0, 1.0)), "p99")
    assert busy.verdict == "info" and "other processes used" in busy.note
    crowded = row(judged(untouched=[*calm, *slow], crowding=(0.1, 0.9)), "p99")
    assert crowded.verdict == "info" and "in 10% and 90% of the time some process waited" in crowded.note
    assert row(judged(untouched=[*calm, *slow], crowding=(0.1, 0.2)), "p99").verdict == "FAIL"
    busier = row(judged(untouched=[*calm, *slow], busy=(0.2, 0.6)), "p99")
    assert busier.verdict == "info" and "20% of them were busy before, 60% during" in busier.note
    assert row(judged(untouched=[*calm, *slow], busy=(0.6, 0.65)), "p99").verdict == "FAIL"
    crammed = judged(untouched=[*calm, *same], crowding=(0.9, 0.9), others=(0.0, 1.0), busy=(0.0, 1.0))
    assert row(crammed, "p99").verdict == "pass"
    lost = [*calm, Trip("d", 101, 102, "peer_lost", "done")]
    assert not row(judged(untouched=lost), "untouched rooms").passed


def test_crowding_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpu"
    monkeypatch.setattr(inventory.Crowding, "PATH", told)
    assert inventory.Crowding().share() == 0.0, "a kernel that does not tell"
    told.write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    seen = inventory.Crowding()
    told.write_text(
        "some avg10=9.00 avg60=9.00 avg300=9.00 total=9000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    assert seen.share() == 1.0
    assert seen.share() == 0.0


def test_busy_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "stat"
    monkeypatch.setattr(inventory.Busy, "PATH", told)
    told.write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3 4\n")
    seen = inventory.Busy()
    assert seen.share() == 0.0, "no tick has passed"
    told.write_text("cpu  125 0 125 740 110 0 0 0 70 0\ncpu0 1 2 3 4\n")
    assert seen.share() == pytest.approx(0.5)
    assert seen.share() == 0.0


def test_bytes_home_probe_and_defects() -> None:
    assert judged().held
    for broken in (
        {"wrong": 1},
        {"late": 1},
        {"defects": 1},
        {"dead": 1},
        {"home": None},
        {"home": 11.0},
        {"probe": []},
    ):
        assert not judged(**broken).held, broken


def test_inventories() -> None:
    result = judged()
    judge.compare({"sidecar p": {"fds": 50.0, "threads": 5.0}}, {"sidecar p": {"fds": 90.0, "threads": 5.0}}, result)
    assert not row(result, "fds").passed and row(result, "threads").passed


# results -----------------------------------------------------------------------------------------------------------


def test_percentile() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (50.0, 99.0, 7.0)


def test_a_control_passes_when_it_is_caught() -> None:
    good, bad = judged(), judged(wrong=1)
    good.mutant = bad.mutant = "original"
    assert (good.state, bad.state) == ("NOT CAUGHT", "caught")
    bad.injected = False
    assert bad.state == "FAULT NOT INJECTED" and not bad.passed
    assert Result("x", "", 1, skipped="no netem").passed


def test_records_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    writer = Writer(path)
    first = leg("a", 1.0, reason="")
    writer.write(first)
    first.ended, first.reason = 2.0, "done"
    writer.write(first)
    writer.write(leg("b", 3.0, reason=""))
    with path.open("ab") as file:
        file.write(b'{"worker": "torn')
    found = read_legs([path, tmp_path / "absent.jsonl"])
    assert [(x.room, x.ended, x.reason) for x in found] == [("a", 2.0, "done"), ("b", NEVER, "")]
    Writer(tmp_path / "t.jsonl").write(Trip("a", 1.0, 2.0, "done", "done"))
    assert read_trips(tmp_path / "t.jsonl")[0].done


def test_json_and_html(tmp_path: Path) -> None:
    result = judged(legs=[leg("a<b", 99, 101)])
    result.timeline = Timeline(
        5.0, {"p": [Point(0.0, {"send open": 2}), Point(1.0, None)]}, [Mark(1.0, True, "it <strikes>")], []
    )
    show.write_json(tmp_path / "r.json", [result])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["passed"] and found["runs"][0]["rows"][1]["what"] == "affected room terminal, each side"
    show.write_html(tmp_path / "r.html", [result, Result("x", "", 1, skipped="no netem")])
    text = (tmp_path / "r.html").read_text()
    assert "<svg" in text and "it &lt;strikes&gt;" in text and "http" not in text
    assert len(show.table([result]).rows) == 1 and len(show.verdict(result).rows) == len(result.rows)


def test_growth() -> None:
    def run(fds: float) -> Result:
        return Result("x", "", 1, inventory={"sidecar b": {"fds": (fds, fds), "rss_mib": (90.0, 90.0)}})

    assert growth([run(n) for n in (50, 52, 51, 53, 52)]) == []
    assert "fds grew from 50 to 90" in growth([run(n) for n in (50, 60, 90, 100)])[0]
    assert growth([run(50), run(500)]) == []


def test_the_wedge_is_as_expected_only_with_both_sides_of_the_story() -> None:
    before = Outcome("before", injected=True, hit=160)
    missed = Outcome("before", sessions=1, share=0.01, injected=True, answered=1.0)
    after = Outcome("after", injected=True, answered=1.0, terminal=0.1)
    assert as_expected([before, missed, after])
    assert not as_expected([before, Outcome("after", injected=True)])
    assert not as_expected([Outcome("before", injected=True, hit=1, answered=1.0), after])
    assert not as_expected([])


# the command -------------------------------------------------------------------------------------------------------


def test_the_command_lists_and_refuses() -> None:
    listed = CliRunner().invoke(cli, ["chaos", "list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in SCENARIOS)
    wrong = CliRunner().invoke(cli, ["chaos", "run", "no-such"])
    assert wrong.exit_code == 2 and "no scenario no-such" in wrong.output
    none = CliRunner().invoke(cli, ["chaos", "run"])
    assert none.exit_code == 2 and "--all" in none.output
    assert "sim" in CliRunner().invoke(cli, ["chaos", "--help"]).output
