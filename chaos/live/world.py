"""The processes of a chaos run: three sidecars, their workers, and what observes them.

Owns: directory, keys, configuration, command lines, where each process runs, and the samplers. Must not: inject faults or
judge.

Nodes "p" (prefill) and "d" (decode) are what faults strike; node "b" (bystander) is struck by nothing. A second pair of
workers moves rooms between nodes that the fault leaves alone: those rooms must not notice it. Node "r" is there only when
the registry is to be struck.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pdxfer.bootstrap import keys
from pdxfer.demo.observe import Away, NodeView, Observer, Snapshot, away, everything, why
from pdxfer.demo.processes import Manager, Spec, exit_text, until
from pdxfer.demo.system import free_ports, short_directory, toml

from .control import Ask, Line, Lost
from .netns import Network

PREFILL, DECODE = "prefill-0", "decode-0"
DEAD = ("x1", "x2", "x3", "x4")  # nodes that are configured and answer nothing
START_DEADLINE = 90.0
INTERVAL = 0.1  # seconds between looks at a sidecar


class WorldError(Exception):
    """The processes cannot be had; the message says why."""


@dataclass(frozen=True)
class Kind:
    """What a scenario needs of its world. Runs of the same kind share one."""

    registry: bool = False  # an embedded registry, on node r
    network: bool = False  # p and d in network namespaces of their own
    private_shm: bool = False  # p with a small /dev/shm of its own
    mutant: str = ""
    bystander: bool = True  # node b runs
    slots: tuple[int, int] = (8, 16)  # send and receive slots of each engine
    slot_bytes: int = 128 << 10


@dataclass(frozen=True)
class Load:
    """What an agent asks for."""

    pushes: int = 4
    pause: float = 0.1  # seconds between pushes
    think: float = 0.1
    tokens: tuple[int, int] = (64, 320)
    spread: float = 0.5
    abort_within: float = 0.0
    rooms: int = 0


class World:
    """Everything that runs for a scenario, and where to reach it."""

    def __init__(self, kind: Kind, say: Callable[[str], None] = lambda text: None) -> None:
        self.kind = kind
        self.directory = short_directory("pdxfer-chaos-")
        self.logs = self.directory / "logs"
        self.logs.mkdir()
        self.manager = Manager(self.logs, say)
        self.nodes = ("p", "d", *(("b",) if kind.bystander else ()), *(("r",) if kind.registry else ()))
        named = (*self.nodes, *DEAD, *(f"admin {node}" for node in self.nodes))
        self.ports = dict(zip(named, free_ports(len(named)), strict=True))
        self.keys = {node: keys.generate() for node in (*self.nodes, *DEAD, "stranger")}
        self.network = Network(self.directory.name[-6:]) if kind.network else None
        self.observers = {node: Observer({}, {}, "", INTERVAL) for node in self.nodes}
        self.lines: dict[str, Line] = {}
        self.placed: dict[str, str] = {}  # engine id -> node
        self.agents = 0

    # starting and ending -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Sidecars, and the workers that faults strike. Raises DemoError or WorldError."""
        if self.network is not None:
            self.network.up()
        for node in self.nodes:
            self._configure(node)
            await self.manager.start(self._sidecar(node))
        await self.manager.wait_ready([f"sidecar {node}" for node in self.nodes], START_DEADLINE)
        await self.place({PREFILL: "p", DECODE: "d"})
        for observer in self.observers.values():
            observer.start()

    async def place(self, workers: Mapping[str, str]) -> None:
        """Start these workers on these nodes, unless they run there."""
        new = {engine: node for engine, node in workers.items() if self.placed.get(engine) != node}
        for engine, node in new.items():
            await self.manager.start(self._worker(engine, node))
        await self.manager.wait_ready([f"worker {engine}" for engine in new], START_DEADLINE)
        self.placed.update(new)

    async def close(self, *, keep_logs: bool = False) -> list[str]:
        """End every process and remove what was made. Returns what went wrong with that."""
        for line in self.lines.values():
            await line.close()
        for observer in self.observers.values():
            await observer.close()
        problems = await self.manager.stop()
        if self.network is not None:
            self.network.down()
        if not keep_logs:
            shutil.rmtree(self.directory)
        return problems

    # processes -----------------------------------------------------------------------------------------------------

    def _sidecar(self, node: str) -> Spec:
        mutant = ("-m", "pdxfer.chaos.mutants", self.kind.mutant) if self.kind.mutant else ("-m", "pdxfer")
        argv = [sys.executable, *mutant, "serve", "--config", str(self.directory / f"{node}.toml")]
        if self.kind.private_shm and node == "p":
            argv = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                'mount -t tmpfs -o size=8m chaos /dev/shm && exec "$@"',
                "sh",
                *argv,
            ]
        if self.network is not None:
            argv = self.network.within(node, argv)

        host = self.network.admin(node) if self.network is not None else "127.0.0.1"
        self.observers[node].sidecars[node] = url = f"http://{host}:{self.ports[f'admin {node}']}"

        async def ready() -> str:
            try:
                await self.observers[node].get(f"{url}/readyz", timeout=2.0)
            except httpx.HTTPError as error:
                return f"{url}: {why(error)}"
            return ""

        return Spec(
            f"sidecar {node}", tuple(argv), ready, "`pdxfer doctor` checks what a sidecar needs.",
            restart=True, budget=10_000, backoff=1.0,
        )  # fmt: skip

    def _worker(self, engine: str, node: str) -> Spec:
        async def ready() -> str:
            try:
                stats = await self.stats(engine)
            except Lost as error:
                return str(error)
            return "" if stats["connected"] else f"not attached: {stats['problem']}"

        return Spec(
            f"worker {engine}",
            (
                sys.executable, "-m", "pdxfer.chaos.live.worker", "--engine-id", engine,
                "--sidecar", str(self.directory / f"{node}.sock"), "--listen", str(self.control(engine)),
                "--records", str(self.directory / f"{engine}.jsonl"),
            ),
            ready, restart=True, budget=10_000, backoff=1.0,
        )  # fmt: skip

    async def agent(self, prefill: str, decode: str, sessions: int, load: Load, tag: str) -> str:
        """Start an agent between two workers. Returns its process's name; its trips are in ``trips``."""
        self.agents += 1
        name = f"agent {self.agents}"
        argv = [
            sys.executable, "-m", "pdxfer.chaos.live.agent", "--prefill", str(self.control(prefill)),
            "--decode", str(self.control(decode)), "--source", prefill, "--out", str(self.trips(name)), "--tag", tag,
            "--sessions", str(sessions), "--rooms", str(load.rooms), "--tokens", *map(str, load.tokens),
            "--pushes", str(load.pushes), "--pause", str(load.pause), "--think", str(load.think),
            "--spread", str(load.spread), "--abort-within", str(load.abort_within), "--seed", str(self.agents),
        ]  # fmt: skip
        await self.manager.start(Spec(name, tuple(argv)))
        return name

    def control(self, engine: str) -> Path:
        return self.directory / f"{engine}.ctl"

    def trips(self, agent: str) -> Path:
        return self.directory / f"{agent.replace(' ', '-')}.jsonl"

    def records(self, *engines: str) -> list[Path]:
        return [self.directory / f"{engine}.jsonl" for engine in engines]

    # asking --------------------------------------------------------------------------------------------------------

    async def line(self, engine: str) -> Line:
        """The driver's own connection to a worker. Raises Lost."""
        found = self.lines.get(engine)
        if found is None or not found.open:
            found = self.lines[engine] = await Line.connect(self.control(engine))
        return found

    async def stats(self, engine: str) -> dict[str, Any]:
        """Raises Lost."""
        return await (await self.line(engine)).ask(Ask("stats"))

    async def look(self, node: str) -> NodeView | None:
        """A sidecar now; None when it does not answer."""
        return (await self.observers[node].look()).nodes.get(node)

    async def status(self, node: str) -> dict[str, Any]:
        """A sidecar's whole status. Raises httpx.HTTPError."""
        observer = self.observers[node]
        found: dict[str, Any] = (await observer.get(f"{observer.sidecars[node]}/status")).json()
        return found

    async def snapshot(self) -> Snapshot:
        """All sidecars now, and pages that a worker misses."""
        nodes: dict[str, NodeView] = {}
        silent: dict[str, str] = {}
        at = 0.0
        for observer in self.observers.values():
            seen = await observer.look()
            nodes |= seen.nodes
            silent |= seen.silent
            at = seen.at
        for engine, node in self.placed.items():
            try:
                stats = await self.stats(engine)
            except Lost as error:
                silent[f"worker {engine}"] = str(error)
                continue
            missing = stats["pages_total"] - stats["pages_free"]
            if missing or stats["live"]:
                silent[f"worker {engine}"] = f"{stats['live']} rooms and {missing} pages are not home"
            elif not stats["connected"] or (node in nodes and engine not in nodes[node].pages):
                silent[f"worker {engine}"] = f"is not attached: {stats['problem']}"
        return Snapshot(at, nodes, {}, None, silent)

    async def away(self) -> Away:
        """What is not home now."""
        seen = await self.snapshot()
        return away(seen, everything(seen))

    async def home(self, seconds: float) -> str:
        """Wait until everything is home; "" or what is not."""

        async def missing() -> str:
            return (await self.away()).text()

        return await until(missing, seconds, 0.05)

    def pid(self, name: str) -> int:
        """Of a process of the manager; 0 while it does not run."""
        return self.manager[name].pid

    def died(self, pid: int) -> float | None:
        """When a process of the manager ended, if it has."""
        pids = {int(h.detail.removeprefix("pid ")): h for h in self.manager.happened if h.kind in ("start", "restart")}
        if pid not in pids:
            return None
        began = pids[pid]
        ends = [h.at for h in self.manager.happened if h.kind == "exit" and h.name == began.name and h.at >= began.at]
        return min(ends, default=None)

    def log_of(self, name: str) -> str:
        path = self.manager[name].log
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def explain_exit(self, name: str) -> str:
        exits = self.manager[name].exits
        return exit_text(exits[-1]) if exits else "it has not ended"

    # configuration -------------------------------------------------------------------------------------------------

    def endpoint(self, node: str) -> str:
        host = self.network.address(node) if self.network is not None and node in self.nodes else "127.0.0.1"
        return f"tcp://{host}:{self.ports[node]}"

    def _configure(self, node: str) -> None:
        keys.save(self.directory / f"{node}.key", self.keys[node])
        serves = {"p": [PREFILL, "by-p"], "d": [DECODE, "by-d"], "b": ["by-b1", "by-b2"], "r": []}
        serves = {name: engines for name, engines in serves.items() if name in self.nodes}
        serves |= {dead: [f"dead-{dead}"] for dead in DEAD}
        peers = [
            {"node": other, "address": self.endpoint(other), "public_key": self.keys[other].public, "engines": engines}
            for other, engines in serves.items()
            if other != node and (not self.kind.registry or other == "r")
        ]
        registry: dict[str, Any] = {"nodes": peers}
        authorized = [self.keys["stranger"].public]
        if self.kind.registry:
            registry |= {"kind": "embedded", "server": "r"}
            authorized += [self.keys[other].public for other in self.nodes if other != node]
            for entry in peers:
                entry["engines"] = []
        tables: dict[str, dict[str, Any]] = {
            "node": {"name": node, "runtime_dir": str(self.directory / node)},
            "worker": {"socket": str(self.directory / f"{node}.sock")},
            "admin": {"port": self.ports[f"admin {node}"]},
            "bootstrap": {
                "listen": self.endpoint(node),
                "key_file": str(self.directory / f"{node}.key"),
                "authorized_keys": authorized,
            },
            "registry": registry,
            "engine": {
                "tls": "tcp",
                "slot_bytes": self.kind.slot_bytes,
                "send_slots": self.kind.slots[0],
                "recv_slots": self.kind.slots[1],
            },
            # The same sidecars are struck again and again within a restart window; the contract's bounds are for a first death.
            "supervisor": {"drain_timeout": 5.0, "close_timeout": 2.0, "backoff_first": 0.0, "restart_budget": 1000},
            "debug": {"hooks": True},
        }
        if self.network is not None:
            tables["admin"] |= {"host": self.network.admin(node), "allow_remote": True}
        (self.directory / f"{node}.toml").write_text(toml(tables), encoding="utf-8")
