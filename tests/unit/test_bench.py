"""The measurement's arithmetic: tables that scatter, bytes that tell rooms apart, figures."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from pdxfer.bench import plain, report, run
from pdxfer.bench.case import Batch, Case, content, rooms_each
from pdxfer.bench.child import BenchError, Child
from pdxfer.bench.sidecars import Sidecars
from pdxfer.cli import cli

CASE = Case(page_bytes=4096, planes=3, pages=5, lanes=4)


def test_lanes_share_no_page_and_use_all() -> None:
    targets = np.concatenate([CASE.target_table(lane, CASE.pages) for lane in range(CASE.lanes)])
    assert sorted(targets) == list(range(CASE.target_pages))
    for number in range(7):
        sources = np.concatenate([CASE.source_table(lane, number, CASE.pages) for lane in range(CASE.lanes)])
        assert len(set(sources.tolist())) == CASE.lanes * CASE.pages
        assert sources.max() < CASE.source_pages


def test_pages_are_scattered() -> None:
    table = Case(4096, 1, 256, 2).source_table(0, 0, 256)
    assert (np.diff(table) == 1).mean() < 0.1


def test_a_room_never_has_the_bytes_of_the_room_before() -> None:
    """So a room that was not delivered cannot pass for one that was."""
    for number in range(6):
        before, after = (content(0, CASE.source_table(1, n, CASE.pages), 4096) for n in (number, number + 1))
        assert (before != after).any(axis=1).all()


def test_no_two_cells_are_alike() -> None:
    cells = [content(plane, np.arange(50), 4096) for plane in range(4)]
    rows = {row.tobytes() for plane in cells for row in plane}
    assert len(rows) == 200
    assert content(1, 7, 100).shape == (1, 100)


@pytest.mark.parametrize(("rooms", "lanes", "each"), [(1, 1, 2), (160, 80, 2), (161, 80, 3), (128, 1, 128)])
def test_every_lane_has_two_rooms_at_least(rooms: int, lanes: int, each: int) -> None:
    assert rooms_each(rooms, lanes) == each
    assert Batch("b", lanes, each, 1).rooms >= rooms


def test_rooms_are_rounded_to_whole_pages() -> None:
    (case,) = run.Options(page_bytes=(16384,), planes=32, room_bytes=(8 << 20,), concurrency=(1, 80)).cases()
    assert (case.pages, case.lanes, case.room_bytes, case.descriptors) == (16, 80, 8 << 20, 512)
    (tiny,) = run.Options(room_bytes=(1,)).cases()
    assert tiny.pages == 1


def test_figures_are_those_of_the_median_round() -> None:
    found = run.Rounds([1.0, 4.0, 2.0], [0.01] * 98 + [0.5] * 2).figures("pdxfer", 1, 10, 1_000_000_000)
    assert found.gigabytes_per_second == found.rooms_per_second == 5.0
    assert (found.p50_ms, found.rounds) == (10.0, [10.0, 2.5, 5.0])
    assert found.p99_ms > 100


def test_the_table_compares_with_both_ways_of_plain_nixl() -> None:
    figures = [
        run.Figures(way, 1, 9, rate, 2.0, 1.0, 2.0, [])
        for way, rate in zip(run.WAYS, (2.0, 4.0, 0.5, 1.0), strict=True)
    ]
    outcome = run.Outcome(16384, 32, 16, 8 << 20, figures, run.Figures("pdxfer", 1, 9, 1.0, 2.0, 1.5, 2.5, []))
    facts = run.machine("tcp") | {"nixl": "1.5.1", "slot_bytes": 2 << 20}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(run.Result({}, facts, [outcome]), console)
    text = console.export_text()
    console.file.close()
    line = next(line for line in text.splitlines() if " pdxfer " in line and "2.00" in line)
    assert line.split()[-3:] == ["4.00", "2.00", "50%"]
    assert "p50 1.50 ms" in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--page-bytes", "3x"), ("--room-bytes", "0"), ("--concurrency", "1,x"), ("--concurrency", "0")],
)
def test_wrong_options_are_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(cli, ["bench", option, value])
    assert result.exit_code == 2
    assert repr(value.split(",")[-1])[1:-1] in result.output


def _echo(pipe: object, word: str) -> None:
    pipe.send(word)  # type: ignore[attr-defined]
    raise ValueError(pipe.recv())  # type: ignore[attr-defined]


def test_a_child_answers_and_its_error_comes_here() -> None:
    child = Child("the child", _echo, "hello")
    try:
        assert child.answer(30) == "hello"
        with pytest.raises(BenchError, match=r"^the child: ValueError: wrong bytes \(at test_bench.py:\d+\);[^\n]*$"):
            child.ask("wrong bytes", 30)
        with pytest.raises(BenchError, match="the child died: exit status 1"):
            child.ask("more", 30)
        assert child.state == "the child died: exit status 1"
    finally:
        child.close()


class nixlRemoteDisconnectError(Exception):
    """As NIXL's bindings make it: of no other class."""


nixlRemoteDisconnectError.__module__ = "nixl_cu12._bindings"


def test_what_plain_nixl_raises_is_one_line_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(plain, "_agent", fail)
    arguments: list[Any] = [None] * 5
    for side in (plain.target, partial(plain.initiator, hello=plain.Hello(b"", 0))):
        with pytest.raises(
            BenchError, match=r"^NIXL raises nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT; .*--tls"
        ) as caught:
            side(*arguments)
        assert "\n" not in str(caught.value)


class Dead:
    def __init__(self, name: str) -> None:
        self.state = f"{name} died"

    def resume(self) -> None:
        """What ends in no error, as of a process that is gone."""

    def ask(self, order: object, timeout: float) -> None:
        raise BenchError("it failed")

    tell = ask


def test_a_failure_names_its_measurement_and_its_sides() -> None:
    measurement = run._Measurement(run.Options(), CASE, 0, cast(Sidecars, None), print)
    measurement.spinning = cast(Child, Dead("target")), cast(Child, Dead("initiator"))
    measurement.default = cast(Child, Dead("target with a thread")), cast(Child, Dead("initiator with a thread"))
    for way, who in (
        ("per page", "target with a thread"),
        ("per page, spinning", "target"),
        ("one descriptor", "target"),
    ):
        with pytest.raises(
            BenchError, match=rf"^plain NIXL, {way}, 4 at a time, pages of 4096 bytes.*: it failed \({who} died"
        ):
            measurement._batch(way, 4, 8, 5, run.Rounds())


def test_a_child_that_dies_is_an_error_at_once() -> None:
    child = Child("the child", _echo, "hello")
    assert child.answer(30) == "hello"
    child.close()
    with pytest.raises(BenchError, match="died"):
        child.answer(30)
