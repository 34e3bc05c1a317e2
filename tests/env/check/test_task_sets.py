"""Task sets are judged: groups, ids, instances that are the same every time, splits that share none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from realhf.api.environment import EnvironmentSpec, Task
from realhf.env.check.calls import UserCode
from realhf.env.check.report import Finding
from realhf.env.check.task_sets import TaskSetJudge, spread

COUNT = itertools.count()


class Tasks:
    """Two groups with two templates each; ``change`` spoils one thing."""

    def __init__(self, split: str, change: Callable[[Tasks], None]) -> None:
        self.split = split
        self.group_of: dict[str, str] = {"a": "easy", "b": "easy", "c": "hard", "d": "hard"}
        self.groups: list[str] = ["easy", "hard"]
        self.made: Callable[[Task], Any] = lambda task: task
        change(self)

    def instantiate(self, template_id: str, seed: int) -> Any:
        number = 2 * seed + (self.split == "heldout")
        return self.made(
            Task(f"{template_id}/{number}", self.group_of[template_id], {"kind": template_id}, seed=number)
        )


def judged(change: Callable[[Tasks], None]) -> tuple[TaskSetJudge, list[str]]:
    found: list[Finding] = []
    spec = EnvironmentSpec("x", lambda _: None, lambda split: Tasks(split, change))  # type: ignore[arg-type,return-value]
    judge = TaskSetJudge(spec, UserCode(), found.append)
    judge.judge()
    return judge, [finding.what for finding in found]


def spoiled(**values: Any) -> Callable[[Tasks], None]:
    return lambda tasks: vars(tasks).update(values)


def made(change: Callable[[Task], Any]) -> Callable[[Tasks], None]:
    return spoiled(made=change)


def test_a_sound_set_has_no_findings_and_every_group_is_played() -> None:
    judge, found = judged(lambda tasks: None)
    assert found == []
    assert judge.remark() == "train: 4 templates in 2 groups, heldout: 4 templates in 2 groups"
    chosen = judge.chosen(4)
    assert {(task.seed % 2, task.group) for task in chosen} == {(0, "easy"), (0, "hard"), (1, "easy"), (1, "hard")}
    assert chosen == judge.chosen(4)


def moved(tasks: Tasks) -> None:
    tasks.group_of = {**tasks.group_of, f"new {next(COUNT)}": "easy"}


def raises(task: Task) -> Task:
    raise KeyError(task.id)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoiled(group_of={}), "the split 'train' has no task"),
        (spoiled(groups=["easy", "hard", "easy"]), "split 'train': a group is listed twice in groups"),
        (spoiled(groups=["easy"]), "split 'train': the group 'hard' of a template is not in groups"),
        (spoiled(groups=["easy", "hard", "none"]), "split 'train': the group 'none' has no template"),
        (moved, "split 'train': a second call of tasks lists other templates or another order"),
        (made(lambda task: {"id": 1}), "instantiate('a', 0) returns a task whose type is dict and not Task"),
        (made(lambda task: replace(task, id="")), "instantiate('a', 0) returns a task whose id is ''"),
        (
            made(lambda task: replace(task, payload={"when": {1, 2}})),
            "instantiate('a', 0) returns a task whose payload is no JSON: set is not JSON",
        ),
        (
            spoiled(made=lambda task: replace(task, seed=1.5)),
            "instantiate('a', 0) returns a task whose seed is of the ",
        ),
        (made(lambda task: replace(task, seed=next(COUNT))), "instantiate('a', 0) returns another task the second "),
        (made(lambda task: replace(task, id="same")), "an id names two tasks: that of 'a' and that of 'b'"),
        (made(raises), "the split 'train' cannot be made: KeyError: 'a/0'"),
        (
            made(lambda task: replace(task, seed=0)),
            "the splits share an instance: train 'a/",
        ),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Tasks], None], says: str) -> None:
    _, found = judged(change)
    assert found and found[0].startswith(says), found


def test_one_id_with_several_seeds_is_kept_for_a_look_at_its_openings() -> None:
    """A finite set may ignore the seed, so this is no fault by itself."""
    judge, found = judged(made(lambda task: replace(task, id=task.id.partition("/")[0])))
    assert found == [] and len(judge.twins) == 4
    assert all(one.id == other.id and one.seed != other.seed for one, other in judge.twins)


def test_a_spread_reaches_over_everything() -> None:
    names = [str(number) for number in range(10)]
    assert spread(names, 20) == names and spread(names, 5) == ["0", "2", "4", "6", "8"] and len(spread(names, 3)) <= 3
