"""Real sidecars as processes, for live tests.

Owns: starting `python -m pdxfer serve`, asking its admin service, and ending what was started.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def until(reached: Callable[[], Any], timeout: float, what: str) -> Any:
    """Poll until it is true, and return that."""
    end = time.monotonic() + timeout
    while True:
        found = reached()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.02)


class Sidecar:
    """One `pdxfer serve`. ``keys`` are "table.key" with dots and underscores as in the configuration."""

    def __init__(self, directory: Path, name: str = "p", prelude: str = "", **keys: object) -> None:
        self.name = name
        self.runtime = directory / name
        self.log = directory / f"{name}.log"
        self._prelude = prelude
        self.keys = {
            "node.name": name,
            "node.runtime_dir": str(self.runtime),
            "admin.port": 0,
            "bootstrap.listen": "tcp://127.0.0.1:*",
            "debug.hooks": "true",
            "log.level": "debug",
        } | {key.replace("__", "."): value for key, value in keys.items()}
        self.config: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> Sidecar:
        flags = [f"--{key.replace('.', '-').replace('_', '-')}={value}" for key, value in self.keys.items()]
        if self.config is not None:
            flags.append(f"--config={self.config}")
        code = f"{self._prelude}\nfrom pdxfer.cli import main\nmain()"
        command = [sys.executable, "-c", code] if self._prelude else [sys.executable, "-m", "pdxfer"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PDXFER_")} | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "serve", *flags], cwd=ROOT, stderr=log, env=environment)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout: float = 30.0) -> None:
        until(self.ready, timeout, f"{self.name} ready; its log:\n{self.said()[-3000:]}")

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        pid: int = self.status()["engine"]["pid"]
        return pid

    @property
    def address(self) -> tuple[str, int]:
        found = json.loads((self.runtime / "admin.json").read_text())
        return found["host"], found["port"]

    @property
    def socket(self) -> str:
        return str(self.runtime / "worker.sock")

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.said()[-3000:]}"
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return False

    def status(self) -> dict[str, Any]:
        code, found = self.ask("GET", "/status")
        assert code == 200, found
        return dict(found)

    def metric(self, name: str) -> float:
        _, text = self.ask("GET", "/metrics")
        for line in text.splitlines():
            if line.startswith(name) and line[len(name)] == " ":
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
