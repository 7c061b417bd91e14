"""Timers: a key rings once, at the last time that was set for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdxfer.core.timers import Timers


def test_a_key_rings_once_at_its_last_time() -> None:
    timers = Timers()
    timers.set("a", 5.0)
    timers.set("a", 9.0)
    timers.set("b", 7.0)
    assert timers.next() == 7.0
    assert timers.due(6.0) is None
    assert timers.due(20.0) == "b"
    assert timers.due(20.0) == "a"
    assert timers.due(20.0) is None
    assert timers.next() is None
    assert len(timers) == 0


def test_a_cleared_key_does_not_ring() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.clear("a")
    timers.clear("never set")
    assert "a" not in timers
    assert timers.due(9.0) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.floats(0, 100))), max_size=300))
def test_like_a_dictionary_that_is_sorted(steps: list[tuple[int, float | None]]) -> None:
    timers, model = Timers(), dict[int, float]()
    for key, when in steps:
        if when is None:
            timers.clear(key)
            model.pop(key, None)
        else:
            timers.set(key, when)
            model[key] = when
        assert timers.next() == min(model.values(), default=None)
        assert len(timers) == len(model)
    assert len(timers._heap) <= 64 + 4 * len(model) + 1
    rung = []
    while (due := timers.due(1000.0)) is not None:
        rung.append(due)
    assert sorted(rung) == sorted(model)  # type: ignore[type-var]
    assert [model[k] for k in rung] == sorted(model.values())  # type: ignore[index]
