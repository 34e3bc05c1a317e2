"""What a slot makes of an environment that fails: sent again, resumed by replay, or a failure with its kind."""

from __future__ import annotations

import time
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Turn
from realhf.rollout.player import ReplayDiverged, SlotEnvironment
from tests.rollout.scripted_environment import Scripted, World

FAILED = {kind: EnvironmentFailure(kind, "why") for kind in ("unavailable", "timeout", "lost", "capacity")}


def slot(world: World, retries: int = 0, **options: Any) -> SlotEnvironment:
    options = {"message_timeout_s": 5.0, "patience_s": 0.0, "deterministic": True, **options}
    env = SlotEnvironment("scripted", lambda: Scripted(world), **options)
    env.begin(retries)
    return env


def says(text: str) -> AssistantMessage:
    return AssistantMessage(text, text=text)


def tricks(told: dict[tuple[int, str], Any]) -> World:
    """A world in which instance n answers a message once as told."""
    return World(lambda env, message: told.pop((env.number, message.content), None))


async def test_a_step_that_was_not_executed_is_sent_again() -> None:
    left = [FAILED["unavailable"]] * 2
    world = World(lambda env, message: left.pop() if left else None)
    env = slot(world)
    await env.reset({}, seed=1)
    assert (await env.step(says("a"))).messages[0]["content"] == "saw a"
    assert env.failures == {"unavailable": 2} and env.resumed == 0
    assert world.log == [(0, "reset"), (0, "a"), (0, "a"), (0, "a")]


@pytest.mark.parametrize(("trick", "kind"), [(FAILED["lost"], "lost"), ("hang", "timeout")])
async def test_a_lost_episode_is_resumed_by_replay(trick: Any, kind: str) -> None:
    world = tricks({(0, "b"): trick})
    env = slot(world, retries=1, message_timeout_s=0.1)
    await env.reset({"text": "task"}, seed=7)
    await env.step(says("a"))
    last = await env.step(says("b"))
    assert last.metrics == {"progress": 2 / 3}
    assert env.failures == {kind: 1} and env.resumed == 1 and world.closed == 1
    assert world.log == [(0, "reset"), (0, "a"), (0, "b"), (1, "reset"), (1, "a"), (1, "b")]


async def test_a_loss_during_the_replay_is_one_more_loss() -> None:
    world = tricks({(0, "b"): FAILED["lost"], (1, "a"): FAILED["lost"], (2, "b"): FAILED["unavailable"]})
    env = slot(world, retries=2)
    await env.reset({}, seed=1)
    await env.step(says("a"))
    await env.step(says("b"))
    assert env.failures == {"lost": 2, "unavailable": 1} and env.resumed == 1


async def test_the_retries_are_bounded_and_the_failure_is_named() -> None:
    world = World(lambda env, message: FAILED["lost"])
    env = slot(world, retries=2)
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure, match="why") as end:
        await env.step(says("a"))
    assert end.value.kind == "lost" and env.failures == {"lost": 3} and world.made == 3


async def test_another_answer_in_the_replay_is_a_failure_of_the_environment() -> None:
    stranger = Turn([{"role": "user", "content": "another world"}], reward=0.25)
    env = slot(tricks({(0, "b"): FAILED["lost"], (1, "a"): stranger}), retries=1)
    await env.reset({}, seed=1)
    await env.step(says("a"))
    with pytest.raises(ReplayDiverged, match=r"turn 0 was answered .*saw a.*another world"):
        await env.step(says("b"))
    assert env.failures == {"lost": 1, "diverged": 1}


async def test_an_environment_that_is_not_deterministic_is_not_resumed() -> None:
    world = tricks({(0, "a"): FAILED["lost"]})
    env = slot(world, retries=3, deterministic=False)
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure):
        await env.step(says("a"))
    assert world.made == 1


async def test_a_service_that_is_away_is_waited_for_no_longer_than_the_patience() -> None:
    away = [FAILED["lost"], FAILED["capacity"]]
    world = World(on_reset=lambda env: away.pop(0) if away else None)
    env = slot(world, patience_s=5.0)
    await env.reset({}, seed=1)
    assert world.made == 3 and not env.resumed
    env = slot(World(on_reset=lambda env: FAILED["lost"]), patience_s=0.1)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure):
        await env.reset({}, seed=1)
    assert 0.05 < time.monotonic() - began < 30


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_exception_names_the_environment_and_the_line(where: str) -> None:
    def broken(*_: Any) -> Any:
        return KeyError("no such row")

    world = World(broken) if where == "step" else World(on_reset=broken)
    env = slot(world, retries=0)
    with pytest.raises(EnvironmentFailure, match=rf"environment scripted: {where}: KeyError: .*\.py, line \d+") as end:
        await env.reset({}, seed=1)
        await env.step(says("a"))
    assert end.value.kind == "internal"


async def test_a_timeout_of_the_environments_own_is_one_too() -> None:
    env = slot(World(lambda env, message: TimeoutError("own deadline")))
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure, match="own deadline") as end:
        await env.step(says("a"))
    assert end.value.kind == "timeout"


async def test_closing_is_bounded_and_never_raises() -> None:
    class Stubborn(Scripted):
        async def close(self) -> None:
            raise RuntimeError("no")

    world = World()
    env = SlotEnvironment(
        "scripted", lambda: Stubborn(world), message_timeout_s=1.0, patience_s=0.0, deterministic=True
    )
    await env.reset({}, seed=1)
    await env.close()
    await env.close()
