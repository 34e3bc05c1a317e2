"""Changes to the actions of an episode that should change its reward: to the order of actions, to
values, and to texts.

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

from realhf.env.check.scripts import schema_type

T = TypeVar("T")
# Kinds of changes. FIRST adds an action that the task does not ask for, NEIGHBOUR uses a similar
# name, MORE repeats or extends a text, LEFT_OVER leaves something additional behind, and EXACT_NAME
# writes a name slightly wrong.
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
_MAX_NEIGHBOURS = 4
"""Maximum number of similar words, or of other values, that are tried."""
_MAX_DEPTH = 4
"""Maximum depth of nested values that are changed."""
_OTHER_NUMBER = 7
"""Last of the alternative numbers: the number plus this offset."""
_OTHER_TEXTS = ("amber", "cobalt")
"""Alternative values for a string."""
_MAX_SWAPS = 12
"""Maximum number of swaps in a text is its number of tokens plus this."""
_WORD = re.compile(r"[^\s,;:!?()\[\]{}'\"`=<>|]+")
_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?|\w+|<>|<=|>=|!=|[^\w\s]")
_LOOKALIKES = {
    "l": "1",
    "o": "0",
    "a": "\N{CYRILLIC SMALL LETTER A}",
    "e": "\N{CYRILLIC SMALL LETTER IE}",
}
"""Letters, and characters that look like them."""
_REPLACED_OPERATORS = {
    "+": "-*/", "-": "+*/", "*": "/+-", "/": "*+-", "(": "[", "=": ("<>", ">=", "<="), "<": (">", "<="),
    ">": ("<", ">="), "<>": ("=",), "<=": (">=", "<"), ">=": ("<=", ">"),
}  # fmt: skip
"""Operators, and what each is replaced by."""


class Change(NamedTuple, Generic[T]):
    """A changed value."""

    kind: str
    """Name of the group of similar changes."""
    what: str
    """Description for display."""
    value: T
    """The result of the change."""


def reorder(actions: Sequence[T]) -> Iterator[Change[tuple[T, ...]]]:
    """Yield reorderings: one action left out, one action alone, one or all actions done twice, two
    neighbours swapped, the last action first, all actions reversed."""
    originals = tuple(actions)
    count = len(actions)
    for at in range(count):
        yield Change(LEFT_OUT, f"action {at + 1} left out", originals[:at] + originals[at + 1 :])
        yield Change(DOUBLED, f"action {at + 1} done twice", originals[: at + 1] + originals[at:])
        if count > 2:
            yield Change(LEFT_OUT, f"action {at + 1} alone", originals[at : at + 1])
    for at in range(count - 1):
        swapped = (*originals[:at], originals[at + 1], originals[at], *originals[at + 2 :])
        yield Change(REORDERED, f"actions {at + 1} and {at + 2} swapped", swapped)
    if count > 1:
        yield Change(DOUBLED, "everything done twice", originals * 2)
        yield Change(REORDERED, "the last action first", (originals[-1], *originals[:-1]))
    if count > 2:
        yield Change(REORDERED, "everything in reverse", originals[::-1])


def insert_variants(
    actions: Sequence[T], variants: Callable[[T], Iterable[Change[T]]]
) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with each action replaced by each of its variants, and with the variant
    inserted before or after it.

    A replacement has the kind of the variant; ``before`` and ``after`` are appended to the kinds of
    insertions.
    """
    originals = tuple(actions)
    for at, action in enumerate(originals):
        head = originals[:at]
        tail = originals[at + 1 :]
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


def insert_others(
    actions: Sequence[T], additions: Iterable[Change[T]]
) -> Iterator[Change[tuple[T, ...]]]:
    """Yield the actions with another action inserted before all of them, and before the last
    one."""
    originals = tuple(actions)
    for kind, what, addition in additions:
        yield Change(kind, f"{what}, first", (addition, *originals))
        if len(originals) > 1:
            yield Change(
                kind, f"{what}, before the last action", (*originals[:-1], addition, originals[-1])
            )


def draw_changes(changes: Iterable[Change[T]], count: int, rng: random.Random) -> list[Change[T]]:
    """Draw at most ``count`` changes, the same number of each kind as far as available."""
    by_kind: dict[str, list[Change[T]]] = {}
    for change in changes:
        by_kind.setdefault(change.kind, []).append(change)
    for same_kind in by_kind.values():
        rng.shuffle(same_kind)
    ranks: Iterator[tuple[Any, ...]] = zip_longest(*by_kind.values())
    return [change for rank in ranks for change in rank if change is not None][:count]


def split_words(texts: Iterable[str]) -> list[str]:
    """Return the distinct words of texts in order; names, paths and numbers are words."""
    words = (word.rstrip(".") for text in texts for word in _WORD.findall(text))
    return [*dict.fromkeys(word for word in words if word)]


