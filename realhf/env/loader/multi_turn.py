"""Env format of a class that exchanges messages: ``async reset(task, *, seed)``, ``async
step(message)``, and optionally ``async close()``.

The methods may return plain mappings with the fields of ``Opening`` and ``Turn``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from realhf.api.environment import AssistantMessage, EnvironmentDefinition, Opening, Turn
from realhf.api.messages import tool_problems
from realhf.base.text import suggest_names
from realhf.env.loader.author import (
    accepts_keyword,
    author_code,
    build_class_definition,
    source_location,
)
from realhf.env.loader.validation import (
    BrokenContract,
    copy_json,
    format_value,
    info_problems,
    require_valid,
    state_key_problems,
    validate_messages,
    validate_turn,
)

Result = TypeVar("Result", Opening, Turn)


def build_message_class(kind: type[Any]) -> EnvironmentDefinition:
    """Build the definition of a message class. Raises ValueError, naming the line, if its methods
    are not async or have the wrong signature."""
    for name in ("reset", "step"):
        method = inspect.getattr_static(kind, name, None)
        if not inspect.iscoroutinefunction(inspect.unwrap(method) if callable(method) else method):
            raise ValueError(
                f"{kind.__name__}.{name} must be an async method "
                f"({source_location(method or kind)})"
            )
    try:
        inspect.signature(kind.reset).bind(None, {}, seed=0)
        inspect.signature(kind.step).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} must have reset(self, task, *, seed) and step(self, message): "
            f"{error} ({source_location(kind)})"
        ) from None
    return build_class_definition(
        kind,
        lambda make, _: partial(MessageClassEnvironment, kind, make),
        seeded=accepts_keyword(kind.reset, "seed"),
    )


class MessageClassEnvironment:
    """Environment that plays on an instance of the author's class and validates what its methods
    return.

    An error in the author's code, or an invalid return value, becomes
    EnvironmentFailure("internal") that names the class, the seed and the line, but never the
    payload. An EnvironmentFailure raised by the author's code is passed on unchanged.
    """

    def __init__(self, kind: type[Any], make: Callable[[], Any]) -> None:
        self._kind = kind
        self._make = make
        self._instance: Any = None
        self._seed = 0
        self._tools: Any = ()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Start an episode; the first call also creates the instance."""
        self._seed = seed
        with self._author_code("reset"):
            if self._instance is None:
                self._instance = self._make()
            opening = _parse_result(Opening, await self._instance.reset(copy_json(task), seed=seed))
            validate_messages(opening.messages, "messages")
            if opening.tools is not self._tools:
                self._tools = require_valid(opening.tools, tool_problems(opening.tools))
            require_valid(opening.info, info_problems(opening.info))
            require_valid(opening.state_key, state_key_problems(opening.state_key))
            return opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Return the environment's answer to a message of the policy."""
        with self._author_code("step"):
            return validate_turn(_parse_result(Turn, await self._instance.step(message)))

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        instance = self._instance
        self._instance = None
        if close := getattr(instance, "close", None):
            with self._author_code("close"):
                result = close()
                if inspect.isawaitable(result):
                    await result

    def _author_code(self, method: str) -> AbstractContextManager[None]:
        return author_code(self._kind, lambda: (method, self._seed))


def _parse_result(kind: type[Result], value: Any) -> Result:
    """Return an Opening or Turn unchanged, or build one from a mapping of its fields. Raises
    BrokenContract for other values and for unknown fields."""
    if isinstance(value, kind):
        return value
    name = kind.__name__
    if not isinstance(value, Mapping):
        raise BrokenContract(
            f"must return {name} or a map with its fields, not {format_value(value)}"
        )
    field_names = [each.name for each in fields(kind)]
    for key in value:
        if key not in field_names:
            raise BrokenContract(
                f"{name} has no field {format_value(key)}{suggest_names(str(key), field_names)}"
            )
    if kind is Opening and "messages" not in value:
        raise BrokenContract("an Opening needs messages")
    return kind(**value)
