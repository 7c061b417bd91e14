"""The supervisor: its pure policy, and the loop around it."""

from __future__ import annotations

import asyncio

import pytest

from pdxfer.settings import SupervisorSettings
from pdxfer.supervisor import GiveUp, Guard, OverBudget, Phase, RestartPolicy, Supervisor, Watch

S = SupervisorSettings(
    restart_budget=3, restart_window=10.0, backoff_first=0.5, backoff_most=2.0, check_interval=0.1, start_deadline=5.0
)


def test_first_restart_is_at_once_and_later_ones_wait_longer() -> None:
    policy = RestartPolicy("engine", S)
    assert [policy.died(t, "x") - t for t in (0.0, 1.0, 2.0)] == [0.0, 0.5, 1.0]


def test_backoff_has_an_upper_bound() -> None:
    policy = RestartPolicy("engine", SupervisorSettings(restart_budget=50, backoff_first=0.5, backoff_most=2.0))
    assert [policy.died(0.0, "x") for _ in range(40)][-1] == 2.0


def test_over_budget_names_service_count_key_and_last_cause() -> None:
    policy = RestartPolicy("engine", S)
    for t in range(3):
        policy.died(float(t), "x")
    with pytest.raises(OverBudget, match=r"engine: 4 failures within 10 s.*supervisor\.restart_budget = 3.*signal 9"):
        policy.died(3.0, "signal 9")


def test_the_next_look_is_when_a_silent_service_would_count_as_stalled() -> None:
    guard = Guard("bootstrap", S, 1.0)
    assert guard.decide(Phase.SERVING, 1, 0.0) == "" and guard.stalls_in is None
    for now in (0.3, 0.6, 0.9):
        assert guard.decide(Phase.SERVING, 1, now) == "" and guard.stalls_in == pytest.approx(1.001 - now)
    assert guard.decide(Phase.SERVING, 1, 0.9 + guard.stalls_in) == "kill"
    assert guard.stalls_in is None, "it is on its way out"
    assert guard.decide(Phase.SERVING, 2, 1.2) == "" and guard.stalls_in is None


def test_old_deaths_leave_the_window() -> None:
    policy = RestartPolicy("engine", S)
    for t in range(3):
        policy.died(float(t), "x")
    assert policy.died(13.0, "x") == 13.0  # all three are older than the window: at once again


def test_a_budget_of_zero_allows_no_restart() -> None:
    with pytest.raises(OverBudget):
        RestartPolicy("core", SupervisorSettings(core_error_budget=0), "core_error_budget").died(0.0, "x")


def test_watch_sums_silence_and_progress_ends_it() -> None:
    watch = Watch(1.0)
    assert watch.look(1, 0.0) == 0.0
    assert watch.look(1, 0.5) == 0.5
    assert watch.look(1, 1.0) == 1.0
    assert watch.look(2, 1.5) == 0.0


def test_watch_does_not_count_the_observers_own_silence() -> None:
    watch = Watch(1.0)
    watch.look(1, 0.0)
    assert watch.look(1, 1000.0) == 1.0  # the whole process was stopped


def drive(
    guard: Guard, phase: Phase, heartbeat: int, start: float, end: float, step: float = 0.1
) -> list[tuple[float, str]]:
    out = []
    now = start
    while now < end:
        decision = guard.decide(phase, heartbeat, now)
        if decision:
            out.append((round(now, 2), decision))
        now += step
    return out


def test_guard_kills_what_stalls_and_restarts_what_is_down() -> None:
    guard = Guard("engine", S, 2.0)
    assert guard.decide(Phase.SERVING, 1, 0.0) == ""
    kills = drive(guard, Phase.SERVING, 1, 0.1, 3.9)
    assert [k for _, k in kills] == ["kill"]
    assert 1.9 < kills[0][0] < 2.3
    assert "no progress for" in guard.why
    assert guard.decide(Phase.DOWN, 1, 4.0) == "restart"
    assert guard.restarts == 1
    assert "limits.stall_deadline" in guard.cause


def test_guard_kills_again_when_a_kill_does_not_help() -> None:
    guard = Guard("engine", S, 1.0)
    assert len(drive(guard, Phase.SERVING, 1, 0.0, 3.6)) == 3