def find_neighbours(word: str, words: Iterable[str]) -> list[str]:
    """Return a few words of the same shape as ``word``, such as ``a.txt`` for ``b.txt`` and 12 for
    7; any words if there are none."""
    candidates = [other for other in dict.fromkeys(words) if other != word]
    same_shape = [other for other in candidates if _word_shape(other) == _word_shape(word)]
    return (same_shape or candidates)[:_MAX_NEIGHBOURS]


def change_arguments(
    arguments: Mapping[str, Any], properties: Mapping[str, Any], words: Sequence[str]
) -> Iterator[Change[dict[str, Any]]]:
    """Yield changed arguments of a call.

    Args:
        arguments: The given arguments.
        properties: JSON schemas of all arguments of the tool.
        words: Words of the episode that may be similar names, likeliest first.
    """
    original = dict(arguments)
    for name, value in original.items():
        yield Change(
            REMOVED, f"without {name}", {key: each for key, each in original.items() if key != name}
        )
        schema = properties.get(name)
        for kind, what, second in change_value(
            value, schema if isinstance(schema, Mapping) else {}, words
        ):
            yield Change(kind, f"{name} {what}", {**original, name: second})
    for first, second in combinations(original, 2):
        if type(original[first]) is type(original[second]) and original[first] != original[second]:
            what = f"{first} and {second} exchanged"
            yield Change(
                EXCHANGED, what, {**original, first: original[second], second: original[first]}
            )
    for name, schema in properties.items():
        if name not in original and isinstance(schema, Mapping):
            for value in _possible_values(schema, words):
                yield Change(ADDED, f"{name} is {format_value(value)}", {**original, name: value})


def change_value(
    value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int = 0
) -> Iterator[Change[Any]]:
    """Yield distinct other values of the type of ``value``."""
    known = {json.dumps(value)}
    for kind, new_value in _propose_values(value, schema, words, depth):
        key = json.dumps(new_value)
        if key not in known:
            known.add(key)
            yield Change(kind, f"is {format_value(new_value)}", new_value)


def change_number(number: float) -> list[float]:
    """Return the numbers that result from a wrong count, sign, unit or bound."""
    return [0, 1, -1, number + 1, number - 1, 2 * number, -number, 10 * number]


def change_name(name: str, words: Iterable[str]) -> Iterator[Change[str]]:
    """Yield replacements of a name: similar names, slightly wrong ones, an empty one and
    wildcards."""
    for new_name in find_neighbours(name, words):
        yield Change(NEIGHBOUR, format_value(new_name), new_name)
    for new_name in (f"{name}2", name[:-1], name.upper(), name.lower(), f" {name}", "", "*", "%"):
        yield Change(CHANGED, format_value(new_name), new_name)


def similar_names(name: str) -> list[str]:
    """Return names that are slightly different and mean something else: changed case, added blanks,
    prefixes or suffixes, look-alike characters, another folder."""
    lookalike = "".join(_LOOKALIKES.get(char, char) for char in name)
    full_width = chr(ord(name[0]) + 0xFEE0) + name[1:] if "!" <= name[:1] <= "~" else name
    candidates = [
        name.upper(), name.lower(), name.swapcase(), name.title(), f" {name}", f"{name} ", f"my-{name}", f"{name}-copy",
        f"{name}.bak", f"{name}_old", f"{name}2", f"{name}-2", f"{name}x", lookalike, full_width, f"own/{name}",
    ]  # fmt: skip
    return [*dict.fromkeys(candidate for candidate in candidates if candidate != name)]


