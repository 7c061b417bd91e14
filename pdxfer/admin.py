"""The admin HTTP service: probes, metrics, status and aborts, on loopback, in a thread of its own.

Owns: HTTP, its limits and its errors. Must not: touch the core. Whatever it answers comes from the main loop through
``Backend`` under a timeout, so a main loop that hangs makes a 503 and not a hanging probe; /livez asks nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import msgspec

from . import metrics
from .core.messages import good_name
from .settings import AdminSettings, is_loopback
from .supervisor import Phase

log = logging.getLogger(__name__)

MAX_BODY = 64 << 10


class Backend(Protocol):
    """What the admin service asks of the daemon: ``alive`` and ``render_metrics`` in any thread, the rest in the loop."""

    def alive(self) -> str | None:
        """Why the main loop is taken for hung, or None."""
        ...

    def render_metrics(self, status: dict[str, Any] | None) -> bytes:
        """A scrape; without a status, because the main loop did not give one, with the gauges that it had last."""
        ...

    async def not_ready(self) -> list[str]: ...
    async def status(self) -> dict[str, Any]: ...
    async def rooms(self) -> list[dict[str, Any]]: ...
    async def abort(self, room: str, epoch: int, detail: str) -> dict[str, Any]: ...
    async def inject(self, service: str, fault: str) -> None:
        """Raises LookupError when debug hooks are off or there is no such service."""
        ...


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    room: str
    epoch: int = 0
    detail: str = ""

    def problem(self) -> str | None:
        if not good_name(self.room):
            return f"room is {self.room[:40]!r}, expected 1 to 128 printable characters"
        if not 0 <= self.epoch < 2**31:
            return f"epoch is {self.epoch}, expected 0 to 2**31-1"
        if len(self.detail) > 500:
            return f"detail has {len(self.detail)} characters, expected at most 500"
        return None


class InjectRequest(msgspec.Struct, forbid_unknown_fields=True):
    inject: Literal["exception", "loop", "hang"]


class Unavailable(Exception):
    """The main loop did not answer."""


class AdminService:
    """The HTTP server as a service under the supervisor."""

    name = "admin"

    def __init__(
        self,
        settings: AdminSettings,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._loop = loop
        self._on_death = on_death
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._port = settings.port

    @property
    def address(self) -> tuple[str, int]:
        return (self._settings.host, self._port)

    def start(self) -> None:
        """Bind and serve. Raises OSError when the address is taken, RuntimeError when there is no thread for it."""
        self._server = _Server((self._settings.host, self._port), self._settings, self._backend, self._loop)
        self._port = self._server.server_address[1]  # a restart takes the same port again
        self._thread = threading.Thread(target=self._serve, args=(self._server,), name="admin", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # nobody serves, so ``stop`` must not wait until it has ended
            self._thread = None
            self._server.server_close()
            raise

    def _serve(self, server: _Server) -> None:
        try:
            server.serve_forever(poll_interval=0.5)
            why = None
        except Exception as error:
            log.exception("the admin service ended")
            why = f"{type(error).__name__}: {error}"
        finally:
            server.server_close()
        if why is not None and self._thread is threading.current_thread():  # else it was replaced: known
            self._loop.call_soon_threadsafe(self._on_death, why)

    def phase(self) -> Phase:
        return Phase.SERVING if self._thread is not None and self._thread.is_alive() else Phase.DOWN

    def heartbeat(self) -> int:
        return self._server.turns if self._server is not None else 0

    def kill(self, why: str) -> None:
        """Close its socket under it: accept() raises there. A thread that hangs elsewhere is left behind."""
        self._thread = None
        if self._server is not None:
            try:
                self._server.socket.shutdown(socket.SHUT_RDWR)  # a poll under way would hold the port otherwise
            except OSError as error:
                log.debug("admin: its socket was closed already: %s", error)
            self._server.server_close()

    async def restart(self) -> None:
        self.start()

    async def stop(self) -> None:
        thread, server = self._thread, self._server
        self._thread = None
        if server is not None and thread is not None:
            await asyncio.to_thread(server.shutdown)
            await asyncio.to_thread(thread.join, 2.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], settings: AdminSettings, backend: Backend, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.settings = settings
        self.backend = backend
        self.loop = loop
        self.turns = 0
        self._open: dict[socket.socket, float] = {}
        self._open_lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the name look-up of http.server, which may block on DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the main loop. Raises Unavailable when there is no answer in time."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(self.settings.timeout)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise Unavailable(
                f"the main loop did not answer within admin.timeout = {self.settings.timeout:g} s"
            ) from None

    # connections: bounded in number and in time ---------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            full = len(self._open) >= self.settings.max_connections
            if not full:
                self._open[request] = time.monotonic()
        if full:
            request.settimeout(0.1)
            try:
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n")
            except OSError as error:
                log.debug("admin: refused connection from %s: %s", client_address, error)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Each turn of serve_forever: cut what has been open for longer than any request can take."""
        self.turns += 1
        oldest = time.monotonic() - 3 * self.settings.timeout
        with self._open_lock:
            late = [request for request, since in self._open.items() if since < oldest]
        for request in late:
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("admin: connection was gone already: %s", error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("admin: request from %s failed", client_address, exc_info=True)


class _Reply(Exception):
    """Ends a request with this status and body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def _bad(status: int, error: str) -> _Reply:
    return _Reply(status, {"error": error})


class _Handler(BaseHTTPRequestHandler):
    server_version = "pdxfer"
    sys_version = ""
    protocol_version = "HTTP/1.0"  # a connection a request: nothing idles

    def setup(self) -> None:
        self.request.settimeout(cast(_Server, self.server).settings.timeout)
        super().setup()

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        server = cast(_Server, self.server)
        path = self.path
        try:
            self._check_host(server.settings)
            path = self._path()
            route = _ROUTES.get(path)
            if route is None:
                raise _bad(404, f"no such path {path[:100]!r}; there are {', '.join(sorted(_ROUTES))}")
            if route[0] != method:
                raise _bad(405, f"{path} takes {route[0]}, not {self.command}")
            body = self._body() if method == "POST" else b""
            status, content = 200, route[1](server, body)
        except _Reply as reply:
            status, content = reply.status, reply.body
        except Unavailable as error:
            status, content = 503, {"error": str(error)}
        except Exception as error:
            log.exception("admin: %s %s", method, path)
            status, content = 500, {"error": f"{type(error).__name__}: {error}; see the daemon's log"}
        if isinstance(content, bytes):
            self._send(status, metrics.CONTENT_TYPE, content)
        else:
            self._send(status, "application/json", json.dumps(content, default=str).encode() + b"\n")

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path
        except ValueError as error:
            raise _bad(400, f"the path is {self.path[:100]!r}, expected one like /status: {error}") from None

    def _check_host(self, settings: AdminSettings) -> None:
        """A page in a browser on this host must not reach us under a name of its own (DNS rebinding)."""
        host = self.headers.get("Host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError as error:
            raise _bad(400, f"Host is {host[:100]!r}, expected a name or an address: {error}") from None
        if host and not settings.allow_remote and not is_loopback(name):
            raise _bad(421, f"Host is {host[:100]!r}, expected a loopback address")

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise _bad(415, f"Content-Type is {self.headers.get_content_type()!r}, expected application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _bad(411, "Content-Length is missing or not a number")
        if int(length) > MAX_BODY:
            raise _bad(413, f"the body has {length} bytes, expected at most {MAX_BODY}")
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            raise _bad(400, f"the body has {len(body)} bytes, Content-Length says {length}")
        return body

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what http.server itself refuses: JSON as well."""
        self.close_connection = True
        self._send(code, "application/json", json.dumps({"error": message or HTTPStatus(code).phrase}).encode() + b"\n")

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("admin: %s %s", self.client_address[0], format % args)


# routes ------------------------------------------------------------------------------------------------------------


def _livez(server: _Server, body: bytes) -> Any:
    why = server.backend.alive()
    if why is not None:
        raise _Reply(503, {"alive": False, "reasons": [why]})
    return {"alive": True, "reasons": []}


def _readyz(server: _Server, body: bytes) -> Any:
    try:
        reasons = server.ask(server.backend.not_ready())
    except Unavailable as error:
        reasons = [str(error)]
    if reasons:
        raise _Reply(503, {"ready": False, "reasons": reasons})
    return {"ready": True, "reasons": []}


def _metrics(server: _Server, body: bytes) -> Any:
    try:
        status = server.ask(server.backend.status())
    except Unavailable as error:
        log.warning("admin: /metrics: %s: the gauges are those of the last scrape", error)
        status = None
    return server.backend.render_metrics(status)


def _status(server: _Server, body: bytes) -> Any:
    return server.ask(server.backend.status())


def _rooms(server: _Server, body: bytes) -> Any:
    return server.ask(server.backend.rooms())


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(400, f"the body is not a JSON object {{{', '.join(kind.__struct_fields__)}}}: {error}") from None


def _abort(server: _Server, body: bytes) -> Any:
    request: AbortRequest = _decode(body, AbortRequest)
    problem = request.problem()
    if problem:
        raise _bad(400, problem)
    result = server.ask(server.backend.abort(request.room, request.epoch, request.detail))
    if not result["found"]:
        raise _Reply(404, result | {"error": f"no live room {request.room!r} with epoch {request.epoch} on this node"})
    return result


def _inject(server: _Server, body: bytes) -> Any:
    request: InjectRequest = _decode(body, InjectRequest)
    try:
        server.ask(server.backend.inject("bootstrap", request.inject))
    except LookupError as error:
        raise _bad(404, str(error)) from None
    return {"injected": request.inject}


_ROUTES: dict[str, tuple[str, Callable[[_Server, bytes], Any]]] = {
    "/livez": ("GET", _livez),
    "/readyz": ("GET", _readyz),
    "/metrics": ("GET", _metrics),
    "/status": ("GET", _status),
    "/rooms": ("GET", _rooms),
    "/rooms/abort": ("POST", _abort),
    "/debug/bootstrap": ("POST", _inject),
}
