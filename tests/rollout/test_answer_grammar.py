"""Grammars of answers: whatever is sampled under the mask of a request follows its rules, unless a
limit of tokens cuts it off."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.rollout import answer_grammar
from realhf.rollout.answer_grammar import AnswerGrammars, narrow_schema
from realhf.rollout.answer_rules import AnswerRules, JsonAnswer
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.json_schema import JsonSchema, read_schema
from realhf.rollout.openai_requests import OpenAiMessage, build_message
from realhf.rollout.openai_server import OpenAiServer
from realhf.rollout.openai_sessions import Ending, OpenAiSession, OpenAiSessions
from realhf.rollout.rollout_sample import outcomes_to_sample
from tests.api.chat.families import FAMILIES_OF_MODELS, family_chat
from tests.rollout.black_box import chat
from tests.rollout.masked_tokens import MaskedTokens, masks_of, sample_turn, words_chat
from tests.rollout.test_answer_rules import TOOLS, small_model, tool

pytest.importorskip("llguidance", reason="make install installs it")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Turns of one row gain nothing from more."""
    torch.set_num_threads(1)


USER = [{"role": "user", "content": "task"}]
LIMITS = EpisodeLimits(max_total_tokens=4000, turn_tokens=1200, max_turns=40)
NAMES = st.sampled_from(["a", "name", "the key", 'quo"te', "é", "x/y~z", "type"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "integer"}),
    st.just({"type": "number"}),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"}),
    st.just({"type": ["boolean", "null"]}),
    st.just({"enum": ["x", 1, None, {"y": [2.5]}]}),
    st.just({"const": "é\n\"'"}),
    st.just({"$ref": "#/$defs/leaf"}),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: list[bool]) -> dict[str, Any]:
        names = [name for name, is_in in zip(properties, required, strict=False) if is_in]
        return {"type": "object", "properties": properties, "required": names}

    return st.builds(
        build,
        st.dictionaries(NAMES, inner, min_size=1, max_size=4),
        st.lists(st.booleans(), min_size=4, max_size=4),
    )


def _composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        _objects(inner),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


SCHEMAS = st.recursive(LEAVES, _composed, max_leaves=8).map(
    lambda schema: {**schema, "$defs": {"leaf": {"type": "boolean"}}}
)
"""Schemas of the kinds that clients' libraries write."""


def json_rule(schema: dict[str, Any] | None = None) -> JsonAnswer:
    return JsonAnswer(None if schema is None else read_schema(schema, "schema"))


