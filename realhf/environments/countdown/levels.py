"""Draws countdown tasks: difficulty levels, instances by seed, and the split between training and held-out ones."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, Task
from realhf.environments.countdown.verifier import PARTIAL_CREDIT

PROMPT_COLUMN = "prompt"
HELD_OUT_SHARE = 5
"""One puzzle in this many is held out."""
_MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Level:
    """Says what puzzles of a difficulty look like: how many numbers, the largest of them, and the bounds of the target
    and of every value on the way to it."""

    numbers: int
    largest: int
    least_target: int
    most_target: int


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        "two-small": Level(2, 25, 1, 24),
        "two-large": Level(2, 40, 25, 100),
        "three-small": Level(3, 8, 1, 24),
        "three-large": Level(3, 12, 25, 60),
        "four-small": Level(4, 8, 1, 24),
        "four-large": Level(4, 12, 25, 60),
    }
)
"""By name, the easiest first. Each is a template and a group of its own."""


@dataclass(frozen=True)
class Step:
    """Is one operation of a solution: ``left`` and ``right`` stand in the pool, ``value`` is put there."""

    left: int
    operator: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.value}"


@dataclass(frozen=True)
class Puzzle:
    """Is an instance with its solution, one step for each number but the first."""

    numbers: tuple[int, ...]
    target: int
    solution: tuple[Step, ...]

    @property
    def split(self) -> str:
        """The split it belongs to, decided by a stable hash of the numbers, whatever their order, and the target."""
        return split_of(self.numbers, self.target)


def split_of(numbers: Iterable[int], target: int) -> str:
    """Return the only split in which these numbers and this target occur."""
    text = f"{' '.join(map(str, sorted(numbers)))} -> {target}"
    return TRAIN if zlib.crc32(text.encode()) % HELD_OUT_SHARE else HELD_OUT


def results(left: int, right: int) -> list[Step]:
    """Return every operation on two numbers that comes to a positive whole number and is not idle (times or through 1);
    the larger number stands first."""
    high, low = max(left, right), min(left, right)
    found = [Step(high, "+", low, high + low)]
    if high > low:
        found.append(Step(high, "-", low, high - low))
    if low > 1:
        found.append(Step(high, "*", low, high * low))
        if high % low == 0:
            found.append(Step(high, "/", low, high // low))
    return found


def draw_puzzle(level: Level, split: str, rng: random.Random) -> Puzzle:
    """Draw a puzzle of a level that belongs to ``split`` and is not solved by fewer operations than its solution has.

    Raises RuntimeError when the level has none.
    """
    for _ in range(_MOST_DRAWS):
        numbers = tuple(rng.randint(1, level.largest) for _ in range(level.numbers))
        solution = _solution(numbers, level, rng)
        if solution and not _has_shortcut(numbers, solution[-1].value):
            puzzle = Puzzle(numbers, solution[-1].value, solution)
            if puzzle.split == split:
                return puzzle
    raise RuntimeError(f"{level} has no puzzle of the split {split!r} in {_MOST_DRAWS} draws")


def _solution(numbers: Sequence[int], level: Level, rng: random.Random) -> tuple[Step, ...]:
    """Return random steps that use up the numbers and end within the bounds of the level; () if they do not."""
    pool, steps = list(numbers), []
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        possible = [step for step in results(left, right) if step.value <= level.most_target]
        if not possible:
            return ()
        step = rng.choice(possible)
        steps.append(step)
        pool.append(step.value)
    return tuple(steps) if pool[0] >= level.least_target else ()


def _has_shortcut(numbers: Sequence[int], target: int) -> bool:
    """Whether one of the numbers is the target, or one operation reaches it where the puzzle has more."""
    if target in numbers:
        return True
    pairs = [(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    return len(numbers) > 2 and any(step.value == target for a, b in pairs for step in results(a, b))


class CountdownTasks:
    """Holds the levels of these names as an endless task set of one split: every seed draws another instance, and no
    numbers with a target occur in both splits. Payloads are rows for ``verifier.reward``. Raises ValueError for a level
    or split that does not exist."""

    def __init__(self, levels: Iterable[str], split: str, partial_credit: float = PARTIAL_CREDIT) -> None:
        chosen = [*levels]
        if unknown := [name for name in chosen if name not in LEVELS]:
            raise ValueError(f"unknown level {unknown[0]!r} (known: {', '.join(LEVELS)})")
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r} (known: {', '.join(SPLITS)})")
        self.split, self._partial_credit = split, partial_credit
        self.groups: Sequence[str] = [name for name in LEVELS if name in chosen]
        self.group_of: Mapping[str, str] = {name: name for name in self.groups}

    def puzzle(self, template_id: str, seed: int) -> Puzzle:
        """Return the puzzle that ``seed`` draws, with its solution. Raises KeyError for a level that is not here."""
        level = LEVELS[self.group_of[template_id]]
        return draw_puzzle(level, self.split, random.Random(f"countdown {self.split} {template_id} {seed}"))

    def instantiate(self, template_id: str, seed: int) -> Task:
        """Return the instance that ``seed`` draws. Raises KeyError for a level that is not here."""
        puzzle = self.puzzle(template_id, seed)
        row = {
            PROMPT_COLUMN: prompt(puzzle.numbers, puzzle.target),
            "numbers": list(puzzle.numbers),
            "target": puzzle.target,
            "partial_credit": self._partial_credit,
        }
        return Task(f"{template_id}/{seed}", group=self.group_of[template_id], payload=row, seed=seed)


def prompt(numbers: Iterable[int], target: int) -> str:
    """Return what the policy is asked."""
    return f"Reach {target} with {' '.join(map(str, numbers))}."
