"""Reads what a person types in a game: a message, a call of a tool by hand, or a command of the game."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.env.check.scripts import functions

SAY, CALL, HELP, TOOLS, RESTART, NEXT, QUIT = "say", "call", "help", "tools", "restart", "next", "quit"
HELP_TEXT = """\
Type what a policy would say. A line that ends with a backslash goes on in the next one.
/tool NAME key=value ...   call a tool by hand; values with spaces stand in quotes
/tool NAME {"key": ...}    the same, with arguments as JSON
/tools                     show the tools
/restart                   begin the task again
/next                      play another task
/help                      show this
/quit                      end the game (so does Ctrl-D)
//text                     say /text"""
_WORDS = {"/help": HELP, "/tools": TOOLS, "/restart": RESTART, "/next": NEXT, "/quit": QUIT, "/exit": QUIT}


@dataclass(frozen=True)
class Typed:
    """What was typed: its ``kind``, the text of a message, the name and arguments of a call."""

    kind: str
    text: str = ""
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_line(line: str, tools: Sequence[Mapping[str, Any]]) -> Typed:
    """Return what a line means. Raises ValueError with one sentence for a line that means nothing."""
    if line.startswith("//") or not line.startswith("/"):
        return Typed(SAY, line.removeprefix("/") if line.startswith("//") else line)
    word, _, rest = line.partition(" ")
    if word == "/tool":
        return _call(rest.strip(), dict(functions(tools)))
    if word not in _WORDS or rest.strip():
        raise ValueError(f"{line[:60]!r} is no command (/help shows them; //... says a text that begins with a slash)")
    return Typed(_WORDS[word])


def _call(rest: str, known: Mapping[str, Mapping[str, Any]]) -> Typed:
    name, _, given = rest.partition(" ")
    if not name:
        raise ValueError('say which tool: /tool NAME key=value ... or /tool NAME {"key": ...}')
    given = given.strip()
    if given.startswith("{"):
        return Typed(CALL, name=name, arguments=_object(given))
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise ValueError(f"the arguments cannot be read: {str(error).lower()}") from None
    properties = known.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"{word!r} is no argument: write key=value")
        arguments[key] = _value(key, value, properties.get(key))
    return Typed(CALL, name=name, arguments=arguments)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the arguments are a JSON object")
    return found


def _value(key: str, text: str, schema: Any) -> Any:
    """The value of an argument: text where the schema says so, else JSON where it is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        if kind in (None, "null") or not isinstance(kind, str):
            return text
        raise ValueError(f"{key} is of the type {kind}, and {text!r} is none (JSON sends it all the same)") from None
