"""The system that the demo runs: two sidecars, two workers and a gateway on this machine.

Owns: the temporary directory, keys and configuration files, command lines, and what "up" means for each process.
Must not: inject faults or judge.

Node "p" serves the prefill worker and holds the registry, node "d" serves the decode worker.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from ..bootstrap import keys
from .observe import Observer, why
from .processes import DemoError, Manager, Spec

PREFILL, DECODE = "prefill-0", "decode-0"
START_DEADLINE = 90.0  # seconds for everything to come up; loading the model is most of it
MAX_SOCKET = 100  # bytes of a unix socket's path: the kernel's limit is 107, and NIXL adds nothing


class System:
    """Everything that runs, and where to reach it."""

    prefill_node, decode_node = "p", "d"

    def __init__(self, engine: str, dtype: str, seed: int, logs: Path | None, say: Callable[[str], None]) -> None:
        self.model = engine  # the gateway's model has the engine's name
        self.dtype = dtype
        self.seed = seed
        self.directory = short_directory()
        self.logs = logs if logs is not None else self.directory / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.manager = Manager(self.logs, say)
        self.ports = dict(zip(("p", "d", PREFILL, DECODE, "gateway"), free_ports(5), strict=True))
        self.gateway = self._url("gateway")
        self.observer = Observer({}, {PREFILL: self._url(PREFILL), DECODE: self._url(DECODE)}, self.gateway)

    def _url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    # starting ------------------------------------------------------------------------------------------------------

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start everything and wait until it serves. Raises DemoError."""
        self._write_configurations()
        for node in ("p", "d"):
            await self.manager.start(self._sidecar(node))
        await self.manager.wait_ready(["sidecar p", "sidecar d"], START_DEADLINE, progress)
        for spec in (self._worker("prefill", PREFILL, "p"), self._worker("decode", DECODE, "d"), self._gateway()):
            await self.manager.start(spec)
        await self.manager.wait_ready(["prefill worker", "decode worker", "gateway"], START_DEADLINE, progress)

    async def close(self, *, keep_logs: bool) -> list[str]:
        """End every process and remove the directory, but for the logs if asked. Returns what went wrong with that."""
        await self.observer.close()
        problems = await self.manager.stop()
        for entry in self.directory.iterdir():
            if keep_logs and entry == self.logs:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if not (keep_logs and self.logs.parent == self.directory):
            self.directory.rmdir()
        return problems

    def _sidecar(self, node: str) -> Spec:
        runtime = self.directory / node

        async def ready() -> str:
            try:
                admin = json.loads((runtime / "admin.json").read_text())
            except (OSError, ValueError):
                return "it has not published its admin address"
            url = f"http://{admin['host']}:{admin['port']}"
            self.observer.sidecars[node] = url
            return await self._answers(f"{url}/readyz")

        return Spec(
            f"sidecar {node}",
            (sys.executable, "-m", "pdxfer", "serve", "--config", str(self.directory / f"{node}.toml")),
            ready,
            "`pdxfer doctor` checks what a sidecar needs (NIXL, shared memory, ports).",
        )

    def _worker(self, role: str, engine_id: str, node: str) -> Spec:
        async def ready() -> str:
            return await self._answers(f"{self._url(engine_id)}/health")

        return Spec(
            f"{role} worker",
            (
                sys.executable, "-m", "pdxfer.demo.worker", "--role", role, "--engine-id", engine_id,
                "--sidecar", str(self.directory / f"{node}.sock"), "--port", str(self.ports[engine_id]),
                "--engine", self.model, "--dtype", self.dtype,
            ),
            ready,
            "Is `pdxfer[demo]` installed with its model (make demo does both), and are 3 GB of memory free?",
            restart=True,
        )  # fmt: skip

    def _gateway(self) -> Spec:
        async def ready() -> str:
            return await self._answers(f"{self.gateway}/health")

        return Spec(
            "gateway",
            (
                sys.executable, "-m", "pdxfer.demo.gateway", "--port", str(self.ports["gateway"]),
                "--prefill", f"{PREFILL}={self._url(PREFILL)}", "--decode", f"{DECODE}={self._url(DECODE)}",
                "--model", self.model,
            ),
            ready,
            "Is `pdxfer[demo]` installed?",
        )  # fmt: skip

    def reference(self, questions: Path, answers: Path) -> Spec:
        """One process that answers with the whole model and without any transfer."""
        return Spec(
            "reference process",
            (sys.executable, "-m", "pdxfer.demo.reference", "--engine", self.model, "--dtype", self.dtype),
            advice="Is `pdxfer[demo]` installed with its model (make demo does both)?",
            stdin=questions,
            stdout=answers,
        )

    def agent(self, number: int, sessions: int, max_tokens: int) -> Spec:
        """A client process with so many streams; its record goes to agent_output."""
        name = f"agent {number}"
        return Spec(
            name,
            (
                sys.executable, "-m", "pdxfer.demo.agent", "--gateway", self.gateway, "--sessions", str(sessions),
                "--max-tokens", str(max_tokens), "--seed", str(self.seed + number),
            ),
            stdout=self.agent_output(name),
        )  # fmt: skip

    def agent_output(self, name: str) -> Path:
        return self.logs / f"{name.replace(' ', '-')}.jsonl"

    async def _answers(self, url: str) -> str:
        """ "" when a GET succeeds, else why not."""
        try:
            await self.observer.get(url, timeout=2.0)
        except httpx.HTTPError as error:
            return f"{url}: {why(error)}"
        return ""

    # configuration -------------------------------------------------------------------------------------------------

    def _write_configurations(self) -> None:
        """Fresh keys and one TOML file for each sidecar; p keeps the registry, and each knows the other's key."""
        pairs = {}
        for node in ("p", "d"):
            pairs[node] = keys.generate()
            keys.save(self.directory / f"{node}.key", pairs[node])
        for node, peer in (("p", "d"), ("d", "p")):
            tables: dict[str, dict[str, Any]] = {
                "node": {"name": node, "runtime_dir": str(self.directory / node)},
                "worker": {"socket": str(self.directory / f"{node}.sock")},
                "admin": {"port": 0},
                "bootstrap": {"listen": self._endpoint(node), "key_file": str(self.directory / f"{node}.key")},
                "registry": {
                    "kind": "embedded",
                    "server": "p",
                    "nodes": [{"node": peer, "address": self._endpoint(peer), "public_key": pairs[peer].public}],
                },
                "engine": {"slot_bytes": 2 << 20, "send_slots": 8, "recv_slots": 16},
                "supervisor": {"drain_timeout": 2.0, "close_timeout": 3.0},
                "debug": {"hooks": True},
            }
            (self.directory / f"{node}.toml").write_text(toml(tables), encoding="utf-8")

    def _endpoint(self, node: str) -> str:
        return f"tcp://127.0.0.1:{self.ports[node]}"


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML."""
    lines = []
    for table, entries in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_value(value)}" for key, value in entries.items()]
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written alike in both


def short_directory(prefix: str = "pdxfer-demo-") -> Path:
    """A temporary directory whose sockets' names fit into sun_path, whatever TMPDIR says."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(directory / "p" / "worker.sock")) > MAX_SOCKET:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return directory


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, from below the range that the kernel gives to clients: a client that asks a worker
    again and again while it restarts must not be given the worker's own port.
    """
    low = 20000
    try:
        high = min(32768, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        high = 32768
    if high - low < 1000:
        low, high = 20000, 60000
    found: list[int] = []
    for port in random.SystemRandom().sample(range(low, high), 200):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise DemoError(
        f"{len(found)} free ports found among 200 tried, expected {count};"
        f" is something using the range {low} to {high}?"
    )
