"""Reads an IAM policy, whatever way it is written: a statement or a list of them, names as text or list, principals in
every notation, ``NotAction`` and its kin. ``policy_comparison`` says what it permits."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST_CHARACTERS, LONGEST_NAME = 20_480, 2_048
"""Longest policy and longest ARN, in characters, as AWS limits them."""
_ANYTHING = ("*",)
_STATEMENT_KEYS = frozenset(
    {"Sid", "Effect", "Principal", "NotPrincipal", "Action", "NotAction", "Resource", "NotResource", "Condition"}
)
_PRINCIPAL_KINDS = frozenset({"AWS", "Service", "Federated", "CanonicalUser"})


class PolicyError(ValueError):
    """AWS would not take a document as a policy."""


@dataclass(frozen=True)
class Names:
    """Describes a set of names: those that match one of the patterns, or, ``inverted``, all others."""

    patterns: tuple[str, ...] = _ANYTHING
    inverted: bool = False

    def has(self, name: str) -> bool:
        """Return whether the set contains ``name``."""
        return any(matches(pattern, name) for pattern in self.patterns) is not self.inverted


@dataclass(frozen=True)
class Statement:
    """Holds one statement. A part that is not written restricts nothing."""

    allow: bool
    principals: Names = Names()
    actions: Names = Names()
    resources: Names = Names()
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


def parse_policy(document: Any) -> tuple[Statement, ...]:
    """Parse the statements of a policy, given as an object or as its JSON text. Raises PolicyError."""
    try:
        text = document if isinstance(document, str) else json.dumps(document, default=str)
        document = json.loads(text) if len(text) <= MOST_CHARACTERS else None
    except (ValueError, RecursionError):
        raise PolicyError("the policy is not JSON") from None
    if not isinstance(document, Mapping):
        raise PolicyError("the policy is no object, or longer than AWS permits")
    statements = document.get("Statement")
    if isinstance(statements, Mapping):
        statements = [statements]
    if not isinstance(statements, list) or not statements:
        raise PolicyError("the policy has no statement")
    return tuple(map(_statement, statements))


def matches(pattern: str, text: str) -> bool:
    """Return whether the text fits a pattern of ``*`` (anything) and ``?`` (one character). No pattern that an agent
    could write takes long: the pieces between the stars are sought one after the other, never again."""
    first, *rest = pattern.split("*")
    if not rest:
        return len(text) == len(first) and _piece(first).match(text) is not None
    found = _piece(first).match(text)
    position = found.end() if found else -1
    for piece in rest[:-1]:
        found = _piece(piece).search(text, position) if position >= 0 else None
        position = found.end() if found else -1
    start = len(text) - len(rest[-1])
    return 0 <= position <= start and _piece(rest[-1]).match(text, start) is not None


@functools.lru_cache(maxsize=4096)
def _piece(piece: str) -> re.Pattern[str]:
    """Compile a pattern without stars."""
    return re.compile("".join("." if char == "?" else re.escape(char) for char in piece), re.DOTALL)


def _statement(entry: Any) -> Statement:
    if not isinstance(entry, Mapping):
        raise PolicyError("a statement is no object")
    unknown = set(entry) - _STATEMENT_KEYS
    if unknown:
        raise PolicyError(f"a statement has the unknown key {sorted(map(str, unknown))[0]!r}")
    if entry.get("Effect") not in ("Allow", "Deny"):
        raise PolicyError("the effect of a statement is neither Allow nor Deny")
    if ("Action" in entry) == ("NotAction" in entry):
        raise PolicyError("a statement names either Action or NotAction")
    actions = _names(entry, "Action", _texts)
    return Statement(
        allow=entry["Effect"] == "Allow",
        principals=_names(entry, "Principal", _principals),
        actions=Names(tuple(action.lower() for action in actions.patterns), actions.inverted),
        resources=_names(entry, "Resource", _texts),
        conditions=tuple(_conditions(entry.get("Condition") or {})),
    )


def _names(entry: Mapping[str, Any], key: str, read: Any) -> Names:
    if key in entry and f"Not{key}" in entry:
        raise PolicyError(f"a statement names both {key} and Not{key}")
    if f"Not{key}" in entry:
        return Names(read(entry[f"Not{key}"]), inverted=True)
    return Names(read(entry[key])) if key in entry else Names()


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values or not all(isinstance(item, str) for item in values):
        raise PolicyError("a part of a statement is neither a text nor a list of texts")
    if any(len(item) > LONGEST_NAME for item in values):
        raise PolicyError("a name in a statement is longer than an ARN")
    return tuple(dict.fromkeys(values))


def _principals(value: Any) -> tuple[str, ...]:
    """Return the canonical principals of ``"*"``, ``"arn"``, a list, or ``{"AWS": ..., "Service": ...}``."""
    if not isinstance(value, Mapping):
        value = {"AWS": value}
    if not value or not set(value) <= _PRINCIPAL_KINDS:
        raise PolicyError("a principal is of an unknown kind")
    found: list[str] = []
    for kind, names in value.items():
        for name in _texts(names):
            if kind == "AWS" and name == "*":
                found.append("*")
            elif kind == "AWS" and name.isdigit():
                found.append(f"AWS:arn:aws:iam::{name}:root")
            else:
                found.append(f"{kind}:{name}")
    return tuple(dict.fromkeys(found))


def _conditions(data: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (operator, key, values), operator and key in lower case."""
    if not isinstance(data, Mapping):
        raise PolicyError("a condition is no object")
    for operator, keys in data.items():
        if not isinstance(keys, Mapping):
            raise PolicyError("a condition's operator holds no object")
        for key, values in keys.items():
            listed: Iterable[Any] = values if isinstance(values, list) else [values]
            yield str(operator).lower(), str(key).lower(), tuple(_condition_text(value) for value in listed)


def _condition_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)
