"""What a request asks of its answer, through the real ``openai`` package: stop strings end a turn
where the policy's tokens do, and other rules are checked and counted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig

from realhf.api.config import GenConfig
from realhf.api.model import GenOutput, GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.api.source import SampleResult
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.dataflow.rollouts.metrics import rollout_metrics
from realhf.monitor.metrics import public_name
from realhf.rollout.answer_rules import AnswerRules, JsonAnswer, find_stop
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.group_player import PlayedGroup
from realhf.rollout.interface import rollout_statistics
from realhf.rollout.json_schema import (
    CheckBudget,
    JsonSchema,
    read_schema,
    read_strict_schemas,
)
from realhf.rollout.openai_requests import OpenAiMessage
from realhf.rollout.openai_sessions import (
    STOP_PART,
    Ending,
    OpenAiSession,
    OpenAiSessions,
)
from tests.rollout.black_box import Endpoint, FakeTokens, chat, served, serving, spelt

endpoint_test = pytest.mark.asyncio(loop_scope="module")
LIMITS = EpisodeLimits(max_total_tokens=4000, turn_tokens=200, max_turns=40)
USER = {"role": "user", "content": "task"}
STOP = chat().stop_ids[0]


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("look"), tool("leap")]


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving(LIMITS) as up:
        yield up


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    reply = await client.chat.completions.create(model="m", messages=messages, **more)
    return reply.choices[0]


def outcome_of(session: OpenAiSession, status: str = "finished") -> RolloutOutcome:
    (outcome,) = session.outcomes(Ending(status, 1.0))
    return outcome


@endpoint_test
@pytest.mark.parametrize("part", [0, 3])
async def test_a_stop_string_ends_the_turn_where_its_last_token_was_sampled(
    endpoint: Endpoint, part: int
) -> None:
    """The text ends before it. The tokens up to its last one are trained; the end of the turn is
    the template's."""
    tokens = FakeTokens(lambda prompt: "I look. Observation: made up, and more", part=part)
    async with served(endpoint, tokens) as (_, session, client):
        stop = ["Observation:", "<end>"]
        first = await ask(client, [USER], stop=stop)
        assert (first.message.content, first.finish_reason) == ("I look. ", "stop")
        history = [USER, first.message.model_dump(), {"role": "user", "content": "seen"}]
        await ask(client, history, stop=stop)
        assert not outcome_of(session, "max_turns").truncated
        outcome = outcome_of(session)
    sampled = spelt("I look. Observation:")
    between = chat().following("seen", ended=False)
    assert between[0] == STOP
    assert outcome.completion_ids == sampled + between + sampled
    assert outcome.loss_mask == [True] * len(sampled) + [False] * len(between) + [True] * len(
        sampled
    )
    assert [turn.text for turn in outcome.turns] == ["I look. "] * 2
    parts = -(-len(sampled) // part) if part else 1
    assert list(tokens.requests[parts].token_ids) == outcome.prompt_ids + sampled + between
    assert len(tokens.requests) == 2 * parts, "a stopped turn is not continued"


@endpoint_test
@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("price: 5 € or so", "€", "price: 5 "),
        ("a 😀 b", ["😀 b"], "a "),
        ("<think>see Observation: x</think>done", "Observation:", ""),
        (call_text("look", x=1) + "\nObservation: 2", "\nObservation", None),
        (call_text("look", x="Observation: 1"), "Observation", '<tool_call>{"name": "look", "arg'),
        ("Observation: at once", "Observation:", ""),
        ("nothing of it", ["Observation:"], "nothing of it"),
        ("ends with Observ", "Observation:", "ends with Observ"),
    ],
    ids=["bytes", "emoji", "reasoning", "after a call", "in a call", "first", "absent", "partial"],
)
async def test_a_stop_string_may_be_anywhere(
    endpoint: Endpoint, said: str, stop: Any, shown: str | None
) -> None:
    async with served(endpoint, FakeTokens(lambda prompt: said)) as (_, session, client):
        answer = await ask(client, [USER], stop=stop, tools=TOOLS)
        text = answer.message.content
        if shown is None:
            assert text is None and answer.message.tool_calls[0].function.name == "look"
            assert answer.finish_reason == "tool_calls"
        else:
            assert text.startswith(shown) and answer.message.tool_calls is None
            assert answer.finish_reason == "stop" and not text[len(shown) :].startswith("Obs")
        body = answer.message.model_dump(exclude_none=True)
        assert body.get("reasoning_content") == ("see" if "<think>" in said else None)
        await ask(client, [USER, body, USER], tools=TOOLS)
        outcome = outcome_of(session)
    first = stop if isinstance(stop, str) else stop[0]
    assert len(outcome.turns) == 2, "the history continues the conversation"
    end = said.find(first) + len(first) if first in said else len(said)
    ids = spelt(said[:end]) + ([] if first in said else [STOP])
    assert outcome.completion_ids[: len(ids)] == ids
    between = chat().following_messages([USER], ended=first not in said, tools=TOOLS)
    assert outcome.completion_ids[len(ids) :][: len(between)] == between
    assert all(outcome.loss_mask[: len(ids)]) and not outcome.loss_mask[len(ids)]


