"""PoolLayout is read off the tensors and never guesses."""

import subprocess
import sys

import numpy as np
import pytest

from pdxfer.core.reasons import Refused
from pdxfer.pools import PoolLayout
from pdxfer.pools.layout import read_tensors
from pdxfer.pools.tensors import check_apart

torch = pytest.importorskip("torch")


def test_one_tensor_per_layer() -> None:
    tensors = [torch.zeros(10, 16, 3, 64, dtype=torch.bfloat16) for _ in range(4)]
    layout, seen = read_tensors("kv", tensors, 16)
    assert (layout.dtype, layout.page_shape, layout.planes, layout.planes_per_layer) == ("bfloat16", (16, 3, 64), 4, 1)
    assert layout.page_bytes == 16 * 3 * 64 * 2
    assert layout.row == "16x3x64"
    assert seen[0].num_pages == 10 and seen[0].stride == layout.page_bytes


def test_k_and_v_are_planes_when_pages_come_second() -> None:
    tensors = [torch.zeros(2, 10, 16, 3, 64) for _ in range(3)]
    layout, seen = read_tensors("kv", tensors, 16, page_dim=1)
    assert (layout.planes, layout.planes_per_layer, layout.layers) == (6, 2, 3)
    assert seen[0].offsets == (0, 10 * layout.page_bytes)


def test_pages_first_with_k_and_v_inside_is_one_plane() -> None:
    layout = PoolLayout.from_tensors("kv", [torch.zeros(10, 2, 16, 3, 64)], 16)
    assert (layout.planes, layout.page_bytes) == (1, 2 * 16 * 3 * 64 * 4)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("uint8", 1), ("float16", 2)]
)
def test_sizes_come_from_the_item_size(dtype: str, size: int) -> None:
    layout = PoolLayout.from_tensors("index", [torch.zeros(5, 64, 128).to(getattr(torch, dtype))], 64)
    assert layout.page_bytes == 64 * 128 * size
    assert layout.dtype == dtype


def test_the_incident_an_fp8_mirror_of_a_bf16_pool_cannot_be_described() -> None:
    held = PoolLayout.from_tensors("index", [torch.zeros(5, 64, 128, dtype=torch.bfloat16)], 64)
    assumed = PoolLayout("index", "uint8", (64, 132), 64, planes=1)
    assert held.page_bytes == 16384 and assumed.page_bytes == 8448
    assert held.fingerprint() != assumed.fingerprint()


def test_memory_order_counts_not_the_order_of_dimensions() -> None:
    straight = torch.zeros(10, 3, 16, 64)
    assert PoolLayout.from_tensors("kv", [straight.permute(0, 2, 1, 3)], 16).row == "3x16x64"


def test_interleaved_layers_keep_their_stride() -> None:
    whole = torch.zeros(10, 4, 16, 64)
    layout, seen = read_tensors("kv", [whole[:, i] for i in range(4)], 16)
    assert layout.page_bytes == 16 * 64 * 4
    assert seen[1].stride == 4 * layout.page_bytes and seen[1].offsets == (layout.page_bytes,)


def test_padding_travels_only_when_it_is_said_to_belong_to_the_page() -> None:
    raw = torch.zeros(10 * 600, dtype=torch.uint8)
    padded = torch.as_strided(raw, (10, 584), (600, 1))
    assert PoolLayout.from_tensors("swa", [padded], 1).page_bytes == 584
    assert PoolLayout.from_tensors("swa", [padded], 1, padded=True).page_bytes == 600


def test_numpy_arrays_too() -> None:
    whole = np.zeros((2, 10, 16, 8), dtype=np.float16)
    layout, seen = read_tensors("kv", [whole[0], whole[1]], 16)
    assert layout.dtype == "float16" and layout.page_bytes == 256
    assert seen[0].storage == seen[1].storage and seen[1].offsets == (10 * 256,)


