"""The demo's questions and how their answers are judged: prompts, asking through the gateway, parity, probes.

Owns: the eight prompts, one request with its answer, comparing answers with the reference. Must not: start processes
or inject faults.

The reference answers come from one process that holds the whole model and never saw a transfer: ``demo.reference``.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .observe import why
from .processes import DemoError, exit_text
from .report import Parity
from .system import System

_PLACES = ("harbour", "market", "mill", "library", "bridge", "orchard", "station", "garden", "bakery", "school")
_THINGS = (
    "opens early on weekdays and closes at noon", "was painted green by two brothers",
    "smells of fresh bread in the morning",
    "has a clock that runs five minutes late", "lies on the quiet side of the river", "is known for its wooden roof",
    "was built when the old road was moved", "keeps a list of visitors near the door", "gets busy when the rain stops",
    "belongs to a family that came from the hills",
)  # fmt: skip
NEEDLES = ((100, "7391"), (500, "2846"), (1000, "5013"))  # tokens, about, and the code that is hidden among them
QUESTIONS = (
    ("capital", "What is the capital of France?"),
    ("counting", "Count from one to ten in English words."),
    ("rainbow", "Name three colours of the rainbow."),
    ("ocean", "Write one sentence about the ocean."),
    ("tea", "How do you make a cup of tea? Answer in two short steps."),
)


@dataclass(frozen=True)
class Prompt:
    """A question. ``code`` must be in the answer when it is not empty."""

    name: str
    text: str
    code: str
    max_tokens: int

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class Answer:
    """What came back. ``error`` is empty when the stream ended as it should."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    kv_identical: bool | None  # None: the workers did not say
    room: str
    error: str


def haystack(tokens: int, code: str, seed: int) -> str:
    """About so many tokens of small talk about a town with the code in their middle, and the question."""
    chooser = random.Random(f"{seed}/{tokens}")
    sentences = max(1, round((tokens - 66) / 10.4))
    lines = [f"The {chooser.choice(_PLACES)} {chooser.choice(_THINGS)}." for _ in range(sentences)]
    lines.insert(len(lines) // 2, f"The secret code is {code}.")
    return f"Read this text.\n{' '.join(lines)}\nWhat is the secret code in the text? Answer with the number."


def prompts(seed: int, max_tokens: int) -> list[Prompt]:
    """The eight prompts, the quickest first."""
    short = [Prompt(name, text, "", max_tokens) for name, text in QUESTIONS]
    needles = [Prompt(f"needle {tokens}", haystack(tokens, code, seed), code, max_tokens) for tokens, code in NEEDLES]
    return short[:2] + needles[:1] + short[2:] + needles[1:]


async def reference(system: System, questions: Sequence[Prompt], seconds: float) -> list[Answer]:
    """The answers of one process. Raises DemoError when it gives none."""
    asked, answered = system.logs / "reference-questions.json", system.logs / "reference-answers.json"
    asked.write_text(
        json.dumps([{"messages": prompt.messages, "max_tokens": prompt.max_tokens} for prompt in questions])
    )
    running = await system.manager.start(system.reference(asked, answered))
    code = await system.manager.wait_exit(running.spec.name, seconds)
    try:
        if code != 0:
            raise ValueError("no end" if code is None else exit_text(code))
        found = json.loads(answered.read_text())
        answers = [Answer(item["text"], tuple(item["tokens"]), item["prompt_tokens"], None, "", "") for item in found]
        if len(answers) != len(questions):
            raise ValueError(f"{len(answers)} answers to {len(questions)} questions")
        return answers
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(system.manager.explain(running, f"it gave no answers ({error})", seconds)) from error


async def ask(http: httpx.AsyncClient, gateway: str, model: str, prompt: Prompt, timeout: float) -> Answer:
    """One streamed chat completion through the gateway. Never raises for what the service does: see Answer.error."""
    body = {
        "model": model, "messages": prompt.messages, "max_tokens": prompt.max_tokens, "temperature": 0, "stream": True,
    }  # fmt: skip
    text: list[str] = []
    tokens: list[int] = []
    last: Mapping[str, Any] = {}
    finished = ""
    prompt_tokens = 0
    error = ""
    try:
        async with asyncio.timeout(timeout):
            async with http.stream("POST", f"{gateway}/v1/chat/completions", json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    return _no_answer(
                        f"HTTP {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}"
                    )
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data:"))
                    if "error" in chunk:
                        error = str(chunk["error"].get("message", chunk["error"]))
                    for choice in chunk.get("choices", ()):
                        text.append(choice.get("delta", {}).get("content") or "")
                        finished = choice.get("finish_reason") or finished
                    extension = chunk.get("pdxfer") or {}
                    tokens += extension.get("tokens", ())
                    last = {**last, **extension}
                    prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", prompt_tokens)
    except TimeoutError:
        error = f"no complete answer within {timeout:g} s"
    except (httpx.HTTPError, ValueError) as failure:
        error = why(failure)
    if not error and not finished:
        error = "the stream ended without a finish_reason"
    return Answer(
        "".join(text), tuple(tokens), prompt_tokens, last.get("kv_identical"), str(last.get("room", "")), error
    )


def _no_answer(error: str) -> Answer:
    return Answer("", (), 0, None, "", error)


async def ask_all(
    http: httpx.AsyncClient, gateway: str, model: str, questions: Sequence[Prompt], timeout: float
) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(http, gateway, model, prompt, timeout) for prompt in questions)))


def same(answer: Answer, expected: Answer) -> str:
    """ "" when the answer is the expected one, token for token; else in what it differs."""
    if answer.error:
        return answer.error
    if answer.tokens != expected.tokens:
        at = next((i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b), None)
        if at is None:
            return f"{len(answer.tokens)} tokens, expected {len(expected.tokens)}"
        return f"token {at} is {answer.tokens[at]}, expected {expected.tokens[at]}"
    if answer.text != expected.text:
        return f"the text is {answer.text[:60]!r}, expected {expected.text[:60]!r}"
    if answer.kv_identical is not True:
        return (
            "the cache's bytes differ between prefill and decode"
            if answer.kv_identical is False
            else "the cache's bytes were not compared"
        )
    return ""


def compare(
    questions: Sequence[Prompt], answers: Sequence[Answer], reference: Sequence[Answer], *, needles: bool
) -> Parity:
    """Step 1's judgement. ``needles``: the model can read, so its answers must contain the codes."""
    parity = Parity(prompts=len(questions))
    for prompt, answer, expected in zip(questions, answers, reference, strict=True):
        problem = same(answer, expected)
        parity.tokens += len(expected.tokens)
        parity.longest_prompt = max(parity.longest_prompt, expected.prompt_tokens)
        parity.kv_identical += answer.kv_identical is True
        if not expected.tokens:
            problem = problem or "the reference gave no tokens, so that nothing was compared"
        if needles and prompt.code:
            parity.needles += 1
            if prompt.code in answer.text:
                parity.needles_found += 1
            else:
                problem = problem or f"the code {prompt.code} is not in the answer {answer.text[:80]!r}"
        if problem:
            parity.problems.append(f"{prompt.name}: {problem}")
        else:
            parity.identical += 1
    return parity
