"""Change a text that is an action, such as a statement or an answer: words left out, cut off, changed, swapped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from realhf.env.mutation.sequences import Change
from realhf.env.mutation.values import changed_name, changed_number, neighbours, shown

CUT, WORD_OUT, WORD_CHANGED, SWAPPED, MORE = (
    "cut off",
    "word left out",
    "word changed",
    "words swapped",
    "said more",
)
_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?|\w+|<>|<=|>=|!=|[^\w\s]")
_FLIPPED = {
    "+": "-*/",
    "-": "+*/",
    "*": "/+-",
    "/": "*+-",
    "=": ("<>", ">=", "<="),
    "<": (">", "<="),
    ">": ("<", ">="),
    "<>": ("=",),
    "<=": (">=", "<"),
    ">=": ("<=", ">"),
    "(": ("[",),
}
_MOST_SWAPS = 12


def changed_text(text: str, words: Sequence[str]) -> Iterator[Change[str]]:
    """Yield changed texts, each once. ``words`` stand in the episode and may name a neighbour, the likeliest first."""
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
            yield Change(WORD_CHANGED, f"{shown(token)} is {what}", text[:start] + other + text[end:])
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
            yield Change(MORE, f"both in a line, {shown(other)} first", f"{text[:start]}{other} {text[start:]}")


def _other_tokens(token: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for flipped in _FLIPPED.get(token, ()):
        yield flipped, flipped
    quote = token[0] if token[0] in "'\"" else ""
    bare = token.strip("'\"")
    if bare.isdecimal():
        yield from (
            (str(number), f"{quote}{number}{quote}") for number in dict.fromkeys(map(int, changed_number(int(bare))))
        )
    if bare.isalnum() or quote or "_" in bare:
        for _, what, other in changed_name(bare, words):
            if quote or other == other.strip():
                yield what, f"{quote}{other}{quote}"


def _swapped(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[Change[str]]:
    """Two words in each other's place: those side by side, and numbers and quotations farther apart."""
    pairs = [*pairwise(spans)]
    for kind in ("'", "0123456789"):
        pairs += [*pairwise(span for span in spans if text[span[0]] in kind)]
    for (start, end), (other_start, other_end) in [*dict.fromkeys(pairs)][: _MOST_SWAPS + len(spans)]:
        one, other = text[start:end], text[other_start:other_end]
        if one != other:
            swapped = text[:start] + other + text[end:other_start] + one + text[other_end:]
            yield Change(SWAPPED, f"{shown(one)} and {shown(other)} swapped", swapped)