@pytest.mark.parametrize(
    ("tensors", "page_dim", "said"),
    [
        ([torch.zeros(10, 16, 128)[:, :, :64]], 0, "not one dense run"),
        ([torch.zeros(16, 10, 8)], 1, "pages overlap"),  # read as planes of one row each, then nothing fits
        ([torch.zeros(10, 16, 8)], 3, "page_dim is 3"),
        ([torch.zeros(10, 0, 8)], 0, "no dimension of 0"),
        ([torch.zeros(1, 16, 8).expand(10, 16, 8)], 0, "pages overlap"),
        ([np.zeros((10, 16, 8))[:, ::-1]], 0, "none below 0"),
        (["no tensor"], 0, "a str, expected a torch tensor"),
        ([], 0, "no tensors"),
        ([torch.zeros(10, 16).to_sparse()], 0, "expected a plain strided"),
    ],
)
def test_what_is_no_page_is_refused_by_name(tensors: list[object], page_dim: int, said: str) -> None:
    if said == "pages overlap" and page_dim == 1:
        tensors = [torch.as_strided(torch.zeros(2000), (16, 10, 8), (80, 4, 1))]
    with pytest.raises(Refused, match=said) as caught:
        PoolLayout.from_tensors("kv", tensors, 16, page_dim=page_dim)
    assert caught.value.code == "bad_layout"


@pytest.mark.parametrize(
    ("second", "field"),
    [
        (torch.zeros(10, 16, 8, dtype=torch.float16), "dtype is float16, expected float32"),
        (torch.zeros(11, 16, 8), "num_pages is 11, expected 10"),
        (torch.zeros(10, 16, 4), r"page_shape is \(16, 4\), expected \(16, 8\)"),
    ],
)
def test_tensors_that_disagree_name_field_and_both_values(second: object, field: str) -> None:
    with pytest.raises(Refused, match=f"tensor 1: {field}"):
        PoolLayout.from_tensors("kv", [torch.zeros(10, 16, 8), second], 16)


def test_a_shrunk_storage_is_noticed() -> None:
    tensor = torch.zeros(10, 16)
    tensor.untyped_storage().resize_(100)
    with pytest.raises(Refused, match="storage of 100 bytes"):
        PoolLayout.from_tensors("kv", [tensor], 16)


def test_planes_in_the_same_bytes() -> None:
    check_apart([("a", 1, 0, 200, 10), ("b", 1, 100, 200, 10), ("c", 2, 0, 100, 10)], 100)
    check_apart([("a", 1, 0, 100, 10), ("b", 1, 1000, 100, 10)], 100)
    for other in (("b", 1, 0, 200, 10), ("b", 1, 150, 200, 10), ("b", 1, 1999 - 150, 200, 10), ("b", 1, 100, 300, 10)):
        with pytest.raises(Refused, match="same bytes"):
            check_apart([("a", 1, 0, 200, 10), other], 100)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "bf17"}, "dtype 'bf17'"),
        ({"page_shape": (16, 0)}, "page_shape"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"planes": 3, "planes_per_layer": 2}, "planes_per_layer is 2"),
        ({"page_bytes": 10}, "page_bytes is 10, expected at least 256"),
        ({"name": ""}, "pool name"),
    ],
)
def test_a_layout_that_contradicts_itself(change: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {
        "name": "kv", "dtype": "bfloat16", "page_shape": (16, 8), "page_tokens": 16, "planes": 2, **change
    }  # fmt: skip
    with pytest.raises(Refused, match=said) as caught:
        PoolLayout(**fields)  # type: ignore[arg-type]
    assert caught.value.code == "bad_layout"


def test_torch_is_not_imported_unless_it_is_used() -> None:
    code = (
        "import sys, numpy; from pdxfer.pools import SharedPool, PoolLayout; import pdxfer.client\n"
        "p = SharedPool.allocate(PoolLayout('kv', 'bfloat16', (16, 8), 16, planes=2), 4); p.views()\n"
        "PoolLayout.from_tensors('a', [numpy.zeros((4, 8))], 1)\n"
        "bad = [m for m in ('torch', 'zmq', 'nixl', 'nixl_cu12') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
