"""The Responses API over real HTTP, through the ``openai`` package: the ids that are trained are
those that were sampled, however the client sends the conversation back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response

from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.openai_responses import _IGNORED, _REFUSED, ResponsesRequest
from realhf.rollout.openai_sessions import Ending, OpenAiSession
from tests.rollout.black_box import Endpoint, FakeTokens, chat, served, serving, spelt
from tests.rollout.test_tool_calls import BROKEN, TOOLS, call_text, speaks

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=4000, turn_tokens=200, max_turns=40)
FLAT: list[Any] = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "task"}


def thinks(prompt: str) -> str:
    """As ``speaks``; the last turn has reasoning and no call."""
    words = speaks(prompt)
    return "<think>so</think>\ndone" if words == "done" else words


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


@asynccontextmanager
async def agent(
    endpoint: Endpoint, tokens: FakeTokens | None = None
) -> AsyncIterator[tuple[OpenAiSession, Any]]:
    """A session, and what asks it for responses."""
    async with served(endpoint, tokens or FakeTokens(thinks)) as (_, session, client):

        async def ask(*, stream: bool = False, **fields: Any) -> Response:
            fields = {"model": "m", "tools": FLAT, **fields}
            if not stream:
                return await client.responses.create(**fields)
            async with client.responses.stream(**fields) as events:
                received = [event async for event in events]
                final = await events.get_final_response()
            assert [event.sequence_number for event in received if event.type != ""] == list(
                range(len(received))
            )
            return final

        yield session, ask


def outputs(response: Response) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"seen {item.call_id}"}
        for item in response.output
        if item.type == "function_call"
    ]


def whole(response: Response) -> list[Any]:
    """As the OpenAI Agents SDK sends them."""
    return [item.model_dump(exclude_unset=True) for item in response.output] + outputs(response)


def with_nulls(response: Response) -> list[Any]:
    return [item.model_dump() for item in response.output] + outputs(response)


def rewritten(response: Response) -> list[Any]:
    """Without ids and reasoning, the arguments written differently, texts as lists of parts."""
    items: list[Any] = []
    for item in response.output:
        if item.type == "message":
            items.append({"role": "assistant", "content": response.output_text})
        elif item.type == "function_call":
            arguments = json.dumps(json.loads(item.arguments), indent=1, sort_keys=True)
            fields = {"call_id": item.call_id, "name": item.name, "arguments": arguments}
            items.append({"type": "function_call", **fields})
    return items + [
        each | {"output": [{"type": "input_text", "text": each["output"]}]}
        for each in outputs(response)
    ]


def interleaved(response: Response) -> list[Any]:
    """Each result directly after its call."""
    results = {each["call_id"]: each for each in outputs(response)}
    items: list[Any] = []
    for item in response.output:
        items.append(item.model_dump(exclude_unset=True))
        if item.type == "function_call":
            items.append(results[item.call_id])
    return items


def references(response: Response) -> list[Any]:
    """As SDKs send stored items."""
    named = [{"type": "item_reference", "id": item.id} for item in response.output]
    return [*named, *outputs(response)]


Resend = Callable[[Response], list[Any]]


async def play(ask: Any, resent: Resend | None, stream: bool) -> list[Response]:
    """Three turns and a fourth after the last one's words. None: by previous_response_id."""
    said: list[Response] = []
    conversation: list[Any] = [USER]
    while len(said) < 4:
        if resent is not None:
            said.append(await ask(input=conversation, instructions="be brief", stream=stream))
            conversation = [*conversation, *resent(said[-1])]
            conversation += [USER] if len(said) == 3 else []
        else:
            follow = outputs(said[-1]) if said else [USER]
            earlier = {"previous_response_id": said[-1].id} if said else {}
            said.append(
                await ask(input=follow or "task", instructions="be brief", stream=stream, **earlier)
            )
    return said


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "resent",
    [whole, with_nulls, rewritten, interleaved, references, None],
    ids=lambda how: getattr(how, "__name__", "previous"),
)
async def test_a_conversation_keeps_the_ids_that_were_sampled(
    server: Any, resent: Resend | None, stream: bool
) -> None:
    async with agent(server) as (session, ask):
        said = await play(ask, resent, stream)
        (outcome,) = session.outcomes(Ending("finished", 1.0))
    first, second, third, _ = said
    assert [[item.type for item in each.output] for each in said[:3]] == [
        ["function_call"],
        ["reasoning", "message", "function_call", "function_call"],
        ["reasoning", "message"],
    ]
    assert {each.status for each in said} == {"completed"}
    assert (second.output_text, third.output_text) == ("I look.", "done")
    assert json.loads(first.output[0].arguments) == {"x": 1, "ü": [1.0, "a"]}  # type: ignore[union-attr]
    stop = chat().stop_ids[0]
    expected: list[int] = []
    for number, response in enumerate(said, 1):
        expected += [*spelt(thinks("<|assistant|>" * number)), stop]
        results = [
            {
                "role": "tool",
                "tool_call_id": each["call_id"],
                "content": each["output"],
                "name": "look",
            }
            for each in outputs(response)
        ]
        if number < 4:
            expected += chat().following_messages(results or [USER], ended=True, tools=TOOLS)
    assert outcome.prompt_ids == chat().opening([SYSTEM, USER], TOOLS)
    assert outcome.completion_ids == expected
    assert sum(outcome.loss_mask) == sum(each.usage.output_tokens for each in said if each.usage)
    usage = second.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len(spelt("<think>hm</think>"))


