"""Arguments that are written without their type, which the tool's schema gives."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from realhf.api.tool_syntax.calls import CallProblem, Tools
from realhf.api.tool_syntax.json_values import read_json


def tool_names(tools: Tools) -> set[str]:
    """Return the names of the declared tools."""
    return {str(tool.get("function", tool).get("name")) for tool in tools}


def parameter_schemas(name: str, tools: Tools) -> Mapping[str, Any]:
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


def parse_argument(text: str, key: str, types: Mapping[str, Any]) -> Any:
    """Parse the text of an argument according to its type in the schema.

    Templates write values other than strings as JSON or, with Jinja's filter ``string``, in Python
    syntax: ``True``, ``None``, ``['a']``. Raises CallProblem.
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
    enum = schema.get("enum")
    values = [*enum] if isinstance(enum, list | tuple) else []
    if "const" in schema:
        values.append(schema["const"])
    if not allowed:
        allowed = {_TYPE_NAMES.get(type(value), "number") for value in values}
    if allowed and schema.get("nullable") is True:
        allowed.add("null")
    return allowed


_TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
