"""What workers do with the host mirror: prompts that share prefixes are looked up, loaded, checked and stored.

Owns: the script of one worker's prompts, drawn from a stream of its own, and the check of every byte that a load brings. Must not:
ask the Node anything. One seed in four has a mirror; the others run as if there were none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdxfer.core import worker
from pdxfer.core.limits import MirrorSettings

from .memory import SPECS
from .world import Violation, World

if TYPE_CHECKING:
    from .worker import Task, VirtualWorker

BLOCK = 16  # tokens: one page of each pool
SETTINGS = MirrorSettings(bytes=6 * 4096, block_tokens=BLOCK, share=0.7, timeout=2.0)
EXPECTED = {
    "store": {"mirror_full"},
    "load": {"mirror_miss"},  # the lease ran out while somebody stood still
    "lookup": set[str](),
    "cancel": set[str](),
    "unpin": set[str](),
    "evict": set[str](),
}  # refusals that may come
ENDS = {"done", "aborted", "engine_lost", "transfer_deadline", "copy_error", "mirror_corrupt", "sidecar_lost", "died"}


def has_mirror(seed: int) -> bool:
    return seed % 4 == 3


@dataclass
class Prompt:
    """One request: look it up, load what is there, store it."""

    tenant: str
    blocks: list[int]  # what tells them apart
    rows: list[list[int]] = field(default_factory=list)  # pages that are lent now, by pool
    loading: bool = False
    lease: int = 0
    held: int = 0

    @property
    def tokens(self) -> bytes:
        return np.repeat(np.array(self.blocks, dtype="<u4"), BLOCK).tobytes()

    def token(self, world: World, block: int, pool: int, plane: int) -> int:
        """What the block's page holds: a function of the prefix up to it."""
        return world.prefix_token((self.tenant, tuple(self.blocks[: block + 1]), pool, plane))


def table(pages: list[int]) -> bytes:
    return np.array(pages, dtype="<u4").tobytes()