async def test_the_same_response_may_be_continued_twice(server: Any) -> None:
    async with agent(server) as (session, ask):
        first = await ask(input="task")
        for _ in range(2):
            await ask(input=outputs(first), previous_response_id=first.id)
        main, fork = session.ledger.branches
        at = len(main.tokens.prompt_ids) + main.marks[0].tokens
        assert fork.tokens.prompt_ids[:at] == main.tokens.prefix()[:at]
        assert len(main.marks) == 2 and len(fork.marks) == 1


async def test_instructions_are_those_of_the_request(server: Any) -> None:
    async with agent(server) as (session, ask):
        first = await ask(input="task", instructions="be brief")
        second = await ask(input=outputs(first), previous_response_id=first.id)
        assert second.instructions is None
        opened = session.ledger.branches[1].opening()
        assert [message["role"] for message in opened] == ["user", "assistant", "tool"]
        third = await ask(
            input=[{"role": "developer", "content": "now"}],
            previous_response_id=second.id,
            instructions="be long",
        )
        opened = session.ledger.branches[2].opening()
        assert opened[0] == {"role": "system", "content": "be long"}
        assert opened[-1] == {"role": "system", "content": "now"}
        assert [message["role"] for message in opened].count("system") == 2
        await ask(input="more", previous_response_id=third.id, instructions="be long")
        assert len(session.ledger.branches) == 3


async def test_a_history_that_a_client_made_shorter_is_another_conversation(server: Any) -> None:
    async with agent(server) as (session, ask):
        said = await play(ask, whole, False)
        compact = [{"role": "user", "content": "summary"}, *whole(said[1])]
        await ask(input=compact)
        assert len(session.ledger.branches) == 2
        assert session.ledger.branches[1].tokens.prompt_ids == chat().opening(
            session.ledger.branches[1].opening(), TOOLS
        )


async def test_two_answers_in_a_row_are_two_turns(server: Any) -> None:
    async with agent(server, FakeTokens(lambda _: "hm")) as (session, ask):
        first = await ask(input=[USER])
        second = await ask(input=[USER, *whole(first)])
        await ask(input=[USER, *whole(first), *whole(second), USER])
        assert [len(branch.marks) for branch in session.ledger.branches] == [1, 2]


