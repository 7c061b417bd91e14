"""The probe's parts: what it plants, what it compares, and that a difference of one byte does not pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdxfer import cli
from pdxfer.pools.dsa import TOP_K, IndexFormat, IndexPlane
from pdxfer.probe import cases, needle, recall, show
from pdxfer.probe.paths import PATHS, Found

CONTEXTS = (700, 1500)


def filled(plan: cases.Plan, seed: int, *, sharing: bool) -> tuple[list[IndexPlane], cases.Tables]:
    planes = [
        IndexPlane(np.zeros((plan.pages(), plan.form.page_bytes), np.uint8), plan.form) for _ in range(plan.layers)
    ]
    tables = plan.tables(seed, sharing=sharing)
    for room in plan.rooms:
        for layer, plane in enumerate(planes):
            plane.write(tables[room.name], 0, cases.keys_of(room, layer, plan.form.dim))
    return planes, tables


def selections(plan: cases.Plan, planes: list[IndexPlane], tables: cases.Tables) -> Found:
    return {room.name: cases.selection(room, planes, tables[room.name]) for room in plan.rooms}


@pytest.fixture(scope="module")
def small() -> cases.Plan:
    return cases.plan(IndexFormat("bf16"), CONTEXTS, 3)


@pytest.fixture(scope="module")
def before(small: cases.Plan) -> Found:
    return selections(small, *filled(small, 1, sharing=True))


def test_every_needle_is_where_it_is_said_to_be_and_is_selected(small: cases.Plan, before: Found) -> None:
    for room in small.rooms:
        places, document = room.document.places(), room.document
        assert len(places) == document.copies
        assert places[0] >= 0 and places[-1] < document.context
        first, last = {"start": (0, 30), "middle": (300, 800), "last 30": (document.context - 30, document.context)}[
            document.position
        ]
        assert any(first <= place < last for place in places), document
        for k in TOP_K:
            found, could = cases.found_needles(room, before[room.name], k)
            assert found == could == 2 * min(k, document.copies)


def test_copies_of_a_needle_are_tied_and_the_first_are_selected(small: cases.Plan, before: Found) -> None:
    room = next(room for room in small.rooms if room.document.copies > 512 and room.document.position == "last 30")
    last_query_top_512 = before[room.name].sets[2]
    np.testing.assert_array_equal(last_query_top_512, room.document.places()[:512])


def test_rooms_of_a_document_have_equal_prefixes_and_equal_ids_exactly_there(small: cases.Plan) -> None:
    groups: dict[cases.Document, list[cases.Room]] = {}
    for room in small.rooms:
        groups.setdefault(room.document, []).append(room)
    pairs = [group for group in groups.values() if len(group) > 1]
    assert pairs
    for a, b, *_ in pairs:
        shared = a.document.shared
        for one, two in [
            (cases.token_ids(a), cases.token_ids(b)),
            (cases.keys_of(a, 1, 128), cases.keys_of(b, 1, 128)),
        ]:
            np.testing.assert_array_equal(one[:shared], two[:shared])
            assert not np.array_equal(one[shared:], two[shared:])


@given(st.integers(1, 80), st.sampled_from([16, 64]), st.integers(0, 1000), st.booleans())
def test_tables_share_whole_common_pages_and_nothing_else(
    concurrency: int, page_tokens: int, seed: int, sharing: bool
) -> None:
    plan = cases.plan(IndexFormat("bf16", page_tokens), CONTEXTS, concurrency)
    assert len(plan.rooms) >= concurrency
    tables = plan.tables(seed, sharing=sharing)
    owners: dict[int, set[str]] = {}
    for room in plan.rooms:
        table = tables[room.name].tolist()
        assert len(set(table)) == len(table) == -(-room.document.context // page_tokens)
        common = room.document.shared // page_tokens if sharing else 0
        for number, page in enumerate(table):
            owners.setdefault(page, set()).add(f"{room.document.name}/{number}" if number < common else room.name)
    assert all(len(who) == 1 for who in owners.values())
    assert max(owners) < plan.pages()


def test_other_pages_and_no_sharing_select_the_same(small: cases.Plan, before: Found) -> None:
    after = selections(small, *filled(small, 2, sharing=False))
    run = needle.compare("none", small, before, after, 1.0)
    assert run.identical
    assert run.sets == len(small.rooms) * 8


def test_a_key_that_is_not_what_it_was_is_seen(small: cases.Plan, before: Found) -> None:
    planes, tables = filled(small, 2, sharing=False)
    room = next(room for room in small.rooms if room.document.copies == 1)
    place = int(room.document.places()[0])
    planes[1].write(tables[room.name], place, np.zeros((1, 128), np.float32))
    run = needle.compare("none", small, before, selections(small, planes, tables), 1.0)
    assert not run.identical
    assert (run.wrong_rooms, run.differ > 0) == (1, True)
    bad = [case for case in run.cases if case.wrong_rooms]
    assert [(case.context, case.position, case.copies) for case in bad] == [tuple(room.document)]
    assert bad[0].needles[512][0] == bad[0].needles[512][1] - 1


def test_one_bit_that_moves_no_set_is_wrong_bytes_all_the_same(small: cases.Plan, before: Found) -> None:
    planes, tables = filled(small, 2, sharing=False)
    planes[0].pages[tables[small.rooms[0].name][0], 0] ^= 1
    run = needle.compare("none", small, before, selections(small, planes, tables), 1.0)
    assert (run.wrong_rooms, run.identical) == (1, False)


def test_a_room_that_did_not_arrive_has_every_set_wrong(small: cases.Plan, before: Found) -> None:
    after = dict(before)
    del after[small.rooms[0].name]
    run = needle.compare("none", small, before, after, 1.0)
    assert (run.differ, run.wrong_rooms, run.identical) == (8, 1, False)


def test_nothing_compared_is_not_identical() -> None:
    assert not needle.Result(needle.Options(), {}).identical
    assert not needle.Run("none", "bf16", 1, 0, 0, 0.0).identical


def test_recall_has_fp32_as_its_reference() -> None:
    rows = recall.measure((700, 3000))
    assert {(row.context, row.k) for row in rows} == {(700, 512), (3000, 512), (3000, 2048)}
    strong = sum(strength > 0 for strength in recall.STRENGTHS)
    for row in rows:
        assert row.needles == len(recall.STRENGTHS)
        assert 0 < row.found < row.needles
        if row.dtype == "fp32":
            assert (row.found, row.as_fp32, row.overlap) == (strong, row.needles, 1.0)
    mean = {dtype: np.mean([row.overlap for row in rows if row.dtype == dtype]) for dtype in ("fp8", "bf16")}
    assert 0.9 < mean["fp8"] < mean["bf16"] < 1.0


def result(small: cases.Plan, before: Found, after: Found) -> needle.Result:
    found = needle.Result(needle.Options(("nixl",)), {})
    found.runs.append(needle.compare("nixl", small, before, after, 1.0))
    found.recall = recall.measure((700,))
    return found


def printed(found: needle.Result) -> str:
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        show.show(found, console)
    return capture.get()


def test_what_was_not_run_is_not_shown(small: cases.Plan, before: Found) -> None:
    found = result(small, before, before)
    text = printed(found)
    assert "all 144 top-k sets are those before" in text
    assert "nixl" in text
    assert not any(name in text for name in PATHS if name != "nixl" and name != "none")
    assert [run["path"] for run in found.as_json()["runs"]] == ["nixl"]
    assert found.as_json()["identical"] is True


def test_a_difference_is_named(small: cases.Plan, before: Found) -> None:
    after = dict(before)
    room = small.rooms[0]
    sets = (before[room.name].sets[0][:-1], *before[room.name].sets[1:])
    after[room.name] = before[room.name]._replace(sets=sets)
    found = result(small, before, after)
    assert not found.identical
    text = printed(found)
    assert "1 of 144 top-k sets differ" in text
    assert f"{room.document.context} tokens, {room.document.copies} needles, {room.document.position}" in text


def test_the_picture_is_a_png(small: cases.Plan, before: Found, tmp_path: Path) -> None:
    from pdxfer.probe.picture import draw

    draw(result(small, before, before), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--path", "nixl,warp"], "'warp': expected all, or some of none, nixl"),
        (["--index-dtype", "int4"], "'int4': expected some of fp8, bf16, fp32"),
        (["--contexts", "12"], "expected numbers from 600"),
        (["--concurrency", "0"], "expected numbers from 1"),
    ],
)
def test_a_wrong_argument_is_told(arguments: list[str], says: str) -> None:
    found = CliRunner().invoke(cli.cli, ["probe", "needle", *arguments])
    assert found.exit_code == 2
    assert says in " ".join(found.output.replace("│", " ").split())


def test_the_paths_can_be_listed() -> None:
    found = CliRunner().invoke(cli.cli, ["probe", "needle", "--list"])
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.output.splitlines()] == list(PATHS)
