"""Black-box agents in front of a fake environment: the example with the real ``openai`` package,
and bad ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from experiments.openai_agent import rollout
from realhf.api.config import GenConfig
from realhf.api.environment import EnvironmentFailure, Task
from realhf.api.experiment import RolloutOptions
from realhf.api.rollout import RolloutOutcome
from realhf.aws.environment import AwsEnvironment
from realhf.rollout.black_box_agent import AgentFunction, AgentSession, BlackBoxAgent, load_agent
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import SlotEnvironment, make_agent
from tests.rollout.black_box import FakeTokens, chat
from tests.rollout.fake_env_server import FakeEnvServer

WANTED = EpisodeRequest(0, Task("t-1", "warmup", {}, seed=11), 5)
LIMITS = EpisodeLimits(max_turns=5, max_total_tokens=600, turn_tokens=40)


@pytest.fixture
def fake() -> Iterator[FakeEnvServer]:
    with FakeEnvServer() as server:
        yield server


async def play(
    server: FakeEnvServer,
    function: AgentFunction,
    tokens: FakeTokens,
    *,
    timeout_s: float = 20.0,
    retries: int = 0,
) -> RolloutOutcome:
    agent = BlackBoxAgent(function, chat(), LIMITS, timeout_s=timeout_s)
    env = SlotEnvironment(
        "aws",
        lambda: AwsEnvironment(server.url),
        message_timeout_s=5.0,
        patience_s=0.0,
    )
    env.prepare(retries)
    try:
        return await agent.play(env, WANTED, tokens, 2)
    finally:
        await agent.close()
        await env.close()
        assert 2 in tokens.freed or not tokens.requests


@pytest.mark.slow
async def test_every_conversation_of_an_agent_is_a_trajectory(fake: FakeEnvServer) -> None:
    """With one reward for all, or with one for each that the agent names by its completions."""
    kept: dict[str, float] = {}

    async def talks(task: Any, base_url: str, session: AgentSession, *, shared: bool) -> Any:
        for words, value in (("task", 1.0), ("help", -1.0), ("lost", None)):
            reply = (await ask(base_url, words)).json()
            if value is not None:
                kept[reply["id"]] = value
        return 0.5 if shared else kept

    for shared, rewards in ((True, [0.5] * 3), (False, [1.0, -1.0])):
        kept.clear()
        main = await play(fake, partial(talks, shared=shared), FakeTokens(commands))
        outcomes = [main, *main.branches]
        found = {tuple(outcome.prompt_ids): outcome.reward for outcome in outcomes}
        words = ["task", "help", "lost"][: len(rewards)]
        assert found == {
            tuple(chat().first(text)): reward for text, reward in zip(words, rewards, strict=True)
        }
        assert all(
            outcome.valid and outcome.seed == 11 and outcome.task_id == "t-1"
            for outcome in outcomes
        )


def commands(prompt: str) -> str:
    """A first turn without a command, then two commands."""
    return ("hm", "aws s3 ls", "aws s3api list-buckets")[min(2, prompt.count("<|user|>") - 1)]


@pytest.mark.slow
async def test_the_example_plays_an_episode(fake: FakeEnvServer) -> None:
    tokens = FakeTokens(commands)
    outcome = await play(fake, load_agent("experiments.openai_agent:rollout"), tokens)
    assert outcome.status == "achieved" and outcome.achieved and outcome.progress == 1.0
    assert outcome.reward == 1.0, "the environment's, as the agent reports none"
    assert [turn.text for turn in outcome.turns] == ["hm", "aws s3 ls", "aws s3api list-buckets"]
    assert outcome.turns[1].output == "aws s3 ls" and outcome.prompt_ids == chat().first("task")
    assert (outcome.task_id, outcome.group, outcome.seed, outcome.task_text) == (
        "t-1",
        "warmup",
        11,
        "task",
    )
    assert {request.seed for request in tokens.requests} == {5} and outcome.timings["branches"] == 1


@pytest.mark.slow
async def test_a_lost_environment_is_resumed_behind_the_agents_back() -> None:
    lost = iter([None, None, "drop"])
    with FakeEnvServer(lambda number, message: next(lost, None)) as server:
        outcome = await play(server, rollout, FakeTokens(commands), retries=1)
        assert outcome.status == "achieved" and server.connections == 2


@pytest.mark.slow
@pytest.mark.parametrize(("trick", "status"), [("drop", "lost"), ("error", "internal")])
async def test_a_failed_environment_is_no_reward_even_if_the_agent_says_so(
    trick: str, status: str
) -> None:
    async def forgiving(task: Any, base_url: str, session: AgentSession) -> float:
        for _ in range(2):
            with pytest.raises(EnvironmentFailure):
                await session.step("aws s3 ls")
        return 1.0

    with FakeEnvServer(
        lambda number, message: trick if message["type"] == "step" else None
    ) as server:
        outcome = await play(server, forgiving, FakeTokens(commands))
    assert outcome.status == status and outcome.reward is None and not outcome.valid
    with FakeEnvServer(
        lambda number, message: trick if message["type"] == "reset" else None
    ) as server:
        assert (await play(server, rollout, FakeTokens(commands))).status == status


async def ask(base_url: str, words: str = "task") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        body = {"messages": [{"role": "user", "content": words}]}
        return await http.post(f"{base_url}/chat/completions", json=body)


@pytest.mark.slow
async def test_the_agents_own_reward_wins(fake: FakeEnvServer) -> None:
    async def returns(task: Any, base_url: str, session: AgentSession) -> float:
        await ask(base_url)
        await session.step("aws s3 ls")
        return 0.25

    async def reports(task: Any, base_url: str, session: AgentSession) -> None:
        await ask(base_url)
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            await http.post(f"{base_url.removesuffix('/v1')}/reward", json={"reward": -1})

    first = await play(fake, returns, FakeTokens(commands))
    assert (first.status, first.reward, first.progress) == ("finished", 0.25, 0.5)
    second = await play(fake, reports, FakeTokens(commands))
    assert (second.status, second.reward) == ("finished", -1.0)


@pytest.mark.slow
async def test_an_agent_that_fails_fails_alone(fake: FakeEnvServer) -> None:
    async def raises(task: Any, base_url: str, session: AgentSession) -> None:
        await ask(base_url)
        raise KeyError("lost my keys")

    async def hangs(task: Any, base_url: str, session: AgentSession) -> None:
        await ask(base_url)
        await asyncio.sleep(60)

    async def is_silent(task: Any, base_url: str, session: AgentSession) -> float:
        return 1.0

    async def is_vague(task: Any, base_url: str, session: AgentSession) -> Any:
        await ask(base_url)
        return float("nan")

    for function, words in [
        (raises, "KeyError"),
        (hangs, "not done after 0.3 s"),
        (is_silent, "requested no turn"),
        (is_vague, "not a reward"),
    ]:
        outcome = await play(
            fake, function, FakeTokens(commands), timeout_s=0.3 if function is hangs else 60.0
        )
        assert outcome.status == "agent" and outcome.reward is None and words in outcome.message, (
            outcome
        )


@pytest.mark.slow
async def test_an_engine_that_fails_is_named_and_a_limit_is_no_failure(fake: FakeEnvServer) -> None:
    tokens = FakeTokens(commands)
    tokens.fail = 99

    async def impatient(task: Any, base_url: str, session: AgentSession) -> None:
        (await ask(base_url)).raise_for_status()

    outcome = await play(fake, impatient, tokens)
    assert outcome.status == "policy" and outcome.message == "no generation worker is there"
    chatty = await play(fake, rollout, FakeTokens(lambda prompt: "hm"))
    assert (chatty.status, chatty.reward, len(chatty.turns)) == ("max_turns", 0.0, 5)
    assert chatty.out_of_turns


@pytest.mark.slow
async def test_a_failed_engine_is_the_policys_until_a_later_turn_succeeds(
    fake: FakeEnvServer,
) -> None:
    """Whether or not the agent says so: one that swallows it is not scored, one that mends it
    answers for the rest."""

    async def asks_twice(task: Any, base_url: str, session: AgentSession, *, breaks: bool) -> float:
        for _ in range(2):
            await ask(base_url)
        if breaks:
            raise KeyError("answer")
        return 0.25

    for fail, breaks, status in [
        (2, False, "policy"),
        (2, True, "policy"),
        (1, False, "finished"),
        (1, True, "agent"),
    ]:
        tokens = FakeTokens(commands)
        tokens.fail = fail
        outcome = await play(fake, partial(asks_twice, breaks=breaks), tokens)
        assert outcome.status == status, (fail, breaks, outcome.status, outcome.message)
        assert outcome.reward == (0.25 if status == "finished" else None)

    async def lives_with_it(task: Any, base_url: str, session: AgentSession) -> float:
        tokens.fail = 0
        tokens.hold = asyncio.Event()
        asking = asyncio.ensure_future(ask(base_url))
        while not tokens.requests:
            await asyncio.sleep(0.005)
        tokens.fail = 1
        failed = await ask(base_url)
        tokens.hold.set()
        return 0.25 if failed.status_code == 503 and (await asking).status_code == 200 else 1.0

    tokens = FakeTokens(commands)
    outcome = await play(fake, lives_with_it, tokens)
    assert outcome.status == "policy", "a turn that was asked for before mends nothing"


@pytest.mark.slow
async def test_a_limit_excuses_its_own_exception_alone(fake: FakeEnvServer) -> None:
    """An error of the agent after a refused turn is its own; a refusal counts whatever client
    raises it, also behind another exception. An agent that goes on after a refusal was not cut."""

    async def refused(base_url: str) -> httpx.Response:
        await ask(base_url)
        return await ask(base_url, "word " * 300)

    async def raises_the_refusal(task: Any, base_url: str, session: AgentSession) -> None:
        (await refused(base_url)).raise_for_status()

    async def wraps_the_refusal(task: Any, base_url: str, session: AgentSession) -> None:
        try:
            await raises_the_refusal(task, base_url, session)
        except httpx.HTTPStatusError as error:
            raise RuntimeError("no answer") from error

    async def is_wrong_itself(task: Any, base_url: str, session: AgentSession) -> None:
        try:
            await raises_the_refusal(task, base_url, session)
        except httpx.HTTPStatusError:
            raise KeyError("answer") from None

    async def is_slow(task: Any, base_url: str, session: AgentSession) -> None:
        await refused(base_url)
        await asyncio.sleep(60)

    async def gives_up(task: Any, base_url: str, session: AgentSession) -> float:
        return 0.25 if (await refused(base_url)).status_code == 400 else 1.0

    async def goes_on(task: Any, base_url: str, session: AgentSession) -> float:
        await refused(base_url)
        await ask(base_url)
        return 0.25

    for function, status in [
        (raises_the_refusal, "token_budget"),
        (wraps_the_refusal, "token_budget"),
        (is_wrong_itself, "agent"),
        (is_slow, "agent"),
        (gives_up, "token_budget"),
        (goes_on, "finished"),
    ]:
        outcome = await play(
            fake, function, FakeTokens(commands), timeout_s=0.3 if function is is_slow else 20.0
        )
        assert outcome.status == status, (function.__name__, outcome.status, outcome.message)


@pytest.mark.slow
async def test_a_reward_may_be_any_number(fake: FakeEnvServer) -> None:
    """Of numpy or torch, in a map too; text and arrays of several are none."""

    async def pays(
        task: Any, base_url: str, session: AgentSession, *, reward: Any, named: bool
    ) -> Any:
        reply = (await ask(base_url)).json()["id"]
        return {reply: reward} if named else reward

    for reward in (
        np.float32(0.25),
        np.array(0.25),
        torch.tensor(0.25),
        torch.tensor(0.25, requires_grad=True),
    ):
        for named in (False, True):
            outcome = await play(
                fake, partial(pays, reward=reward, named=named), FakeTokens(commands)
            )
            assert outcome.reward == 0.25 and type(outcome.reward) is float, (
                reward,
                outcome.message,
            )
    for reward in (np.array([0.25, 0.5]), "0.25", np.float32("nan"), torch.tensor([0.25])):
        outcome = await play(fake, partial(pays, reward=reward, named=False), FakeTokens(commands))
        assert outcome.status == "agent" and "is not a reward" in outcome.message


@pytest.mark.slow
async def test_after_the_end_nothing_is_executed(fake: FakeEnvServer) -> None:
    async def eager(task: Any, base_url: str, session: AgentSession) -> None:
        await ask(base_url)
        results = await asyncio.gather(*(session.step(f"aws {n}") for n in range(4)))
        assert [result.done for result in results] == [False, True, True, True]
        assert results[3].text == "error: the episode is over"

    outcome = await play(fake, eager, FakeTokens(commands))
    assert outcome.status == "achieved" and outcome.reward == 1.0
    assert sum(message["type"] == "step" for _, message in fake.messages) == 2


def test_the_option_makes_the_agent() -> None:
    options = RolloutOptions(
        "aws",
        group_size=2,
        sessions=2,
        gen=GenConfig(max_new_tokens=8),
        max_turns=2,
        max_total_tokens=100,
    )
    assert isinstance(
        make_agent("experiments.openai_agent:rollout", chat(), "", options), BlackBoxAgent
    )
    with pytest.raises(ValueError, match=r"rollout.agent='a:b' names no agent"):
        make_agent("a:b", chat(), "", options)


async def patient(
    task: Any, base_url: str, session: AgentSession, *, patience: int = 1
) -> float | None:
    """An agent with an option of its own."""
    del task, base_url, session
    return float(patience)


async def test_an_agent_is_called_with_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_agent", SimpleNamespace(patient=patient))
    assert await load_agent("own_agent:patient", {"patience": 3})({}, "url", None) == 3.0  # type: ignore[arg-type]
    assert await load_agent("own_agent:patient")({}, "url", None) == 1.0  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"'own_agent:patient' cannot be called with \(task, base_url, session, patients=...\)",
    ):
        load_agent("own_agent:patient", {"patients": 3})


def test_the_built_in_agent_has_no_options_of_its_own() -> None:
    episodes = RolloutOptions("aws", group_size=2, sessions=2)
    with pytest.raises(
        ValueError, match=r"the built-in agent has no options of its own: patience would do nothing"
    ):
        make_agent("", chat(), "", episodes, {"patience": 3})


@pytest.mark.parametrize(
    "name", ["nowhere:solve", "experiments.openai_agent:nobody", "json:dumps", "solve", ""]
)
def test_a_name_of_no_agent_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"agent|async"):
        load_agent(name)
