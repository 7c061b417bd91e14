"""Stores into the mirror and loads out of it: pages on one side, entries on the other, copies by the engine between them.

Owns: the regions of the mirror, leases on what was looked up, operations under way. Must not: touch bytes, or choose what is
evicted (`mirror` does).

A store lends pages (READ) and fills EMPTY entries; a load lends pages (WRITE) and reads pinned entries. An operation ends once,
by name, when no job of its touches a page or an entry any more; a job that never ends is ended by the death of its engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from . import worker
from .events import KillEngine
from .geometry import Pages, page_array
from .jobs import MapMirror, MirrorEntry, MirrorLoad, MirrorStore, Rows
from .limits import MirrorSettings
from .messages import good_name
from .mirror import DROPS, MAX_TOKEN, READY, TOKEN_BYTES, prefix_keys
from .reasons import ENDS, Refused
from .regions import ALIGN, Block, Lease, Operation, Region
from .state import State, Worker

MOST_ENTRIES: Final = 256  # of a job: others wait for it
MOST_BLOCKS: Final = 1 << 17  # of a prompt: its keys are made while everybody waits
SHARE: Final = 2  # of all stores, loads and leases one worker may have a half
WINDOW: Final = 2  # jobs under way: one is copied while the next one waits


class Mirrors:
    """``settings``: with ``bytes`` of 0 there is no mirror, and every request is refused."""

    def __init__(self, state: State, settings: MirrorSettings) -> None:
        self.state = state
        self.settings = settings
        self.room = settings.bytes // settings.layouts // ALIGN * ALIGN  # bytes of a region
        self.regions: list[Region | None] = [None] * settings.layouts
        self.leases: dict[int, Lease] = {}
        self.operations: dict[int, Operation] = {}  # by serial
        self.jobs: dict[int, Operation] = {}
        self.queue: deque[Operation] = deque()  # with blocks that no job was made for
        self.totals = {
            "lookups": 0, "blocks_asked": 0, "blocks_found": 0, "blocks_stored": 0, "blocks_loaded": 0, "bytes_stored": 0,
            "bytes_loaded": 0,
        }  # fmt: skip
        self.dropped = dict.fromkeys(DROPS, 0)  # of regions that are gone
        self.ends = {kind: dict.fromkeys(ENDS, 0) for kind in ("store", "load")}

    # requests ------------------------------------------------------------------------------------------------------

    def request(self, owner: Worker, frame: worker.MirrorRequest) -> Callable[[], None]:
        """Take a request, or raise Refused having changed nothing. Returns what follows the worker's Ok."""
        match frame:
            case worker.Lookup():
                return self._lookup(owner, frame)
            case worker.Unpin():
                return self._unpin(owner, frame)
            case worker.Store():
                return self._store(owner, frame)
            case worker.Load():
                return self._load(owner, frame)
            case worker.Cancel():
                return self._cancel(owner, frame)
            case worker.Evict():
                region, space = self._known(owner), self._space(frame.model, frame.tenant)
                dropped = region.index.drop_all(space, "asked") if region is not None else 0
                self.state.to_worker(owner, worker.Evicted(frame.req, dropped))
                return lambda: None

    def _lookup(self, owner: Worker, frame: worker.Lookup) -> Callable[[], None]:
        st = self.state
        region = self._known(owner)
        space = self._space(frame.model, frame.tenant)
        self._check_tokens(frame.tokens)
        if frame.hold:
            self._check_count(owner)
        keys = prefix_keys(frame.tokens, self.settings.block_tokens)
        entries = region.index.find(space, keys) if region is not None else []
        if region is not None:
            region.index.touch(entries)
        self.totals["lookups"] += 1
        self.totals["blocks_asked"] += len(keys)
        self.totals["blocks_found"] += len(entries)
        lease = 0
        if frame.hold and entries and region is not None:
            lease = st.serial()
            region.index.pin(entries)
            self.leases[lease] = Lease(lease, owner, region, entries)
            owner.leases[lease] = None
            st.timers.set(("lease", lease), st.now + self.settings.timeout)
        st.to_worker(owner, worker.Held(frame.req, lease, len(entries), self.settings.block_tokens))
        return lambda: None

    def _unpin(self, owner: Worker, frame: worker.Unpin) -> Callable[[], None]:
        self._known(owner)
        lease = self.leases.get(frame.lease)
        if lease is not None and lease.owner is owner:
            self._let_go(lease)
        return lambda: None  # it may have run out: that is what was asked for

    def _store(self, owner: Worker, frame: worker.Store) -> Callable[[], None]:
        st = self.state
        region = self._known(owner) or self._new(owner)
        space = self._space(frame.model, frame.tenant)
        self._check_tokens(frame.tokens)
        if st.draining:
            raise Refused("draining", "the sidecar is shutting down")
        self._check_count(owner)
        keys = prefix_keys(frame.tokens, self.settings.block_tokens)
        blocks = len(keys) - frame.first_block
        if frame.first_block < 0 or blocks < 1:
            raise Refused(
                "bad_tokens",
                f"{len(frame.tokens) // TOKEN_BYTES} tokens are {len(keys)} whole blocks of {self.settings.block_tokens},"
                f" expected one or more from block {frame.first_block} on",
            )
        tables = self._tables(region, frame.pages, blocks)
        st.pages.check(owner.id, tables, owner.names, write=False)
        before = keys[: frame.first_block]
        if region not in self.regions and not before:
            self._open(region)
        lost = len(before) if region not in self.regions else region.index.gap(space, before)
        if before and lost is not None:
            raise Refused(
                "mirror_miss",
                f"block {min(lost, len(before) - 1)} is not there, and blocks behind it could never be found",
            )
        if self.settings.store_after > 1:
            enough = region.index.given(space, keys, self.settings.store_after)
            early, keys = len(keys) - max(enough, frame.first_block), keys[: max(enough, frame.first_block)]
        else:
            early = 0
        missing = len([k for k in keys[frame.first_block :] if not region.index.known(space, k)])
        taken = region.index.begin(space, keys, frame.first_block)
        if missing and not taken:
            raise Refused(
                "mirror_full", f"{missing} blocks to store, and all {region.index.entries} entries are in use"
            )
        found = [(i - frame.first_block, entry) for i, entry in taken]
        part = self._part(region, tables, [n for n, _ in found])
        op = self._operation(
            frame.req, owner, region, found, frame.pages, part, keys, space, loading=False, asked=missing
        )
        if early:
            op.detail = f"{early} blocks came fewer than {self.settings.store_after} times"
        if len(taken) < missing:
            op.detail = f"the mirror has no room for {missing - len(taken)} of {missing} blocks"
        return lambda: self._begin(op)

    def _load(self, owner: Worker, frame: worker.Load) -> Callable[[], None]:
        st = self.state
        region = self._known(owner)
        if st.draining:
            raise Refused("draining", "the sidecar is shutting down")
        self._check_count(owner)
        lease = self.leases.get(frame.lease)
        if lease is None or lease.owner is not owner or region is None:
            raise Refused(
                "mirror_miss",
                f"lease {frame.lease} is not held: it was let go, or ran out after {self.settings.timeout:g} s",
            )
        if frame.first_block < 0 or frame.blocks < 1 or frame.first_block + frame.blocks > len(lease.entries):
            raise Refused(
                "mirror_miss", f"blocks {frame.first_block}+{frame.blocks}, the lease has {len(lease.entries)} blocks"
            )
        entries = lease.entries[frame.first_block : frame.first_block + frame.blocks]
        gone = [n for n, entry in enumerate(entries) if region.index.state(entry) != READY]
        if gone:
            raise Refused("mirror_miss", f"block {frame.first_block + gone[0]} was dropped since it was looked up")
        tables = self._tables(region, frame.pages, frame.blocks)
        st.pages.check(owner.id, tables, owner.names, write=True)
        region.index.pin(entries)
        op = self._operation(
            frame.req, owner, region, list(enumerate(entries)), frame.pages, tables, (), "",
            loading=True, asked=frame.blocks,
        )  # fmt: skip
        return lambda: self._begin(op)

    def _cancel(self, owner: Worker, frame: worker.Cancel) -> Callable[[], None]:
        self._known(owner)
        found = [op for op in self.operations.values() if op.owner is owner and op.req == frame.operation]

        def end() -> None:
            for op in found:
                self.end(op, "aborted", f"asked by worker {owner.engine_id!r}")

        return end  # of one that has ended, nothing

    # operations ----------------------------------------------------------------------------------------------------

    def _operation(
        self, req: int, owner: Worker, region: Region, blocks: list[Block], raw: tuple[bytes, ...], tables: list[Pages],
        keys: Sequence[bytes], space: str, *, loading: bool, asked: int,
    ) -> Operation:  # fmt: skip
        st = self.state
        op = Operation(
            st.serial(), req, owner, region, blocks, raw, tables, keys, space, st.now, loading=loading, asked=asked
        )
        st.pages.lend(owner.id, tables, op.serial, write=op.loading)
        self.operations[op.serial] = op
        owner.operations[op.serial] = None
        st.timers.set(("mirror", op.serial), st.now + self.settings.timeout)
        return op

    def _begin(self, op: Operation) -> None:
        if not op.blocks:
            self.end(op, "done", op.detail)
            return
        self.queue.append(op)
        self.pump()

    def pump(self) -> None:
        """Keep a few copies under way, one of each operation in turn."""
        st = self.state
        while st.engine.up and self.queue and len(self.jobs) < WINDOW:
            op = self.queue.popleft()
            if op.reason:
                continue
            most = max(1, min(MOST_ENTRIES, st.limits.local_chunk // op.region.entry_bytes))
            batch = op.blocks[op.next : op.next + most]
            op.next += len(batch)
            st.next_job += 1
            id = st.next_job
            op.jobs[id] = batch
            self.jobs[id] = op
            entries = tuple(self._entry(op, n, entry) for n, entry in batch)
            kind = MirrorLoad if op.loading else MirrorStore
            st.to_engine(kind(id, op.owner.id, op.region.entry_bytes, entries))
            if op.next < len(op.blocks):
                self.queue.append(op)

    def _entry(self, op: Operation, block: int, entry: int) -> MirrorEntry:
        region = op.region
        rows = []
        for pool, (spec, n) in enumerate(zip(region.specs, region.pages, strict=True)):
            rows.append(Rows(pool, 0, spec.planes, op.raw[pool][4 * n * block : 4 * n * (block + 1)]))
        digest = region.index.digest(entry) if op.loading else 0
        return MirrorEntry(region.offset(entry), digest, tuple(rows))

    def stored(self, id: int, digests: tuple[int, ...], error: str) -> None:
        """The engine has copied a batch into its entries, or has not."""
        op = self.jobs.pop(id)
        batch = op.jobs.pop(id)
        if not error and len(digests) != len(batch):
            error = f"{len(digests)} digests for {len(batch)} entries"
        if not error and not op.reason:
            for (_, entry), digest in zip(batch, digests, strict=True):
                self.landed(op, entry, digest)
        self._after(op, error)

    def landed(self, op: Operation, entry: int, digest: int) -> None:
        """Every pool of an entry is in it."""
        op.region.index.filled(entry, digest)
        op.left.discard(entry)
        self.totals["blocks_stored"] += 1
        self.totals["bytes_stored"] += op.region.entry_bytes

    def loaded(self, id: int, bad: tuple[int, ...], error: str) -> None:
        """The engine has copied a batch into pages, but for entries whose digest did not fit."""
        op = self.jobs.pop(id)
        batch = op.jobs.pop(id)
        wrong = {n for n in bad if 0 <= n < len(batch)}
        for n, (block, entry) in enumerate(batch):
            if n in wrong:
                op.bad.append(block)
                if op.region.index.state(entry) == READY:
                    op.region.index.drop(entry, "corrupt")
            elif not error:
                op.left.discard(entry)
                self.totals["blocks_loaded"] += 1
                self.totals["bytes_loaded"] += op.region.entry_bytes
        self._after(op, error)

    def _after(self, op: Operation, error: str) -> None:
        if op.reason:
            self.settle(op)
        elif error:
            self.end(op, "copy_error", error)
        elif op.bad:
            self.end(
                op,
                "mirror_corrupt",
                f"block {min(op.bad)} is not what was stored; it was dropped, its pages were not written",
            )
        elif not op.jobs and op.next == len(op.blocks):
            self.end(op, "done", op.detail)
        self.pump()

    def end(self, op: Operation, reason: str, detail: str) -> None:
        """End an operation; its worker is told when no job touches its pages any more."""
        if not op.reason:
            op.reason, op.detail = reason, detail
            self.settle(op)

    def settle(self, op: Operation) -> None:
        st = self.state
        if op.jobs or op.serial not in self.operations:
            return
        index = op.region.index
        del self.operations[op.serial]
        if op.next < len(op.blocks) and op in self.queue:
            self.queue.remove(op)
        del op.owner.operations[op.serial]
        st.timers.clear(("mirror", op.serial))
        st.pages.give_back(op.owner.id, op.tables, op.serial, write=op.loading)
        if op.loading:
            index.unpin(entry for _, entry in op.blocks)
        else:
            for entry in op.left:
                index.abandon(entry)
            index.touch(index.find(op.space, op.keys))
        good = 0
        for _, entry in op.blocks:
            if entry in op.left:
                break
            good += 1
        self.ends[op.kind][op.reason] += 1
        meaning = ENDS[op.reason]
        detail = (
            op.detail if op.reason == "done" else f"{meaning.meaning}: {op.detail or 'no detail'}; {meaning.advice}"
        )
        st.to_worker(
            op.owner,
            worker.MirrorEnded(
                op.req, op.loading, meaning.state, op.reason, meaning.retriable, detail,
                good, op.asked, good * op.region.entry_bytes, st.now - op.opened,
            ),
        )  # fmt: skip

    # what happens around it ----------------------------------------------------------------------------------------

    def overdue(self, serial: int) -> None:
        """An operation is past its time. A copy under way cannot be taken back but by killing the engine."""
        st = self.state
        op = self.operations[serial]
        self.end(op, "transfer_deadline", f"the {op.kind} was not over within {self.settings.timeout:g} s")
        if serial not in self.operations:
            return
        if st.engine.up and not st.engine.killing:
            st.engine.killing = True
            st.emit(KillEngine(f"a {op.kind} of the mirror is not over after its deadline"))
        st.timers.set(("mirror", serial), st.now + st.limits.transfer_deadline)

    def expired(self, id: int) -> None:
        """A lease has run out."""
        self._let_go(self.leases[id])

    def worker_gone(self, owner: Worker) -> None:
        for serial in list(owner.operations):
            self.end(self.operations[serial], "worker_lost", f"worker {owner.engine_id!r}")
        for id in list(owner.leases):
            self._let_go(self.leases[id])

    def worker_released(self, owner: Worker) -> None:
        """No job touches its pages any more: a region that nobody uses may be another layout's."""
        for region in self.regions:
            if region is not None:
                region.users.discard(owner.id)

    def map(self) -> None:
        """Tell a new engine where the mirror is, and go on."""
        if self.settings.bytes:
            self.state.to_engine(MapMirror(self.settings.bytes))

    def engine_lost(self, detail: str) -> None:
        """What was being copied is lost; what lies in the mirror is not, nor what only waited."""
        for op in dict.fromkeys(self.jobs.values()):
            op.jobs.clear()
            if op.reason:
                self.settle(op)
            else:
                self.end(op, "engine_lost", detail)
        self.jobs.clear()

    def shutdown(self, detail: str) -> None:
        for op in list(self.operations.values()):
            self.end(op, "shutdown", detail)

    # parts ---------------------------------------------------------------------------------------------------------

    def _known(self, owner: Worker) -> Region | None:
        """The region for this worker's pools, if there is one. Raises Refused('mirror_off')."""
        if not self.settings.bytes:
            raise Refused("mirror_off", "mirror.bytes is 0")
        for region in self.regions:
            if region is not None and region.specs == owner.specs:
                region.users.add(owner.id)
                return region
        return None

    def _new(self, owner: Worker) -> Region:
        """One that could be; nothing is given up for it before it is opened. Raises Refused('mirror_off')."""
        free = [n for n, region in enumerate(self.regions) if region is None or not region.users]
        if not free:
            raise Refused(
                "mirror_off",
                f"workers with {len(self.regions)} other layouts use the mirror, mirror.layouts is {self.settings.layouts}",
            )
        free.sort(key=lambda n: self.regions[n] is not None)  # what is stored for no worker goes last
        region = Region(free[0], free[0] * self.room, self.room, owner.specs, self.settings)
        region.users.add(owner.id)
        return region

    def _open(self, region: Region) -> None:
        """Give it its place."""
        old = self.regions[region.place]
        if old is not None:  # nobody has such pools any more: what it holds goes
            for why in DROPS:
                self.dropped[why] += old.index.dropped[why]
            self.dropped["evicted"] += old.index.counts[READY]
        region.open()
        self.regions[region.place] = region

    def _space(self, model: str, tenant: str) -> str:
        """Who may share entries. Raises Refused('bad_tokens')."""
        for what, name in (("model", model), ("tenant", tenant)):
            if name and not good_name(name):
                raise Refused("bad_tokens", f"{what} {name[:40]!r}, expected at most 128 printable characters")
        return f"{len(model)}:{model}:{tenant}"

    def _check_tokens(self, tokens: bytes) -> None:
        """Raise Refused('bad_tokens')."""
        if len(tokens) % TOKEN_BYTES:
            raise Refused("bad_tokens", f"{len(tokens)} bytes, expected a multiple of {TOKEN_BYTES}")
        blocks = len(tokens) // TOKEN_BYTES // self.settings.block_tokens
        if blocks > MOST_BLOCKS:
            raise Refused(
                "bad_tokens",
                f"{blocks} blocks, expected at most {MOST_BLOCKS}; mirror.block_tokens is {self.settings.block_tokens}",
            )
        most = int(np.frombuffer(tokens, "<u4").max()) if tokens else 0
        if most > MAX_TOKEN:
            raise Refused("bad_tokens", f"token id {most}, expected 0 to {MAX_TOKEN}")

    def _check_count(self, owner: Worker) -> None:
        most = self.state.limits.max_rooms
        own, whole = len(owner.operations) + len(owner.leases), len(self.operations) + len(self.leases)
        if whole >= most or own * SHARE >= most:
            raise Refused(
                "too_many_rooms", f"{whole} stores, loads and leases of the mirror are live, {own} of this worker"
            )

    def _tables(self, region: Region, raw: tuple[bytes, ...], blocks: int) -> list[Pages]:
        """Raises Refused."""
        if len(raw) != len(region.specs):
            raise Refused("pools_unequal", f"{len(raw)} page tables, the worker has {len(region.specs)} pools")
        tables = [page_array(t) for t in raw]
        for spec, n, pages in zip(region.specs, region.pages, tables, strict=True):
            if len(pages) != n * blocks:
                raise Refused(
                    "pools_unequal",
                    f"pool {spec.name!r}: {len(pages)} pages for {blocks} blocks, expected {n} for each",
                )
        return tables

    def _part(self, region: Region, tables: list[Pages], blocks: list[int]) -> list[Pages]:
        """The pages of these blocks."""
        chosen = np.array(blocks, dtype=np.intp)
        return [t.reshape(-1, n)[chosen].reshape(-1) for t, n in zip(tables, region.pages, strict=True)]

    def _let_go(self, lease: Lease) -> None:
        del self.leases[lease.id]
        del lease.owner.leases[lease.id]
        self.state.timers.clear(("lease", lease.id))
        lease.region.index.unpin(lease.entries)
