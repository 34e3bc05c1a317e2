"""Change JSON values and the arguments of a call: removed, added, another of the same kind, a neighbour's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from realhf.env.mutation.sequences import Change

REMOVED, CHANGED, ADDED, EXCHANGED, NEIGHBOUR = (
    "argument removed",
    "argument changed",
    "argument added",
    "arguments exchanged",
    "neighbour",
)
_WORD = re.compile(r"[^\s,;:!?()\[\]{}'\"`=<>|]+")
_MOST_NEIGHBOURS = 4
_DEEPEST = 4


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the words of texts once each, in their order: names, paths and numbers are words."""
    found = (word.rstrip(".") for text in texts for word in _WORD.findall(text))
    return [*dict.fromkeys(word for word in found if word)]


def neighbours(word: str, words: Iterable[str]) -> list[str]:
    """Return a few words of the same shape as ``word``: ``a.txt`` for ``b.txt``, 12 for 7; and, where there are none,
    others."""
    others = [other for other in dict.fromkeys(words) if other != word]
    alike = [other for other in others if _shape(other) == _shape(word)]
    return (alike or others)[:_MOST_NEIGHBOURS]


def changed_arguments(
    arguments: Mapping[str, Any], properties: Mapping[str, Any], words: Sequence[str]
) -> Iterator[Change[dict[str, Any]]]:
    """Yield changed arguments of a call. ``properties``: the JSON schemas of all that it takes; ``words`` stand in the
    episode and may name a neighbour, the likeliest first."""
    given = dict(arguments)
    for name, value in given.items():
        yield Change(REMOVED, f"without {name}", {key: each for key, each in given.items() if key != name})
        schema = properties.get(name)
        for kind, what, other in changed_value(value, schema if isinstance(schema, Mapping) else {}, words):
            yield Change(kind, f"{name} {what}", {**given, name: other})
    for one, other in combinations(given, 2):
        if type(given[one]) is type(given[other]) and given[one] != given[other]:
            what = f"{one} and {other} exchanged"
            yield Change(EXCHANGED, what, {**given, one: given[other], other: given[one]})
    for name, schema in properties.items():
        if name not in given and isinstance(schema, Mapping):
            for value in _possible(schema, words):
                yield Change(ADDED, f"{name} is {shown(value)}", {**given, name: value})


def changed_value(value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int = 0) -> Iterator[Change[Any]]:
    """Yield other values of the kind of ``value``, each once."""
    seen = {json.dumps(value)}
    for kind, other in _others(value, schema, words, depth):
        key = json.dumps(other)
        if key not in seen:
            seen.add(key)
            yield Change(kind, f"is {shown(other)}", other)


def changed_number(number: float) -> list[float]:
    """Return numbers that a wrong count, sign, unit or bound makes of a number."""
    return [0, 1, -1, number + 1, number - 1, 2 * number, -number, 10 * number]


def changed_name(name: str, words: Iterable[str]) -> Iterator[Change[str]]:
    """Yield what may stand in the place of a name: a neighbour's, one that is nearly the same, none."""
    for other in neighbours(name, words):
        yield Change(NEIGHBOUR, shown(other), other)
    for other in (f"{name}2", name[:-1], name.upper(), name.lower(), f" {name}", "", "*", "%"):
        yield Change(CHANGED, shown(other), other)


def shown(value: Any) -> str:
    """Return a value in a line for people."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _others(value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int) -> Iterator[tuple[str, Any]]:
    for other in schema.get("enum") or ():
        yield CHANGED, other
    if isinstance(value, bool):
        yield CHANGED, not value
    elif isinstance(value, int | float):
        yield from ((CHANGED, other) for other in changed_number(value))
        yield from ((CHANGED, schema[bound]) for bound in ("minimum", "maximum") if bound in schema)
        yield from ((NEIGHBOUR, int(word)) for word in neighbours(str(value), words) if word.isdecimal())
    elif isinstance(value, str):
        if value.isdecimal():
            yield from ((CHANGED, str(other)) for other in changed_number(int(value)))
        yield from ((kind, other) for kind, _, other in changed_name(value, words))
        # A part that is a word of the episode may be another's, as the folder of a path.
        for part in words:
            if part != value and len(part) > 1 and part in value:
                yield from ((NEIGHBOUR, value.replace(part, other)) for other in neighbours(part, words)[:1])
        pieces = value.split()
        if len(pieces) > 1:
            yield CHANGED, " ".join(pieces[:-1])
            yield CHANGED, " ".join(pieces[::-1])
            yield CHANGED, f"{value} {value}"
    elif isinstance(value, list):
        yield from ((CHANGED, other) for other in ([], value[:-1], value[1:], value * 2, value[::-1]))
        for at, item in enumerate(value if depth < _DEEPEST else ()):
            for kind, _, other in changed_value(item, {}, words, depth + 1):
                yield kind, [*value[:at], other, *value[at + 1 :]]
    elif isinstance(value, dict):
        for name, item in value.items():
            yield REMOVED, {key: each for key, each in value.items() if key != name}
            for kind, _, other in changed_value(item, {}, words, depth + 1) if depth < _DEEPEST else ():
                yield kind, {**value, name: other}


def _possible(schema: Mapping[str, Any], words: Sequence[str]) -> list[Any]:
    """Values that an argument which was not given may have."""
    if schema.get("enum"):
        return [*schema["enum"]]
    numbers = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    known = {"boolean": [True, False], "integer": [*numbers, 0, 1, 2], "number": [*numbers, 0, 0.5, 1], "array": [[]]}
    return known.get(schema.get("type", "string"), [*words[:_MOST_NEIGHBOURS], ""])


def _shape(word: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", word))
