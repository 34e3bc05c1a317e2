"""A program that calls a model is played in turns: its calls are what the policy reads, answers go
back over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from realhf.api.environment import AssistantMessage, ToolCall
from realhf.env.adapters.policy_endpoint import (
    SECRET_HEADER,
    ModelConversation,
    PolicyEndpoint,
    Unplayable,
    read_messages,
)

SYSTEM = {"role": "developer", "content": "Be short."}
QUESTION = {"role": "user", "content": "How many?"}


@asynccontextmanager
async def called() -> AsyncIterator[
    tuple[PolicyEndpoint, ModelConversation, httpx.AsyncClient, str]
]:
    """An endpoint with one conversation, and a client that knows the secret."""
    endpoint = PolicyEndpoint()
    await endpoint.start()
    conversation = ModelConversation()
    name = endpoint.add(conversation)
    try:
        async with httpx.AsyncClient(
            base_url=endpoint.url,
            headers={SECRET_HEADER: endpoint.secret},
            timeout=300,
            trust_env=False,
        ) as client:
            yield endpoint, conversation, client, name
    finally:
        await endpoint.stop()


async def test_calls_are_turns_of_one_conversation() -> None:
    async with called() as (_, conversation, client, name):
        tools = [
            {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
        ]
        body: dict[str, Any] = {"model": name, "messages": [SYSTEM, QUESTION], "tools": tools}
        first = asyncio.create_task(client.post("/chat/completions", json=body))
        call = await conversation.calls.get()
        assert [message["role"] for message in conversation.new_messages(call)] == [
            "system",
            "user",
        ]
        assert call.tools == tools
        made = (
            ToolCall("count", {"of": "eggs"}, id="c1"),
            ToolCall("", text="<tool_call>{", problem="no JSON"),
        )
        conversation.answer_call(call, AssistantMessage("I count.\ud800", made))
        choice = (await first).json()["choices"][0]
        assert (
            choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I count.?"
        )
        one, other = choice["message"]["tool_calls"]
        assert one["id"] == "c1" and json.loads(one["function"]["arguments"]) == {"of": "eggs"}
        assert other["function"] == {"name": "unknown", "arguments": "<tool_call>{"}
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": [{"type": "text", "text": "3"}]}
            for each in (one, other)
        ]
        body["messages"] = [SYSTEM, QUESTION, choice["message"], *results]
        second = asyncio.create_task(client.post("/chat/completions", json=body))
        call = await conversation.calls.get()
        assert [message["content"] for message in conversation.new_messages(call)] == ["3", "3"]
        conversation.answer_call(call, AssistantMessage("three"))
        assert (await second).json()["choices"][0] == {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "three"},
        }


async def test_a_call_that_waits_is_refused_when_the_episode_ends() -> None:
    async with called() as (endpoint, conversation, client, name):
        body = {"model": name, "messages": [QUESTION]}
        waiting = asyncio.create_task(client.post("/chat/completions", json=body))
        await conversation.calls.get()
        endpoint.remove(name)
        assert (await waiting).status_code == 400
        assert (await client.post("/chat/completions", json=body)).status_code == 404


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "wizard", "content": "x"}],
        ["x"],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_messages_that_are_no_text_cannot_be_played(messages: Any) -> None:
    with pytest.raises(Unplayable):
        read_messages(messages)


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "Another question"},
            {"role": "assistant", "content": "three"},
        ],
        [QUESTION],
        [QUESTION, QUESTION],
    ],
)
async def test_a_program_that_changes_its_conversation_cannot_be_played(
    messages: list[Any],
) -> None:
    async with called() as (_, conversation, client, name):
        for number, sent in enumerate(([QUESTION], messages)):
            waiting = asyncio.create_task(
                client.post("/chat/completions", json={"model": name, "messages": sent})
            )
            call = await conversation.calls.get()
            if number:
                with pytest.raises(Unplayable, match="changed the conversation"):
                    conversation.new_messages(call)
            else:
                conversation.new_messages(call)
            conversation.answer_call(call, AssistantMessage("three"))
            await waiting


async def test_only_those_who_know_the_secret_are_answered() -> None:
    async with called() as (_, conversation, client, name):
        body = {"model": name, "messages": [QUESTION]}
        for header in ({SECRET_HEADER: "guess"}, {SECRET_HEADER: ""}):
            assert (
                await client.post("/chat/completions", json=body, headers=header)
            ).status_code == 401
        assert (await client.get("/models")).status_code == 404
        for content in (
            b"",
            b"not JSON",
            b"[1]",
            b"[" * 100_000,
            b'{"model": ["x"]}',
            b'{"model": "none"}',
        ):
            assert (await client.post("/chat/completions", content=content)).status_code in (
                400,
                404,
            )
        assert conversation.calls.empty()


@pytest.mark.parametrize("head", [b"x: " + b"y" * (1 << 16), (b"x: " + b"y" * 4000 + b"\r\n") * 20])
async def test_a_head_beyond_its_bound_is_refused(head: bytes) -> None:
    """Before the secret is looked at."""
    async with called() as (endpoint, _, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(endpoint.url).port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + head)
        async with asyncio.timeout(60):
            assert (await reader.read(12)) == b"HTTP/1.1 431"
        writer.close()


async def test_bytes_that_are_no_request_cost_nobody_else_an_answer() -> None:
    async with called() as (endpoint, conversation, client, name):
        port = httpx.URL(endpoint.url).port
        for raw in (
            b"\x00\xff\n\n",
            b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
            b"x" * 200_000,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            writer.write_eof()
            async with asyncio.timeout(60):
                with suppress(ConnectionResetError):
                    assert b"200 OK" not in await reader.read()
            writer.close()
        waiting = asyncio.create_task(
            client.post("/chat/completions", json={"model": name, "messages": [QUESTION]})
        )
        conversation.answer_call(await conversation.calls.get(), AssistantMessage("still here"))
        assert (await waiting).status_code == 200