@endpoint_test
async def test_a_client_may_send_the_stop_string_back(endpoint: Endpoint) -> None:
    """As parsers of agents need it. Anything else that is appended was not sampled there."""
    async with served(endpoint, FakeTokens(lambda prompt: "<code>1</code> so")) as (
        _,
        session,
        client,
    ):
        text = (await ask(client, [USER], stop=["</code>"])).message.content
        for n, sent in enumerate((text + "</code>", text + "</code> so"), 1):
            said = {"role": "assistant", "content": sent}
            await ask(client, [USER, said, {"role": "user", "content": "seen"}])
            assert len(session.ledger.branches) == n
        first = session.ledger.branches[0]
        assert [message.content for message in first.messages[:2]] == ["task", "<code>1"]
        assert first.tokens.completion_ids[: first.marks[0].tokens] == spelt("<code>1</code>")
        said = OpenAiMessage("assistant", "<code>1</code>")
        assert session.ledger.find_turn(said) is first.marks[0].turn


@endpoint_test
async def test_little_is_sampled_after_a_stop_string(endpoint: Endpoint) -> None:
    """Without one, a turn is one request. What is sampled in parts is trained as one turn."""
    said = "word " * 9 + "END" + " more" * 20
    async with served(endpoint, FakeTokens(lambda _: said)) as (_, session, client):
        tokens: Any = session._llm
        await ask(client, [USER])
        assert len(tokens.requests) == 1
        before = len(tokens.sampled)
        answer = await ask(client, [USER], stop="END")
        assert (answer.message.content, answer.finish_reason) == ("word " * 9, "stop")
        stopped = spelt("word " * 9 + "END")
        assert 0 <= len(tokens.sampled) - before - len(stopped) < STOP_PART
        branch = session.ledger.branches[-1]
        assert branch.tokens.completion_ids == stopped and branch.n_sampled == len(stopped)
        rest = await ask(client, [USER], stop="absent")
        assert (rest.message.content, rest.finish_reason) == (said, "stop")
        assert session.ledger.branches[-1].tokens.completion_ids == [*spelt(said), STOP]


