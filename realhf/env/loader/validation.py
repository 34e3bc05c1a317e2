"""Conversion of plain JSON values to the types in type hints, and checks of the values that an
author's code returns.

Numbers and booleans given as strings are accepted, because policies and command lines write them
that way. Other values of a wrong type are rejected with a message that names the expected type.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from realhf.api.environment import ChatMessage, Turn, finite_number
from realhf.api.messages import ANSWERING_ROLES, message_problems
from realhf.base.json_values import format_value, json_problem
from realhf.base.text import suggest_names

T = TypeVar("T")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")
NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?")
_TYPE_DESCRIPTIONS: Mapping[Any, str] = types.MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
        Path: "a path",
    }
)


def coerce(value: Any, hint: Any, name: str, *, strict: bool = False) -> Any:
    """Convert ``value`` to the type in ``hint``. With ``strict``, JSON types are not converted into
    each other.

    Raises ValueError; the message begins with ``name``.
    """
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return coerce(value, args[0], name, strict=strict)
    if hint in _TYPE_DESCRIPTIONS or hint is None:
        return _coerce_scalar(value, type(None) if hint is None else hint, name, strict)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, hint, args, name, strict)
    if origin is Literal:
        return _coerce_choice(value, [(item, item) for item in args], hint, name, strict)
    kind = origin or hint
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _coerce_choice(
                value, [(member.value, member) for member in kind], hint, name, strict
            )
        if is_dataclass(kind):
            return kind(**_coerce_fields(value, kind, name, strict))
        if typing.is_typeddict(kind):
            return _coerce_fields(value, kind, name, strict)
        if issubclass(kind, tuple):
            return _coerce_tuple(value, hint, args, name, strict)
        if issubclass(kind, Mapping) or kind is dict:
            return _coerce_mapping(value, hint, args, name, strict)
        if issubclass(kind, Sequence) or kind is list:
            item = args[0] if args else Any
            items = _require_items(value, hint, name)
            return [
                coerce(each, item, f"{name}[{index}]", strict=strict)
                for index, each in enumerate(items)
            ]
    raise ValueError(f"{name}: values of type {hint!r} cannot be given")


def describe_type(hint: Any) -> str:
    """Describe the values of a type hint in words."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is None or hint in _TYPE_DESCRIPTIONS:
        return _TYPE_DESCRIPTIONS[type(None) if hint is None else hint]
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return describe_type(args[0])
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(repr(arg) for arg in args)}"
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(repr(member.value) for member in kind)}"
    if isinstance(kind, type) and issubclass(kind, (list, tuple)):
        return "a list"
    return "an object" if isinstance(kind, type) else str(hint)