class MirrorUser:
    """Beside a VirtualWorker, whose connection and memory it uses."""

    def __init__(self, one: VirtualWorker) -> None:
        self.one = one
        self.world = one.world
        self.rng = random.Random(f"{one.world.seed} mirror {one.engine_id}")
        self.asked: dict[int, tuple[str, Prompt | None]] = {}  # requests without an answer
        self.open: dict[int, Prompt] = {}  # stores and loads
        self.held: list[
            Prompt
        ] = []  # ended by a lost connection: their pages are not safe before we are attached again
        for _ in range(2):
            self._next()

    @property
    def busy(self) -> bool:
        return bool(self.asked or self.open or self.held)

    # a prompt ------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        self.world.after(0.3 * self.rng.random(), self._begin)

    def _begin(self) -> None:
        one, rng = self.one, self.rng
        if self.world.calm:
            return
        if not one.connected or one.silent:
            self._next()
            return
        name, n = rng.randrange(4), rng.choice((1, 2, 3))
        blocks = [name // 2, *(10 * name + i for i in range(1, n))]
        prompt = Prompt(rng.choice(("", "b")), blocks)
        if rng.random() < 0.05:
            self._ask("evict", None, lambda req: worker.Evict(req, "m", prompt.tenant))
        if rng.random() < 0.02:
            self.one.side.flip(rng)
        self._ask("lookup", prompt, lambda req: worker.Lookup(req, "m", prompt.tenant, prompt.tokens, True))

    def _load(self, prompt: Prompt) -> None:
        if not self._lend(prompt, prompt.held, loading=True):
            self._let_go(prompt)
            self._next()
            return
        raw = tuple(table(pages) for pages in prompt.rows)
        req = self._ask("load", prompt, lambda req: worker.Load(req, prompt.lease, 0, prompt.held, raw))
        self._maybe_cancel(req)

    def _store(self, prompt: Prompt) -> None:
        n = len(prompt.blocks)
        if self.world.calm or not self._lend(prompt, n, loading=False):
            self._next()
            return
        for pool, spec in enumerate(SPECS):
            for plane in range(spec.planes):
                for block in range(n):
                    page = prompt.rows[pool][block]
                    self.one.memory.pages[pool][plane][page] = prompt.token(self.world, block, pool, plane)
        raw = tuple(table(pages) for pages in prompt.rows)
        req = self._ask("store", prompt, lambda req: worker.Store(req, "m", prompt.tenant, prompt.tokens, 0, raw))
        self._maybe_cancel(req)

    def _maybe_cancel(self, req: int) -> None:
        if self.rng.random() < 0.2:
            life = self.one.life
            at = self.rng.choice((0.0, 0.001, 0.004)) * self.rng.random()

            def cancel() -> None:
                if self.one.life == life and self.one.connected and req in self.open:
                    self._ask("cancel", None, lambda number: worker.Cancel(number, req))

            self.world.after(at, cancel)

    def _let_go(self, prompt: Prompt) -> None:
        if prompt.lease and self.rng.random() < 0.8:  # else it runs out
            self._ask("unpin", None, lambda req: worker.Unpin(req, prompt.lease))
        prompt.lease = 0

    def _ask(self, kind: str, prompt: Prompt | None, frame: object) -> int:
        self.one.req += 1
        req = self.one.req
        if self.one.id is None or self.one.silent:
            if prompt is not None:
                self._home(prompt)
                self._next()
            return req
        self.asked[req] = (kind, prompt)
        if kind in ("load", "store") and prompt is not None:
            self.open[req] = prompt
        self.one.say(frame(req))  # type: ignore[operator]
        return req

    def holds(self, task: Task) -> tuple[int, ...]:
        """How many pages of a receive are there already, from a mirror say: their content is put in place, and must stay."""
        if self.rng.random() < 0.5:
            return (0, 0)
        contents = self.world.contents[task.key]
        found = []
        for pool, pages in enumerate(task.pages):
            n = self.rng.randint(0, len(pages))
            for plane, logical in enumerate(contents[pool]):
                for i in range(n):
                    self.one.memory.pages[pool][plane][pages[i]] = logical[i]
            found.append(n)
        return tuple(found)

    # what the sidecar says -----------------------------------------------------------------------------------------

    def answers(self, req: int) -> bool:
        return req in self.asked

    def ok(self, req: int) -> None:
        self.asked.pop(req)

    def rejected(self, req: int, code: str) -> None:
        kind, prompt = self.asked.pop(req)
        if code not in EXPECTED[kind]:
            raise Violation(f"{self.one.engine_id}: {kind} {req} was refused as {code}")
        self.world.mirror_ends[f"{kind} {code}"] += 1
        if prompt is not None:
            self.open.pop(req, None)
            self._home(prompt)
            self._let_go(prompt)
            self._next()

    def says(self, frame: worker.Held | worker.Evicted | worker.MirrorEnded) -> None:
        match frame:
            case worker.Held(req=req, lease=lease, blocks=blocks):
                kind, prompt = self.asked.get(req, ("", None))
                if prompt is None or kind != "lookup" or blocks > len(prompt.blocks) or bool(lease) != bool(blocks):
                    raise Violation(f"{self.one.engine_id}: {frame}, asked was {kind or 'nothing'}")
                prompt.lease, prompt.held = lease, blocks
                self.world.after(0.001, lambda: self._held(prompt, self.one.life))
            case worker.Evicted():
                return
            case worker.MirrorEnded():
                self._ended(frame)

    def _held(self, prompt: Prompt, life: int) -> None:
        if life != self.one.life or not self.one.connected:
            self._next()
        elif prompt.held:
            self._load(prompt)
        else:
            self._store(prompt)

    def _ended(self, frame: worker.MirrorEnded) -> None:
        prompt = self.open.pop(frame.operation, None)
        who = f"{self.one.engine_id}: {'load' if frame.loading else 'store'} {frame.operation}"
        if prompt is None or prompt.loading != frame.loading or frame.operation in self.asked:
            raise Violation(f"{who} ended, and is not open: {frame}")
        self._count(prompt, frame.reason)
        if frame.reason == "mirror_corrupt" and not self.world.flipped:
            raise Violation(f"{who} ended mirror_corrupt, and nobody has touched the mirror: {frame.detail}")
        if prompt.loading:
            if frame.reason == "done" and frame.blocks != prompt.held:
                raise Violation(f"{who} is done with {frame.blocks} of {prompt.held} blocks")
            self._check(prompt, frame.blocks, who)
        self._home(prompt)
        if prompt.loading:
            self._let_go(prompt)
            self._store(prompt)
        else:
            self._next()

    def _check(self, prompt: Prompt, blocks: int, who: str) -> None:
        for pool, spec in enumerate(SPECS):
            for plane in range(spec.planes):
                for block in range(blocks):
                    page = prompt.rows[pool][block]
                    found = self.one.memory.pages[pool][plane][page]
                    expected = prompt.token(self.world, block, pool, plane)
                    if found != expected:
                        raise Violation(
                            f"{who} brought WRONG BYTES: pool {pool} plane {plane} block {block} (page {page}) holds {found},"
                            f" stored was {expected}"
                        )

    # pages ---------------------------------------------------------------------------------------------------------

    def _lend(self, prompt: Prompt, n: int, *, loading: bool) -> bool:
        memory = self.one.memory
        if any(n > len(memory.free[pool]) for pool in range(len(SPECS))):
            return False
        prompt.loading = loading
        prompt.rows = [memory.allocate(pool, n) or [] for pool in range(len(SPECS))]
        for pool, pages in enumerate(prompt.rows):
            if loading:
                memory.lend_write(pool, pages, "load")
            else:
                memory.lend_read(pool, pages)
        return True

    def _home(self, prompt: Prompt) -> None:
        memory = self.one.memory
        for pool, pages in enumerate(prompt.rows):
            if prompt.loading:
                memory.home_write(pool, pages)
            else:
                memory.home_read(pool, pages)
        prompt.rows = []

    def _count(self, prompt: Prompt, reason: str) -> None:
        if reason not in ENDS:
            raise Violation(f"{self.one.engine_id}: a {'load' if prompt.loading else 'store'} ended {reason}")
        self.world.mirror_ends[f"{'load' if prompt.loading else 'store'} {reason}"] += 1

    # connection ----------------------------------------------------------------------------------------------------

    def disconnected(self) -> None:
        """Every operation is over, and no page of theirs is touched before we are attached again."""
        for prompt in self.open.values():
            self._count(prompt, "sidecar_lost")
            self.held.append(prompt)
        waiting = sum(prompt is not None for _, prompt in self.asked.values() if prompt not in self.held)
        self._forget(waiting + len(self.open))

    def attached(self) -> None:
        held, self.held = self.held, []
        for prompt in held:
            self._home(prompt)

    def died(self) -> None:
        """The process is dead, and its memory with it."""
        self.held.clear()
        self._forget(2)

    def _forget(self, again: int) -> None:
        self.asked, self.open = {}, {}
        for _ in range(again):
            self._next()
