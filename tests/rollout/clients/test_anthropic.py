"""The package ``anthropic``, unmodified, plays against the endpoint: what is trained is what was
sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_sessions import Ending, OpenAiSession
from tests.rollout.black_box import (
    Endpoint,
    FakeTokens,
    chat,
    check_trained,
    plays,
    serving,
)

anthropic = pytest.importorskip("anthropic", reason="make test-agents installs it")
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=6000, turn_tokens=200, max_turns=40)
USER = {"role": "user", "content": "task"}
TOOLS: list[Any] = [
    {
        "name": "look",
        "description": "Look.",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


@asynccontextmanager
async def agent(
    endpoint: Endpoint, tokens: FakeTokens, *, ending: str = "/v1"
) -> AsyncIterator[tuple[OpenAiSession, Any]]:
    """A session of ``tokens`` and a client of its base URL, which ends with ``ending``."""
    server, _ = endpoint
    session = server.sessions.open(tokens, slot=3, seed=7)
    address = server.base_url(session).removesuffix("/v1") + ending
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False)
    async with anthropic.AsyncAnthropic(
        base_url=address, api_key="none", max_retries=0, http_client=http
    ) as client:
        yield session, client
    server.sessions.close(session)


def results(message: Any) -> list[Any]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"seen {block.input['x']}"}
        for block in message.content
        if block.type == "tool_use"
    ]


@pytest.mark.parametrize("ending", ["", "/v1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_turns_with_tools_and_a_branch(server: Any, stream: bool, ending: str) -> None:
    tokens = FakeTokens(plays)
    async with agent(server, tokens, ending=ending) as (session, client):

        async def say(conversation: list[Any]) -> Any:
            fields = {"max_tokens": 99, "system": "be brief", "tools": TOOLS}
            if not stream:
                return await client.messages.create(model="m", messages=conversation, **fields)
            async with client.messages.stream(model="m", messages=conversation, **fields) as events:
                return await events.get_final_message()

        conversation: list[Any] = [USER]
        said = []
        for _ in range(4):
            said.append(await say(conversation))
            turn = {"role": "assistant", "content": said[-1].content}
            told = {"role": "user", "content": results(said[-1]) or "task"}
            conversation = [*conversation, turn, told]
        assert [message.stop_reason for message in said[:3]] == ["tool_use", "tool_use", "end_turn"]
        assert [block.type for block in said[1].content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert said[2].content[-1].text == "done"
        (outcome,) = session.outcomes(Ending("finished", 1.0))
        check_trained(outcome, tokens)
        await say([*conversation[:2], {"role": "user", "content": "another way"}])
        main, fork = session.ledger.branches
        at = len(main.tokens.prompt_ids) + main.marks[0].tokens
        assert fork.tokens.prompt_ids[:at] == main.tokens.prefix()[:at]


async def test_its_tool_runner(server: Any) -> None:
    @anthropic.beta_async_tool
    async def look(x: int) -> str:
        """Look."""
        return f"seen {x}"

    tokens = FakeTokens(plays)
    async with agent(server, tokens) as (session, client):
        runner = client.beta.messages.tool_runner(
            model="m", max_tokens=99, tools=[look], messages=[USER]
        )
        final = await runner.until_done()
        assert final.content[-1].text == "done" and session.ledger.turns == 3
        check_trained(session.outcomes(Ending("finished", 1.0))[0], tokens)


async def test_its_errors_and_counts(server: Any) -> None:
    async with agent(server, FakeTokens(plays)) as (session, client):
        counted = await client.messages.count_tokens(model="m", messages=[USER], tools=TOOLS)
        user_messages = [{"role": "user", "content": "task"}]
        schemas = [
            {
                "type": "function",
                "function": {
                    "name": "look",
                    "description": "Look.",
                    "parameters": TOOLS[0]["input_schema"],
                },
            }
        ]
        assert counted.input_tokens == len(chat().opening(user_messages, schemas))
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": [image]}]
            )
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as refused:
            await client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": "word " * 4000}]
            )
        assert session.find_limit(refused.value) == "token_budget"
