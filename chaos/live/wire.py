"""Faults on sockets: garbage, connections that say nothing, truncated handshakes, and peers that answer nothing.

Owns: what strangers and peers gone mad can send. Must not: judge. Each counts what the sidecar has refused, as its proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
import zmq
import zmq.asyncio

from pdxfer.core import messages, worker
from pdxfer.core.geometry import PoolSpec
from pdxfer.demo.faults import NotInjected
from pdxfer.demo.observe import counter, why
from pdxfer.demo.processes import until
from pdxfer.pools import PoolLayout

from .control import Ask
from .faults import PROOF, Base
from .verdict import Row
from .world import DEAD, DECODE, World

CLOSED_WITHIN = 10.0  # seconds for a connection that says nothing


def tcp_of(endpoint: str) -> tuple[str, int]:
    where = urlsplit(endpoint)
    return where.hostname or "", where.port or 0


async def refused(world: World, node: str, origin: str) -> int:
    """How many frames the sidecar has refused. Raises NotInjected."""
    try:
        found = counter(await world.observers[node].metrics(node), "pdxfer_frames_refused", "origin", "reason")
    except httpx.HTTPError as error:
        raise NotInjected(f"sidecar {node}: /metrics: {why(error)}") from error
    return sum(found.get(origin, {}).values())


class Peer:
    """A DEALER to a sidecar's bootstrap port, under a key that it accepts."""

    def __init__(self, world: World, node: str, key: str) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 100_000
        self.socket.curve_serverkey = world.keys[node].public.encode()
        self.socket.curve_publickey = world.keys[key].public.encode()
        self.socket.curve_secretkey = world.keys[key].secret.encode()
        self.socket.connect(world.endpoint(node))

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Flood(Base):
    """Shared by floods: the count of refusals before and after."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node
        self.sent = 0
        self.connections = 0
        self._before = {"peer": 0, "worker": 0}
        self._random = random.Random(7)

    async def prepare(self, world: World) -> None:
        self.world = world
        self._before = {origin: await refused(world, self.node, origin) for origin in ("peer", "worker")}
        self._exits = len(world.manager[f"sidecar {self.node}"].exits)
        self._said = len(world.log_of(f"sidecar {self.node}"))

    def _ended(self) -> bool:
        """It, or its thread, has died of what was sent: then it counts from nothing again, and its end is the proof."""
        name = f"sidecar {self.node}"
        exits = self.world.manager[name].exits[self._exits :]
        return bool(exits) or "the bootstrap thread died" in self.world.log_of(name)[self._said :]

    async def _prove(self, origin: str, least: int) -> str:
        async def missing() -> str:
            grown = await refused(self.world, self.node, origin) - self._before[origin]
            return (
                ""
                if grown >= least
                else f"sidecar {self.node} has refused {grown} of {origin}s, expected at least {least}"
            )

        if left := await until(missing, PROOF):
            raise NotInjected(left)
        grown = await refused(self.world, self.node, origin) - self._before[origin]
        return f"sidecar {self.node} has refused {grown} frames of {origin}s ({self.sent} sent, {self.connections} connections)"

    async def _raw(self, all_of: Iterable[tuple[tuple[str, int] | str, bytes]]) -> None:
        """For each: one connection, these bytes, and the end. In a thread: the samplers must go on."""

        def send() -> None:
            for address, data in all_of:
                family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                with socket.socket(family, socket.SOCK_STREAM) as s:
                    s.settimeout(2.0)
                    with contextlib.suppress(OSError):  # closing on us in the middle is its right
                        s.connect(address)
                        self.connections += 1
                        s.sendall(data)

        await asyncio.to_thread(send)


class Garbage(_Flood):
    """Random bytes, and frames that are nearly right, to the bootstrap port: from strangers and from an authorised peer."""

    def __init__(self, node: str, frames: int = 2000, connections: int = 300) -> None:
        super().__init__(node)
        self._frames, self._raws = frames, connections

    async def strike(self) -> None:
        world = self.world
        peer = Peer(world, self.node, "stranger")
        try:
            await self._shake_hands(peer)
            good = messages.encode(messages.Envelope(1, "stranger", 1, self.node, 0, (messages.Heartbeat(1, 1),)))
            for number in range(self._frames):
                if number % 2:
                    frame = self._random.randbytes(self._random.randint(1, 400))
                else:  # nearly right is worse than random
                    at = self._random.randrange(len(good))
                    frame = good[:at] + self._random.randbytes(self._random.randint(1, 3)) + good[at + 1 :]
                await peer.socket.send(frame)
                self.sent += 1
                if number % 50 == 0:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
        finally:
            peer.close()
        address = tcp_of(world.endpoint(self.node))
        await self._raw([(address, self._random.randbytes(self._random.randint(1, 2000))) for _ in range(self._raws)])

    async def _shake_hands(self, peer: Peer) -> None:
        monitor = peer.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if not await monitor.poll(5000):
            raise NotInjected(f"no CURVE handshake with sidecar {self.node}")
        peer.socket.disable_monitor()

    async def prove(self) -> str:
        if self._ended():
            return f"garbage ended what it was sent to ({self.sent} frames sent, {self.connections} connections)"
        return await self._prove("peer", self._frames // 4)


class WorkerGarbage(_Flood):
    """Random bytes to the worker socket, and frames of the right length that hold random bytes."""

    def __init__(self, node: str, connections: int = 600) -> None:
        super().__init__(node)
        self._raws = connections

    async def strike(self) -> None:
        path = str(self.world.directory / f"{self.node}.sock")
        todo = []
        for number in range(self._raws):
            body = self._random.randbytes(self._random.randint(1, 2000))
            todo.append((path, len(body).to_bytes(4, "little") + body if number % 2 else body))
        await self._raw(todo)
        self.sent = self._raws

    async def prove(self) -> str:
        """Where it raises instead of being refused, that is in the log."""
        if "a defect in the main loop" in self.world.log_of(f"sidecar {self.node}")[self._said :]:
            return f"garbage raised in the main loop of sidecar {self.node} ({self.connections} connections)"
        return await self._prove("worker", self._raws // 2)


class HalfOpen(Base):
    """Connections that say nothing, on the bootstrap port and on the worker socket, held until the sidecar closes them."""

    def __init__(self, node: str, count: int = 1000) -> None:
        super().__init__()
        self.node = node
        self.count = count
        self._open: dict[socket.socket, float] = {}
        self._made = [0, 0]

    async def strike(self) -> None:
        path = str(self.world.directory / f"{self.node}.sock")
        addresses: tuple[tuple[str, int] | str, ...] = (tcp_of(self.world.endpoint(self.node)), path)
        for kind, address in enumerate(addresses):
            for _ in range(self.count):
                s = socket.socket(socket.AF_UNIX if kind else socket.AF_INET, socket.SOCK_STREAM)
                s.setblocking(False)
                await self._connect(s, address, self._made[kind])
                self._open[s] = time.monotonic()
                self._made[kind] += 1
                if self._made[kind] % 20 == 0:
                    await asyncio.sleep(0.005)
        self._row = Row(
            f"connections that say nothing are closed ({2 * self.count})", f"{CLOSED_WITHIN:g} s", CLOSED_WITHIN
        )
        end = time.monotonic() + CLOSED_WITHIN + 2.0
        while self._open and time.monotonic() < end:
            for s in list(self._open):
                try:
                    closed = not s.recv(65536)
                except BlockingIOError:
                    continue
                except OSError:
                    closed = True
                if closed:
                    self._row.values.append(time.monotonic() - self._open.pop(s))
                    s.close()
            await asyncio.sleep(0.05)
        self._row.values += [time.monotonic() - since for since in self._open.values()]
        self.rows.append(self._row)

    async def _connect(self, s: socket.socket, address: tuple[str, int] | str, number: int) -> None:
        """A backlog that is full is waited for."""
        end = time.monotonic() + PROOF
        while True:
            error = s.connect_ex(address)
            if error in (0, errno.EINPROGRESS, errno.EISCONN):
                return
            if error != errno.EAGAIN or time.monotonic() > end:
                s.close()
                raise NotInjected(f"connection {number} to {address}: {os.strerror(error)}")
            await asyncio.sleep(0.01)

    async def prove(self) -> str:
        return f"{self._made[0]} connections to the bootstrap port and {self._made[1]} to the worker socket were made and said nothing"

    async def cease(self) -> None:
        for s in self._open:
            s.close()
        self._open.clear()


class Truncated(_Flood):
    """A recorded handshake, cut off at each of its bytes: the TCP stream, the frame in it, and a worker's attach frame."""

    async def strike(self) -> None:
        world = self.world
        stream, frame = await self._record()
        await self._raw((tcp_of(world.endpoint(self.node)), stream[:length]) for length in range(1, len(stream)))
        attach = self._attach()
        path = str(world.directory / f"{self.node}.sock")
        await self._raw((path, attach[:length]) for length in range(1, len(attach)))
        peer = Peer(world, self.node, DEAD[0])
        try:
            for length in range(len(frame)):
                await peer.socket.send(frame[:length])
                self.sent += 1
                if length % 50 == 0:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
        finally:
            peer.close()
        self._frame = len(frame)
        self._what = f"{len(stream)} bytes of a TCP stream, {len(frame)} of its frame, {len(attach)} of an attach"

    async def prove(self) -> str:
        if self._ended():
            return f"a truncated frame ended what it was sent to ({self._what})"
        return f"{self._what}, each cut off at every byte: " + await self._prove("peer", self._frame // 2)

    async def _record(self) -> tuple[bytes, bytes]:
        """What a sidecar really sends to a peer that it does not know yet: through a relay to a ROUTER of our own."""
        world = self.world
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = world.keys[DEAD[0]].secret.encode()
        port = router.bind_to_random_port("tcp://127.0.0.1")
        taken = bytearray()
        tasks: set[asyncio.Task[None]] = set()

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    if keep:
                        taken.extend(data)
                    writer.write(data)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner = await asyncio.open_connection("127.0.0.1", port)
            tasks.add(asyncio.create_task(pipe(reader, inner, True)))
            tasks.add(asyncio.create_task(pipe(inner_reader, writer, False)))

        host, at = tcp_of(world.endpoint(DEAD[0]))
        server = await asyncio.start_server(relay, host, at)
        try:
            line = await world.line(DECODE)
            waiting = line.start(
                Ask("receive", room=f"record-{time.monotonic_ns()}", tokens=16, source=f"dead-{DEAD[0]}")
            )
            if not await router.poll(5000):
                raise NotInjected("no sidecar has said Hello to the recorder")
            frame = (await router.recv_multipart())[-1]
            await waiting
            return bytes(taken), frame
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            context.destroy(linger=0)

    @staticmethod
    def _attach() -> bytes:
        spec: PoolSpec = PoolLayout("kv", "uint8", (4096,), page_tokens=16, planes=2).spec()
        at = tuple(worker.PlaneAt(0, plane * 16 * 4096, 4096) for plane in range(2))
        return worker.encode(
            worker.Attach(
                1,
                worker.WORKER_PROTOCOL,
                "truncated",
                "both",
                os.getpid(),
                (worker.PoolAt(spec, 16, at),),
                (2 * 16 * 4096,),
            )
        )


class DeadPeers(Base):
    """Four peers that take connections and never answer, asked for beside the live one."""

    def __init__(self, each: int = 5) -> None:
        super().__init__()
        self._each = each
        self._listeners: list[socket.socket] = []
        self._asked = 0

    async def strike(self) -> None:
        for dead in DEAD:
            s = socket.create_server(tcp_of(self.world.endpoint(dead)), backlog=64)
            self._listeners.append(s)
        line = await self.world.line(DECODE)
        asks = []
        for dead in DEAD:
            for number in range(self._each):
                room = f"{dead}-{number}-{time.monotonic_ns()}"
                asks.append(line.ask(Ask("receive", room=room, tokens=16, source=f"dead-{dead}")))
        self._asked = len(asks)
        ends = await asyncio.wait_for(asyncio.gather(*asks), 90.0)
        row = Row("rooms of dead peers end", "6 s (limits.connect_timeout + 1 s)", 6.0)
        row.values = [end["ended"] - end["opened"] for end in ends]
        wrong = {end["reason"] for end in ends} - {"peer_unreachable", "peer_lost"}
        row.note = f"as {', '.join(sorted({end['reason'] for end in ends}))}"
        spread = Row(
            "dead peers are given up together: last minus first", "1 s", 1.0, [max(row.values) - min(row.values)]
        )
        named = Row("rooms of dead peers that end under another name", "0", 0.0, [float(len(wrong))], unit="reasons")
        self.rows += [row, spread, named]

    async def prove(self) -> str:
        reached = 0
        for listener in self._listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                reached += 1
        if not reached:
            raise NotInjected(f"none of {len(DEAD)} dead peers was connected to")
        return f"{reached} of {len(DEAD)} dead peers were connected to, and answered nothing to {self._asked} rooms"

    async def cease(self) -> None:
        for listener in self._listeners:
            listener.close()