def build(of: TemplateChat, rules: AnswerRules, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the grammar of an answer. Raises ApiError, also if the engine refuses it."""
    prompt = of.opening(USER, tools)
    grammars = AnswerGrammars(of)
    grammar = grammars.build(rules, tuple(tools), prompt)
    if grammar:
        asyncio.run(grammars.check(grammar))
    return grammar


def broken(
    of: TemplateChat, ids: list[int], rules: AnswerRules, tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, ...]:
    """Return the rules that a turn breaks, as the endpoint finds them."""
    turn = of.parse(ids, tools)
    answer = build_message(turn, [1], ids, reads_calls=bool(tools) and rules.reads_calls)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
    problems = [call.problem for call in turn.tool_calls if call.problem]
    return (*rules.find_broken(answer.content, calls), *problems)


def may_end(of: TemplateChat, grammar: str, ids: list[int]) -> bool:
    """Return whether a turn with these tokens may end. Raises ValueError if it has left its
    grammar."""
    packed = masks_of(of).allocate(1)
    masks_of(of).start(grammar, ids).fill(packed[0])
    stop = of.stop_ids[0]
    return bool(packed.view("u4")[0, stop // 32] >> stop % 32 & 1)


def check_turns(
    of: TemplateChat,
    rules: AnswerRules,
    tools: Sequence[dict[str, Any]] = (),
    *,
    seeds: Sequence[int] = range(12),
    ended: int = 1,
) -> list[str]:
    """Sample turns, check those that were not cut off, of which there are at least ``ended``, and
    return their texts."""
    grammar = build(of, rules, tools)
    opens = of.find_reasoning(of.opening(USER, tools)) == "open"
    texts = []
    for seed in seeds:
        # Random logits would hardly ever end the reasoning that a prompt has opened.
        ids, is_whole = sample_turn(of, grammar, seed, of.encode("so</think>") if opens else ())
        if is_whole:
            text = of.decode(ids)
            problems = broken(of, ids, rules, tools)
            # No grammar keeps the free keys of an object apart; the endpoint refuses such a call.
            if any(problem.endswith("is given twice") for problem in problems):
                continue
            assert problems == (), text
            texts.append(text)
    assert len(texts) >= ended
    return texts


@pytest.mark.parametrize("of", [chat(), words_chat()], ids=["builtin", "bpe"])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_answers_fit_random_schemas(of: TemplateChat, schema: dict[str, Any], seed: int) -> None:
    """For the tokenizer of the built-in policy, and for one whose tokens hold several signs."""
    check_turns(of, AnswerRules(json=json_rule(schema)), seeds=[seed], ended=0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("of", [chat(), words_chat()], ids=["builtin", "bpe"])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=1500, deadline=None)
def test_answers_fit_many_random_schemas(
    of: TemplateChat, schema: dict[str, Any], seed: int
) -> None:
    check_turns(of, AnswerRules(json=json_rule(schema)), seeds=range(seed, seed + 4), ended=0)


@pytest.mark.parametrize("of", [chat(), words_chat()], ids=["builtin", "bpe"])
def test_json_objects_parse(of: TemplateChat) -> None:
    """Of any keys and depth. A key may be repeated, which the grammar cannot know."""
    grammar = build(of, AnswerRules(json=json_rule()))
    whole = 0
    for seed in range(20):
        ids, is_whole = sample_turn(of, grammar, seed)
        if is_whole:
            whole += 1
            assert isinstance(json.loads(of.parse(ids).content), dict)
    assert whole >= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [chat(), words_chat(), family_chat("llama3.2")], ids=["builtin", "bpe", "llama"]
)
def test_required_calls_are_made_and_fit(of: TemplateChat) -> None:
    """Of any tool or of a named one, several or one, with the arguments that the schemas allow."""
    tools = [tool("look"), tool('le"ap'), {"type": "function", "function": {"name": "rest"}}]
    single = {"tool_choice": "required", "parallel_calls": False}
    check_turns(of, AnswerRules(**single), tools, ended=8)
    # The vocabulary is made from pages, which may make a name as rare as one turn in ten.
    grammar = build(of, AnswerRules(**single), tools)
    turns = [of.decode(sample_turn(of, grammar, seed)[0]) for seed in range(60)]
    assert any("look" in text for text in turns) and any('le\\"ap' in text for text in turns)
    named = AnswerRules(tool_choice="required", tool_names=('le"ap',))
    texts = check_turns(of, named, tools, ended=1)
    assert all('le\\"ap' in text and "look" not in text for text in texts)
    strict = {"look": JsonSchema(json.dumps(tool("look")["function"]["parameters"]))}
    check_turns(of, AnswerRules(**single, strict_tools=strict), tools, ended=8)


def test_calls_have_the_form_that_the_chat_template_writes() -> None:
    """What a policy was trained on is allowed, so that the mask does not push it elsewhere."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"x": 3}}}] * 2,
    }
    for of in (chat(), words_chat(), family_chat("llama3.2")):
        turn = (
            message if of.family != "llama" else message | {"tool_calls": message["tool_calls"][:1]}
        )
        grammar = build(of, AnswerRules(tool_choice="required"), TOOLS)
        assert may_end(of, grammar, of.encode_turn(turn, TOOLS))


def test_an_answer_may_be_json_or_calls_where_tools_are_offered() -> None:
    rules = AnswerRules(json=json_rule({"type": "boolean"}))
    texts = check_turns(chat(), rules, TOOLS, seeds=range(30), ended=15)
    assert {text for text in texts if "<tool_call>" not in text} <= {"true", "false"}
    assert 0 < sum("<tool_call>" in text for text in texts) < len(texts)
    no_calls = AnswerRules(json=json_rule({"type": "boolean"}), tool_choice="none")
    assert set(check_turns(chat(), no_calls, TOOLS)) == {"true", "false"}


