"""Env format of a class that exchanges messages: ``async reset(task, *, seed)``, ``async
step(message)``, and optionally ``async close()``. The methods may return plain mappings with the
fields of ``Opening`` and ``Turn``."""

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
    """The definition of a class. Raises ValueError that names the line for methods of another
    form."""
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
    """Plays an instance of the author's class, and checks what it returns.

    What it raises, or returns against the contract, becomes EnvironmentFailure("internal") that
    names the class, the seed and the line, never the payload; an EnvironmentFailure that it raises
    itself is passed on.
    """

    def __init__(self, kind: type[Any], make: Callable[[], Any]) -> None:
        self._kind = kind
        self._make = make
        self._instance: Any = None
        self._seed = 0
        self._tools: Any = ()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode; the first one also makes the instance."""
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
        """Answer a turn of the policy."""
        with self._guarded("step"):
            return checked_turn(_read(Turn, await self._instance.step(message)))

    async def close(self) -> None:
        """Close the instance if there is one and it can be closed."""
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
    """An Opening or Turn as the author returned it, or made of a plain map."""
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
