"""The ``[bootstrap]`` and ``[registry]`` tables of the configuration file.

Owns: keys, defaults and the checks of single values. Must not: open sockets or read key files.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from pdxfer.core.messages import good_name

KEY_CHARACTERS: Final = 40  # of a CURVE key in Z85
MAX_ENDPOINT: Final = 300  # characters: a host name has at most 253
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+(?:%\w+)?\]|\*|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5}|\*)", re.ASCII)
_EVERYWHERE = ("*", "0.0.0.0", "[::]", "[0::0]", "[::0]")
_Z85 = {
    c: i for i, c in enumerate("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
}


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


def split_endpoint(endpoint: str) -> tuple[str, str] | None:
    """Host (an IPv6 one in its brackets) and port of tcp://HOST:PORT, or None when it is no such thing."""
    match = _ENDPOINT.fullmatch(endpoint) if len(endpoint) <= MAX_ENDPOINT else None
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        return None
    return match[1], match[2]


def reachable(endpoint: str) -> bool:
    """Is it one place that a peer can connect to: tcp, one host, one port?"""
    parts = split_endpoint(endpoint)
    return parts is not None and parts[0] not in _EVERYWHERE and parts[1] != "*" and int(parts[1]) > 0


def good_key(key: str) -> bool:
    """Is it a CURVE key in Z85: 40 characters, 32 bytes?"""
    if len(key) != KEY_CHARACTERS or not all(c in _Z85 for c in key):
        return False
    for start in range(0, KEY_CHARACTERS, 5):
        value = 0
        for c in key[start : start + 5]:
            value = value * 85 + _Z85[c]
        if value >> 32:
            return False
    return True


def check_address(key: str, value: str) -> None:
    if not reachable(value):
        raise ValueError(
            f"{key} is {value[:MAX_ENDPOINT]!r}, expected one address and port that peers can connect to,"
            " for example tcp://10.0.0.1:7971"
        )


def check_key(key: str, value: str) -> None:
    if not good_key(value):
        raise ValueError(
            f"{key} is {value[:50]!r}, expected a public key of {KEY_CHARACTERS} characters in Z85: pdxfer keygen prints it"
        )


class BootstrapSettings(_Table, frozen=True):
    """``[bootstrap]``: the socket between sidecars."""

    listen: str = "tcp://127.0.0.1:7971"  # port 0 or *: any free one
    advertise: str = ""  # what peers connect to; empty: listen itself, so set it when listening on all addresses
    key_file: str = (
        ""  # the secret key, mode 0600; empty: bootstrap.key in the runtime directory, made at the first start
    )
    authorized_keys: tuple[
        str, ...
    ] = ()  # beside those of the registry; a node's name is pinned to its key at first use
    inbox: int = 8192  # messages that wait for the main loop; more are dropped, and their senders repeat them
    outbox: int = 1024  # frames that wait for one peer; the oldest are dropped
    handshake_seconds: float = 5.0  # for a connection to prove its key

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        parts = split_endpoint(self.listen)
        if parts is None:
            raise ValueError(
                f"bootstrap.listen is {self.listen!r}, expected tcp://HOST:PORT, for example tcp://10.0.0.1:7971"
            )
        if self.advertise:
            check_address("bootstrap.advertise", self.advertise)
        elif parts[0] in _EVERYWHERE:
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
            check_address(f"{where}.address", entry.address)
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
