"""Two sidecars for a measurement: "p" with the prefill worker, "d" with the decode worker.

Owns: their directory, keys and command lines, and the death of an engine for whoever asks for it. Must not: change a default
that a deployment would have; PDXFER_… variables of the caller reach them, so that settings can be compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from pdxfer.bootstrap import keys
from pdxfer.demo.processes import Manager, Spec, until

from .child import BenchError
from .rooms import PREFILL

START = 60.0  # seconds


class Sidecars:
    """Both, and how to reach them. ``source`` is the engine id of the prefill worker."""

    def __init__(self, tls: str, source: str = PREFILL) -> None:
        self._source = source
        self.directory = Path(tempfile.mkdtemp(prefix="pdxfer-bench-"))
        self.manager = Manager(self.directory)
        self._environment = {"UCX_TLS": tls} if tls else {}

    async def start(self, *flags: str) -> None:
        """``flags``: for both of them. Raises DemoError when one does not come up."""
        pairs = {}
        for node in "pd":
            pairs[node] = keys.generate()
            keys.save(self.directory / f"{node}.key", pairs[node])
        await self._start("p", "--bootstrap-authorized-keys", json.dumps([pairs["d"].public]), *flags)
        entry = {
            "node": "p",
            "address": (await self.status("p"))["address"],
            "public_key": pairs["p"].public,
            "engines": [self._source],
        }
        await self._start("d", "--registry-nodes", json.dumps([entry]), *flags)

    async def alone(self, *flags: str) -> None:
        """The first one without the other. Raises DemoError when it does not come up."""
        keys.save(self.directory / "p.key", keys.generate())
        await self._start("p", *flags)

    async def _start(self, node: str, *flags: str) -> None:
        spec = Spec(
            f"sidecar {node}",
            (
                sys.executable, "-m", "pdxfer", "serve", "--node-name", node, "--node-runtime-dir", str(self.directory / node),
                "--admin-port", "0", "--bootstrap-listen", "tcp://127.0.0.1:0",
                "--bootstrap-key-file", str(self.directory / f"{node}.key"), *flags,
            ),
            lambda: self._ready(node),
            "`pdxfer doctor` checks what a sidecar needs (NIXL, shared memory, ports).",
            environment=self._environment,
        )  # fmt: skip
        await self.manager.start(spec)
        await self.manager.wait_ready([spec.name], START)

    def socket(self, node: str) -> str:
        return str(self.directory / node / "worker.sock")

    async def status(self, node: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._ask, node, "/status")

    async def _ready(self, node: str) -> str:
        try:
            await asyncio.to_thread(self._ask, node, "/readyz")
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _ask(self, node: str, path: str) -> dict[str, Any]:
        admin = json.loads((self.directory / node / "admin.json").read_text())
        with urllib.request.urlopen(f"http://{admin['host']}:{admin['port']}{path}", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    async def kill_engine(self, node: str, seconds: float = 30.0) -> int:
        """SIGKILL a node's engine and wait for the next one. Returns its pid. Raises BenchError."""
        old: int = (await self.status(node))["engine"]["pid"]
        os.kill(old, signal.SIGKILL)

        async def replaced() -> str:
            try:
                engine = (await self.status(node))["engine"]
            except (OSError, ValueError) as error:
                return str(error)
            return await self._ready(node) if engine["pid"] not in (0, None, old) else "the engine is not back"

        if left := await until(replaced, seconds):
            raise BenchError(f"sidecar {node} has no new engine {seconds:g} s after pid {old} was killed: {left}")
        new: int = (await self.status(node))["engine"]["pid"]
        return new

    def processor_seconds(self) -> tuple[float, float]:
        """What the two parents have used so far, and the two engines. Blocks."""
        statuses = [self._answer(node) for node in "pd"]
        try:
            parents = sum(_processor_seconds(status["pid"]) for status in statuses)
            return parents, sum(_processor_seconds(status["engine"]["pid"]) for status in statuses)
        except OSError as error:
            raise BenchError(f"a sidecar or its engine is gone ({error}); {self._last_words('pd')}") from None

    def _answer(self, node: str) -> dict[str, Any]:
        try:
            return self._ask(node, "/status")
        except (OSError, ValueError) as error:
            raise BenchError(f"sidecar {node} does not answer: {error}; {self._last_words(node)}") from None

    def _last_words(self, nodes: str) -> str:
        """The logs go with the bench, so their last lines are told."""
        lines = [(node, self.manager[f"sidecar {node}"].tail(1)) for node in nodes]
        return "; ".join(f"{node}'s log ends with: {line[-1].strip() if line else 'nothing'}" for node, line in lines)

    def counters(self, node: str) -> dict[str, float]:
        """The totals of a node's engine, of a second ago at most. Blocks."""
        found: dict[str, float] = self._answer(node)["engine"]["counters"]
        return found

    async def close(self) -> list[str]:
        """Returns what went wrong with it."""
        problems = await self.manager.stop()
        shutil.rmtree(self.directory)
        return problems


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
