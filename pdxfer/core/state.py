"""The data of a node: rooms, workers, peers, the engine as the core sees it, and the actions being collected.

Owns: the tables and their smallest helpers. Must not: take decisions; those are in sender, receiver, local, peers,
ends and node, which share one State.
"""

from __future__ import annotations

from collections import deque

import msgspec

from .events import Action, Refuse, ToEngine, ToPeer, ToWorker
from .geometry import Coverage, Pages, Piece, PoolSpec
from .jobs import EngineJob, Expect
from .ledger import PageLedger, SlotLedger, SlotState
from .limits import Limits
from .messages import EngineInfo, Hello, Message, Want
from .timers import Timers
from .worker import SidecarFrame

RoomKey = tuple[str, int, bool]  # room, epoch, sending


def agent_name(node: str, incarnation: int, engine: int) -> str:
    """The NIXL agent's name of one engine of one incarnation of a node: never used twice."""
    return f"{node}:{incarnation:x}:{engine:x}"


class Worker:
    """An attached worker."""

    def __init__(self, id: int, engine_id: str, role: str, pid: int, now: float) -> None:
        self.id = id
        self.engine_id = engine_id
        self.role = role
        self.pid = pid
        self.heard = now
        self.attached_at = now
        self.specs: tuple[PoolSpec, ...] = ()
        self.names: list[str] = []
        self.num_pages: tuple[int, ...] = ()
        self.rooms: dict[
            RoomKey, None
        ] = {}  # live or still coming home; a dict keeps its order, so that runs repeat (R3)
        self.operations: dict[int, None] = {}  # stores and loads of the mirror, by serial
        self.leases: dict[int, None] = {}  # what it holds in the mirror
        self.map_job: EngineJob | None = None
        self.unanswered_attach: int | None = None  # the attach request, until the engine has mapped the pools
        self.may_begin = False  # the attach may be answered
        self.gone = False


class Peer:
    """A node that we talk to."""

    CONNECTING, UP, LOST = "connecting", "up", "lost"

    def __init__(self, node: str, now: float) -> None:
        self.node = node
        self.state = Peer.CONNECTING
        self.incarnation = 0
        self.hello: Hello | None = None
        self.seen = 0  # the revision of our Hello that it holds
        self.heard = now
        self.since = now  # of the state
        self.cut_at: float | None = None
        self.engine_since = now  # when its engine last came or went
        self.hello_delay = 0.0
        self.hello_at = float("-inf")  # when it was told our Hello last
        self.rooms: dict[RoomKey, None] = {}

    @property
    def engine(self) -> EngineInfo | None:
        return self.hello.engine if self.hello is not None else None


class Push:
    """Pages that a worker has lent to a send."""

    __slots__ = ("home", "left", "page0", "raw", "req", "tables", "uncut")

    def __init__(
        self, req: int, page0: tuple[int, ...], raw: tuple[bytes, ...], tables: list[Pages], rects: list[Piece]
    ) -> None:
        self.req = req
        self.page0 = page0
        self.raw = raw
        self.tables = tables
        self.uncut = rects  # what is not cut into segments yet
        self.left = 0  # segments not gathered yet
        self.home = False


class Plan:
    """One segment of a send."""

    __slots__ = ("acked", "bytes", "digest", "generation", "granted", "index", "job", "pieces", "push", "sent", "slot")

    def __init__(self, index: int, pieces: tuple[Piece, ...], bytes: int, push: Push) -> None:
        self.index = index
        self.pieces = pieces
        self.bytes = bytes
        self.push = push
        self.granted = False
        self.slot = 0  # at the receiver
        self.generation = 0
        self.job = 0
        self.sent = False
        self.digest = 0
        self.acked = False


