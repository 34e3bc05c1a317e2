"""Calls that block an event loop are named with their line; ones that wait are not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from realhf.env.check.calls import CALL, Block, LoopWatchdog, UserCode

HERE = Path(__file__).name


def watched(*callbacks) -> list[Block]:
    """What a watchdog saw while callbacks ran, one after another."""

    async def run() -> list[Block]:
        watchdog = LoopWatchdog(UserCode())
        watchdog.start()
        for callback in callbacks:
            await asyncio.create_task(callback(), name=f"{CALL}somewhere in {callback.__name__}")
            await asyncio.sleep(0.03)
        watchdog.stop()
        return watchdog.take()

    return asyncio.run(run())


async def sleeps() -> None:
    time.sleep(1.5)  # the thread that looks may get no processor for much of it


async def counts() -> None:
    end = time.thread_time() + 0.15
    while time.thread_time() < end:
        pass


async def holds_the_interpreter() -> None:
    _ = 3**1_200_000 % 1_000_003


async def waits() -> None:
    await asyncio.sleep(0.2)


async def goes_on_and_on() -> None:
    for _ in range(40):
        await asyncio.sleep(0)
        time.sleep(0.004)


def test_a_call_that_sleeps_is_named_with_its_line() -> None:
    [block] = watched(sleeps)
    line = sleeps.__code__.co_firstlineno + 1
    assert block.where.endswith(f"{HERE}:{line} in sleeps") and 0.1 < block.seconds < 15


def test_a_call_that_computes_is_named() -> None:
    [block] = watched(counts)
    assert " in counts" in block.where


def test_a_call_that_holds_the_interpreter_is_named() -> None:
    """No sample can be taken meanwhile, so its processor time and the name of its task say it."""
    began = time.thread_time()
    asyncio.run(holds_the_interpreter())
    assert time.thread_time() - began > 0.06, "the computation is too short to be seen"
    [block] = watched(holds_the_interpreter)
    assert " in holds_the_interpreter" in block.where


def test_waiting_and_many_short_calls_are_no_block() -> None:
    assert watched(waits, goes_on_and_on) == []
