"""Conversion of dataclasses to plain JSON values and back, for passing specifications between
processes."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_json_value(value: Any) -> Any:
    """Convert a dataclass, or any value that its fields may have, to JSON values: mappings, lists
    and scalars.

    Raises TypeError for a value of any other type.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return to_json_value(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (Sequence, frozenset, set)):
        return [to_json_value(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def from_json_value(kind: type[T], value: Any) -> T:
    """Rebuild a value of type ``kind`` from the output of ``to_json_value``, using type hints.

    Raises TypeError for an unknown or missing field of a dataclass.
    """
    return _read(kind, value)


def _read(kind: Any, value: Any) -> Any:
    """Return ``value`` as an instance of the type hint ``kind``."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return (
            None
            if value is None
            else _read(next(one for one in args if one is not type(None)), value)
        )
    if origin is tuple:
        return tuple(_read(args[0] if args else Any, item) for item in value)
    if origin is list:
        return [_read(args[0], item) for item in value]
    if origin is not None and issubclass(origin, Mapping):
        return {key: _read(args[1], item) for key, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for name in value:
            if name not in hints:
                close = difflib.get_close_matches(name, hints, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"{kind.__name__} has no field {name!r}{hint}")
        return kind(**{name: _read(hints[name], item) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, (Enum, Path)):
        return kind(value)
    return value
