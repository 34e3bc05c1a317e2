"""Checks what the code of an environment's author returned: messages, numbers, and that it is JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.environment import ChatMessage, finite_number
from realhf.env.doors.values import shown

ROLES = ("system", "user", "assistant", "tool")
MOST_DEPTH = 64
"""Deeper values are refused: the encoders of JSON are recursive."""


class BrokenContract(ValueError):
    """The environment's code returned what it must not; the text says what."""


def json_problem(value: Any) -> str:
    """Why ``value`` is not JSON, "" if it is. NaN and infinities are not JSON, nor are keys that are no text."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if item is None or isinstance(item, (bool, int)):
            continue
        if isinstance(item, str):
            if not item.isascii() and (problem := _surrogate(item)):
                return problem
        elif isinstance(item, float):
            if not math.isfinite(item):
                return f"{item!r} is not JSON"
        elif depth >= MOST_DEPTH:
            return f"more than {MOST_DEPTH} lists and maps stand in one another"
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    return f"the key {shown(key)} is no text, so this is not JSON"
                waiting.append((inner, depth + 1))
        elif isinstance(item, (list, tuple)):
            waiting.extend((inner, depth + 1) for inner in item)
        else:
            return f"{type(item).__name__} is not JSON: {shown(item)}"
    return ""


def _surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"text with {text[error.start]!r}, half a character, is not JSON"
    return ""


def whole_text(text: str) -> str:
    """The text with halves of characters replaced, so that it can be encoded."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def checked_messages(found: Any, what: str) -> Sequence[ChatMessage]:
    """Return messages that are JSON with a known role and a text each. Raises BrokenContract that begins with
    ``what``."""
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Sequence):
        raise BrokenContract(f"{what} must be a list of messages, not {shown(found)}")
    for number, message in enumerate(found):
        if not isinstance(message, Mapping):
            raise BrokenContract(f"{what}[{number}] must be a map with role and content, not {shown(message)}")
        for key in ("role", "content"):
            if key not in message:
                raise BrokenContract(f"{what}[{number}] has no {key}: {shown(dict(message))}")
        if message["role"] not in ROLES:
            raise BrokenContract(f"{what}[{number}]: the role is one of {', '.join(ROLES)}: {shown(message['role'])}")
        if not isinstance(message["content"], str):
            raise BrokenContract(f"{what}[{number}]: the content must be text, not {shown(message['content'])}")
        if problem := json_problem(message):
            raise BrokenContract(f"{what}[{number}]: {problem}")
    return found


def checked_number(found: Any, what: str) -> float:
    """Return a finite number as float; true and false are 1 and 0. Raises BrokenContract that begins with ``what``."""
    number = finite_number(found)
    if number is None:
        raise BrokenContract(f"{what} must be a finite number, not {shown(found)}")
    return number


def checked_numbers(found: Any, what: str) -> dict[str, float]:
    """Return a map from names to finite numbers. Raises BrokenContract that begins with ``what``."""
    if not isinstance(found, Mapping):
        raise BrokenContract(f"{what} must be a map from names to numbers, not {shown(found)}")
    for name in found:
        if not isinstance(name, str):
            raise BrokenContract(f"{what}: a name must be text, not {shown(name)}")
    return {name: checked_number(value, f"{what}[{name!r}]") for name, value in found.items()}


def checked_rewards(found: Any, what: str) -> tuple[float, dict[str, float]]:
    """Return the reward and its named components: a number, or a map whose ``reward`` or else sum is the reward.
    Raises BrokenContract that begins with ``what``."""
    if not isinstance(found, Mapping):
        return checked_number(found, what), {}
    if not found:
        raise BrokenContract(f"{what} must be a number or named components, not an empty map")
    components = checked_numbers(found, what)
    reward = components.pop("reward", None)
    return (checked_number(sum(components.values()), what) if reward is None else reward), components
