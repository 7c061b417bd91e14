"""SmolLM2-135M-Instruct on pages: the model's attention reads and writes its cache in the worker's shared pool.

Owns: the "kv" pool (a K and a V plane for each layer), chunked prefill, and decode steps for several requests at once. Must
not: know sidecars, rooms' states or HTTP.

transformers computes; PagedCache stands where its cache would be. A layer's new keys and values are written to their pages,
then the pages of the whole batch are gathered in the order of their tokens, so attention sees one padded tensor whose
padding a mask hides. Padding repeats a page of the same request: what one request has in its pages never reaches another.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, Final

import torch
from transformers import Cache

from pdxfer.pools import PoolLayout, SharedPool

from . import model as models  # first: it takes transformers offline
from .engine import CHUNK_TOKENS, Sequence, pages_for

CONTEXT: Final = 2048  # the model can do 8192; on a few CPU cores nobody wants to wait for that


class PagedCache(Cache):
    """The cache of one forward. ``read[b]`` are the pages of request b, ``write`` the rows (page × token) of the new tokens."""

    def __init__(
        self, planes: Seq[torch.Tensor], scratch: torch.Tensor, read: torch.Tensor, write: torch.Tensor
    ) -> None:
        super().__init__(layers=[])
        self._planes = planes
        self._scratch = scratch
        self._batch = read.shape[0]
        self._read = read.reshape(-1)
        self._write = write.reshape(-1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values ``[batch, heads, new, dim]``; returns all of the batch's."""
        both = []
        for which, new in enumerate((key_states, value_states)):
            plane = self._planes[layer_idx][which]  # [pages, page_tokens, heads, dim]
            pages, page_tokens, heads, dim = plane.shape
            plane.view(pages * page_tokens, heads * dim).index_copy_(
                0, self._write, new.transpose(1, 2).reshape(-1, heads * dim)
            )
            size = self._read.numel() * page_tokens * heads * dim
            out = self._scratch[which][:size].view(self._read.numel(), -1)
            torch.index_select(plane.view(pages, -1), 0, self._read, out=out)
            both.append(out.view(self._batch, -1, heads, dim).transpose(1, 2))
        return both[0], both[1]


class SmolLM2Engine:
    """See ``engine.Engine``. ``dtype`` is fp32 or bf16; in fp32 answers are those of the model in one process."""

    name = "smollm2"

    def __init__(self, num_pages: int, *, page_tokens: int = 16, dtype: str = "fp32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._model: Any = models.load(dtype)
        config: Any = self._model.config
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.context = min(CONTEXT, config.max_position_embeddings)
        ends: Any = self._model.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        shape = (page_tokens, config.num_key_value_heads, config.head_dim)
        layout = PoolLayout(
            "kv", models.DTYPES[dtype], shape, page_tokens, planes=2 * config.num_hidden_layers, planes_per_layer=2
        )
        self.pools = [SharedPool.allocate(layout, num_pages)]
        self._planes = self.pools[0].torch(by_layer=True)
        self._page_numbers = shape[0] * shape[1] * shape[2]  # elements of a page
        self._scratch = self._planes[0].new_empty((2, 0))

    def prefill(self, seq: Sequence) -> Iterator[int]:
        total = len(seq.prompt)
        step = CHUNK_TOKENS - CHUNK_TOKENS % self.page_tokens
        while seq.length < total:
            start, end = seq.length, min(total, seq.length + step)
            ready = pages_for(end, self.page_tokens)
            read = torch.tensor([seq.pages[:ready]])
            positions = torch.arange(start, end)
            write = self._rows(read[0], positions)
            mask = (torch.arange(ready * self.page_tokens) <= positions[:, None])[None, None]
            logits = self._forward(torch.tensor([seq.prompt[start:end]]), positions[None], mask, read, write)
            seq.length = end
            if end == total:
                seq.tokens.append(int(logits[0, -1].argmax()))
            yield ready

    def decode_step(self, batch: Seq[Sequence]) -> None:
        lengths = torch.tensor([seq.length for seq in batch])
        most = pages_for(int(lengths.max()) + 1, self.page_tokens)
        read = torch.tensor([self._padded(seq, most) for seq in batch])
        write = torch.stack([self._rows(pages, at[None])[0] for pages, at in zip(read, lengths, strict=True)])
        mask = (torch.arange(most * self.page_tokens) <= lengths[:, None])[:, None, None]
        logits = self._forward(torch.tensor([[seq.last] for seq in batch]), lengths[:, None], mask, read, write)
        for seq, token in zip(batch, logits[:, -1].argmax(-1).tolist(), strict=True):
            seq.length += 1
            seq.tokens.append(token)

    def wrong_bytes(self, seq: Sequence) -> int:
        """A model's cache cannot be told right from wrong by itself; the digests of both sides are compared instead."""
        return 0

    def poison(self, pages: Seq[int]) -> None:
        """Not here: it would cost more than it shows, since every cache is compared by digest."""

    def late_bytes(self, pages: Seq[int]) -> int:
        return 0

    def _padded(self, seq: Sequence, count: int) -> list[int]:
        own = seq.pages[: pages_for(seq.length + 1, self.page_tokens)]
        return own + own[:1] * (count - len(own))

    def _rows(self, pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in the pool, counted in tokens, these positions of a request lie."""
        return pages[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, read: torch.Tensor, write: torch.Tensor
    ) -> torch.Tensor:
        size = read.numel() * self._page_numbers
        if self._scratch.shape[1] < size:  # kept from step to step: fresh memory costs more than the copy into it
            self._scratch = self._scratch.new_empty((2, size * 5 // 4))
        with torch.inference_mode():
            cache = PagedCache(self._planes, self._scratch, read, write)
            return self._model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
