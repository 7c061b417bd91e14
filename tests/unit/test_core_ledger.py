"""The ledger refuses what cannot be, by name, and its books always add up (R4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.core.ledger import PageLedger, SlotLedger, SlotState
from pdxfer.core.reasons import Refused


def pages(*numbers: int) -> Any:
    return np.array(numbers, dtype="<u4")


def ledger() -> PageLedger:
    books = PageLedger()
    books.attach(1, [8])
    books.attach(2, [8])
    return books


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("bad", [8, 2**32 - 1])
def test_pages_out_of_range(write: bool, bad: int) -> None:
    with pytest.raises(Refused, match=rf"pages_out_of_range: pool 'kv': page {bad}, expected 0 to 7"):
        ledger().check(1, [pages(0, bad)], ["kv"], write=write)


@pytest.mark.parametrize("write", [True, False])
def test_pages_repeated(write: bool) -> None:
    with pytest.raises(Refused, match="pages_repeated: pool 'kv': page 3 is named twice"):
        ledger().check(1, [pages(3, 1, 3)], ["kv"], write=write)


def test_a_page_being_written_is_nobody_elses() -> None:
    books = ledger()
    books.lend(1, [pages(3)], 7, write=True)
    for write in (True, False):
        with pytest.raises(Refused, match=r"pages_not_owned: pool 'kv': page 3 is lent \(write\)"):
            books.check(1, [pages(2, 3)], ["kv"], write=write)
    books.check(2, [pages(2, 3)], ["kv"], write=True)


def test_pages_being_read_are_shared_and_not_written() -> None:
    books = ledger()
    books.lend(1, [pages(3, 4)], 7, write=False)
    books.check(1, [pages(3)], ["kv"], write=False)
    books.lend(1, [pages(3)], 8, write=False)
    with pytest.raises(Refused, match=r"page 3 is lent \(read\)"):
        books.check(1, [pages(3)], ["kv"], write=True)
    books.give_back(1, [pages(3, 4)], 7, write=False)
    assert books.lent(1) == 1
    books.give_back(1, [pages(3)], 8, write=False)
    assert books.lent(1) == 0
    books.audit()
    books.detach(1)


def test_giving_back_what_was_not_lent_is_a_defect() -> None:
    books = ledger()
    with pytest.raises(AssertionError):
        books.give_back(1, [pages(3)], 7, write=True)
    with pytest.raises(AssertionError):
        books.give_back(1, [pages(3)], 7, write=False)
    books.lend(1, [pages(3)], 7, write=True)
    with pytest.raises(AssertionError):
        books.give_back(1, [pages(3)], 8, write=True)
    with pytest.raises(AssertionError, match="detached with pages lent"):
        books.detach(1)


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9), max_size=5)), max_size=40), st.randoms())
def test_the_sum_over_states_is_constant(steps: list[tuple[bool, set[int]]], rng: Any) -> None:
    books = PageLedger()
    books.attach(1, [8])
    lent: list[tuple[int, Any, bool]] = []
    for serial, (write, wanted) in enumerate(steps, 1):
        table = pages(*wanted)
        try:
            books.check(1, [table], ["kv"], write=write)
        except Refused:
            if lent:
                old, given_, was = lent.pop(rng.randrange(len(lent)))
                books.give_back(1, [given_], old, write=was)
        else:
            books.lend(1, [table], serial, write=write)
            lent.append((serial, table, write))
        books.audit()
        assert sum(books.counts()[1].values()) == 8
        assert books.lent(1) == len({int(p) for _, t, _ in lent for p in t})


def test_slots_have_a_new_generation_each_time_and_count_by_peer() -> None:
    slots = SlotLedger(2)
    a = slots.take(SlotState.GRANTED, "r", 0, 0, "p", 1, 5.0)
    b = slots.take(SlotState.GRANTED, "r", 0, 1, "q", 1, 5.0)
    assert slots.free == 0
    assert slots.held_by("p") == 1
    slots.move(a, SlotState.QUARANTINED, 6.0)
    assert a.since == 6.0
    slots.move(a, SlotState.FREE, 7.0)
    slots.move(b, SlotState.SCATTERING, 7.0)
    slots.audit()
    again = slots.take(SlotState.GRANTED, "s", 0, 0, "q", 1, 8.0)
    assert (again is a, again.generation, slots.held_by("p"), slots.held_by("q")) == (True, 2, 0, 2)
    assert slots.counts() == {"granted": 1, "scattering": 1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SlotState.GRANTED, SlotState.SENDING), (SlotState.SENDING, SlotState.QUARANTINED),
        (SlotState.SENDING, SlotState.SENDING), (SlotState.GRANTED, SlotState.DOUBTFUL),
    ],
)  # fmt: skip
def test_moves_that_cannot_be_are_defects(before: SlotState, after: SlotState) -> None:
    slots = SlotLedger(1)
    slot = slots.take(before, "r", 0, 0, "p", 1, 0.0)
    with pytest.raises(AssertionError):
        slots.move(slot, after, 1.0)
