"""Reference slots with real processes: a play runs once for all who wait, whatever happens to the
simulator."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf.aws.cli.executor import SimulatorLost
from realhf.aws.episode import world
from realhf.aws.episode.episode import Episode, EpisodeError
from realhf.aws.simulator.slot import ReferenceSlots, Slot
from realhf.aws.tasks.loader import instantiate
from tests.process_family import until

pytestmark = pytest.mark.sim
_UNUSED_SEED = 77_001
"""No other test asks for this target."""


@pytest.fixture
def reference_slots(slot: Slot) -> ReferenceSlots:
    assert slot.reference_slots is not None
    return slot.reference_slots


def _kill(slot: Slot) -> None:
    os.kill(slot.ministack.pid, signal.SIGKILL)
    assert until(lambda: not slot.ministack.alive())


def test_a_play_whose_simulator_dies_in_the_middle_is_played_again(
    reference_slots: ReferenceSlots,
) -> None:
    """All sessions of a group wait for the same play: none of their episodes is lost with the
    simulator."""
    lives: list[int] = []

    def play(slot: Slot) -> int:
        lives.append(slot.ministack.pid)
        if len(lives) == 1:
            _kill(slot)
        slot.reset(1) if len(lives) > 1 else slot.ministack.reset(1)
        return slot.ministack.pid

    waiting = [reference_slots.begin("killed in the middle", play) for _ in range(8)]
    assert {one.result(30) for one in waiting} == {lives[1]} != {lives[0]}


def test_a_play_that_fails_in_a_simulator_that_works_is_not_played_again(
    reference_slots: ReferenceSlots,
) -> None:
    plays: list[int] = []

    def play(slot: Slot) -> None:
        plays.append(slot.ministack.pid)
        raise ValueError("a task that makes no sense")

    with pytest.raises(ValueError, match="makes no sense"):
        reference_slots.begin("fails", play).result(30)
    assert len(plays) == 1


def test_a_play_that_ends_its_simulator_each_time_is_given_up(
    reference_slots: ReferenceSlots,
) -> None:
    plays: list[int] = []

    def play(slot: Slot) -> None:
        plays.append(slot.ministack.pid)
        _kill(slot)
        slot.ministack.reset(1)

    with pytest.raises(OSError, match=r"No such process|reset"):
        reference_slots.begin("fatal", play).result(30)
    assert len(plays) == 2
    assert reference_slots.begin("the next", lambda slot: slot.reset(0)).result(30) is None


def test_reference_slots_that_do_not_start_report_it_and_start_again_for_the_next(
    reference_slots: ReferenceSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does_not_come_up(timeout_s: float) -> None:
        raise RuntimeError("MiniStack did not come up")

    reference_slots.begin("it runs", lambda slot: None).result(30)
    ministack = reference_slots._slot.ministack
    reference_slots._started = False
    ministack.stop()
    monkeypatch.setattr(ministack, "wait_healthy", does_not_come_up)
    with pytest.raises(SimulatorLost, match="own plays: MiniStack did not come up"):
        reference_slots.begin("first", lambda slot: None).result(30)
    assert not ministack.alive()
    monkeypatch.undo()
    assert reference_slots.begin("first", lambda slot: slot.ministack.alive()).result(30)


def test_thirty_instances_asked_for_at_once_all_get_their_targets(
    slot: Slot, reference_slots: ReferenceSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the queue is: each waits as long as it moves, and no longer where it stands
    still."""
    monkeypatch.setattr(world, "WAIT_S", 1.5)
    for number in range(4):
        reference_slots.begin(f"ahead {number}", lambda own: time.sleep(0.6))
    tasks = [instantiate(101, seed) for seed in range(_UNUSED_SEED, _UNUSED_SEED + 30)]
    waits = [world.begin_targets(slot, task, task.seed) for task in tasks]
    with ThreadPoolExecutor(30) as threads:
        ends = [
            list(found[0].target.end.resources) for found in threads.map(lambda wait: wait(), waits)
        ]
    assert len({("s3", "buckets", task.params["name"]) for task in tasks}) > 20
    assert all(
        ("s3", "buckets", task.params["name"]) in end for task, end in zip(tasks, ends, strict=True)
    )
    reference_slots.begin("stands still", lambda own: time.sleep(2))
    stuck = world.begin_targets(slot, instantiate(101, _UNUSED_SEED + 31), _UNUSED_SEED + 31)
    monkeypatch.setattr(world, "WAIT_S", 0.2)
    with pytest.raises(world.TargetError, match="was not ready"):
        stuck()


@pytest.mark.parametrize(
    "error", [ValueError("a fault of the grader"), RuntimeError("no thread"), TimeoutError()]
)
def test_whatever_keeps_a_target_from_being_made_ends_the_episode_as_no_episode(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is not graded as if the agent had done nothing, and what it did counts for nothing."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(world, "make_targets", fails)
    episode = Episode(slot)
    task = instantiate(204, 0, "train")
    episode.reset(task, seed=_UNUSED_SEED)
    with pytest.raises(EpisodeError, match=f"task 204: {type(error).__name__}"):
        episode.step(task.solution[0])