@pytest.mark.parametrize("resent", [whole, references, None])
async def test_of_equal_answers_the_one_that_is_named_goes_on(
    server: Any, resent: Resend | None
) -> None:
    """They differ in reasoning, which a request does not repeat."""
    said = iter(["<think>one</think>done", "<think>two</think>done", "end"])
    async with agent(server, FakeTokens(lambda _: next(said))) as (session, ask):
        first, other = [await ask(input=[USER]) for _ in range(2)]
        assert first.output_text == other.output_text == "done"
        if resent is None:
            last = await ask(input=[USER], previous_response_id=first.id)
        else:
            last = await ask(input=[USER, *resent(first), USER])
        assert [len(branch.marks) for branch in session.ledger.branches] == [2, 1]
        (outcome,) = session.outcomes(Ending("finished", {last.id: 1.0}))
        assert [turn.policy_turn.reasoning for turn in outcome.turns if turn.policy_turn] == [
            "one",
            "",
        ]
        shown = session.ledger.branches[0].messages[1]
        turns = [session.ledger.find_turn(shown, each.id) for each in (first, other)]
        assert [turn.reasoning for turn in turns if turn is not None] == ["one", "two"]


async def test_items_without_an_id_continue_the_latest_equal_answer(server: Any) -> None:
    said = iter(["<think>one</think>done", "<think>two</think>done", "end"])
    async with agent(server, FakeTokens(lambda _: next(said))) as (session, ask):
        for _ in range(2):
            first = await ask(input=[USER])
        await ask(input=[USER, *rewritten(first), USER])
        assert [len(branch.marks) for branch in session.ledger.branches] == [1, 2]


@pytest.mark.parametrize("resent", [whole, rewritten, references])
async def test_a_text_and_a_call_of_the_next_turn_are_two_turns(
    server: Any, resent: Resend
) -> None:
    said = iter(["I look.", call_text(1), "done"])
    async with agent(server, FakeTokens(lambda _: next(said))) as (session, ask):
        first = await ask(input=[USER])
        second = await ask(input=[USER, *resent(first)])
        await ask(input=[USER, *resent(first), *resent(second)])
        assert [len(branch.marks) for branch in session.ledger.branches] == [1, 2]


async def test_ids_that_the_session_did_not_store_are_not_found(server: Any) -> None:
    async with agent(server) as (session, ask):
        loose = await ask(input="task", store=False)
        assert loose.store is False
        item = {"type": "item_reference", "id": loose.output[0].id}
        for fields in (
            {"input": "x", "previous_response_id": "resp_1"},
            {"input": "x", "previous_response_id": loose.id},
            {"input": [USER, item]},
        ):
            with pytest.raises(openai.NotFoundError, match="stored no"):
                await ask(**fields)
        async with agent(server) as (_, other):
            kept = await ask(input="task")
            with pytest.raises(openai.NotFoundError):
                await other(input="x", previous_response_id=kept.id)
        assert session.ledger.turns == 2


async def test_a_turn_that_is_cut_is_incomplete(server: Any) -> None:
    async with agent(server, FakeTokens(thinks, finish="length")) as (session, ask):
        response = await ask(input="task")
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert {item.status for item in response.output} == {"incomplete"}  # type: ignore[union-attr]
        raised = RuntimeError("ended with `response.incomplete`. reason='max_output_tokens'")
        assert session.find_limit(raised) == "token_budget"
        assert session.find_limit(RuntimeError("another")) == ""


async def test_a_call_that_cannot_be_read_is_text(server: Any) -> None:
    async with agent(server, FakeTokens(lambda _: f"<think>a</think>{BROKEN}")) as (session, ask):
        response = await ask(input=[USER])
        assert response.output_text == BROKEN
        await ask(input=[USER, *whole(response), USER])
        assert len(session.ledger.branches) == 1
        response = await ask(input="b", tool_choice="none")
        assert response.output_text == BROKEN
    said = f"<think>a</think>b {call_text(1)}"
    async with agent(server, FakeTokens(lambda _: said)) as (session, ask):
        response = await ask(input=[USER], tool_choice="none")
        assert response.output_text == f"b\n{call_text(1)}"
        await ask(input=[USER, *whole(response), USER], tool_choice="none")
        assert len(session.ledger.branches) == 1


