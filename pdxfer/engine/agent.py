"""The NIXL agent: peers, posted WRITEs and notifications, and what an exception from NIXL means.

Owns: every call of NIXL; they all come from the one thread that made the agent. Must not: know pages, jobs or sockets.

What NIXL cannot do decides the shape (docs/nixl.md): a posted WRITE cannot be taken back, so one that is in PROC is polled for ever
(the parent has the deadline, and kills this process past it) and is never released before its end. Any exception ends
that peer's *generation*: nothing more is posted, what is under way is polled to its end, then the peer is removed, and
only then may it be loaded again. (NIXL's exceptions have no common base, and its bindings raise others: hence the blind
catches.) A name whose metadata NIXL refused is burned. Only WRITE is used: a READ lets a dying
reader kill the process that is read from.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any, Final

from pdxfer.core.messages import EngineInfo

from .exits import NIXL_FAILED, Fault
from .nixl import Nixl

MAX_METADATA: Final = 1 << 20
MAX_PEERS: Final = 100_000  # names that are remembered, burned ones included
RELOAD_AFTER: Final = 0.2  # seconds between the end of a peer's generation and the next

_KEY: Final = b"pdxfer engine metadata 1"


def metadata_digest(agent: str, nixl: str, metadata: bytes) -> bytes:
    """What binds NIXL's metadata to its agent's name, its version and its length.

    Mutated metadata crashes NIXL in 16 of 903 cases and passes in 114, so it is never shown any without this.
    """
    h = hashlib.blake2b(key=_KEY, digest_size=16)
    for part in (agent.encode(), nixl.encode(), metadata):
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


class PeerLost(Exception):
    """Nothing can be sent to this peer (now)."""


class _Peer:
    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.loaded = True
        self.transfers: set[Transfer] = set()
        self.leaving = False  # RemovePeer came: forget it as soon as it is idle
        self.lost = ""  # why this generation is over
        self.reload_at = 0.0


class Transfer:
    """One posted WRITE. ``tag`` is the caller's."""

    __slots__ = ("handle", "peer", "since", "size", "tag")

    def __init__(self, peer: _Peer, handle: Any, size: int, tag: int, since: float) -> None:
        self.peer = peer
        self.handle = handle
        self.size = size
        self.tag = tag
        self.since = since


