"""Parser that splits policy turns into reasoning, tool calls in the syntax of the chat template,
and the remaining content."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from realhf.api.environment import AssistantMessage, ToolCall

HERMES = "hermes"
XML = "xml"
LLAMA = "llama"
PLAIN = "plain"
FAMILIES = (HERMES, XML, LLAMA, PLAIN)
"""Syntaxes of tool calls.

``hermes``: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen 2.5 and 3,
SmolLM). ``xml``: ``<tool_call><function=name><parameter=key>`` (Qwen3-Coder). ``llama``: ``{"name":
..., "parameters": {...}}`` as the whole turn (Llama 3). ``plain``: no calls or an unknown syntax,
so that calls remain text.
"""
AUTO = "auto"
"""Option value that selects one of ``FAMILIES`` according to the chat template."""
_RESERVED_VARIABLES = frozenset(
    {"messages", "add_generation_prompt", "tokenize", "chat_template", "tools"}
)
"""Variables of the chat template that are set at every rendering."""


def detect_family(template: str) -> str:
    """Return which syntax in ``FAMILIES`` a chat template uses for tool calls; "plain" if it uses
    none of the others."""
    if "<tool_call>" in template:
        return XML if "<function=" in template else HERMES
    if "<|python_tag|>" in template or re.search(r'"parameters\\?":', template):
        return LLAMA
    return PLAIN


def template_reads_tools(template: str) -> bool:
    """Return whether a chat template reads tool schemas."""
    return bool(re.search(r"\btools\b", template))


def find_unread_variables(template: str, names: Iterable[str]) -> list[str]:
    """Return those ``names`` that have no effect as template variables: names that do not occur in
    the template, and names that every rendering sets itself."""
    return [
        name
        for name in names
        if name in _RESERVED_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", template)
    ]


MAX_CALLS = 64
"""Maximum number of calls in a turn."""
_THINK = "<think>"
_THINK_END = "</think>"
_CALL_START = "<tool_call>"
_CALL_END = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(r"</?think>|<tool_call>")
"""Tags outside of calls, for families that mark calls with tags."""
_THINK_TAG = re.compile(r"</?think>")
"""Tags of reasoning."""
_MALFORMED_END = re.compile(r"</tool_call>|(?=<tool_call>|</?think>)")
"""End of a malformed call: its closing tag, or the start of the next tag."""
_SPACE = re.compile(r"\s*")
_LLAMA_CALL_START = re.compile(r'\{\s*("(name|parameters|type)"|$)')
"""Start of a JSON object that looks like a call in the Llama syntax."""
_Read = Callable[[str, int, int], tuple[list[ToolCall], int]]
"""Parser of one call: (text, position after the opening tag, number of previous calls) -> (calls,
position after the call)."""


def parse_turn(
    text: str, family: str, *, token_count: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> AssistantMessage:
    """Parse a policy turn whose calls have the syntax ``family`` (one of ``FAMILIES``).

    Reasoning is the text between ``<think>`` and ``</think>``. If the closing tag is missing, the
    reasoning extends to the end; if the opening tag was in the prompt, it starts at the beginning.
    Calls within reasoning are ignored; tags within a well-formed call are part of the call. The
    content is the remaining text, stripped of white space if anything was removed. At most
    ``MAX_CALLS`` calls are parsed; the next one becomes a call with a problem that includes the
    rest of the turn.

    tools: schemas from which argument types are taken in the syntax ``xml``, whose arguments are
    not JSON.
    """
    if family == LLAMA:
        reasoning = ""
        (content, calls) = _parse_llama_calls(text)
        if not calls or any(call.problem for call in calls):
            reasoning, content, _ = _parse_tags(text, None)
            content, calls = _parse_llama_calls(content)
    else:
        reader = {HERMES: _read_hermes, XML: partial(_read_xml, tools=tools)}.get(family)
        reasoning, content, calls = _parse_tags(text, reader)
    return AssistantMessage(content, tuple(calls), reasoning, text, token_count)


def _parse_tags(text: str, read: _Read | None) -> tuple[str, str, list[ToolCall]]:
    """Return (reasoning, content, calls) of a turn. ``read`` parses a call; None if the syntax has
    no calls."""
    tag = _TAG if read else _THINK_TAG
    match = tag.search(text)
    if match is None:
        return "", text, []
    thoughts: list[str] = []
    words: list[str] = []
    calls: list[ToolCall] = []
    place = reasoning_end = 0
    while match is not None:
        words.append(text[place : match.start()])
        place = match.end()
        if match[0] == _THINK:
            end = text.find(_THINK_END, place)
            thoughts.append(text[place:] if end < 0 else text[place:end])
            place = len(text) if end < 0 else end + len(_THINK_END)
        elif match[0] == _THINK_END:
            thoughts = []
            words = []
            calls = []
            reasoning_end = match.start()
        elif len(calls) >= MAX_CALLS:
            calls.append(
                malformed_call(
                    f"a turn has at most {MAX_CALLS} calls", text[match.start() :], len(calls)
                )
            )
            place = len(text)
        elif read is not None:
            read_calls, place = read(text, place, len(calls))
            calls += read_calls
        match = tag.search(text, place)
    words.append(text[place:])
    thoughts = [text[:reasoning_end], *thoughts]
    return (
        "\n".join(filter(None, (thought.strip() for thought in thoughts))),
        "".join(words).strip(),
        calls,
    )


def _read_hermes(text: str, start: int, number: int) -> tuple[list[ToolCall], int]:
    """Parse a call, or a list of calls, as JSON; see ``_Read``."""
    try:
        value, end = read_json(text, _skip_space(text, start))
        end = _skip_space(text, end)
        if not text.startswith(_CALL_END, end):
            raise CallProblem(f"{_CALL_END} does not follow the JSON of a call")
    except CallProblem as error:
        return _read_malformed_call(str(error), text, start, number)
    place = end + len(_CALL_END)
    source = text[start - len(_CALL_START) : place]
    values = value if isinstance(value, list) and value else [value]
    calls = [
        build_call(item, source, position, arguments_key="arguments")
        for position, item in enumerate(values[: MAX_CALLS - number], number)
    ]
    if number + len(values) > MAX_CALLS:
        calls.append(malformed_call(f"a turn has at most {MAX_CALLS} calls", source, MAX_CALLS))
    return calls, place


def _read_xml(
    text: str, start: int, number: int, *, tools: Sequence[Mapping[str, Any]]
) -> tuple[list[ToolCall], int]:
    """Parse a call of the XML family; see ``_Read``."""
    try:
        name, arguments, end = read_xml_call(text, start, tools)
    except CallProblem as error:
        return _read_malformed_call(str(error), text, start, number)
    call = build_call(
        {"name": name, "arguments": arguments},
        text[start - len(_CALL_START) : end],
        number,
        arguments_key="arguments",
    )
    return [call], end


def _read_malformed_call(
    problem: str, text: str, start: int, number: int
) -> tuple[list[ToolCall], int]:
    """Return a malformed call that extends to its closing tag or the next tag; see ``_Read``."""
    end = _MALFORMED_END.search(text, start)
    if end is None or end[0] != _CALL_END:
        problem = f"{_CALL_END} is missing ({problem})"
    place = end.end() if end else len(text)
    return [malformed_call(problem, text[start - len(_CALL_START) : place], number)], place


def _parse_llama_calls(content: str) -> tuple[str, list[ToolCall]]:
    """Return (content, calls) of a turn, of which either the content or the list of calls is empty.
    Several calls are separated by semicolons."""
    words = content.strip()
    tagged = words.startswith(_PYTHON_TAG)
    start = _skip_space(words, len(_PYTHON_TAG) if tagged else 0)
    if not tagged and not words.startswith("{"):
        return content, []
    calls: list[ToolCall] = []
    while start < len(words) or not calls:
        if len(calls) >= MAX_CALLS:
            return "", [
                *calls,
                malformed_call(f"a turn has at most {MAX_CALLS} calls", words[start:], len(calls)),
            ]
        try:
            value, end = read_json(words, start)
        except CallProblem as error:
            if not tagged and not calls and not _LLAMA_CALL_START.match(words):
                return content, []
            return "", [*calls, malformed_call(str(error), words[start:], len(calls))]
        if not tagged and not calls and not (isinstance(value, dict) and "name" in value):
            return content, []
        calls.append(build_call(value, words[start:end], len(calls), arguments_key="parameters"))
        start = _skip_space(words, end)
        if start < len(words) and words[start] != ";":
            return "", [*calls, malformed_call("text follows a call", words[start:], len(calls))]
        start = _skip_space(words, start + 1)
    return "", calls


def _skip_space(text: str, start: int) -> int:
    """Return the position after the white space at ``start``."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


