"""Index keys in pages, the lightning indexer and its top-k: against torch's types, and against transformers' own indexer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.pools import SharedPool, dsa

LENGTHS = st.integers(1, 200)


def keys_of(tokens: int, dim: int, seed: int) -> dsa.Floats:
    return np.random.default_rng(seed).standard_normal((tokens, dim), np.float32)


# number formats ----------------------------------------------------------------------------------------------------


def every_half() -> dsa.Floats:
    """Every fp16 number, in fp32: all e4m3 numbers, all midpoints between them, and far beyond."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def test_e4m3_codes_are_those_of_torch() -> None:
    ours = dsa.from_e4m3(np.arange(256, dtype=np.uint8))
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(ours, theirs)
    assert np.isnan(ours).sum() == 2


def test_e4m3_rounds_as_torch_does_and_saturates() -> None:
    numbers = every_half()
    numbers = numbers[np.abs(numbers) <= dsa.E4M3_MAX]
    theirs = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(dsa.to_e4m3(numbers), theirs)
    beyond = dsa.from_e4m3(dsa.to_e4m3(np.array([449.0, np.inf, -1e9, np.nan], np.float32)))
    np.testing.assert_array_equal(beyond, [448.0, 448.0, -448.0, np.nan])


@given(st.integers(0, 2**32 - 1))
def test_bf16_rounds_as_torch_does(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, 512, np.uint32)
    numbers = np.concatenate([bits.view(np.float32), (bits & 0xFFFF0000 | 0x8000).view(np.float32)])  # also ties
    numbers = numbers[~np.isnan(numbers)]
    theirs = torch.from_numpy(numbers).bfloat16()
    np.testing.assert_array_equal(dsa.to_bf16(numbers), theirs.view(torch.uint16).numpy())
    np.testing.assert_array_equal(dsa.from_bf16(dsa.to_bf16(numbers)), theirs.float().numpy())


# pages -------------------------------------------------------------------------------------------------------------


def test_the_sizes_are_those_of_the_field() -> None:
    sizes = {dtype: (dsa.IndexFormat(dtype).token_bytes, dsa.IndexFormat(dtype).page_bytes) for dtype in dsa.DTYPES}
    assert sizes == {"fp8": (132, 8448), "bf16": (256, 16384), "fp32": (512, 32768)}
    for dtype in dsa.DTYPES:
        layout = dsa.IndexFormat(dtype).layout(layers=3)
        assert (layout.page_bytes, layout.planes) == (sizes[dtype][1], 3)
    rows = {dsa.IndexFormat(dtype).layout(1).fingerprint() for dtype in dsa.DTYPES}
    assert len(rows) == 3


def test_an_fp8_page_is_planar() -> None:
    form = dsa.IndexFormat("fp8", page_tokens=2, dim=4)
    plane = np.zeros((3, form.page_bytes), np.uint8)
    keys = np.array([[448, 224, -448, 0], [1, 0.5, -0.25, 0.125], [7, 0, 0, 0]], np.float32)
    dsa.IndexPlane(plane, form).write(np.array([2, 0]), 0, keys)
    page = plane[2]
    np.testing.assert_array_equal(page[:8], dsa.to_e4m3(np.array([448, 224, -448, 0, 448, 224, -112, 56], np.float32)))
    np.testing.assert_array_equal(page[8:].view(np.float32), np.array([1, 1 / 448], np.float32))
    assert not plane[1].any()
    np.testing.assert_array_equal(plane[0][8:].view(np.float32), np.array([7 / 448, 0], np.float32))


