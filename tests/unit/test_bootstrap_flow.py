"""How much may wait for the main loop, of one peer and of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.bootstrap import flow
from pdxfer.bootstrap.flow import NONE, SHARE, Flow, Load

INBOX = 40


def fill(f: Flow, key: str, length: int = 10) -> int:
    """As many frames as there is room for."""
    count = 0
    while not f.full(key, length, INBOX):
        f.hand(key, Load(1, length))
        count += 1
    return count


def test_one_peer_has_a_share_and_all_have_the_inbox() -> None:
    f = Flow()
    assert fill(f, "a") == INBOX // SHARE
    assert "10 messages, 100 bytes of this peer wait for the main loop, expected at most 10" in f.full("a", 10, INBOX)
    assert [fill(f, key) for key in "bcde"] == [10, 10, 10, 0]
    assert "40 messages, 400 bytes of all peers" in f.full("e", 10, INBOX)
    f.take({"a": Load(4, 40)})
    assert (f.waiting("a"), f.waiting()) == (Load(6, 60), Load(36, 360))
    assert (fill(f, "b"), fill(f, "e"), fill(f, "a")) == (0, 4, 0)


def test_bytes_are_bounded_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "INBOX_BYTES", 400)
    f = Flow()
    assert fill(f, "a", 30) == 3
    assert fill(f, "b", 100) == 1
    assert f.full("c", 101, INBOX)


def test_the_smallest_inbox_takes_one_frame_of_a_peer() -> None:
    f = Flow()
    assert not f.full("a", 1, 1)
    f.hand("a", Load(1, 1))
    assert f.full("b", 1, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100), st.booleans())))
def test_what_is_taken_is_what_was_handed_over(steps: list[tuple[str, int, bool]]) -> None:
    f = Flow()
    waiting: dict[str, Load] = {}
    for key, length, take in steps:
        f.hand(key, Load(1, length))
        waiting[key] = waiting.get(key, NONE).plus(Load(1, length))
        if take:
            f.take(waiting)
            waiting = {}
        assert f.waiting(key) == waiting.get(key, NONE)
        assert f.waiting() == Load(sum(w.messages for w in waiting.values()), sum(w.size for w in waiting.values()))
