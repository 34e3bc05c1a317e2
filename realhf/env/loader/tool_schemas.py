"""Discovery of a class's tools and their JSON schemas, and validation of the arguments of calls.

The schemas equal those of ``transformers.utils.get_json_schema`` for every signature that both
support, so that the same class works with TRL and with this project. Only this module supports
dataclasses and typed dictionaries.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, Union

from realhf.base.text import suggest_names
from realhf.env.loader.author import source_location
from realhf.env.loader.validation import coerce, field_hints, json_problem, required_fields

_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "integer",
        float: "number",
        str: "string",
        bool: "boolean",
        type(None): "null",
        list: "array",
    }
    | {tuple: "array", dict: "object"}
)
_SCALARS = (int, float, str, bool, type(None))
_HEADING = re.compile(r"\s*(Args|Returns|Raises):\s*$")
_ARGUMENT = re.compile(r"(\s*)(\w+):\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Docstring(NamedTuple):
    """Parts of a Google-style docstring."""

    description: str
    """Text before the first heading."""
    arguments: Mapping[str, str]
    """Descriptions of the arguments by name."""
    returns: str | None
    """Description of the result; None if there is no ``Returns:``."""


class Signature(NamedTuple):
    """Arguments that a function accepts by name."""

    hints: Mapping[str, Any]
    """Type hints by argument name."""
    required: tuple[str, ...]
    """Names of the arguments without a default."""


def json_schema(function: Callable[..., Any], signature: Signature | None = None) -> dict[str, Any]:
    """Return the JSON schema of a function or method in the format of chat templates.

    Raises ValueError for a missing docstring, type hint or argument description, and for a type
    without a JSON schema.
    """
    text = inspect.getdoc(function)
    if not text:
        raise ValueError("it has no docstring, which tells the policy what the tool does")
    about = parse_docstring(text.strip())
    parameters_by_name = signature or read_signature(function)
    properties = {}
    for name, hint in parameters_by_name.hints.items():
        if name not in about.arguments:
            raise ValueError(f"the docstring says nothing of the argument {name!r} below 'Args:'")
        properties[name] = _add_description(
            _build_schema(hint, f"argument {name!r}"), about.arguments[name], name
        )
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if parameters_by_name.required:
        parameters["required"] = [*parameters_by_name.required]
    function_schema: dict[str, Any] = {
        "name": function.__name__,
        "description": about.description,
        "parameters": parameters,
    }
    return_schema = _return_schema(function)
    if return_schema is not None:
        function_schema["return"] = (
            return_schema
            if about.returns is None
            else {**return_schema, "description": about.returns}
        )
    return {"type": "function", "function": function_schema}


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return the arguments of a function, without ``self``.

    Raises ValueError for an argument that has no type hint or cannot be passed by name.
    """
    hints = _hints(function)
    hints_by_name: dict[str, Any] = {}
    required = []
    for number, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if (
            number == 0
            and name in ("self", "cls")
            and parameter.annotation is inspect.Parameter.empty
        ):
            continue
        if parameter.kind not in _NAMED:
            raise ValueError(
                f"the argument {parameter} cannot be given by name, so it has no schema"
            )
        if name not in hints:
            raise ValueError(f"the argument {name!r} has no type hint")
        hints_by_name[name] = hints[name]
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    return Signature(hints_by_name, tuple(required))


def parse_docstring(text: str) -> Docstring:
    """Split a Google-style docstring at its headings ``Args:``, ``Returns:`` and ``Raises:``."""
    parts: dict[str, list[str]] = {"": []}
    part = ""
    for line in text.split("\n"):
        if heading := _HEADING.match(line):
            part = heading[1]
            parts.setdefault(part, [])
        else:
            parts[part].append(line)
    returns = "\n".join(parts["Returns"]).strip() if "Returns" in parts else None
    return Docstring("\n".join(parts[""]).strip(), _parse_arguments(parts.get("Args", ())), returns)


def _parse_arguments(lines: typing.Iterable[str]) -> dict[str, str]:
    """Return the descriptions of arguments by name; lines indented deeper than their argument
    continue its description."""
    descriptions: dict[str, str] = {}
    name = ""
    indent = 0
    for line in lines:
        match = _ARGUMENT.match(line)
        if match and (not name or len(match[1]) <= indent):
            name = match[2]
            indent = len(match[1])
            descriptions[name] = match[3].strip()
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise ValueError(f"its type hints cannot be read: {error}") from None


