"""A clock that leaves out what its process stood still, and that every deadline of the product goes
by."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from realhf.base import process_clock
from realhf.base.event_loops import ClockedLoop, new_event_loop
from realhf.base.process_clock import READ_INTERVAL_S, READ_TOLERANCE_S, PauseDetector

ROOT = Path(__file__).parents[2]


class Hands:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pause_is_what_goes_beyond_the_time_between_two_looks():
    hands = Hands()
    pauses = PauseDetector(hands)
    found = []
    for passed in (
        0.1,
        READ_INTERVAL_S,
        READ_INTERVAL_S + READ_TOLERANCE_S / 2,
        READ_INTERVAL_S + 40.0,
        0.0,
        0.2,
    ):
        hands.now += passed
        found.append((pauses.now(), pauses.paused_s))
    expected = [
        (100.1, 0.0),
        (100.1 + READ_INTERVAL_S, 0.0),
        (100.1 + 2 * READ_INTERVAL_S + READ_TOLERANCE_S / 2, 0.0),
        (100.1 + 3 * READ_INTERVAL_S + READ_TOLERANCE_S / 2, 40.0),
        (100.1 + 3 * READ_INTERVAL_S + READ_TOLERANCE_S / 2, 40.0),
        (100.3 + 3 * READ_INTERVAL_S + READ_TOLERANCE_S / 2, 40.0),
    ]
    assert [pair for both in found for pair in both] == pytest.approx(
        [pair for both in expected for pair in both]
    )


def test_a_wait_is_repeated_with_what_is_left_when_the_process_stood_still():
    """What waits in a library comes back with nothing after a pause, since the library counts
    it."""
    hands = Hands()
    clock = process_clock.ProcessClock(hands)
    asked: list[float] = []

    def attempt(seconds: float) -> str:
        asked.append(seconds)
        if len(asked) == 1:
            hands.now += READ_INTERVAL_S + 40.0
            return ""
        if len(asked) == 2:
            hands.now += 0.2
            return "found"
        return ""

    assert clock.wait(attempt, 10.0) == "found"
    assert asked == pytest.approx([10.0, 10.0 - READ_INTERVAL_S])

    def nothing(seconds: float) -> str:
        while seconds > 0:
            step = min(seconds, 0.2)
            hands.now += step
            seconds -= step
            clock.now()
        return ""

    assert clock.wait(nothing, 3.0) == ""


STANDS_STILL = """
import asyncio, sys, threading
import httpx, socket
from realhf.base import event_loops, process_clock

def listening():
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made, made.getsockname()[1]

async def answered_late(work):
    try:
        await work
    except (TimeoutError, httpx.TimeoutException):
        print("late", flush=True)
    else:
        print("in time", flush=True)

async def go():
    keep, port = listening()
    print("waits", flush=True)
    loop = asyncio.get_running_loop()
    read = loop.run_in_executor(None, sys.stdin.readline)
    async with httpx.AsyncClient(timeout=3.0, trust_env=False) as client:
        request = asyncio.ensure_future(client.get(f"http://127.0.0.1:{port}"))
        await answered_late(asyncio.wait_for(read, 3.0))
        print("no answer yet" if not request.done() else "given up", flush=True)
        await answered_late(request)

kind = sys.argv[1]
if kind == "thread":
    read = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), read.set()), daemon=True).start()
    process_clock.now()
    print("waits", flush=True)
    print("in time" if process_clock.wait(read.wait, 3.0) else "late", flush=True)
else:
    with asyncio.Runner(loop_factory=event_loops.new_event_loop if kind == "uvloop" else event_loops.ClockedLoop) as r:
        r.run(go())
