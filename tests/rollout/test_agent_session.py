"""What an agent says to its environment and what it hears: tools through the real ``openai``
package, and bad words."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from realhf.api.environment import AssistantMessage, Environment, Opening, Task, Turn
from realhf.api.rollout import RolloutOutcome
from realhf.env.loader.load import build_environment
from realhf.rollout.black_box_agent import AgentFunction, AgentSession, BlackBoxAgent, load_agent
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from tests.rollout.black_box import FakeTokens, chat
from tests.rollout.branching_agent import rollout as branching

LIMITS = EpisodeLimits(max_turns=6, max_total_tokens=4000, turn_tokens=200)
LOCK = Path(__file__).resolve().parents[2] / "examples" / "your_environment.py"
SAYS = "<|assistant|>"
BROKEN = '<tool_call>{"name": "turn", "arguments": {"digit": }</tool_call>'


def turned(digit: int) -> str:
    return f'<tool_call>{{"name": "turn", "arguments": {{"digit": {digit}}}}}</tool_call>'


class Listener:
    """An environment that writes down what it hears."""

    def __init__(self, done_after: int = 9) -> None:
        self.heard: list[AssistantMessage] = []
        self._done_after = done_after

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        return Opening([{"role": "user", "content": f"task {task['n']}"}], TOOLS)

    async def step(self, message: AssistantMessage) -> Turn:
        self.heard.append(message)
        return Turn(
            [{"role": "user", "content": "go on"}],
            done=len(self.heard) >= self._done_after,
            reward=0.25,
        )

    async def close(self) -> None:
        """Nothing to close."""


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "turn",
            "parameters": {"type": "object", "properties": {"digit": {"type": "integer"}}},
        },
    }
]


async def play(
    env: Environment,
    function: AgentFunction,
    tokens: FakeTokens,
    *,
    seed: int = 3,
    system: str = "be brief",
) -> RolloutOutcome:
    agent = BlackBoxAgent(function, chat(), LIMITS, system, timeout_s=60)
    try:
        return await agent.play(
            env, EpisodeRequest(0, Task("t", "g", {"n": 7}, seed=seed), 5), tokens, 2
        )
    finally:
        await agent.close()


@pytest.mark.slow
async def test_the_opening_of_the_environment_is_what_the_agent_finds() -> None:
    found: list[Any] = []

    async def looks(task: Mapping[str, Any], base_url: str, session: AgentSession) -> float:
        found.append(
            (
                task,
                session.messages,
                session.tools,
                session.text,
                session.id,
                session.group,
                session.seed,
            )
        )
        return 1.0

    await play(Listener(), looks, FakeTokens(lambda _: "hm"))
    told = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "task 7"}]
    assert found == [({"n": 7}, told, TOOLS, "task 7", "t", "g", 3)]


@pytest.mark.slow
async def test_a_completion_reaches_the_environment_as_the_policy_said_it() -> None:
    """With its reasoning, its sampled tokens and the call that could not be read; the ids of the
    others are those that the agent was given."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    env = Listener()
    given = []

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> None:
        http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
        async with AsyncOpenAI(base_url=base_url, api_key="x", http_client=http) as ai:
            reply = await ai.chat.completions.create(
                model="m", messages=session.messages, tools=session.tools
            )  # type: ignore[arg-type]
        given.append(reply.choices[0].message)
        await session.step(given[0])
        await session.step(given[0].model_dump())
        await session.step({"role": "assistant", "content": "my own words"})

    outcome = await play(
        env, agent, FakeTokens(lambda _: f"<think>well</think>I turn.\n{BROKEN}{turned(4)}")
    )
    first, again, own = env.heard
    assert (
        first == again
        and first.reasoning == "well"
        and first.content == "I turn."
        and first.token_count > 20
    )
    assert [bool(call.problem) for call in first.tool_calls] == [True, False]
    assert first.tool_calls[1].id == given[0].tool_calls[0].id and first.tool_calls[
        1
    ].arguments == {"digit": 4}
    assert own == AssistantMessage("my own words", text="my own words")
    assert outcome.reward == 0.75 and outcome.status == "finished"


@pytest.mark.slow
async def test_calls_of_the_agents_own_are_read_and_bad_ones_reach_the_environment_with_the_reason() -> (
    None
):
    env = Listener()

    def call(arguments: str) -> dict[str, Any]:
        # A message that was put together from a stream has gaps.
        kind = None if arguments == "" else "function"
        return {
            "id": kind and "c1",
            "type": kind,
            "function": {"name": "turn", "arguments": arguments},
        }

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> float:
        for arguments in ('{"digit": 3}', "", "[1]", '{"digit": 1e999}', "{}}"):
            await session.step(
                {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
            )
        return 0.0

    await play(env, agent, FakeTokens(lambda _: "hm"))
    calls = [message.tool_calls[0] for message in env.heard]
    assert [call.arguments for call in calls] == [{"digit": 3}, {}, {}, {}, {}]
    assert [bool(call.problem) for call in calls] == [False, False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "words"),
    [
        (None, "NoneType"),
        (3, "int"),
        ({"role": "user", "content": "x"}, "'user'"),
        ({"content": [1]}, "content"),
        ({"tool_calls": "turn"}, "tool_calls: Input should be a valid list"),
        ({"tool_calls": [{"id": "c"}]}, "tool_calls.0.function: Field required"),
        ({"tool_calls": [None]}, "tool_calls.0"),
        (
            {"tool_calls": [{"function": {"name": "turn", "arguments": {}}}]},
            "arguments: Input should be",
        ),
    ],
)
async def test_what_is_no_message_ends_the_episode_as_the_agents_fault(
    message: Any, words: str
) -> None:
    env = Listener()

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> None:
        await session.step(message)

    outcome = await play(env, agent, FakeTokens(lambda _: "hm"))
    assert outcome.status == "agent" and words in outcome.message and not env.heard, outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError()])
