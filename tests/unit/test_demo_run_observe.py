"""What the demo reads from the sidecars and workers, and how it tells what is away from its baseline."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from pdxfer.demo.observe import (
    GatewayView,
    Snapshot,
    away,
    baseline,
    defects,
    difference,
    node_view,
    restarts,
    room_ends,
    worker_view,
)
from pdxfer.metrics import Metrics


def status(node: str, worker: str, **change: Any) -> dict[str, Any]:
    pages = change.pop("pages", {worker: {"home": 100, "read": 0, "write": 0}})
    return {
        "workers": [{"engine_id": name, "gone": False, "pages": states} for name, states in pages.items()],
        "node": node, "ready": True, "reasons": [], "incarnation": 5, "engine": {"pid": 77, "incarnation": 2},
        "services": {},
        "rooms_by_state": {"send": {"open": 0, "homing": 0}, "receive": {}}, "parked_wants": 0,
        "slots": {"send": {"free": 4}, "receive": {"free": 4, "granted": 0}},
    } | change  # fmt: skip


def stats(**change: Any) -> dict[str, Any]:
    return {"pid": 9, "pages_free": 100, "pages_total": 100, "rooms_open": 0, "wrong_bytes": 0} | change


def snapshot(
    p: dict[str, Any], d: dict[str, Any], prefill: dict[str, Any] | None, decode: dict[str, Any] | None
) -> Snapshot:
    workers = {n: worker_view(n, s) for n, s in (("prefill-0", prefill), ("decode-0", decode)) if s is not None}
    silent = {f"worker {n}": "no connection" for n, s in (("prefill-0", prefill), ("decode-0", decode)) if s is None}
    return Snapshot(0.0, {"p": node_view(p), "d": node_view(d)}, workers, GatewayView(0, {}), silent)


def test_everything_home() -> None:
    rest = snapshot(status("p", "prefill-0"), status("d", "decode-0"), stats(), stats())
    assert away(rest, baseline(rest)).text() == ""


def test_what_is_away_is_counted_once_and_named() -> None:
    base = baseline(snapshot(status("p", "prefill-0"), status("d", "decode-0"), stats(), stats()))
    p = status(
        "p", "prefill-0", rooms_by_state={"send": {"open": 2, "homing": 1}}, parked_wants=1,
        pages={"prefill-0": {"home": 90, "read": 10, "write": 0}}, slots={"send": {"free": 3}, "receive": {"free": 4}},
    )  # fmt: skip
    d = status("d", "decode-0", slots={"send": {"free": 4}, "receive": {"quarantined": 4}})
    found = away(snapshot(p, d, stats(pages_free=88, rooms_open=2), stats(pages_free=97)), base)
    assert (found.rooms, found.pages, found.slots) == (4, 12 + 3, 1 + 4)
    assert found.text() == "4 rooms live, 15 pages away, 5 slots away"


def test_who_is_silent_or_not_attached_is_not_home() -> None:
    base = baseline(snapshot(status("p", "prefill-0"), status("d", "decode-0"), stats(), stats()))
    lent = status("d", "decode-0", pages={"decode-0": {"home": 98, "write": 2}})
    found = away(snapshot(status("p", "prefill-0"), lent, stats(), None), base)
    assert found.pages == 2 and "worker decode-0: no connection" in found.text()
    gone = status("d", "decode-0", pages={}, ready=False, reasons=["engine: starting"])
    found = away(snapshot(status("p", "prefill-0"), gone, stats(), stats()), base)
    assert "worker decode-0 is attached to no sidecar" in found.text() and "engine: starting" in found.text()


def test_reads_the_real_metrics() -> None:
    metrics = Metrics("p", 1, "1.0", ["engine", "bootstrap"])
    metrics.room_closed(True, "done", 10, 0.1)
    metrics.room_closed(False, "aborted", 10, 0.1)
    metrics.room_closed(False, "aborted", 10, 0.1)
    metrics.restarts.labels("bootstrap").inc()
    metrics.core_errors.inc()
    text = generate_latest(metrics.registry).decode()
    assert defects(text) == 1
    assert room_ends(text)["send"]["done"] == 1 and room_ends(text)["receive"]["aborted"] == 2
    assert restarts(text) == {"engine": 0, "bootstrap": 1}


def test_growth_of_counters_over_a_restart() -> None:
    assert difference({"done": 5, "aborted": 1, "x": 2}, {"done": 3, "aborted": 4}) == {"done": 2, "aborted": 1, "x": 2}


def test_an_answer_of_another_shape_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(KeyError):
        worker_view("x", {"pages_free": 1})
    with pytest.raises(KeyError):
        node_view({"node": "p"})