class Room:
    """What both sides of a room have in common."""

    def __init__(self, room: str, epoch: int, sending: bool, serial: int, worker: Worker, now: float) -> None:
        self.room = room
        self.epoch = epoch
        self.sending = sending
        self.key: RoomKey = (room, epoch, sending)
        self.serial = serial
        self.worker = worker
        self.state = ""
        self.opened = now
        self.progress = now
        self.retry = 0.0  # the current repetition delay
        self.peer = ""  # node; empty while unknown
        self.local: Room | None = None  # the other side, when it is on this node
        self.bytes = 0
        self.jobs: set[int] = set()  # jobs that touch this room's pages
        self.timer_at = float("inf")
        # set when the room has ended and only its pages are on their way home:
        self.reason = ""
        self.detail = ""
        self.ended_at = 0.0

    @property
    def live(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.room}/{self.epoch}"


class SendRoom(Room):
    OPEN, MATCHED, SENDING = "open", "matched", "sending"

    def __init__(self, room: str, epoch: int, serial: int, worker: Worker, now: float) -> None:
        super().__init__(room, epoch, True, serial, worker, now)
        self.state = SendRoom.OPEN
        self.pushes: list[Push] = []
        self.plans: list[Plan] = []
        self.covered = Coverage(worker.specs, [0] * len(worker.specs))
        self.counts = [0] * len(worker.specs)  # logical pages pushed, per pool
        self.wanted: tuple[int, ...] = ()  # logical pages wanted, per pool
        self.held: tuple[int, ...] = ()  # of these the receiver has the first ones already
        self.finished: bytes | None = None  # aux, once finish() was called
        self.slot_bytes = 0
        self.granted = 0
        self.high = 0  # all granted segments are below
        self.acked = 0  # all segments below are acknowledged
        self.said_finish = False
        self.done_heard = False
        self.copying: deque[Plan] = deque()  # local rooms: segments not copied yet


