"""The closed lists of reasons: why a room ended, and why a request was refused.

Owns: every name that a user can meet in a log, a metric label or a reply, with its state, whether a retry may help,
and a sentence that says what to do. Must not: hold state. ``pdxfer explain REASON`` prints these entries, and
``docs/protocol.md`` lists them; a test holds the three together.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class End(NamedTuple):
    """How a room can end."""

    name: str
    state: str  # DONE, ABORTED or FAILED
    retriable: bool  # may the router send the same request again (with the next epoch)?
    meaning: str
    advice: str


class Refusal(NamedTuple):
    """Why a request or a frame was refused; the room it names, if any, is not changed by it."""

    name: str
    meaning: str
    advice: str


_ENDS = (
    End("done", "DONE", False, "every segment was scattered and its digest verified", "nothing to do"),
    End(
        "aborted",
        "ABORTED",
        False,
        "a worker of this room asked for the abort",
        "nothing to do: the client went away or the engine gave up",
    ),
    End(
        "aborted_early",
        "ABORTED",
        False,
        "the abort came before the room itself did",
        "nothing to do: the room was killed on arrival",
    ),
    End(
        "operator_abort",
        "ABORTED",
        True,
        "an operator aborted the room (pdxfer abort)",
        "send it again when the operator is done",
    ),
    End(
        "shutdown",
        "ABORTED",
        True,
        "the sidecar is shutting down and the drain time is over",
        "send it again, to another node if one is up",
    ),
    End(
        "worker_lost",
        "FAILED",
        True,
        "the worker's connection to its sidecar closed",
        "look why the worker process died; send the request again",
    ),
    End(
        "worker_stalled",
        "FAILED",
        True,
        "the worker sent no sign of life within the stall deadline",
        "look for a stopped or blocked worker; the client must be polled at least once a second",
    ),
    End(
        "sidecar_lost",
        "FAILED",
        True,
        "the worker's own sidecar went away; the client reports it",
        "send it again: the client attaches again by itself",
    ),
    End(
        "peer_lost",
        "FAILED",
        True,
        "nothing was heard from the peer node within its deadline",
        "check that node's sidecar and the link between the nodes",
    ),
    End(
        "peer_restarted",
        "FAILED",
        True,
        "the peer's sidecar restarted: it has a new incarnation and knows no old rooms",
        "send it again",
    ),
    End(
        "peer_unreachable",
        "FAILED",
        True,
        "no session with the peer could be set up within the connect deadline",
        "check address, firewall and keys of the peer (pdxfer doctor)",
    ),
    End(
        "engine_lost",
        "FAILED",
        True,
        "a transfer engine died or was killed with a copy of this room under way",
        "send it again: a new engine is up within seconds",
    ),
    End(
        "engine_unavailable",
        "FAILED",
        True,
        "no transfer engine was ready within the deadline",
        "see `pdxfer status` for why the engine does not come up",
    ),
    End(
        "metadata_refused",
        "FAILED",
        True,
        "NIXL did not accept the peer's metadata",
        "send it again; if it stays, restart the sidecar named in the message",
    ),
    End(
        "transfer_error",
        "FAILED",
        True,
        "NIXL reported an error for a transfer of this room",
        "check the link and the peer's engine; send it again",
    ),
    End(
        "transfer_deadline",
        "FAILED",
        True,
        "a posted transfer did not finish within its deadline",
        "check the link and the peer's engine; send it again",
    ),
    End(
        "copy_error",
        "FAILED",
        True,
        "a copy between pages and a slot failed",
        "see the engine's log; the pool may have been unmapped or truncated",
    ),
    End(
        "digest_mismatch",
        "FAILED",
        True,
        "the bytes that arrived are not the bytes that were sent",
        "send it again; if it repeats, suspect memory or the network and stop using the node",
    ),
    End(
        "layout_mismatch",
        "FAILED",
        False,
        "the two workers' pools differ in a field that must agree",
        "start both workers with the same model, dtype and page size",
    ),
    End(
        "page_count_mismatch",
        "FAILED",
        False,
        "prefill pushed a different number of pages than decode asked for",
        "both engines must compute the page count from the same tokens",
    ),
    End(
        "unknown_engine",
        "FAILED",
        True,
        "the registry knows no such engine id",
        "check the id and that the worker is attached; see `pdxfer status`",
    ),
    End(
        "registry_unavailable",
        "FAILED",
        True,
        "the registry did not answer within its deadline",
        "check the node that serves the registry",
    ),
    End(
        "want_timeout",
        "FAILED",
        True,
        "prefill did not open the room within the deadline",
        "look whether prefill got the request at all",
    ),
    End(
        "open_timeout",
        "FAILED",
        True,
        "no decode worker wanted the room within the deadline",
        "look whether decode got the request at all",
    ),
    End(
        "push_timeout",
        "FAILED",
        True,
        "the prefill worker pushed nothing more within the deadline",
        "look for a prefill worker that forgot finish()",
    ),
    End(
        "credit_timeout",
        "FAILED",
        True,
        "the receiver granted no slot within the deadline",
        "the receiver is overloaded or its slots are quarantined; see pdxfer_slots",
    ),
    End(
        "ack_timeout",
        "FAILED",
        True,
        "the receiver did not acknowledge within the deadline",
        "see the receiver's log; its engine may be slow",
    ),
    End(
        "room_timeout",
        "FAILED",
        True,
        "the room outlived the longest time a room may take",
        "raise limits.room_timeout if requests are really that long",
    ),
    End(
        "mirror_corrupt",
        "FAILED",
        False,
        "a block of the mirror is not what was stored, and was dropped",
        "compute that block again; if it repeats, suspect the machine's memory",
    ),
    End(
        "protocol_error",
        "FAILED",
        False,
        "the peer broke the protocol",
        "run the same pdxfer release on both nodes; report it with the log",
    ),
    End(
        "internal_error",
        "FAILED",
        True,
        "a defect in pdxfer: the core raised while it handled this room",
        "report it with the log; other rooms are not affected",
    ),
)

_REFUSALS = (
    Refusal("bad_frame", "the frame does not decode as a known message", "use the client library of the same release"),
    Refusal("frame_too_large", "the frame is larger than the limit", "push in smaller pieces"),
    Refusal("wrong_version", "the frame speaks another protocol version", "run the same pdxfer release on both sides"),
    Refusal("not_attached", "the first frame of a connection must be an attach", "call attach() first"),
    Refusal("already_attached", "this connection has attached already", "use one connection per worker"),
    Refusal(
        "engine_id_taken",
        "another live worker holds this engine id",
        "give every worker its own engine id, or stop the other one",
    ),
    Refusal("bad_engine_id", "an engine id is 1 to 128 printable characters", "choose another id"),
    Refusal(
        "bad_room_id",
        "a room id is 1 to 128 printable characters and its epoch 0 to 2**31-1",
        "check what the router sends",
    ),
    Refusal(
        "bad_layout",
        "a pool's layout contradicts itself, its memory or the preset that it is said to be of",
        "build the layout from the tensors themselves",
    ),
    Refusal(
        "map_failed",
        "the engine could not map the worker's pools",
        "check that the memory is shared and as large as the layout says",
    ),
    Refusal("pages_out_of_range", "a page index is not in the pool", "check the page table that was passed"),
    Refusal("pages_repeated", "a page is named twice", "check the page table that was passed"),
    Refusal(
        "pages_not_owned", "a page is lent to another room", "wait for that room's end before its pages are used again"
    ),
    Refusal(
        "pools_unequal",
        "a page table is needed for each pool of the worker, and for no other",
        "pass one list for all pools, or one per pool",
    ),
    Refusal("room_too_large", "a room of so many planes × pages is beyond the limit", "send it as several rooms"),
    Refusal("planes_out_of_range", "the layer range is not in the pool", "check first_layer and layers"),
    Refusal("planes_repeated", "these pages of these layers were pushed before", "push every page of every layer once"),
    Refusal(
        "aux_too_large", "aux is larger than the limit", "aux is for a first token and sampling state, not for tensors"
    ),
    Refusal("room_exists", "this worker side already has this room", "call it once per room"),
    Refusal("room_reused", "the room has ended; a room id is used once per epoch", "retry with the next epoch"),
    Refusal("unknown_room", "no such room is open here", "it has ended, or was never opened by this worker"),
    Refusal("not_your_room", "the room belongs to another worker", "only the worker that opened it may act on it"),
    Refusal("push_after_finish", "finish() was called for this room", "push everything before finish()"),
    Refusal("too_many_rooms", "the node's limit of live rooms is reached", "raise limits.max_rooms or send less"),
    Refusal(
        "mirror_off",
        "there is no host mirror for this worker's pools",
        "set mirror.bytes; the detail says what its pools would need",
    ),
    Refusal(
        "mirror_miss", "the mirror does not hold what was named, or not any more", "look it up again, or compute it"
    ),
    Refusal(
        "mirror_full",
        "every entry that this tenant may have is pinned or being filled",
        "let leases go (unpin), or make mirror.bytes or mirror.share larger",
    ),
    Refusal(
        "bad_tokens",
        "token ids, model or tenant cannot be right",
        "pass the whole prompt as token ids, and page lists for its whole blocks",
    ),
    Refusal("draining", "the sidecar is shutting down and takes no new rooms", "use another node"),
    Refusal("stranger", "the sender's key is not authorised here", "add its public key to the registry or to peers"),
    Refusal("wrong_source", "the frame names another node than its key belongs to", "give every node its own key pair"),
    Refusal(
        "wrong_incarnation",
        "the frame is for another incarnation of this node",
        "the peer is told of the new one; nothing to do",
    ),
    Refusal("no_session", "the frame came before the handshake", "nothing to do: the handshake is repeated"),
    Refusal("overloaded", "the node's inbox is full", "the message is repeated by its sender; nothing to do"),
    Refusal("attach_timeout", "the connection did not attach in time", "attach directly after connecting"),
    Refusal("too_slow", "the worker does not read its socket", "poll the client in the engine's loop"),
    Refusal("no_shm", "shared memory has no room left", "free /dev/shm or make the pool smaller"),
    Refusal(
        "internal",
        "a defect in pdxfer: the request could not be handled",
        "report it with the log; nothing else is affected",
    ),
)

ENDS: Final[dict[str, End]] = {end.name: end for end in _ENDS}
REFUSALS: Final[dict[str, Refusal]] = {refusal.name: refusal for refusal in _REFUSALS}
DONE: Final = "done"


def explain(name: str) -> End | Refusal:
    """The entry for ``name``. Raises KeyError when there is none."""
    return ENDS[name] if name in ENDS else REFUSALS[name]


class Refused(Exception):
    """A request that was refused: ``code`` is a name in REFUSALS, ``detail`` says what was expected and found."""

    def __init__(self, code: str, detail: str) -> None:
        assert code in REFUSALS, code
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
