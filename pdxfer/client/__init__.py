"""The worker's side of pdxfer: attach pools to the node's sidecar, send and receive rooms.

Owns: Client (polled from an engine's loop) and AsyncClient (asyncio). Must not: start a thread, import nixl or zmq, or
block in anything but ``poll(timeout)`` and the first attach.
"""

from .aio import AsyncClient, AsyncMirror, AsyncReceive, AsyncSend
from .errors import AttachRefused, PdxferError, PdxferRefused, SidecarUnavailable
from .events import (
    Disconnected,
    Ended,
    Event,
    Matched,
    MirrorEnd,
    MirrorEvicted,
    MirrorHeld,
    Reconnected,
    Rejected,
    Released,
    RoomEnd,
)
from .sync import Client, ReceiveRoom, SendRoom

__all__ = [
    "AsyncClient",
    "AsyncMirror",
    "AsyncReceive",
    "AsyncSend",
    "AttachRefused",
    "Client",
    "Disconnected",
    "Ended",
    "Event",
    "Matched",
    "MirrorEnd",
    "MirrorEvicted",
    "MirrorHeld",
    "PdxferError",
    "PdxferRefused",
    "ReceiveRoom",
    "Reconnected",
    "Rejected",
    "Released",
    "RoomEnd",
    "SendRoom",
    "SidecarUnavailable",
]
