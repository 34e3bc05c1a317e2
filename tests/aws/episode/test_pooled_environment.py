"""AWS episodes in this process, behind the contract: what a policy reads, and slots that always
come back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, EnvironmentSpec
from realhf.aws.episode.pooled_environment import pooled_environment
from realhf.aws.messages import NO_COMMAND, episode_task, observation_text
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate
from realhf.rollout.player import SlotEnvironment

pytestmark = pytest.mark.sim
TASK = instantiate(201, 4)
"""Two commands: create a bucket, then enable its versioning."""


@pytest.fixture
def spec(pool: MiniStackPool) -> Iterator[EnvironmentSpec]:
    with pooled_environment(pool) as found:
        yield found
    assert pool.free_count == pool.size, "every slot is given back"


def says(text: str) -> AssistantMessage:
    return AssistantMessage(text, text=text)


async def test_a_policy_reads_the_short_text_and_a_script_the_whole_observation(
    spec: EnvironmentSpec,
) -> None:
    env = spec.make("")
    opening = await env.reset(episode_task(TASK).payload, seed=TASK.seed)
    assert list(opening.messages) == [{"role": "user", "content": TASK.description}]
    assert opening.info["observation"]["steps_left"] and opening.info["setup_answers"] == []
    create, enable = TASK.solution
    nothing = await env.step(says("let me think"))
    assert (nothing.messages[0]["content"], nothing.reward, nothing.info) == (NO_COMMAND, None, {})
    failed = await env.step(says(f"I enable it.\n```\n{enable}\n```"))
    assert [*failed.messages] == [
        {"role": "user", "content": observation_text(failed.info["observation"])}
    ]
    assert "NoSuchBucket" in failed.messages[0]["content"] and not failed.done
    await env.step(says(create))
    last = await env.step(says(enable))
    assert last.done and last.metrics["success"] == last.metrics["progress"] == 1.0
    assert last.info["did"] == enable and last.info["view"]["rows"][0][:2] == ["s3", "bucket"]
    order = opening.info["replay"]["order"]
    assert order == {"task_id": TASK.task_id, "seed": TASK.seed, "chaos": False}
    await env.close()
    with pytest.raises(EnvironmentFailure, match="no episode is running") as closed:
        await env.step(says(create))
    assert closed.value.kind == "lost"


async def test_the_wanted_state_is_shown_where_the_task_says_it(spec: EnvironmentSpec) -> None:
    task = replace(TASK, desired_state_spec="a bucket that keeps versions")
    env = spec.make("")
    opening = await env.reset(episode_task(task).payload, seed=1)
    assert opening.messages[0]["content"] == f"{TASK.description}\n\na bucket that keeps versions"
    await env.close()


async def test_a_full_pool_and_a_task_that_makes_no_sense_have_their_kinds(
    spec: EnvironmentSpec, pool: MiniStackPool
) -> None:
    env = spec.make("")
    taken = [pool.acquire() for _ in range(pool.free_count)]
    with pytest.raises(EnvironmentFailure, match="exhausted") as full:
        await env.reset(episode_task(TASK).payload, seed=1)
    for slot in taken:
        pool.release(slot)
    with pytest.raises(EnvironmentFailure, match="success_criteria") as wrong:
        await env.reset(
            {"task": {**TASK.to_json(), "success_criteria": {"no such criterion": 1}}}, seed=1
        )
    assert (full.value.kind, wrong.value.kind) == ("capacity", "internal")
    await env.close()


async def test_a_command_that_nobody_waits_for_any_longer_gives_its_slot_back(
    spec: EnvironmentSpec,
) -> None:
    """The slot is not leased again while a thread still works in it; the fixture sees that it comes
    back."""
    env = spec.make("")
    await env.reset(episode_task(TASK).payload, seed=1)
    step = asyncio.ensure_future(env.step(says(TASK.solution[0])))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await env.close()
    with pytest.raises(EnvironmentFailure, match="no episode is running"):
        await env.step(says(TASK.solution[1]))


async def test_an_episode_survives_its_simulator(
    spec: EnvironmentSpec, pool: MiniStackPool
) -> None:
    """It is played again in another one, up to the place where it was lost, and goes on there."""
    env = SlotEnvironment("aws", lambda: spec.make(""), message_timeout_s=60, patience_s=20)
    env.prepare(1)
    await env.reset(episode_task(TASK).payload, seed=TASK.seed)
    create, enable = TASK.solution
    await env.step(says(create))
    for slot in pool.slots:
        os.kill(slot.ministack.pid, signal.SIGKILL)
    last = await env.step(says(enable))
    assert last.metrics["success"] == 1.0
    assert env.resumed == 1 and env.failures == {"lost": 1}
    await env.close()
    async with asyncio.timeout(120):
        while pool.free_count < pool.size:  # the pool replaces the idle simulators that were killed
            await asyncio.sleep(0.05)
