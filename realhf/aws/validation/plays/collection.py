"""Collects all plays of a task: a look, other spellings of its solution, and what a person wrote. What goes wrong is
generated in ``mutants``."""

from __future__ import annotations

from realhf.aws.tasks.loader import instantiate, with_drifts
from realhf.aws.tasks.task import Task
from realhf.aws.validation.plays.equivalent import LOOK, equivalent_plays
from realhf.aws.validation.plays.play import KINDS, Play
from realhf.aws.validation.plays.written import written_plays


def instance_to_play(template_id: int, seed: int) -> Task:
    """Return the instance that plays are made of: a drift task with every drift that it may have, and their repairs."""
    task = instantiate(template_id, seed)
    return with_drifts(task, range(len(task.possible_drifts)))


def plays_of(task: Task) -> list[Play]:
    """Return every play of an ``instance_to_play``, in the order of the classes."""
    everything = [Play("nothing", "looks", (LOOK,)), *equivalent_plays(task), *written_plays(task)]
    return sorted(everything, key=lambda play: KINDS.index(play.kind))