def test_guard_gives_a_start_its_own_deadline() -> None:
    guard = Guard("engine", S, 1.0)
    kills = drive(guard, Phase.STARTING, 0, 0.0, 5.5)
    assert [k for _, k in kills] == ["kill"]
    assert kills[0][0] > 5.0
    assert "not ready" in guard.why


def test_guard_waits_for_the_backoff() -> None:
    guard = Guard("engine", S, 1.0)
    assert guard.decide(Phase.DOWN, 0, 0.0) == "restart"
    assert guard.decide(Phase.STARTING, 0, 0.1) == ""
    assert guard.decide(Phase.DOWN, 0, 0.2) == ""  # the second death: 0.5 s
    assert guard.due == pytest.approx(0.7)
    assert guard.decide(Phase.DOWN, 0, 0.6) == ""
    assert guard.decide(Phase.DOWN, 0, 0.71) == "restart"


class FakeService:
    name = "fake"

    def __init__(self) -> None:
        self.now = Phase.SERVING
        self.beats = 0
        self.moving = True
        self.kills: list[str] = []
        self.starts = 0
        self.raises = 0

    def phase(self) -> Phase:
        return self.now

    def heartbeat(self) -> int:
        self.beats += self.moving
        return self.beats

    def kill(self, why: str) -> None:
        self.kills.append(why)
        self.now = Phase.DOWN

    async def restart(self) -> None:
        self.starts += 1
        if self.raises:
            self.raises -= 1
            raise RuntimeError("no such device")
        self.now, self.moving = Phase.SERVING, True


def run_supervised(
    service: FakeService, scenario: object, settings: SupervisorSettings, stall: float = 0.3
) -> list[str]:
    given_up: list[str] = []

    async def main() -> None:
        supervisor = Supervisor([service], settings, stall, give_up=given_up.append)
        supervisor.start()
        await scenario(supervisor)  # type: ignore[operator]
        await supervisor.stop()

    asyncio.run(asyncio.wait_for(main(), 10))
    return given_up


FAST = SupervisorSettings(restart_budget=3, backoff_first=0.01, backoff_most=0.05, check_interval=0.05)


def test_loop_restarts_a_death_at_once() -> None:
    service = FakeService()

    async def scenario(supervisor: Supervisor) -> None:
        await asyncio.sleep(0.1)
        service.now = Phase.DOWN
        supervisor.died("fake", "it raised ValueError")
        await asyncio.sleep(0.03)  # less than a check interval: the death woke the loop
        assert service.starts == 1
        assert supervisor.guards["fake"].cause == "it raised ValueError"

    assert run_supervised(service, scenario, SupervisorSettings(check_interval=5.0)) == []


def test_loop_replaces_a_stalled_service() -> None:
    service = FakeService()

    async def scenario(supervisor: Supervisor) -> None:
        await asyncio.sleep(0.1)
        service.moving = False
        await asyncio.sleep(0.8)
        assert len(service.kills) == 1
        assert service.starts == 1

    assert run_supervised(service, scenario, FAST) == []


def test_loop_gives_up_over_budget_and_a_failed_restart_counts() -> None:
    service = FakeService()
    service.raises = 100

    async def scenario(supervisor: Supervisor) -> None:
        service.now = Phase.DOWN
        supervisor.died("fake", "x")
        await asyncio.sleep(0.6)

    (why,) = run_supervised(service, scenario, FAST)
    assert "RuntimeError: no such device" in why
    assert service.starts == 3


def test_a_defect_of_the_supervisor_itself_ends_the_daemon() -> None:
    service = FakeService()

    async def scenario(supervisor: Supervisor) -> None:
        service.phase = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        await asyncio.sleep(0.2)

    assert run_supervised(service, scenario, FAST) == ["supervisor: ZeroDivisionError: division by zero"]


def test_a_service_may_say_that_only_a_new_process_helps() -> None:
    service = FakeService()

    async def hopeless() -> None:
        raise GiveUp("it hangs in native code")

    async def scenario(supervisor: Supervisor) -> None:
        service.restart = hopeless  # type: ignore[method-assign]
        service.now = Phase.DOWN
        await asyncio.sleep(0.2)

    assert run_supervised(service, scenario, FAST) == ["it hangs in native code"]
