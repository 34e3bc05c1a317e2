"""Whose doing it is that a step has no ordinary end, with real simulators that are killed, stopped
and unreadable."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.episode.episode import Blame, Episode, SimulatorWatch
from realhf.aws.grading.grader import Grade
from realhf.aws.grading.snapshot import SnapshotError
from realhf.aws.grading.tracker import Evidence
from realhf.aws.messages import command_turn
from realhf.aws.simulator.ministack_process import MiniStackProcess
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate

pytestmark = pytest.mark.sim

VERSIONED = 201


def signalled(slot: Slot, number: signal.Signals) -> None:
    """Send the simulator a signal; a stop is waited for."""
    os.kill(slot.ministack.pid, number)
    deadline = time.monotonic() + 10
    while number == signal.SIGSTOP and not slot.ministack.is_stopped():
        assert time.monotonic() < deadline


def patient_for(slot: Slot, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a command have so many seconds."""
    monkeypatch.setattr(slot.executor, "_limits", replace(slot.executor._limits, timeout_s=seconds))


def test_a_simulator_that_dies_between_commands_is_the_environments(
    episode: Episode, slot: Slot
) -> None:
    episode.reset(instantiate(VERSIONED, 1))
    # its threads need milliseconds to end; the next command comes sooner
    signalled(slot, signal.SIGKILL)
    with pytest.raises(SimulatorLost) as caught:
        episode.step("aws s3 ls")
    assert not caught.value.by_command and not episode.done


@pytest.mark.nightly
@pytest.mark.parametrize("told", [True, False], ids=["stopped by a signal", "kept from running"])
def test_a_simulator_that_freezes_between_commands_is_the_environments(
    episode: Episode, slot: Slot, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """It used to end the episode as the agent's doing. A freezer of a container shows in no state
    of the process: without a word about the signal, it is seen in the CPU time that does not
    move."""
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    first, second = task.solution
    episode.step(first)
    patient_for(slot, monkeypatch, 0.5)
    signalled(slot, signal.SIGSTOP)
    if not told:
        monkeypatch.setattr(MiniStackProcess, "is_stopped", lambda simulator: False)
        monkeypatch.setattr(
            MiniStackProcess,
            "healthy",
            lambda simulator, timeout_s=0.5: simulator.answers(timeout_s),
        )
    with pytest.raises(SimulatorLost):
        episode.step(second)
    assert not episode.done
    monkeypatch.undo()
    episode.reset(task)
    assert [episode.step(command).done for command in (first, second)] == [False, True]


def test_a_simulator_that_worked_on_a_command_and_hangs_is_the_agents(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is known that hangs MiniStack, so it works on one and is stopped then, without a
    word about it."""
    watch = SimulatorWatch(slot)
    slot.state.call("s3", "ListBuckets", {})
    signalled(slot, signal.SIGSTOP)
    lost = SimulatorLost("simulator lost", by_command=True)
    assert watch.blame(lost) is Blame.ENVIRONMENT, "it was stopped from outside, whenever that was"
    monkeypatch.setattr(MiniStackProcess, "is_stopped", lambda simulator: False)
    assert (
        watch.blame(lost) is Blame.AGENT and SimulatorWatch(slot).blame(lost) is Blame.ENVIRONMENT
    )
    assert watch.blame(lost, begun=False) is Blame.ENVIRONMENT
    signalled(slot, signal.SIGCONT)


def test_a_simulator_that_dies_of_a_command_before_it_is_graded_is_the_agents(
    episode: Episode, slot: Slot
) -> None:
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    grader = episode._grader
    assert grader is not None
    evaluate = grader.evaluate

    def after_its_death(added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        signalled(slot, signal.SIGKILL)
        return evaluate(added, lost=lost)

    grader.evaluate = after_its_death
    step = episode.step(task.solution[0])
    assert step.done and step.reward == 0.0 and step.observation["simulator_lost"]
    assert command_turn(step.observation, step.reward, step.done).metrics["simulator_lost"] == 1.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StateCallError("InternalError", "no"), "service"),
        (SnapshotError("status 507"), "answer"),
        (ConnectionError("no answer to this one"), "silence"),
        (KeyError("a field"), "grader"),
        (RecursionError(), "grader"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_account_that_cannot_be_read_is_not_achieved_and_counted(
    episode: Episode, slot: Slot, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    """It used to void the episode, or to end it as if the simulator were lost. What cannot be read
    is graded after the next command, even one that only looks."""
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    first, second = task.solution
    rewards = [episode.step(first).reward]
    grader = episode._grader
    assert grader is not None

    def failing(*arguments: object) -> None:
        slot.state.call("s3", "ListBuckets", {})
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(grader, "_judge", failing)
        step = episode.step(second)
    assert (
        not step.done
        and not step.observation["task_achieved"]
        and step.observation["command_success"]
    )
    assert (
        step.observation["account_unreadable"] == kind
        and step.observation["partial_progress"] == 0.5
    )
    assert (
        command_turn(step.observation, step.reward, step.done).metrics["account_unreadable"] == 1.0
    )
    last = episode.step("aws s3api list-buckets")
    assert (
        last.done
        and last.observation["task_achieved"]
        and sum([*rewards, step.reward, last.reward]) == 1.0
    )


def test_a_real_account_that_does_not_answer_is_the_environments() -> None:
    class Real:
        """Stands for a slot of a real account, which tests have none of."""

        simulated = False

    watch = SimulatorWatch(Real())  # type: ignore[arg-type]
    for error in (
        ConnectionError("no route"),
        StateCallError("Throttling", "slow down"),
        UnreadableAnswer("large"),
    ):
        assert watch.blame(error) is Blame.ENVIRONMENT
    assert watch.blame(KeyError("a field")) is Blame.UNREADABLE