async def test_an_agent_that_exits_or_cancels_itself_ends_its_own_episode_alone(
    error: BaseException,
) -> None:
    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> None:
        raise error

    assert (await play(Listener(), agent, FakeTokens(lambda _: "hm"))).status == "agent"


@pytest.mark.slow
async def test_an_episode_that_is_cancelled_from_outside_stays_cancelled() -> None:
    begun = asyncio.Event()

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> None:
        begun.set()
        await asyncio.Event().wait()

    playing = asyncio.ensure_future(play(Listener(), agent, FakeTokens(lambda _: "hm")))
    await asyncio.wait_for(begun.wait(), 60)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.slow
async def test_what_an_agent_leaves_running_does_not_reach_the_environment_any_more() -> None:
    """One step is under way when the agent returns, and one comes after; the slot is another
    episode's by then."""
    env = Listener()
    left = []
    begun = asyncio.Event()

    async def held(message: AssistantMessage) -> Turn:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody waits for it")

    async def late(session: AgentSession) -> Any:
        await asyncio.gather(*left[:1], return_exceptions=True)
        return await session.step("late")

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> float:
        env.step = held  # type: ignore[method-assign]
        left.append(asyncio.ensure_future(session.step("first")))
        await begun.wait()
        left.append(asyncio.ensure_future(late(session)))
        return 1.0

    await play(env, agent, FakeTokens(lambda _: "hm"))
    first, second = await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 60)
    assert isinstance(first, asyncio.CancelledError) and second.done and "over" in second.text


@pytest.mark.slow
async def test_an_agent_with_tools_opens_two_branches_and_fails_in_some_episodes() -> None:
    """On a class with tools: every branch is a row with a reward of its own, and every row holds
    exactly what the engine saw and sampled."""
    spec = build_environment(f"{LOCK}:Lock", {})
    found = Counter()
    for digit in range(12):
        tokens = FakeTokens(
            lambda prompt, first=digit: (
                f"<think>?</think>{turned(first + prompt.count(SAYS))}{BROKEN}"
            )
        )
        env = spec.make("")
        outcome = await play(env, branching, tokens)
        await env.close()
        rows = [outcome, *outcome.branches]
        found[outcome.status, len(rows)] += 1
        seen = [list(request.token_ids) for request in tokens.requests]
        for row in rows:
            whole = row.prompt_ids + row.completion_ids
            begins = [
                n for n, on in enumerate(row.loss_mask) if on and not (n and row.loss_mask[n - 1])
            ]
            assert begins and all(whole[: len(row.prompt_ids) + begin] in seen for begin in begins)
        assert sum(sum(row.loss_mask) for row in rows) == sum(tokens.said), (
            "every sampled token is in one row"
        )
    assert {("agent", 1), ("finished", 1), ("finished", 2)} <= found.keys(), found


def test_an_agent_is_found_in_a_file_and_its_faults_are_told_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("async def rollout(task, base_url, session):\n    return 1.0\n")
    assert asyncio.run(load_agent(f"{file}:rollout")({}, "", SimpleNamespace())) == 1.0  # type: ignore[arg-type]
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ny = x / 0\n")
    short = tmp_path / "short.py"
    short.write_text("async def rollout(task, base_url):\n    return 1.0\n")
    for name, words in [
        (f"{broken}:rollout", "broken.py, line 2"),
        (f"{tmp_path}/nowhere.py:rollout", "there is no file"),
        (f"{short}:rollout", r"cannot be called with \(task, base_url, session\)"),
        (f"{file}:other", "is not an async function"),
        (str(file), "file.py:function or module:function"),
    ]:
        with pytest.raises(ValueError, match=words):
            load_agent(name)


class Block(BaseModel):
    """Block of content as an object of a client's package."""

    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("api", "form"), [("responses", "whole"), ("messages", "whole"), ("messages", "blocks")]
)
async def test_an_answer_of_another_api_reaches_the_environment_as_the_policy_said_it(
    api: str, form: str
) -> None:
    env = Listener(done_after=1)
    said = f"<think>so</think>I turn.{turned(4)}{BROKEN}"

    async def agent(task: Mapping[str, Any], base_url: str, session: AgentSession) -> None:
        import httpx

        (tool,) = (each["function"] for each in session.tools)
        if api == "responses":
            function = {"type": "function", "name": tool["name"], "parameters": tool["parameters"]}
            body: Any = {"input": session.messages, "tools": [function]}
        else:
            custom = {"name": tool["name"], "input_schema": tool["parameters"]}
            system, user = session.messages
            body = {"system": system["content"], "messages": [user], "tools": [custom]}
            body |= {"model": "m", "max_tokens": 100}
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            reply = (await http.post(f"{base_url}/{api}", json=body)).json()
        sent = reply
        if form == "blocks":
            # the ``anthropic`` package returns an object for each block
            sent = {"role": "assistant", "content": [Block(**each) for each in reply["content"]]}
        assert (await session.step(sent)).done
        reply["output" if api == "responses" else "content"] = [{"type": "image"}]
        with pytest.raises(TypeError, match="image"):
            await session.step(reply)

    outcome = await play(env, agent, FakeTokens(lambda _: said))
    (heard,) = env.heard
    assert (heard.text, heard.reasoning) == (said, "so")
    assert [call.problem == "" for call in heard.tool_calls] == [True, False]
    assert heard.tool_calls[0].arguments == {"digit": 4} and len(heard.tool_calls[0].id) == 9
    assert outcome.status == "finished" and outcome.reward == 0.25