async def test_logprobs_are_those_of_all_tokens(server: Any) -> None:
    async with agent(server, FakeTokens(lambda _: "é ok")) as (_, ask):
        response = await ask(input="task", include=["message.output_text.logprobs"])
        (part,) = response.output[0].content  # type: ignore[union-attr]
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == "é ok"


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
IMAGE = {"type": "input_image"}


async def test_what_is_asked_of_the_answer_is_checked(server: Any) -> None:
    """An answer that does not fit is returned and counted."""
    schema = {"type": "object", "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "f", "schema": schema}}
    allowed = {"type": "allowed_tools", "mode": "auto"}
    for said, fields, fits in (
        ("hm", {"tool_choice": "required"}, False),
        ("hm", {"tool_choice": {"type": "function", "name": "look"}}, False),
        ("hm", {"tool_choice": allowed | {"tools": [{"type": "function", "name": "look"}]}}, True),
        (call_text(1), {"tool_choice": "required"}, True),
        (call_text("a"), {"tool_choice": "auto"}, False),
        (call_text(1) + call_text(2), {"parallel_tool_calls": False}, False),
        ("<think>so</think>{}", {"text": form}, False),
        ('<think>so</think>{"a": 1}', {"text": form}, True),
        ("{}", {"text": {"format": {"type": "json_object"}}}, True),
    ):
        async with agent(server, FakeTokens(lambda _, said=said: said)) as (session, ask):
            response = await ask(input=[USER], **fields)
            assert session.ledger.broken == (not fits), (said, fields)
            await ask(input=[USER, *whole(response), USER], **fields)
            assert len(session.ledger.branches) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"imagination": 1}, "imagination"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["task"]}, r"input\.0"),
    ({"input": [{"role": "king", "content": "x"}]}, r"input\.0\.role"),
    ({"input": [USER, {"role": "user", "content": [IMAGE]}]}, r"input\.1\.content.*input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
    ({"input": [{"role": "user"}]}, r"input\.0\.content"),
    ({"input": [USER, {"type": "web_search_call"}]}, r"input\.1\.type.*web_search_call"),
    ({"input": [USER, CALL | {"arguments": None}]}, r"input\.1\.arguments"),
    ({"input": [USER, CALL | {"arguments": "["}]}, r"input\.1.*arguments"),
    ({"input": [USER, OUTPUT | {"call_id": None}]}, r"input\.1\.call_id"),
    ({"input": [USER, OUTPUT | {"output": [IMAGE]}]}, r"input\.1\.output"),
    ({"tools": [{"type": "web_search"}]}, r"tools\.0\.type.*web_search"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, r"tools\.0\.type"),
    ({"tools": [{"type": "function"}]}, r"tools\.0\.name"),
    ({"tools": FLAT * 129}, "tools"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "hear"}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, r"text\.format"),
    ({"text": {"format": {"type": "json_schema", "name": "f"}}}, r"text\.format\.schema"),
]  # fmt: skip


async def test_what_is_not_supported_is_refused_by_name(server: Any) -> None:
    async with agent(server) as (session, ask):
        for body, words in BAD:
            with pytest.raises(openai.BadRequestError, match=words):
                await ask(**{"input": "task", "extra_body": body})
        assert not session.ledger.turns


async def test_every_field_of_the_package_is_known() -> None:
    """Fields that the package knows and the endpoint does not are refused, so each is a choice."""
    from openai.types.responses import response_create_params

    sent = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    known = {*ResponsesRequest.model_fields, *_IGNORED, *_REFUSED}
    assert sent - known == {"access_programs", "image"} and not known - sent
