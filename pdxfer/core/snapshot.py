"""The state of a node for people and metrics: plain dictionaries, nothing that can be changed through them.

Owns: what `pdxfer status`, `pdxfer rooms` and the metrics are made from. Must not: change anything.
"""

from __future__ import annotations

from typing import Any

from .ledger import PAGE_STATES, SlotState
from .state import Peer, RecvRoom, Room, SendRoom, State

SEND_STATES = (SendRoom.OPEN, SendRoom.MATCHED, SendRoom.SENDING, "homing")
RECV_STATES = (RecvRoom.RESOLVING, RecvRoom.WANTING, RecvRoom.RECEIVING, "homing")
SEND_SLOT_STATES = (SlotState.FREE, SlotState.SENDING, SlotState.DOUBTFUL)
RECV_SLOT_STATES = (SlotState.FREE, SlotState.GRANTED, SlotState.SCATTERING, SlotState.QUARANTINED)
PEER_STATES = (Peer.CONNECTING, Peer.UP, Peer.LOST)


def _room(st: State, room: Room) -> dict[str, Any]:
    out: dict[str, Any] = {
        "room": room.room,
        "epoch": room.epoch,
        "side": "send" if room.sending else "receive",
        "state": room.state if room.live else "homing",
        "reason": room.reason,
        "worker": room.worker.engine_id,
        "peer": room.peer or (st.name if room.local is not None else ""),
        "age_seconds": st.now - room.opened,
        "idle_seconds": st.now - room.progress,
        "bytes": room.bytes,
        "jobs": len(room.jobs),
    }
    if isinstance(room, SendRoom):
        out |= {
            "pages": sum(room.counts),
            "segments": len(room.plans),
            "granted": room.granted,
            "acknowledged": room.acked,
            "finished": room.finished is not None,
        }
    elif isinstance(room, RecvRoom):
        out |= {
            "pages": sum(t.size for t in room.tables),
            "segments": room.need,
            "granted": room.granted,
            "acknowledged": len(room.verified),
            "finished": room.finish is not None,
        }
    return out


def snapshot(st: State) -> dict[str, Any]:
    """Everything, as of the last event: times in seconds, sizes in bytes."""
    rooms: list[Room] = [*st.sends.values(), *st.recvs.values(), *st.homing.values()]
    by_state = {"send": dict.fromkeys(SEND_STATES, 0), "receive": dict.fromkeys(RECV_STATES, 0)}
    oldest = {"send": 0.0, "receive": 0.0}
    for room in rooms:
        side = "send" if room.sending else "receive"
        by_state[side][room.state if room.live else "homing"] += 1
        oldest[side] = max(oldest[side], st.now - room.opened)
    send_slots, recv_slots = dict.fromkeys(SEND_SLOT_STATES, 0), dict.fromkeys(RECV_SLOT_STATES, 0)
    send_slots |= {SlotState(k): v for k, v in st.engine.send.counts().items()}
    recv_slots |= {SlotState(k): v for k, v in st.engine.recv.counts().items()}
    pages = dict.fromkeys(PAGE_STATES, 0)
    per_worker = st.pages.counts()
    for counts in per_worker.values():
        for state, n in counts.items():
            pages[state] += n
    info = st.engine.info
    return {
        "node": st.name,
        "incarnation": st.incarnation,
        "address": st.address,
        "release": st.release,
        "draining": st.draining,
        "engine": {
            "up": info is not None,
            "incarnation": info.incarnation if info is not None else 0,
            "agent": info.agent if info is not None else "",
            "nixl": info.nixl if info is not None else "",
            "slot_bytes": info.slot_bytes if info is not None else 0,
            "pid": st.engine.pid,
            "since_seconds": st.now - st.engine.since,
            "counters": dict(st.engine_counters),
        },
        "workers": [
            {
                "engine_id": w.engine_id,
                "role": w.role,
                "pid": w.pid,
                "gone": w.gone,
                "silent_seconds": st.now - w.heard,
                "rooms": len(w.rooms),
                "pools": {s.name: n for s, n in zip(w.specs, w.num_pages, strict=True)},
                "pages": per_worker.get(w.id, {}),
            }
            for w in st.workers.values()
        ],
        "peers": [
            {
                "node": p.node,
                "state": p.state,
                "incarnation": p.incarnation,
                "engine_incarnation": p.engine.incarnation if p.engine is not None else 0,
                "silent_seconds": st.now - p.heard,
                "rooms": len(p.rooms),
                "release": p.hello.release if p.hello is not None else "",
            }
            for p in st.peers.values()
        ],
        "rooms": [_room(st, room) for room in rooms],
        "rooms_by_state": by_state,
        "oldest_room_seconds": oldest,
        "pages": pages,
        "slots": {
            "send": {str(k): v for k, v in send_slots.items()},
            "receive": {str(k): v for k, v in recv_slots.items()},
        },
        "parked_wants": len(st.parked),
        "tombstones": len(st.tombstones),
        "jobs": len(st.jobs),
    }
