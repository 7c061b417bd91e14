"""``pdxfer probe model``: a tiny DeepSeek V3.2 decoded across a transfer, against the same in one process.

Owns: prompts, the three processes, their orders, and the comparison. Must not: print, or import torch: the processes do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pdxfer.bench.child import BenchError, Child
from pdxfer.bench.run import machine
from pdxfer.bench.sidecars import Sidecars
from pdxfer.client import Client, Disconnected, Ended, Rejected
from pdxfer.pools.dsa import Dtype, IndexFormat

from .cases import seed_of
from .needle import Say
from .paths import SOURCE, TARGET

if TYPE_CHECKING:
    from .tiny import Answer, Request

LENGTHS: Final = (955, 600, 700, 955, 820, 955, 530, 900)  # tokens of the prompts, in turns
SHARED: Final = 512  # tokens that every second prompt has in common with the others of that kind
START: Final = 120.0  # seconds until a process has loaded torch and the model
PATIENCE: Final = 300.0
SILENCE: Final = 60.0
VOCABULARY: Final = 512


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    dtypes: tuple[Dtype, ...] = ("bf16", "fp8")
    prompts: int = 8
    new_tokens: int = 16
    top_k: int = 512
    page_tokens: int = 64
    tls: str = ""


@dataclass
class Run:
    """One storage format."""

    dtype: Dtype
    prompts: int
    tokens: int  # compared
    tokens_differ: int
    sets: int
    sets_differ: int
    answers: list[list[int]] = field(default_factory=list)  # of the one process
    decoded: list[list[int]] = field(default_factory=list)  # across the transfer

    @property
    def identical(self) -> bool:
        return self.tokens > 0 and self.sets > 0 and not self.tokens_differ and not self.sets_differ


@dataclass
class Result:
    """Everything, as it goes into the JSON file."""

    options: Options
    machine: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return bool(self.runs) and all(run.identical for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        runs = [asdict(run) | {"identical": run.identical} for run in self.runs]
        return {"identical": self.identical, "options": asdict(self.options), "machine": self.machine, "runs": runs}


def prompts(options: Options) -> list[list[int]]:
    """Random tokens; every second prompt begins as the others of that kind do."""
    common = np.random.default_rng(seed_of("model")).integers(0, VOCABULARY, SHARED).tolist()
    found = []
    for number in range(options.prompts):
        length = LENGTHS[number % len(LENGTHS)]
        own = np.random.default_rng(seed_of("model", number)).integers(0, VOCABULARY, length).tolist()
        found.append([*common, *own[SHARED:]] if number % 2 else own)
    return found


def tables(options: Options, texts: list[list[int]], seed: int) -> list[Any]:
    """Scattered pages for each prompt and its answer."""
    counts = [-(-(len(text) + options.new_tokens) // options.page_tokens) for text in texts]
    order = np.random.default_rng(seed).permutation(sum(counts))
    return np.split(order, np.cumsum(counts)[:-1])


# the processes -----------------------------------------------------------------------------------------------------


class Worker:
    """What an order can ask for; every method is one."""

    def __init__(self, options: Options, socket: str, engine_id: str, role: str, seed: int) -> None:
        from .tiny import TinyModel

        self.options = options
        self.where = socket, engine_id, role
        self.texts = prompts(options)
        self.tables = tables(options, self.texts, seed)
        self.model = TinyModel(options.top_k)
        self.client: Client | None = None
        self.ended: list[Ended] = []

    def attach(self, dtype: Dtype) -> None:
        """New pools for this format, in place of those before; attached unless this worker needs no sidecar."""
        if self.client is not None:
            self.client.close()
        self.model.allocate(IndexFormat(dtype, self.options.page_tokens), sum(map(len, self.tables)))
        if self.where[0]:
            self.client = Client(*self.where, self.model.pools, wait=True)

    def alone(self) -> list[Answer]:
        """Every prompt from beginning to end, here."""
        return [self._finished(request, prefilled=False) for request in self._requests()]

    def prefill(self, prefix: str) -> list[Answer]:
        """Every prompt's prefill, and a room for each that carries its pages and its first token."""
        assert self.client is not None
        found = []
        for number, request in enumerate(self._requests()):
            room = self.client.open(f"{prefix}-{number}")
            self.model.prefill(request)
            room.push(request.table[: self._pages(request)])
            room.finish(aux=request.answer.tokens[0].to_bytes(4, "little"))
            found.append(request.answer)
            self._hear(0.0)
        self._ends(len(found))
        return found

    def decode(self, prefix: str) -> list[Answer]:
        """Receive every prompt, all at a time, and decode each from what has arrived."""
        assert self.client is not None
        requests = self._requests()
        for number, request in enumerate(requests):
            self.client.receive(f"{prefix}-{number}", SOURCE, request.table[: self._pages(request)])
        for end in self._ends(len(requests)):
            request = requests[int(end.room.rpartition("-")[2])]
            request.length = len(request.prompt)
            request.answer.tokens.append(int.from_bytes(end.end.aux, "little"))
        return [self._finished(request, prefilled=True) for request in requests]

    def _requests(self) -> list[Request]:
        from .tiny import Request

        return [Request(table, text) for table, text in zip(self.tables, self.texts, strict=True)]

    def _pages(self, request: Request) -> int:
        return -(-len(request.prompt) // self.options.page_tokens)

    def _finished(self, request: Request, *, prefilled: bool) -> Answer:
        if not prefilled:
            self.model.prefill(request)
        while len(request.answer.tokens) < self.options.new_tokens:
            self.model.decode(request)
            if self.client is not None:
                self.client.poll(0.0)
        return request.answer

    def _ends(self, count: int) -> list[Ended]:
        """Wait until so many rooms are done. Raises BenchError when one is not."""
        heard = time.monotonic()
        while len(self.ended) < count:
            if self._hear(0.5):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE:
                left = count - len(self.ended)
                raise BenchError(f"{left} rooms have not ended within {SILENCE:g} s of the last event")
        found, self.ended = self.ended, []
        return found

    def _hear(self, timeout: float) -> bool:
        """Poll the client and keep the ends. Returns whether there was anything."""
        assert self.client is not None
        events = self.client.poll(timeout)
        for event in events:
            if isinstance(event, Ended):
                if not event.end.done:
                    raise BenchError(
                        f"room {event.room} ended {event.end.state} ({event.end.reason}): {event.end.detail}"
                    )
                self.ended.append(event)
            elif isinstance(event, Rejected | Disconnected):
                raise BenchError(f"the sidecar: {event}")
        return bool(events)


def serve(pipe: Connection, options: Options, socket: str, engine_id: str, role: str, seed: int) -> None:
    """The process: an order is (name of a method, its arguments), and its answer what that returns."""
    worker = Worker(options, socket, engine_id, role, seed)
    pipe.send("ready")
    while True:
        while not pipe.poll(0.2):
            if worker.client is not None:
                worker.client.poll(0.0)  # a worker gives signs of life
        name, arguments = pipe.recv()
        pipe.send(getattr(worker, name)(*arguments))


# the run -----------------------------------------------------------------------------------------------------------


async def run(options: Options, say: Say) -> Result:
    """Decode every prompt both ways. Raises BenchError or DemoError with what went wrong; nothing stays behind."""
    result = Result(options, machine(options.tls))
    sidecars = Sidecars(options.tls, SOURCE)
    children: list[Child] = []
    try:
        say("three processes load the model, two sidecars start")
        places = (
            ("the process without a transfer", "", "alone", "both"),
            ("the prefill worker", sidecars.socket("p"), SOURCE, "prefill"),
            ("the decode worker", sidecars.socket("d"), TARGET, "decode"),
        )
        for seed, (name, socket, engine, role) in enumerate(places):
            children.append(Child(name, serve, options, socket, engine, role, seed))
        await sidecars.start()
        for child in children:
            await asyncio.to_thread(child.answer, START)
        for dtype in options.dtypes:
            say(f"{dtype}: {options.prompts} prompts")
            result.runs.append(await asyncio.to_thread(_both_ways, options, dtype, *children))
    finally:
        for child in children:
            child.close()
        problems = await sidecars.close()
    if problems:
        raise BenchError("; ".join(problems))
    return result


def _both_ways(options: Options, dtype: Dtype, alone: Child, prefill: Child, decode: Child) -> Run:
    for child in (alone, prefill, decode):
        child.tell(("attach", (dtype,)))
    for child in (alone, prefill, decode):
        child.answer(PATIENCE)
    alone.tell(("alone", ()))
    prefill.tell(("prefill", (dtype,)))
    decode.tell(("decode", (dtype,)))
    right, begun, ended = (child.answer(PATIENCE) for child in (alone, prefill, decode))
    return compare(dtype, right, begun, ended)


def compare(dtype: Dtype, right: list[Answer], begun: list[Answer], ended: list[Answer]) -> Run:
    """Token by token and set by set. The first token and its sets are of the prefill worker, the others of the decode worker."""
    result = Run(dtype, len(right), 0, 0, 0, 0)
    for one, first, rest in zip(right, begun, ended, strict=True):
        tokens, sets = list(rest.tokens), [*first.sets, *rest.sets]
        result.tokens += len(one.tokens)
        result.tokens_differ += _differ(one.tokens, tokens)
        result.sets += len(one.sets)
        result.sets_differ += _differ(one.sets, sets)
        result.answers.append(one.tokens)
        result.decoded.append(tokens)
    return result


def _differ(right: Sequence[object], found: Sequence[object]) -> int:
    """Places that are not the same; what is missing or too much differs."""
    return sum(a != b for a, b in zip(right, found, strict=False)) + abs(len(right) - len(found))
