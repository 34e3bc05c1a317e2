"""Makes the targets of a task: the accounts that its solutions leave behind, played where no agent looks.

A target depends on the task, its seed and its drifts alone, so the sessions of a group share it: it is made once, on
the bench of their pool, beside the first turn. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from realhf.aws.episode.world import build_world
from realhf.aws.grading.differences import Goal, Target
from realhf.aws.grading.end_state import freedom_of, services_of
from realhf.aws.grading.snapshot import Snapshot, take_snapshot
from realhf.aws.grading.tracker import is_read
from realhf.aws.grading.walked_account import WalkedAccount
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.captures import CaptureError, fill_setup, resolve
from realhf.aws.tasks.task import Task

WAIT_S = 60.0
"""Seconds that an episode waits for its target while no other target is finished either."""


class TargetError(RuntimeError):
    """There is no target, so nothing can be graded. The text is for the author of the task; ``field`` and ``place`` say
    at which command of it."""

    field = "solution"
    place: int | None = None


def begin_targets(
    slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None = None
) -> Callable[[], tuple[Goal, ...]]:
    """Begin to make the targets of an instance on the bench of the slot's pool, which are read as the slot's account
    is; returns how to wait for what they ask, which raises TargetError. Raises TaskError as ``freedom_of``."""
    assert slot.bench is not None, "the bench has none"
    key = json.dumps([task.to_json(), seed, drifts], sort_keys=True, default=list)
    bench, freedom = slot.bench, freedom_of(task)

    def play(own: Slot) -> tuple[Goal, ...]:
        targets = make_targets(own, task, seed, drifts, account_reader(slot, task, own))
        return tuple(Goal(target, freedom) for target in targets)

    found: Future[tuple[Goal, ...]] = bench.begin(key, play)

    def wait() -> tuple[Goal, ...]:
        try:
            return bench.result(found, WAIT_S)
        except TargetError:
            raise
        except Exception as error:  # whatever it is, it is not the agent's doing
            if not found.done():
                raise TargetError(f"the target of task {task.task_id} was not ready after {WAIT_S:g} s") from error
            raise TargetError(f"task {task.task_id}: {type(error).__name__}: {error}") from error

    return wait


def account_reader(graded: Slot, task: Task, slot: Slot) -> Callable[[], Snapshot]:
    """Return how the account of ``slot`` is read where an episode on ``graded`` is judged: on a real account by its
    permitted reads of all that can be written there."""
    reads = graded.reads
    if reads is None:
        return partial(take_snapshot, slot)
    commands = [*task.solution, *(line for lines in task.any_of for line in lines)]
    services = services_of(commands) | reads.services
    return WalkedAccount(slot.state.call, reads.permits, services, slot.account, commands).read


def make_targets(
    slot: Slot,
    task: Task,
    seed: int,
    drifts: Sequence[int] | None = None,
    read: Callable[[], Snapshot] | None = None,
) -> tuple[Target, ...]:
    """Play each solution of a task on ``slot``, in a world of its own, and return the accounts that they leave. Raises
    TargetError naming the command that fails, SetupError, TaskError, SnapshotError or SimulatorLost."""
    others = [replace(task, solution=commands) for commands in task.any_of]
    targets = [_play(slot, one, seed, drifts, read or partial(take_snapshot, slot)) for one in [task, *others]]
    return tuple(replace(one, others=tuple(two.end for two in targets if two is not one)) for one in targets)


def _play(slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None, read: Callable[[], Snapshot]) -> Target:
    world = build_world(slot, task, seed, drifts)
    start, states, outputs, sent = read(), [], [], []
    try:
        commands = fill_setup(list(world.task.solution), world.answers)
    except CaptureError as error:
        raise TargetError(f"task {task.task_id}: its solution: {error}") from error
    for number, command in enumerate(commands, 1):
        result = slot.own_executor.run(resolve(command, outputs))
        if not result.success:
            error = TargetError(f"task {task.task_id}: command {number} of its solution fails: {result.stderr.strip()}")
            error.place = number - 1
            raise error
        outputs.append(result.stdout)
        requests = [(f"{one.service}:{one.operation}", one.params) for one in result.requests]
        sent.append([one for one in requests if not is_read(one[0])])
        states.append(read())
    operations, arguments = (tuple(tuple(one[part] for one in deeds) for deeds in sent) for part in (0, 1))
    return Target(start, tuple(states), operations, arguments)
