"""Changes to the actions of an episode that should change its reward: to their order, values and
texts.

An action is any value, such as a command, a call or a text. The caller plays the changed actions to
determine the reward.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

from realhf.env.check.scripts import type_of

T = TypeVar("T")
# Kinds of changes. FIRST adds an action besides the task, NEIGHBOUR uses a similar name, MORE
# repeats or extends a text, LEFT_OVER leaves something additional behind, and EXACT_NAME writes a
# name slightly wrong.
LEFT_OUT = "left out"
DOUBLED = "doubled"
REORDERED = "reordered"
FIRST = "beside"
REMOVED = "argument removed"
CHANGED = "argument changed"
ADDED = "argument added"
EXCHANGED = "arguments exchanged"
NEIGHBOUR = "neighbour"
CUT = "cut off"
WORD_OUT = "word left out"
WORD_CHANGED = "word changed"
SWAPPED = "words swapped"
MORE = "said more"
LEFT_OVER = "left over"
EXACT_NAME = "exact name"
REMOVED_AGAIN = "made and removed again"
OWN_NAMES = ("own", "tmp", "test-1")
"""Names that no task uses."""
_MOST_NEIGHBOURS = 4
"""Maximum number of similar words or other values."""
_DEEPEST = 4
"""Maximum depth of nested values that are changed."""
_OTHER_NUMBER = 7
"""Offset of the last of the other values of a number."""
_OTHER_TEXTS = ("amber", "cobalt")
"""Other values of a text."""
_MOST_SWAPS = 12
"""Number of swaps in a text beyond its number of tokens."""
_WORD = re.compile(r"[^\s,;:!?()\[\]{}'\"`=<>|]+")
_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?|\w+|<>|<=|>=|!=|[^\w\s]")
_LOOKS_LIKE = {
    "l": "1",
    "o": "0",
    "a": "\N{CYRILLIC SMALL LETTER A}",
    "e": "\N{CYRILLIC SMALL LETTER IE}",
}
"""Letters and characters that look alike."""
_FLIPPED = {
    "+": "-*/", "-": "+*/", "*": "/+-", "/": "*+-", "(": "[", "=": ("<>", ">=", "<="), "<": (">", "<="),
    ">": ("<", ">="), "<>": ("=",), "<=": (">=", "<"), ">=": ("<=", ">"),
}  # fmt: skip
"""Operators and their replacements."""


class Change(NamedTuple, Generic[T]):
    """A changed value."""

    kind: str
    """Group of similar changes."""
    what: str
    """Description for display."""
    value: T
    """The result of the change."""


def reordered(actions: Sequence[T]) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with one action left out or alone, one or all done twice, two neighbours
    swapped, the last one first, or all reversed."""
    all_of = tuple(actions)
    count = len(actions)
    for at in range(count):
        yield Change(LEFT_OUT, f"action {at + 1} left out", all_of[:at] + all_of[at + 1 :])
        yield Change(DOUBLED, f"action {at + 1} done twice", all_of[: at + 1] + all_of[at:])
        if count > 2:
            yield Change(LEFT_OUT, f"action {at + 1} alone", all_of[at : at + 1])
    for at in range(count - 1):
        swapped = (*all_of[:at], all_of[at + 1], all_of[at], *all_of[at + 2 :])
        yield Change(REORDERED, f"actions {at + 1} and {at + 2} swapped", swapped)
    if count > 1:
        yield Change(DOUBLED, "everything done twice", all_of * 2)
        yield Change(REORDERED, "the last action first", (all_of[-1], *all_of[:-1]))
    if count > 2:
        yield Change(REORDERED, "everything in reverse", all_of[::-1])


def with_variants(
    actions: Sequence[T], variants: Callable[[T], Iterable[Change[T]]]
) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with each action replaced by each of its variants, and with the variant
    inserted before or after it.

    A replacement has the kind of the variant; ``before`` and ``after`` are appended to the kinds of
    insertions.
    """
    all_of = tuple(actions)
    for at, action in enumerate(all_of):
        head = all_of[:at]
        tail = all_of[at + 1 :]
        number = at + 1
        for kind, what, variant in variants(action):
            yield Change(kind, f"action {number}: {what}", (*head, variant, *tail))
            yield Change(
                f"{kind}, before",
                f"before action {number} the same, {what}",
                (*head, variant, action, *tail),
            )
            yield Change(
                f"{kind}, after",
                f"after action {number} the same, {what}",
                (*head, action, variant, *tail),
            )


def with_others(
    actions: Sequence[T], others: Iterable[Change[T]]
) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with another action inserted before all of them, and before the last
    one."""
    all_of = tuple(actions)
    for kind, what, other in others:
        yield Change(kind, f"{what}, first", (other, *all_of))
        if len(all_of) > 1:
            yield Change(kind, f"{what}, before the last action", (*all_of[:-1], other, all_of[-1]))


