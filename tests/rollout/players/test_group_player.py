"""One sample played in a pool of real sessions on a fake server: retries, failures, deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from realhf.api.config import FailureConfig
from realhf.api.env import RolloutOutcome
from realhf.api.generation import GenerationFailed, TokenSource
from realhf.api.model import GenOutput, GenRequest
from realhf.api.streaming import RolloutLease
from realhf.rollout.agents.episode_agent import EpisodeEnv, TurnAgent
from realhf.rollout.client.env_client import ConnectionLost
from realhf.rollout.episode.rollout_state import Limits, RolloutRequest
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.players.failure_policy import FailFast, Retry, failure_policy
from realhf.rollout.players.group_player import GroupFailed, GroupPlayer, reset_arguments, within
from realhf.rollout.players.grpo_pool import GrpoPool
from tests.rollout.fake_env_server import FakeEnvServer

from tests.rollout.scripted import END, LossyChat  # isort: skip

N = 3


def lease(deadline_s: float = 30.0) -> RolloutLease:
    return RolloutLease("s1", 0, 4, 0, deadline_s, {"task": '{"k": 1}', "task_seed": 5})


def outcome(status: str, index: int) -> RolloutOutcome:
    reward = 1.0 if status == "finished" else None
    return RolloutOutcome(
        status,
        [1],
        [2, 3],
        [0.0, -1.0],
        [-1, 0],
        [False, True],
        reward,
        True,
        1.0,
        (),
        index,
        "",
        0,
        message="why",
        timings={"wall_s": 0.5},
    )


class FakeTokens:
    """A policy that says "go" and ends its turn; ``broken``: it cannot."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.freed: list[int] = []
        self.requests: list[GenRequest] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.requests.append(request)
        if self.broken:
            raise GenerationFailed("no generation worker")
        tokens = [1000 + ord(c) for c in "go"] + [END]
        return GenOutput(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")

    def free(self, slots: Sequence[int]) -> None:
        self.freed += slots


class FakeAgent:
    """Ends each attempt of a rollout as ``script[member]`` says: a status, "hang" or an error to raise."""

    def __init__(self, script: dict[int, list[Any]]) -> None:
        self.script = script
        self.wanted: list[tuple[RolloutRequest, int]] = []

    async def play(self, env: EpisodeEnv, wanted: RolloutRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        self.wanted.append((wanted, slot))
        await env.reset()
        ends = self.script.get(wanted.index, ["finished"])
        end = ends.pop(0) if len(ends) > 1 else ends[0]
        if isinstance(end, Exception):
            raise end
        if end == "hang":
            await asyncio.sleep(600)
        return outcome(end, wanted.index)


def player(url: str, agent: Any, llm: Any = None, *, least: int = 2, **failure: Any) -> GroupPlayer:
    pool = GrpoPool(url, N, message_timeout_s=5.0, retry_capacity_s=0.2, on_failure="drop")
    return GroupPlayer(
        pool,
        agent,
        llm or FakeTokens(),
        first_slot=10,
        run_seed=1,
        policy=failure_policy(FailureConfig(**failure), least),
        chaos=False,
        patience_s=0.2,
    )


async def test_rollouts_come_in_order_each_with_its_row_and_its_random_numbers() -> None:
    agent = FakeAgent({})
    with FakeEnvServer() as fake:
        one = player(fake.url, agent)
        played = await within(one, lease())
        again = await within(one, lease())
        await one.close()
    assert [o.task_id for o in played.outcomes] == [o.task_id for o in again.outcomes] == [0, 1, 2]
    assert sorted((wanted.index, slot) for wanted, slot in agent.wanted[:N]) == [(0, 10), (1, 11), (2, 12)]
    seeds = {wanted.index: wanted.sampling_seed for wanted, _ in agent.wanted}
    assert seeds == {member: sampling_seed(1, "s1", member) for member in range(N)} and len(set(seeds.values())) == N
    assert played.failures == played.retried == Counter()
    notes = played.statistics()
    assert (notes["tokens"], notes["episode_s"], notes["failed"]) == (3, [0.5] * 3, {})


async def test_a_rollout_that_fails_is_played_again_and_both_are_counted() -> None:
    agent = FakeAgent({1: ["env_timeout", "finished"]})
    with FakeEnvServer() as fake:
        one = player(fake.url, agent, retries=2)
        played = await one.play(lease())
        await one.close()
    assert [o.status for o in played.outcomes] == ["finished"] * 3
    assert played.statistics()["failed"] == {"env_timeout": 1} == played.statistics()["retried"]


async def test_one_that_fails_for_good_is_left_out_and_too_many_fail_the_sample() -> None:
    with FakeEnvServer() as fake:
        one = player(fake.url, FakeAgent({1: ["env_error"]}), retries=1)
        played = await one.play(lease())
        assert [o.valid for o in played.outcomes] == [True, False, True] and played.failures == {"env_error": 2}
        one._agent = FakeAgent({1: ["env_error"], 2: ["policy_error"]})
        with pytest.raises(GroupFailed, match="1 of 3 rollouts are valid; env_error: why") as failed:
            await one.play(lease())
        assert failed.value.outcome == "env_error"
        one._policy = Retry(0)
        one._agent = FakeAgent({1: ["env_error"]})
        with pytest.raises(GroupFailed, match="2 of 3 rollouts are valid"):
            await one.play(lease())
        one._policy = FailFast()
        one._agent = agent = FakeAgent({0: ["policy_error"], 2: ["policy_error"]})
        with pytest.raises(GroupFailed) as failed:
            await one.play(lease())
        assert failed.value.outcome == "engine_error" and len(agent.wanted) == N, "no second attempt"
        await one.close()


async def test_after_a_deadline_the_same_sessions_play_the_next_sample() -> None:
    with FakeEnvServer() as fake:
        one = player(fake.url, FakeAgent({2: ["hang", "finished"]}))
        with pytest.raises(GroupFailed, match=r"not over after 0\.3 s") as failed:
            await within(one, lease(0.3))
        assert failed.value.outcome == "timeout"
        assert len((await within(one, lease())).outcomes) == N
        await one.close()
        await asyncio.sleep(0.05)
        assert fake.open == 0


async def test_an_error_of_the_agent_is_not_taken_for_one_of_the_environment() -> None:
    with FakeEnvServer() as fake:
        one = player(fake.url, FakeAgent({0: [KeyError("a bug")]}))
        with pytest.raises(RuntimeError, match="rollouts failed"):
            await one.play(lease())
        await one.close()


async def test_a_server_that_is_away_fails_the_sample() -> None:
    with FakeEnvServer() as fake:
        url = fake.url
    one = player(url, FakeAgent({}))
    with pytest.raises(GroupFailed) as failed:
        await one.play(lease())
    assert failed.value.outcome == "env_error"
    await one.close()


async def test_a_server_that_comes_back_is_waited_for_before_and_in_a_sample() -> None:
    with FakeEnvServer() as fake:
        one, port = player(fake.url, FakeAgent({}), retries=1), int(fake.url.rpartition(":")[2])
        one._patience_s = 20.0
        await one.play(lease())
    waiting = asyncio.create_task(one.play(lease()))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "a sample in front of a dead server waits"
    with FakeEnvServer(port=port):
        played = await waiting
        assert [o.status for o in played.outcomes] == ["finished"] * N and set(played.failures) <= {"connection_lost"}
        await asyncio.gather(*(env.close() for env in one._pool.envs))
    waiting = asyncio.create_task(one.play(lease()))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "nor does one fail that finds all sessions lost"
    with FakeEnvServer(port=port):
        assert len((await waiting).outcomes) == N
        await one.close()


async def test_the_turn_agent_plays_to_the_end_and_gives_its_row_back() -> None:
    llm = FakeTokens()
    with FakeEnvServer() as fake:
        one = player(fake.url, TurnAgent(LossyChat(), Limits(4, 500, 8, 200)), llm)
        played = await one.play(lease())
        await one.close()
    assert all(o.valid for o in played.outcomes), played.outcomes[0]
    assert sorted(llm.freed) == [10, 11, 12] and {r.slot for r in llm.requests} == {10, 11, 12}
    for o in played.outcomes:
        assert len(o.completion_ids) == len(o.logprobs) == len(o.versions) == len(o.loss_mask)
        assert {v for v, mine in zip(o.versions, o.loss_mask, strict=True) if mine} == {3}


async def test_an_engine_or_an_environment_that_fails_is_an_outcome_and_never_a_reward() -> None:
    llm = FakeTokens(broken=True)
    agent = TurnAgent(LossyChat(), Limits(4, 500, 8, 200))
    with FakeEnvServer() as fake:
        one = player(fake.url, agent, llm, least=1, retries=0)
        with pytest.raises(GroupFailed, match="policy_error: no generation worker") as failed:
            await one.play(lease())
        await one.close()
    assert failed.value.outcome == "engine_error" and sorted(llm.freed) == [10, 11, 12]

    class LostEnv:
        async def reset(self) -> Any:
            raise ConnectionLost("gone")

        async def step(self, command: str) -> Any:
            raise AssertionError(command)

    lost = await agent.play(LostEnv(), RolloutRequest(0, {}, 0), llm, 4)
    assert (lost.valid, lost.reward, lost.status) == (False, None, "connection_lost") and llm.freed[-1] == 4


def test_a_sample_is_reset_with_the_task_of_its_lease() -> None:
    assert reset_arguments(lease(), chaos=True) == {"task": {"k": 1}, "seed": 5, "chaos": True}
