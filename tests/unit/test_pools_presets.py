"""Formats by name: every size follows from the fields, and tensors that are of another format are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.cli import cli
from pdxfer.core.reasons import Refused
from pdxfer.pools import SharedPool, dsa, presets
from pdxfer.pools.layout import itemsize_of, read_tensors
from pdxfer.pools.presets import EXAMPLES, PageFormat, mha, preset

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("spec", "token", "page"),
    [
        ("mla_bf16", 1152, 64 * 1152),
        ("mla_fp8_ds", 656, 64 * 656),
        ("dsa_index_k_fp8", 132, 8448),
        ("dsa_index_k_bf16", 256, 16384),
        ("mha:kv_heads=3,head_dim=64,dtype=bfloat16", 768, 64 * 384),
        ("deepseek_v4_c4", 146, 17 * 576),
    ],
)
def test_the_sizes_are_those_of_the_models(spec: str, token: float, page: int) -> None:
    assert (preset(spec).token_bytes, preset(spec).page_bytes(64)) == (token, page)


def test_index_keys_are_where_the_indexer_looks_for_them() -> None:
    for name, dtype in (("dsa_index_k_fp8", "fp8"), ("dsa_index_k_bf16", "bf16")):
        assert preset(name).page_bytes(64) == dsa.IndexFormat(dtype).page_bytes  # type: ignore[arg-type]
    (key, at_key, step_key), (scale, at_scale, step_scale) = preset("dsa_index_k_fp8").places(64)
    assert (key.name, at_key, step_key) == ("key", 0, 128)
    assert (scale.name, at_scale, step_scale) == ("scale", 8192, 4)


@given(st.sampled_from(EXAMPLES), st.integers(1, 5))
def test_the_fields_of_a_page_fill_it_without_overlap(spec: str, n: int) -> None:
    found = preset(spec)
    tokens = n * found.row_tokens * 4
    taken = np.zeros(found.page_bytes(tokens), int)
    for field, at, step in found.places(tokens):
        for row in range(found.rows(tokens)):
            taken[at + row * step : at + row * step + field.bytes] += 1
    end = found.page_bytes(tokens) - found.padding(tokens)
    assert (taken[:end] == 1).all() and (taken[end:] == 0).all()
    assert found.page_bytes(tokens) % found.page_multiple == 0


@given(st.sampled_from(EXAMPLES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_memory_made_from_a_preset_is_of_that_preset(spec: str, pages: int, layers: int, n: int) -> None:
    found = preset(spec)
    layout = found.layout("kv", n * found.row_tokens, layers)
    found.check(layout)
    assert layout.layers == layers and layout.row == found.row
    dtype = getattr(torch, layout.dtype)
    made = [torch.zeros((found.planes, pages, *layout.page_shape), dtype=dtype) for _ in range(layers)]
    read, _ = read_tensors("kv", made, n * found.row_tokens, page_dim=1, row=found.row)
    assert read.spec() == layout.spec()


def _tensor(spec: str) -> object:
    layout = preset(spec).layout("index_k", 128, 1)
    return torch.zeros((layout.planes, 3, *layout.page_shape), dtype=getattr(torch, layout.dtype))


@pytest.mark.parametrize("named", EXAMPLES)
@pytest.mark.parametrize("real", EXAMPLES)
def test_tensors_of_another_format_are_refused(named: str, real: str) -> None:
    size = (preset(real).page_bytes(128), preset(real).planes)
    if (preset(named).page_bytes(128), preset(named).planes) == size:
        SharedPool.adopt("index_k", [_tensor(real)], 128, 1, preset=named).close()
        return
    with pytest.raises(Refused, match=f"pool 'index_k', preset '{named.partition(':')[0]}': .*expected"):
        SharedPool.adopt("index_k", [_tensor(real)], 128, 1, preset=named)


def test_132_against_256_names_both() -> None:
    device = torch.zeros(8, 64, 128, dtype=torch.bfloat16)
    with pytest.raises(Refused) as caught:
        SharedPool.adopt("index_k", [device], 64, preset="dsa_index_k_fp8")
    assert "16384 bytes, which is 256 a token" in caught.value.detail
    assert "expected 8448, which is 132 a token" in caught.value.detail
    assert not device.is_shared(), "a refused tensor stays where it was"
    pool = SharedPool.adopt("index_k", [device], 64, preset="dsa_index_k_bf16")
    assert pool.layout.row == "key:128xbfloat16" and pool.layout.page_bytes == 16384


def test_bytes_of_the_right_size_and_another_type_are_refused() -> None:
    halves = torch.zeros(8, 64, 128, dtype=torch.float16)
    with pytest.raises(Refused, match=r"dtype is float16, expected bfloat16 or int8 or uint8"):
        SharedPool.adopt("index_k", [halves], 64, preset="dsa_index_k_bf16")
    raw = torch.zeros(8, 64, 256, dtype=torch.uint8)
    assert SharedPool.adopt("index_k", [raw], 64, preset="dsa_index_k_bf16").layout.page_bytes == 16384


def test_k_and_v_in_one_plane_are_not_mha() -> None:
    together = torch.zeros(4, 32, 3, 64, dtype=torch.bfloat16)  # as many bytes as a page of two planes' one
    with pytest.raises(Refused, match=r"planes_per_layer is 1, expected 2; check page_dim"):
        SharedPool.adopt("kv", [together], 32, preset="mha:kv_heads=3,head_dim=64")


def test_padding_is_taken_from_the_stride() -> None:
    found = preset("deepseek_v4_c4")
    whole = torch.zeros(5, found.page_bytes(64), dtype=torch.uint8)
    pages = whole[:, : 16 * 584].view(5, 16, 584)
    pool = SharedPool.adopt("kv", [pages], 64, preset="deepseek_v4_c4")
    assert pool.layout.page_bytes == 17 * 576


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mla_fp8", "preset 'mla_fp8' is unknown; did you mean 'mla_fp8_ds'"),
        ("zzz", "there are mla_bf16"),
        ("mla_bf16:x=1", "takes no keys, found 'x=1'"),
        ("mha", "kv_heads is missing"),
        ("mha:kv_heads=3", "head_dim is missing"),
        ("mha:kv_heads=x,head_dim=64", "kv_heads is 'x', expected a whole number"),
        ("mha:kv_heads=0,head_dim=64", "kv_heads is 0, expected 1 or more"),
        ("mha:kv_heads=3,head_dim=64,tp_size=2", "expected a multiple of tp_size, 2"),
        ("mha:kv_heads=3,head_dim=64,dtype=bf16", "dtype 'bf16'"),
        ("mha:heads=3", "unknown key 'heads'"),
    ],
)
def test_a_wrong_spec_is_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(Refused, match="bad_layout") as caught:
        preset(spec)
    assert says in caught.value.detail


def test_ranks_share_the_heads() -> None:
    whole, half = mha(8, 128), mha(8, 128, tp_size=2)
    assert half.token_bytes * 2 == whole.token_bytes == 2 * 8 * 128 * 2
    assert whole.row != half.row, "two workers of different degree do not take each other's rows for their own"


def test_a_page_does_not_end_within_a_row() -> None:
    with pytest.raises(Refused, match=r"page_tokens is 6, expected a multiple of 4"):
        preset("deepseek_v4_c4").page_bytes(6)


# the command ---------------------------------------------------------------------------------------------------------


def call(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(cli, ["layouts", *arguments])
    assert "Traceback" not in found.output
    return found.exit_code, found.output


def test_layouts_lists_all_with_their_sizes() -> None:
    code, text = call()
    assert code == 0 and all(spec in text for spec in EXAMPLES)
    assert "132 bytes a token and layer; a page of 64 tokens: 8448 bytes" in text
    code, text = call("--json")
    entries = {entry["spec"]: entry for entry in json.loads(text)}
    assert code == 0 and set(entries) == set(EXAMPLES)
    assert entries["dsa_index_k_fp8"]["fields"][1] == {
        "name": "scale", "dtype": "float32", "count": 1, "bytes": 4, "offset": 8192, "step": 4,
    }  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    save = pytest.importorskip("safetensors.torch").save_file
    path = tmp_path / "cache.safetensors"
    save(
        {
            "bf16": torch.zeros(6, 64, 128, dtype=torch.bfloat16),
            "fp8": torch.zeros(6, 64, 132, dtype=torch.uint8),
            "kv": torch.zeros(2, 6, 16, 3, 64, dtype=torch.bfloat16),
        },
        path,
    )
    return str(path)


def test_check_reads_a_real_buffer(file: str) -> None:
    code, text = call("check", "dsa_index_k_bf16", file, "--key", "bf16")
    assert (code, text.strip()) == (0, "ok    bf16: 6 pages of 64 tokens, 16384 bytes each")
    assert call("check", "dsa_index_k_fp8", file, "--key", "fp8")[0] == 0
    assert call("check", "mha:kv_heads=3,head_dim=64", file, "--key", "kv", "--page-dim", "1")[0] == 0
    code, text = call("check", "dsa_index_k_fp8", file, "--key", "bf16")
    assert code == 1 and "which is 256 a token" in text and "which is 132 a token" in text
    code, text = call("check", "dsa_index_k_fp8", file, "--key", "fp8", "--key", "bf16", "--json")
    assert code == 1 and [bool(entry["problem"]) for entry in json.loads(text[: text.rindex("]") + 1])] == [False, True]


def test_check_says_what_is_wrong_with_its_arguments(file: str, tmp_path: Path) -> None:
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(Path(file).read_bytes()[:20])
    for arguments, says in (
        (("mla", file), "did you mean"),
        (("mla_bf16", file, "--key", "nope"), "has no tensor 'nope'; it has "),
        (("mla_bf16", str(tmp_path / "none")), "cannot be read as safetensors"),
        (("mla_bf16", str(torn)), "cannot be read as safetensors"),
    ):
        code, text = call("check", *arguments)
        assert code == 2 and says in text, text


def test_any_changed_number_of_a_format_changes_what_workers_compare() -> None:
    base = PageFormat("x", "x", (presets.Field("a", "float32", 4), presets.Field("b", "uint8", 2)))
    others = [
        PageFormat("x", "x", (presets.Field("a", "float32", 3), presets.Field("b", "uint8", 2))),
        PageFormat("x", "x", (presets.Field("a", "int32", 4), presets.Field("b", "uint8", 2))),
        PageFormat("x", "x", (presets.Field("b", "uint8", 2), presets.Field("a", "float32", 4))),
        PageFormat("x", "x", base.fields, planar=True),
        PageFormat("x", "x", base.fields, row_tokens=2),
    ]
    assert len({f.row for f in (base, *others)}) == 6
    assert itemsize_of("float32") == 4
