"""What the demo sees of the running system: the sidecars' /status and /metrics, the workers' /stats, over time.

Owns: asking, the shapes of the answers, the baseline and what is away from it, and the history for the timeline.
Must not: change anything in what it looks at, or judge; ``checks`` and ``faults`` do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ASK_TIMEOUT = 3.0  # seconds for one answer
SAMPLE_INTERVAL = 0.25


@dataclass(frozen=True)
class NodeView:
    """One sidecar, from /status."""

    node: str
    at: float  # time.monotonic
    ready: bool
    unready: str  # why not
    incarnation: int
    engine_pid: int
    engine_incarnation: int  # 0 while there is none
    rooms: Mapping[str, int]  # "send open" -> how many, without zeros
    parked: int
    pages: Mapping[str, Mapping[str, int]]  # worker -> home, read, write
    slots: Mapping[str, Mapping[str, int]]  # send, receive -> by state
    restarts: Mapping[str, int]  # by service

    @property
    def live(self) -> int:
        return sum(self.rooms.values())


@dataclass(frozen=True)
class WorkerView:
    """One worker, from /stats."""

    worker: str
    at: float
    pid: int
    pages_free: int
    pages_total: int
    rooms_open: int
    wrong_bytes: int
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class GatewayView:
    """The gateway, from its /stats."""

    active: int  # requests under way
    ended: Mapping[str, int]  # by reason


@dataclass(frozen=True)
class Snapshot:
    """Everything at about one time. What did not answer is absent and named in ``silent``."""

    at: float
    nodes: Mapping[str, NodeView]
    workers: Mapping[str, WorkerView]
    gateway: GatewayView | None
    silent: Mapping[str, str]  # name -> why


@dataclass(frozen=True)
class Baseline:
    """How much is free when nothing is under way."""

    pages: Mapping[str, int]  # free pages by worker
    slots: Mapping[str, int]  # free slots by "node kind"


@dataclass(frozen=True)
class Away:
    """What is not at its baseline."""

    rooms: int  # live or coming home, by the sidecars', the workers' or the gateway's count, whichever is most
    pages: int
    slots: int
    unknown: tuple[str, ...]  # who did not answer, is not ready, or has not attached

    def text(self) -> str:
        """ "" when everything is home."""
        parts = [
            f"{n} {what}"
            for n, what in ((self.rooms, "rooms live"), (self.pages, "pages away"), (self.slots, "slots away"))
            if n
        ]
        return ", ".join([*parts, *self.unknown])


def node_view(status: Mapping[str, Any]) -> NodeView:
    """A sidecar's /status as a view. Raises KeyError or TypeError when it has another shape."""
    engine = status.get("engine") or {}
    rooms = {
        f"{side} {state}": n for side, states in status["rooms_by_state"].items() for state, n in states.items() if n
    }
    return NodeView(
        node=status["node"],
        at=time.monotonic(),
        ready=bool(status["ready"]),
        unready="; ".join(map(str, status.get("reasons") or ())),
        incarnation=int(status["incarnation"]),
        engine_pid=int(engine.get("pid") or 0),
        engine_incarnation=int(engine.get("incarnation") or 0),
        rooms=rooms,
        parked=int(status["parked_wants"]),
        pages={worker["engine_id"]: worker["pages"] for worker in status["workers"] if not worker["gone"]},
        slots=status["slots"],
        restarts={name: int(service["restarts"]) for name, service in status["services"].items()},
    )


def worker_view(worker: str, stats: Mapping[str, Any]) -> WorkerView:
    """A worker's /stats as a view. Raises KeyError or TypeError when it has another shape."""
    return WorkerView(
        worker=worker,
        at=time.monotonic(),
        pid=int(stats.get("pid", 0)),
        pages_free=int(stats["pages_free"]),
        pages_total=int(stats["pages_total"]),
        rooms_open=int(stats["rooms_open"]),
        wrong_bytes=int(stats["wrong_bytes"]),
        raw=stats,
    )


def gateway_view(stats: Mapping[str, Any]) -> GatewayView:
    """The gateway's /stats as a view. Raises KeyError or TypeError when it has another shape."""
    return GatewayView(
        int(stats["active"]) + int(stats["aborting"]), {str(k): int(v) for k, v in stats["requests"].items()}
    )


def baseline(snapshot: Snapshot) -> Baseline:
    """What is free now, everything being at rest."""
    return Baseline(
        pages={name: worker.pages_free for name, worker in snapshot.workers.items()},
        slots={
            f"{name} {kind}": states.get("free", 0)
            for name, node in snapshot.nodes.items()
            for kind, states in node.slots.items()
        },
    )


def everything(snapshot: Snapshot) -> Baseline:
    """What would be free if nothing were under way."""
    return Baseline(
        pages={name: worker.pages_total for name, worker in snapshot.workers.items()},
        slots={
            f"{name} {kind}": sum(states.values())
            for name, node in snapshot.nodes.items()
            for kind, states in node.slots.items()
        },
    )


