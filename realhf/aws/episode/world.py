"""Task worlds: sets up a task's account before the agent sees it, and computes the accounts that
reference solutions leave.

A world is either built completely or there is no episode, so nothing is ever graded on a partial
one. The set-up commands of a task obey the same policy as agents. Source:
docs/reference/environment.md 5, 6 and 7.

A *target* is the account that a reference solution leaves. It depends only on the task, its seed
and its drifts, so all sessions of a group share it. It is computed once, on the reference slots of
their pool, while the first turn is played. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from realhf.aws.cli.executor import CommandResult
from realhf.aws.cli.policy import operation_allowed
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.grading.differences import Goal, Target
from realhf.aws.grading.grader import build_freedom, services_of
from realhf.aws.grading.sent_settings import SentWrite
from realhf.aws.grading.snapshot import Snapshot, take_snapshot
from realhf.aws.grading.tracker import is_read, resource_name
from realhf.aws.real_aws.walked_account import AccountReader
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.captures import CaptureError, fill_setup, resolve, setup_captures
from realhf.aws.tasks.task import SetupCommand, Task, TaskError, choose_drifts, repairs

_MESSAGE_CHARS = 200
"""Maximum length of the error text about a set-up command, in characters."""


class SlotState:
    """Reader of a slot's state for checks. API calls go through the environment's own clients, and
    commands through its own CLI worker. Neither has access to the agent's data or counts as an
    action of the agent."""

    def __init__(self, slot: Slot) -> None:
        self.call = slot.state.call
        self._run = slot.own_executor.run

    def run(self, command: str) -> CommandResult:
        """Run a read-only command. Raises ConnectionError if the command was lost or timed out,
        because a missing answer must not count as a failed check."""
        result = self._run(command)
        if result.stopped or result.timed_out:
            raise ConnectionError(
                f"a command of the environment's own got no answer: {result.stderr}"
            )
        return result


class SetupError(RuntimeError):
    """The world of a task could not be built, so there is no episode. The message contains no paths
    and no grading criteria."""

    field = ""
    """Key of the list in the task that contains the failing command, such as "setup_commands"; ""
    if unknown."""
    index: int | None = None
    """Index of the failing command in that list."""


AcceptedRequest = tuple[str, Mapping[str, Any]]
"""(operation as "service:Operation", parameters)."""


@dataclass(frozen=True)
class World:
    """A task that has been set up in a slot."""

    task: Task
    """The task, with values from the set-up's answers filled in (*captures*)."""
    present: frozenset[tuple[str, str]]
    """(service, name) of the resources that the set-up created."""
    answers: tuple[Mapping[str, Any], ...]
    """Answers to the set-up calls. Captures in other commands take their values from them."""
    sent: tuple[tuple[AcceptedRequest, ...], ...] = ()
    """Accepted requests of each set-up command, then of each decoy, then of each drift."""


def build_world(slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None = None) -> World:
    """Empty the slot and set up the task.

    ``seed``: determines the generated ids and which drifts happen. ``drifts``: indices in
    ``possible_drifts`` of the drifts that happen instead. Raises SetupError, or TaskError for an
    invalid task.
    """
    if not slot.simulated:
        _refuse_changes(task)
    slot.reset(seed)
    answers: list[Mapping[str, Any]] = []
    present: set[tuple[str, str]] = set()
    sent: list[tuple[AcceptedRequest, ...]] = []
    try:
        for index, command in enumerate(task.setup):
            with _tag_setup_errors("setup_commands", index):
                answers.append(
                    _send(slot, _fill_captures(command, answers), "set-up", present, sent)
                )
        task = _fill_task_captures(task, answers)
    except CaptureError as error:
        raise SetupError(f"task {task.task_id}: {error}") from None
    _put_assets(slot, task)
    for index, decoy in enumerate(task.decoys):
        with _tag_setup_errors("decoys", index):
            _send(slot, decoy, "decoy", present, sent)
    chosen = (
        choose_drifts(task.possible_drifts, seed)
        if drifts is None
        else [task.possible_drifts[i] for i in drifts]
    )
    for drift in chosen:
        with _tag_setup_errors("possible_drifts", task.possible_drifts.index(drift)):
            _send(slot, drift, "drift", set(), sent)
    if any(drift.repair for drift in chosen):
        task = replace(task, solution=tuple(repairs(chosen)))
    return World(task, frozenset(present), tuple(answers), tuple(sent))