@endpoint_test
async def test_a_stopped_answer_is_streamed_as_far_as_it_is_shown(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(lambda prompt: "aws END s3")) as (_, session, client):
        stream = await client.chat.completions.create(
            model="m",
            messages=[USER],  # type: ignore[list-item]
            stop="END",
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "aws "
        usage = chunks[-1].usage
        assert usage is not None and usage.completion_tokens == len(spelt("aws END"))
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert outcome_of(session).completion_ids == spelt("aws END")


class ModelTokens:
    """A ``TokenSource`` that samples from a model, in one cache."""

    def __init__(self, model: Any) -> None:
        self._engine = EmbeddedGenerator(model)
        self.outputs: list[GenOutput] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        config = GenConfig(max_new_tokens=24)
        (output,) = self._engine.generate([request], config, stop_ids=chat().stop_ids, seed=0)
        self.outputs.append(output)
        return output

    def free(self, slots: Any) -> None:
        self._engine.free(slots)


@endpoint_test
@pytest.mark.slow
async def test_a_real_policy_goes_on_from_the_token_at_which_it_was_stopped() -> None:
    """The cache holds the tokens that were sampled after it. They have no part in the next turn,
    whose tokens have the log-probabilities of a whole forward pass over what is trained."""
    model = small_model(len(chat()._tokenizer))
    tokens = ModelTokens(model)
    sessions = OpenAiSessions(chat(), LIMITS)
    user = OpenAiMessage("user", "task")
    free = await sessions.open(tokens, slot=3, seed=7).sample([user])
    stop = next(
        pair for pair in zip(free.text[4:], free.text[5:], strict=False) if pair < ("~", "~")
    )
    session = sessions.open(tokens, slot=3, seed=7)
    history = [user]
    for _ in range(2):
        turn = await session.sample(history, rules=AnswerRules(stop=("".join(stop),)))
        session.keep(turn)
        history += [turn.answer, OpenAiMessage("user", "more")]
    outcome = outcome_of(session)
    first = session.ledger.branches[0].marks[0].tokens
    sampled = tokens.outputs[1].token_ids
    assert sampled == free.ids and 0 < first < len(sampled)
    assert outcome.completion_ids[:first] == sampled[:first]
    assert free.text.startswith(outcome.turns[0].text + "".join(stop))
    assert sum(outcome.loss_mask) > first and len(session.ledger.branches) == 1
    with torch.no_grad():
        ids = torch.tensor([outcome.prompt_ids + outcome.completion_ids])
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)[:-1]
    expected = log_p.gather(1, ids[0, 1:, None])[len(outcome.prompt_ids) - 1 :, 0]
    mask = torch.tensor(outcome.loss_mask)
    torch.testing.assert_close(
        torch.tensor(outcome.logprobs)[mask], expected[mask], atol=1e-4, rtol=0
    )


def small_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config).eval()


LETTERS = st.text(st.sampled_from("ab é€"), max_size=12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    LETTERS,
    st.lists(st.text(st.sampled_from("ab é€"), min_size=1, max_size=3), max_size=3),
    st.data(),
)
def test_a_stop_is_found_at_the_first_token_that_completes_one(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    """For any split of the text's bytes into tokens, as a search token by token finds it."""
    rest = text.encode()
    pieces: list[bytes] = []
    while rest:
        size = data.draw(st.integers(1, 4))
        pieces.append(rest[:size])
        rest = rest[size:]
    ids = list(range(len(pieces)))

    def decode(some: Any) -> str:
        return b"".join(pieces[i] for i in some).decode(errors="replace")

    found = find_stop(ids, stop, decode)
    for n in range(len(ids) + 1):
        shown = decode(ids[:n]).rstrip("\ufffd")
        starts = [shown.find(string) for string in stop if string in shown]
        if starts:
            assert found is not None
            assert (found.tokens, found.text) == (n, shown[: min(starts)])
            return
    assert found is None


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
}


JSON_OBJECT = {"type": "json_object"}
LOOK = call_text("look", x=1)
NAMED_LEAP = {"type": "function", "function": {"name": "leap"}}
ONLY_LEAP = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [NAMED_LEAP]},
}
STRICT = [tool("look", strict=True)]
ANSWERS: list[tuple[str, dict[str, Any], str | None, bool]] = [
    ("no call", {"tools": TOOLS, "tool_choice": "required"}, "no call", True),
    (LOOK, {"tools": TOOLS, "tool_choice": "required"}, None, False),
    (LOOK, {"tools": TOOLS, "tool_choice": NAMED_LEAP}, None, True),
    (LOOK, {"tools": TOOLS, "tool_choice": ONLY_LEAP}, None, True),
    (LOOK + call_text("leap", x=2), {"tools": TOOLS, "parallel_tool_calls": False}, None, True),
    (LOOK, {"tools": TOOLS, "parallel_tool_calls": False}, None, False),
    (LOOK, {"tools": STRICT}, None, False),
    (call_text("look", x="1"), {"tools": STRICT}, None, True),
    ('{"a": 1}', {"response_format": JSON_OBJECT}, '{"a": 1}', False),
    ("[1]", {"response_format": JSON_OBJECT}, "[1]", True),
    ('Here: {"a": 1}', {"response_format": JSON_OBJECT}, 'Here: {"a": 1}', True),
    ('{"answer": 1}', {"response_format": JSON_SCHEMA}, '{"answer": 1}', False),
    ('{"answer": "1"}', {"response_format": JSON_SCHEMA}, '{"answer": "1"}', True),
    (
        '<think>hm</think>\n{"answer": 1}',
        {"response_format": JSON_SCHEMA},
        '{"answer": 1}',
        False,
    ),
    ('<think>{"answer": 1}', {"response_format": JSON_SCHEMA}, "", True),
    (LOOK, {"tools": TOOLS, "response_format": JSON_SCHEMA}, None, False),
]


