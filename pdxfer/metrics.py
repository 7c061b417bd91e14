"""Prometheus metrics: every family, every label child from the start.

Owns: a registry of its own and the mapping from a daemon's status to gauges. Must not: decide anything, or hold state
that anyone but a scraper reads.

Counters are moved when something happens, in the main loop; gauges are set from a status snapshot just before a scrape.
prometheus_client's metrics are thread-safe; ``render`` holds a lock so that two scrapes do not see half a snapshot.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from .core.ledger import PAGE_STATES
from .core.mirror import DROPS, ENTRY_STATES
from .core.reasons import ENDS, REFUSALS
from .core.snapshot import PEER_STATES, RECV_SLOT_STATES, RECV_STATES, SEND_SLOT_STATES, SEND_STATES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ROOM_STATES = {"send": SEND_STATES, "receive": RECV_STATES}
SLOT_STATES = {"send": SEND_SLOT_STATES, "receive": RECV_SLOT_STATES}
ORIGINS = ("peer", "worker", "engine")
OUTCOMES = ("DONE", "ABORTED", "FAILED")
MIRROR_KINDS = ("store", "load")
MIRROR_BLOCKS = ("asked", "found", "stored", "loaded")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


disable_created_metrics()  # type: ignore[no-untyped-call]  # one series more for each counter, and of no use: process_start_time_seconds tells


def side(sending: bool) -> str:
    return "send" if sending else "receive"


class EngineCounters(Collector):
    """The engine's own totals as counters that go on growing when an engine is replaced."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}  # of engines that are gone
        self._now: dict[str, float] = {}
        self._lock = threading.Lock()

    def update(self, values: Mapping[str, float]) -> None:
        with self._lock:
            self._now = dict(values)

    def engine_gone(self) -> None:
        with self._lock:
            for name, value in self._now.items():
                self._before[name] = self._before.get(name, 0.0) + value
            self._now = {}

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            names = sorted(self._before.keys() | self._now.keys())
            totals = {name: self._before.get(name, 0.0) + self._now.get(name, 0.0) for name in names}
        for name, value in totals.items():
            plain = "".join(c if c.isalnum() else "_" for c in name).removesuffix("_total")
            yield CounterMetricFamily(f"pdxfer_engine_{plain}", f"The engines' {name.replace('_', ' ')}.", value=value)