@pytest.mark.parametrize("special_tags", [False, True])
def test_reasoning_is_free_up_to_its_closing_tag(special_tags: bool) -> None:
    """Where the chat template knows reasoning: opened by the policy, or by the prompt. The mask
    holds from the closing tag on."""
    of = words_chat(special_tags=special_tags)
    rules = AnswerRules(json=json_rule({"type": "boolean"}))
    own = build(of, rules)
    mark = of._tokenizer.encode("<think>", add_special_tokens=False)
    close = of._tokenizer.encode("</think>", add_special_tokens=False)
    words = of.encode('I think { "x" }\n\nor <b>')
    answer = of.encode("\n\ntrue")
    for ids in (of.encode("true"), [*mark, *words, *close, *answer]):
        assert may_end(of, own, ids)
        assert broken(of, ids, rules) == ()
    refused = [*mark, *words, *close, *words]
    with pytest.raises(ValueError, match="do not follow"):
        masks_of(of).start(own, refused)
    with pytest.raises(ValueError, match="do not follow"):
        masks_of(of).start(own, words)
    prompt = [*of.opening(USER), *mark]
    opened = AnswerGrammars(of).build(rules, (), prompt)
    assert may_end(of, opened, [*words, *close, *answer])
    assert not may_end(of, opened, of.encode("true")), "still reasoning"
    for tag in ("<think>", "<tool_call>"):
        spelt = [token for letter in tag for token in of.encode(letter)]
        for ids in (of.encode(tag), spelt):
            with pytest.raises(ValueError, match="do not follow"):
                masks_of(of).start(opened, [*words, *ids])
    shut = AnswerGrammars(of).build(
        rules, (), [*prompt, *of.encode("\n\n"), *close, *of.encode("\n\n")]
    )
    assert "thought" not in shut and "body" not in shut


def test_requests_without_rules_and_other_rules_are_sampled_freely() -> None:
    for rules in (
        AnswerRules(),
        AnswerRules(tool_names=("look",)),
        AnswerRules(parallel_calls=False, stop=("x",)),
        AnswerRules(tool_choice="none"),
    ):
        assert build(chat(), rules, TOOLS) == ""


@pytest.mark.parametrize("name", sorted(FAMILIES_OF_MODELS))
def test_each_family_follows_the_rules_or_says_that_it_cannot(name: str) -> None:
    of = family_chat(name)
    if of.family in ("harmony", "gemma", "mistral"):
        with pytest.raises(
            ValueError, match=r"agent_structured=constrain: .* have no grammar; use"
        ):
            AnswerGrammars(of)
        return
    check_turns(of, AnswerRules(json=json_rule({"type": "boolean"})), ended=6)
    required = AnswerRules(tool_choice="required", parallel_calls=False)
    if of.family in ("hermes", "llama"):
        check_turns(of, required, TOOLS, ended=6)
        return
    with pytest.raises(ApiError, match=r"have no token mask; set rollout.agent_structured=check"):
        build(of, required, TOOLS)


def test_schemas_without_a_grammar_are_refused_or_checked_only() -> None:
    with pytest.raises(ApiError, match="cannot be turned into a token mask") as refused:
        build(chat(), AnswerRules(json=json_rule({"type": "string", "pattern": "(?=a)b"})))
    assert refused.value.status == 400
    rules = AnswerRules(json=json_rule({"type": "integer", "not": {"const": 5}}))
    ids = [*chat().encode("5"), chat().stop_ids[0]]
    masks_of(chat()).start(build(chat(), rules), ids[:-1])
    assert broken(chat(), ids, rules) == ("response_format",), "counted as without a mask"
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "nonsense"}}}
    check_turns(chat(), AnswerRules(tool_choice="required", parallel_calls=False), [odd])


