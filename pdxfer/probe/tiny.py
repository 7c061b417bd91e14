"""A tiny random DeepSeek V3.2 whose cache lies in pages of two pools: latents as "kv", index keys as "index_k".

Owns: the model, its pools, prefill and decode of one request at a time, and what its indexers selected. Must not: know
sidecars or rooms.

transformers computes; PagedCache stands where its cache would be. What a layer reads back is what lies in the pages, so the
storage format's rounding is part of the model, whether the pages were moved or not.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdxfer.demo import model as models  # first: it takes transformers offline
from pdxfer.pools import PoolLayout, SharedPool
from pdxfer.pools.dsa import IndexFormat, IndexPlane

import torch  # isort: skip
from transformers import Cache  # isort: skip
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM  # isort: skip

assert models.NAME  # imported for what it does to transformers

SEED: Final = 32
LAYERS: Final = 3
VOCABULARY: Final = 512
LATENT: Final = 32
ROPE: Final = 16

Table = npt.NDArray[np.int64]


class Answer(NamedTuple):
    """What became of a prompt."""

    tokens: list[int]  # the first is of the prefill
    sets: list[
        bytes
    ]  # for each token and layer: the selected positions of the query that it came from, sorted, as int32


class Request:
    """A prompt on its way: its pages, how many tokens are in them, and its answer so far."""

    def __init__(self, table: Table, prompt: list[int]) -> None:
        self.table = table
        self.prompt = prompt
        self.length = 0
        self.answer = Answer([], [])


class PagedCache(Cache):
    """The cache of one forward of one request, whose new tokens begin at ``request.length``."""

    def __init__(self, request: Request, latents: list[npt.NDArray[Any]], keys: list[IndexPlane], end: int) -> None:
        super().__init__(layers=[])
        self._request = request
        self._latents = latents
        self._keys = keys
        self._end = end

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new latents and rotary keys ``[1, 1, new, …]``; returns those of all tokens."""
        plane = self._latents[layer_idx]  # [pages, page_tokens, LATENT + ROPE]
        size = plane.shape[1]
        at = np.arange(self._request.length, self._end)
        plane[self._request.table[at // size], at % size] = torch.cat([key_states, value_states], -1)[0, 0].numpy()
        pages = self._request.table[: -(-self._end // size)]
        every = torch.from_numpy(plane[pages].reshape(-1, LATENT + ROPE)[: self._end])[None, None]
        return every[..., :LATENT], every[..., LATENT:]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write a layer's new index keys ``[1, new, dim]`` in their format; returns those of all tokens, in fp32."""
        plane, table = self._keys[layer_idx], self._request.table
        plane.write(table, self._request.length, indexer_key_states[0].numpy())
        return torch.from_numpy(plane.read(table, self._end))[None]


class TinyModel:
    """Random weights from a seed: the same in every process. ``top_k`` tokens are selected."""

    def __init__(self, top_k: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        config = DeepseekV32Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
            kv_lora_rank=LATENT, q_lora_rank=32, qk_rope_head_dim=ROPE, qk_nope_head_dim=16, v_head_dim=16, index_topk=top_k,
            index_head_dim=128, index_n_heads=8, first_k_dense_replace=1, initializer_range=0.2,
        )  # fmt: skip
        made: Any = DeepseekV32ForCausalLM(config)
        self._model = made.float().eval()
        self._model.requires_grad_(False)
        self._seen: list[torch.Tensor] = []
        for layer in self._model.model.layers:
            layer.self_attn.indexer.register_forward_hook(lambda module, given, out: self._seen.append(out[0, -1]))
        self.pools: list[SharedPool] = []

    def allocate(self, form: IndexFormat, num_pages: int) -> None:
        """New pools, of ``num_pages`` pages."""
        kv = PoolLayout("kv", "float32", (form.page_tokens, LATENT + ROPE), form.page_tokens, LAYERS)
        self.pools = [SharedPool.allocate(layout, num_pages) for layout in (kv, form.layout(LAYERS))]
        self._latents = self.pools[0].views()
        self._keys = [IndexPlane(pages, form) for pages in self.pools[1].pages()]

    def prefill(self, request: Request) -> None:
        """The whole prompt, and the first token of the answer."""
        self._forward(request, request.prompt)

    def decode(self, request: Request) -> None:
        """One more token."""
        self._forward(request, request.answer.tokens[-1:])

    def _forward(self, request: Request, tokens: list[int]) -> None:
        end = request.length + len(tokens)
        positions = torch.arange(request.length, end)
        mask = (torch.arange(end) <= positions[:, None])[None, None]
        self._seen.clear()
        with torch.inference_mode():
            cache = PagedCache(request, self._latents, self._keys, end)
            logits = self._model(
                input_ids=torch.tensor([tokens]), position_ids=positions[None], attention_mask=mask, cache=cache,
                use_cache=True, logits_to_keep=1,
            ).logits  # fmt: skip
        request.length = end
        request.answer.tokens.append(int(logits[0, -1].argmax()))
        request.answer.sets.extend(np.sort(found.numpy().astype(np.int32)).tobytes() for found in self._seen)