MAX_DEPTH = 32
"""Maximum nesting depth of arguments."""
MAX_NAME_CHARS = 256
"""Maximum number of characters of a function's name."""
_INTEGER_LIMIT = 2**63
"""Upper limit of integers (exclusive); the lower limit is its negative (inclusive)."""
_IGNORED_KEYS = frozenset({"id", "type"})
"""Keys of a call that are allowed but ignored."""


class CallProblem(ValueError):
    """Raised if the policy's text is not a valid call. The message says why."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that starts at ``text[start]``; return it and the position after it.

    Raises CallProblem for invalid JSON, and for values that JSON parsers treat differently:
    repeated keys, numbers beyond 64 bits, unpaired surrogates, and nesting deeper than
    ``MAX_DEPTH``.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except CallProblem:
        raise
    except json.JSONDecodeError as error:
        raise CallProblem(f"no JSON: {error.msg} at character {error.pos - start}") from None
    except (RecursionError, ValueError):
        raise CallProblem(
            "no JSON that can be read: too deep, or a number that is too long"
        ) from None
    check_value(value)
    return value, end


def check_value(value: Any) -> None:
    """Raise CallProblem for a JSON value that is nested too deeply or contains an unpaired
    surrogate."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
        level = below
    if level:
        raise CallProblem(f"nested deeper than {MAX_DEPTH}")