class Gate:
    """A check of grammars that waits until it is opened, then is the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._opened = threading.Event()
        self._check = answer_grammar._find_problem
        monkeypatch.setattr(answer_grammar, "_find_problem", self._find_problem)

    def open(self) -> None:
        self._opened.set()

    def _find_problem(self, grammar: str) -> str:
        self.calls.append(grammar)
        # On the event loop itself nobody could open it.
        assert self._opened.wait(20), "the event loop stands still while a grammar is checked"
        return self._check(grammar)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_event_loop_goes_on_while_a_grammar_is_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    grammars = AnswerGrammars(chat())
    good = grammars.build(AnswerRules(json=json_rule({"type": "null"})), (), [])
    waiting = [asyncio.create_task(grammars.check(good)) for _ in range(3)]
    await until(lambda: gate.calls)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    gate.open()
    await asyncio.gather(*waiting[1:])
    await grammars.check(good)
    assert gate.calls == [good]
    bad = grammars.build(
        AnswerRules(json=json_rule({"type": "string", "pattern": "(?=a)b"})), (), []
    )
    for _ in range(2):
        with pytest.raises(ApiError, match="cannot be turned into a token mask"):
            await grammars.check(bad)
    assert gate.calls == [good, bad]
    monkeypatch.setattr(answer_grammar, "_CACHED", 1)
    await grammars.check(grammars.build(AnswerRules(tool_choice="required"), tuple(TOOLS), []))
    await grammars.check(good)
    assert len(gate.calls) == 4 and gate.calls[-1] == good, "forgotten, so checked again"


async def test_a_check_that_raises_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = answer_grammar._find_problem
    grammars = AnswerGrammars(chat())
    grammar = grammars.build(AnswerRules(json=json_rule({"type": "null"})), (), [])

    def fail(grammar: str) -> str:
        raise MemoryError("no room for the automaton")

    monkeypatch.setattr(answer_grammar, "_find_problem", fail)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            await grammars.check(grammar)
    monkeypatch.setattr(answer_grammar, "_find_problem", check)
    await grammars.check(grammar)


async def test_a_session_that_ends_while_a_grammar_is_checked_drops_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    tokens = MaskedTokens(chat(), small_model(len(chat()._tokenizer) + 11), GenConfig())
    sessions = OpenAiSessions(chat(), LIMITS, constrain=True)
    asked = [OpenAiMessage("user", "task")]
    rules = AnswerRules(json=json_rule({"type": "boolean"}))
    try:
        session = sessions.open(tokens, slot=3, seed=7)
        request = asyncio.create_task(session.sample(asked, rules=rules))
        await until(lambda: gate.calls)
        session.end()
        with pytest.raises(ApiError, match="this session has ended"):
            await request
        assert session.ledger.turns == session.ledger._n_running == 0
        gate.open()
        other = sessions.open(tokens, slot=4, seed=7)
        turn = await other.sample(asked, rules=rules)
        other.keep(turn)
        assert turn.answer.content.strip() in ("true", "false") and len(gate.calls) == 1
        refused = AnswerRules(json=json_rule({"type": "string", "pattern": "(?=a)b"}))
        with pytest.raises(ApiError) as error:
            await other.sample(asked, rules=refused)
        assert error.value.status == 400 and other.engine_error is None
        assert (other.ledger.turns, other.ledger._n_running) == (1, 0)
    finally:
        tokens.engine.close()


def test_schemas_are_narrowed_to_what_was_asked_for() -> None:
    anything = {"$ref": "#/$defs/_any_json_value"}
    narrowed = narrow_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": "object"}},
            "required": ["a"],
        }
    )
    assert narrowed["additionalProperties"] is False
    assert narrowed["properties"]["a"]["maximum"] == 2**53 - 1
    assert narrowed["properties"]["b"] == anything
    assert narrowed["properties"]["c"]["additionalProperties"] == anything
    assert "$defs" in narrowed
    bounded = {"type": "integer", "minimum": 3}
    assert narrow_schema(bounded) == bounded
    merged = {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    }
    assert narrow_schema(merged) == merged, "both schemas apply to the same object"
    check_turns(chat(), AnswerRules(json=json_rule(merged)), seeds=range(4), ended=0)
    assert narrow_schema({"title": "anything"}) == {
        "title": "anything",
        **anything,
        "$defs": narrowed["$defs"],
    }


@pytest.mark.parametrize(
    "more", [{"required": ["a", "b"]}, {"minProperties": 2}], ids=["required", "minProperties"]
)
def test_an_object_that_needs_unnamed_properties_stays_open(more: dict[str, Any]) -> None:
    """Closed, no value would fit it, and every request with it would be refused."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, **more}
    assert narrow_schema(schema)["additionalProperties"] is not False
    check_turns(chat(), AnswerRules(json=json_rule(schema)), seeds=range(2), ended=0)


