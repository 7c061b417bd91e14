"""Rounds of the demo against a fake system whose faults are known: what must fail a round does fail it.

The agent is a real process; the sidecars, workers and the gateway are answers to HTTP requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from prometheus_client import generate_latest

from pdxfer.core.limits import Limits
from pdxfer.core.node import Node
from pdxfer.demo import checks
from pdxfer.demo.checks import Answer, Prompt
from pdxfer.demo.faults import KillEngine, KillWorker, NotInjected, RaiseInBootstrap
from pdxfer.demo.observe import Observer, baseline, everything, node_view
from pdxfer.demo.processes import Manager, Spec
from pdxfer.demo.report import Round
from pdxfer.demo.rounds import Pace, Rounds, settled
from pdxfer.demo.sessions import read_sessions
from pdxfer.metrics import Metrics

PACE = Pace(
    agent_life=1.0, load_deadline=5, terminal_deadline=0.5, agent_deadline=10, home_deadline=0.5, probe_timeout=2,
    probe_deadline=2,
)  # fmt: skip
PROMPT = Prompt("probe", "Say a and b.", "", 2)
KNOWN = Answer("ab", (97, 98), 12, None, "", "")

# Streams until it is killed; or, given ends, says how each session ended.
AGENT = """
import json, sys, time, urllib.request
base, ends = sys.argv[1], json.loads(sys.argv[2])
def say(n, event, **more):
    print(json.dumps({"session": n, "event": event, "at": time.monotonic()} | more), flush=True)
for n in range(4):
    say(n, "start")
    say(n, "tokens", count=1, room=str(n))
if not ends:
    time.sleep(60)
time.sleep(0.4)
for n, end in enumerate(ends):
    say(n, "end", end=end, reason="engine_lost" if end == "failed" else end,
        tokens=2, room=str(n), kv_identical=True, retriable=False, detail="")
