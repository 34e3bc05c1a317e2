"""Makes the targets of a task: the accounts that its solutions leave behind, played where no agent looks.

A target depends on the task, its seed and its drifts alone, so the sessions of a group share it: it is made once, on
the bench of their pool, beside the first turn. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from realhf.aws.episode.world import build_world
from realhf.aws.grading.differences import Target
from realhf.aws.grading.snapshot import take_snapshot
from realhf.aws.grading.tracker import is_read
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.captures import CaptureError, fill_setup, resolve
from realhf.aws.tasks.task import Task, TaskError

WAIT_S = 60.0
"""Seconds that an episode waits for its target."""


class TargetError(RuntimeError):
    """There is no target, so nothing can be graded. The text is for the author of the task."""


def begin_targets(
    slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None = None
) -> Callable[[], tuple[Target, ...]]:
    """Begin to make the targets of an instance on the bench of the slot's pool; returns how to wait for them, which
    raises TargetError. Raises TaskError for an account that is not simulated."""
    if slot.bench is None:
        raise TaskError(
            "this task is graded by its end state, which needs a simulated account (BACKEND_TYPE=ministack)"
        )
    key = json.dumps([task.to_json(), seed, drifts], sort_keys=True, default=list)
    found: Future[tuple[Target, ...]] = slot.bench.begin(key, lambda bench: make_targets(bench, task, seed, drifts))

    def wait() -> tuple[Target, ...]:
        try:
            return found.result(WAIT_S)
        except TargetError:
            raise
        except Exception as error:  # whatever it is, it is not the agent's doing
            if not found.done():
                raise TargetError(f"the target of task {task.task_id} was not ready after {WAIT_S:g} s") from error
            raise TargetError(f"task {task.task_id}: {type(error).__name__}: {error}") from error

    return wait


def make_targets(slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None = None) -> tuple[Target, ...]:
    """Play each solution of a task on ``slot``, in a world of its own, and return the accounts that they leave. Raises
    TargetError naming the command that fails, SetupError, TaskError, SnapshotError or SimulatorLost."""
    others = [replace(task, solution=commands) for commands in task.any_of]
    return tuple(_play(slot, one, seed, drifts) for one in [task, *others])


def _play(slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None) -> Target:
    world = build_world(slot, task, seed, drifts)
    start, states, outputs, operations = take_snapshot(slot), [], [], []
    try:
        commands = fill_setup(list(world.task.solution), world.answers)
    except CaptureError as error:
        raise TargetError(f"task {task.task_id}: its solution: {error}") from error
    for number, command in enumerate(commands, 1):
        result = slot.own_executor.run(resolve(command, outputs))
        if not result.success:
            raise TargetError(f"task {task.task_id}: command {number} of its solution fails: {result.stderr.strip()}")
        outputs.append(result.stdout)
        sent = [f"{one.service}:{one.operation}" for one in result.requests]
        operations.append(tuple(one for one in sent if not is_read(one)))
        states.append(take_snapshot(slot))
    return Target(start, tuple(states), tuple(operations))