def build_call(value: Any, text: str, position: int, *, arguments_key: str) -> ToolCall:
    """Return the call that a JSON value describes, the ``position``-th (from 0) of its turn.

    text: the call as the policy wrote it. If the value has no key ``arguments_key``, the arguments
    are empty. An invalid call has a ``problem``.
    """
    name = value.get("name") if isinstance(value, dict) else None
    known_name = name if isinstance(name, str) and len(name) <= MAX_NAME_CHARS else ""
    try:
        arguments = _read_arguments(value, arguments_key)
    except CallProblem as error:
        return malformed_call(str(error), text, position, name=known_name)
    return ToolCall(known_name, arguments, call_id(position), text)


def malformed_call(problem: str, text: str, position: int, *, name: str = "") -> ToolCall:
    """Return a call that could not be parsed, with the reason ``problem``."""
    return ToolCall(name, {}, call_id(position), text, problem)


def call_id(position: int) -> str:
    """Return the id of the ``position``-th call (from 0) of a turn."""
    return f"call_{position}"


def _read_arguments(value: Any, key: str) -> Mapping[str, Any]:
    """Return the arguments of a call. Raises CallProblem."""
    if not isinstance(value, dict):
        raise CallProblem(f"a call is a JSON object, not {_describe_type(value)}")
    name = value.get("name")
    arguments = value.get(key, {})
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME_CHARS:
        raise CallProblem(f"the name of a call is a text of 1 to {MAX_NAME_CHARS} characters")
    if unknown := [
        other for other in value if other not in ("name", key) and other not in _IGNORED_KEYS
    ]:
        raise CallProblem(f"a call has the keys name and {key}, not {unknown[0][:64]!r}")
    if not isinstance(arguments, dict):
        raise CallProblem(f"{key} are a JSON object, not {_describe_type(arguments)}")
    return arguments


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CallProblem("a text holds half of a surrogate pair") from None


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises CallProblem for a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise CallProblem(f"the key {repeated[:64]!r} is given twice")
    return result


def _parse_integer(digits: str) -> int:
    """Parse an integer. Raises CallProblem if it needs more than 64 bits."""
    if len(digits) > 20 or not -_INTEGER_LIMIT <= (number := int(digits)) < _INTEGER_LIMIT:
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _parse_number(digits: str) -> float:
    """Parse a float. Raises CallProblem if it is not finite."""
    if not math.isfinite(number := float(digits)):
        raise CallProblem("a number does not fit into 64 bits")
    return number


