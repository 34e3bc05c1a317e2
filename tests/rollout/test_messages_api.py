"""The Messages API over real HTTP, with requests of the shapes that Anthropic's clients send: the
ids that are trained are those that were sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_sessions import Ending, OpenAiSession
from tests.rollout.black_box import Endpoint, FakeTokens, chat, served, serving, spelt
from tests.rollout.test_responses_api import thinks
from tests.rollout.test_tool_calls import BROKEN, TOOLS, call_text

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=4000, turn_tokens=200, max_turns=40)
FUNCTION = TOOLS[0]["function"]
CUSTOM: list[Any] = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
        "cache_control": {"type": "ephemeral"},
    }
]
USER = {"role": "user", "content": "task"}
SYSTEM = {"role": "system", "content": "be brief"}
Body = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


@asynccontextmanager
async def agent(
    endpoint: Endpoint, tokens: FakeTokens | None = None, path: str = "/messages"
) -> AsyncIterator[tuple[OpenAiSession, Callable[..., Any]]]:
    """A session, and what posts a request to it."""
    async with served(endpoint, tokens or FakeTokens(thinks)) as (server, session, _):
        http = endpoint[1]

        async def post(messages: Any, **fields: Any) -> httpx.Response:
            body = {"model": "m", "max_tokens": 9, "messages": messages, "tools": CUSTOM, **fields}
            return await http.post(server.base_url(session) + path, json=body)

        yield session, post


def read_stream(reply: httpx.Response) -> Body:
    """Return the message that the events of a stream add up to, as Anthropic's client does it."""
    message: Body = {}
    raw = ""
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        kind = event["type"]
        assert name == f"event: {kind}"
        if kind == "message_start":
            message = event["message"]
            assert message["content"] == [] and message["stop_reason"] is None
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            raw = ""
        elif kind == "content_block_delta":
            delta = event["delta"]
            block = message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                raw += delta["partial_json"]
                block["input"] = json.loads(raw)
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind in ("content_block_stop", "message_stop")
    assert kind == "message_stop"
    return message


def results(message: Body) -> list[Body]:
    return [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"seen {block['id']}"}
        for block in message["content"]
        if block["type"] == "tool_use"
    ]


def whole(message: Body) -> list[Body]:
    turn = {"role": "assistant", "content": message["content"]}
    return [turn, {"role": "user", "content": results(message) or "task"}]


def rewritten(message: Body) -> list[Body]:
    """Without thinking, a lone text as a string, results as lists of blocks, with marks of a
    cache."""
    blocks = [dict(block) for block in message["content"] if block["type"] != "thinking"]
    for block in blocks:
        block["cache_control"] = {"type": "ephemeral"}
        if block["type"] == "tool_use":
            block["input"] = dict(reversed(block["input"].items()))
    content = blocks[0]["text"] if [b["type"] for b in blocks] == ["text"] else blocks
    told = [
        each | {"content": [{"type": "text", "text": each["content"]}], "is_error": False}
        for each in results(message)
    ] or [{"type": "text", "text": "task", "cache_control": {"type": "ephemeral"}}]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": told}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("resent", [whole, rewritten])
async def test_a_conversation_keeps_the_ids_that_were_sampled(
    server: Any, resent: Callable[[Body], list[Body]], stream: bool
) -> None:
    # Anthropic's client appends /v1/messages to the base URL.
    async with agent(server, path="/v1/messages" if stream else "/messages") as (session, post):
        said: list[Body] = []
        conversation: list[Any] = [USER]
        for number in range(4):
            blocks = [{"type": "text", "text": "be brief"}]
            system = blocks if number % 2 else "be brief"
            reply = await post(conversation, system=system, stream=stream)
            assert reply.status_code == 200, reply.text
            said.append(read_stream(reply) if stream else reply.json())
            conversation = [*conversation, *resent(said[-1])]
        (outcome,) = session.outcomes(Ending("finished", 1.0))
    assert [[block["type"] for block in each["content"]] for each in said[:3]] == [
        ["tool_use"],
        ["thinking", "text", "tool_use", "tool_use"],
        ["thinking", "text"],
    ]
    assert [each["stop_reason"] for each in said[:3]] == ["tool_use", "tool_use", "end_turn"]
    assert said[0]["content"][0]["input"] == {"x": 1, "ü": [1.0, "a"]}
    assert said[1]["content"][0]["thinking"] == "hm" and said[1]["content"][0]["signature"]
    assert said[2]["content"][1]["text"] == "done"
    expected: list[int] = []
    for number, message in enumerate(said, 1):
        expected += [*spelt(thinks("<|assistant|>" * number)), chat().stop_ids[0]]
        told = [
            {
                "role": "tool",
                "tool_call_id": each["tool_use_id"],
                "content": each["content"],
                "name": "look",
            }
            for each in results(message)
        ]
        if number < 4:
            expected += chat().following_messages(told or [USER], ended=True, tools=TOOLS)
    assert outcome.prompt_ids == chat().opening([SYSTEM, USER], TOOLS)
    assert outcome.completion_ids == expected
    assert sum(outcome.loss_mask) == sum(each["usage"]["output_tokens"] for each in said)
    thinking = said[1]["usage"]["output_tokens_details"]["thinking_tokens"]
    assert thinking == len(spelt("<think>hm</think>"))


