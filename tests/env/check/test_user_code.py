"""The line of a person's own code is found in exceptions, frames and dumps."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from realhf.base.installation import PACKAGE
from realhf.env.check.calls import UserCode

CODE = UserCode()
HERE = Path(__file__).name


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
        found = CODE.of_exception(error)
    assert found.endswith(f"{HERE}:{wrong.__code__.co_firstlineno + 1} in wrong")


async def waits() -> None:
    await asyncio.Event().wait()


async def waits_for_a_task() -> None:
    await asyncio.create_task(waits())


async def test_a_coroutine_that_waits_is_placed_at_the_line_where_it_does() -> None:
    """Also in a task that it waits for; a coroutine of a library alone has no such line."""
    outer = asyncio.create_task(waits_for_a_task())
    library = asyncio.create_task(asyncio.wait_for(asyncio.Event().wait(), 60))
    await asyncio.sleep(0.01)
    assert CODE.of_awaitable(outer).endswith(f"{HERE}:{waits.__code__.co_firstlineno + 1} in waits")
    assert CODE.of_suspended(library) == "", "other threads of this process may stand in code of the tree"
    outer.cancel()
    library.cancel()


def test_a_dump_is_read_from_the_thread_that_was_running() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 3 in idle\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{json.__file__}", line 9 in loads\n'
        '  File "/x/mine.py", line 7 in step\n'
    )
    assert CODE.of_dump(dump) == "/x/mine.py:7 in step"


def test_a_frame_is_placed_at_its_innermost_line_of_ones_own() -> None:
    assert CODE.of_frame(sys._getframe()).endswith("in test_a_frame_is_placed_at_its_innermost_line_of_ones_own")