def drawn(changes: Iterable[Change[T]], most: int, rng: random.Random) -> list[Change[T]]:
    """Draw at most ``most`` changes, with equal numbers of each kind as far as available."""
    by_kind: dict[str, list[Change[T]]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    for found in by_kind.values():
        rng.shuffle(found)
    ranks: Iterator[tuple[Any, ...]] = zip_longest(*by_kind.values())
    return [change for rank in ranks for change in rank if change is not None][:most]


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the distinct words of texts in order; names, paths and numbers are words."""
    found = (word.rstrip(".") for text in texts for word in _WORD.findall(text))
    return [*dict.fromkeys(word for word in found if word)]


def neighbours(word: str, words: Iterable[str]) -> list[str]:
    """Return a few words of the same shape as ``word``, such as ``a.txt`` for ``b.txt`` and 12 for
    7; any words if there are none."""
    others = [other for other in dict.fromkeys(words) if other != word]
    alike = [other for other in others if _shape(other) == _shape(word)]
    return (alike or others)[:_MOST_NEIGHBOURS]


def changed_arguments(
    arguments: Mapping[str, Any], properties: Mapping[str, Any], words: Sequence[str]
) -> Iterator[Change[dict[str, Any]]]:
    """Yield changed arguments of a call.

    Args:
        arguments: The given arguments.
        properties: JSON schemas of all arguments of the tool.
        words: Words of the episode that may be similar names, likeliest first.
    """
    given = dict(arguments)
    for name, value in given.items():
        yield Change(
            REMOVED, f"without {name}", {key: each for key, each in given.items() if key != name}
        )
        schema = properties.get(name)
        for kind, what, other in changed_value(
            value, schema if isinstance(schema, Mapping) else {}, words
        ):
            yield Change(kind, f"{name} {what}", {**given, name: other})
    for one, other in combinations(given, 2):
        if type(given[one]) is type(given[other]) and given[one] != given[other]:
            what = f"{one} and {other} exchanged"
            yield Change(EXCHANGED, what, {**given, one: given[other], other: given[one]})
    for name, schema in properties.items():
        if name not in given and isinstance(schema, Mapping):
            for value in _possible(schema, words):
                yield Change(ADDED, f"{name} is {shown(value)}", {**given, name: value})


def changed_value(
    value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int = 0
) -> Iterator[Change[Any]]:
    """Yield distinct other values of the type of ``value``."""
    seen = {json.dumps(value)}
    for kind, other in _others(value, schema, words, depth):
        key = json.dumps(other)
        if key not in seen:
            seen.add(key)
            yield Change(kind, f"is {shown(other)}", other)


def changed_number(number: float) -> list[float]:
    """Return results of a wrong count, sign, unit or bound for a number."""
    return [0, 1, -1, number + 1, number - 1, 2 * number, -number, 10 * number]


def changed_name(name: str, words: Iterable[str]) -> Iterator[Change[str]]:
    """Yield replacements of a name: similar names, slightly wrong ones, an empty one and
    wildcards."""
    for other in neighbours(name, words):
        yield Change(NEIGHBOUR, shown(other), other)
    for other in (f"{name}2", name[:-1], name.upper(), name.lower(), f" {name}", "", "*", "%"):
        yield Change(CHANGED, shown(other), other)


def near_names(name: str) -> list[str]:
    """Return slightly different names that denote something else: other case, added blanks,
    prefixes or suffixes, characters that look alike, another folder."""
    alike = "".join(_LOOKS_LIKE.get(char, char) for char in name)
    wide = chr(ord(name[0]) + 0xFEE0) + name[1:] if "!" <= name[:1] <= "~" else name
    near = [
        name.upper(), name.lower(), name.swapcase(), name.title(), f" {name}", f"{name} ", f"my-{name}", f"{name}-copy",
        f"{name}.bak", f"{name}_old", f"{name}2", f"{name}-2", f"{name}x", alike, wide, f"own/{name}",
    ]  # fmt: skip
    return [*dict.fromkeys(other for other in near if other != name)]


def other_values(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return a few values other than ``value`` (None: not given): those of the schema's enum, or
    others of its type; none for types without plain values."""
    kind = type_of(schema) or ("string" if value is None else "")
    if schema.get("enum"):
        others = [*schema["enum"]]
    elif isinstance(value, bool) or kind == "boolean":
        others = [True, False]
    elif isinstance(value, int | float) or kind in ("integer", "number"):
        start = value if isinstance(value, int | float) else schema.get("minimum", 0)
        others = [start + 1, start + 2, start + _OTHER_NUMBER]
    elif isinstance(value, str) or kind == "string":
        others = [*_OTHER_TEXTS]
    else:
        others = []
    return [other for other in others if other != value][:_MOST_NEIGHBOURS]


def shown(value: Any) -> str:
    """Format a value for display in at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _others(
    value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int
) -> Iterator[tuple[str, Any]]:
    for other in schema.get("enum") or ():
        yield CHANGED, other
    if isinstance(value, bool):
        yield CHANGED, not value
    elif isinstance(value, int | float):
        yield from ((CHANGED, other) for other in changed_number(value))
        yield from ((CHANGED, schema[bound]) for bound in ("minimum", "maximum") if bound in schema)
        yield from (
            (NEIGHBOUR, int(word)) for word in neighbours(str(value), words) if word.isdecimal()
        )
    elif isinstance(value, str):
        if value.isdecimal():
            yield from ((CHANGED, str(other)) for other in changed_number(int(value)))
        yield from ((kind, other) for kind, _, other in changed_name(value, words))
        # A part that is a word of the episode, such as the folder of a path, may be replaced by a
        # similar word.
        for part in words:
            if part != value and len(part) > 1 and part in value:
                yield from (
                    (NEIGHBOUR, value.replace(part, other)) for other in neighbours(part, words)[:1]
                )
        pieces = value.split()
        if len(pieces) > 1:
            yield CHANGED, " ".join(pieces[:-1])
            yield CHANGED, " ".join(pieces[::-1])
            yield CHANGED, f"{value} {value}"
    elif isinstance(value, list):
        yield from (
            (CHANGED, other) for other in ([], value[:-1], value[1:], value * 2, value[::-1])
        )
        for at, item in enumerate(value if depth < _DEEPEST else ()):
            for kind, _, other in changed_value(item, {}, words, depth + 1):
                yield kind, [*value[:at], other, *value[at + 1 :]]
    elif isinstance(value, dict):
        for name, item in value.items():
            yield REMOVED, {key: each for key, each in value.items() if key != name}
            for kind, _, other in (
                changed_value(item, {}, words, depth + 1) if depth < _DEEPEST else ()
            ):
                yield kind, {**value, name: other}


def _possible(schema: Mapping[str, Any], words: Sequence[str]) -> list[Any]:
    """Return possible values of an argument that was not given."""
    if schema.get("enum"):
        return [*schema["enum"]]
    numbers = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    known = {
        "boolean": [True, False],
        "integer": [*numbers, 0, 1, 2],
        "number": [*numbers, 0, 0.5, 1],
        "array": [[]],
    }
    return known.get(type_of(schema), [*words[:_MOST_NEIGHBOURS], ""])


def _shape(word: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", word))


def changed_text(text: str, words: Sequence[str]) -> Iterator[Change[str]]:
    """Yield distinct changed texts; ``words`` are words of the episode that may be similar names,
    likeliest first."""
    seen = {text}
    for change in _changes(text, words):
        if change.value not in seen:
            seen.add(change.value)
            yield change


def _changes(text: str, words: Sequence[str]) -> Iterator[Change[str]]:
    spans = [found.span() for found in _TOKEN.finditer(text)]
    for number, (start, end) in enumerate(spans):
        token = text[start:end]
        yield Change(WORD_OUT, f"without {shown(token)}", text[:start] + text[end:])
        if number:
            yield Change(CUT, f"cut off before {shown(token)}", text[:start].rstrip())
            yield Change(CUT, f"begins with {shown(token)}", text[start:])
        for what, other in _other_tokens(token, words):
            yield Change(
                WORD_CHANGED, f"{shown(token)} is {what}", text[:start] + other + text[end:]
            )
    yield from _swapped(text, spans)
    yield Change(MORE, "said twice", f"{text}\n{text}")
    yield Change(MORE, "said twice in a line", f"{text} {text}")
    yield Change(MORE, "denied", f"not {text}")
    if spans:
        start, end = spans[-1]
        for other in neighbours(text[start:end], words):
            changed = text[:start] + other + text[end:]
            yield Change(MORE, f"another one first: {shown(changed)}", f"{changed}\n{text}")
            yield Change(MORE, f"another one behind: {shown(changed)}", f"{text}\n{changed}")
            yield Change(MORE, f"both in a line: {shown(other)}", f"{text} {other}")
            yield Change(
                MORE,
                f"both in a line, {shown(other)} first",
                f"{text[:start]}{other} {text[start:]}",
            )


def _other_tokens(token: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for flipped in _FLIPPED.get(token, ()):
        yield flipped, flipped
    quote = token[0] if token[0] in "'\"" else ""
    bare = token.strip("'\"")
    if bare.isdecimal():
        yield from (
            (str(number), f"{quote}{number}{quote}")
            for number in dict.fromkeys(map(int, changed_number(int(bare))))
        )
    if bare.isalnum() or quote or "_" in bare:
        for _, what, other in changed_name(bare, words):
            if quote or other == other.strip():
                yield what, f"{quote}{other}{quote}"


def _swapped(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Change[str]]:
    """Yield texts with two words swapped: adjacent words, and successive numbers and quotations."""
    pairs = [*pairwise(spans)]
    for kind in ("'", "0123456789"):
        pairs += [*pairwise(span for span in spans if text[span[0]] in kind)]
    for (start, end), (other_start, other_end) in [*dict.fromkeys(pairs)][
        : _MOST_SWAPS + len(spans)
    ]:
        one = text[start:end]
        other = text[other_start:other_end]
        if one != other:
            swapped = text[:start] + other + text[end:other_start] + one + text[other_end:]
            yield Change(SWAPPED, f"{shown(one)} and {shown(other)} swapped", swapped)