def _reject_constant(word: str) -> float:
    """Raise CallProblem for NaN and infinities."""
    raise CallProblem(f"{word} is not a JSON number")


def _describe_type(value: Any) -> str:
    """Return the type of a JSON value in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_parse_object,
    parse_int=_parse_integer,
    parse_float=_parse_number,
    parse_constant=_reject_constant,
)


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_END = re.compile(r"</function>\s*</tool_call>")
_PARAMETER_CLOSE = "</parameter>"


def read_xml_call(
    text: str, start: int, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, Any], int]:
    """Parse the call whose body starts at ``start``; return (name, arguments, position after the
    closing tags).

    An argument is a string unless the tool's schema in ``tools`` gives another type; null is read
    as None if the schema allows it. Raises CallProblem.
    """
    function = _FUNCTION.match(text, start)
    if function is None:
        raise CallProblem("<function=...> does not follow <tool_call>")
    name = function[1].strip()
    place = function.end()
    types = _parameter_schemas(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, place)) is not None:
        key = parameter[1].strip()
        end = text.find(_PARAMETER_CLOSE, parameter.end())
        if end < 0:
            raise CallProblem(f"the parameter {key[:64]!r} is not closed")
        if key in arguments:
            raise CallProblem(f"the parameter {key[:64]!r} is given twice")
        arguments[key] = _parse_argument(text[parameter.end() : end].removesuffix("\n"), key, types)
        place = end + len(_PARAMETER_CLOSE)
        while place < len(text) and text[place].isspace():
            place += 1
    end = _END.match(text, place)
    if end is None:
        raise CallProblem("</function></tool_call> does not follow the parameters")
    check_value([name, arguments])
    return name, arguments, end.end()


def _parameter_schemas(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name, with references to ``$defs`` resolved."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters") or {}
            known = parameters.get("properties") or {}
            return {key: _resolve_reference(schema, parameters) for key, schema in known.items()}
    return {}


def _resolve_reference(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """Return a schema, or the schema in ``$defs`` that it refers to."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = parameters
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _parse_argument(text: str, key: str, types: Mapping[str, Any]) -> Any:
    """Parse the text of an argument according to its type in the schema.

    Templates write values other than strings as JSON or, with Jinja's filter ``string``, in Python
    syntax: ``True``, ``None``, ``['a']``.
    """
    kinds = schema_kinds(types.get(key))
    words = text.strip()
    if "null" in kinds and words in _NULLS:
        return None
    if "string" in kinds or not kinds:
        return text
    if words in _PYTHON_WORDS:
        return _PYTHON_WORDS[words]
    try:
        value, end = read_json(words, 0)
    except CallProblem as error:
        if kinds & {"array", "object"} and words[:1] in ("[", "{"):
            return _parse_python_literal(words, key, error)
        raise CallProblem(f"the parameter {key[:64]!r}: {error}") from None
    if end != len(words):
        raise CallProblem(f"the parameter {key[:64]!r}: text follows its value")
    return value


_NULLS = frozenset({"null", "None"})
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_MAX_PYTHON_CHARS = 20_000
"""Maximum number of characters of a Python literal. Compiling one needs several hundred bytes of
memory per character."""


def _parse_python_literal(text: str, key: str, problem: CallProblem) -> Any:
    """Parse a list or mapping that is written as a Python literal.

    Raises CallProblem, with the JSON parser's ``problem``, for an invalid literal or one that JSON
    cannot represent.
    """
    if len(text) <= _MAX_PYTHON_CHARS:
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(text)
            round_tripped, _ = read_json(json.dumps(value, allow_nan=False), 0)
            if round_tripped == value:  # Tuples and keys other than strings change in JSON.
                return round_tripped
    raise CallProblem(f"the parameter {key[:64]!r}: {problem}") from None


def schema_kinds(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; an empty set if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    allowed = {
        kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
    }
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list | tuple) else ():
            allowed |= schema_kinds(alternative)
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    if not allowed:
        allowed = {_TYPE_NAMES.get(type(value), "number") for value in values}
    if allowed and schema.get("nullable") is True:
        allowed.add("null")
    return allowed


_TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
