"""The door for a class that speaks messages: ``async reset(task, *, seed)``, ``async step(message)``, perhaps
``async close()``. It may return plain maps with the fields of ``Opening`` and ``Turn``."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentDefinition,
    EnvironmentSpec,
    Opening,
    Turn,
)
from realhf.base.text import close_to
from realhf.env.loader.author import class_parts, failure_of, place_of, takes
from realhf.env.loader.validation import (
    BrokenContract,
    checked,
    checked_messages,
    checked_turn,
    copied,
    info_problems,
    shown,
    tool_problems,
)

T = TypeVar("T")
Said = TypeVar("Said", Opening, Turn)


def message_class(kind: type[Any]) -> EnvironmentDefinition:
    """The definition of a class. Raises ValueError that names the line for methods of another form."""
    for name in ("reset", "step"):
        method = inspect.getattr_static(kind, name, None)
        if not inspect.iscoroutinefunction(inspect.unwrap(method) if callable(method) else method):
            raise ValueError(f"{kind.__name__}.{name} must be an async method ({place_of(method or kind)})")
    try:
        inspect.signature(kind.reset).bind(None, {}, seed=0)
        inspect.signature(kind.step).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} must have reset(self, task, *, seed) and step(self, message): {error} ({place_of(kind)})"
        ) from None
    parts = class_parts(kind, seeded=takes(kind.reset, "seed"))

    def build(options: Any) -> EnvironmentSpec:
        """Return the environment for these options."""
        return EnvironmentSpec(
            kind.__name__,
            lambda _: MessageClassEnvironment(kind, lambda: parts.instance(options)),
            parts.tasks(options),
            **parts.traits._asdict(),
        )

    return EnvironmentDefinition(parts.options, build)


class MessageClassEnvironment:
    """Plays an instance of the author's class, and checks what it returns.

    What it raises, or returns against the contract, becomes EnvironmentFailure("internal") that names the class, the
    seed and the line, never the payload; an EnvironmentFailure that it raises itself is passed on.
    """

    def __init__(self, kind: type[Any], make: Callable[[], Any]) -> None:
        self._kind, self._make = kind, make
        self._instance: Any = None
        self._seed = 0
        self._tools: Any = ()

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Opening:
        """Begin an episode; the first one also makes the instance."""
        self._seed = seed
        return await self._guarded("reset", self._opening(task, seed))

    async def step(self, message: AssistantMessage) -> Turn:
        """Answer a turn of the policy."""
        return await self._guarded("step", self._turn(message))

    async def close(self) -> None:
        """Close the instance if there is one and it can be closed."""
        instance, self._instance = self._instance, None
        if close := getattr(instance, "close", None):
            await self._guarded("close", _closed(close))

    async def _opening(self, task: Mapping[str, Any], seed: int) -> Opening:
        if self._instance is None:
            self._instance = self._make()
        opening = _read(Opening, await self._instance.reset(copied(task), seed=seed))
        checked_messages(opening.messages, "messages")
        if opening.tools is not self._tools:
            self._tools = checked(opening.tools, tool_problems(opening.tools))
        checked(opening.info, info_problems(opening.info))
        return opening

    async def _turn(self, message: AssistantMessage) -> Turn:
        return checked_turn(_read(Turn, await self._instance.step(message)))

    async def _guarded(self, method: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except BaseException as error:
            where = f"{self._kind.__name__}.{method} (seed {self._seed})"
            failure = failure_of(error, where, self._kind, getattr(self._kind, method, None))
            if failure is None:
                raise
            raise failure from error


async def _closed(close: Callable[[], Any]) -> None:
    done = close()
    if inspect.isawaitable(done):
        await done


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