class Metrics:
    """All families of one daemon."""

    def __init__(self, node: str, incarnation: int, release: str, services: Iterable[str]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._lock = threading.Lock()
        services = tuple(services)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"pdxfer_{name}", what, labels, registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"pdxfer_{name}", what, labels, registry=self.registry)

        self.rooms = gauge("rooms", "Rooms by side and state.", "side", "state")
        self.oldest_room = gauge("oldest_room_age_seconds", "Age of the oldest room that has not come home.", "side")
        self.pages = gauge("pages", "Pages of a worker's pools by state.", "worker", "state")
        self.slots = gauge("slots", "Staging slots of the engine by state.", "kind", "state")
        self.oldest_quarantine = gauge(
            "oldest_quarantined_slot_seconds",
            "Age of the oldest slot whose writer is not known to be finished or dead.",
        )
        self.heartbeat_age = gauge("heartbeat_age_seconds", "Time since the service's last progress.", "service")
        self.service_up = gauge("service_up", "1 while the service serves.", "service")
        self.peers = gauge("peers", "Peer nodes by state of their session.", "state")
        self.workers = gauge("workers", "Attached workers.")
        self.parked = gauge("parked_wants", "Wants for rooms that are not open yet.")
        self.jobs = gauge("engine_jobs", "Copies that the engine has not answered.")
        self.tombstones = gauge("tombstones", "Ends of rooms that are remembered.")
        self.is_ready = gauge("ready", "1 while /readyz answers 200.")
        self.is_draining = gauge("draining", "1 after SIGTERM.")
        self.mirror_bytes = gauge("mirror_bytes", "Memory of the host mirror.")
        self.mirror_entries = gauge("mirror_entries", "Entries of the host mirror by state.", "state")
        self.mirror_leases = gauge("mirror_leases", "Lookups that hold entries.")
        self.mirror_operations = gauge("mirror_operations", "Stores and loads that have not ended.")
        self.build = gauge("build_info", "Always 1.", "version", "python", "node")
        self.incarnation = gauge("incarnation", "The node's incarnation (nanoseconds since 1970 at its start).")

        self.room_ends = counter("room_ends", "Rooms that ended, by reason.", "side", "reason")
        self.refused = counter("frames_refused", "Frames and messages that were refused.", "origin", "reason")
        self.dropped = counter(
            "frames_dropped", "Frames that a peer was too slow or too dead for; they are said again."
        )
        self._dropped_before = 0
        self.restarts = counter("restarts", "Services that were restarted.", "service")
        self.payload = counter("payload_bytes", "Payload bytes of rooms that ended.", "side")
        self.core_errors = counter("core_errors", "Events that the core raised on: defects.")
        self.engine_kills = counter("engine_kills", "Engines that the core killed as a fence.")
        self.registry_errors = counter("registry_errors", "Questions to the registry that it did not answer.")
        self.mirror_lookups = counter("mirror_lookups", "Lookups in the host mirror.")
        self.mirror_blocks = counter("mirror_blocks", "Blocks that were asked for, found, stored and loaded.", "what")
        self.mirror_moved = counter("mirror_payload_bytes", "Bytes copied into and out of the host mirror.", "kind")
        self.mirror_drops = counter("mirror_dropped_blocks", "Blocks that are found no more, by reason.", "reason")
        self.mirror_ends = counter("mirror_ends", "Stores and loads that ended, by reason.", "kind", "reason")
        self._mirror_before: dict[tuple[str, ...], float] = {}
        self.room_seconds = Histogram(
            "pdxfer_room_seconds", "Seconds from a room's opening to its end.", ("side", "outcome"),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.engine = EngineCounters()
        self.registry.register(self.engine)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

        for one_side, states in ROOM_STATES.items():
            self.oldest_room.labels(one_side)
            self.payload.labels(one_side)
            for state in states:
                self.rooms.labels(one_side, state)
            for reason in ENDS:
                self.room_ends.labels(one_side, reason)
            for outcome in OUTCOMES:
                self.room_seconds.labels(one_side, outcome)
        for kind, slot_states in SLOT_STATES.items():
            for state in slot_states:
                self.slots.labels(kind, state)
        for state in ENTRY_STATES:
            self.mirror_entries.labels(state)
        for what in MIRROR_BLOCKS:
            self.mirror_blocks.labels(what)
        for why in DROPS:
            self.mirror_drops.labels(why)
        for kind in MIRROR_KINDS:
            self.mirror_moved.labels(kind)
            for reason in ENDS:
                self.mirror_ends.labels(kind, reason)
        for origin in ORIGINS:
            for reason in REFUSALS:
                self.refused.labels(origin, reason)
        for service in services:
            self.restarts.labels(service)
            self.heartbeat_age.labels(service)
            self.service_up.labels(service)
        for state in PEER_STATES:
            self.peers.labels(state)
        self.build.labels(release, platform.python_version(), node).set(1)
        self.incarnation.set(incarnation)

    # what happened -------------------------------------------------------------------------------------------------

    def room_closed(self, sending: bool, reason: str, bytes: int, age: float) -> None:
        self.room_ends.labels(side(sending), reason).inc()
        self.payload.labels(side(sending)).inc(bytes)
        end = ENDS.get(reason)
        self.room_seconds.labels(side(sending), end.state if end else "FAILED").observe(age)

    def refuse(self, origin: str, code: str, count: int = 1) -> None:
        self.refused.labels(origin, code).inc(count)

    # what is -------------------------------------------------------------------------------------------------------

    def render(self, status: Mapping[str, Any] | None, main_age: float) -> bytes:
        """The text of a scrape, with the gauges set from the daemon's status.

        Without a status, since the main loop hangs, the gauges keep their last values; its heartbeat's age tells.
        """
        with self._lock:
            if status is not None:
                self._update(status)
            else:
                self.is_ready.set(0)
            self.heartbeat_age.labels("main").set(main_age)
            return generate_latest(self.registry)

    def _update(self, status: Mapping[str, Any]) -> None:
        for one_side, states in ROOM_STATES.items():
            for state in states:
                self.rooms.labels(one_side, state).set(status["rooms_by_state"][one_side][state])
            self.oldest_room.labels(one_side).set(status["oldest_room_seconds"][one_side])
        self.pages.clear()  # workers come and go
        for worker in status["workers"]:
            for state in PAGE_STATES:
                self.pages.labels(worker["engine_id"], state).set(worker["pages"].get(state, 0))
        for kind, slot_states in SLOT_STATES.items():
            for slot_state in slot_states:
                self.slots.labels(kind, slot_state).set(status["slots"][kind][slot_state])
        self.oldest_quarantine.set(status["oldest_quarantined_seconds"])
        for name, service in status["services"].items():
            self.heartbeat_age.labels(name).set(service["heartbeat_age_seconds"])
            self.service_up.labels(name).set(service["phase"] == "serving")
        peers = [peer["state"] for peer in status["peers"]]
        for state in PEER_STATES:
            self.peers.labels(state).set(peers.count(state))
        self.workers.set(len(status["workers"]))
        self.parked.set(status["parked_wants"])
        self.tombstones.set(status["tombstones"])
        self.jobs.set(status["jobs"])
        self._update_mirror(status["mirror"])
        self.dropped.inc(max(status["frames_dropped"] - self._dropped_before, 0))
        self._dropped_before = status["frames_dropped"]
        self.is_ready.set(status["ready"])
        self.is_draining.set(status["draining"])

    def _update_mirror(self, mirror: Mapping[str, Any]) -> None:
        self.mirror_bytes.set(mirror["bytes"])
        self.mirror_leases.set(mirror["leases"])
        self.mirror_operations.set(mirror["operations"])
        for state in ENTRY_STATES:
            self.mirror_entries.labels(state).set(mirror["entries"][state])
        totals = mirror["totals"]
        self._grow(self.mirror_lookups, ("lookups",), totals["lookups"])
        for what in MIRROR_BLOCKS:
            self._grow(self.mirror_blocks.labels(what), ("blocks", what), totals[f"blocks_{what}"])
        for why in DROPS:
            self._grow(self.mirror_drops.labels(why), ("drops", why), mirror["dropped"][why])
        for kind, past in zip(MIRROR_KINDS, ("stored", "loaded"), strict=True):
            self._grow(self.mirror_moved.labels(kind), ("bytes", kind), totals[f"bytes_{past}"])
            for reason, n in mirror["ends"][kind].items():
                self._grow(self.mirror_ends.labels(kind, reason), ("ends", kind, reason), n)

    def _grow(self, counter: Counter, key: tuple[str, ...], total: float) -> None:
        """Move a counter to a total that the core counts."""
        counter.inc(max(total - self._mirror_before.get(key, 0.0), 0.0))
        self._mirror_before[key] = total
