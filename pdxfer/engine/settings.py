"""The ``[engine]`` table of the configuration file, and the environment that the engine child runs in.

Owns: keys, defaults, their checks, and which UCX and NIXL variables the child is given. Must not: start anything.

A variable that the user has set wins over ours, always; ``environment`` says where each value came from, so that it can
be shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

MAX_SLOT_BYTES: Final = 64 << 20  # a post above this makes everything behind it wait

# Without these a dead or unreachable peer is noticed after minutes or never, and adding one stalls every other peer.
_UCX: Final = {
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_USER_TIMEOUT": "5s",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "NIXL_LOG_LEVEL": "WARN",
}
_SHOWN: Final = ("UCX_", "NIXL_")
_RDMA: Final = Path("/sys/class/infiniband")


class Variable(NamedTuple):
    """One environment variable of the engine and where its value came from: user, config or default."""

    name: str
    value: str
    origin: str


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both nodes of a transfer need not agree, except that ``slot_bytes`` of each must hold a page."""

    backend: str = "UCX"
    tls: str = ""  # UCX_TLS; empty: UCX chooses
    devices: str = ""  # UCX_NET_DEVICES, e.g. "eth0" or "mlx5_0:1"; empty: UCX chooses
    slot_bytes: int = 4 << 20
    send_slots: int = 16
    recv_slots: int = 32
    copy_threads: int = -1  # beside the thread that calls NIXL; 0: that one copies too; -1: by the number of cores
    copy_stall: float = 5.0  # seconds in one copy after which the engine counts as hung
    nice: int = 0

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        if self.backend != "UCX":
            raise ValueError(f"engine.backend is {self.backend!r}, expected 'UCX', the one back end that is supported")
        if not 4096 <= self.slot_bytes <= MAX_SLOT_BYTES or self.slot_bytes % 4096:
            raise ValueError(
                f"engine.slot_bytes is {self.slot_bytes}, expected a multiple of 4096 between 4096 and {MAX_SLOT_BYTES}"
            )
        for key in ("send_slots", "recv_slots"):
            if not 1 <= getattr(self, key) <= 4096:
                raise ValueError(f"engine.{key} is {getattr(self, key)}, expected 1 to 4096")
        if not -1 <= self.copy_threads <= 64:
            raise ValueError(f"engine.copy_threads is {self.copy_threads}, expected -1 (automatic) to 64")
        if not self.copy_stall > 0:
            raise ValueError(f"engine.copy_stall is {self.copy_stall}, expected a positive number of seconds")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"engine.nice is {self.nice}, expected 0 to 19")

    @property
    def threads(self) -> int:
        """Copy threads, resolved. With few cores there is none to spare: measured on two, a thread made everything slower."""
        if self.copy_threads >= 0:
            return self.copy_threads
        return 2 if len(os.sched_getaffinity(0)) > 4 else 0

    @property
    def memory(self) -> int:
        """Bytes of staging memory."""
        return (self.send_slots + self.recv_slots) * self.slot_bytes

    def variables(self, base: Mapping[str, str] | None = None) -> list[Variable]:
        """What UCX and NIXL will see, given the environment ``base`` (this process's, if left out)."""
        base = os.environ if base is None else base
        chosen = {n: Variable(n, v, "default") for n, v in _UCX.items()}
        if not (_RDMA.is_dir() and any(_RDMA.iterdir())):
            chosen["UCX_MODULES"] = Variable("UCX_MODULES", "^ib", "default")  # spares the search for what is not there
        for name, value in (("UCX_TLS", self.tls), ("UCX_NET_DEVICES", self.devices)):
            if value:
                chosen[name] = Variable(name, value, "config")
        for name, value in base.items():
            if name.startswith(_SHOWN):
                chosen[name] = Variable(name, value, "user")
        return [chosen[name] for name in sorted(chosen)]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The child's whole environment."""
        base = os.environ if base is None else base
        return {**base, **{v.name: v.value for v in self.variables(base)}}
