"""Requests for samples get their turn in the order in which they came, and no turn is lost."""

from __future__ import annotations

import asyncio

import pytest

from realhf.dataflow.rollouts.sample_queue import PendingRequests

LONG_S = 60.0


async def waiting(pending: PendingRequests, *workers: str) -> list[asyncio.Task[bool]]:
    """Requests of these workers, in this order."""
    tasks = [asyncio.create_task(pending.turn(worker, LONG_S)) for worker in workers]
    await asyncio.sleep(0)
    return tasks


async def settled(tasks: list[asyncio.Task[bool]]) -> list[bool]:
    """Which of them have ended by now."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_only_so_many_are_woken_and_the_first_first() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "c", "a")
    pending.wake(0)
    assert await settled(tasks) == [False] * 4
    pending.wake(2)
    assert await settled(tasks) == [True, True, False, False]
    assert len(pending) == 2
    pending.wake()
    assert await asyncio.gather(*tasks) == [True] * 4
    assert len(pending) == 0


async def test_one_that_waits_no_longer_costs_nobody_a_turn() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "c")
    tasks[0].cancel()
    await settled(tasks)
    pending.wake(1)
    assert await settled(tasks) == [True, True, False]
    tasks += await waiting(pending, "d")
    pending.wake(1)  # c has its turn, and is cancelled before it can use it
    tasks[2].cancel()
    assert await settled(tasks) == [True] * 4
    assert tasks[3].result()
    with pytest.raises(asyncio.CancelledError):
        tasks[2].result()


async def test_a_wait_is_bounded() -> None:
    pending = PendingRequests()
    assert not await pending.turn("a", 0.0)
    assert not await pending.turn("a", 0.001)
    assert len(pending) == 0


async def test_all_requests_of_a_worker_end_together() -> None:
    pending = PendingRequests()
    tasks = await waiting(pending, "a", "b", "a")
    pending.wake_worker("a")
    pending.wake_worker("nobody")
    assert await settled(tasks) == [True, False, True]
    pending.wake(1)
    assert await tasks[1]