@endpoint_test
@pytest.mark.parametrize(("said", "more", "content", "broken"), ANSWERS)
async def test_an_answer_that_breaks_a_rule_is_returned_and_counted(
    endpoint: Endpoint, said: str, more: dict[str, Any], content: str | None, broken: bool
) -> None:
    """It is trained as it was sampled, and the conversation goes on with it."""
    async with served(endpoint, FakeTokens(lambda prompt: said)) as (_, session, client):
        answer = await ask(client, [USER], **more)
        n_calls = said.count("<tool_call>")
        assert answer.finish_reason == ("tool_calls" if n_calls else "stop")
        assert (answer.message.content, len(answer.message.tool_calls or ())) == (content, n_calls)
        history = [USER, answer.message.model_dump(exclude_none=True), USER]
        await ask(client, history, **({"tools": more["tools"]} if "tools" in more else {}))
        outcome = outcome_of(session)
    ids = [*spelt(said), STOP]
    assert outcome.completion_ids[: len(ids)] == ids and all(outcome.loss_mask[: len(ids)])
    assert len(outcome.turns) == 2, "the history continues the conversation"
    # the second request asks for strict calls, too
    assert session.ledger.broken == broken * (2 if more.get("tools") is STRICT else 1)


@endpoint_test
async def test_the_fraction_of_broken_rules_is_a_metric(endpoint: Endpoint) -> None:
    words = iter(['{"a": 1}', "no JSON", "free", "free"])
    async with served(endpoint, FakeTokens(lambda prompt: next(words))) as (_, session, client):
        for more in ({"response_format": {"type": "json_object"}},) * 2 + ({},):
            await ask(client, [USER], **more)
        checked = session.outcomes(Ending("finished", 1.0))[0]
    async with served(endpoint, FakeTokens(lambda prompt: "free")) as (_, session, client):
        await ask(client, [USER])
        free = outcome_of(session)
    assert (checked.broken_rules, free.broken_rules) == (0.5, None)
    statistics = rollout_statistics([checked, free])
    assert statistics["broken_rules"] == 0.5, "turns of which nothing was asked do not count"
    assert "broken_rules" not in rollout_statistics([free])
    note = json.dumps(PlayedGroup([checked, free]).statistics())
    assert rollout_metrics([SampleResult("a", metadata={"rollout": note})])["broken_rules"] == 0.5
    earlier = json.dumps({**json.loads(note), "broken_rules": []})
    results = [SampleResult("a", metadata={"rollout": earlier})]
    assert "broken_rules" not in rollout_metrics(results)
    for own in ("actor_gen/broken_rules", "rollout/broken_rules"):
        assert public_name(own) == "rollouts/broken_rules"


@endpoint_test
@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({"response_format": {"type": "json_object"}}, "length"),
        ({"tools": TOOLS, "tool_choice": "required"}, "length"),
        ({"parallel_tool_calls": False}, "stop"),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}, "stop"),
        ({"tools": STRICT, "tool_choice": "none"}, "stop"),
    ],
)
async def test_a_turn_that_can_break_no_rule_is_not_counted(
    endpoint: Endpoint, more: dict[str, Any], finish: str
) -> None:
    tokens = FakeTokens(lambda prompt: '{"a', finish=finish)
    async with served(endpoint, tokens) as (_, session, client):
        await ask(client, [USER], **more)
        assert outcome_of(session).broken_rules is None


class Reply(BaseModel):
    """Type of an answer."""

    a: int


