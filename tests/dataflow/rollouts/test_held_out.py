"""Evaluations beside training, in the master's own rollout code: which weights they are of, and
what holds them up. Shares of an evaluation: who gets them, what comes back, and what a failure or a
death means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from realhf.api.calls import EvaluatedRequest, EvaluationPart
from realhf.api.evaluation import EpisodeResult
from realhf.api.experiment import EvaluationSpec, HeldOutOptions
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts
from realhf.dataflow.rollouts.control import RolloutsFailed
from realhf.dataflow.rollouts.held_out import ATTEMPTS
from realhf.dataflow.rollouts.rollout_state import (
    EVALUATION_GRACE_S,
    MAX_SHARE_ATTEMPTS,
    EvaluationFailed,
    EvaluationQueue,
)
from tests.dataflow.rollouts.test_async_rollouts import W0, Scene, breathe

WANTED = EvaluationSpec("actor", "x", {}, HeldOutOptions("heldout", 2, 1, 10).to_args())
Report = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    await made.rollouts.close()


async def shares_of(rollouts: AsyncRollouts, *, lost: tuple[int, ...] = ()) -> list[EvaluationPart]:
    """Play until the evaluation is over; shares of the versions ``lost`` cannot be played."""
    played = []
    async with asyncio.timeout(60):
        while rollouts.is_evaluating:
            _, parts = await rollouts.control.allocate(W0, 8, 0.0)
            for part in parts:
                error = "the generation worker died" if part.version in lost else ""
                results = [] if error else [EpisodeResult("easy", True, part.greedy, 1.0, 1)]
                request = EvaluatedRequest(part.evaluation, part.part, part.greedy, results, error)
                rollouts.control.record_evaluation(W0, request)
            played += [part for part in parts if part.version not in lost]
            await breathe()
    return played


async def test_training_goes_on_and_the_report_says_whose_weights_they_were(scene: Scene) -> None:
    rollouts = await scene.open()
    reports = list[Report]()
    await rollouts.start()
    await breathe()
    assert await rollouts.evaluate(0, WANTED, reports.append) and rollouts.is_evaluating
    await asyncio.wait_for(rollouts.publish(1), 60)
    await breathe()
    assert rollouts.control.staleness.version == 1, "the next version does not wait"
    played = await shares_of(rollouts)
    await asyncio.wait_for(rollouts.wait_for_evaluation(), 60)
    assert {(part.version, tuple(part.engines)) for part in played} == {(0, ("generation/0",))}
    assert {part.episodes_per_task for part in played if part.greedy} == {1}
    (report,) = reports
    assert (
        report["sampled"]["overall"]["version"] == 0 and report["greedy"]["easy"]["success"] == 1.0
    )
    handlers = [handler for _, handler, _ in scene.workers.calls]
    assert (
        handlers.index("pin_weights") < handlers.index("unpin_weights")
        and not rollouts.is_evaluating
    )


async def test_where_no_second_engine_can_be_the_next_version_waits(scene: Scene) -> None:
    scene.workers.keeps = False
    rollouts = await scene.open()
    reports = list[Report]()
    await rollouts.start()
    await breathe()
    await rollouts.evaluate(0, WANTED, reports.append)
    publishing = asyncio.create_task(rollouts.publish(1))
    await breathe()
    assert not publishing.done() and rollouts.control.staleness.version == 0
    await shares_of(rollouts)
    await asyncio.wait_for(publishing, 60)
    await breathe()
    assert len(reports) == 1 and rollouts.control.staleness.version == 1


async def test_the_next_evaluation_waits_for_the_one_in_play(scene: Scene) -> None:
    rollouts = await scene.open()
    reports = list[Report]()
    await rollouts.start()
    await breathe()
    await rollouts.evaluate(0, WANTED, reports.append)
    second = asyncio.create_task(rollouts.evaluate(1, WANTED, reports.append))
    await breathe()
    assert not second.done()
    await shares_of(rollouts)
    await asyncio.wait_for(second, 60)
    await shares_of(rollouts)
    await asyncio.wait_for(rollouts.wait_for_evaluation(), 60)
    assert len(reports) == 2


async def test_weights_that_are_lost_are_replaced_by_those_of_now_and_at_last_it_is_given_up(
    scene: Scene,
) -> None:
    rollouts = await scene.open()
    reports = list[Report]()
    warned = list[str]()
    rollouts._held_out._warn = warned.append
    await rollouts.start()
    await breathe()
    await rollouts.evaluate(0, WANTED, reports.append)
    await rollouts.publish(1)
    await breathe()
    played = await shares_of(rollouts, lost=(0,))
    await asyncio.wait_for(rollouts.wait_for_evaluation(), 60)
    assert {part.version for part in played} == {1} and reports[0]["greedy"]["overall"][
        "version"
    ] == 1
    assert "before training failed with the weights of version 0" in warned[0]

    await rollouts.evaluate(1, WANTED, reports.append)
    await shares_of(rollouts, lost=(1,))
    await asyncio.wait_for(rollouts.wait_for_evaluation(), 60)
    assert len(reports) == 1 and f"given up after {ATTEMPTS} attempts" in warned[-1]


async def test_an_evaluation_does_not_outlive_what_ends_the_run(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    await breathe()
    await rollouts.evaluate(0, WANTED, lambda report: None)
    rollouts.control.fail(RolloutsFailed("the disk is full"))
    with pytest.raises(RolloutsFailed, match="the disk is full"):
        await asyncio.wait_for(rollouts.wait_for_evaluation(), 60)


@pytest.mark.parametrize("what", ["publish", "evaluate"])
async def test_what_waits_for_an_evaluation_does_not_outlive_what_ends_the_run(
    scene: Scene, what: str
) -> None:
    """The step loop hung in it for ever, since nobody plays the shares that are left."""
    scene.workers.keeps = False
    rollouts = await scene.open()
    await rollouts.start()
    await breathe()
    await rollouts.evaluate(0, WANTED, lambda report: None)
    after = (
        rollouts.publish(1)
        if what == "publish"
        else rollouts.evaluate(1, WANTED, lambda report: None)
    )
    waiting = asyncio.create_task(after)
    await breathe()
    assert not waiting.done()
    rollouts.control.fail(RolloutsFailed("the disk is full"))
    done, _ = await asyncio.wait([waiting], timeout=5)
    assert done, "it waits for what nobody plays"
    with pytest.raises(RolloutsFailed, match="the disk is full"):
        await waiting


async def test_an_evaluation_by_another_interface_is_the_trainers(scene: Scene) -> None:
    rollouts = await scene.open()
    other = EvaluationSpec("actor", "perplexity", {}, {})
    assert not await rollouts.evaluate(0, other, lambda report: None) and not rollouts.is_evaluating


A = "rollout_worker/0:1"
B = "rollout_worker/1:2"


def shares(count: int, deadline_s: float = 60.0) -> list[EvaluationPart]:
    return [
        EvaluationPart(0, part, count, greedy, 3, ["generation/0"], "heldout", 2, 9, deadline_s)
        for greedy in (False, True)
        for part in range(count)
    ]


def answer(part: EvaluationPart, *, success: bool = True, error: str = "") -> EvaluatedRequest:
    results = [EpisodeResult(f"part {part.part}", True, success, 1.0, 2)]
    return EvaluatedRequest(
        part.evaluation, part.part, part.greedy, [] if error else results, error
    )


async def begun(
    queue: EvaluationQueue, parts: list[EvaluationPart]
) -> asyncio.Task[dict[bool, list[EpisodeResult]]]:
    playing = asyncio.create_task(queue.play(parts))
    await asyncio.sleep(0)
    return playing


async def test_all_shares_come_together_in_their_order_whatever_the_order_of_the_answers() -> None:
    queue = EvaluationQueue(8)
    playing = await begun(queue, shares(3))
    taken = queue.take(A, 4, alone=False) + queue.take(B, 9, alone=False)
    assert len(taken) == 6 and not queue.has_waiting
    for part in reversed(taken):
        owner = A if taken.index(part) < 4 else B
        queue.record(owner, answer(part, success=part.greedy))
    results = await asyncio.wait_for(playing, 60)
    assert [result.group for result in results[False]] == ["part 0", "part 1", "part 2"]
    assert [result.achieved for result in results[True]] == [True] * 3
    assert queue.take(A, 9, alone=True) == []


async def test_samples_keep_their_share_of_the_players_while_there_are_samples() -> None:
    queue = EvaluationQueue(2)
    playing = await begun(queue, shares(4))
    assert len(queue.take(A, 8, alone=False)) == 2 and queue.take(B, 8, alone=False) == []
    assert len(queue.take(B, 8, alone=True)) == 6
    playing.cancel()


async def test_what_a_dead_worker_had_is_played_by_another_and_its_own_answer_comes_too_late() -> (
    None
):
    queue = EvaluationQueue(8)
    playing = await begun(queue, shares(1))
    lost = queue.take(A, 8, alone=True)
    queue.worker_left(A, "killed by SIGKILL")
    again = queue.take(B, 8, alone=True)
    assert again == lost
    queue.record(A, answer(lost[0]))
    assert not playing.done()
    for part in again:
        queue.record(B, answer(part))
        queue.record(B, answer(part))
    assert set(await asyncio.wait_for(playing, 60)) == {False, True}


async def test_a_share_that_nobody_can_play_ends_the_evaluation_with_the_reason() -> None:
    queue = EvaluationQueue(8)
    playing = await begun(queue, shares(1))
    for _ in range(MAX_SHARE_ATTEMPTS):
        (part,) = [part for part in queue.take(A, 8, alone=True) if not part.greedy] or [None]
        assert part is not None
        queue.record(A, answer(part, error="no engine"))
    with pytest.raises(EvaluationFailed, match="no engine"):
        await asyncio.wait_for(playing, 60)
    assert queue.take(A, 8, alone=True) == [] and not queue.has_waiting
    assert set(await asyncio.wait_for(_played(queue), 60)) == {False, True}, (
        "the next one is played"
    )


async def _played(queue: EvaluationQueue) -> dict[bool, list[EpisodeResult]]:
    playing = await begun(queue, shares(1))
    for part in queue.take(B, 8, alone=True):
        queue.record(B, answer(part))
    return await playing


async def test_a_share_without_an_answer_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = EvaluationQueue(8)
    playing = await begun(queue, shares(1, deadline_s=-EVALUATION_GRACE_S - 1))
    first = queue.take(A, 8, alone=True)
    queue.expire()
    assert sorted(part.greedy for part in queue.take(B, 8, alone=True)) == sorted(
        part.greedy for part in first
    )
    playing.cancel()


async def test_an_evaluation_of_nothing_is_over_at_once() -> None:
    assert await asyncio.wait_for(EvaluationQueue(1).play([]), 60) == {}
