"""The mirror's index against a model of it: what is found is what was stored, and nobody's entry is taken."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdxfer.core.mirror import DOOMED, EMPTY, FILLING, READY, MirrorIndex, prefix_keys

ENTRIES = 12


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def chain(name: int, blocks: int) -> list[bytes]:
    """Keys of a prefix; prefixes with the same name / 4 share their first two blocks."""
    ids = [name // 4] * 8 + [name] * (4 * blocks)
    return prefix_keys(tokens(*ids[: 4 * blocks]), 4)


def test_a_key_depends_on_every_token_before() -> None:
    one = prefix_keys(tokens(*range(100)), 8)
    assert len(one) == 12 and len(set(one)) == 12 and {len(key) for key in one} == {16}
    changed = list(range(100))
    changed[17] += 1
    other = prefix_keys(tokens(*changed), 8)
    assert other[:2] == one[:2]
    assert all(a != b for a, b in zip(other[2:], one[2:], strict=True))
    assert prefix_keys(tokens(1, 2, 3), 4) == [], "no whole block"
    assert prefix_keys(b"", 4) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_keys_do_not_depend_on_what_follows(ids: list[int], block: int) -> None:
    whole = prefix_keys(tokens(*ids), block)
    assert len(whole) == len(ids) // block
    for n in range(len(ids)):
        assert prefix_keys(tokens(*ids[:n]), block) == whole[: n // block]


def test_a_half_filled_prefix_is_found_up_to_its_gap() -> None:
    index = MirrorIndex(8)
    keys = chain(1, 4)
    taken = index.begin("a", keys)
    assert [i for i, _ in taken] == [0, 1, 2, 3] and index.find("a", keys) == []
    for i in (0, 1, 3):
        index.filled(taken[i][1], digest=i)
    assert index.find("a", keys) == [taken[0][1], taken[1][1]]
    assert index.begin("a", keys) == [], "what another store fills is left to it"
    index.abandon(taken[2][1])
    assert index.begin("a", keys) == [(2, taken[2][1])]
    index.filled(taken[2][1], 2)
    assert [index.digest(e) for e in index.find("a", keys)] == [0, 1, 2, 3]


def test_spaces_do_not_see_each_other() -> None:
    index = MirrorIndex(8)
    keys = chain(1, 2)
    for _, entry in index.begin("a", keys):
        index.filled(entry, 0)
    assert len(index.find("a", keys)) == 2 and index.find("b", keys) == []
    assert index.spaces() == {"a": 2}


def test_the_least_recently_used_goes_first_its_end_before_its_beginning() -> None:
    index = MirrorIndex(6)
    held = {}
    for name in (10, 20):
        keys = chain(name, 3)
        for _, entry in index.begin("a", keys):
            index.filled(entry, 0)
        index.touch(index.find("a", keys))
        held[name] = keys
    index.touch(index.find("a", held[10]))
    assert len(index.begin("a", chain(30, 2))) == 2
    assert len(index.find("a", held[20])) == 1 and len(index.find("a", held[10])) == 3
    assert index.dropped["evicted"] == 2


def test_of_all_spaces_the_oldest_use_goes_first() -> None:
    index = MirrorIndex(4)
    for space in ("a", "b", "c", "d"):
        for _, entry in index.begin(space, chain(1, 1)):
            index.filled(entry, 0)
    index.touch(index.find("a", chain(1, 1)))
    index.begin("e", chain(1, 2))
    assert set(index.spaces()) == {"a", "d", "e"}


def test_a_space_has_its_share_and_evicts_its_own() -> None:
    index = MirrorIndex(10, share=0.3)
    for _, entry in index.begin("b", chain(9, 2)):
        index.filled(entry, 0)
    for name in range(0, 40, 4):
        for _, entry in index.begin("a", chain(name, 2)):
            index.filled(entry, 0)
        index.audit()
    assert index.spaces() == {"b": 2, "a": 3}
    assert len(index.begin("a", chain(90, 9))) == 3, "a prefix never evicts itself"


def test_pinned_entries_stay_and_dropped_ones_go_with_their_last_pin() -> None:
    index = MirrorIndex(2)
    keys = chain(1, 2)
    for _, entry in index.begin("a", keys):
        index.filled(entry, 0)
    held = index.find("a", keys)
    index.pin(held)
    index.pin(held[:1])
    assert index.begin("b", chain(1, 2)) == []
    assert index.drop_all("a", "asked") == 2
    assert index.find("a", keys) == [] and [index.state(e) for e in held] == [DOOMED, DOOMED]
    index.unpin(held)
    assert [index.state(e) for e in held] == [DOOMED, EMPTY]
    index.unpin(held[:1])
    assert index.counts == [2, 0, 0, 0] and index.dropped["asked"] == 2
    index.audit()


def test_what_is_not_ready_cannot_be_used() -> None:
    index = MirrorIndex(2)
    ((_, entry),) = index.begin("a", chain(1, 1))
    for wrong in (lambda: index.pin([entry]), lambda: index.drop(entry, "asked"), lambda: index.touch([entry])):
        with pytest.raises(AssertionError):
            wrong()
    index.filled(entry, 1)
    with pytest.raises(AssertionError):
        index.filled(entry, 1)
    with pytest.raises(AssertionError):
        index.unpin([entry])


def test_churn_of_many_spaces_does_not_grow_the_books() -> None:
    draw = random.Random(5)
    index = MirrorIndex(50)
    for step in range(5000):
        for _, entry in index.begin(f"tenant {draw.randrange(2000)}", chain(draw.randrange(99), draw.randrange(1, 5))):
            index.filled(entry, step)
        if not step % 500:
            index.audit()
    assert len(index.spaces()) <= 50 and len(index._oldest) <= 2000


def test_what_came_is_remembered_within_bounds() -> None:
    index = MirrorIndex(4)
    assert index.given("a", chain(1, 2), 2) == 0
    assert index.given("a", chain(1, 3), 2) == 2
    for name in range(4, 400, 4):
        index.given("a", chain(name, 4), 2)
    assert index.given("a", chain(1, 2), 2) == 0, "long ago"
    assert len(index._given) == 4


def test_spaces_that_came_and_went_leave_nothing_in_the_books() -> None:
    index = MirrorIndex(100)
    for n in range(2000):
        for _, entry in index.begin(f"tenant {n}", chain(1, 1)):
            index.filled(entry, 1)
        index.drop_all(f"tenant {n}", "asked")
    assert index.spaces() == {} and len(index._oldest) < 100
    index.audit()


class IndexMachine(RuleBasedStateMachine):
    """Stores that end or not, pins, drops and evictions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = MirrorIndex(ENTRIES, 0.6)
        self.filling: dict[int, tuple[str, bytes]] = {}
        self.stored: dict[tuple[str, bytes], int] = {}  # digest it was filled with last
        self.pins: list[list[int]] = []
        self.next = 0

    @rule(space=st.sampled_from("abc"), name=st.integers(0, 11), blocks=st.integers(1, 6))
    def begin(self, space: str, name: int, blocks: int) -> None:
        keys = chain(name, blocks)
        before = self.index.find(space, keys)
        for i, entry in self.index.begin(space, keys):
            assert entry not in self.filling and not self.index.pins(entry)
            self.filling[entry] = (space, keys[i])
        assert self.index.find(space, keys)[: len(before)] == before, "it evicted its own prefix"

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if self.filling:
            entry = data.draw(st.sampled_from(sorted(self.filling)))
            what = self.filling.pop(entry)
            if well:
                self.next += 1
                self.stored[what] = self.next
                self.index.filled(entry, self.next)
            else:
                self.index.abandon(entry)

    @rule(space=st.sampled_from("abc"), name=st.integers(0, 11), blocks=st.integers(1, 6), hold=st.booleans())
    def find(self, space: str, name: int, blocks: int, hold: bool) -> None:
        keys = chain(name, blocks)
        found = self.index.find(space, keys)
        for entry, key in zip(found, keys, strict=False):
            assert self.index.state(entry) == READY and entry not in self.filling
            assert self.index.digest(entry) == self.stored[space, key]
        self.index.touch(found)
        if hold and found:
            self.index.pin(found)
            self.pins.append(found)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            self.index.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(space=st.sampled_from("abc"), name=st.integers(0, 11))
    def drop(self, space: str, name: int) -> None:
        for entry in self.index.find(space, chain(name, 4))[-1:]:
            self.index.drop(entry, "corrupt")

    @rule(space=st.sampled_from("abc"))
    def drop_all(self, space: str) -> None:
        self.index.drop_all(space, "asked")

    @invariant()
    def books(self) -> None:
        self.index.audit()
        for entry in self.filling:
            assert self.index.state(entry) == FILLING
        for held in self.pins:
            for entry in held:
                assert self.index.state(entry) in (READY, DOOMED) and self.index.pins(entry)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
