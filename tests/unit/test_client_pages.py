"""Page lists, layers and first pages, before they leave the worker."""

from collections.abc import Iterator

import numpy as np
import pytest

from pdxfer.client.errors import PdxferRefused
from pdxfer.client.pages import Planes, Progress, planes_of, tables
from pdxfer.client.rooms import Rooms
from pdxfer.core import worker
from pdxfer.pools import PoolLayout, SharedPool


@pytest.fixture
def pools() -> Iterator[list[SharedPool]]:
    made = [
        SharedPool.allocate(PoolLayout("kv", "float32", (4, 8), 4, planes=8, planes_per_layer=2), 16),
        SharedPool.allocate(PoolLayout("index", "bfloat16", (4, 8), 4, planes=4), 10),
    ]
    yield made
    for pool in made:
        pool.close()


def test_one_list_goes_for_all_pools(pools: list[SharedPool]) -> None:
    for pages in ([3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), np.array([3, 1, 2], dtype=np.uint8), range(3, 4)):
        kv, index = tables(pages, pools, "r", all_named=True)
        assert kv.dtype == np.dtype("<u4") and kv.tolist() == index.tolist() == list(pages)
    assert [t.tolist() for t in tables([], pools, "r", all_named=True)] == [[], []]


def test_a_dict_names_pools(pools: list[SharedPool]) -> None:
    assert [t.tolist() for t in tables({"index": [1], "kv": [2, 3]}, pools, "r", all_named=True)] == [[2, 3], [1]]
    assert [t.tolist() for t in tables({"kv": [2, 3]}, pools, "r", all_named=False)] == [[2, 3], []]
    for pages in ({"kv": [1]}, {"kv": [1], "index": [], "x": []}):
        with pytest.raises(PdxferRefused) as caught:
            tables(pages, pools, "r", all_named=True)
        assert caught.value.code == "pools_unequal" and caught.value.room == "r"


@pytest.mark.parametrize(
    ("pages", "found"), [([0, 10], "page 10, expected 0 … 9"), ([-1, 3], "page -1"), ([2**40], "page")]
)
def test_pages_out_of_range(pools: list[SharedPool], pages: list[int], found: str) -> None:
    with pytest.raises(PdxferRefused, match=found) as caught:
        tables(pages, pools, "r", all_named=True)
    assert caught.value.code == "pages_out_of_range"


@pytest.mark.parametrize("pages", [[1.5], [[1]], "abc", [True], None, [None], 5])
def test_what_is_no_page_list(pools: list[SharedPool], pages: object) -> None:
    with pytest.raises(TypeError, match="expected a flat list of whole numbers"):
        tables(pages, pools, "r", all_named=True)


def test_layers_are_planes(pools: list[SharedPool]) -> None:
    assert planes_of((1, 2), pools[:1], "r") == Planes(2, 4, 1, 2)
    assert planes_of((1, 2), pools[1:], "r") == Planes(1, 2, 1, 2)
    assert planes_of(None, pools, "r") == Planes(0, 0, 0, 0)
    for layers in ((0, 5), (-1, 1), (4, 1), (0, 0)):
        with pytest.raises(PdxferRefused, match="the pools have 0 … 3") as caught:
            planes_of(layers, pools[:1], "r")
        assert caught.value.code == "planes_out_of_range"


def test_layers_need_pools_with_the_same_planes(pools: list[SharedPool]) -> None:
    with pytest.raises(PdxferRefused, match="kv: 4 layers of 2 planes, index: 4 layers of 1 planes"):
        planes_of((0, 1), pools, "r")


def test_chunked_prefill_goes_on_where_it_ended(pools: list[SharedPool]) -> None:
    rooms = Rooms(pools)
    room, _ = rooms.open("r", 0)
    assert rooms.push(room, {"kv": [1, 2, 3], "index": [1]}, None, None).page0 == (0, 0)
    assert rooms.push(room, [4, 5], None, None).page0 == (3, 1)
    assert rooms.push(room, {"index": [6]}, None, None).page0 == (5, 3)
    assert rooms.push(room, [7], 9, None).page0 == (9, 9)
    assert rooms.push(room, [7], {"kv": 2}, None).page0 == (2, 10)


def test_layer_by_layer_counts_each_layer(pools: list[SharedPool]) -> None:
    rooms = Rooms(pools[:1])
    room, _ = rooms.open("r", 0)
    for layer in range(4):
        frame = rooms.push(room, [1, 2], None, (layer, 1))
        assert (frame.page0, frame.plane0, frame.planes) == ((0,), 2 * layer, 2)
    assert rooms.push(room, [3], None, (0, 2)).page0 == (2,)
    with pytest.raises(PdxferRefused, match="name first_page"):
        rooms.push(room, [3], None, None)
    assert rooms.push(room, [3], 3, None).page0 == (3,)
    assert rooms.push(room, [3], None, None).page0 == (4,)


def test_a_refused_push_did_not_count(pools: list[SharedPool]) -> None:
    rooms = Rooms(pools)
    room, _ = rooms.open("r", 0)
    rooms.push(room, [1], None, None)
    refused = rooms.push(room, [2], None, None)
    rooms.take(worker.Rejected(refused.req, "pages_not_owned", ""))
    assert rooms.push(room, [3], None, None).page0 == (1, 1)
    withdrawn = rooms.push(room, [3], None, None)
    rooms.withdraw(withdrawn.req)
    assert rooms.push(room, [3], None, None).page0 == (2, 2)


def test_first_page_is_checked(pools: list[SharedPool]) -> None:
    progress = Progress(pools)
    whole = Planes(0, 0, 0, 0)
    with pytest.raises(PdxferRefused, match=r"\['x'\], which are no pools"):
        progress.first({"x": 1}, pools, whole, "r")
    with pytest.raises(PdxferRefused, match="first_page is -1"):
        progress.first(-1, pools, whole, "r")