@endpoint_test
async def test_an_error_about_a_turn_that_was_cut_is_the_limits(endpoint: Endpoint) -> None:
    """The real package raises errors for it when it parses an answer."""
    words = '{"a": '
    for finish, limit in (("length", "token_budget"), ("stop", "")):
        tokens = FakeTokens(lambda prompt: words, finish=finish)
        async with served(endpoint, tokens) as (_, session, client):
            for parse in (
                client.chat.completions.parse(
                    model="m",
                    messages=[USER],  # type: ignore[list-item]
                    response_format=Reply,
                ),
                client.responses.parse(model="m", input="task", text_format=Reply),
            ):
                with pytest.raises((openai.LengthFinishReasonError, ValidationError)) as raised:
                    await parse
                assert session.find_limit(raised.value) == limit, raised.value
            # of pydantic-ai
            error = RuntimeError("Model token limit (9) exceeded before any response was generated")
            assert session.find_limit(error) == limit
            wrapped = RuntimeError("no answer")
            wrapped.__cause__ = raised.value
            assert session.find_limit(wrapped) == limit
            assert session.find_limit(KeyError("a")) == ""
            with pytest.raises(ValidationError) as wrong:
                Reply.model_validate({})
            assert session.find_limit(wrong.value) == ""


NOT_SERVED: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"guided_json": {}}, "guided_json"),
    ({"stop_sequences": ["a"]}, "stop_sequences"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "sum"}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"tools": [tool("f", parameters={"type": 1}, strict=True)]},
        "tools.0.function.parameters",
    ),
    ({"messages": [USER, {"role": "critic", "content": "x"}]}, "messages.1.role"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages.0.function_call",
    ),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages.0.refusal"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "type": "custom", "function": {"name": "f", "arguments": ""}}
                    ],
                }
            ]
        },
        "messages.0.tool_calls.0.type",
    ),
]
ASKS_FOR_NOTHING: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "logit_bias": {},
    "top_logprobs": 0,
    "functions": [],
    "modalities": ["text"],
    "audio": None,
    "store": True,
    "temperature": 0.0,
    "reasoning_effort": "low",
    "stream": None,
}


@endpoint_test
async def test_a_field_that_is_not_served_is_named(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(lambda prompt: "ok")) as (_, session, client):
        for body, param in NOT_SERVED:
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [USER], extra_body=body)
            assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
            assert param.rpartition(".")[2] in str(refused.value), body
        assert not session.ledger.turns
        await ask(client, [USER], extra_body=ASKS_FOR_NOTHING)
        assert session.ledger.turns == 1


HOSTILE: list[bytes] = [
    b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
    b'{"messages": [{"role": "\\ud800", "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "\\ud800"}}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": 1e999}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "a"}], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
    b'{"name": "f", "description": "\\ud800"}}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
    b'{"name": "f", "parameters": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}}]}",
    b'\xff\xfe{"messages": []}',
    b'{"messages": {"role": "user"}}',
    b"null",
]


@endpoint_test
async def test_no_body_makes_the_endpoint_fail(endpoint: Endpoint) -> None:
    async with served(endpoint, FakeTokens(lambda prompt: "ok")) as (server, session, _):
        address = f"{server.base_url(session)}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            for body in HOSTILE:
                headers = {"Content-Type": "application/json"}
                reply = await http.post(address, content=body, headers=headers)
                assert reply.status_code == 400, (body[:80], reply.text[:300])
                assert reply.json()["error"]["type"] == "invalid_request_error"
        assert not session.ledger.turns


def schema(**keywords: Any) -> JsonSchema:
    return read_schema(keywords, "schema")


def test_a_schema_decides_as_the_standard_does() -> None:
    tree = schema(
        **{
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/$defs/a~1b",
            "$defs": {
                "a/b": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-z]+$"},
                        "below": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}},
                    },
                    "required": ["name"],
                }
            },
        }
    )
    assert tree.accepts({"name": "a", "below": [{"name": "b"}]})
    assert not tree.accepts({"name": "a", "below": [{"name": "B"}]})
    assert schema(uniqueItems=True).accepts([1, 2]) and not schema(uniqueItems=True).accepts([1, 1])
    assert schema(dependencies={"a": {"dependencies": {"enum": ["b"]}, "enum": [1, "a"]}})
    either = schema(anyOf=[{"const": 1}, {"type": "null"}])
    assert [either.accepts(value) for value in (1, None, 2)] == [True, True, False]
    assert schema(type="object") == schema(type="object") != schema(type="array")