class Agent:
    def __init__(self, nixl: Nixl, name: str, backend: str, address: int, size: int) -> None:
        """Make the agent and register the slots' memory. Raises Fault."""
        self.name = name
        self.version = nixl.version
        self.errors = 0
        self._peers: dict[str, _Peer] = {}
        self._under_way: set[Transfer] = set()
        self._burned: dict[str, str] = {}
        try:
            # No progress thread: it burns a core, and progress comes from our own polling.
            config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._nixl = nixl.api.nixl_agent(name, config)
            self._nixl.create_backend(backend, {"ucx_error_handling_mode": "peer"})
            self._nixl.register_memory([(address, size, 0, "")], "DRAM")
            self.metadata: bytes = self._nixl.get_agent_metadata()
        except Exception as error:
            raise Fault(
                NIXL_FAILED,
                f"NIXL {nixl.version} ({nixl.package}) did not start its {backend} back end for {size >> 20} MiB of slots:"
                f" {_what(error)}; check engine.tls, engine.devices and the UCX_* variables",
            ) from error

    # peers ---------------------------------------------------------------------------------------------------------

    def add(self, info: EngineInfo) -> str:
        """Load a peer's metadata. Returns an error, empty when it is known and trusted.

        A peer that is added again while its last generation is ending is not refused: the next post that can, begins the next.
        """
        name = info.agent
        if name in self._burned:
            return f"its name is burned: {self._burned[name]}"
        if name == self.name:
            return "that is this engine's own name"
        problem = self._distrust(info)
        if problem:
            return problem
        peer = self._peers.get(name)
        if peer is not None:
            if peer.info != info:
                return "it is known already, with other metadata"
            peer.leaving = False
            return ""
        if len(self._peers) + len(self._burned) >= MAX_PEERS:
            return f"{MAX_PEERS} peers are known, which is the limit"
        error = self._load(info)
        if not error:
            self._peers[name] = _Peer(info)
        return error

    def _distrust(self, info: EngineInfo) -> str:
        if info.nixl != self.version:
            return f"it runs NIXL {info.nixl}, expected {self.version} as here: install the same on both nodes"
        if not 0 < len(info.metadata) <= MAX_METADATA:
            return f"its metadata has {len(info.metadata)} bytes, expected 1 to {MAX_METADATA}"
        if metadata_digest(info.agent, info.nixl, info.metadata) != info.digest:
            return f"the digest does not fit its {len(info.metadata)} bytes of metadata"
        return ""

    def _load(self, info: EngineInfo) -> str:
        try:
            found = self._nixl.add_remote_agent(info.metadata)
        except Exception as error:  # noqa: BLE001
            return self._burn(info.agent, f"NIXL refused its metadata: {_what(error)}")
        if isinstance(found, bytes):
            found = found.decode(errors="replace")
        if found == info.agent:
            return ""
        try:
            self._nixl.remove_remote_agent(found)
        except Exception:  # noqa: BLE001
            self.errors += 1
        return self._burn(info.agent, f"its metadata is that of {found!r}")

    def _burn(self, name: str, why: str) -> str:
        self.errors += 1
        self._burned[name] = why
        return why

    def _reload(self, peer: _Peer) -> str:
        """Begin a peer's next generation, if the last one is over and some time has passed."""
        if peer.loaded:
            return f"{len(peer.transfers)} transfers of its last generation are not over ({peer.lost})"
        if time.monotonic() < peer.reload_at:
            return f"its last generation ended just now ({peer.lost})"
        error = self._load(peer.info)
        if error:
            del self._peers[peer.info.agent]
        else:
            peer.loaded, peer.lost = True, ""
        return error

    def remove(self, name: str) -> None:
        """Forget a peer as soon as none of its transfers is under way. An unknown one is forgotten already."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.leaving = True
            peer.lost = peer.lost or "it was removed"
            self._retire(peer)

    def _lose(self, peer: _Peer, why: str) -> None:
        self.errors += 1
        peer.lost = peer.lost or why
        self._retire(peer)

    def _retire(self, peer: _Peer) -> None:
        if not peer.lost or peer.transfers:
            return
        name = peer.info.agent
        if peer.loaded:
            peer.loaded = False
            peer.reload_at = time.monotonic() + RELOAD_AFTER
            try:
                self._nixl.remove_remote_agent(name)
            except Exception as error:  # noqa: BLE001
                peer.leaving = True
                self._burn(name, f"NIXL could not remove it: {_what(error)}")
        if peer.leaving:
            del self._peers[name]

    # transfers -----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def usable(self, name: str) -> str:
        """Why nothing can be sent to this peer now; empty when it can."""
        peer = self._peers.get(name)
        if peer is None:
            return f"no such peer: {self._burned.get(name, 'it was never added, or was removed')}"
        if peer.leaving:
            return "it was removed"
        return self._reload(peer) if peer.lost else ""

    def post(self, name: str, source: int, target: int, size: int, notification: bytes, tag: int) -> Transfer:
        """WRITE ``size`` bytes from ``source`` here to ``target`` there. Raises PeerLost."""
        problem = self.usable(name)
        if problem:
            raise PeerLost(problem)
        peer = self._peers[name]
        info = peer.info
        if not info.slot_base <= target <= target + size <= info.slot_base + info.slots * info.slot_bytes:
            raise PeerLost(f"address {target:#x}+{size} is outside its receive slots")
        handle = None
        since = time.monotonic()
        try:
            handle = self._nixl.initialize_xfer(
                "WRITE",
                self._nixl.get_xfer_descs([(source, size, 0)], "DRAM"),
                self._nixl.get_xfer_descs([(target, size, 0)], "DRAM"),
                name,
                notification,
            )
            state = self._nixl.transfer(handle)
            if state == "ERR":
                raise PeerLost("NIXL answers ERR")
        except Exception as error:
            why = f"WRITE of {size} bytes to {name}: {_what(error)}"
            if handle is not None:
                self._release(handle)
            self._lose(peer, why)
            raise PeerLost(why) from error
        transfer = Transfer(peer, handle, size, tag, since)
        peer.transfers.add(transfer)
        self._under_way.add(transfer)
        return transfer

    def poll(self) -> Iterator[tuple[Transfer, str]]:
        """Transfers that are over, each with its error (empty: done). The rest makes progress."""
        for transfer in list(self._under_way):
            peer, error = transfer.peer, ""
            try:
                state = self._nixl.check_xfer_state(transfer.handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    error = f"NIXL answers {state}"
            except Exception as problem:  # noqa: BLE001
                error = _what(problem)
            self._under_way.discard(transfer)
            peer.transfers.discard(transfer)
            self._release(transfer.handle)
            if error:
                error = f"WRITE of {transfer.size} bytes to {peer.info.agent}: {error}"
                self._lose(peer, error)
            else:
                self._retire(peer)
            yield transfer, error

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except Exception:  # noqa: BLE001
            self.errors += 1

    def notifications(self) -> dict[str, list[bytes]]:
        """What arrived since the last call, by sender. Its name is the sender's claim."""
        try:
            found: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        except Exception:  # noqa: BLE001
            # A sender whose name is no text, say. All that came with it is lost here, and said again by message.
            self.errors += 1
            return {}
        return found


def _what(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
