"""What a model answers in one process that never saw a page, a sidecar or a transfer: the truth of the demo's parity check.

Owns: the chat templates and the plain greedy answers. Must not: use the paged engines.

    python -m pdxfer.demo.reference --engine smollm2 --dtype fp32 < questions.json > answers.json

Questions: a list of {"messages", "max_tokens"}. Answers: a list of {"text", "tokens", "prompt_tokens", "finish_reason"}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ENGINES = ("smollm2", "synthetic")
SYNTHETIC_PROMPT = "<{role}>{content}\n"


class Chat:
    """Messages to tokens, and tokens to text, of one engine's model."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.tokenizer: Any = None
        if engine == "smollm2":
            from . import model

            self.tokenizer = model.load_tokenizer()

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt, with the opening of the answer."""
        if self.tokenizer is None:
            return list("".join(SYNTHETIC_PROMPT.format_map(message) for message in messages).encode())
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without the token that ends it."""
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def answers(engine: str, dtype: str, questions: Sequence[Mapping[str, Any]], threads: int) -> list[dict[str, Any]]:
    """Greedy answers, one question at a time."""
    chat = Chat(engine)
    if engine == "smollm2":
        from . import model

        whole: Any = model.load(dtype)
        import torch

        torch.set_num_threads(threads)
        eos = whole.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
    out = []
    for question in questions:
        prompt = chat.encode(question["messages"])
        count = int(question["max_tokens"])
        if engine == "smollm2":
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                found = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
            tokens = found[0, len(prompt) :].tolist()
            stopped = bool(tokens) and tokens[-1] in ends
        else:
            from .synthetic import token_at, token_seed

            seed = token_seed(prompt)
            tokens, stopped = [token_at(seed, n) for n in range(count)], False
        out.append(
            {
                "text": chat.decode(tokens),
                "tokens": tokens,
                "prompt_tokens": len(prompt),
                "finish_reason": "stop" if stopped else "length",
            }
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.demo.reference", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    from .model import ModelMissing

    try:
        found = answers(args.engine, args.dtype, json.load(sys.stdin), args.threads)
    except ModelMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