def _return_schema(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the schema of a function's result; None without a type hint or for a type without a
    JSON schema."""
    hints = _hints(function)
    if "return" not in hints:
        return None
    try:
        return _build_schema(hints["return"], "the result")
    except ValueError:
        return None


def _add_description(schema: dict[str, Any], description: str, name: str) -> dict[str, Any]:
    """Return the schema with its description; choices at its end, ``(choices: ["a", "b"])``, become
    an ``enum``."""
    if choices := _CHOICES.search(description):
        try:
            values = json.loads(choices[1])
        except ValueError:
            values = None
        if not isinstance(values, list):
            raise ValueError(f"the choices of the argument {name!r} are no JSON list: {choices[1]}")
        schema = {
            **schema,
            "enum": [item.strip() if isinstance(item, str) else item for item in values],
        }
        description = description[: choices.start()].strip()
    return {**schema, "description": description}


def _build_schema(hint: Any, subject: str) -> dict[str, Any]:
    """Return the JSON schema of a type. Raises ValueError for a type that has none; the message
    begins with ``subject``."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is None or hint is Any:
        return {} if hint is Any else {"type": "null"}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return _build_schema(args[0], subject)
    if origin in (Union, types.UnionType):
        return _union_schema(args, subject)
    if origin is Literal:
        return _enum_schema([*args], subject)
    if origin is list:
        return {"type": "array", "items": _build_schema(args[0], subject)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_build_schema(arg, subject) for arg in args]}
    if origin is dict and len(args) > 1:
        return {"type": "object", "additionalProperties": _build_schema(args[1], subject)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_schema([member.value for member in hint], subject)
    if is_dataclass(hint) or typing.is_typeddict(hint):
        properties = {
            name: _build_schema(kind, f"{subject}, field {name!r}")
            for name, kind in field_hints(hint).items()
        }
        required = required_fields(hint)
        return {"type": "object", "properties": properties} | (
            {"required": required} if required else {}
        )
    raise ValueError(
        f"{subject} has the type {getattr(hint, '__name__', hint)}, which has no JSON schema: take "
        f"str, int, float, bool, "
        "Literal, an Enum, a dataclass, or a list, tuple, dict or Union of them"
    )


def _union_schema(args: tuple[Any, ...], subject: str) -> dict[str, Any]:
    kinds = [_build_schema(arg, subject) for arg in args if arg is not type(None)]
    if len(kinds) == 1:
        schema = dict(kinds[0])
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": kinds}
    return schema | {"nullable": True} if type(None) in args else schema


def _enum_schema(values: list[Any], subject: str) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise ValueError(
            f"{subject} has choices that are not text, numbers, booleans or None: {values}"
        )
    names = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


USER_REPLY = "user_reply"
"""Name of the method that acts as a simulated user and replies to a turn without a call."""
NOT_TOOLS = frozenset({"reset", "get_reward", "tasks", "demonstrate", USER_REPLY})
"""Public methods that are not tools, because the loader calls them itself."""
NOT_TOOLS_ALONE = frozenset({"close", "metrics"})
"""Methods that are not tools only if they take no arguments besides ``self``; for example,
``close(door)`` is a tool."""
MAX_NAME_CHARS = 60
"""Maximum number of characters of a name in messages."""


class ToolMethod(NamedTuple):
    """A method that the policy may call."""

    name: str
    """Name of the method."""
    function: Callable[..., Any]
    """The unbound function."""
    schema: Mapping[str, Any]
    """JSON schema for the chat template."""
    signature: Signature
    """Arguments without ``self``."""
    of_class: bool
    """Whether it is a class method."""
    is_async: bool
    """Whether it is a coroutine function."""

    def bind(self, instance: Any) -> Callable[..., Any]:
        """Return the method bound to an instance. An attribute of the instance with the same name
        does not replace it."""
        return self.function.__get__(type(instance) if self.of_class else instance)


def collect_tools(kind: type[Any]) -> dict[str, ToolMethod]:
    """Return the tools of a class by name, in alphabetical order: its public methods, including
    inherited ones.

    Raises ValueError that names the class, the method and the line for a method without a schema,
    for a method ``done``, and for a class without tools.
    """
    tools = {}
    for name in sorted(dir(kind)):
        raw = inspect.getattr_static(kind, name)
        function = raw.__func__ if isinstance(raw, classmethod) else raw
        if name == "done" and callable(function):
            raise ValueError(
                f"{kind.__name__}.done is a method, so it would end no episode: set self.done = "
                f"True, or make it a "
                f"property; a tool needs another name "
                f"({source_location(function if inspect.isfunction(function) else kind)})"
            )
        if name.startswith("_") or name in NOT_TOOLS or not inspect.isfunction(function):
            continue
        if name in NOT_TOOLS_ALONE and len(inspect.signature(function).parameters) < 2:
            continue
        try:
            signature = read_signature(function)
            schema = json_schema(function, signature)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the tool {kind.__name__}.{name}: {error} ({source_location(function)})"
            ) from None
        schema["function"]["name"] = name
        is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        tools[name] = ToolMethod(name, function, schema, signature, function is not raw, is_async)
    if not tools:
        raise ValueError(
            f"{kind.__name__} has no tool, that is no public method of its own "
            f"({source_location(kind)})"
        )
    return tools


def convert_arguments(tool: ToolMethod, arguments: Any) -> dict[str, Any]:
    """Convert the arguments of a call to the types of the tool's type hints.

    Raises ValueError for missing or unknown arguments and for values of a wrong type.
    """
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments must be an object")
    if problem := json_problem(arguments):
        raise ValueError(f"the arguments are no JSON: {problem}")
    hints = tool.signature.hints
    for name in arguments:
        if name not in hints:
            raise ValueError(
                f"{tool.name} has no argument {shorten_name(name)!r}{suggest_names(name, [*hints])}"
            )
    for name in tool.signature.required:
        if name not in arguments:
            raise ValueError(f"{tool.name} needs the argument {name!r}")
    return {
        name: coerce(value, hints[name], f"argument {name!r}") for name, value in arguments.items()
    }


def unknown_tool_error(name: str, tools: Mapping[str, ToolMethod]) -> str:
    """Return the error text for a call of a tool that does not exist."""
    return f"Tool {shorten_name(name)} not found.{suggest_names(name, [*tools])}"


def shorten_name(name: str) -> str:
    """Return a name truncated to ``MAX_NAME_CHARS`` characters."""
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
