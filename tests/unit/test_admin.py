"""The admin HTTP service against a fake daemon: answers, refusals, limits, and a main loop that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdxfer.admin import AdminService
from pdxfer.settings import AdminSettings
from pdxfer.supervisor import Phase


class FakeDaemon:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.hung: str | None = None
        self.aborts: list[tuple[str, int, str]] = []
        self.faults: list[str] = []
        self.hooks = True

    def alive(self) -> str | None:
        return self.hung

    def render_metrics(self, status: dict[str, Any] | None) -> bytes:
        return b"fresh 1\n" if status is not None else b"fresh 0\n"

    async def not_ready(self) -> list[str]:
        return self.reasons

    async def status(self) -> dict[str, Any]:
        return {"node": "p"}

    async def rooms(self) -> list[dict[str, Any]]:
        return [{"room": "r1"}]

    async def abort(self, room: str, epoch: int, detail: str) -> dict[str, Any]:
        self.aborts.append((room, epoch, detail))
        return {"room": room, "epoch": epoch, "found": room == "r1", "sides": int(room == "r1")}

    async def inject(self, service: str, fault: str) -> None:
        if not self.hooks:
            raise LookupError("debug.hooks is false")
        self.faults.append(f"{service} {fault}")


class Running:
    """The service, with a main loop in a thread of its own that a test can hang."""

    def __init__(self, settings: AdminSettings) -> None:
        self.daemon = FakeDaemon()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.deaths: list[str] = []
        self.service = AdminService(settings, self.daemon, self.loop, self.deaths.append)
        self.service.start()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.service.address, timeout=10)
        given = {"Content-Type": "application/json"} if body is not None else {}
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, given | (headers or {}))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if response.headers.get_content_type() == "application/json" and content:
            return response.status, json.loads(content)
        return response.status, content

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.service.stop(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()


@pytest.fixture
def admin() -> Iterator[Running]:
    running = Running(AdminSettings(port=0, timeout=0.5, max_connections=4))
    yield running
    running.close()


def test_gets(admin: Running) -> None:
    assert admin.ask("GET", "/livez") == (200, {"alive": True, "reasons": []})
    assert admin.ask("GET", "/readyz") == (200, {"ready": True, "reasons": []})
    assert admin.ask("GET", "/status") == (200, {"node": "p"})
    assert admin.ask("GET", "/rooms") == (200, [{"room": "r1"}])
    assert admin.ask("GET", "/metrics") == (200, b"fresh 1\n")
    assert admin.ask("HEAD", "/metrics") == (200, b"")


def test_not_ready_and_not_alive_say_why(admin: Running) -> None:
    admin.daemon.reasons = ["engine: starting"]
    assert admin.ask("GET", "/readyz") == (503, {"ready": False, "reasons": ["engine: starting"]})
    admin.daemon.hung = "main loop: no turn for 12 s"
    assert admin.ask("GET", "/livez") == (503, {"alive": False, "reasons": ["main loop: no turn for 12 s"]})


def test_a_hung_main_loop_makes_a_503_and_no_hanging_probe(admin: Running) -> None:
    release = threading.Event()
    admin.loop.call_soon_threadsafe(release.wait, 5)
    began = time.monotonic()
    status, answer = admin.ask("GET", "/readyz")
    assert status == 503 and "admin.timeout" in answer["reasons"][0]
    assert admin.ask("GET", "/status")[0] == 503
    assert admin.ask("GET", "/livez")[0] == 200  # asks nobody
    assert admin.ask("GET", "/metrics") == (200, b"fresh 0\n")
    assert time.monotonic() - began < 3
    release.set()
    assert admin.ask("GET", "/readyz")[0] == 200


def test_abort(admin: Running) -> None:
    assert admin.ask("POST", "/rooms/abort", {"room": "r1", "epoch": 2, "detail": "x"})[0] == 200
    assert admin.daemon.aborts == [("r1", 2, "x")]
    status, answer = admin.ask("POST", "/rooms/abort", {"room": "nope"})
    assert status == 404 and "no live room 'nope' with epoch 0" in answer["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "JSON object {room, epoch, detail}"),
        (b"\xff\xfe", "JSON object"),
        (b"[" * 5000, "JSON object"),
        ({"rom": "r1"}, "rom"),
        ({"room": 7}, "str"),
        ({"room": ""}, "room is ''"),
        ({"room": "r" * 200}, "1 to 128"),
        ({"room": "r", "epoch": -1}, "epoch is -1"),
        ({"room": "r", "detail": "d" * 501}, "detail has 501"),
    ],
)
def test_bad_aborts_are_refused_by_name(admin: Running, body: Any, words: str) -> None:
    status, answer = admin.ask("POST", "/rooms/abort", body)
    assert status == 400
    assert words in answer["error"]
    assert admin.daemon.aborts == []


def test_bad_requests(admin: Running) -> None:
    status, answer = admin.ask("GET", "/metricz")
    assert status == 404 and "/metrics" in answer["error"]
    assert admin.ask("POST", "/status", {})[0] == 405
    assert admin.ask("GET", "/rooms/abort")[0] == 405
    assert admin.ask("PUT", "/status")[0] == 501
    assert admin.ask("POST", "/rooms/abort", b"x", {"Content-Type": "text/plain"})[0] == 415
    assert admin.ask("POST", "/rooms/abort", b"x" * (64 << 10) + b"x")[0] == 413
    assert admin.ask("POST", "/rooms/abort", {}, {"Content-Length": "-1"})[0] == 411
    assert admin.ask("GET", "/status", headers={"Host": "evil.example"})[0] == 421


@pytest.mark.parametrize("path", ["/livez", "/nosuch"])
def test_a_host_or_a_path_that_is_none_is_refused_by_name(
    admin: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = admin.ask("GET", path, headers={"Host": "["})
    assert (status, answer["error"][:22]) == (400, "Host is '[', expected ")
    with socket.create_connection(admin.service.address) as raw:
        raw.sendall(b"GET http://[/livez HTTP/1.0\r\n\r\n")
        raw.settimeout(5)
        assert raw.recv(100).split(b"\r\n")[0] == b"HTTP/1.0 400 Bad Request"
    assert not [r for r in caplog.records if r.exc_info]


def test_debug_hooks(admin: Running) -> None:
    assert admin.ask("POST", "/debug/bootstrap", {"inject": "exception"}) == (200, {"injected": "exception"})
    assert admin.ask("POST", "/debug/bootstrap", {"inject": "fire"})[0] == 400
    admin.daemon.hooks = False
    status, answer = admin.ask("POST", "/debug/bootstrap", {"inject": "loop"})
    assert status == 404 and "debug.hooks" in answer["error"]
    assert admin.daemon.faults == ["bootstrap exception"]


def test_garbage_and_slow_clients_cost_nobody_else_anything(admin: Running) -> None:
    idle = [socket.create_connection(admin.service.address) for _ in range(4)]
    for connection in idle:
        connection.sendall(b"GET /li")
    time.sleep(0.1)
    assert admin.ask("GET", "/livez")[0] == 503  # full: said at once
    time.sleep(1.0)  # admin.timeout has passed: the four are cut
    assert admin.ask("GET", "/livez")[0] == 200
    for connection in idle:
        connection.close()
    with socket.create_connection(admin.service.address) as garbage:
        garbage.sendall(b"\x00\xff" * 40000 + b"\r\n\r\n")
        garbage.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # cut or refused: both will do
            garbage.recv(100)
    assert admin.ask("GET", "/livez")[0] == 200


def test_its_heartbeat_moves_and_it_can_be_killed_and_restarted(admin: Running) -> None:
    before = admin.service.heartbeat()
    time.sleep(1.2)
    assert admin.service.heartbeat() > before
    address = admin.service.address
    admin.service.kill("test")
    assert admin.service.phase() is Phase.DOWN
    asyncio.run_coroutine_threadsafe(admin.service.restart(), admin.loop).result(5)
    assert admin.service.address == address
    assert admin.ask("GET", "/livez")[0] == 200


def test_a_taken_port_is_an_os_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            AdminService(
                AdminSettings(port=taken.getsockname()[1]), FakeDaemon(), asyncio.new_event_loop(), lambda why: None
            ).start()
