"""Frames between nodes, and between workers and their sidecar: whatever comes in, decoding ends in a value or in Refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from core_harness import SPECS, attach, table
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.core import jobs, messages, worker
from pdxfer.core.geometry import Piece
from pdxfer.core.reasons import Refused

INFO = messages.EngineInfo(3, "p:1:3", "1.5.1", b"meta", b"digest", 1 << 20, 1 << 24, 8)
SEGMENT = messages.Segment("r", 0, 1, 2, 3, 4, 40, 2**64 - 1, (Piece(0, 0, 1, 0, 1),))
BODY: tuple[messages.Message, ...] = (
    messages.Hello(5, 2, "tcp://p", "0.1", INFO), messages.Hello(5, 2, "tcp://p", "0.1", None), messages.Heartbeat(1, 2),
    messages.Goodbye(), messages.Want("r", 0, "prefill", "decode", SPECS, (3, 2)), messages.Accept("r", 0),
    messages.Need("r", 0, 3), messages.Grant("r", 0, 1, 2, 3, 4), SEGMENT, messages.Ack("r", 0, 1, (3, 4)),
    messages.Finish("r", 0, 3, b"aux"), messages.Done("r", 0), messages.Ended("r", 0, True, "aborted", "gone"),
    messages.EndedAck("r", 0, True), messages.SlotQuery(4, (("r", 0, 1, 2, 3),)), messages.SlotFate(4, ((2, 3),)),
    messages.Announce("tcp://p", "key", ("prefill",), 5.0), messages.Lookup("prefill"),
    messages.Located("prefill", "p", "tcp://p", "key", 5),
)  # fmt: skip
ENVELOPE = messages.Envelope(messages.PROTOCOL, "p", 5, "d", 6, BODY)
FRAME = messages.encode(ENVELOPE)
WORKER_FRAMES: tuple[worker.WorkerFrame, ...] = (
    attach("prefill"), worker.Open(1, "r", 0), worker.Push(2, "r", 0, (0, 0), 0, 0, (table(1, 2), b"")),
    worker.Finish(3, "r", 0, b"aux"), worker.Receive(4, "r", 0, "prefill", 0, (table(1), table(2))),
    worker.Abort(5, "r", 0, "gone"), worker.Ping(),
    worker.Lookup(6, "m", "", table(1, 2), True), worker.Unpin(7, 3), worker.Store(8, "m", "t", table(1), 0, (table(1), b"")),
    worker.Load(9, 3, 0, 1, (table(1), table(2))), worker.Cancel(10, 9), worker.Evict(11, "m", "t"),
)  # fmt: skip
SIDECAR_FRAMES: tuple[worker.SidecarFrame, ...] = (
    worker.Attached(1, 1, "p", 5, 10.0), worker.Ok(1), worker.Rejected(1, "room_exists", "…"), worker.Released(1, "r", 0),
    worker.RoomEnded("r", 0, True, "DONE", "done", False, "", 3, 0.5, b""), worker.Matched("r", 0, True),
    worker.Held(6, 3, 1, 64), worker.Evicted(11, 5),
    worker.MirrorEnded(9, True, "FAILED", "mirror_corrupt", False, "…", 1, 2, 80, 0.5),
)  # fmt: skip


def only_refuses(decode: Callable[[bytes], Any], frame: bytes) -> Any:
    try:
        return decode(frame)
    except Refused as refused:
        assert refused.detail
        return None


def test_every_message_is_in_the_sample_and_comes_back_equal() -> None:
    assert {type(m) for m in BODY} == set(messages.Message.__args__)
    assert messages.decode(FRAME) == ENVELOPE
    assert messages.decode_segment(messages.encode_segment(SEGMENT)) == SEGMENT


def test_every_worker_frame_comes_back_equal() -> None:
    assert {type(f) for f in WORKER_FRAMES} == set(worker.WorkerFrame.__args__)
    assert {type(f) for f in SIDECAR_FRAMES} == set(worker.SidecarFrame.__args__)
    for frame in WORKER_FRAMES:
        raw = worker.encode(frame)
        assert int.from_bytes(raw[:4], "little") == len(raw) - 4
        assert worker.decode_from_worker(raw[4:]) == frame
    for answer in SIDECAR_FRAMES:
        assert worker.decode_from_sidecar(worker.encode(answer)[4:]) == answer


def test_frames_truncated_at_each_byte_are_refused() -> None:
    for end in range(len(FRAME)):
        with pytest.raises(Refused):
            messages.decode(FRAME[:end])
    for frame in WORKER_FRAMES:
        raw = worker.encode(frame)[4:]
        for end in range(len(raw)):
            with pytest.raises(Refused):
                worker.decode_from_worker(raw[:end])


def test_frames_with_something_behind_them_are_refused() -> None:
    with pytest.raises(Refused):
        messages.decode(FRAME + b"\0")
    with pytest.raises(Refused):
        worker.decode_from_worker(worker.encode(worker.Ping())[4:] + b"\0")


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_garbage_is_refused(garbage: bytes) -> None:
    for decode in (messages.decode, messages.decode_segment, worker.decode_from_worker, worker.decode_from_sidecar):
        assert only_refuses(decode, garbage) is None or decode is not messages.decode


@given(st.sampled_from(BODY), st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4))
@settings(max_examples=500)
def test_mutated_envelopes_are_refused_or_obey_the_limits(
    message: messages.Message, flips: list[tuple[int, int]]
) -> None:
    frame = bytearray(messages.encode(messages.Envelope(1, "p", 5, "d", 6, (message,))))
    for where, bits in flips:
        frame[where % len(frame)] ^= bits
    found = only_refuses(messages.decode, bytes(frame))
    if found is not None:
        assert found.version == messages.PROTOCOL
        for one in found.body:
            messages.check(one)


@given(
    st.sampled_from(WORKER_FRAMES),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=4),
)
@settings(max_examples=500)
def test_mutated_worker_frames_are_refused_or_decode(frame: worker.WorkerFrame, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(worker.encode(frame)[4:])
    for where, bits in flips:
        raw[where % len(raw)] ^= bits
    only_refuses(worker.decode_from_worker, bytes(raw))


@pytest.mark.parametrize("depth", [10, 1000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    for decode in (messages.decode, worker.decode_from_worker):
        with pytest.raises(Refused):
            decode(b"\x91" * depth + b"\xc0")


def test_frames_of_the_future_are_named_as_such() -> None:
    with pytest.raises(Refused, match="wrong_version: protocol version 9, expected 1"):
        messages.decode(messages.encode(messages.Envelope(9, "p", 5, "d", 6, ())))
    with pytest.raises(Refused, match="wrong_version: protocol version 2, expected 1"):
        messages.decode(msgspec.msgpack.encode([2, "p", {"what": "is this"}, [["NewMessage", 1, 2]]]))
    with pytest.raises(Refused, match="bad_frame"):
        messages.decode(msgspec.msgpack.encode([1, "p", 5, "d", 6, [["NewMessage", 1, 2]]]))


def test_frames_that_are_too_large_are_refused() -> None:
    with pytest.raises(Refused, match="frame_too_large"):
        messages.decode(b"\0" * (messages.MAX_FRAME + 1))
    with pytest.raises(Refused, match="bad_frame"):
        messages.decode(
            messages.encode(messages.Envelope(1, "p", 5, "d", 6, (messages.Goodbye(),) * (messages.MAX_PER_FRAME + 1)))
        )


@pytest.mark.parametrize(
    "message",
    [
        messages.Accept("", 0), messages.Accept("x" * 129, 0), messages.Accept("a\nb", 0), messages.Accept("r", -1),
        messages.Accept("r", 2**31), messages.Want("r", 0, "", "d", SPECS, (1, 1)), messages.Want("r", 0, "p", "d", SPECS, (1,)),
        messages.Want("r", 0, "p", "d", SPECS, (1, -1)), messages.Want("r", 0, "p", "d", SPECS, (1, 2**31)),
        messages.Finish("r", 0, -1, b""), messages.Finish("r", 0, 1, b"x" * (messages.MAX_AUX + 1)), messages.Need("r", 0, -1),
        messages.Announce("a", "k", ("",), 5.0), messages.Announce("a", "k", (), 0.0), messages.Announce("a", "k", (), float("nan")),
    ],
    ids=lambda m: f"{type(m).__name__}",
)  # fmt: skip
def test_values_that_types_do_not_exclude_are_refused(message: messages.Message) -> None:
    with pytest.raises(Refused, match="bad_frame"):
        messages.decode(messages.encode(messages.Envelope(1, "p", 5, "d", 6, (message,))))


@pytest.mark.parametrize("change", [{"epoch": "0"}, {"epoch": 0.5}, {"room": 5}, {"extra": 1}, {"req": None}])
def test_worker_frames_are_strict_about_types_and_fields(change: dict[str, Any]) -> None:
    fields = {"type": "Open", "req": 1, "room": "r", "epoch": 0}
    assert worker.decode_from_worker(msgspec.msgpack.encode(fields)) == worker.Open(1, "r", 0)
    with pytest.raises(Refused, match="bad_frame"):
        worker.decode_from_worker(msgspec.msgpack.encode(fields | change))


def test_jobs_and_reports_come_back_equal() -> None:
    rows = (jobs.Rows(0, 0, 2, table(1, 2)),)
    for job in (
        jobs.MapPools(1, attach("x").pools, (1,)), jobs.UnmapPools(1), jobs.AddPeer(INFO), jobs.RemovePeer("p:1:3"),
        jobs.Send(1, 1, rows, 0, 80, "p:1:3", 1 << 20, SEGMENT), jobs.Scatter(2, 1, rows, 0, 80, 2**64 - 1),
        jobs.Copy(3, 80, 1, rows, 2, rows), jobs.Expect(3), jobs.Close(), jobs.MapMirror(4096),
        jobs.MirrorStore(4, 1, 80, (jobs.MirrorEntry(4096, 0, rows),)),
        jobs.MirrorLoad(5, 1, 80, (jobs.MirrorEntry(0, 2**64 - 1, rows),)),
    ):  # fmt: skip
        assert jobs.decode_job(jobs.encode(job)[4:]) == job
    for report in (
        jobs.Ready(INFO, 3, 9), jobs.Mapped(1, ""), jobs.PeerAdded("p:1:3", "no"), jobs.Gathered(1), jobs.Sent(1, 2**64 - 1, "", 0.5),
        jobs.Scattered(1, "", True), jobs.Copied(1, ""), jobs.Landed("p:1:3", SEGMENT), jobs.Counters({"a": 1.0}),
        jobs.MirrorMapped("no"), jobs.MirrorStored(4, (2**64 - 1,), ""), jobs.MirrorLoaded(5, (0,), ""),
    ):  # fmt: skip
        assert jobs.decode_report(jobs.encode(report)[4:]) == report
