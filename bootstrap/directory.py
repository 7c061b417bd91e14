"""Who may talk to this node, and where the others are.

Owns: which key belongs to which node, and each node's address. Must not: know sockets. Used from the main loop and
from the bootstrap thread, hence the lock.

A key is authorised by configuration (with its node's name, or without: then the first name that it uses is pinned to it
until this process ends), or by the registry's node, which is trusted. A name has one key and a key has one name; what the
configuration says of a node, its key and its address, nobody else can change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from .settings import NodeEntry, good_key, reachable

MAX_LEARNED: Final = 16_384  # nodes that only the registry has told of; the one learned first makes room


class Place(NamedTuple):
    address: str
    public_key: str


class Directory:
    def __init__(self, own_name: str, own_key: str) -> None:
        self._own = own_name
        self._own_key = own_key
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # public key -> node; empty: not known yet
        self._keys: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._configured: set[str] = set()  # keys from the configuration
        self._fixed: set[str] = set()  # nodes whose address is from the configuration
        self._learned: dict[str, None] = {}  # nodes whose key is from the registry, the oldest first

    def configure(self, nodes: Iterable[NodeEntry], authorized: Iterable[str]) -> None:
        """Take over the configuration, at the start and on a reload: keys that are no longer in it lose their rights."""
        nodes = [entry for entry in nodes if entry.node != self._own]
        authorized = [key for key in authorized if key != self._own_key]
        wanted = {entry.public_key for entry in nodes} | set(authorized)
        with self._lock:
            for key in self._configured - wanted:
                self._drop(key)
            for entry in nodes:
                if self._names.get(entry.public_key) != entry.node:
                    self._drop(entry.public_key)
                if self._keys.get(entry.node) != entry.public_key:
                    self._drop(self._keys.get(entry.node, ""))
                self._names[entry.public_key] = entry.node
                self._keys[entry.node] = entry.public_key
                self._addresses[entry.node] = entry.address
                self._learned.pop(entry.node, None)
            for key in authorized:
                self._names.setdefault(key, "")
            self._configured = wanted
            self._fixed = {entry.node for entry in nodes}

    def _drop(self, key: str) -> None:
        node = self._names.pop(key, "")
        if node:
            self._keys.pop(node, None)
            self._addresses.pop(node, None)
            self._learned.pop(node, None)

    def authorised(self, key: str) -> bool:
        with self._lock:
            return key in self._names

    def own(self, key: str) -> bool:
        """Is it this node's own key? Nobody else may have it."""
        return key == self._own_key

    def identify(self, key: str, claimed: str) -> bool:
        """Does this key belong to the node that it claims to be? Pins the name of a key that has none yet."""
        with self._lock:
            name = self._names.get(key)
            if name == "" and claimed not in self._keys and claimed != self._own:
                self._names[key] = name = claimed
                self._keys[claimed] = key
            return name == claimed

    def learn(self, node: str, address: str, key: str = "") -> bool:
        """An authenticated peer has said where it is, or the registry has said so of another (then with its key).

        False: it cannot be so (no address, no key, or another node's), and nothing was learned.
        """
        if not reachable(address) or (key and not good_key(key)) or node == self._own:
            return False
        with self._lock:
            if key and self._keys.get(node) != key:
                old = self._keys.get(node, "")
                if old in self._configured or self._names.get(key, "") not in ("", node) or key == self._own_key:
                    return False
                self._drop(old)
                self._names[key] = node
                self._keys[node] = key
                if key not in self._configured:
                    self._learned[node] = None
                    if len(self._learned) > MAX_LEARNED:
                        self._drop(self._keys[next(iter(self._learned))])
            if node not in self._keys:
                return False
            if node not in self._fixed:
                self._addresses[node] = address
            return True

    def place(self, node: str) -> Place | None:
        with self._lock:
            address, key = self._addresses.get(node), self._keys.get(node)
            return Place(address, key) if address and key else None

    def key_of(self, node: str) -> str:
        """The node's key, or ""."""
        with self._lock:
            return self._keys.get(node, "")

    def name_of(self, key: str) -> str:
        """The node that the key belongs to; the key itself while that is not known."""
        with self._lock:
            return self._names.get(key) or key