async def test_a_known_turn_answered_differently_is_a_branch(server: Any) -> None:
    async with agent(server) as (session, post):
        first = (await post([USER])).json()
        turn, told = whole(first)
        await post([USER, turn, told])
        failed = {**told["content"][0], "is_error": True}
        await post(
            [USER, turn, {"role": "user", "content": [failed, {"type": "text", "text": "x"}]}]
        )
        main, fork = session.ledger.branches
        assert fork.messages[-2].content == "x"
        assert fork.messages[-3].content == f"error: seen {first['content'][0]['id']}"
        at = len(main.tokens.prompt_ids) + main.marks[0].tokens
        assert fork.tokens.prompt_ids[:at] == main.tokens.prefix()[:at]
        edited = {"role": "assistant", "content": [{"type": "text", "text": "I look."}]}
        await post([USER, edited, {"role": "user", "content": "more"}])
        assert len(session.ledger.branches) == 3


async def test_of_equal_answers_the_one_whose_thinking_is_sent_goes_on(server: Any) -> None:
    said = iter(["<think>one</think>done", "<think>two two</think>done", "end"])
    async with agent(server, FakeTokens(lambda _: next(said))) as (session, post):
        first, _ = [(await post([USER])).json() for _ in range(2)]
        address = f"{server[0].base_url(session)}/messages/count_tokens"
        body = {"messages": [USER, *whole(first)], "model": "m", "tools": CUSTOM}
        counted = (await server[1].post(address, json=body)).json()
        last = (await post([USER, *whole(first)])).json()
        assert counted == {"input_tokens": last["usage"]["input_tokens"]}
        assert [len(branch.marks) for branch in session.ledger.branches] == [2, 1]


async def test_a_result_that_says_error_is_left_as_it_is(server: Any) -> None:
    async with agent(server) as (session, post):
        first = (await post([USER])).json()
        told = results(first)[0] | {"content": "Error: no", "is_error": True}
        await post([USER, whole(first)[0], {"role": "user", "content": [told]}])
        assert session.ledger.branches[0].messages[-2].content == "Error: no"


async def test_tokens_are_counted_before_a_turn(server: Any) -> None:
    async with agent(server, path="/messages/count_tokens") as (session, count):
        refused = await count([USER])
        assert refused.status_code == 400 and "max_tokens" in refused.text
        body = {"model": "m", "messages": [USER], "tools": CUSTOM}
        http = server[1]
        address = f"{server[0].base_url(session)}/messages"
        counted = (await http.post(f"{address}/count_tokens", json=body)).json()
        first = (await http.post(address, json=body | {"max_tokens": 1})).json()
        assert counted == {"input_tokens": first["usage"]["input_tokens"]}
        body["messages"] = [USER, *whole(first)]
        counted = (await http.post(f"{address}/count_tokens", json=body)).json()
        second = (await http.post(address, json=body | {"max_tokens": 1})).json()
        assert counted == {"input_tokens": second["usage"]["input_tokens"]}
        assert session.ledger.turns == 2 and len(session.ledger.branches) == 1


async def test_turns_that_are_cut_or_cannot_be_read(server: Any) -> None:
    async with agent(server, FakeTokens(thinks, finish="length")) as (_, post):
        assert (await post([USER])).json()["stop_reason"] == "max_tokens"
    async with agent(server, FakeTokens(lambda _: BROKEN)) as (session, post):
        first = (await post([USER])).json()
        assert first["content"][0]["text"] == BROKEN and first["stop_reason"] == "end_turn"
        await post([USER, *whole(first)])
        assert len(session.ledger.branches) == 1
    async with agent(server, FakeTokens(lambda _: "")) as (session, post):
        first = (await post([USER])).json()
        assert first["content"] == [{"type": "text", "text": "", "citations": None}]
        await post([USER, {"role": "assistant", "content": []}, USER])
        assert len(session.ledger.branches) == 1


async def test_a_stop_sequence_ends_the_turn(server: Any) -> None:
    tokens = FakeTokens(lambda _: "<think>a</think>ab stop cd")
    async with agent(server, tokens) as (session, post):
        first = (await post([USER], stop_sequences=["end", " stop"])).json()
        assert (first["stop_reason"], first["stop_sequence"]) == ("stop_sequence", " stop")
        assert first["content"][1]["text"] == "ab"
        await post([USER, *whole(first)], stop_sequences=[" stop"])
        (branch,) = session.ledger.branches
        stopped = spelt("<think>a</think>ab stop")
        assert branch.tokens.completion_ids[: len(stopped)] == stopped
        assert branch.n_sampled == 2 * len(stopped)


