"""One sample as a group of rollouts: random numbers, retries, failures, deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from realhf.api.environment import EnvironmentFailure
from realhf.api.streaming import RolloutLease
from realhf.rollout.episode.request import Limits
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.players.failure_policy import GroupFailed, failure_policy
from realhf.rollout.players.group_player import GroupPlayer, within
from realhf.rollout.players.player import Player, TurnAgent
from tests.rollout.scripted_environment import Scripted, Words, World
from tests.rollout.word_chat import WordChat

N = 3


def lease(deadline_s: float = 30.0) -> RolloutLease:
    task = {"task": '{"text": "do it"}', "task_id": "t-1", "task_seed": 5, "group": "easy"}
    return RolloutLease("s1", 0, 4, 0, deadline_s, task)


def player(
    world: World, tokens: Any = None, name: str = "minimum_group", retries: int = 0, least: int = 2, **spec: Any
) -> GroupPlayer:
    policy = failure_policy(name, retries, least)
    agent = TurnAgent(WordChat(), Limits(4, 500, 8), "")
    own = Player(
        world.spec(**spec), "", agent, N, first_slot=10, retries=policy.retries, message_timeout_s=5.0, patience_s=0.0
    )
    return GroupPlayer(own, tokens or Words(), group_size=N, run_seed=1, policy=policy)


def fails(*members: int, kind: str = "internal") -> World:
    """A world whose first instances with these numbers fail in their first step, and those made later do not."""
    return World(lambda env, message: EnvironmentFailure(kind, "why") if env.number in members else None)


async def test_rollouts_come_in_order_each_with_its_row_and_its_random_numbers() -> None:
    tokens = Words()
    one = player(World(), tokens)
    played = await within(one, lease())
    again = await within(one, lease())
    await one.close()
    assert [o.task_id for o in played.outcomes] == [o.task_id for o in again.outcomes] == ["t-1"] * N
    assert [(o.seed, o.group, o.task_text) for o in played.outcomes] == [(5, "easy", "do it")] * N
    seeds = {request.slot: request.seed for request in tokens.requests}
    assert seeds == {10 + member: sampling_seed(1, "s1", member) for member in range(N)}
    assert len(set(seeds.values())) == N
    assert {request.min_version for request in tokens.requests} == {0}, "no token is older than the admission"
    assert not played.failures and not played.retried
    notes = played.statistics()
    assert (notes["tokens"], notes["turns"], notes["failed"]) == (27, [3] * N, {})


async def test_a_rollout_that_fails_is_played_again_and_both_are_counted() -> None:
    one = player(fails(1, kind="timeout"), retries=2, deterministic=False)
    played = await one.play(lease())
    await one.close()
    assert [o.status for o in played.outcomes] == ["finished"] * N
    assert played.statistics()["failed"] == {"timeout": 1} == played.statistics()["retried"]


async def test_what_a_failed_rollout_means_is_the_policys_affair() -> None:
    played = await player(fails(1)).play(lease())
    assert [o.valid for o in played.outcomes] == [True, False, True] and played.failures == {"internal": 1}
    for refused, match in (
        (player(fails(1, 2)), "1 of 3 rollouts are valid; internal: why"),
        (player(fails(1), name="retry"), "2 of 3 rollouts are valid"),
    ):
        with pytest.raises(GroupFailed, match=match) as failed:
            await refused.play(lease())
        assert failed.value.outcome == "env_error"
    world, tokens = World(), Words(broken=True)
    with pytest.raises(GroupFailed, match="policy: no generation worker") as failed:
        await player(world, tokens, name="fail_fast", retries=5).play(lease())
    assert failed.value.outcome == "engine_error" and len(tokens.requests) == N, "no second attempt"


async def test_after_a_deadline_the_same_slots_play_the_next_sample() -> None:
    hang = ["hang"]

    def once(env: Scripted, message: Any) -> Any:
        return hang.pop() if hang and env.number == 2 else None

    one = player(World(once))
    with pytest.raises(GroupFailed, match=r"not over after 0\.3 s") as failed:
        await within(one, lease(0.3))
    assert failed.value.outcome == "timeout"
    assert len((await within(one, lease())).outcomes) == N
    await one.close()


async def test_a_service_that_comes_back_is_waited_for() -> None:
    away = asyncio.Event()

    world = World(on_reset=lambda env: None if away.is_set() else EnvironmentFailure("lost", "no server"))
    agent = TurnAgent(WordChat(), Limits(4, 500, 8), "")
    own = Player(world.spec(), "", agent, N, patience_s=20.0)
    one = GroupPlayer(own, Words(), group_size=N, run_seed=1, policy=failure_policy("retry", 0, 1))
    waiting = asyncio.create_task(one.play(lease()))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "a sample in front of a dead server waits"
    away.set()
    assert [o.status for o in (await waiting).outcomes] == ["finished"] * N
