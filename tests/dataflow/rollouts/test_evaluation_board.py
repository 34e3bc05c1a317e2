"""Shares of an evaluation: who gets them, what comes back, and what a failure or a death means."""

from __future__ import annotations

import asyncio

import pytest

from realhf.api.calls import EvaluatedRequest, EvaluationPart
from realhf.api.evaluation import EpisodeResult
from realhf.dataflow.rollouts.held_out import LATE_S, MAX_ATTEMPTS, EvaluationBoard, EvaluationFailed

A, B = "rollout_worker/0:1", "rollout_worker/1:2"


def shares(count: int, deadline_s: float = 60.0) -> list[EvaluationPart]:
    return [
        EvaluationPart(0, part, count, greedy, 3, ["generation/0"], "heldout", 2, 9, deadline_s)
        for greedy in (False, True)
        for part in range(count)
    ]


def answer(part: EvaluationPart, *, success: bool = True, error: str = "") -> EvaluatedRequest:
    results = [EpisodeResult(f"part {part.part}", True, success, 1.0, 2)]
    return EvaluatedRequest(part.evaluation, part.part, part.greedy, [] if error else results, error)


async def begun(board: EvaluationBoard, parts: list[EvaluationPart]) -> asyncio.Task[dict[bool, list[EpisodeResult]]]:
    playing = asyncio.create_task(board.play(parts))
    await asyncio.sleep(0)
    return playing


async def test_all_shares_come_together_in_their_order_whatever_the_order_of_the_answers() -> None:
    board = EvaluationBoard(8)
    playing = await begun(board, shares(3))
    taken = board.take(A, 4, alone=False) + board.take(B, 9, alone=False)
    assert len(taken) == 6 and not board.waiting
    for part in reversed(taken):
        owner = A if taken.index(part) < 4 else B
        board.evaluated(owner, answer(part, success=part.greedy))
    results = await asyncio.wait_for(playing, 60)
    assert [result.group for result in results[False]] == ["part 0", "part 1", "part 2"]
    assert [result.achieved for result in results[True]] == [True] * 3
    assert board.take(A, 9, alone=True) == []


async def test_samples_keep_their_share_of_the_players_while_there_are_samples() -> None:
    board = EvaluationBoard(2)
    playing = await begun(board, shares(4))
    assert len(board.take(A, 8, alone=False)) == 2 and board.take(B, 8, alone=False) == []
    assert len(board.take(B, 8, alone=True)) == 6
    playing.cancel()


async def test_what_a_dead_worker_had_is_played_by_another_and_its_own_answer_comes_too_late() -> None:
    board = EvaluationBoard(8)
    playing = await begun(board, shares(1))
    lost = board.take(A, 8, alone=True)
    board.worker_left(A, "killed by SIGKILL")
    again = board.take(B, 8, alone=True)
    assert again == lost
    board.evaluated(A, answer(lost[0]))
    assert not playing.done()
    for part in again:
        board.evaluated(B, answer(part))
        board.evaluated(B, answer(part))
    assert set(await asyncio.wait_for(playing, 60)) == {False, True}


async def test_a_share_that_nobody_can_play_ends_the_evaluation_with_the_reason() -> None:
    board = EvaluationBoard(8)
    playing = await begun(board, shares(1))
    for _ in range(MAX_ATTEMPTS):
        (part,) = [part for part in board.take(A, 8, alone=True) if not part.greedy] or [None]
        assert part is not None
        board.evaluated(A, answer(part, error="no engine"))
    with pytest.raises(EvaluationFailed, match="no engine"):
        await asyncio.wait_for(playing, 60)
    assert board.take(A, 8, alone=True) == [] and not board.waiting
    assert set(await asyncio.wait_for(_played(board), 60)) == {False, True}, "the next one is played"


async def _played(board: EvaluationBoard) -> dict[bool, list[EpisodeResult]]:
    playing = await begun(board, shares(1))
    for part in board.take(B, 8, alone=True):
        board.evaluated(B, answer(part))
    return await playing


async def test_a_share_without_an_answer_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    board = EvaluationBoard(8)
    playing = await begun(board, shares(1, deadline_s=-LATE_S - 1))
    first = board.take(A, 8, alone=True)
    board.expire()
    assert sorted(part.greedy for part in board.take(B, 8, alone=True)) == sorted(part.greedy for part in first)
    playing.cancel()


async def test_an_evaluation_of_nothing_is_over_at_once() -> None:
    assert await asyncio.wait_for(EvaluationBoard(1).play([]), 60) == {}