async def test_what_is_asked_of_the_answer_is_checked(server: Any) -> None:
    """An answer that does not fit is returned and counted."""
    form = {"type": "json_schema", "schema": {"type": "object", "required": ["a"]}}
    for said, fields, fits in (
        ("hm", {"tool_choice": {"type": "any"}}, False),
        ("hm", {"tool_choice": {"type": "tool", "name": "look"}}, False),
        (call_text(1), {"tool_choice": {"type": "any"}}, True),
        (call_text(1), {"tool_choice": {"type": "auto"}}, True),
        (
            call_text(1) + call_text(2),
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            False,
        ),
        ("<think>so</think>{}", {"output_config": {"format": form}}, False),
        ('<think>so</think>{"a": 1}', {"output_config": {"format": form}}, True),
    ):
        async with agent(server, FakeTokens(lambda _, said=said: said)) as (session, post):
            reply = await post([USER], **fields)
            assert reply.status_code == 200, reply.text
            assert session.ledger.broken == (not fits), (said, fields)
            await post([USER, *whole(reply.json())], **fields)
            assert len(session.ledger.branches) == 1
    async with agent(server, FakeTokens(lambda _: call_text(1))) as (_, post):
        reply = await post([USER], tool_choice={"type": "none"})
        assert reply.json()["content"][0]["text"] == call_text(1)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def message_of(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, USER]}


CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
WEB = {"type": "web_search_20250305", "name": "web_search"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (message_of(IMAGE), "messages.0.content.0.type: blocks are text and, of a user, tool_result, not 'image'"),
    (message_of({"type": "document"}), "'document'"),
    (message_of("x"), "messages.0.content.0"),
    (message_of({"type": "text"}), "messages.0.content.0"),
    (message_of(CALL), "not 'tool_use'"),
    (message_of(RESULT, "assistant"), "not 'tool_result'"),
    (message_of(RESULT | {"tool_use_id": None}), "messages.0.content.0.tool_use_id"),
    (message_of(RESULT | {"content": [IMAGE]}), "messages.0.content.0.content"),
    (message_of({"type": "redacted_thinking", "data": ""}, "assistant"), "redacted_thinking"),
    (message_of(CALL | {"input": 3}, "assistant"), "messages.0.content.0.input"),
    ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "prefilled"),
    ({"system": [IMAGE]}, "system"),
    ({"system": {}}, "system"),
    ({"tools": [WEB]}, "tools.0.type"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": CUSTOM * 129}, "tools"),
    ({"messages": [{"role": "user", "content": [RESULT] * 600}]}, "more than 512 messages"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
    ({"stop_sequences": ["x"] * 9}, "stop_sequences"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"imagination": 1}, "imagination"),
]  # fmt: skip


async def test_what_is_not_supported_is_refused_by_name(server: Any) -> None:
    async with agent(server) as (session, post):
        for fields, words in BAD:
            reply = await post(**{"messages": [USER], **fields})
            error = reply.json()
            assert reply.status_code == 400, (fields, error)
            assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
            assert words in error["error"]["message"], (fields, error)
            assert error["error"]["param"], fields
        address = f"{server[0].base_url(session)}/messages"
        head = {"content-type": "application/json"}
        reply = await server[1].post(address, content=b'{"messages": [', headers=head)
        error = reply.json()["error"]
        assert (error["message"], error["param"]) == ("the body is not JSON", None)
        assert not session.ledger.turns


async def test_errors_have_the_form_of_the_api(server: Any) -> None:
    endpoint, http = server
    async with agent(server) as (session, post):
        long = await post([{"role": "user", "content": "word " * 2000}])
        assert long.status_code == 400 and session.ledger.limit_hit == "token_budget"
        assert long.json()["error"]["message"].startswith("prompt is too long: ")
        assert long.json()["error"]["code"] == "context_length_exceeded"
        guess = await http.post(
            f"{endpoint.url}/sessions/guess/v1/messages",
            json={"model": "m", "max_tokens": 1, "messages": [USER]},
        )
        assert (guess.status_code, guess.json()["error"]["type"]) == (404, "not_found_error")
        address = f"{endpoint.base_url(session)}/messages"
        large = await http.post(address, content=b" " * (1 << 20) + b"{}")
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        batch = await http.post(f"{address}/batches", json={})
        assert batch.status_code == 404 and "POST messages" in batch.json()["error"]["message"]
        endpoint.sessions.close(session)
    tokens = FakeTokens(thinks)
    tokens.fail = 1
    async with agent(server, tokens) as (_, post):
        failed = await post([USER])
        assert (failed.status_code, failed.json()["error"]["type"]) == (503, "api_error")
