"""The short way: both workers hang on this node, one copy moves pool to pool, and NIXL is not used (R2).

Owns: rooms whose two sides are here. Must not: use slots or messages to peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ends import Ends
from .geometry import cut, without
from .jobs import Copy, rows_of
from .state import JobRecord, Plan, RecvRoom, SendRoom, State
from .worker import Matched

if TYPE_CHECKING:
    from .receiver import Receiver
    from .sender import Sender


class Local:
    """Set ``sender`` and ``receiver`` after construction: the three know each other."""

    sender: Sender
    receiver: Receiver

    def __init__(self, state: State, ends: Ends) -> None:
        self.state = state
        self.ends = ends

    def match(self, send: SendRoom, receive: RecvRoom) -> None:
        st = self.state
        if send.peer or send.local is not None:
            self.ends.end(receive, "protocol_error", f"the room is matched with {send.peer or 'another worker'!r}")
            return
        send.local, receive.local = receive, send
        receive.state = RecvRoom.RECEIVING
        receive.progress = st.now
        who = f"decode worker {receive.worker.engine_id!r}"
        if self.sender.matched(send, receive.worker.specs, receive.wanted, receive.held, who) and receive.live:
            st.to_worker(receive.worker, Matched(receive.room, receive.epoch, False))
            self.receiver.arm(receive)

    def pump(self, send: SendRoom) -> None:
        """Cut what was pushed and keep a few copies under way."""
        st = self.state
        receive = send.local
        assert isinstance(receive, RecvRoom)
        chunk = max([st.limits.local_chunk, *(s.page_bytes for s in send.worker.specs)])
        for push in send.pushes:
            if push.uncut:
                for pieces, size in cut(send.worker.specs, without(push.uncut, send.held), chunk):
                    plan = Plan(len(send.plans), pieces, size, push)
                    push.left += 1
                    send.plans.append(plan)
                    send.copying.append(plan)
                    send.state = SendRoom.SENDING
                push.uncut = []
                if not push.left and not push.home:  # the receiver holds all of it
                    self.ends.push_home(send, push, told=True)
        while st.engine.up and send.copying and len(send.jobs) < st.limits.room_window:
            plan = send.copying.popleft()
            problem = None
            for piece in plan.pieces:
                problem = problem or receive.coverage.take_checked(piece)
            assert problem is None, problem  # the send's own coverage and counts were checked
            id = st.job(JobRecord("copy", send, receive, plan=plan))
            send.jobs.add(id)
            receive.jobs.add(id)
            st.to_engine(
                Copy(
                    id, plan.bytes, send.worker.id, self.sender.rows(plan),
                    receive.worker.id, rows_of(plan.pieces, list(receive.raw)),
                )
            )  # fmt: skip
        if send.finished is not None and not send.copying and not send.jobs and not any(p.uncut for p in send.pushes):
            receive.aux, receive.bytes = send.finished, send.bytes
            self.ends.end(receive, "done", "")
            self.ends.end(send, "done", "")

    def copied(self, id: int, error: str) -> None:
        st = self.state
        record = st.jobs.pop(id)
        send, receive, plan = record.room, record.partner, record.plan
        assert isinstance(send, SendRoom) and isinstance(receive, RecvRoom) and plan is not None
        st.timers.clear(("job", id))
        send.jobs.discard(id)
        receive.jobs.discard(id)
        plan.push.left -= 1
        if not send.live or not receive.live:
            self.ends.settle(send)
            self.ends.settle(receive)
            return
        if error:
            self.ends.end(send, "copy_error", f"copy {plan.index}: {error}")
            return
        send.bytes += plan.bytes
        receive.bytes += plan.bytes
        send.progress = receive.progress = st.now
        if not plan.push.left and not plan.push.uncut and not plan.push.home:
            self.ends.push_home(send, plan.push, told=True)
        self.pump(send)
        self.sender.arm(send)