@contextmanager
def _tag_setup_errors(field: str, index: int) -> Iterator[None]:
    try:
        yield
    except SetupError as error:
        error.field = field
        error.index = index
        raise


def _refuse_changes(task: Task) -> None:
    """Raise TaskError if the task would need changes to a real account before the episode."""
    needs = {
        "a set-up": task.setup,
        "decoys": task.decoys,
        "drift": task.possible_drifts,
        "files": task.assets,
    }
    wanted = [name for name, what in needs.items() if what]
    if wanted:
        reason = f"task {task.task_id} needs {' and '.join(wanted)}"
        raise TaskError(f"{reason}; a real account gets none (BACKEND_TYPE=aws)")


def _fill_captures(command: SetupCommand, answers: Sequence[Mapping[str, Any]]) -> SetupCommand:
    return replace(
        command,
        params=fill_setup(command.params, answers),
        command=fill_setup(command.command, answers),
        repair=fill_setup(command.repair, answers),
    )


def _fill_task_captures(task: Task, answers: Sequence[Mapping[str, Any]]) -> Task:
    if not setup_captures(task):
        return task
    return replace(
        task,
        description=fill_setup(task.description, answers),
        desired_state_spec=fill_setup(task.desired_state_spec, answers),
        success=fill_setup(task.success, answers),
        solution=fill_setup(task.solution, answers),
        any_of=fill_setup(task.any_of, answers),
        possible_drifts=tuple(_fill_captures(drift, answers) for drift in task.possible_drifts),
        decoys=tuple(_fill_captures(decoy, answers) for decoy in task.decoys),
        assets=fill_setup(task.assets, answers),
    )


def _put_assets(slot: Slot, task: Task) -> None:
    for name, content in task.assets.items():
        try:
            slot.files.put(name, content.encode())
            # A drift may use the file, when the agent may already have changed its own copy.
            slot.own_files.put(name, content.encode())
        except ValueError as error:
            raise TaskError(f"task.assets: {error}") from None


def _send(
    slot: Slot,
    command: SetupCommand,
    purpose: str,
    made: set[tuple[str, str]],
    sent: list[tuple[AcceptedRequest, ...]],
) -> Mapping[str, Any]:
    """Send a set-up command and return its answer.

    Adds the resource to ``made`` and the accepted requests to ``sent``. Raises SetupError.
    """
    if command.command:
        return _run_line(slot, command, purpose, made, sent)
    if not operation_allowed(command.service, command.operation):
        raise SetupError(f"{purpose} may not call {command}")
    try:
        answer = slot.state.call(command.service, command.operation, dict(command.params))
    except StateCallError as error:
        if command.ignore_failure:
            sent.append(())
            return {}
        raise SetupError(f"{purpose} call {command} failed: {error}"[:_MESSAGE_CHARS]) from None
    except ConnectionError as error:
        raise SetupError(f"{purpose} call {command} failed: {error}") from error
    made.add((command.service, resource_name(command.service, command.params)))
    sent.append(((f"{command.service}:{command.operation}", command.params),))
    return answer


def _run_line(
    slot: Slot,
    command: SetupCommand,
    purpose: str,
    made: set[tuple[str, str]],
    sent: list[tuple[AcceptedRequest, ...]],
) -> Mapping[str, Any]:
    result = slot.own_executor.run(command.command)
    accepted = [one for one in result.requests if one.ok]
    sent.append(tuple((f"{one.service}:{one.operation}", one.params) for one in accepted))
    if not result.success:
        if command.ignore_failure and result.refusal is None:
            return {}
        raise SetupError(f"a {purpose} command failed: {result.stderr.strip()}"[:_MESSAGE_CHARS])
    made.update((one.service, resource_name(one.service, one.params)) for one in accepted)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, Mapping) else {}


WAIT_S = 60.0
"""Seconds without any finished target after which an episode stops waiting for its own."""


