"""Closing: bounded when the server hangs or is dead, by whatever way a pool ends, and with nothing
left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.client.grpo_pool import GrpoPool
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.session_group import PoolClosed
from realhf.aws.server.program import EnvServerProcess
from realhf.base.loop_thread import LoopThread
from tests.rollout.fake_env_server import FakeEnvServer

pytestmark = pytest.mark.sim

GENEROUS_S = 60


def deaf(number: int, message) -> str | None:
    return "hang" if message["type"] == "close" else None


@pytest.mark.nightly
async def test_a_server_that_does_not_say_goodbye() -> None:
    with FakeEnvServer(deaf) as fake:
        pool = GrpoPool(fake.url, 3)
        await pool.connect()
        await asyncio.wait_for(pool.close(), GENEROUS_S)
        env = AwsEnv(fake.url)
        await env.connect()
        await asyncio.wait_for(env.close(), GENEROUS_S)
        blocking = MultiTurnEnvPool(fake.url, 3)
        await asyncio.wait_for(asyncio.to_thread(blocking.connect), GENEROUS_S)
        await asyncio.wait_for(asyncio.to_thread(blocking.close), GENEROUS_S)


async def test_a_server_that_was_killed() -> None:
    with EnvServerProcess(2) as server:
        pool = GrpoPool(server.url, 2, on_failure="drop")
        await pool.connect()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        results = await pool.run_group_step(["aws s3api list-buckets", "aws s3api list-buckets"])
        assert [getattr(result, "status", None) for result in results] == ["lost"] * 2
        with pytest.raises(ConnectionError):
            await pool.reset_group({"task_id": 1})
        await asyncio.wait_for(pool.close(), GENEROUS_S)


def test_a_forgotten_pool_ends_its_thread_and_sessions() -> None:
    before = set(threading.enumerate())
    with FakeEnvServer() as fake:
        pool = MultiTurnEnvPool(fake.url, 2)
        pool.connect()
        assert fake.open == 2
        del pool
        gc.collect()
        assert fake.open == 0
    assert set(threading.enumerate()) <= before


@pytest.mark.nightly
def test_the_interpreter_ends_without_close() -> None:
    code = (
        "import sys\n"
        "from realhf.aws.client.aws_env import AwsEnv\n"
        "from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool\n"
        "pool = MultiTurnEnvPool(sys.argv[1], 2); pool.connect()\n"
        "env = AwsEnv(sys.argv[1]).sync(); env.connect()\n"
        "print('connected')\n"
    )
    for misbehave in (lambda number, message: None, deaf):
        with FakeEnvServer(misbehave) as fake:
            done = subprocess.run(
                [sys.executable, "-c", code, fake.url],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "connected\n", "")


def test_an_interrupted_call_is_rolled_back_first() -> None:
    thread = LoopThread("test-loop", instead="nothing")
    rolled_back: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            rolled_back.append(True)

    with pytest.raises(TimeoutError):
        thread.call(slow(), 0.05)
    assert rolled_back == [True]
    thread.stop(60)
    assert not thread.alive


def test_a_thread_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread("stuck-loop", instead="nothing")
    release = threading.Event()
    entered = threading.Event()

    def block() -> None:
        entered.set()
        release.wait(GENEROUS_S)

    thread.loop.call_soon_threadsafe(block)
    assert entered.wait(GENEROUS_S)
    thread.stop(0.05)
    assert "stuck-loop" in caplog.text and "abandoned" in caplog.text
    release.set()


def test_a_closed_pool_says_so() -> None:
    with FakeEnvServer() as fake:
        pool = MultiTurnEnvPool(fake.url, 1)
        for call in (lambda: pool.reset_group({}), lambda: pool.run_group_step([None])):
            with pytest.raises(PoolClosed, match="connect"):
                call()
        pool.connect()
        pool.close()
        for call in (
            lambda: pool.reset_group({}),
            lambda: pool.run_group_step([None]),
            pool.connect,
        ):
            with pytest.raises(PoolClosed, match="closed"):
                call()