"""


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uvloop", "asyncio", "thread"])
def test_a_wait_of_three_seconds_outlasts_a_pause_of_five(kind: str):
    """Of a thread, of a coroutine, and of an HTTP client. The answer comes after the pause."""
    command = [sys.executable, "-c", STANDS_STILL, kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "in time\n"
        if kind != "thread":
            assert process.stdout.readline() == "no answer yet\n"
            assert process.stdout.readline() == "late\n"


@pytest.mark.parametrize("loop", [ClockedLoop, new_event_loop])
def test_the_timers_of_a_loop_go_by_the_clock(loop: type[asyncio.AbstractEventLoop]):
    """One that is cancelled does not ring; each rings in its order, with its context and no earlier
    than it should."""

    async def rings() -> list[str]:
        running = asyncio.get_running_loop()
        found: list[str] = []
        began = running.time()
        for name, seconds in (("late", 0.08), ("early", 0.02), ("never", 0.03)):
            timer = running.call_later(seconds, found.append, name)
            assert timer.when() == pytest.approx(began + seconds, abs=0.05)
            if name == "never":
                timer.cancel()
                assert timer.cancelled()
        await asyncio.sleep(0.1)
        assert running.time() - began >= 0.1 - 1e-3
        assert abs(running.time() - process_clock.now()) < 1.0
        return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(rings()) == ["early", "late"]


def test_a_forked_child_goes_on_with_the_time_of_its_parent():
    """A deadline that was made before the fork came early by all pauses of the parent."""
    clock = process_clock.ProcessClock()
    clock._pauses.paused_s = 1000.0
    deadline = clock.now() + 5.0
    clock._reset()  # what a fork does in the child
    assert 0.0 < deadline - clock.now() <= 5.0


def test_a_forked_child_has_a_clock_of_its_own():
    """The thread that looks does not live in the child, and its lock may be held at that moment."""
    process_clock.now()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        process_clock.now()
        names = [thread.name for thread in threading.enumerate()]
        os.write(writing, b"1" if "process clock" in names else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)


COUNTS_PAUSES = {
    "realhf/aws/simulator/lambda_broker.py": "a process that forks has no thread for a clock",
    "realhf/backends/vllm/broadcast/nccl.py": "the servers, whose clocks count pauses, leave then",
    "realhf/backends/vllm/broadcast/sender.py": "the servers, whose clocks count pauses, leave then",
    "realhf/backends/vllm/guard.py": "ends a server whose owner is gone",
    "realhf/env/containment/container_stage.py": "runs in a container, without a thread for a clock",
    "realhf/env/check/demonstrations.py": "counts the threads of an environment",
    "realhf/env/check/episodes.py": "counts the threads of an environment",
    "realhf/env/check/leaks.py": "counts the threads of an environment",
}
"""Files that may compare ``time.monotonic()`` with something, and why."""
OTHER_LOOPS = {
    "realhf/env/listing.py": "a command that prints a list",
    "realhf/view/__main__.py": "waits for nothing but its reader",
}
"""Files that may run a loop whose timers count pauses, and why."""


def _sources(*words: str) -> list[tuple[str, ast.AST]]:
    """Return the files of the product that have one of the words, and their trees."""
    folders = ("realhf", "workers", "experiments")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in paths}
    return [
        (str(path.relative_to(ROOT)), ast.parse(text))
        for path, text in texts.items()
        if any(word in text for word in words)
    ]


def _asks(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Attribute | ast.Name) and "monotonic" in ast.unparse(part)
        for part in ast.walk(node)
    )


@pytest.mark.slow
def test_no_deadline_goes_by_another_clock():
    """``time.monotonic()`` counts pauses. It measures durations that are reported: nothing is added
    to it, and it is compared with nothing."""
    found = set()
    for name, tree in _sources("monotonic"):
        for node in ast.walk(tree):
            adds = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            if (adds or isinstance(node, ast.Compare)) and _asks(node):
                found.add(f"{name}:{node.lineno}: {ast.unparse(node)}")
    print("\n".join(sorted(found)))
    assert {line.partition(":")[0] for line in found} == set(COUNTS_PAUSES)


@pytest.mark.slow
def test_no_event_loop_goes_by_another_clock():
    """``asyncio.run`` makes a loop whose timers count pauses, and so does uvicorn by itself."""
    found = set()
    for name, tree in _sources("asyncio.", "uvloop", "uvicorn."):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                keywords = {keyword.arg for keyword in node.keywords}
                if called in (
                    "asyncio.run",
                    "asyncio.new_event_loop",
                    "uvloop.new_event_loop",
                    "asyncio.Runner",
                ):
                    if "loop_factory" not in keywords:
                        found.add(name)
                elif called == "uvicorn.Config" and not keywords & {"loop", None}:
                    found.add(name)
    print(sorted(found))
    assert found == set(OTHER_LOOPS)


def test_no_test_sets_the_clock_of_its_process():
    """Session-scoped servers run in the process of the tests. A thread of theirs that reads a time
    far back computes a wait of hours, which goes on after the test. Replace the name
    ``process_clock`` in the module under test instead."""
    pattern = re.compile(r"setattr\(\s*(\w+\.)?process_clock\s*,|setattr\(.*_pauses\"|_pauses\.")
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert places == []