def away(snapshot: Snapshot, base: Baseline) -> Away:
    """What is not where the baseline has it. A page counts once, whether the worker or the ledger misses it."""
    unknown = [f"{name}: {why}" for name, why in snapshot.silent.items()]
    rooms_of_nodes = rooms_of_workers = pages = slots = 0
    lent: dict[str, int] = {}
    for name, node in snapshot.nodes.items():
        if not node.ready:
            unknown.append(f"sidecar {name} is not ready ({node.unready or 'no reason given'})")
        rooms_of_nodes += node.live + node.parked
        for worker, states in node.pages.items():
            lent[worker] = lent.get(worker, 0) + sum(n for state, n in states.items() if state != "home")
        for kind, slot_states in node.slots.items():
            slots += max(0, base.slots.get(f"{name} {kind}", 0) - slot_states.get("free", 0))
    for name, worker_seen in snapshot.workers.items():
        rooms_of_workers += worker_seen.rooms_open
        pages += max(base.pages.get(name, 0) - worker_seen.pages_free, lent.pop(name, 0), 0)
        if snapshot.nodes and not any(name in node.pages for node in snapshot.nodes.values()):
            unknown.append(f"worker {name} is attached to no sidecar")
    pages += sum(lent.values())  # lent for a worker that does not answer
    requests = snapshot.gateway.active if snapshot.gateway is not None else 0
    return Away(max(rooms_of_nodes, rooms_of_workers, requests), pages, slots, tuple(unknown))


def room_ends(metrics: str) -> dict[str, dict[str, int]]:
    """From a sidecar's /metrics: side -> reason -> how many rooms ended so."""
    return counter(metrics, "pdxfer_room_ends", "side", "reason")


def restarts(metrics: str) -> dict[str, int]:
    """From a sidecar's /metrics: service -> how often it was restarted."""
    return {
        service: n
        for service, by in counter(metrics, "pdxfer_restarts", "service", "service").items()
        for n in by.values()
    }


def defects(metrics: str) -> int:
    """From a sidecar's /metrics: on how many events its core or its main loop has raised."""
    return sum(
        int(sample.value)
        for found in text_string_to_metric_families(metrics)
        if found.name == "pdxfer_core_errors"
        for sample in found.samples
        if sample.name == "pdxfer_core_errors_total"
    )


def counter(metrics: str, family: str, first: str, second: str) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for found in text_string_to_metric_families(metrics):
        if found.name == family:
            for sample in found.samples:
                if sample.name == f"{family}_total":
                    out.setdefault(sample.labels[first], {})[sample.labels[second]] = int(sample.value)
    return out


def difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """By how much counters grew, without zeros. A counter that shrank was restarted from nothing."""
    grown = {name: n - before.get(name, 0) if n >= before.get(name, 0) else n for name, n in now.items()}
    return {name: n for name, n in grown.items() if n}


class Observer:
    """Asks everybody, keeps the history, and sums what must survive a worker's restart."""

    def __init__(
        self,
        sidecars: Mapping[str, str],
        workers: Mapping[str, str],
        gateway: str = "",
        interval: float = SAMPLE_INTERVAL,
    ) -> None:
        self.sidecars = dict(sidecars)  # node -> the URL of its admin service
        self.workers = dict(workers)  # engine id -> the URL of the worker
        self.gateway = gateway  # empty: there is none
        self.interval = interval
        self.history: list[Snapshot] = []
        self.http = httpx.AsyncClient(timeout=ASK_TIMEOUT, trust_env=False)
        self._wrong: dict[str, tuple[int, int]] = {}  # worker -> (of earlier processes and up to here, last reading)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sample(), name="observer")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.http.aclose()

    async def _sample(self) -> None:
        while True:
            began = time.monotonic()
            self.history.append(await self.look())
            await asyncio.sleep(max(0.05, self.interval - (time.monotonic() - began)))

    async def get(self, url: str, timeout: float = ASK_TIMEOUT) -> httpx.Response:
        """One GET; raises httpx.HTTPError also for a status that is not a success."""
        return (await self.http.get(url, timeout=timeout)).raise_for_status()

    async def look(self) -> Snapshot:
        """Ask everybody at once."""
        nodes: dict[str, NodeView] = {}
        workers: dict[str, WorkerView] = {}
        silent: dict[str, str] = {}
        front: list[GatewayView] = []

        async def sidecar(name: str, url: str) -> None:
            try:
                nodes[name] = node_view((await self.get(f"{url}/status")).json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                silent[f"sidecar {name}"] = why(error)

        async def worker(name: str, url: str) -> None:
            try:
                workers[name] = view = worker_view(name, (await self.get(f"{url}/stats")).json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                silent[f"worker {name}"] = why(error)
            else:
                total, last = self._wrong.get(name, (0, 0))
                grown = view.wrong_bytes - last if view.wrong_bytes >= last else view.wrong_bytes
                self._wrong[name] = (total + grown, view.wrong_bytes)

        async def gateway() -> None:
            if not self.gateway:
                return
            try:
                front.append(gateway_view((await self.get(f"{self.gateway}/stats")).json()))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                silent["gateway"] = why(error)

        await asyncio.gather(
            gateway(),
            *(sidecar(name, url) for name, url in self.sidecars.items()),
            *(worker(name, url) for name, url in self.workers.items()),
        )
        return Snapshot(time.monotonic(), nodes, workers, front[0] if front else None, silent)

    @property
    def wrong_bytes(self) -> int:
        """All that the workers have ever counted, over their restarts."""
        return sum(total for total, _ in self._wrong.values())

    async def metrics(self, node: str) -> str:
        """A sidecar's /metrics. Raises httpx.HTTPError."""
        return (await self.get(f"{self.sidecars[node]}/metrics")).text

    async def ends(self) -> dict[str, dict[str, dict[str, int]]]:
        """node -> side -> reason -> rooms ended. Raises httpx.HTTPError."""
        texts = await asyncio.gather(*(self.metrics(node) for node in self.sidecars))
        return {node: room_ends(text) for node, text in zip(self.sidecars, texts, strict=True)}


def why(error: Exception) -> str:
    """An exception of asking, in a few words."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {error.response.text[:200].strip()}"
    if isinstance(error, KeyError):
        return f"its answer lacks {error}"
    return f"{type(error).__name__}: {error}"
