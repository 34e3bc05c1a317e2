"""Grammars of answers, by which an engine masks tokens so that an answer follows the rules of its
request (``rollout.agent_structured=constrain``).

A grammar is a text in the Lark syntax of the package llguidance, whose nested schemas follow
``%json``. It covers a whole turn: reasoning, which is free up to its closing tag, then the JSON or
the calls, then the end of the turn.

The grammar of a schema allows less than the schema in three ways, so that a policy does not write
what nobody asked for: objects have no properties besides those that the schema names, numbers
without bounds are such that every parser reads them alike, and white space is short. Keywords that
llguidance does not know allow anything. Answers are checked as without a grammar, so what slips
through is counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.api.chat_template import TemplateChat
from realhf.api.tool_parser import HERMES, LLAMA, MAX_CALLS
from realhf.rollout.answer_rules import AnswerRules
from realhf.rollout.api_errors import ApiError, unsupported
from realhf.rollout.json_schema import iterate_schemas, read_schema
from realhf.rollout.openai_requests import ToolSchemas

_CALL_FAMILIES = (HERMES, LLAMA)
"""Syntaxes of tool calls that have a grammar."""
_OTHER_TAGS = ("harmony", "gemma", "mistral")
"""Syntaxes whose reasoning or words stand in tags of their own, for which there is no grammar."""
_CACHED = 256
"""Number of grammars whose validity is remembered."""
_JSON_OPTIONS = {"whitespace_pattern": "\\n? {0,32}", "lenient": True}
"""Options of llguidance for schemas: white space between two signs, and what to do about keywords
that it does not know."""
_MAX_INTEGER = 2**53 - 1
"""Largest integer where a schema gives no bounds, which every parser of JSON reads exactly."""
_MAX_NUMBER = 10**15
"""Largest number where a schema gives no bounds."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NOTES = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
)
"""Keywords of a schema that allow or forbid nothing."""
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "if")
"""Keywords by which other schemas apply to the same value."""
_ANY = "_any_json_value"
"""Name of the definition of any value, which no request is likely to use."""
_ANY_SCHEMA: Mapping[str, Any] = {
    "anyOf": [
        {"type": ["boolean", "null", "string"]},
        {"type": "number", "minimum": -_MAX_NUMBER, "maximum": _MAX_NUMBER},
        {"type": "array", "items": {"$ref": f"#/$defs/{_ANY}"}},
        {"type": "object", "additionalProperties": {"$ref": f"#/$defs/{_ANY}"}},
    ]
}


class AnswerGrammars:
    """Builder of the grammars of one policy's answers.

    Use it on one event loop. Raises ValueError, which names the option, for a chat template whose
    answers have no grammar.
    """

    def __init__(self, chat: TemplateChat) -> None:
        if chat.family in _OTHER_TAGS:
            raise ValueError(
                f"rollout.agent_structured=constrain: answers in the syntax {chat.family!r} of the "
                f"chat template have no grammar; use rollout.agent_structured=check"
            )
        self._chat = chat
        self._checks: OrderedDict[str, asyncio.Task[str]] = OrderedDict()

    def build(self, rules: AnswerRules, tools: ToolSchemas, prompt: Sequence[int]) -> str:
        """Return the grammar of the answer to a request, "" if the policy may answer freely.

        prompt: ids before the turn. Raises ApiError for rules that have no grammar. Whether the
        engine accepts the grammar is what ``check`` finds out.
        """
        must_call = rules.tool_choice == "required"
        if rules.json is None and not must_call:
            return ""
        answers: list[str] = []
        lines: list[str] = []
        if tools and rules.reads_calls:
            answers.append("calls")
            lines += self._write_calls(rules, tools)
        if rules.json is not None and not must_call:
            answers.append("json")
            schema = {"type": "object"} if rules.json.schema is None else rules.json.schema.value
            lines.append(f"json: {_write_schema(schema)}")
        reasoning, thoughts = self._write_reasoning(prompt)
        return "\n".join(
            [f"start: {reasoning}({' | '.join(answers)})", *lines, *thoughts, "GAP: /[ \\n]{1,4}/"]
        )

    async def check(self, grammar: str) -> None:
        """Raise ApiError if the engine would refuse a grammar of ``build``.

        A grammar is checked once, however many requests have it, and in a thread: large schemas
        take some tenths of a second, in which all other sessions of the event loop would wait.
        """
        check = self._checks.get(grammar)
        if check is None:
            check = asyncio.create_task(asyncio.to_thread(_find_problem, grammar))
            self._checks[grammar] = check
            check.add_done_callback(lambda ended: self._forget_failed(grammar, ended))
            if len(self._checks) > _CACHED:
                self._checks.popitem(last=False)
        self._checks.move_to_end(grammar)
        # A request that is cancelled must not end the check for the others that wait for it.
        if problem := await asyncio.shield(check):
            raise ApiError(
                400,
                "invalid_schema",
                f"a schema of the request cannot be turned into a token mask "
                f"(rollout.agent_structured=constrain): {problem}",
            )

    def _forget_failed(self, grammar: str, check: asyncio.Task[str]) -> None:
        """Forget a check that raised: that says nothing about the grammar, so the next request has
        it checked again."""
        failed = check.cancelled() or check.exception() is not None
        if failed and self._checks.get(grammar) is check:
            del self._checks[grammar]

    def _write_reasoning(self, prompt: Sequence[int]) -> tuple[str, list[str]]:
        """Return the symbols of the reasoning at the beginning of a turn, and their rules."""
        tag = self._chat.find_reasoning(prompt)
        if tag is None:
            return "", []
        # The parser would take these tags for the beginning of the answer.
        lines = ["THOUGHT: /(?s:.*)/ & ~/(?s:.*(<think>|<tool_call>).*)/"]
        if self._chat.find_added_token("</think>") is None:
            lines.append('body[suffix="</think>"]: THOUGHT')
        else:
            lines.append(f"body: THOUGHT {self._quote('</think>')}")
        if tag == "open":
            return "body GAP? ", lines
        return "(thought GAP?)? ", [*lines, f"thought: {self._quote('<think>')} body"]

    def _write_calls(self, rules: AnswerRules, tools: ToolSchemas) -> Iterator[str]:
        """Yield the rules of ``calls``. Raises ApiError for a syntax without a grammar."""
        family = self._chat.family
        if family not in _CALL_FAMILIES:
            raise unsupported(
                "tool_choice",
                f"calls in the syntax {family!r} of the chat template have no token mask; set "
                f"rollout.agent_structured=check",
            )
        allowed = [
            (number, tool["function"])
            for number, tool in enumerate(tools)
            if not rules.tool_names or tool["function"]["name"] in rules.tool_names
        ]
        more = f" (more call){{0,{MAX_CALLS - 1}}}" if rules.parallel_calls else ""
        options = " | ".join(f"call_{number}" for number, _ in allowed)
        yield f"calls: call{more}"
        if family == LLAMA:
            key = "parameters"
            yield 'more: "; "'
            yield f"call: {options}"
        else:
            key = "arguments"
            yield "more: GAP?"
            opening = self._quote("<tool_call>")
            yield f'call: {opening} "\\n"? ({options}) "\\n"? {self._quote("</tool_call>")}'
        for number, function in allowed:
            before = f'{{"name": {_quote_text(function["name"])}, "{key}": '
            schema = _read_parameters(function.get("parameters"))
            yield f"call_{number}: {_quote_text(before)} arguments_{number} {_quote_text('}')}"
            yield f"arguments_{number}: {_write_schema(schema)}"

    def _quote(self, tag: str) -> str:
        """Return a tag in the form of the grammar: by its id if it is a token of its own, which
        llguidance takes for a special one that matches no text."""
        token = self._chat.find_added_token(tag)
        return _quote_text(tag) if token is None else f"<[{token}]>"