def copy_json(value: Any) -> Any:
    """Return a deep copy of a JSON value, which the author's code may change."""
    if isinstance(value, Mapping):
        return {key: copy_json(item) for key, item in value.items()}
    return [copy_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _type_error(value: Any, hint: Any, name: str) -> ValueError:
    return ValueError(f"{name} must be {describe_type(hint)}, not {format_value(value)}")


def _coerce_scalar(value: Any, kind: type, name: str, strict: bool) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    if (
        kind is float
        and isinstance(value, int)
        and not isinstance(value, bool)
        and abs(value) < 1 << 1023
    ):
        return float(value)
    if not strict:
        if isinstance(value, str):
            return _parse_text(value, kind, name)
        if kind is str and isinstance(value, (bool, int, float)) and abs(value) < 1 << 1023:
            return str(value).lower() if isinstance(value, bool) else str(value)
        if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
            return int(value)
    raise _type_error(value, kind, name)


def _parse_text(value: str, kind: type, name: str) -> Any:
    text = value.strip() if len(value) < 200 else value
    if kind is str:
        return str(value)
    if kind is int and WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if kind is float and NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise _type_error(value, kind, name)


def _coerce_union(value: Any, hint: Any, args: Sequence[Any], name: str, strict: bool) -> Any:
    for exactly in (True,) if strict else (True, False):
        for kind in args:
            try:
                return coerce(value, kind, name, strict=exactly)
            except ValueError:
                continue
    structured = [kind for kind in args if kind is not type(None)]
    if len(structured) == 1 and value is not None:
        return coerce(value, structured[0], name, strict=strict)
    raise _type_error(value, hint, name)


def _coerce_choice(
    value: Any, choices: Sequence[tuple[Any, Any]], hint: Any, name: str, strict: bool
) -> Any:
    for choice, member in choices:
        if (type(value) is type(choice) and value == choice) or value is member:
            return member
    for choice, member in () if strict else choices:
        if isinstance(value, str) and isinstance(choice, (int, float)) and value == str(choice):
            return member
    raise _type_error(value, hint, name)


def _require_items(value: Any, hint: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise _type_error(value, hint, name)
    return value


def _coerce_tuple(
    value: Any, hint: Any, args: Sequence[Any], name: str, strict: bool
) -> tuple[Any, ...]:
    items = _require_items(value, hint, name)
    kinds = args or (Any, ...)
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(items)
    if len(kinds) != len(items):
        raise ValueError(f"{name} must be a list of {len(kinds)} values, not {format_value(value)}")
    pairs = zip(items, kinds, strict=True)
    return tuple(
        coerce(item, kind, f"{name}[{n}]", strict=strict) for n, (item, kind) in enumerate(pairs)
    )


def _coerce_mapping(
    value: Any, hint: Any, args: Sequence[Any], name: str, strict: bool
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _type_error(value, hint, name)
    kind = args[1] if len(args) == 2 else Any
    return {
        key: coerce(item, kind, f"{name}[{format_value(key)}]", strict=strict)
        for key, item in value.items()
    }


def _coerce_fields(value: Any, kind: Any, name: str, strict: bool) -> dict[str, Any]:
    """Convert a map to the fields of a dataclass or TypedDict; fields with a default may be
    missing."""
    if not isinstance(value, Mapping):
        raise _type_error(value, kind, name)
    hints = field_hints(kind)
    for key in value:
        if key not in hints:
            key = key if isinstance(key, str) and len(key) <= 60 else format_value(key)
            raise ValueError(f"{name}.{key} is unknown{suggest_names(key, [*hints])}")
    for key in required_fields(kind):
        if key not in value:
            raise ValueError(f"{name}.{key} is missing")
    return {
        key: coerce(item, hints[key], f"{name}.{key}", strict=strict) for key, item in value.items()
    }


def field_hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of the init fields of a dataclass, or of the keys of a TypedDict."""
    hints = typing.get_type_hints(kind)
    return (
        {each.name: hints[each.name] for each in fields(kind) if each.init}
        if is_dataclass(kind)
        else hints
    )


def required_fields(kind: Any) -> list[str]:
    """Return the names of the required fields of a dataclass, or of the required keys of a
    TypedDict."""
    if is_dataclass(kind):
        needed = (
            each
            for each in fields(kind)
            if each.default is MISSING and each.default_factory is MISSING
        )
        return [each.name for each in needed if each.init]
    return [key for key in typing.get_type_hints(kind) if key in kind.__required_keys__]


class BrokenContract(ValueError):
    """Raised for an invalid return value of an environment's code; the message describes the
    problem."""


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced, so that it can be encoded as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def require_valid(value: T, problems: Iterable[str]) -> T:
    """Return ``value`` if ``problems`` is empty; otherwise raise BrokenContract with the first
    problem."""
    for problem in problems:
        raise BrokenContract(problem)
    return value


def validate_messages(value: Any, subject: str) -> Sequence[ChatMessage]:
    """Return the messages if they are valid. Raises BrokenContract; the message begins with
    ``subject``."""
    return require_valid(value, message_problems(value, subject))


def validate_number(value: Any, subject: str) -> float:
    """Return a finite number as float; true and false become 1 and 0.

    Raises BrokenContract; the message begins with ``subject``.
    """
    number = finite_number(value)
    if number is None:
        raise BrokenContract(f"{subject} must be a finite number, not {format_value(value)}")
    return number


def validate_numbers(numbers: Any, subject: str) -> dict[str, float]:
    """Return a map from names to finite numbers. Raises BrokenContract; the message begins with
    ``subject``."""
    if not isinstance(numbers, Mapping):
        raise BrokenContract(
            f"{subject} must be a map from names to numbers, not {format_value(numbers)}"
        )
    for name in numbers:
        if not isinstance(name, str):
            raise BrokenContract(f"{subject}: a name must be text, not {format_value(name)}")
    return {name: validate_number(value, f"{subject}[{name!r}]") for name, value in numbers.items()}


def validate_rewards(value: Any, subject: str) -> tuple[float, dict[str, float]]:
    """Return (reward, its named components).

    ``value`` is a number or a map. The reward of a map is its item ``reward`` or, if there is none,
    the sum of its values. Raises BrokenContract; the message begins with ``subject``.
    """
    if not isinstance(value, Mapping):
        return validate_number(value, subject), {}
    if not value:
        raise BrokenContract(f"{subject} must be a number or named components, not an empty map")
    components = validate_numbers(value, subject)
    reward = components.pop("reward", None)
    return (
        validate_number(sum(components.values()), subject) if reward is None else reward
    ), components


def info_problems(value: Any) -> Iterator[str]:
    """Yield the problems of an ``info``, which must be a map of JSON values."""
    if not isinstance(value, Mapping):
        yield f"info must be a map, not {format_value(value)}"
    elif value and (problem := json_problem(value)):
        yield f"info: {problem}"


def turn_problems(turn: Turn) -> Iterator[str]:
    """Yield the problems of a turn, except those of its numbers."""
    yield from message_problems(turn.messages, "messages", ANSWERING_ROLES)
    for name in ("done", "final"):
        if not isinstance(getattr(turn, name), bool):
            yield f"{name} must be true or false, not {format_value(getattr(turn, name))}"
    yield from info_problems(turn.info)
    yield from state_key_problems(turn.state_key)


def state_key_problems(key: Any) -> Iterator[str]:
    """Yield the problems of the ``state_key`` of an opening or a turn."""
    if not isinstance(key, str):
        yield f"state_key must be text, not {format_value(key)}"


def validate_turn(turn: Turn) -> Turn:
    """Return the turn with its numbers as floats. Raises BrokenContract for invalid messages,
    numbers or info."""
    require_valid(turn, turn_problems(turn))
    reward = None if turn.reward is None else validate_number(turn.reward, "reward")
    rewards = validate_numbers(turn.rewards, "rewards") if turn.rewards else {}
    metrics = validate_numbers(turn.metrics, "metrics") if turn.metrics else {}
    return Turn(
        turn.messages, turn.done, reward, rewards, metrics, turn.info, turn.final, turn.state_key
    )
