"""Collects all plays of a task, generated and written, and why a class has none."""

from __future__ import annotations

from realhf.aws.grading.end_state import is_graded_by_end_state
from realhf.aws.tasks.loader import instantiate, with_drifts
from realhf.aws.tasks.task import Task
from realhf.aws.validation.plays.equivalent import equivalent_plays
from realhf.aws.validation.plays.harmful import harmful_plays
from realhf.aws.validation.plays.overdone import overdone_plays
from realhf.aws.validation.plays.play import KINDS, Kind, Play
from realhf.aws.validation.plays.unrelated import nothing_plays, unrelated_plays
from realhf.aws.validation.plays.written import reasons_against, written_plays


def instance_to_play(template_id: int, seed: int) -> Task:
    """Return the instance that plays are made of: a drift task with every drift that it may have, and their repairs."""
    task = instantiate(template_id, seed)
    return with_drifts(task, range(len(task.possible_drifts)))


def plays_of(task: Task) -> list[Play]:
    """Return every play of an ``instance_to_play``, in the order of the classes."""
    generated = [
        *nothing_plays(task),
        *unrelated_plays(task),
        *harmful_plays(task),
        *overdone_plays(task),
        *equivalent_plays(task),
    ]
    everything = generated + written_plays(task)
    return sorted(everything, key=lambda play: KINDS.index(play.kind))


def reason_without(task: Task, kind: Kind) -> str:
    """Return why no play of this class exists for the task; "" where no reason is written."""
    written = reasons_against(task).get(kind)
    if written:
        return written
    if is_graded_by_end_state(task):
        return "mutants of its solution are played"
    if kind == "harmful" and not task.setup and not task.decoys:
        return "the account is empty at first: there is nothing to protect"
    if kind == "overdone" and task.tier == "warmup":
        return "one request that only looks: it grants and changes nothing"
    if kind == "overdone" and task.tier == "beginner":
        return "one command without a right, a range or a drawn value, and the episode ends with it"
    return ""