@pytest.mark.parametrize("kind", [{"type": ["object", "null"]}, {}], ids=["null", "any type"])
def test_an_object_is_closed_whatever_else_may_be_there(kind: dict[str, Any]) -> None:
    schema = {**kind, "properties": {"a": {"type": "string"}}}
    assert narrow_schema(schema)["additionalProperties"] is False


class Author(BaseModel):
    """Who has written a report."""

    name: str = Field(max_length=6)


class Report(BaseModel):
    """What an agent asks for, so short that no limit of tokens cuts it off."""

    title: str = Field(max_length=9)
    grade: Literal["good", "bad"]
    counts: list[int] = Field(max_length=3)
    author: Author | None = None


@asynccontextmanager
async def played(of: TemplateChat, config: GenConfig) -> AsyncIterator[tuple[Any, OpenAiSession]]:
    """A session whose turns a small model samples under the grammars of its requests, and its
    client."""
    model = small_model(len(of._tokenizer) + 11)
    with torch.no_grad():
        # A model whose turns end: what closes something is more probable.
        model.lm_head.weight *= 3
    tokens = MaskedTokens(of, model, config)
    server = OpenAiServer(OpenAiSessions(of, LIMITS, constrain=True))
    await server.start()
    http = openai.DefaultAsyncHttpxClient(
        trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    session = server.sessions.open(tokens, slot=3, seed=7)
    try:
        async with openai.AsyncOpenAI(
            base_url=server.base_url(session), api_key="x", max_retries=0, http_client=http
        ) as client:
            yield client, session
    finally:
        server.sessions.close(session)
        await server.stop()
        tokens.engine.close()


@pytest.mark.slow
async def test_answers_of_a_random_model_fit_through_the_real_client() -> None:
    """Each way to ask for a form, in one session: whatever is not cut off parses in the client, no
    rule is broken, and the trajectories hold both log-probabilities."""
    closed = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": closed}}
    async with played(chat(), GenConfig(max_new_tokens=1200)) as (client, session):
        for number in range(2):
            asked = [{"role": "user", "content": f"task {number}"}]
            report = await client.chat.completions.parse(
                model="m", messages=asked, response_format=Report
            )
            assert isinstance(report.choices[0].message.parsed, Report)
            called = await client.chat.completions.create(
                model="m",
                messages=asked,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
            )
            (call,) = called.choices[0].message.tool_calls
            assert json.loads(call.function.arguments).keys() == {"x"}
            response = await client.responses.create(model="m", input=f"task {number}", text=form)
            assert json.loads(response.output_text).keys() == {"x"}
            free = await client.chat.completions.create(
                model="m", messages=[*asked, {"role": "user", "content": "free"}]
            )
            assert free.choices[0].message.content
        assert session.ledger.broken == 0 and session.ledger.checked == 6
        session.end()
        outcomes = session.outcomes(Ending("finished", 1.0))
    masked = [outcome for outcome in outcomes if outcome.unmasked_logprobs]
    assert len(masked) == 6 and len(outcomes) == 8, "free turns have one log-probability"
    for outcome in masked:
        pairs = [*zip(outcome.logprobs, outcome.unmasked_logprobs, strict=True)]
        assert len(pairs) == len(outcome.completion_ids)
        assert all(masked >= unmasked - 1e-4 for masked, unmasked in pairs)
        assert sum(outcome.logprobs) > sum(outcome.unmasked_logprobs) + 1
    sample = outcomes_to_sample(["a"], [outcomes], unmasked=True)
    trained = sample["loss_mask"].sum()
    differs = sample["unmasked_logprobs"] != sample["packed_logprobs"]
    assert len(sample["unmasked_logprobs"]) == len(sample["packed_logprobs"])
    assert 0 < differs.sum() < trained
