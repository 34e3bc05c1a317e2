"""Conversion of the policy's turns into actions of an OpenEnv server, and of the server's
observations into text.

There are three forms of actions: the policy's text fills the action's only text field; a tool takes
the action's fields as its arguments; or the server lists its own tools, which are called by name
(the actions ``list_tools`` and ``call_tool``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.api.environment import AssistantMessage, ToolCall
from realhf.base.text import suggest_names
from realhf.env.loader.validation import format_value, json_problem, replace_surrogates
from realhf.env.openenv_client import EnvError

TOOL_NAME = "act"
"""Name of the tool whose arguments are the fields of the action."""
TEXT = "text"
"""Form in which the policy's text fills one field of the action."""
TOOL = "tool"
"""Form in which a tool takes the fields of the action."""
LISTED = "listed"
"""Form in which the server's own tools are called."""
_METADATA_FIELD = "metadata"
"""Field of every action that the policy does not fill."""
_GENERIC = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of generic action schemas, which mean that the server lists its tools."""
_MAX_SCHEMA_CHARS = 1 << 16
"""Maximum number of characters of a schema as JSON."""
_MAX_TOOLS = 64
"""Maximum number of tools that a server may list."""


class InvalidAction(ValueError):
    """Raised if the policy's turn is not a valid action; the message is for the policy."""


@dataclass(frozen=True)
class ActionForm:
    """How a policy's turn is converted to an action: as text in one field, as a call of a tool with
    the action's fields, or as a call of one of the server's own tools."""

    kind: str
    """TEXT, TOOL or LISTED."""
    text_field: str = ""
    """Field of the action that holds the policy's text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool schemas for the policy."""
    fields: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """Allowed arguments of each tool, by its name; None if any argument is allowed."""
    required: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Required arguments of each tool, by its name."""

    def action(self, call: ToolCall) -> dict[str, Any]:
        """Return the action of a call.

        Raises InvalidAction for a call that could not be parsed, an unknown tool, and missing or
        unknown arguments; the types of arguments are left to the server."""
        if call.problem:
            raise InvalidAction(call.problem)
        if call.name not in self.fields:
            raise InvalidAction(
                f"Tool {call.name[:60]} not found.{suggest_names(call.name, [*self.fields])}"
            )
        if problem := json_problem(call.arguments):
            raise InvalidAction(f"the arguments are no JSON: {problem}")
        allowed = self.fields[call.name]
        for name in call.arguments:
            if allowed is not None and name not in allowed:
                raise InvalidAction(
                    f"{call.name} has no argument {name[:60]!r}{suggest_names(name, sorted(allowed))}"
                )
        for name in sorted(self.required[call.name]):
            if name not in call.arguments:
                raise InvalidAction(f"{call.name} needs the argument {name!r}")
        if self.kind == LISTED:
            return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        return dict(call.arguments)

    def text(self, message: AssistantMessage) -> dict[str, Any]:
        """Return the action for a turn when the policy has no tools."""
        return {self.text_field: replace_surrogates(message.content)}


def build_form(schema: Any, requested: str, field_name: str) -> ActionForm | None:
    """Return the action form for an action with this JSON schema; None if the server lists its own
    tools.

    requested: ``auto``, ``text`` or ``tool``. field_name: the field that holds the text; "" chooses
    it. Raises ValueError naming an option that does not fit the schema.
    """
    _check_schema(schema, "the schema of its action")
    fields = {name: about for name, about in _fields(schema).items() if name != _METADATA_FIELD}
    if schema.get("title") in _GENERIC and requested == "auto" and not field_name:
        return None
    required = [name for name in schema.get("required", ()) if name in fields]
    text_fields = [
        name
        for name, about in fields.items()
        if isinstance(about, Mapping) and about.get("type") == "string"
    ]
    if field_name and field_name not in fields:
        raise ValueError(
            f"env.action_field={field_name}: the action has no such "
            f"field{suggest_names(field_name, [*fields])}"
        )
    if field_name and requested == "tool":
        raise ValueError("env.action_field has no effect with env.action=tool")
    text_field = field_name or _text_field(required, text_fields, alone=len(fields) == 1)
    if requested == "text" and not text_field:
        raise ValueError(
            f"env.action=text: the action has the fields {', '.join(fields)}; name one by "
            f"env.action_field"
        )
    if text_field and requested != "tool":
        if missing := [name for name in required if name != text_field]:
            raise ValueError(
                f"env.action_field={text_field}: the action also needs {', '.join(missing)}; use "
                f"env.action=tool"
            )
        return ActionForm(TEXT, text_field)
    return _tool_form(schema, fields, required)


def build_listed_form(listing: Any) -> ActionForm:
    """Return the form for a server that lists its tools, as a list of maps with ``name``,
    ``description`` and ``input_schema``. Raises ValueError for anything else."""
    if not isinstance(listing, list) or not listing:
        raise ValueError(f"the server lists no tools but {format_value(listing)}")
    if len(listing) > _MAX_TOOLS:
        raise ValueError(f"the server lists {len(listing)} tools, at most {_MAX_TOOLS} are read")
    tools = []
    fields = {}
    required = {}
    for number, tool in enumerate(listing):
        if (
            not isinstance(tool, Mapping)
            or not isinstance(name := tool.get("name"), str)
            or not name
        ):
            raise ValueError(f"tool {number} of the server has no name: {format_value(tool)}")
        schema = tool.get(
            "input_schema", tool.get("inputSchema", {"type": "object", "properties": {}})
        )
        _check_schema(schema, f"the schema of the tool {name[:60]!r}")
        properties = _fields(schema)
        tools.append(_tool(name, str(tool.get("description") or ""), schema, properties))
        open_ended = not properties or schema.get("additionalProperties", False) is not False
        fields[name] = None if open_ended else frozenset(properties)
        required[name] = frozenset(key for key in schema.get("required", ()) if key in properties)
    return ActionForm(LISTED, tools=tuple(tools), fields=fields, required=required)


def _text_field(required: Sequence[str], texts: Sequence[str], *, alone: bool) -> str:
    """Return the only field that the policy's text can fill; "" if there is none or more than
    one."""
    if len(required) == 1:
        return required[0] if required[0] in texts else ""
    return texts[0] if not required and alone and texts else ""


def _tool_form(
    schema: Mapping[str, Any], fields: Mapping[str, Any], required: Sequence[str]
) -> ActionForm:
    """Return the form with one tool that takes the fields of the action."""
    about = str(schema.get("description") or "Take an action.")
    tool = _tool(TOOL_NAME, about, {**schema, "required": [*required]}, fields)
    return ActionForm(
        TOOL, "", (tool,), {TOOL_NAME: frozenset(fields)}, {TOOL_NAME: frozenset(required)}
    )


def _tool(
    name: str, about: str, schema: Mapping[str, Any], properties: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a tool in the format of the chat API; the schema's definitions (``$defs``) are
    kept."""
    parameters: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    parameters |= {key: schema[key] for key in ("required", "$defs") if key in schema}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema."""
    return dict(schema.get("properties") or {})


def _check_schema(schema: Any, name: str) -> None:
    """Raise ValueError unless a value is a JSON schema of an object, small enough for a policy to
    read."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties", {}), Mapping):
        raise ValueError(f"{name} is no JSON schema of an object: {format_value(schema)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{name}: required must be a list of names, not {format_value(required)}")
    if problem := json_problem(schema):
        raise ValueError(f"{name}: {problem}")
    if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
        raise ValueError(f"{name} has more than {_MAX_SCHEMA_CHARS >> 10} KiB")


