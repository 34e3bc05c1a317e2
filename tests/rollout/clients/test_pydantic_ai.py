"""pydantic-ai, which takes reasoning apart from the content, plays against the endpoint: its
requests continue one conversation, and what is trained is what was sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_sessions import Ending
from tests.rollout.black_box import Endpoint, FakeTokens, check_trained, plays, served, serving

pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-agents installs pydantic-ai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=6000, turn_tokens=200, max_turns=40)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


@pytest.mark.parametrize("sent_back", ["auto", "tags", "field", False], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reasoning_begins_no_conversation(
    server: Any, stream: bool, sent_back: str | bool
) -> None:
    """However the reasoning goes back; ``auto`` is the default."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    tokens = FakeTokens(plays)
    async with served(server, tokens) as (_, session, client):
        profile = OpenAIModelProfile(
            openai_chat_send_back_thinking_parts=sent_back,
            openai_chat_thinking_field="reasoning_content",
        )
        model = OpenAIChatModel(
            "policy",
            provider=OpenAIProvider(openai_client=client),
            profile=None if sent_back == "auto" else profile,
        )
        agent = pydantic_ai.Agent(model)

        @agent.tool_plain
        async def look(x: int) -> str:
            """Look."""
            return f"seen {x}"

        async def run(text: str, history: Any = None) -> Any:
            if not stream:
                return await agent.run(text, message_history=history)
            async with agent.iter(text, message_history=history) as steps:
                async for node in steps:
                    if agent.is_model_request_node(node):
                        async with node.stream(steps.ctx) as events:
                            async for _ in events:
                                pass
            return steps.result

        first = await run("task")
        assert session.ledger.turns == 3
        await run("more", first.all_messages())
        assert session.ledger.turns == 4
        (outcome,) = session.outcomes(Ending("finished", 1.0))
        check_trained(outcome, tokens)