@given(st.sampled_from(dsa.DTYPES), st.integers(1, 70), LENGTHS, st.integers(0, 2**32 - 1))
def test_what_is_written_in_pieces_is_read_back_whatever_the_page_size(
    dtype: dsa.Dtype, page_tokens: int, tokens: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    form = dsa.IndexFormat(dtype, page_tokens, dim=8)
    plane = dsa.IndexPlane(random.integers(0, 256, (220, form.page_bytes), np.uint8), form)
    table = random.permutation(220)[: -(-tokens // page_tokens)]
    keys = random.standard_normal((tokens, 8), np.float32)
    for start, end in itertools.pairwise(sorted({0, tokens, *random.integers(0, tokens + 1, 3).tolist()})):
        plane.write(table, start, keys[start:end])
    rows = plane.rows(table, tokens)
    np.testing.assert_array_equal(rows, form.encode(keys))
    found = plane.read(table, tokens)
    np.testing.assert_array_equal(found, form.decode(rows))
    relative = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-4}[dtype]
    bound = relative * np.abs(keys) + (np.abs(keys).max(axis=1, keepdims=True) / 448 * 2.0**-9 if dtype == "fp8" else 0)
    assert (np.abs(found - keys) <= bound * 1.001).all()


def test_a_shared_pool_holds_index_keys() -> None:
    form = dsa.IndexFormat("bf16")
    with SharedPool.allocate(form.layout(2), 8) as pool:
        planes = [dsa.IndexPlane(pages, form) for pages in pool.pages()]
        keys = keys_of(100, 128, 1)
        planes[1].write(np.array([5, 2]), 0, keys)
        tensor = pool.torch()[1]
        np.testing.assert_array_equal(
            tensor[[5, 2]].reshape(-1, 128)[:100].float().numpy(), planes[1].read([5, 2], 100)
        )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: dsa.IndexFormat("int4"), "int4"),  # type: ignore[arg-type]
        (lambda: dsa.IndexFormat("fp8", dim=6), "multiple of 4"),
        (lambda: dsa.IndexFormat("bf16").encode(np.zeros((3, 64), np.float32)), "128"),
        (lambda: dsa.IndexPlane(np.zeros((4, 8448), np.uint8), dsa.IndexFormat("bf16")), "16384"),
        (lambda: dsa.IndexPlane(np.zeros((4, 8448), np.uint8), dsa.IndexFormat("fp8")).read(np.array([0]), 65), "2 pages"),
        (lambda: dsa.IndexPlane(np.zeros((4, 8448), np.uint8), dsa.IndexFormat("fp8")).read(np.array([4]), 1), "0 … 3"),
        (lambda: dsa.IndexPlane(np.zeros((4, 8448), np.uint8), dsa.IndexFormat("fp8")).read(np.array([-1]), 1), "0 … 3"),
        (lambda: dsa.index_scores(np.zeros((1, 2, 8), np.float32), np.zeros((1, 3), np.float32), np.zeros((4, 8), np.float32)), "heads"),
        (lambda: dsa.top_k(np.zeros(4, np.float32), 0), "at least 1"),
        (lambda: dsa.select(np.zeros((1, 2, 8), np.float32), np.zeros((1, 2), np.float32), np.zeros((4, 8), np.float32), np.array([4]), 2), "0 … 3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# scores and selection ----------------------------------------------------------------------------------------------


def test_scores_are_the_formula() -> None:
    random = np.random.default_rng(3)
    queries, weights = random.standard_normal((2, 5, 8), np.float32), random.standard_normal((2, 5), np.float32)
    keys = random.standard_normal((dsa.BLOCK + 17, 8), np.float32)
    found = dsa.index_scores(queries, weights, keys)
    wide = [a.astype(np.float64) for a in (queries, weights, keys)]
    right = np.einsum("sh,sht->st", wide[1], np.maximum(np.einsum("shd,td->sht", wide[0], wide[2]), 0))
    np.testing.assert_allclose(found, right, atol=1e-4)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_top_k_is_a_stable_sort(tokens: int, k: int, levels: int, seed: int) -> None:
    """Few levels: most scores are tied with others."""
    scores = np.random.default_rng(seed).integers(-levels, levels, tokens).astype(np.float32)
    if seed % 3 == 0:
        scores[seed % tokens] = np.nan
    order = sorted(range(tokens), key=lambda t: (-np.inf if np.isnan(scores[t]) else scores[t]) * -1)
    assert dsa.top_k(scores, k).tolist() == sorted(order[:k])


def test_a_query_sees_nothing_after_itself() -> None:
    keys = np.ones((50, 8), np.float32)
    keys[40] = 9.0
    ones = np.ones((2, 3, 8), np.float32), np.ones((2, 3), np.float32)
    before, after = dsa.select(*ones, keys, np.array([39, 40]), 4)
    assert before.tolist() == [0, 1, 2, 3]
    assert after.tolist() == [0, 1, 2, 40]


class Tiny:
    """transformers' indexer of deepseek_v32 with random weights, and what it computes on the way."""

    def __init__(self, topk: int, seed: int) -> None:
        from transformers.models.deepseek_v32 import DeepseekV32Config, modeling_deepseek_v32

        self.config = DeepseekV32Config(
            hidden_size=48, q_lora_rank=32, index_n_heads=8, index_head_dim=32, qk_rope_head_dim=16, index_topk=topk, num_hidden_layers=1,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.indexer = modeling_deepseek_v32.DeepseekV32Indexer(self.config, 0).eval()
        self.rotary = modeling_deepseek_v32.DeepseekV32RotaryEmbedding(self.config)

    def run(self, tokens: int) -> tuple[dsa.Floats, dsa.Floats, dsa.Floats, Any]:
        """Its queries, weights and keys (taken as it hands them to the cache), and what it selects."""
        hidden, residual = torch.randn(1, tokens, 48), torch.randn(1, tokens, 32)
        position = torch.arange(tokens)[None]
        embedding = self.rotary(hidden, position)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None]
        seen: dict[str, torch.Tensor] = {}

        class Cache:
            def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
                seen["keys"] = keys
                return keys

        selected = self.indexer(hidden, residual, embedding, mask, position, cache=Cache())
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

        queries = self.indexer.wq_b(residual).view(1, tokens, 8, 32)
        turned, _ = apply_rotary_pos_emb(queries[..., :16], queries[..., :16], *embedding, unsqueeze_dim=2)
        queries = torch.cat([turned, queries[..., 16:]], dim=-1)
        weights = self.indexer.weights_proj(hidden) * 8**-0.5 * 32**-0.5
        arrays = [t.detach().float().numpy()[0] for t in (queries, weights, seen["keys"])]
        return arrays[0], arrays[1], arrays[2], selected[0].numpy()


@pytest.mark.parametrize(("tokens", "topk", "seed"), [(700, 64, 1), (900, 512, 2), (2300, 2048, 3)])
def test_the_indexer_selects_what_that_of_transformers_selects(tokens: int, topk: int, seed: int) -> None:
    with torch.no_grad():
        queries, weights, keys, theirs = Tiny(topk, seed).run(tokens)
    form = dsa.IndexFormat("fp32", page_tokens=16, dim=32)
    plane = dsa.IndexPlane(np.zeros((160, form.page_bytes), np.uint8), form)
    table = np.random.default_rng(seed).permutation(160)[: -(-tokens // 16)]
    plane.write(table, 0, keys)
    sample = np.unique(np.linspace(topk, tokens - 1, 60, dtype=np.int64))
    scores = dsa.index_scores(queries[sample], weights[sample], plane.read(table, tokens))
    ours = dsa.select(queries[sample], weights[sample], plane.read(table, tokens), sample, topk)
    compared = 0
    for row, mine, at in zip(scores, ours, sample, strict=True):
        other = set(theirs[at].tolist())
        assert len(mine) == len(other) == topk
        # Both sum in fp32, in different orders: only tokens whose scores are that close to the last place may differ.
        level = np.sort(row[: at + 1])[-topk]
        swapped = set(mine.tolist()) ^ other
        assert all(abs(row[t] - level) < 1e-6 for t in swapped), (at, swapped)
        compared += not swapped
    assert compared > 0.8 * len(sample)  # and mostly nothing is that close