class RecvRoom(Room):
    RESOLVING, WANTING, RECEIVING = "resolving", "wanting", "receiving"

    def __init__(self, room: str, epoch: int, serial: int, worker: Worker, now: float) -> None:
        super().__init__(room, epoch, False, serial, worker, now)
        self.state = RecvRoom.RESOLVING
        self.source = ""
        self.source_incarnation = 0
        self.raw: tuple[bytes, ...] = ()  # page tables, whole
        self.held: tuple[int, ...] = ()  # logical pages, from the first on, that the worker has already
        self.tables: list[Pages] = []  # the rest: what is lent
        self.coverage = Coverage(worker.specs, [0] * len(worker.specs))
        self.need = 0  # segments that the sender has ready
        self.granted = 0
        self.outstanding: dict[int, int] = {}  # segment -> slot index, granted or being scattered
        self.verified: set[int] = set()
        self.below = 0  # all segments below are verified
        self.finish: int | None = None  # number of segments, once Finish came
        self.aux = b""
        self.queued = False  # in the queue for slots

    @property
    def wanted(self) -> tuple[int, ...]:
        """Logical pages, per pool."""
        return tuple(len(raw) // 4 for raw in self.raw)


class JobRecord(msgspec.Struct):
    """A job that the engine has not answered."""

    kind: str  # send, scatter or copy
    room: Room
    partner: Room | None = None  # copy: the receiving room
    slot: int = -1
    plan: Plan | None = None
    peer: str = ""
    gathered: bool = False
    remote_slot: int = -1
    remote_generation: int = 0
    bytes: int = 0
    doubtful: bool = False


class Parked(msgspec.Struct):
    """A want for a room that is not open yet."""

    peer: str
    want: Want
    since: float


class Tombstone(msgspec.Struct):
    """How a room ended. ``early``: it has not even come; the next open or receive is killed by it."""

    reason: str
    detail: str
    until: float
    early: bool = False


class Engine:
    """The engine as the core sees it."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.pid = 0
        self.since = 0.0
        self.send = SlotLedger(0)
        self.recv = SlotLedger(0)
        self.agents: dict[str, str] = {}  # agent -> "adding", "ready" or an error
        self.expect = 0
        self.killing = False  # KillEngine was asked for

    @property
    def up(self) -> bool:
        return self.info is not None


class State:
    """All tables, and the actions of the event being handled."""

    def __init__(self, name: str, incarnation: int, address: str, release: str, limits: Limits) -> None:
        self.name = name
        self.incarnation = incarnation
        self.address = address
        self.release = release
        self.limits = limits
        self.now = 0.0
        self.handling: tuple[str, int] | None = None  # the room that is being handled, should that raise
        self.out: list[Action] = []
        self.timers = Timers()
        self.pages = PageLedger()
        self.engine = Engine()
        self.revision = 1
        self.workers: dict[int, Worker] = {}
        self.by_engine_id: dict[str, Worker] = {}
        self.peers: dict[str, Peer] = {}
        self.sends: dict[tuple[str, int], SendRoom] = {}
        self.recvs: dict[tuple[str, int], RecvRoom] = {}
        self.homing: dict[int, Room] = {}  # ended rooms whose pages are still touched by a job, by serial
        self.parked: dict[tuple[str, int], Parked] = {}
        self.parked_by: dict[str, int] = {}  # how many of them, by peer
        self.tombstones: dict[RoomKey, Tombstone] = {}
        self.jobs: dict[int, JobRecord] = {}
        self.send_queue: deque[tuple[SendRoom, Plan]] = deque()
        self.grant_queue: deque[RecvRoom] = deque()
        self.engine_counters: dict[str, float] = {}
        self.fatal_agents: dict[str, int] = {}  # how often our engine died while it was adding this one
        self.next_job = 0
        self.next_serial = 0
        self.draining = False
        self.down = False

    # smallest helpers ----------------------------------------------------------------------------------------------

    def emit(self, action: Action) -> None:
        self.out.append(action)

    def to_worker(self, worker: Worker, frame: SidecarFrame) -> None:
        if not worker.gone:
            self.out.append(ToWorker(worker.id, frame))

    def to_peer(self, node: str, message: Message) -> None:
        peer = self.peers.get(node)
        if peer is not None:
            self.out.append(ToPeer(node, peer.incarnation, message))

    def to_engine(self, job: EngineJob) -> None:
        assert self.engine.up, f"{type(job).__name__} without an engine"
        self.out.append(ToEngine(job))

    def refuse(self, origin: str, who: str, code: str, detail: str) -> None:
        self.out.append(Refuse(origin, who, code, detail))

    def job(self, record: JobRecord) -> int:
        self.next_job += 1
        self.jobs[self.next_job] = record
        self.timers.set(("job", self.next_job), self.now + self.limits.transfer_deadline)
        return self.next_job

    def serial(self) -> int:
        self.next_serial += 1
        return self.next_serial

    def expect(self) -> None:
        """Tell the engine how many receive slots may be written into, whenever that begins or ends."""
        if not self.engine.up:
            return
        counts = self.engine.recv.counts()
        expected = counts.get(SlotState.GRANTED, 0) + counts.get(SlotState.QUARANTINED, 0)
        if (expected > 0) != (self.engine.expect > 0):
            self.to_engine(Expect(expected))
        self.engine.expect = expected

    def park(self, key: tuple[str, int], parked: Parked) -> None:
        """Keep a want until its room is opened, or its time is over."""
        self.parked[key] = parked
        self.parked_by[parked.peer] = self.parked_by.get(parked.peer, 0) + 1
        self.timers.set(("parked", key), self.now + self.limits.want_timeout)

    def unpark(self, key: tuple[str, int]) -> Parked | None:
        parked = self.parked.pop(key, None)
        if parked is not None:
            self.timers.clear(("parked", key))
            self.parked_by[parked.peer] -= 1
            if not self.parked_by[parked.peer]:
                del self.parked_by[parked.peer]
        return parked

    def again(self, room: Room) -> None:
        """Set the room's next repetition, later each time."""
        room.retry = min(room.retry * 2 or self.limits.retry_first, self.limits.retry_most)
        self.timers.set(("retry", room.key, room.serial), self.now + room.retry)