"""


class Fake:
    """A system that is well, but for what a test spoils."""

    prefill_node, decode_node = "p", "d"
    model, gateway = "synthetic", "http://gateway.test"

    def __init__(self, tmp_path: Path) -> None:
        self.logs = tmp_path
        self.manager = Manager(tmp_path)
        self.observer = Observer(
            {"p": "http://p.test", "d": "http://d.test"},
            {"prefill-0": "http://prefill-0.test", "decode-0": "http://decode-0.test"},
            self.gateway,
        )
        self.observer.http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        self.nodes = {name: Node(name, 1, "tcp://x", "0", Limits()) for name in ("p", "d")}
        self.metrics = {name: Metrics(name, 1, "0", ("engine", "bootstrap")) for name in ("p", "d")}
        self.free = {"prefill-0": 100, "decode-0": 100}
        self.slots = 4
        self.active = self.expected = 0
        self.requests: Counter[str] = Counter()
        self.wrong = 0
        self.text = "ab"
        self.kv_identical = True
        self.ends: list[str] = []
        self.engine = {"pid": 0, "incarnation": 1}
        self.hooks = True
        self.load = True

    def agent(self, number: int, sessions: int, max_tokens: int) -> Spec:
        name = f"agent {number}"
        self.expected = sessions if self.load else 0
        if not self.load:
            return Spec(name, (sys.executable, "-c", "raise SystemExit(7)"), stdout=self.agent_output(name))
        return Spec(name, (sys.executable, "-c", AGENT, "", json.dumps(self.ends)), stdout=self.agent_output(name))

    def agent_output(self, name: str) -> Path:
        return self.logs / f"{name}.jsonl"

    def answer(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host.removesuffix(".test"), request.url.path
        if path == "/status":
            status = self.nodes[host].snapshot() | {"ready": True, "reasons": [], "services": {}}
            worker = {"p": "prefill-0", "d": "decode-0"}[host]
            status["workers"] = [{"engine_id": worker, "gone": False, "pages": {"home": 100}}]
            status["slots"] = {"send": {"free": self.slots}, "receive": {"free": 4}}
            status["engine"] = self.engine
            return httpx.Response(200, json=status)
        if path == "/metrics":
            return httpx.Response(200, content=generate_latest(self.metrics[host].registry))
        if path == "/debug/bootstrap":
            assert json.loads(request.content) == {"inject": "exception"} and not parse_qs(request.url.query.decode())
            if self.hooks:
                self.metrics[host].restarts.labels("bootstrap").inc()
            return httpx.Response(200, json={})
        if host == "gateway" and path == "/stats":
            agents = [r for r in self.manager.running.values() if r.spec.name.startswith("agent")]
            if self.expected and self.agent_output(agents[-1].spec.name).read_bytes().count(b"start") == self.expected:
                self.active, self.expected = self.expected, 0
            if self.active and agents and not agents[-1].pid:  # it was killed or has ended: its requests end
                self.requests["aborted"] += self.active
                self.active = 0
            return httpx.Response(200, json={"active": self.active, "aborting": 0, "requests": self.requests})
        if path == "/stats":
            stats = {
                "pages_free": self.free[host],
                "pages_total": 100,
                "rooms_open": 0,
                "wrong_bytes": self.wrong if self.requests else 0,
            }
            return httpx.Response(200, json=stats)
        assert path == "/v1/chat/completions"
        chunks: list[Any] = [
            {"choices": [{"delta": {"content": c}, "finish_reason": None}], "pdxfer": {"room": "r", "tokens": [ord(c)]}}
            for c in self.text
        ]
        chunks.append(
            {
                "choices": [{"delta": {}, "finish_reason": "length"}],
                "pdxfer": {"room": "r", "tokens": [], "kv_identical": self.kv_identical},
                "usage": {"prompt_tokens": 12},
            }
        )
        return httpx.Response(200, content="".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")


async def rounds_of(fake: Fake) -> Rounds:
    base = baseline(await settled(fake, 2))  # type: ignore[arg-type]
    return Rounds(fake, base, {PROMPT: KNOWN}, PACE, lambda text: None)  # type: ignore[arg-type]


def killed_agent(fake: Fake, spoil: dict[str, Any] | None = None) -> Round:
    async def run() -> Round:
        try:
            rounds = await rounds_of(fake)
            for name, value in (spoil or {}).items():
                setattr(fake, name, value)
            return await rounds.killed_agent(4)
        finally:
            await fake.manager.stop(2)

    return asyncio.run(run())


def test_a_killed_agent_that_leaves_nothing_passes(tmp_path: Path) -> None:
    item = killed_agent(Fake(tmp_path))
    assert item.passed, item.faults_found()
    assert (item.sessions, item.hit, item.aborted, item.done, item.failed) == (4, 4, 4, 0, 0)
    assert item.ends == {"aborted": 4} and "SIGKILL" in item.proof
    assert item.recovery_seconds is not None and item.service_seconds is not None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"slots": 3}, "2 slots did not come home"),
        ({"free": {"prefill-0": 100, "decode-0": 97}}, "3 pages did not come home"),
        ({"wrong": 64}, "128 bytes were delivered wrong"),
        ({"text": "ax"}, "token 1 is 120, expected 98"),
        ({"kv_identical": False}, "the cache's bytes differ"),
        ({"ends": ["done"] * 4}, "fault not injected: the agent had ended"),
        ({"load": False}, "the load did not begin within 5 s: the agent ended by exit code 7"),
    ],
)
def test_what_must_fail_a_round_does(tmp_path: Path, spoil: dict[str, Any], words: str) -> None:
    if "ends" in spoil:
        PACE_LONG = Pace(**{**PACE.__dict__, "agent_life": 5.0})

        async def run() -> Round:
            fake = Fake(tmp_path)
            rounds = await rounds_of(fake)
            rounds.pace, fake.ends = PACE_LONG, spoil["ends"]
            try:
                return await rounds.killed_agent(4)
            finally:
                await fake.manager.stop(2)

        item = asyncio.run(run())
    else:
        item = killed_agent(Fake(tmp_path), spoil)
    assert not item.passed
    assert any(words in problem for problem in item.faults_found()), item.faults_found()


def test_rooms_that_stay_are_unresolved(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    answer = fake.answer

    def stuck(request: httpx.Request) -> httpx.Response:
        response = answer(request)
        if request.url.path == "/status" and fake.requests:
            status = response.json()
            status["rooms_by_state"]["send"]["open"] = 3
            return httpx.Response(200, json=status)
        return response

    fake.observer.http = httpx.AsyncClient(transport=httpx.MockTransport(stuck))
    item = killed_agent(fake)
    assert item.unresolved == 4 and not item.passed  # 3 on each of two sidecars, of 4 sessions
    assert item.recovery_seconds is None


def under_load(fake: Fake, make: Any, ends: list[str]) -> Round:
    async def run() -> Round:
        try:
            rounds = await rounds_of(fake)
            fake.ends = ends
            return await rounds.under_load(make(fake), 4)
        finally:
            await fake.manager.stop(2)

    return asyncio.run(run())


def bootstrap(fake: Fake) -> RaiseInBootstrap:
    return RaiseInBootstrap(fake.observer, "p", "prefill side", fake.manager)


def test_an_exception_in_the_bootstrap_thread(tmp_path: Path) -> None:
    item = under_load(Fake(tmp_path), bootstrap, ["done"] * 4)
    assert item.passed, item.faults_found()
    assert item.done == 4 and item.hit == 4 and "0 became 1" in item.proof


def test_no_session_may_fail_by_it(tmp_path: Path) -> None:
    item = under_load(Fake(tmp_path), bootstrap, ["done", "done", "failed", "done"])
    assert item.failed == 1 and not item.passed
    assert item.ends == {"done": 3, "engine_lost": 1}


def test_a_session_without_an_end_is_unresolved(tmp_path: Path) -> None:
    item = under_load(Fake(tmp_path), bootstrap, ["done"] * 3)
    assert item.unresolved == 1 and not item.passed


def test_a_fault_without_proof_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.demo.faults.PROOF_DEADLINE", 0.3)
    fake = Fake(tmp_path)
    fake.hooks = False
    item = under_load(fake, bootstrap, ["done"] * 4)
    assert any("fault not injected" in problem for problem in item.faults_found())


def test_an_engine_is_killed_and_seen_again(tmp_path: Path) -> None:
    fake = Fake(tmp_path)

    async def run() -> None:
        engine = await fake.manager.start(Spec("engine", (sys.executable, "-c", "import time; time.sleep(60)")))
        fake.engine = {"pid": engine.pid, "incarnation": 1}
        fault = KillEngine(fake.observer, "p", "prefill side", fake.manager)
        await fault.prepare()
        await fault.strike()
        fake.engine = {"pid": 77, "incarnation": 2}
        assert "incarnation 1 became 2" in await fault.prove()
        with pytest.raises(NotInjected, match="not running any more"):
            await fault.strike()
        fake.engine = {"pid": 0, "incarnation": 0}
        with pytest.raises(NotInjected, match="shows no engine"):
            await fault.prepare()
        await fake.manager.stop(2)

    asyncio.run(run())


def test_a_worker_is_killed_and_comes_back(tmp_path: Path) -> None:
    fake = Fake(tmp_path)

    async def run() -> None:
        await fake.manager.start(
            Spec("decode worker", (sys.executable, "-c", "import time; time.sleep(60)"), restart=True)
        )
        fault = KillWorker(fake.manager, fake.observer, "decode worker", "decode-0")
        await fault.prepare()
        await fault.strike()
        assert "started again as pid" in await fault.prove()
        assert await fake.manager.stop(2) == []

    asyncio.run(run())


def test_the_real_core_has_the_shape_that_is_read() -> None:
    view = node_view(
        Node("p", 7, "tcp://x", "0", Limits()).snapshot()
        | {"ready": False, "reasons": ["engine: down"], "services": {"main": {"restarts": 0}}}
    )
    assert (view.node, view.incarnation, view.live, view.unready) == ("p", 7, 0, "engine: down")
    assert set(view.slots) == {"send", "receive"}


def test_a_torn_record_is_read_up_to_the_tear(tmp_path: Path) -> None:
    record = tmp_path / "a.jsonl"
    record.write_text(
        '{"session": 1, "event": "start", "at": 1.5}\n{"session": 1, "event": "tokens", "at": 2, "count": 8}\n{"sess'
    )
    (session,) = read_sessions(record)
    assert (session.began, session.tokens, session.end) == (1.5, 8, "")
    assert read_sessions(tmp_path / "none") == []


def test_parity_compares_tokens_cache_and_codes() -> None:
    questions = [PROMPT, Prompt("needle", "?", "7391", 2)]
    good = Answer("ab", (97, 98), 12, True, "r", "")
    needle = Answer("7391", (1, 2), 99, True, "r", "")
    assert checks.compare(questions, [good, needle], [good, needle], needles=True).passed
    for wrong, words in (
        (Answer("ab", (97, 99), 12, True, "r", ""), "token 1 is 99, expected 98"),
        (Answer("ab", (97,), 12, True, "r", ""), "1 tokens, expected 2"),
        (Answer("ab", (97, 98), 12, False, "r", ""), "bytes differ"),
        (Answer("ab", (97, 98), 12, None, "r", ""), "not compared"),
        (Answer("", (), 0, None, "", "HTTP 503"), "HTTP 503"),
    ):
        parity = checks.compare(questions, [wrong, needle], [good, needle], needles=True)
        assert not parity.passed and parity.identical == 1 and words in parity.problems[0]
    silent = Answer("no idea", (1, 2), 99, True, "r", "")
    assert (
        "7391 is not in the answer"
        in checks.compare(questions, [good, silent], [good, silent], needles=True).problems[0]
    )


def test_the_prompts_are_eight_and_hide_their_codes() -> None:
    questions = checks.prompts(seed=3, max_tokens=24)
    assert len(questions) == 8 and len({q.name for q in questions}) == 8
    assert [q.code for q in questions if q.code] == ["7391", "2846", "5013"]
    assert all(q.code in q.text for q in questions) and questions == checks.prompts(3, 24) != checks.prompts(4, 24)


def test_everything_is_what_would_be_free(tmp_path: Path) -> None:
    fake = Fake(tmp_path)

    async def run() -> None:
        seen = await fake.observer.look()
        assert seen.silent == {} and everything(seen).pages == {"prefill-0": 100, "decode-0": 100}
        assert everything(seen).slots == {"p send": 4, "p receive": 4, "d send": 4, "d receive": 4}
        await fake.observer.close()

    asyncio.run(run())
