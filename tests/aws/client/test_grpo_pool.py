"""The asynchronous pool and what both pools share: all-or-nothing connect, typed failures, group
results."""

import asyncio
import gc
import os
import threading
import time

import pytest

from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.client.grpo_pool import GrpoPool
from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.session_group import (
    GroupError,
    GroupResetError,
    PoolClosed,
    RolloutFailure,
    episode_return,
    record_group,
)
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.env.openenv_client import CapacityError, ConnectError
from tests.rollout.fake_env_server import FakeEnvServer
from tests.rollout.word_chat import ScriptedPolicy

pytestmark = pytest.mark.sim

N = 3


class Recorder:
    """Notes what a pool tells a curriculum."""

    def __init__(self) -> None:
        self.calls = []

    def record_result(self, task, achieved: bool | float | None, reward: float = 0.0) -> None:
        self.calls.append((task, achieved, reward))


async def play(env: AwsEnv) -> float:
    await env.reset()
    rewards = []
    for command in ("a", "b"):
        result = await env.step(command)
        rewards.append(result.reward or 0.0)
    return sum(rewards)


def at(connection: int, kind: str, trick: str):
    return lambda number, message: (
        trick if (number, message["type"]) == (connection, kind) else None
    )


@pytest.mark.nightly
async def test_a_group_on_the_real_server() -> None:
    task = instantiate(205, 2)
    commands = task.solution

    async def oracle(env: AwsEnv) -> float:
        return sum([(await env.step(command)).reward or 0.0 for command in commands])

    with EnvServerProcess(N) as server:
        recorder = Recorder()
        async with GrpoPool(server.url, N, recorder) as pool:
            first = await pool.reset_group(task)
            assert {r.observation.task.description for r in first if r.observation.task} == {
                task.description
            }
            assert len({r.observation.episode_id for r in first}) == N
            assert await pool.run_group(oracle) == pytest.approx([1.0] * N)
            await pool.reset_group({"task": task.to_json()}, seed=task.seed)
            stepped = await pool.run_group_step([commands[0], None, "aws s3api list-buckets"])
            assert isinstance(stepped[0], object) and stepped[1] is None
            summary = pool.record_group_result(task, [1.0] * N)
            assert (summary.mean, summary.achieved, summary.trainable) == (1.0, 1.0, True)
            assert recorder.calls == [(task, 1.0, 1.0)]
            with pytest.raises(CapacityError):
                await GrpoPool(server.url, 1).connect()


async def test_both_pools_agree_on_a_scripted_policy() -> None:
    def say(task: str, turn: int) -> str:
        return f"aws turn {turn}"

    async def rollout(env: AwsEnv) -> tuple[float, list[str]]:
        await env.reset()
        outputs = []
        rewards = []
        done = False
        while not done:
            result = await env.step(say("", len(outputs)))
            outputs.append(result.observation.command_output)
            rewards.append(result.reward or 0.0)
            done = result.done
        return episode_return(rewards, "potential"), outputs

    with FakeEnvServer() as fake:
        async with GrpoPool(fake.url, N) as pool:
            theirs = await pool.run_group(rollout)
        for mode in ("lockstep", "independent"):
            outcomes = await asyncio.to_thread(multi_turn, fake.url, say, mode)
            assert [(o.reward, [turn.output for turn in o.turns]) for o in outcomes] == theirs


def multi_turn(url: str, say, mode: str, **options):
    with MultiTurnEnvPool(url, N, turn_tokens=200, **options) as pool:
        return pool.run_group({}, ScriptedPolicy(say), mode=mode)


@pytest.mark.parametrize(
    "trick", ["drop", '{"type":"error","data":{"code":"CAPACITY_REACHED","message":"3/3"}}']
)
async def test_connecting_is_all_or_nothing(trick: str) -> None:
    refuse = [True]
    with FakeEnvServer(
        lambda number, message: (
            trick if refuse and number == 1 and message["type"] == "state" else None
        )
    ) as fake:
        pool = GrpoPool(fake.url, N)
        with pytest.raises(ConnectError):
            await pool.connect()
        assert pool.envs == [] and fake.connections == N
        with pytest.raises(PoolClosed, match="connect"):
            await pool.reset_group({})
        await wait_for(lambda: fake.open == 0)
        await pool.connect()
        await pool.connect()
        assert len(pool.envs) == N and fake.open == N
        await pool.close()
        await pool.close()
        await wait_for(lambda: fake.open == 0)
        with pytest.raises(PoolClosed):
            await pool.run_group(play)
        with pytest.raises(PoolClosed):
            await pool.connect()


async def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the fake server still has open sessions"
        await asyncio.sleep(0.01)


async def test_a_cancelled_connect_leaves_nothing() -> None:
    with FakeEnvServer(at(2, "state", "hang")) as fake:
        pool = GrpoPool(fake.url, N)
        connecting = asyncio.ensure_future(pool.connect())
        await wait_for(lambda: fake.open == N)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert pool.envs == []
        await wait_for(lambda: fake.open == 0)


async def test_two_sessions_on_one_slot_are_refused() -> None:
    with FakeEnvServer(lambda number, message: '{"type":"state","data":{"slot_id":7}}') as fake:
        pool = GrpoPool(fake.url, 2)
        with pytest.raises(ConnectError, match="same slot"):
            await pool.connect()
        await wait_for(lambda: fake.open == 0)


