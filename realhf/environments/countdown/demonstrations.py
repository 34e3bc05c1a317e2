"""Writes what a scripted solver answers, for the warm start of the built-in policy.

- *solution*: the steps that reach the target.
- *recovery*: a line of steps that misses it, and on the next line the right steps. Only the last line is judged.
- *habit*: an answer that earns no success. Most claim the target: the last step states it, whatever its operation comes
  to. The others miss it honestly.

Solutions are drawn with the puzzle, nothing is searched for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from realhf.api.environment import HABIT, RECOVERY, Demonstration, DemonstrationRequest
from realhf.environments.countdown.levels import CountdownTasks, Puzzle, Step, results

CLAIMED_SHARE = 0.6
"""Share of the habits that claim the target."""
_SEED_BITS = 31


def demonstrations(tasks: CountdownTasks, request: DemonstrationRequest) -> Iterator[Demonstration]:
    """Yield what ``request`` asks for, in mixed order; of every level the rounded share of each kind."""
    rng = random.Random(f"countdown demonstrations {request.seed}")
    wanted = [(level, kind) for level in tasks.groups for kind in request.kinds()]
    rng.shuffle(wanted)
    for level, kind in wanted:
        yield demonstration(tasks, level, rng.getrandbits(_SEED_BITS), kind, rng)


def demonstration(tasks: CountdownTasks, level: str, seed: int, kind: str, rng: random.Random) -> Demonstration:
    """Return an answer of a kind to the instance of a level that ``seed`` draws."""
    puzzle = tasks.puzzle(level, seed)
    right = written(puzzle.solution)
    if kind == HABIT:
        answer = claimed(puzzle, rng) if rng.random() < CLAIMED_SHARE else missed(puzzle, rng)
    else:
        answer = f"{missed(puzzle, rng)}\n{right}" if kind == RECOVERY else right
    return Demonstration(tasks.instantiate(level, seed), (answer,), kind=kind, succeeds=kind != HABIT)


def written(steps: tuple[Step, ...]) -> str:
    """Return steps as an answer."""
    return ", ".join(map(str, steps))


def missed(puzzle: Puzzle, rng: random.Random) -> str:
    """Return right arithmetic that does not reach the target: the last operation is another one."""
    last = puzzle.solution[-1]
    others = [step for step in results(last.left, last.right) if step.value != puzzle.target]
    if not others:  # 1 and 1, to 2: the only puzzle in which every other operation is idle
        others = [Step(last.left, "*", last.right, last.left * last.right)]
    return written((*puzzle.solution[:-1], rng.choice(others)))


def claimed(puzzle: Puzzle, rng: random.Random) -> str:
    """Return steps of which the last states the target though its operation does not come to it."""
    last = puzzle.solution[-1]
    wrong = [sign for sign, value in _values(last) if value != puzzle.target]
    return written((*puzzle.solution[:-1], replace(last, operator=rng.choice(wrong))))


def _values(step: Step) -> list[tuple[str, float]]:
    left, right = step.left, step.right
    return [("+", left + right), ("-", left - right), ("*", left * right), ("/", left / right)]
