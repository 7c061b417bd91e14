"""The ``[bootstrap]`` and ``[registry]`` tables of the configuration file.

Owns: keys, defaults and the checks of single values. Must not: open sockets or read key files.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from pdxfer.core.messages import good_name

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]*\]|[^:/\s]+):(\d+|\*)")
KEY_CHARACTERS = 40  # of a CURVE key in Z85


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


def check_endpoint(key: str, value: str) -> None:
    match = _ENDPOINT.fullmatch(value)
    if match is None or (match[2] != "*" and not int(match[2]) < 65536):
        raise ValueError(f"{key} is {value!r}, expected tcp://HOST:PORT, for example tcp://10.0.0.1:7971")


def check_key(key: str, value: str) -> None:
    if len(value) != KEY_CHARACTERS or not value.isprintable():
        raise ValueError(f"{key} is {value[:50]!r}, expected the {KEY_CHARACTERS} characters of a public key (pdxfer keygen)")


class BootstrapSettings(_Table, frozen=True):
    """``[bootstrap]``: the socket between sidecars."""

    listen: str = "tcp://127.0.0.1:7971"  # port 0 or *: any free one
    advertise: str = ""  # what peers connect to; empty: listen itself, so set it when listening on all addresses
    key_file: str = ""  # the secret key, mode 0600; empty: bootstrap.key in the runtime directory, made at the first start
    authorized_keys: tuple[str, ...] = ()  # beside those of the registry; a node's name is pinned to its key at first use
    inbox: int = 8192  # frames that wait for the main loop; more are dropped, and their senders repeat them
    outbox: int = 1024  # frames that wait for one peer; the oldest are dropped
    handshake_seconds: float = 5.0  # for a connection to prove its key

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        check_endpoint("bootstrap.listen", self.listen)
        if self.advertise:
            check_endpoint("bootstrap.advertise", self.advertise)
        host = self.listen[len("tcp://") :].rpartition(":")[0]
        if not self.advertise and host in ("*", "0.0.0.0", "[::]"):
            raise ValueError(
                f"bootstrap.advertise is empty and bootstrap.listen is {self.listen!r}: peers cannot connect to all"
                " addresses; set bootstrap.advertise to the one that they reach"
            )
        for key in self.authorized_keys:
            check_key("bootstrap.authorized_keys", key)
        for name in ("inbox", "outbox", "handshake_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"bootstrap.{name} is {getattr(self, name)}, expected a positive number")


class NodeEntry(_Table, frozen=True):
    """One node that is known by configuration: who it is, where, with which key, and which engine ids it serves."""

    node: str
    address: str
    public_key: str
    engines: tuple[str, ...] = ()


class RegistrySettings(_Table, frozen=True):
    """``[registry]``: who serves an engine id.

    ``static``: the entries of ``nodes`` say it. ``embedded``: the sidecar named ``server`` keeps leases; its entry must
    be in ``nodes`` of all others, so that they can reach it.
    """

    kind: Literal["static", "embedded"] = "static"
    nodes: tuple[NodeEntry, ...] = ()
    server: str = ""
    ttl: float = 10.0  # seconds that a lease lives; it is renewed three times in that
    cache: float = 2.0  # seconds that an answer is used again

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        seen: dict[str, str] = {}
        engines: dict[str, str] = {}
        for i, entry in enumerate(self.nodes):
            where = f"registry.nodes[{i}]"
            if not good_name(entry.node):
                raise ValueError(f"{where}.node is {entry.node!r}, expected 1 to 128 printable characters")
            check_endpoint(f"{where}.address", entry.address)
            check_key(f"{where}.public_key", entry.public_key)
            if entry.node in seen or entry.public_key in seen.values():
                raise ValueError(f"{where}: node {entry.node!r} or its public key is named twice")
            seen[entry.node] = entry.public_key
            for engine in entry.engines:
                if not good_name(engine):
                    raise ValueError(f"{where}.engines: {engine!r}, expected 1 to 128 printable characters")
                if engine in engines:
                    raise ValueError(f"{where}.engines: {engine!r} is served by node {engines[engine]!r} already")
                engines[engine] = entry.node
        if self.kind == "embedded" and not good_name(self.server):
            raise ValueError("registry.server is empty, expected the name of the node that keeps the registry")
        for name in ("ttl", "cache"):
            if not getattr(self, name) > 0:
                raise ValueError(f"registry.{name} is {getattr(self, name)}, expected a positive number")
