"""Finds which of several name patterns can match one and the same name.

Patterns are those of IAM: ``*`` stands for any text, ``?`` for one character. ``combinations`` gives every combination
of patterns that some name matches while it matches none of the others, with such a name. So two expressions over the
patterns are equal for all names when they are equal for these few. The answer is exact: the patterns are run side by
side as automata over all texts, and texts after which every pattern is equally far are one.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence

FEWEST_STEPS = 256
"""Least that a budget is charged for one call, in steps."""
_STEP_BITS = 512
"""How many characters of patterns one step looks at; longer sets of patterns pay for more steps."""
_SPARE = string.ascii_lowercase + string.digits + "".join(map(chr, range(0xE000, 0xF8FF)))
"""Characters of which one stands for all that no pattern names."""


class TooManySteps(Exception):
    """A comparison took more steps than it may; whoever wrote what is compared may have meant it to."""


class Budget:
    """Counts steps, each about a microsecond's work. ``spend`` raises TooManySteps when there are none left."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Take ``steps`` off. Raises TooManySteps."""
        self.left -= steps
        if self.left < 0:
            raise TooManySteps


def combinations(patterns: Sequence[str], budget: Budget) -> dict[int, str]:
    """Return, for each set of patterns that some non-empty name matches while it matches no other of them, such a
    name. A set is a number whose bit i stands for ``patterns[i]``. Raises TooManySteps.

    A pattern that holds a policy variable (``${aws:username}``) is matched by what the variable's value decides, so
    beside each name that it may match there is one that it does not, and what two such patterns have to do with one
    another is not looked at: more combinations may be given than exist, never fewer.
    """
    budget.spend(FEWEST_STEPS)
    plain = [re.sub(r"\$\{[^}]*\}", "*", pattern) for pattern in patterns]
    simple = all("?" not in pattern and "*" not in pattern[:-1] for pattern in plain)
    found = dict((_simple if simple else _automaton)(plain, budget))
    for bit in [1 << number for number, pattern in enumerate(patterns) if "${" in pattern]:
        budget.spend(2 * len(found))
        found |= {mask & ~bit: name for mask, name in found.items() if mask & bit and mask & ~bit not in found}
    return found


def _simple(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Answer for patterns without wildcards but a star at the end. What decides is then the longest beginning that
    a name shares with a pattern, so the whole names and the beginnings, prolonged by something else, are enough."""
    whole: dict[str, int] = {}
    starts: dict[str, int] = {"": 0}
    for number, pattern in enumerate(patterns):
        of, text = (starts, pattern[:-1]) if pattern.endswith("*") else (whole, pattern)
        of[text] = of.get(text, 0) | 1 << number
    spare = _spare(patterns)
    lengths = sorted({len(text) for text in starts})
    budget.spend((len(starts) + len(whole)) * len(lengths) * (1 + len(patterns) // _STEP_BITS))
    for name in [text + spare for text in starts] + [text for text in whole if text]:
        mask = whole.get(name, 0)
        for length in lengths:
            mask |= starts.get(name[:length], 0) if length <= len(name) else 0
        yield mask, name


def _automaton(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Walk over all texts at once. A state is the set of places that the patterns have reached, one bit a place; what
    the next character can be is one of those that stand there, or any other."""
    letters: dict[int, str] = {}  # bit of a place -> the character that leads to the next place
    loops = ends = anything = start = named = 0
    steps: dict[str, int] = {}  # character -> places that it leads on from
    owners: dict[int, int] = {}  # bit of a last place -> bit of its pattern
    place = 1
    for number, pattern in enumerate(patterns):
        start |= place
        for char in pattern:
            if char == "*":
                loops |= place
                continue
            if char == "?":
                anything |= place
            else:
                letters[place] = char
                named |= place
                steps[char] = steps.get(char, 0) | place
            place <<= 1
        ends |= place
        owners[place] = 1 << number
        place <<= 1
    start |= place  # a place of its own, so that the state before any text is not met again
    spare = _spare(patterns)
    cost = 1 + place.bit_length() // _STEP_BITS
    came: dict[int, tuple[int, str]] = {start: (0, "")}
    waiting = [start]
    seen: set[int] = set()
    for state in waiting:  # grows while it is walked, so the shortest name of each kind comes first
        budget.spend(cost + state.bit_count())
        live, mask = state & ends, 0
        while live:
            mask |= owners[live & -live]
            live &= live - 1
        if state != start and mask not in seen:
            seen.add(mask)
            yield mask, _name(came, state)
        nexts = {spare}
        live = state & named
        while live:
            nexts.add(letters[live & -live])
            live &= live - 1
        for char in sorted(nexts):
            budget.spend(cost)
            after = (state & (steps.get(char, 0) | anything)) << 1 | state & loops
            if after not in came:
                came[after] = state, char
                waiting.append(after)


def _name(came: Mapping[int, tuple[int, str]], state: int) -> str:
    """Return the text that leads to a state."""
    chars: list[str] = []
    while (step := came[state])[1]:
        state = step[0]
        chars.append(step[1])
    return "".join(reversed(chars))


def _spare(patterns: Sequence[str]) -> str:
    used = set("".join(patterns))
    return next(char for char in _SPARE if char not in used)
