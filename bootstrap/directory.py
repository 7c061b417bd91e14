"""Who may talk to this node, and where the others are.

Owns: which key belongs to which node, and each node's address. Must not: know sockets. Used from the main loop and
from the bootstrap thread, hence the lock.

A key is authorised by configuration (with its node's name, or without: then the first name that it uses is pinned to it),
or by the registry's node, which is trusted. A name has one key and a key has one name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from .settings import NodeEntry

MAX_NODES = 16_384


class Place(NamedTuple):
    address: str
    public_key: str


class Directory:
    def __init__(self, own_name: str, own_key: str) -> None:
        self._own = own_name
        self._lock = threading.Lock()
        self._names: dict[str, str] = {own_key: own_name}  # public key -> node; empty: not known yet
        self._keys: dict[str, str] = {own_name: own_key}
        self._addresses: dict[str, str] = {}
        self._configured: set[str] = set()  # keys from the configuration

    def configure(self, nodes: Iterable[NodeEntry], authorized: Iterable[str]) -> None:
        """Take over the configuration, at the start and on a reload: keys that are no longer in it lose their rights."""
        nodes, authorized = list(nodes), list(authorized)
        with self._lock:
            wanted = {entry.public_key for entry in nodes} | set(authorized)
            for key in self._configured - wanted:
                name = self._names.pop(key, "")
                self._keys.pop(name, None)
            for entry in nodes:
                if entry.node == self._own:
                    continue
                old = self._keys.get(entry.node)
                if old is not None and old != entry.public_key:
                    self._names.pop(old, None)
                self._names[entry.public_key] = entry.node
                self._keys[entry.node] = entry.public_key
                self._addresses[entry.node] = entry.address
            for key in authorized:
                self._names.setdefault(key, "")
            self._configured = wanted

    def authorised(self, key: str) -> bool:
        with self._lock:
            return key in self._names

    def identify(self, key: str, claimed: str) -> bool:
        """Does this key belong to the node that it claims to be? Pins the name of a key that has none yet."""
        with self._lock:
            name = self._names.get(key)
            if name == "" and claimed not in self._keys and len(self._keys) < MAX_NODES:
                self._names[key] = name = claimed
                self._keys[claimed] = key
            return name == claimed

    def learn(self, node: str, address: str, key: str = "") -> None:
        """An authenticated peer has said where it is, or the registry has said so of another (then with its key)."""
        with self._lock:
            if key and node != self._own:
                old = self._keys.get(node)
                if old is not None and old != key:
                    if old in self._configured:
                        return  # the configuration knows better
                    self._names.pop(old, None)
                if self._names.get(key, "") not in ("", node):
                    return
                self._names[key] = node
                self._keys[node] = key
            if address and node in self._keys:
                self._addresses[node] = address

    def place(self, node: str) -> Place | None:
        with self._lock:
            address, key = self._addresses.get(node), self._keys.get(node)
            return Place(address, key) if address and key else None
