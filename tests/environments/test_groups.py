"""The task sets of the built-in environments: groups in their order, and names that do not
exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from realhf.api.environment import HELD_OUT, TRAIN, TaskSet
from realhf.environments.countdown import CountdownTasks
from realhf.environments.files.tasks import FilesTasks
from realhf.environments.sql.tasks import SqlTaskSet

Make = Callable[[Sequence[str], str], TaskSet]


@pytest.mark.parametrize(
    ("make", "chosen", "left_out"),
    [
        (CountdownTasks, ("two-small", "four-large"), "three-small"),
        (FilesTasks, ("one_call", "several"), "copy"),
        (lambda groups, split: SqlTaskSet(split, groups), ("lookup", "steps"), "count"),
    ],
)
def test_the_task_set_offers_the_chosen_groups_in_order(
    make: Make, chosen: Sequence[str], left_out: str
) -> None:
    for split in (TRAIN, HELD_OUT):
        tasks = make(chosen[::-1], split)
        assert isinstance(tasks, TaskSet)
        assert tasks.groups == chosen and tuple(dict.fromkeys(tasks.group_of.values())) == chosen
        with pytest.raises(KeyError):
            tasks.instantiate(left_out, 1)
    for make_wrong in (partial(make, ["hard"], TRAIN), partial(make, chosen, "test")):
        with pytest.raises(
            ValueError, match=r"unknown (group|level|split) '(hard|test)' \(known: "
        ):
            make_wrong()