class TargetError(RuntimeError):
    """The target could not be computed, so the task cannot be graded. The message is for the author
    of the task."""

    field = "solution"
    """Key of the list in the task that contains the failing command."""
    index: int | None = None
    """Index of the failing command in that list."""


def begin_targets(
    slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None = None
) -> Callable[[], tuple[Goal, ...]]:
    """Start computing the targets of a task instance on the reference slots of the slot's pool. The
    targets are read in the same way as the slot's account.

    Returns a function that waits for the goals and returns them, or raises TargetError. Raises
    TaskError like ``build_freedom``.
    """
    references = slot.reference_slots
    assert references is not None, "a reference slot computes targets and has none of its own"
    key = json.dumps([task.to_json(), seed, drifts], sort_keys=True, default=list)
    freedom = build_freedom(task)

    def play(own: Slot) -> tuple[Goal, ...]:
        targets = make_targets(own, task, seed, drifts, account_reader(slot, task, own))
        return tuple(Goal(target, freedom) for target in targets)

    future: Future[tuple[Goal, ...]] = references.begin(key, play)

    def wait() -> tuple[Goal, ...]:
        try:
            return references.result(future, WAIT_S)
        except TargetError:
            raise
        except Exception as error:  # the agent did not cause it, whatever it is
            if not future.done():
                raise TargetError(
                    f"the target of task {task.task_id} was not ready after {WAIT_S:g} s"
                ) from error
            raise TargetError(f"task {task.task_id}: {type(error).__name__}: {error}") from error

    return wait


def account_reader(graded: Slot, task: Task, slot: Slot) -> Callable[[], Snapshot]:
    """Return a function that reads the account of ``slot``, for an episode that is graded on the
    slot ``graded``.

    If ``graded`` is on a real account, only permitted reads are sent, and only to the services that
    the task's solutions use or that an agent may write to.
    """
    reads = graded.reads
    if reads is None:
        return partial(take_snapshot, slot)
    commands = [*task.solution, *(line for lines in task.any_of for line in lines)]
    services = services_of(commands) | reads.services
    return AccountReader(slot.state.call, reads.permits, services, slot.account, commands).read


def make_targets(
    slot: Slot,
    task: Task,
    seed: int,
    drifts: Sequence[int] | None = None,
    read: Callable[[], Snapshot] | None = None,
) -> tuple[Target, ...]:
    """Play each solution of a task on ``slot``, in a new world each, and return the resulting
    targets.

    ``read``: reads the account; default ``take_snapshot``. Raises TargetError with the failing
    command, SetupError, TaskError, SnapshotError or SimulatorLost.
    """
    others = [replace(task, solution=commands) for commands in task.any_of]
    targets = [
        _play_solution(slot, one, seed, drifts, read or partial(take_snapshot, slot))
        for one in [task, *others]
    ]
    return tuple(
        replace(one, others=tuple(two.end for two in targets if two is not one)) for one in targets
    )


def _play_solution(
    slot: Slot, task: Task, seed: int, drifts: Sequence[int] | None, read: Callable[[], Snapshot]
) -> Target:
    world = build_world(slot, task, seed, drifts)
    start = read()
    states = []
    outputs = []
    sent = []
    try:
        commands = fill_setup(list(world.task.solution), world.answers)
    except CaptureError as error:
        raise TargetError(f"task {task.task_id}: its solution: {error}") from error
    for number, command in enumerate(commands, 1):
        result = slot.own_executor.run(resolve(command, outputs))
        if not result.success:
            error = TargetError(
                f"task {task.task_id}: command {number} of its solution fails: "
                f"{result.stderr.strip()}"
            )
            error.index = number - 1
            raise error
        outputs.append(result.stdout)
        requests = [(f"{one.service}:{one.operation}", one.params) for one in result.requests]
        sent.append([one for one in requests if not is_read(*one)])
        states.append(read())
    operations, arguments = (
        tuple(tuple(one[part] for one in requests) for requests in sent) for part in (0, 1)
    )
    setup = tuple(SentWrite(*request) for requests in world.sent for request in requests)
    return Target(start, tuple(states), operations, arguments, setup=setup)