_WIRE_FIELDS = ("done", "reward", "metadata")
"""Fields of every observation that are part of the protocol and are not shown to the policy."""
_MAX_PROBLEMS = 3
"""Maximum number of problems of a refused action that the policy reads."""


def observation_text(observation: Mapping[str, Any], field: str, max_chars: int) -> str:
    """Return one field of an observation as text, or all of it as JSON if no field is named or it
    is missing; shortened to ``max_chars`` characters. Raises ValueError for a value that is not
    JSON."""
    if problem := json_problem(observation):
        raise ValueError(problem)
    if field and observation.get(field) is not None:
        content = observation[field]
    else:
        content = {name: value for name, value in observation.items() if name not in _WIRE_FIELDS}
    return cut(
        content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), max_chars
    )


def result_text(observation: Mapping[str, Any], max_chars: int) -> str:
    """Return the text result of a call of one of the server's tools, or the reason why the tool
    could not be called; shortened to ``max_chars`` characters. Raises ValueError for a value that
    is not JSON."""
    if problem := json_problem(observation):
        raise ValueError(problem)
    error = observation.get("error")
    if error:
        message = error.get("message") if isinstance(error, Mapping) else error
        return cut(
            f"error: {message if isinstance(message, str) else json.dumps(error)}", max_chars
        )
    result = observation.get("result")
    if isinstance(result, Mapping):
        result = next(
            (result[key] for key in ("data", "structured_content") if result.get(key) is not None),
            result,
        )
    if isinstance(result, Mapping) and isinstance(parts := result.get("content"), list):
        texts = [
            part["text"]
            for part in parts
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]
        result = "\n".join(texts) if texts else result
    if result is None:
        return observation_text(observation, "", max_chars)
    return cut(
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), max_chars
    )


def refusal_text(error: EnvError, max_chars: int) -> str:
    """Return the text for the policy when the server has refused its action, with the server's
    message about each field; shortened to ``max_chars`` characters."""
    lines = [f"error: {error}"]
    for detail in error.details[:_MAX_PROBLEMS] if isinstance(error.details, list) else ():
        if isinstance(detail, Mapping) and isinstance(detail.get("msg"), str):
            place = detail.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            lines.append(f"{where[:200]}: {detail['msg']}" if where else detail["msg"])
    return cut("\n".join(lines), max_chars)


def cut(text: str, max_chars: int) -> str:
    """Shorten a string to ``max_chars`` characters and append a note with the number of characters
    left out. Characters that cannot be encoded are replaced."""
    text = replace_surrogates(text)
    return (
        text
        if len(text) <= max_chars
        else f"{text[:max_chars]}... ({len(text) - max_chars} more characters)"
    )
