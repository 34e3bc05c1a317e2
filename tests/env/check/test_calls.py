"""Calls of an environment end by their deadline; what fails, hangs or blocks the event loop is
named with its line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import EnvironmentFailure
from realhf.base.installation import PACKAGE
from realhf.env.check import calls
from realhf.env.check.calls import CALL, Block, Caller, CallFailed, LoopWatchdog, UserCode
from realhf.env.loader.validation import BrokenContract

HERE = Path(__file__).name


def failed(method: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> CallFailed:
    async def call() -> None:
        await Caller(UserCode(), timeout_s, lambda name, task: None).call("step", "t", method)

    with pytest.raises(CallFailed) as raised:
        asyncio.run(call())
    return raised.value


async def exits() -> None:
    sys.exit("enough")


async def cancels_itself() -> None:
    raise asyncio.CancelledError


async def has_no_capacity() -> None:
    raise EnvironmentFailure("capacity", "all sessions are taken")


async def is_refused_by_a_door() -> None:
    try:
        raise BrokenContract("the reward must be a finite number, not nan")
    except BrokenContract:
        raise EnvironmentFailure("internal", "Game.step: ...") from None


async def waits() -> None:
    await asyncio.Event().wait()


async def holds_on() -> None:
    """Until it is cancelled once more, with the loop."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (exits, "step raised SystemExit: enough"),
        (cancels_itself, "step raised CancelledError"),
        (has_no_capacity, "step raised EnvironmentFailure('capacity'): all sessions are taken"),
        (
            is_refused_by_a_door,
            "step breaks the contract: the reward must be a finite number, not nan",
        ),
    ],
)
def test_whatever_is_raised_is_a_sentence_with_a_line(
    method: Callable[[], Awaitable[Any]], what: str
) -> None:
    """Also what would end the interpreter or the event loop."""
    error = failed(method)
    assert (
        error.what == what and f"{HERE}:" in error.where and f" in {method.__name__}" in error.where
    )
    assert not error.hung and error.shape is (method is is_refused_by_a_door)


def test_a_call_that_waits_is_given_up_and_placed() -> None:
    error = failed(waits, 0.05)
    assert (
        error.hung
        and error.what == "step gave no answer within 0.05 s"
        and " in waits" in error.where
    )


def test_a_call_that_cannot_be_cancelled_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_CANCELLED_S", 0.05)
    error = failed(holds_on, 0.05)
    assert (
        error.what == "step gave no answer within 0.05 s and cannot be cancelled"
        and " in holds_on" in error.where
    )


CODE = UserCode()


def test_the_environments_of_the_package_are_a_persons_code_and_the_rest_is_not() -> None:
    assert CODE.owns(__file__)
    assert CODE.owns(str(PACKAGE / "environments" / "sql" / "database.py"))
    assert not CODE.owns(str(PACKAGE / "env" / "loader" / "load.py"))
    assert not CODE.owns(json.__file__) and not CODE.owns("<frozen importlib>")


def test_a_folder_of_ones_own_counts_also_below_a_foreign_one() -> None:
    folder = Path(json.__file__).parent
    assert UserCode([folder]).owns(json.__file__)


def wrong() -> None:
    json.loads("{")


def test_an_exception_of_a_library_is_placed_where_it_was_called() -> None:
    """Also when somebody wrapped it."""
    try:
        try:
            wrong()
        except ValueError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        found = CODE.find_in_exception(error)
    assert found.endswith(f"{HERE}:{wrong.__code__.co_firstlineno + 1} in wrong")


async def waits_for_a_task() -> None:
    await asyncio.create_task(waits())


async def test_a_coroutine_that_waits_is_placed_at_the_line_where_it_does() -> None:
    """Also in a task that it waits for; a coroutine of a library alone has no such line."""
    outer = asyncio.create_task(waits_for_a_task())
    library = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 60))
    await asyncio.sleep(0.01)
    assert CODE.find_in_awaitable(outer).endswith(
        f"{HERE}:{waits.__code__.co_firstlineno + 1} in waits"
    )
    assert CODE.find_in_suspended(library) == "", (
        "other threads of this process may stand in code of the tree"
    )
    outer.cancel()
    library.cancel()


def test_a_dump_is_read_from_the_thread_that_was_running() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 3 in idle\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{json.__file__}", line 9 in loads\n'
        '  File "/x/mine.py", line 7 in step\n'
    )
    assert CODE.find_in_dump(dump) == "/x/mine.py:7 in step"


def test_a_frame_is_placed_at_its_innermost_line_of_ones_own() -> None:
    assert CODE.find_in_frame(sys._getframe()).endswith(
        "in test_a_frame_is_placed_at_its_innermost_line_of_ones_own"
    )


def watched(*callbacks) -> list[Block]:
    """What a watchdog saw while callbacks ran, one after another."""

    async def run() -> list[Block]:
        watchdog = LoopWatchdog(UserCode())
        watchdog.start()
        for callback in callbacks:
            await asyncio.create_task(callback(), name=f"{CALL}somewhere in {callback.__name__}")
            await asyncio.sleep(0.03)
        watchdog.stop()
        return watchdog.take_blocks()

    return asyncio.run(run())


async def sleeps() -> None:
    time.sleep(1.5)  # the thread that looks may get no processor for much of it


async def counts() -> None:
    end = time.thread_time() + 0.15
    while time.thread_time() < end:
        pass


async def holds_the_interpreter() -> None:
    _ = 3**1_200_000 % 1_000_003


async def sleeps_awaited() -> None:
    await asyncio.sleep(0.2)


async def goes_on_and_on() -> None:
    for _ in range(40):
        await asyncio.sleep(0)
        time.sleep(0.004)


@pytest.mark.slow
def test_a_call_that_sleeps_is_named_with_its_line() -> None:
    [block] = watched(sleeps)
    line = sleeps.__code__.co_firstlineno + 1
    assert block.where.endswith(f"{HERE}:{line} in sleeps") and 0.1 < block.seconds < 15


@pytest.mark.slow
def test_a_call_that_computes_is_named() -> None:
    [block] = watched(counts)
    assert " in counts" in block.where


@pytest.mark.slow
def test_a_call_that_holds_the_interpreter_is_named() -> None:
    """No sample can be taken meanwhile, so its processor time and the name of its task say it."""
    began = time.thread_time()
    asyncio.run(holds_the_interpreter())
    assert time.thread_time() - began > 0.06, "the computation is too short to be seen"
    [block] = watched(holds_the_interpreter)
    assert " in holds_the_interpreter" in block.where


@pytest.mark.slow
def test_waiting_and_many_short_calls_are_no_block() -> None:
    assert watched(sleeps_awaited, goes_on_and_on) == []
