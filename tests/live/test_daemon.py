"""The daemon as a process: start, readiness, faults of its parts, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecars import ROOT, Sidecar, until

from pdxfer.client import Client, Ended, Event, Rejected
from pdxfer.pools import PoolLayout, SharedPool

Make = Callable[..., Sidecar]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Sidecar] = []

    def sidecar(name: str = "p", **keys: object) -> Sidecar:
        made.append(Sidecar(tmp_path, name, **keys))  # type: ignore[arg-type]
        return made[-1]

    yield sidecar
    for one in made:
        one.end()


def alive(pid: int) -> bool:
    """Zombies are dead: an orphan's may wait a while for init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# start and end -------------------------------------------------------------------------------------------------------


def test_it_serves_and_sigterm_ends_it_with_0(make: Make) -> None:
    p = make().start()
    assert p.ask("GET", "/livez")[0] == 200
    status = p.status()
    assert status["node"] == "p"
    assert status["engine"]["up"]
    assert {s["phase"] for s in status["services"].values()} == {"serving"}
    assert p.metric("pdxfer_ready") == 1
    assert p.metric('pdxfer_slots{kind="send",state="free"}') > 0
    engine = status["engine"]["pid"]
    p.signal(signal.SIGTERM)
    assert p.wait() == 0
    assert not alive(engine)
    assert "Traceback" not in p.said()
    left = {path.name for path in p.runtime.iterdir()}
    assert not left & {"admin.json", "engine.pid", "worker.sock"}


def test_a_second_sidecar_on_the_same_runtime_directory_is_refused(make: Make) -> None:
    p = make().start()
    second = make().start(wait=False)
    assert second.wait() == 75
    assert f"in use by another sidecar (node p, pid {p.pid})" in second.said()
    assert p.ready()


