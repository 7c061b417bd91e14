"""Whatever the sidecar says, in whatever order, and whenever it is lost: each room ends exactly once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.client.errors import PdxferRefused, SidecarUnavailable
from pdxfer.client.events import Ended, Rejected, Released
from pdxfer.client.rooms import Room, Rooms
from pdxfer.core import worker
from pdxfer.pools import PoolLayout, SharedPool

POOL = SharedPool.allocate(PoolLayout("kv", "uint8", (4,), 4, planes=2), 8)
ROOMS = ("a", "b")

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("open", "receive", "push", "finish", "abort")), st.sampled_from(ROOMS)),
        st.tuples(st.sampled_from(("ok", "rejected", "released")), st.integers(0, 25)),
        st.tuples(st.sampled_from(("ended send", "ended receive", "matched send")), st.sampled_from(ROOMS)),
        st.tuples(st.just("lost"), st.just("")),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_each_room_ends_exactly_once(script: list[tuple[str, object]]) -> None:
    rooms = Rooms([POOL])
    made: list[Room] = []
    ends: Counter[int] = Counter()
    answered: Counter[int] = Counter()
    asked: set[int] = set()
    rooms.answered = lambda req, error: answered.update([req])

    def ended(event: Ended) -> None:
        (room,) = [r for r in made if r.end is event.end]
        ends[id(room)] += 1

    for what, arg in script:
        try:
            match what:
                case "open":
                    room, opened = rooms.open(str(arg), 0)
                    made.append(room)
                    asked.add(opened.req)
                case "receive":
                    room, received = rooms.receive(str(arg), 0, "p", 0, [1])
                    made.append(room)
                    asked.add(received.req)
                case "push" | "finish":
                    for room in [r for r in made if r.room == arg and r.sending][-1:]:
                        frame = rooms.push(room, [1], None, None) if what == "push" else rooms.finish(room, b"")
                        asked.add(frame.req)
                case "abort":
                    asked.add(rooms.abort(str(arg), 0, "").req)
                case "lost":
                    rooms.fail_requests(SidecarUnavailable("path", "test"))
                    for event in rooms.end_all("test"):
                        assert isinstance(event, Ended) and event.end.reason == "sidecar_lost"
                        ended(event)
                    assert not rooms.open_rooms and not rooms.requests
                case _:
                    said = rooms.take(_frame(what, arg))
                    if isinstance(said, Ended):
                        ended(said)
                    elif isinstance(said, Rejected | Released):
                        assert said.room in ROOMS
        except PdxferRefused as error:
            assert error.code in ("room_exists", "unknown_room")
    for event in rooms.end_all("the end"):
        assert isinstance(event, Ended)
        ended(event)
    rooms.fail_requests(SidecarUnavailable("path", "the end"))
    for room in made:
        assert ends[id(room)] == (0 if room.refused is not None and room.end is None else 1)
        assert not room.lent or room.end is None
    assert set(answered) == asked and set(answered.values()) <= {1}


def _frame(what: str, arg: object) -> worker.SidecarFrame:
    number = arg if isinstance(arg, int) else 0
    match what:
        case "ok":
            return worker.Ok(number)
        case "rejected":
            return worker.Rejected(number, "too_many_rooms", "")
        case "released":
            return worker.Released(number, ROOMS[number % 2], 0)
        case "matched send":
            return worker.Matched(str(arg), 0, True)
        case _:
            sending = what == "ended send"
            return worker.RoomEnded(str(arg), 0, sending, "ABORTED", "aborted", False, "", 0, 0.0, b"")
