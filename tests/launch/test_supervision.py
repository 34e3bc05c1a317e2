"""Which workers of an asynchronous run are started again, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.launch import processes as launch_supervision
from realhf.launch.processes import MAX_ERRORS, MAX_QUICK_DEATHS, QUICK_S, Supervisor
from realhf.scheduler.base import WorkerExit, WorkerSpec


class FakeClock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(launch_supervision, "time", clock)
    return clock


def spec(name: str) -> WorkerSpec:
    return WorkerSpec(name, "module", (), Path("log"))


def end(name: str, code: int = -9) -> WorkerExit:
    return WorkerExit(name, code, Path("log"))


def supervisor(*names: str) -> Supervisor:
    made = Supervisor()
    for name in names:
        made.started(spec(name))
    return made


def test_only_workers_that_hold_nothing_have_successors(clock: FakeClock) -> None:
    names = ("rollout_worker/1", "generation/0", "env/0", "model_worker/0", "master", "trajectory/0")
    watch = supervisor(*names)
    clock.now = 2 * QUICK_S
    again = [name for name in names if watch.successor(end(name)) == spec(name)]
    assert again == ["rollout_worker/1", "generation/0", "env/0"]
    assert watch.successor(end("rollout_worker/7")) is None, "a stranger"
    assert watch.restarts == {"rollout_worker": 1, "generation": 1, "env": 1}


def test_one_that_is_killed_now_and_then_is_started_for_ever(clock: FakeClock) -> None:
    watch = supervisor("generation/0")
    for _ in range(50):
        clock.now += QUICK_S
        assert watch.successor(end("generation/0")) is not None
        watch.started(spec("generation/0"))


def test_one_that_dies_at_once_again_and_again_is_not(clock: FakeClock) -> None:
    watch = supervisor("generation/0", "generation/1")
    for _ in range(MAX_QUICK_DEATHS):
        clock.now += QUICK_S / 2
        assert watch.successor(end("generation/0")) is not None
        watch.started(spec("generation/0"))
    clock.now += QUICK_S / 2
    assert watch.successor(end("generation/0")) is None
    assert watch.successor(end("generation/1")) is not None, "each is counted for itself"


def test_one_that_fails_by_itself_may_do_so_a_few_times(clock: FakeClock) -> None:
    watch = supervisor("rollout_worker/0")
    for _ in range(MAX_ERRORS):
        clock.now += 2 * QUICK_S
        assert watch.successor(end("rollout_worker/0", 1)) is not None
        watch.started(spec("rollout_worker/0"))
    clock.now += 2 * QUICK_S
    assert watch.successor(end("rollout_worker/0")) is not None, "being killed is no error"
    watch.started(spec("rollout_worker/0"))
    clock.now += 2 * QUICK_S
    assert watch.successor(end("rollout_worker/0", 1)) is None


def test_one_that_is_given_up_ends_the_run_only_when_no_other_of_its_kind_is_left(clock: FakeClock) -> None:
    watch = supervisor("generation/0", "generation/1", "env/0", "model_worker/0", "model_worker/1")
    for _ in range(MAX_QUICK_DEATHS):
        assert watch.successor(end("generation/0")) is not None
        watch.started(spec("generation/0"))
    assert watch.successor(end("generation/0")) is None and watch.dispensable("generation/0")
    assert watch.successor(end("env/0")) is not None and not watch.dispensable("env/0")
    assert watch.successor(end("model_worker/0")) is None and not watch.dispensable("model_worker/0")
    for _ in range(MAX_QUICK_DEATHS):
        assert watch.successor(end("generation/1")) is not None
        watch.started(spec("generation/1"))
    assert watch.successor(end("generation/1")) is None and not watch.dispensable("generation/1")