def other_values(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Return a few values other than ``value`` (None if it was not given): from the schema's enum,
    or of the value's type; none for types without simple values."""
    kind = schema_type(schema) or ("string" if value is None else "")
    if schema.get("enum"):
        candidates = [*schema["enum"]]
    elif isinstance(value, bool) or kind == "boolean":
        candidates = [True, False]
    elif isinstance(value, int | float) or kind in ("integer", "number"):
        start = value if isinstance(value, int | float) else schema.get("minimum", 0)
        candidates = [start + 1, start + 2, start + _OTHER_NUMBER]
    elif isinstance(value, str) or kind == "string":
        candidates = [*_OTHER_TEXTS]
    else:
        candidates = []
    return [candidate for candidate in candidates if candidate != value][:_MAX_NEIGHBOURS]


def format_value(value: Any) -> str:
    """Format a value for display in at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _propose_values(
    value: Any, schema: Mapping[str, Any], words: Sequence[str], depth: int
) -> Iterator[tuple[str, Any]]:
    for new_value in schema.get("enum") or ():
        yield CHANGED, new_value
    if isinstance(value, bool):
        yield CHANGED, not value
    elif isinstance(value, int | float):
        yield from ((CHANGED, new_value) for new_value in change_number(value))
        yield from ((CHANGED, schema[bound]) for bound in ("minimum", "maximum") if bound in schema)
        yield from (
            (NEIGHBOUR, int(word))
            for word in find_neighbours(str(value), words)
            if word.isdecimal()
        )
    elif isinstance(value, str):
        if value.isdecimal():
            yield from ((CHANGED, str(new_value)) for new_value in change_number(int(value)))
        yield from ((kind, new_value) for kind, _, new_value in change_name(value, words))
        # A part that is a word of the episode, such as the folder of a path, may be replaced by a
        # similar word.
        for part in words:
            if part != value and len(part) > 1 and part in value:
                yield from (
                    (NEIGHBOUR, value.replace(part, new_value))
                    for new_value in find_neighbours(part, words)[:1]
                )
        pieces = value.split()
        if len(pieces) > 1:
            yield CHANGED, " ".join(pieces[:-1])
            yield CHANGED, " ".join(pieces[::-1])
            yield CHANGED, f"{value} {value}"
    elif isinstance(value, list):
        yield from (
            (CHANGED, new_value)
            for new_value in ([], value[:-1], value[1:], value * 2, value[::-1])
        )
        for at, item in enumerate(value if depth < _MAX_DEPTH else ()):
            for kind, _, new_value in change_value(item, {}, words, depth + 1):
                yield kind, [*value[:at], new_value, *value[at + 1 :]]
    elif isinstance(value, dict):
        for name, item in value.items():
            yield REMOVED, {key: each for key, each in value.items() if key != name}
            for kind, _, new_value in (
                change_value(item, {}, words, depth + 1) if depth < _MAX_DEPTH else ()
            ):
                yield kind, {**value, name: new_value}


def _possible_values(schema: Mapping[str, Any], words: Sequence[str]) -> list[Any]:
    """Return values to try for an argument that the call did not give."""
    if schema.get("enum"):
        return [*schema["enum"]]
    numbers = [schema[bound] for bound in ("minimum", "maximum") if bound in schema]
    by_type = {
        "boolean": [True, False],
        "integer": [*numbers, 0, 1, 2],
        "number": [*numbers, 0, 0.5, 1],
        "array": [[]],
    }
    return by_type.get(schema_type(schema), [*words[:_MAX_NEIGHBOURS], ""])


def _word_shape(word: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"[^\W\d_]+", "a", word))


def change_text(text: str, words: Sequence[str]) -> Iterator[Change[str]]:
    """Yield distinct changed texts; ``words`` are words of the episode that may be similar names,
    likeliest first."""
    known = {text}
    for change in _propose_texts(text, words):
        if change.value not in known:
            known.add(change.value)
            yield change


def _propose_texts(text: str, words: Sequence[str]) -> Iterator[Change[str]]:
    spans = [match.span() for match in _TOKEN.finditer(text)]
    for number, (start, end) in enumerate(spans):
        token = text[start:end]
        yield Change(WORD_OUT, f"without {format_value(token)}", text[:start] + text[end:])
        if number:
            yield Change(CUT, f"cut off before {format_value(token)}", text[:start].rstrip())
            yield Change(CUT, f"begins with {format_value(token)}", text[start:])
        for what, other in _replacement_tokens(token, words):
            yield Change(
                WORD_CHANGED, f"{format_value(token)} is {what}", text[:start] + other + text[end:]
            )
    yield from _swap_words(text, spans)
    yield Change(MORE, "repeated", f"{text}\n{text}")
    yield Change(MORE, "repeated in one line", f"{text} {text}")
    yield Change(MORE, "negated", f"not {text}")
    if spans:
        start, end = spans[-1]
        for other in find_neighbours(text[start:end], words):
            changed = text[:start] + other + text[end:]
            yield Change(
                MORE, f"another answer first: {format_value(changed)}", f"{changed}\n{text}"
            )
            yield Change(
                MORE, f"another answer last: {format_value(changed)}", f"{text}\n{changed}"
            )
            yield Change(MORE, f"both in a line: {format_value(other)}", f"{text} {other}")
            yield Change(
                MORE,
                f"both in a line, {format_value(other)} first",
                f"{text[:start]}{other} {text[start:]}",
            )


def _replacement_tokens(token: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for flipped in _REPLACED_OPERATORS.get(token, ()):
        yield flipped, flipped
    quote = token[0] if token[0] in "'\"" else ""
    bare = token.strip("'\"")
    if bare.isdecimal():
        yield from (
            (str(number), f"{quote}{number}{quote}")
            for number in dict.fromkeys(map(int, change_number(int(bare))))
        )
    if bare.isalnum() or quote or "_" in bare:
        for _, what, other in change_name(bare, words):
            if quote or other == other.strip():
                yield what, f"{quote}{other}{quote}"


def _swap_words(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Change[str]]:
    """Yield texts with two words swapped: adjacent words, and successive numbers and quotations."""
    pairs = [*pairwise(spans)]
    for kind in ("'", "0123456789"):
        pairs += [*pairwise(span for span in spans if text[span[0]] in kind)]
    for (start, end), (other_start, other_end) in [*dict.fromkeys(pairs)][
        : _MAX_SWAPS + len(spans)
    ]:
        first = text[start:end]
        second = text[other_start:other_end]
        if first != second:
            swapped = text[:start] + second + text[end:other_start] + first + text[other_end:]
            yield Change(
                SWAPPED, f"{format_value(first)} and {format_value(second)} swapped", swapped
            )