def _quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_parameters(parameters: Any) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are an object. A schema that is not valid or
    not served, as the endpoint accepts it for tools that are not strict, allows any object."""
    schema = {"type": "object", **(parameters or {})}
    try:
        return read_schema(schema, "").value
    except ApiError:
        return {"type": "object"}


def _find_problem(grammar: str) -> str:
    """Return why llguidance refuses a grammar; "" if it does not."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if problem.startswith("WARNING"):
        return ""
    return problem.partition("\n")[0][:200]


def _write_schema(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON values that fit a schema."""
    narrowed = {**narrow_schema(schema), "x-guidance": _JSON_OPTIONS}
    return f"%json {json.dumps(narrowed, ensure_ascii=False)}"


def narrow_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows less, as the module's docstring says. ``schema`` is valid."""
    whole: dict[str, Any] = json.loads(json.dumps(schema))
    parts = [part for _, part in iterate_schemas(whole)]
    for part in parts:
        _bound_numbers(part)
    # Where several schemas apply to one value, none of them alone knows all of its properties.
    if any(
        "allOf" in part or ("properties" in part and any(key in part for key in _COMPOSED))
        for part in parts
    ):
        return whole
    for part in parts:
        types = _types_of(part)
        is_object = "object" in types or (types == [None] and "properties" in part)
        if is_object and not any(key in part for key in _COMPOSED):
            part.setdefault("additionalProperties", _needs_others(part))
        if part.get("type") == "array" and "prefixItems" not in part:
            part.setdefault("items", True)
    _name_any(whole, parts)
    return whole


def _types_of(part: Mapping[str, Any]) -> list[Any]:
    """Return the names of the types that a schema allows; [None] if it does not say."""
    types = part.get("type")
    return types if isinstance(types, list) else [types]


def _needs_others(part: Mapping[str, Any]) -> bool:
    """Return whether an object has no named properties, or cannot fit with these alone."""
    named = part.get("properties")
    if named is None or part.get("minProperties", 0) > len(named):
        return True
    return not named.keys() >= set(part.get("required", ()))


def _bound_numbers(part: dict[str, Any]) -> None:
    """Add bounds to a schema of numbers that has none."""
    names = _types_of(part)
    if any(key in part for key in (*_BOUNDS, "enum", "const")):
        return
    if "number" in names:
        part |= {"minimum": -_MAX_NUMBER, "maximum": _MAX_NUMBER}
    elif "integer" in names:
        part |= {"minimum": -_MAX_INTEGER, "maximum": _MAX_INTEGER}


def _name_any(whole: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Replace schemas that allow any value within ``whole`` by a reference to ``_ANY_SCHEMA``."""
    reference = {"$ref": f"#/$defs/{_ANY}"}
    for part in parts:
        for key in ("additionalProperties", "items"):
            if _allows_all(part.get(key)):
                part[key] = dict(reference)
        for name, inner in part.get("properties", {}).items():
            if _allows_all(inner):
                part["properties"][name] = dict(reference)
        for key in ("prefixItems", "anyOf", "oneOf"):
            if key in part:
                part[key] = [dict(reference) if _allows_all(e) else e for e in part[key]]
    if whole.keys() <= _NOTES | {"$defs", "definitions"}:
        whole |= reference
    if reference["$ref"] in json.dumps(whole):
        whole.setdefault("$defs", {})[_ANY] = dict(_ANY_SCHEMA)


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _NOTES)
