"""The world of a task: emptied, set up, and for a drift task disturbed, before the agent sees it.

A world is built completely or not at all: nothing is ever graded on a half-built one (environment spec 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.env.captures import CaptureError, fill_setup, has_setup_captures
from realhf.env.drift import choose_drifts
from realhf.env.pool import Slot
from realhf.env.state_client import StateCallError
from realhf.env.task import SetupCommand, Task, TaskError
from realhf.env.tracker import resource_name
from realhf.env.verifier import operation_allowed


class SetupError(RuntimeError):
    """The world of the task could not be built, so there is no episode. Free of paths and criteria."""


@dataclass(frozen=True)
class World:
    """``task`` with the captures of its set-up filled; ``present``: (service, name) of what the set-up made;
    ``answers``: what its calls were answered, for captures in other texts."""

    task: Task
    present: frozenset[tuple[str, str]]
    answers: tuple[Mapping[str, Any], ...]


def build_world(slot: Slot, task: Task, seed: int) -> World:
    """Empty the slot and set the task up; ``seed`` decides random ids and drifts. Raises SetupError, or TaskError
    for a task that makes no sense."""
    slot.reset(seed)
    for name, content in task.assets.items():
        try:
            slot.files.put(name, content.encode())
        except ValueError as error:
            raise TaskError(f"task.assets: {error}") from None
    answers: list[Mapping[str, Any]] = []
    present = set()
    for command in task.setup + task.decoys:
        command = _filled(command, answers)
        answers.append(_send(slot, command, "set-up"))
        present.add((command.service, resource_name(command.service, command.params)))
    try:
        task = _with_captures(task, answers)
    except CaptureError as error:
        raise SetupError(f"task {task.task_id}: {error}") from None
    for drift in choose_drifts(task.possible_drifts, seed):
        _send(slot, drift, "drift")
    return World(task, frozenset(present), tuple(answers))


def _filled(command: SetupCommand, answers: list[Mapping[str, Any]]) -> SetupCommand:
    try:
        return replace(command, params=fill_setup(command.params, answers))
    except CaptureError as error:
        raise SetupError(f"set-up of {command.service}:{command.operation}: {error}") from None


def _with_captures(task: Task, answers: list[Mapping[str, Any]]) -> Task:
    if not has_setup_captures((task.description, task.success, task.solution, task.possible_drifts)):
        return task
    return replace(
        task,
        description=fill_setup(task.description, answers),
        desired_state_spec=fill_setup(task.desired_state_spec, answers),
        success=fill_setup(task.success, answers),
        solution=fill_setup(task.solution, answers),
        possible_drifts=tuple(replace(d, params=fill_setup(d.params, answers)) for d in task.possible_drifts),
    )


def _send(slot: Slot, command: SetupCommand, purpose: str) -> Mapping[str, Any]:
    name = f"{command.service}:{command.operation}"
    if not operation_allowed(command.service, command.operation):
        raise SetupError(f"{purpose} may not call {name}")
    try:
        return slot.state.call(command.service, command.operation, dict(command.params))
    except StateCallError as error:
        if command.ignore_failure:
            return {}
        raise SetupError(f"{purpose} call {name} failed: {error}") from None
    except ConnectionError as error:
        raise SetupError(f"{purpose} call {name} failed: {error}") from error
