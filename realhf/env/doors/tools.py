"""Finds the tools of a class, and checks the arguments with which a policy calls one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from realhf.base.close_names import close_to
from realhf.env.doors.author import place_of
from realhf.env.doors.checks import json_problem
from realhf.env.doors.schemas import Signature, json_schema, signature_of
from realhf.env.doors.values import coerced

USER_REPLY = "user_reply"
"""The method that answers a turn without a call as the user would."""
NOT_TOOLS = frozenset({"reset", "get_reward", "tasks", "demonstrate", USER_REPLY})
"""Public methods that are no tools: what the door itself calls."""
NOT_TOOLS_ALONE = frozenset({"close", "metrics"})
"""The same for methods without arguments; one that takes an argument, such as ``close(door)``, is a tool."""
LONGEST_NAME = 60


class Tool(NamedTuple):
    """A method that the policy may call. ``function`` is unbound; a class method takes the class."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    signature: Signature
    of_class: bool
    is_async: bool

    def bound(self, instance: Any) -> Callable[..., Any]:
        """The method of an instance, whatever attributes it has been given since."""
        return self.function.__get__(type(instance) if self.of_class else instance)


def tools_of(kind: type[Any]) -> dict[str, Tool]:
    """The tools of a class by name: its public methods, those of its bases included, in alphabetical order. Raises
    ValueError that names the class, the method and the line for one that has no schema, and for a class without
    tools."""
    found = {}
    for name in sorted(dir(kind)):
        raw = inspect.getattr_static(kind, name)
        function = raw.__func__ if isinstance(raw, classmethod) else raw
        if name == "done" and callable(function):
            raise ValueError(
                f"{kind.__name__}.done is a method, so it would end no episode: set self.done = True, or make it a "
                f"property; a tool needs another name ({place_of(function if inspect.isfunction(function) else kind)})"
            )
        if name.startswith("_") or name in NOT_TOOLS or not inspect.isfunction(function):
            continue
        if name in NOT_TOOLS_ALONE and len(inspect.signature(function).parameters) < 2:
            continue
        try:
            signature = signature_of(function)
            schema = json_schema(function, signature)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the tool {kind.__name__}.{name}: {error} ({place_of(function)})") from None
        schema["function"]["name"] = name
        is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        found[name] = Tool(name, function, schema, signature, function is not raw, is_async)
    if not found:
        raise ValueError(f"{kind.__name__} has no tool, that is no public method of its own ({place_of(kind)})")
    return found


def arguments_for(tool: Tool, arguments: Any) -> dict[str, Any]:
    """The arguments as the type hints of the tool want them. Raises ValueError that says what is missing, unknown or of
    another type."""
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments must be an object")
    if problem := json_problem(arguments):
        raise ValueError(f"the arguments are no JSON: {problem}")
    hints = tool.signature.hints
    for name in arguments:
        if name not in hints:
            raise ValueError(f"{tool.name} has no argument {short(name)!r}{close_to(name, [*hints])}")
    for name in tool.signature.required:
        if name not in arguments:
            raise ValueError(f"{tool.name} needs the argument {name!r}")
    return {name: coerced(value, hints[name], f"argument {name!r}") for name, value in arguments.items()}


def unknown_tool(name: str, tools: Mapping[str, Tool]) -> str:
    """What the policy reads when it calls a tool that does not exist."""
    return f"Tool {short(name)} not found.{close_to(name, [*tools])}"


def short(name: str) -> str:
    """A name that may be of any length, for a message about it."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
