"""The synthetic engine: every byte is known, every wrong one is counted."""

from __future__ import annotations

import numpy as np

from pdxfer.demo.engine import Sequence, kv_digest, pages_for
from pdxfer.demo.reference import Chat, answers
from pdxfer.demo.synthetic import SyntheticEngine, expected, room_seed


def engine(pages: int = 96) -> SyntheticEngine:
    return SyntheticEngine(pages, layers=2, step_delay=0, token_delay=0)


def prefilled(e: SyntheticEngine, room: str, tokens: int, first: int = 0, more: int = 40) -> Sequence:
    count = pages_for(tokens + more, e.page_tokens)
    seq = Sequence(room, 0, list(range(tokens)), list(range(first, first + count)), more)
    assert list(e.prefill(seq))[-1] == pages_for(tokens, e.page_tokens)
    return seq


def test_two_pools_and_bf16_index_keys_of_256_bytes() -> None:
    e = engine()
    assert [(p.name, p.layout.dtype, p.layout.page_bytes) for p in e.pools] == [
        ("kv", "bfloat16", 16 * 1152),
        ("index_k", "bfloat16", 16 * 256),
    ]


def test_a_long_prompt_comes_in_pieces() -> None:
    e = engine()
    seq = Sequence("r", 0, [1] * 1100, list(range(70)), 1)
    assert list(e.prefill(seq)) == [32, 64, 69] and len(seq.tokens) == 1
    assert e.wrong_bytes(seq) == 0


def test_every_wrong_byte_is_counted() -> None:
    e = engine()
    seq = prefilled(e, "r", 100, more=60)
    for _ in range(30):
        e.decode_step([seq])
    assert e.wrong_bytes(seq) == 0 and seq.length == 130
    for pool in e.pools:
        for plane in pool.pages():
            plane[seq.pages[0], 0] ^= 1
            plane[seq.pages[7], -1] ^= 0x80  # of the answer
            plane[seq.pages[9], 5] ^= 1  # beyond it: nobody's
    assert e.wrong_bytes(seq) == 2 * 2 * 2


def test_another_room_another_epoch_and_swapped_pages_are_wrong() -> None:
    e = engine()
    seq = prefilled(e, "r", 64)
    total = 2 * 4 * 16 * (1152 + 256)
    for other in (Sequence("s", 0, [], seq.pages, 1, 64), Sequence("r", 1, [], seq.pages, 1, 64)):
        assert e.wrong_bytes(other) > 0.99 * total
    swapped = Sequence("r", 0, [], [seq.pages[1], seq.pages[0], *seq.pages[2:]], 1, 64)
    assert 0.49 * total < e.wrong_bytes(swapped) < 0.51 * total
    assert kv_digest(e.pools, swapped.pages[:4]) != kv_digest(e.pools, seq.pages[:4])


def test_bytes_differ_between_planes_pools_tokens_and_words() -> None:
    seed = room_seed("r", 0)
    words = np.concatenate([expected(seed, pool, plane, 0, 64, 256).ravel() for pool in (0, 1) for plane in (0, 1)])
    assert len(np.unique(words)) == words.size
    assert (expected(seed, 0, 0, 16, 16, 256) == expected(seed, 0, 0, 0, 64, 256)[16:32]).all()
    bits = np.unpackbits(words.view(np.uint8)).mean()
    assert 0.49 < bits < 0.51


def test_a_write_to_a_page_that_nobody_has_shows() -> None:
    e = engine(8)
    assert e.late_bytes(range(8)) == 0
    e.pools[1].pages()[1][3, 17] ^= 0xFF
    assert e.late_bytes([3]) == 1 and e.late_bytes([2, 4]) == 0
    e.poison([3])
    assert e.late_bytes([3]) == 0


def test_the_answer_is_the_references_answer() -> None:
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    (known,) = answers("synthetic", "fp32", [question], 1)
    e = engine()
    prompt = Chat("synthetic").encode(question["messages"])  # type: ignore[arg-type]
    seq = Sequence("any", 3, prompt, list(range(4)), 5)
    list(e.prefill(seq))
    while len(seq.tokens) < 5:
        e.decode_step([seq])
    assert seq.tokens == known["tokens"] and known["prompt_tokens"] == len(prompt) and len(known["text"]) == 5
