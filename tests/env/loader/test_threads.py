"""Blocking code runs beside the event loop, in a bounded number of threads that never keep a
process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from realhf.api.environment import EnvironmentFailure
from realhf.env.loader import threads as module
from realhf.env.loader.threads import Threads


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "this never came"
        await asyncio.sleep(0.005)


async def test_no_more_jobs_run_at_once_than_there_are_threads() -> None:
    """The others wait for their turn, and every caller gets its own result or error."""
    threads = Threads("test", 3)
    lock = threading.Lock()
    running = 0
    most = 0
    first = threading.Barrier(3)

    def job(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if number < 3:
            first.wait(60)
        time.sleep(0.005)
        with lock:
            running -= 1
        if number % 5 == 0:
            raise KeyError(number)
        return number

    found = await asyncio.gather(
        *(threads.run(lambda n=n: job(n)) for n in range(20)), return_exceptions=True
    )
    assert most == 3
    assert [each.args[0] if isinstance(each, KeyError) else each for each in found] == [*range(20)]


async def test_a_job_that_was_given_up_leaves_its_place_to_others() -> None:
    """It runs on, counted as stuck, and ``after`` follows it in the same thread."""
    threads = Threads("test", 1)
    release = threading.Event()
    ended = []
    stuck = asyncio.create_task(
        threads.run(
            lambda: ended.append(threading.get_ident()) or release.wait(60),
            lambda: ended.append(threading.get_ident()),
        )
    )
    await until(lambda: len(ended) == 1)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    assert threads.stuck == 1
    assert await asyncio.wait_for(threads.run(lambda: 5), 60) == 5
    assert len(ended) == 1
    release.set()
    await until(lambda: len(ended) == 2 and threads.stuck == 0)
    assert ended[0] == ended[1]
    assert await asyncio.wait_for(threads.run(lambda: 6), 60) == 6


async def test_a_job_that_was_given_up_in_the_queue_never_runs() -> None:
    """What comes after it does, because somebody counts on it."""
    threads = Threads("test", 1)
    release = threading.Event()
    ran = []
    first = asyncio.create_task(threads.run(lambda: release.wait(60)))
    waiting = asyncio.create_task(
        threads.run(lambda: ran.append("work"), lambda: ran.append("after"))
    )
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await first
    await until(lambda: ran == ["after"])


async def test_too_many_jobs_that_never_return_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New ones are refused as long as it lasts."""
    monkeypatch.setattr(module, "MAX_STUCK", 2)
    threads = Threads("Stubborn", 2)
    release = threading.Event()
    begun = list[None]()
    tasks = [
        asyncio.create_task(threads.run(lambda: begun.append(None) or release.wait(60)))
        for _ in range(2)
    ]
    await until(lambda: len(begun) == 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    with pytest.raises(EnvironmentFailure, match="Stubborn: 2 calls have not returned") as caught:
        await threads.run(lambda: 1)
    assert caught.value.kind == "capacity"
    release.set()
    await until(lambda: threads.stuck == 0)
    assert await threads.run(lambda: 1) == 1


@pytest.mark.parametrize(
    "error", [SystemExit, StopIteration, KeyboardInterrupt, asyncio.CancelledError]
)
async def test_whatever_a_job_raises_reaches_its_caller(error: type[BaseException]) -> None:
    """And the thread takes the next job."""
    threads = Threads("test", 1)

    def job() -> None:
        raise error

    with pytest.raises((error, RuntimeError)):
        await threads.run(job)
    assert await threads.run(lambda: 1) == 1


async def test_random_jobs_deadlines_and_errors_leave_nothing_behind() -> None:
    """Whenever a caller gives up, the books balance in the end and every thread is free again."""
    threads = Threads("test", 4)
    after = []
    numbers = [(7 * n) % 11 for n in range(300)]

    async def one(number: int) -> None:
        try:
            async with asyncio.timeout(0.002 * (number % 4) if number % 2 else None):
                await threads.run(
                    lambda: time.sleep(0.0005 * (number % 5)), lambda: after.append(number)
                )
        except TimeoutError:
            return

    await asyncio.gather(*map(one, numbers))
    await until(
        lambda: threads.stuck == 0 and threads._waiting == 0 and threads._idle == threads._threads
    )
    assert threads._threads <= 4 and 0 < len(after) < 200
    assert await asyncio.gather(*(threads.run(lambda n=n: n) for n in range(50))) == [*range(50)]


@pytest.mark.slow
def test_a_call_that_never_returns_does_not_keep_the_process_alive() -> None:
    code = """
import asyncio, threading
from realhf.env.loader.threads import Threads

async def main():
    try:
        async with asyncio.timeout(0.05):
            await Threads("test").run(threading.Event().wait)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "given up\n" and done.stderr == ""
