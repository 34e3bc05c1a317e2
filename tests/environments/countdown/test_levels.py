"""The levels of countdown: endless, decided by the seed, solvable, and split for good."""

from __future__ import annotations

import json

import pytest

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN
from realhf.environments.countdown import LEVELS, CountdownTasks, results, reward, split_of

DRAWS = 150


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_keeps_its_bounds_and_its_solution_is_right(name: str):
    """Every puzzle has as many numbers as its level says, within its bounds, and its solution earns everything."""
    level = LEVELS[name]
    for split in SPLITS:
        tasks = CountdownTasks([name], split)
        for seed in range(DRAWS):
            puzzle, task = tasks.puzzle(name, seed), tasks.instantiate(name, seed)
            assert (tuple(task.payload["numbers"]), task.payload["target"]) == (puzzle.numbers, puzzle.target)
            assert task.payload["prompt"] == f"Reach {puzzle.target} with {' '.join(map(str, puzzle.numbers))}."
            assert json.loads(json.dumps(task.payload)) == task.payload
            assert len(puzzle.numbers) == level.numbers == len(puzzle.solution) + 1
            assert all(1 <= number <= level.largest for number in puzzle.numbers)
            assert level.least_target <= puzzle.target <= level.most_target
            assert puzzle.target not in puzzle.numbers
            assert reward(", ".join(map(str, puzzle.solution)), **task.payload) == 1


def test_a_puzzle_of_more_numbers_needs_more_than_one_operation():
    for name in ("three-small", "four-large"):
        for seed in range(DRAWS):
            puzzle = CountdownTasks([name], TRAIN).puzzle(name, seed)
            pairs = [(a, b) for i, a in enumerate(puzzle.numbers) for b in puzzle.numbers[i + 1 :]]
            assert puzzle.target not in {step.value for a, b in pairs for step in results(a, b)}


def test_no_puzzle_is_in_both_splits():
    """Numbers in another order are the same puzzle. The splits are disjoint whatever is drawn, and both are endless
    enough to hold hundreds of puzzles."""
    seen: dict[str, set] = {TRAIN: set(), HELD_OUT: set()}
    for split in SPLITS:
        tasks = CountdownTasks(LEVELS, split)
        for name in LEVELS:
            for seed in range(DRAWS):
                puzzle = tasks.puzzle(name, seed)
                seen[split].add((tuple(sorted(puzzle.numbers)), puzzle.target))
    assert not seen[TRAIN] & seen[HELD_OUT]
    assert min(map(len, seen.values())) > 300
    assert split_of([9, 2, 5], 7) == split_of([2, 5, 9], 7)


def test_the_same_seed_draws_the_same_instance_and_another_one_another():
    tasks, again = CountdownTasks(LEVELS, TRAIN), CountdownTasks(LEVELS, TRAIN)
    first = [tasks.instantiate("four-large", seed) for seed in range(20)]
    assert first == [again.instantiate("four-large", seed) for seed in range(20)]
    assert len({str(task.payload) for task in first}) > 15
    assert len({task.id for task in first}) == 20
