"""The process that parses what is too large for the event loop: deaths on either side.

Source: docs/reference/trajectory.md 3.8.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from realhf.trajectory.wire.intake import Offload
from tests.trajectory.driver import refused

DEADLINE_S = 60.0
PARENT = """
import asyncio, os, sys, time
from realhf.trajectory.wire.intake import Offload

async def main():
    offload = Offload()
    print(await offload.run(os.getpid), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_child_that_died_is_replaced():
    async def scenario() -> None:
        offload = Offload()
        try:
            first = await offload.run(os.getpid)
            assert first != os.getpid()
            assert await offload.run(os.getpid) == first
            with refused(503) as refusal:
                await offload.run(os._exit, 1)
            assert refusal.value.headers["Retry-After"]
            second = await offload.run(os.getpid)
            os.kill(second, signal.SIGKILL)
            deadline = time.monotonic() + DEADLINE_S
            while alive(second) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert await offload.run(os.getpid) not in (first, second), (
                "idle when it died: nobody is refused"
            )
        finally:
            await offload.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_no_child_outlives_a_killed_server(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
