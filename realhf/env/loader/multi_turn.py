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
from realhf.base.text import close_to
from realhf.env.loader.author import author_code, class_definition, place_of, takes
from realhf.env.loader.validation import (
    BrokenContract,
    checked,
    checked_messages,
    checked_turn,
    copied,
    info_problems,
    shown,
    state_key_problems,
)

Said = TypeVar("Said", Opening, Turn)


def message_class(kind: type[Any]) -> EnvironmentDefinition:
    """Build the definition of a message class. Raises ValueError, naming the line, if its methods
    are not async or have the wrong signature."""
    for name in ("reset", "step"):
        method = inspect.getattr_static(kind, name, None)
        if not inspect.iscoroutinefunction(inspect.unwrap(method) if callable(method) else method):
            raise ValueError(
                f"{kind.__name__}.{name} must be an async method ({place_of(method or kind)})"
            )
    try:
        inspect.signature(kind.reset).bind(None, {}, seed=0)
        inspect.signature(kind.step).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} must have reset(self, task, *, seed) and step(self, message): "
            f"{error} ({place_of(kind)})"
        ) from None
    return class_definition(
        kind,
        lambda make, _: partial(MessageClassEnvironment, kind, make),
        seeded=takes(kind.reset, "seed"),
    )


class MessageClassEnvironment:
    """An environment that runs an instance of the author's class and validates what its methods
    return.

    An error in the author's code, or an invalid return value, becomes
    EnvironmentFailure("internal") that names the class, the seed and the line, but never the
    payload. An EnvironmentFailure that the author's code raises is passed on unchanged.
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
        with self._guarded("reset"):
            if self._instance is None:
                self._instance = self._make()
            opening = _read(Opening, await self._instance.reset(copied(task), seed=seed))
            checked_messages(opening.messages, "messages")
            if opening.tools is not self._tools:
                self._tools = checked(opening.tools, tool_problems(opening.tools))
            checked(opening.info, info_problems(opening.info))
            checked(opening.state_key, state_key_problems(opening.state_key))
            return opening

    async def step(self, message: AssistantMessage) -> Turn:
        """Return the environment's answer to a message of the policy."""
        with self._guarded("step"):
            return checked_turn(_read(Turn, await self._instance.step(message)))

    async def close(self) -> None:
        """Close the instance, if one exists and has a ``close`` method."""
        instance = self._instance
        self._instance = None
        if close := getattr(instance, "close", None):
            with self._guarded("close"):
                done = close()
                if inspect.isawaitable(done):
                    await done

    def _guarded(self, method: str) -> AbstractContextManager[None]:
        return author_code(self._kind, lambda: (method, self._seed))


def _read(kind: type[Said], found: Any) -> Said:
    """Return an Opening or Turn as it is, or build one from a mapping of its fields. Raises
    BrokenContract for other values and unknown fields."""
    if isinstance(found, kind):
        return found
    name = kind.__name__
    if not isinstance(found, Mapping):
        raise BrokenContract(f"must return {name} or a map with its fields, not {shown(found)}")
    known = [each.name for each in fields(kind)]
    for key in found:
        if key not in known:
            raise BrokenContract(f"{name} has no field {shown(key)}{close_to(str(key), known)}")
    if kind is Opening and "messages" not in found:
        raise BrokenContract("an Opening needs messages")
    return kind(**found)