@pytest.mark.parametrize(("trick", "status"), [("drop", "lost"), ("error", "internal")])
async def test_a_crashed_environment_is_dropped_and_the_rest_counts(
    trick: str, status: str
) -> None:
    with FakeEnvServer(at(1, "step", trick)) as fake:
        recorder = Recorder()
        async with GrpoPool(fake.url, N, recorder) as pool:
            results = await pool.run_group(play)
            assert [isinstance(result, RolloutFailure) for result in results] == [
                False,
                True,
                False,
            ]
            summary = pool.record_group_result("task", results)
            assert (summary.size, summary.valid, summary.mean, summary.failures) == (
                3,
                2,
                1.0,
                {status: 1},
            )
            assert recorder.calls == [("task", 1.0, 1.0)]


async def test_retry_and_raise() -> None:
    with FakeEnvServer(at(1, "step", "drop")) as fake:
        async with GrpoPool(fake.url, N, on_failure="retry") as pool:
            assert await pool.run_group(play) == [1.0] * N
        assert fake.connections == N + 1
    with FakeEnvServer(at(1, "step", "drop")) as fake:
        async with GrpoPool(fake.url, N, on_failure="raise") as pool:
            with pytest.raises(GroupError, match="1: lost") as caught:
                await pool.run_group(play)
            assert [outcome == 1.0 for outcome in caught.value.outcomes] == [True, False, True]
            assert await pool.run_group(play) == [1.0] * N, "the lost connection was opened again"


async def test_an_error_of_the_rollout_is_raised_with_the_others_results() -> None:
    with FakeEnvServer() as fake:
        async with GrpoPool(fake.url, N, message_timeout_s=2.0) as pool:

            async def rollout(env: AwsEnv) -> float:
                place = pool.envs.index(env)
                if place == 0:
                    raise ArithmeticError("weights are gone")
                if place == 1:
                    await asyncio.sleep(60)
                return await play(env)

            with pytest.raises(GroupError, match=r"0: policy.*1: timeout") as caught:
                await pool.run_group(rollout)
            assert caught.value.outcomes[2] == 1.0 and isinstance(
                caught.value.__cause__, ArithmeticError
            )

            async def nested(env: AwsEnv) -> float:
                await pool.run_group(play)
                return 0.0

            with pytest.raises(GroupError, match="playing already"):
                await pool.run_group(nested)


async def test_resetting_a_group() -> None:
    with FakeEnvServer(at(1, "reset", "error")) as fake:
        async with GrpoPool(fake.url, N) as pool:
            with pytest.raises(GroupResetError, match="1: internal") as caught:
                await pool.reset_group({"task_id": 4}, seed=9)
            assert [isinstance(o, RolloutFailure) for o in caught.value.outcomes] == [
                False,
                True,
                False,
            ]
            sent = [message["data"] for _, message in fake.messages if message["type"] == "reset"]
            assert sent == [{"task_id": 4, "seed": 9, "chaos": False}] * N
            with pytest.raises(ValueError, match="2 actions for 3"):
                await pool.run_group_step(["a", "b"])
    other = '{"type":"observation","data":{"observation":{"task":{"description":"else"}},"reward":null,"done":false}}'
    with FakeEnvServer(at(1, "reset", other)) as fake:
        async with GrpoPool(fake.url, N) as pool:
            with pytest.raises(GroupResetError, match="2 different tasks"):
                await pool.reset_group({})


async def test_generation_is_serial_while_steps_overlap() -> None:
    running = 0
    most = 0
    stepped = threading.Event()

    def generate(word: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert stepped.wait(60), "no environment step while the model generates"
        running -= 1
        return word

    with FakeEnvServer() as fake:
        async with GrpoPool(fake.url, N) as pool:

            async def rollout(env: AwsEnv) -> str:
                await env.reset()
                if pool.envs.index(env) == 0:
                    await env.step("a")
                    stepped.set()
                word = await pool.generate(generate, "b")
                await env.step(word)
                return word

            assert await pool.run_group(rollout) == ["b"] * N
    assert most == 1


def test_group_statistics() -> None:
    recorder = Recorder()
    summary = record_group(recorder, "t", [1.0, 0.5, None, float("nan"), 1e300])
    assert (summary.valid, summary.achieved, summary.mean, summary.std) == (2, 0.5, 0.75, 0.25)
    assert summary.failures == {"missing": 1, "not_finite": 2} and summary.trainable
    assert not record_group(recorder, "t", [0.99]).trainable
    assert record_group(recorder, "t", [RolloutFailure("timeout", "x")]).valid == 0
    assert recorder.calls == [("t", 0.5, 0.75), ("t", 1.0, 0.99), ("t", None, 0.0)]
    assert record_group(None, "t", [0.5], success_threshold=0.5).achieved == 1.0
    assert (episode_return([0.2, 0.5], "potential"), episode_return([0.2, 0.5], "level")) == (
        0.7,
        0.5,
    )
    assert episode_return([], "level") == 0.0


async def test_a_forgotten_pool_gives_its_sessions_back() -> None:
    with FakeEnvServer() as fake:
        pool = GrpoPool(fake.url, N)
        await pool.connect()
        del pool
        gc.collect()
        await wait_for(lambda: fake.open == 0)


async def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        GrpoPool("http://h", 0)
    with pytest.raises(ValueError, match="on_failure"):
        GrpoPool("http://h", 1, on_failure="ignore")
    with FakeEnvServer() as fake:
        async with GrpoPool(fake.url, 1) as pool:
            child = os.fork()
            if child == 0:
                try:
                    pool._check_usable()
                except RuntimeError as error:
                    os._exit(0 if "forked" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