def test_a_taken_admin_port_is_named(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        p = make(admin__port=taken.getsockname()[1]).start(wait=False)
        assert p.wait() == 75
    assert "admin cannot listen on 127.0.0.1:" in p.said()
    assert "Traceback" not in p.said()


LIMIT = "import resource as r; r.setrlimit(r.RLIMIT_{}, ({}, {}))"


@pytest.mark.parametrize(
    ("limit", "most", "code", "words"),
    [
        ("NOFILE", 20, 2, "open files: expected a limit of at least 64, found 20"),
        ("FSIZE", 0, 2, "File too large: the process may not write files of that size (ulimit -f"),
    ],
)
def test_a_limit_that_is_too_low_is_named(make: Make, limit: str, most: int, code: int, words: str) -> None:
    p = make(log__level="info")  # its log is a file, which FSIZE would forbid: a pipe
    said = subprocess.run(
        [sys.executable, "-c", f"{LIMIT.format(limit, most, most)}\nfrom pdxfer.cli import main\nmain()", "serve",
         *(f"--{key.replace('.', '-').replace('_', '-')}={value}" for key, value in p.keys.items())],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert said.returncode == code, said.stderr
    assert words in said.stderr
    assert len([line for line in said.stderr.splitlines() if "CRITICAL" in line]) == 1
    assert "Traceback" not in said.stderr


NO_THREAD = """
import threading
real = threading.Thread.start
def start(self):
    if {part!r} in self.name:
        raise RuntimeError("can't start new thread")
    real(self)
threading.Thread.start = start
"""


@pytest.mark.parametrize("part", ["asyncio", "bootstrap", "admin"])
def test_a_host_without_a_thread_is_named_and_exits_with_75(make: Make, part: str) -> None:
    p = make(prelude=NO_THREAD.format(part=part), log__level="info").start(wait=False)
    assert p.wait() == 75
    assert "cannot start: no thread can be started: allow more threads" in p.said()
    assert "Traceback" not in p.said()


def test_an_engine_is_replaced_though_the_runtime_directory_cannot_be_written(make: Make) -> None:
    """As on a full disk: nothing of a running sidecar needs it."""
    p = make(
        prelude="""
import errno, os
real = os.replace
def replace(a, b):
    if os.path.exists(os.path.dirname(a) + "/full"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(a, b)
os.replace = replace
"""
    ).start()
    (p.runtime / "full").touch()
    for _ in range(2):
        before = p.status()["engine"]
        os.kill(before["pid"], signal.SIGKILL)
        until(lambda: p.status()["engine"]["incarnation"] > before["incarnation"], 20, "a new engine")  # noqa: B023
    p.wait_ready()
    assert p.said().count("incarnation cannot be written (No space left on device)") == 1
    assert "the restart failed" not in p.said()
    p.signal(signal.SIGTERM)
    assert p.wait() == 0


@pytest.mark.parametrize(("module", "advice"), [("nixl", "pdxfer[engine]"), ("zmq", "pyzmq")])
def test_a_missing_dependency_is_named_and_exits_with_69(make: Make, module: str, advice: str) -> None:
    gone = ["nixl", "nixl_cu12", "nixl_cu13"] if module == "nixl" else [module]
    p = make(prelude=f"import sys; sys.modules.update(dict.fromkeys({gone!r}))").start(wait=False)
    assert p.wait() == 69
    assert (
        f"the Python module {module!r} is not installed" in p.said()
        or f"needs the Python module {module!r}" in p.said()
    )
    assert advice in p.said()
    assert "Traceback" not in p.said()


def test_a_full_disk_at_the_first_key_is_a_shortage_that_passes(make: Make) -> None:
    prelude = """
import errno, os
def full(fd):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.fsync = full
"""
    p = make(prelude=prelude).start(wait=False)
    assert p.wait() == 75
    assert "bootstrap.key_file" in p.said() and "No space left on device" in p.said()
    assert "Traceback" not in p.said()


def test_one_of_nixls_packages_is_enough(make: Make) -> None:
    p = make(prelude="import sys; sys.modules['nixl'] = None").start()
    p.signal(signal.SIGTERM)
    assert p.wait() == 0


def test_an_engine_that_cannot_start_ends_the_daemon_at_once(make: Make) -> None:
    p = make(engine_tls="no_such_transport").start(wait=False)
    assert p.wait() == 70
    assert "NIXL did not start" in p.said() and "check engine.tls" in p.said()
    assert p.said().count("the engine is gone") == 1 and "Traceback" not in p.said()


# faults of its parts -------------------------------------------------------------------------------------------------


def test_a_killed_engine_is_back_with_a_new_incarnation(make: Make) -> None:
    p = make().start()
    before = p.status()["engine"]
    os.kill(before["pid"], signal.SIGKILL)
    began = time.monotonic()
    until(lambda: p.status()["engine"]["incarnation"] not in (0, before["incarnation"]), 10, "a new engine")
    assert time.monotonic() - began < 5  # the contract says 3 s; a busy machine gets a little more
    assert p.status()["engine"]["incarnation"] > before["incarnation"]
    assert p.ready()
    assert p.metric('pdxfer_restarts_total{service="engine"}') == 1
    assert "killed by SIGKILL" in p.status()["services"]["engine"]["last_cause"]


def test_a_stopped_engine_is_replaced_after_the_stall_deadline(make: Make) -> None:
    p = make(limits__stall_deadline=2.0).start()
    before = p.engine_pid
    os.kill(before, signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: p.engine_pid not in (0, before), 15, "a new engine")
    assert 1.5 < time.monotonic() - began < 8
    assert not alive(before)
    assert "no progress" in p.status()["services"]["engine"]["last_cause"]


def test_an_engine_that_keeps_dying_ends_the_daemon_with_70(make: Make) -> None:
    p = make(supervisor__restart_budget=1).start()
    for _ in range(2):
        until(lambda: p.ready(), 10, "ready")
        os.kill(p.engine_pid, signal.SIGKILL)
        time.sleep(0.3)
        if p.process is not None and p.process.poll() is not None:
            break
    assert p.wait() == 70
    assert "expected at most supervisor.restart_budget = 1" in p.said()


@pytest.mark.parametrize(("fault", "within"), [("exception", 1.0), ("loop", 6.0)])
def test_the_bootstrap_thread_is_restarted_in_place(make: Make, fault: str, within: float) -> None:
    p = make(limits__stall_deadline=2.0).start()
    before = p.status()
    assert p.ask("POST", "/debug/bootstrap", {"inject": fault})[0] == 200
    began = time.monotonic()

    def restarted() -> bool:
        service = p.status()["services"]["bootstrap"]
        return bool(service["restarts"] == 1 and service["phase"] == "serving")

    until(restarted, 10, "bootstrap restarted")
    assert time.monotonic() - began < within
    after = p.status()
    assert after["incarnation"] == before["incarnation"]
    assert after["engine"]["pid"] == before["engine"]["pid"]
    assert p.ready()


def test_a_bootstrap_thread_that_hangs_in_native_code_ends_the_daemon_with_70(make: Make) -> None:
    p = make(limits__stall_deadline=2.0).start()
    engine = p.engine_pid
    assert p.ask("POST", "/debug/bootstrap", {"inject": "hang"})[0] == 200
    assert p.wait(20) == 70
    assert "hangs in native code" in p.said()
    assert not alive(engine)


def test_debug_hooks_are_off_unless_asked_for(make: Make) -> None:
    p = make(debug__hooks="false").start()
    status, answer = p.ask("POST", "/debug/bootstrap", {"inject": "exception"})
    assert status == 404
    assert "debug.hooks is false" in answer["error"]


def test_a_killed_parent_takes_its_engine_along_and_the_next_one_serves(make: Make) -> None:
    p = make().start()
    before = p.status()
    p.signal(signal.SIGKILL)
    p.wait()
    p.start()
    after = p.status()
    assert not alive(before["engine"]["pid"])
    assert after["incarnation"] > before["incarnation"]


def test_a_stopped_engine_of_a_killed_parent_does_not_keep_the_next_one_from_serving(make: Make) -> None:
    p = make().start()
    engine = p.engine_pid
    os.kill(engine, signal.SIGSTOP)
    p.signal(signal.SIGKILL)
    p.wait()
    p.start()
    assert not alive(engine)


def test_a_stopped_parent_is_not_alive_for_probes_and_recovers(make: Make) -> None:
    p = make(limits__stall_deadline=2.0).start()
    before = p.engine_pid
    p.signal(signal.SIGSTOP)
    time.sleep(4)
    p.signal(signal.SIGCONT)
    until(p.ready, 5, "ready again")
    time.sleep(1)
    assert p.engine_pid == before  # its engine was healthy all the time and was not taken for hung


# workers and shutdown ------------------------------------------------------------------------------------------------


@pytest.fixture
def attach() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def client(p: Sidecar, engine_id: str = "prefill-0") -> Client:
        pool = SharedPool.allocate(PoolLayout("kv", "uint8", (16, 64), 16, planes=2), 8)
        made.append(Client(p.socket, engine_id=engine_id, role="prefill", pools=[pool]))
        return made[-1]

    yield client
    for one in made:
        one.close()


def wait_for(c: Client, kind: type[Event], timeout: float = 10.0) -> Any:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for event in c.poll(0.1):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} within {timeout} s")


def test_rooms_that_outlive_the_drain_time_end_as_shutdown(make: Make, attach: Callable[..., Client]) -> None:
    p = make(supervisor__drain_timeout=0.5).start()
    c = attach(p)
    c.open("r1")
    until(lambda: c.poll(0.05) or p.metric('pdxfer_rooms{side="send",state="open"}') == 1, 5, "the room is open")
    assert p.status()["workers"][0]["engine_id"] == "prefill-0"
    p.signal(signal.SIGTERM)
    until(lambda: p.ask("GET", "/readyz")[0] == 503, 5, "not ready while draining")
    end = wait_for(c, Ended).end
    assert (end.reason, end.state, end.retriable) == ("shutdown", "ABORTED", True)
    assert p.wait() == 0


def test_a_drain_ends_with_the_last_room_and_takes_no_new_one(make: Make, attach: Callable[..., Client]) -> None:
    p = make(supervisor__drain_timeout=60).start()
    c = attach(p)
    first = c.open("r1")
    until(lambda: c.poll(0.05) or p.metric('pdxfer_rooms{side="send",state="open"}') == 1, 5, "the room is open")
    p.signal(signal.SIGTERM)
    until(lambda: p.status()["draining"], 5, "draining")
    c.open("r2")
    assert wait_for(c, Rejected).code == "draining"
    first.abort("enough")
    assert wait_for(c, Ended).end.reason == "aborted"
    began = time.monotonic()
    assert p.wait() == 0
    assert time.monotonic() - began < 5


def test_a_second_sigterm_does_not_wait(make: Make, attach: Callable[..., Client]) -> None:
    p = make(supervisor__drain_timeout=60).start()
    c = attach(p)
    c.open("r1")
    until(lambda: c.poll(0.05) or p.metric('pdxfer_rooms{side="send",state="open"}') == 1, 5, "the room is open")
    p.signal(signal.SIGTERM)
    until(lambda: p.status()["draining"], 5, "draining")
    p.signal(signal.SIGTERM)
    assert p.wait(10) == 0
    assert wait_for(c, Ended).end.reason == "shutdown"


def test_an_operator_aborts_a_room(make: Make, attach: Callable[..., Client]) -> None:
    p = make().start()
    c = attach(p)
    c.open("r1", epoch=3)
    until(lambda: c.poll(0.05) or p.ask("GET", "/rooms")[1], 5, "the room is open")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PDXFER_NODE_RUNTIME_DIR": str(p.runtime)}

    def pdxfer(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdxfer", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert [(r["room"], r["epoch"], r["side"]) for r in json.loads(pdxfer("rooms", "--json").stdout)] == [
        ("r1", 3, "send")
    ]
    assert "r1" in pdxfer("rooms").stdout
    assert "prefill-0" in pdxfer("status").stdout
    wrong = pdxfer("abort", "r1")
    assert (wrong.returncode, "no live room 'r1' with epoch 0" in wrong.stderr) == (1, True)
    assert pdxfer("abort", "r1", "--epoch", "3", "--detail", "by hand").returncode == 0
    end = wait_for(c, Ended).end
    assert end.reason == "operator_abort"
    assert "by hand" in end.detail
    assert pdxfer("status", "--check").stdout == "ready\n"


def test_a_sigterm_during_the_start_ends_it_in_order(make: Make) -> None:
    p = make().start(wait=False)
    until(lambda: (p.runtime / "admin.json").exists(), 15, "it is starting")
    p.signal(signal.SIGTERM)
    assert p.wait() == 0
    assert "Traceback" not in p.said()


def test_a_stopped_engine_does_not_hold_up_a_shutdown(make: Make) -> None:
    p = make(supervisor__close_timeout=1.0).start()
    engine = p.engine_pid
    os.kill(engine, signal.SIGSTOP)
    p.signal(signal.SIGTERM)
    assert p.wait(10) == 0
    assert not alive(engine)


def test_json_logs_are_one_object_a_line(make: Make) -> None:
    p = make(log__json="true").start()
    p.signal(signal.SIGTERM)
    assert p.wait() == 0
    lines = [json.loads(line) for line in p.said().splitlines() if line.startswith("{")]
    assert {"time", "level", "logger", "node", "message"} <= lines[0].keys()
    assert lines[-1]["message"] == "stopped"


# SIGHUP --------------------------------------------------------------------------------------------------------------


def test_sighup_changes_what_can_change_and_names_the_rest(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "pdxfer.toml"
    file.write_text("[limits]\nopen_timeout = 60\n[engine]\nsend_slots = 4\n")
    p = make()
    p.config = file
    p.start()
    file.write_text("[limits]\nopen_timeout = 5\n[engine]\nsend_slots = 8\n")
    p.signal(signal.SIGHUP)
    until(
        lambda: "SIGHUP: changed: limits.open_timeout; needs a restart: engine.send_slots" in p.said(), 5, "the report"
    )
    file.write_text("[limits]\nopen_timeout = 0\n")
    p.signal(signal.SIGHUP)
    until(lambda: "nothing changes: limits.open_timeout is 0" in p.said(), 5, "the refusal")
    assert p.ready()
