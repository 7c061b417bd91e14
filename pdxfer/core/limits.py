"""Every deadline, window and bound of the core, with its default.

Owns: the numbers. Must not: use them. The configuration file's ``[limits]`` and ``[mirror]`` tables are these structs; times
are seconds.
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines are per phase: no state of a room is without one (R5)."""

    open_timeout: float = 60.0  # a send that nobody wants
    want_timeout: float = 60.0  # a receive whose sender has not opened the room
    resolve_timeout: float = 5.0  # the registry's answer
    connect_timeout: float = 5.0  # a session with a peer, from the first Hello
    engine_timeout: float = 15.0  # an engine that is not ready
    push_timeout: float = 60.0  # a matched send whose worker pushes nothing more
    credit_timeout: float = 30.0  # a segment without a slot at the receiver
    ack_timeout: float = 20.0  # a sent segment, or a finish, without its answer
    room_timeout: float = 600.0  # any room, whatever it waits for
    transfer_deadline: float = 10.0  # one posted transfer or copy
    stall_deadline: float = 10.0  # silence of a peer, of a worker with live rooms, or of the engine
    cut_grace: float = 2.0  # silence of a peer whose connection closed
    heartbeat_interval: float = 0.5
    retry_first: float = 0.1  # repetition of an unanswered message: first, then doubled up to retry_most
    retry_most: float = 1.0
    quarantine_limit: float = 30.0  # a slot in quarantine before the engine is killed as a fence
    tombstone_ttl: float = 600.0  # how long the end of a room is remembered; must outlive any late message
    max_tombstones: int = 200_000
    max_rooms: int = 20_000
    room_window: int = 4  # slots granted to one room at a time
    park_limit: int = 20_000  # wants for rooms that are not open yet
    local_chunk: int = 16 << 20  # bytes of one pool-to-pool copy
    peer_ttl: float = 600.0  # how long a silent peer without rooms or slots is remembered

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        for key in self.__struct_fields__:
            value = getattr(self, key)
            if not value > 0:
                raise ValueError(f"limits.{key} is {value}, expected a positive number")
        for low, high in (
            ("retry_first", "retry_most"),
            ("heartbeat_interval", "cut_grace"),
            ("cut_grace", "stall_deadline"),
            ("retry_most", "stall_deadline"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"limits.{low} is {getattr(self, low)}, expected at most limits.{high} ({getattr(self, high)})"
                )


class MirrorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host mirror: what it may take of the machine, and how it is cut."""

    bytes: int = 0  # of host memory; 0: no mirror
    block_tokens: int = 64  # tokens of an entry: a multiple of every pool's page_tokens
    layouts: int = 1  # into how many parts it is cut: one for each kind of workers whose pools differ
    share: float = 1.0  # the part of a layout's entries that one tenant may hold
    store_after: int = 1  # a block is stored when it is given for the n-th time: what comes once is not worth the copy
    timeout: float = 30.0  # one store or load, and a lease that nobody lets go

    def check(self) -> None:
        """Raise ValueError, naming the key, when a value cannot work."""
        if not 0 <= self.bytes < 1 << 56:
            raise ValueError(f"mirror.bytes is {self.bytes}, expected 0 (no mirror) or a number of bytes below 2**56")
        for key in ("block_tokens", "layouts", "store_after"):
            if not 1 <= getattr(self, key) <= 65536:
                raise ValueError(f"mirror.{key} is {getattr(self, key)}, expected 1 to 65536")
        if not 0 < self.share <= 1:
            raise ValueError(f"mirror.share is {self.share}, expected a part above 0 and at most 1")
        if not self.timeout > 0:
            raise ValueError(f"mirror.timeout is {self.timeout}, expected a positive number of seconds")
        if self.bytes and self.bytes // self.layouts < 4096:
            raise ValueError(f"mirror.bytes is {self.bytes}, expected at least 4096 for each of {self.layouts} layouts")