def deep(levels: int) -> dict[str, Any]:
    return {"not": deep(levels - 1)} if levels else {}


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ([], "a schema is a JSON object"),
    ({"type": "sum"}, "no valid schema"),
    ({"$ref": "https://example.org/schema"}, "names no schema within this one"),
    ({"$ref": "#/enum/0", "enum": [{"pattern": {}}]}, "names no schema"),
    ({"$dynamicRef": "#a"}, "is not served"),
    ({"properties": {"a": {"$id": "x"}}}, "at the top"),
    ({"patternProperties": {"(a+)+$": {}}}, "is not served"),
    ({"pattern": "("}, "is invalid"),
    ({"pattern": "a" * 600}, "at most"),
    ({"enum": ["x" * (1 << 17)]}, "characters"),
    ({"const": float("nan")}, "JSON"),
    (deep(60), "nested"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED_SCHEMAS)
def test_a_schema_that_is_not_served_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_schema(value, "field")
    assert (refused.value.status, refused.value.param) == (400, "field")


def test_without_the_package_a_schema_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ApiError, match=r"pip install .*\[train\]"):
        schema(title="not seen before")


def test_a_check_of_a_hostile_schema_ends_soon() -> None:
    doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    hostile: list[tuple[dict[str, Any], Any]] = [
        ({"$ref": "#"}, 1),
        ({"$ref": "#/$defs/d0", "$defs": doubling | {"d40": {"type": "integer"}}}, 1),
        ({"pattern": "^(a+)+$"}, "a" * 40 + "b"),
        ({"items": {"enum": list(range(9000))}}, [9001] * 2000),
        ({"uniqueItems": True}, [{"a": n} for n in range(5000)]),
    ]
    for keywords, value in hostile:
        started_at = time.process_time()
        assert not schema(**keywords).accepts(value)
        assert time.process_time() - started_at < 2.0
    assert schema(type="integer").accepts(1), "the next check has its own limits"


MIXED = [n if n % 2 else f"{n}" for n in range(6000)]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"type": MIXED}, "at most 7 items"),
        ({"required": MIXED}, "text only"),
        ({"dependentRequired": {"type": MIXED}}, "text only"),
        ({"allOf": [True] * 10_000}, "objects, arrays and booleans"),
        ({"properties": {f"p{n}": {"a": {}} for n in range(2500)}}, "objects, arrays and booleans"),
    ],
)
def test_a_schema_that_takes_long_to_check_is_refused_soon(
    keywords: dict[str, Any], words: str
) -> None:
    started_at = time.process_time()
    with pytest.raises(ApiError, match=words):
        schema(**keywords)
    assert time.process_time() - started_at < 0.5


def test_the_schemas_of_strict_tools_have_limits_together() -> None:
    large = {"enum": ["x" * 700]}
    many = [(f"f{n}", large | {"title": f"{n}"}, f"tools.{n}") for n in range(100)]
    with pytest.raises(ApiError, match="together") as refused:
        read_strict_schemas(many)
    assert refused.value.param == "tools.89"
    assert len(read_strict_schemas(many[:80])) == 80


def test_the_calls_of_a_turn_share_the_time_of_their_patterns() -> None:
    slow = schema(pattern="^(a+)+$")
    rules = AnswerRules(strict_tools={"f": schema(anyOf=[{"not": {}}, {}]), "g": slow})
    budget = CheckBudget()
    started_at = time.process_time()
    for _ in range(20):
        assert not slow.accepts("a" * 40 + "b", budget)
    assert time.process_time() - started_at < 1.0
    assert rules.find_broken("", [("f", 1), ("g", "a" * 40 + "b")]) == ("strict",)
    assert rules.find_broken("", [("f", 1), ("g", "aa")]) == (), "the next turn has its own"


def test_rules_without_checks_find_nothing_broken() -> None:
    assert not AnswerRules(stop=("a",)).has_checks(reads_calls=True)
    assert AnswerRules(json=JsonAnswer()).has_checks(reads_calls=False)
    assert AnswerRules(parallel_calls=False).has_checks(reads_calls=True)
    assert AnswerRules().find_broken("words", [("f", {}), ("g", {})]) == ()
