"""The daemon's own tables of the configuration file: node, worker, admin, supervisor, log, debug.

Owns: keys, defaults and the checks of single values. Must not: read files or the environment (config.py does), or know
the other parts' tables: [engine] belongs to ``engine.settings``, [bootstrap] and [registry] to ``bootstrap.settings``,
[limits] to ``core.limits``.

Every struct's ``check`` raises ValueError whose message begins with ``table.key``.
"""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

from .core.messages import good_name


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[node]``: who this sidecar is and where it keeps its few files."""

    name: str = ""  # unique among the nodes that talk to each other; empty: the host's name
    runtime_dir: str = (
        ""  # locks, sockets, the last incarnation; empty: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/pdxfer or /run/pdxfer
    )

    def check(self) -> None:
        if self.name and not good_name(self.name):
            raise ValueError(f"node.name is {self.name!r}, expected 1 to 128 printable characters")


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[worker]``: the unix socket that workers attach to."""

    socket: str = ""  # empty: worker.sock in the runtime directory
    attach_timeout: float = 5.0  # seconds from the connection to the attach frame
    max_connections: int = 1024
    max_buffer: int = 64 << 20  # bytes queued for a worker that does not read, before it is dropped
    users: tuple[int, ...] = ()  # ids of users whose workers may attach, beside root's and the sidecar's own

    def check(self) -> None:
        for key in ("attach_timeout", "max_connections", "max_buffer"):
            if not getattr(self, key) > 0:
                raise ValueError(f"worker.{key} is {getattr(self, key)}, expected a positive number")
        if len(self.socket.encode()) > 107:
            raise ValueError(f"worker.socket has {len(self.socket.encode())} bytes, expected at most 107 (sun_path)")


class AdminSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[admin]``: the HTTP service for operators and probes."""

    host: str = "127.0.0.1"
    port: int = 7970  # 0: any free one; its number is written to admin.json in the runtime directory
    allow_remote: bool = False  # bind an address that is not loopback; there is no authentication
    max_connections: int = 32
    timeout: float = 5.0  # seconds for a client to send its request, and for the main loop to answer

    def check(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"admin.port is {self.port}, expected 0 to 65535")
        for key in ("max_connections", "timeout"):
            if not getattr(self, key) > 0:
                raise ValueError(f"admin.{key} is {getattr(self, key)}, expected a positive number")
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(
                f"admin.host is {self.host!r}, expected a loopback address: the admin service has no authentication;"
                " set admin.allow_remote = true if the network is trusted"
            )


class SupervisorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[supervisor]``: how often a service may be restarted, and how long a shutdown may take."""

    restart_budget: int = 10  # restarts of one service within the window; one more ends the daemon with exit code 70
    restart_window: float = 60.0
    backoff_first: float = 0.25  # before the second restart in a window (the first is at once), then doubled
    backoff_most: float = 5.0
    check_interval: float = 0.2  # seconds between looks at the heartbeats
    start_deadline: float = 30.0  # an engine that was started but is not ready
    drain_timeout: float = 30.0  # after SIGTERM: for the rooms that are under way, before they are ended by name
    close_timeout: float = 5.0  # for the engine's orderly end, before it is killed
    core_error_budget: int = 5  # events within the window that the core raised on, before the daemon exits with 70

    def check(self) -> None:
        for key in self.__struct_fields__:
            value = getattr(self, key)
            least = 0 if key in ("restart_budget", "drain_timeout", "core_error_budget", "backoff_first") else None
            if value < 0 or (least is None and value == 0):
                raise ValueError(
                    f"supervisor.{key} is {value}, expected {'a number of at least 0' if least == 0 else 'a positive number'}"
                )
        if self.backoff_first > self.backoff_most:
            raise ValueError(
                f"supervisor.backoff_first is {self.backoff_first}, expected at most"
                f" supervisor.backoff_most ({self.backoff_most})"
            )


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[log]``: to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json: bool = False  # one JSON object a line


class DebugSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[debug]``: for tests and chaos. Never on in production."""

    hooks: bool = False  # POST /debug/… injects faults


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
