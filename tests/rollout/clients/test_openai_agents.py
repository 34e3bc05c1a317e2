"""The OpenAI Agents SDK at its defaults, which is the Responses API, plays against the endpoint:
what is trained is what was sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pydantic
import pytest
import pytest_asyncio

from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_sessions import Ending, OpenAiSession
from tests.rollout.black_box import Endpoint, FakeTokens, check_trained, plays, served, serving

agents = pytest.importorskip("agents", reason="make test-agents installs openai-agents")
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=6000, turn_tokens=200, max_turns=40)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    # Traces would be sent to OpenAI.
    agents.set_tracing_disabled(True)
    async with serving(LIMITS) as up:
        yield up


@asynccontextmanager
async def player(
    endpoint: Endpoint, tokens: FakeTokens, **fields: Any
) -> AsyncIterator[tuple[OpenAiSession, Any]]:
    """A session of ``tokens``, and what runs an agent with a tool in it."""
    async with served(endpoint, tokens) as (_, session, client):

        @agents.function_tool
        def look(x: int) -> str:
            """Look."""
            return f"seen {x}"

        agent = agents.Agent(name="looker", instructions="be brief", tools=[look], **fields)
        provider = agents.OpenAIProvider(openai_client=client)
        config = agents.RunConfig(model_provider=provider)

        async def run(given: Any, *, stream: bool = False, **more: Any) -> Any:
            if not stream:
                return await agents.Runner.run(agent, given, run_config=config, **more)
            result = agents.Runner.run_streamed(agent, given, run_config=config, **more)
            async for _ in result.stream_events():
                pass
            return result

        yield session, run


@pytest.mark.parametrize("chained", [False, True], ids=["items", "previous"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_turns_with_tools_and_a_branch(server: Any, stream: bool, chained: bool) -> None:
    tokens = FakeTokens(plays)
    async with player(server, tokens) as (session, run):
        more = {"auto_previous_response_id": True} if chained else {}
        result = await run("task", stream=stream, **more)
        assert result.final_output == "done" and session.ledger.turns == 3
        if chained:
            again = {"previous_response_id": result.last_response_id}
            following: Any = "more"
        else:
            again = {}
            following = [*result.to_input_list(), {"role": "user", "content": "more"}]
        second = await run(following, stream=stream, **again)
        assert second.final_output == "done" and session.ledger.turns == 4
        assert result.context_wrapper.usage.output_tokens + (
            second.context_wrapper.usage.output_tokens
        ) == len(tokens.sampled)
        (outcome,) = session.outcomes(Ending("finished", 1.0))
        check_trained(outcome, tokens)
        await run(following, stream=stream, **again)
        main, fork = session.ledger.branches
        at = len(main.tokens.prompt_ids) + main.marks[2].tokens
        assert fork.tokens.prompt_ids[:at] == main.tokens.prefix()[:at]


class Seen(pydantic.BaseModel):
    """Type of an agent's output."""

    x: int


async def test_an_output_type_is_checked(server: Any) -> None:
    tokens = FakeTokens(lambda _: '<think>so</think>\n{"x": 3}')
    async with player(server, tokens, output_type=Seen) as (session, run):
        result = await run("task")
        assert result.final_output == Seen(x=3) and not session.ledger.broken
        check_trained(session.outcomes(Ending("finished", 1.0))[0], tokens)
    async with player(server, FakeTokens(lambda _: "three"), output_type=Seen) as (session, run):
        with pytest.raises(agents.exceptions.ModelBehaviorError):
            await run("task")
        assert session.ledger.broken == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_turn_that_is_cut_ends_the_episode_as_truncated(server: Any, stream: bool) -> None:
    """The SDK raises an error for it."""
    async with player(server, FakeTokens(plays, finish="length")) as (session, run):
        with pytest.raises(agents.exceptions.ModelBehaviorError) as raised:
            await run("task", stream=stream)
        assert session.find_limit(raised.value) == "token_budget"
        (outcome,) = session.outcomes(Ending("token_budget", 0.5))
        assert outcome.valid and outcome.reward == 0.5 and len(outcome.turns) == 1
