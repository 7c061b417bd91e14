"""Metrics: every child from the start, gauges from a real node's snapshot, engine totals over restarts."""

from __future__ import annotations

import re
from pathlib import Path

from pdxfer.core.mirror import DROPS
from pdxfer.core.node import Node
from pdxfer.core.reasons import ENDS, REFUSALS
from pdxfer.metrics import Metrics

SERVICES = ("main", "engine", "bootstrap", "admin")


def status() -> dict[str, object]:
    services = {
        name: {"phase": "serving", "heartbeat_age_seconds": 0.5, "restarts": 0, "last_cause": ""} for name in SERVICES
    }
    extra = {"services": services, "ready": True, "oldest_quarantined_seconds": 0.0, "frames_dropped": 0}
    return Node("p", 5, "tcp://127.0.0.1:1", "0").snapshot() | extra


def values(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_every_child_is_there_from_the_start() -> None:
    found = values(Metrics("p", 5, "0.1", SERVICES).render(status(), 0.1))
    for side in ("send", "receive"):
        for reason in ENDS:
            assert found[f'pdxfer_room_ends_total{{reason="{reason}",side="{side}"}}'] == 0
    for origin in ("peer", "worker", "engine"):
        for reason in REFUSALS:
            assert found[f'pdxfer_frames_refused_total{{origin="{origin}",reason="{reason}"}}'] == 0
    for service in SERVICES:
        assert found[f'pdxfer_restarts_total{{service="{service}"}}'] == 0
    assert found['pdxfer_rooms{side="send",state="open"}'] == 0
    assert found['pdxfer_rooms{side="receive",state="homing"}'] == 0
    assert found['pdxfer_slots{kind="receive",state="quarantined"}'] == 0
    assert found['pdxfer_peers{state="lost"}'] == 0
    assert found['pdxfer_room_seconds_count{outcome="FAILED",side="receive"}'] == 0
    assert found["pdxfer_ready"] == 1
    assert found["pdxfer_core_errors_total"] == 0
    assert "process_resident_memory_bytes" in found
    assert any(re.match(r"pdxfer_build_info\{.*version=\"0\.1\"", name) for name in found)


def test_what_happened_is_counted() -> None:
    metrics = Metrics("p", 5, "0.1", SERVICES)
    metrics.room_closed(True, "done", 1000, 0.02)
    metrics.room_closed(False, "peer_lost", 10, 5.0)
    metrics.refuse("peer", "bad_frame")
    found = values(metrics.render(status(), 0.1))
    assert found['pdxfer_room_ends_total{reason="done",side="send"}'] == 1
    assert found['pdxfer_payload_bytes_total{side="send"}'] == 1000
    assert found['pdxfer_room_seconds_count{outcome="FAILED",side="receive"}'] == 1
    assert found['pdxfer_frames_refused_total{origin="peer",reason="bad_frame"}'] == 1


def test_engine_counters_grow_over_restarts() -> None:
    metrics = Metrics("p", 5, "0.1", SERVICES)
    metrics.engine.update({"bytes_sent": 10.0})
    metrics.engine.engine_gone()
    metrics.engine.update({"bytes_sent": 3.0})
    assert values(metrics.render(status(), 0.1))["pdxfer_engine_bytes_sent_total"] == 13


def test_without_a_status_it_is_not_ready_and_the_main_loops_age_tells() -> None:
    metrics = Metrics("p", 5, "0.1", SERVICES)
    metrics.render(status(), 0.1)
    found = values(metrics.render(None, 42.0))
    assert found["pdxfer_ready"] == 0
    assert found['pdxfer_heartbeat_age_seconds{service="main"}'] == 42


def test_the_alert_rules_name_metrics_that_exist() -> None:
    rules = (Path(__file__).parents[2] / "deploy" / "alerts.yaml").read_text()
    names = set(re.findall(r"\b(pdxfer_\w+?)(?=[\[{\s)])", rules))
    found = {name.partition("{")[0] for name in values(Metrics("p", 5, "0.1", SERVICES).render(status(), 0.1))}
    assert names
    assert names <= found
    reasons = set(re.findall(r"reason(?:!~|=~|=)\"([\w|]+)\"", rules))
    assert {name for group in reasons for name in group.split("|")} <= ENDS.keys() | REFUSALS.keys() | set(DROPS)
