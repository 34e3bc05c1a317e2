"""Episode of one task: sets the task up in a slot, then runs and grades commands one by one until
the task is achieved or no steps are left.

Hints: level 1 lists the services, level 2 the operations in order, level 3 the commands with
``...`` in place of every value. Names, checks and set-up are never revealed.

If the simulator is lost while it executes an agent's command, or stops answering after one, the
agent caused it. The episode ends and keeps its score, so that breaking the account does not buy a
second try. If the simulator is lost between commands, the environment failed and the episode does
not count. If the simulator works but the account cannot be read, the task counts as not achieved
for now, the kind of error is shown in the observation, and the episode continues.

Source: docs/reference/environment.md 2.1 (observation), 6 (set-up) and 7 (hints, end of an
episode).
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from botocore import xform_name

from realhf.aws.cli.executor import CommandResult, SimulatorLost
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.episode.account_changes import AccountChanges
from realhf.aws.episode.chaos import PROBABILITY, Chaos, chaos_rng
from realhf.aws.episode.world import (
    SetupError,
    SlotState,
    TargetError,
    World,
    account_reader,
    begin_targets,
    build_world,
)
from realhf.aws.grading.criteria import Criteria, parse_criteria
from realhf.aws.grading.grader import EndStateGrader, Grader, is_graded_by_end_state
from realhf.aws.grading.inventory import Inventory
from realhf.aws.grading.reward import RewardMeter
from realhf.aws.grading.snapshot import SnapshotError
from realhf.aws.grading.tracker import Tracker
from realhf.aws.messages import HINT_COMMAND
from realhf.aws.real_aws.walked_account import RealAccountGrader
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.captures import fill_setup
from realhf.aws.tasks.task import Task, TaskError

LEVELS = 3
"""Number of hint levels."""


def is_hint_request(command: str) -> bool:
    """Return whether a command asks for a hint. Any other spelling is an ordinary command."""
    return command.strip() == HINT_COMMAND


def hint_text(level: int, criteria: Criteria, solution: Sequence[str]) -> str:
    """Return the hint of a level from 1 to 3; higher levels repeat the last one.

    Operations and their order are those of the reference solution, or of the criteria if the task
    has no solution.
    """
    skeletons = list(filter(None, map(_skeleton, solution))) or _skeletons_from_criteria(criteria)
    operations = [" ".join(skeleton.split()[1:3]) for skeleton in skeletons]
    if level <= 1:
        services = dict.fromkeys(operation.split()[0] for operation in operations)
        return f"services: {', '.join(services)}"
    if level == 2:
        return f"operations in order: {', '.join(operations)}"
    return "commands: " + "; ".join(skeletons)


def _skeleton(command: str) -> str:
    """Return a command without its values, or "" if the text is not a command."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    if len(words) < 3:
        return ""
    shown = words[:3]
    for word in words[3:]:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            shown.append(name + ("=..." if equals else ""))
        elif shown[-1] != "...":
            shown.append("...")
    return " ".join(shown)


def _skeletons_from_criteria(criteria: Criteria) -> list[str]:
    named = [step.operation for step in criteria.steps] or [criteria.operation]
    skeletons = []
    for operation in filter(None, named):
        service, _, name = operation.partition(":")
        skeletons.append(
            f"aws {'s3api' if service == 's3' else service} {xform_name(name, '-')} ..."
        )
    if skeletons:
        return skeletons
    services = dict.fromkeys(check.service for check in criteria.checks)
    return [f"aws {'s3api' if service == 's3' else service} help" for service in services]


class Blame(Enum):
    """Who caused a fault."""

    AGENT = "agent"
    """The agent broke the simulator."""
    ENVIRONMENT = "environment"
    """The environment failed; the episode does not count."""
    UNREADABLE = "unreadable"
    """The simulator works, but the account cannot be read."""


class SimulatorWatch:
    """Attribution of faults to agent or environment, for one command or for the reads that grade
    it.

    Create it before they start, because it records how much CPU time the simulator has used until
    then.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._worked_s = slot.ministack.cpu_time_s() if slot.simulated else 0.0

    def blame(self, error: Exception, *, begun: bool = True) -> Blame:
        """Return who caused an error.

        ``begun``: whether the command had started before the error. Blocks until it is clear
        whether a simulator that does not answer is lost.
        """
        lost = isinstance(error, SimulatorLost | ConnectionError)
        if not begun:
            return Blame.ENVIRONMENT
        if not self._slot.simulated:
            if isinstance(error, SnapshotError):
                return Blame.UNREADABLE
            return (
                Blame.ENVIRONMENT if lost or isinstance(error, StateCallError) else Blame.UNREADABLE
            )
        simulator = self._slot.ministack
        idle = 0 <= simulator.cpu_time_s() == self._worked_s
        if simulator.is_stopped():
            return Blame.ENVIRONMENT
        if (
            not isinstance(error, SimulatorLost)
            and simulator.alive()
            and (not lost or simulator.healthy())
        ):
            return Blame.UNREADABLE
        # A simulator that used no CPU time was suspended from outside: an agent's command cannot
        # suspend it.
        return Blame.ENVIRONMENT if idle else Blame.AGENT


def unreadable_kind(error: Exception) -> str:
    """Return why an account could not be read.

    One of "answer" (the answer is too large or cannot be decoded), "service" (an error answer),
    "silence" (this call gets no answer, but others do) and "grader" (the grader failed).
    """
    if isinstance(error, UnreadableAnswer | SnapshotError):
        return "answer"
    if isinstance(error, StateCallError):
        return "service"
    return "silence" if isinstance(error, ConnectionError) else "grader"


DEFAULT_MAX_STEPS = 15
"""Default maximum number of commands in an episode."""
NOT_RUNNING = "no episode is running; call reset first"
FINISHED = "episode finished; call reset"
_LOG = logging.getLogger(__name__)
LOST = "the account does not answer any more after this command; the episode is over"
"""Error text in the observation after a command that broke the simulator."""


class EpisodeError(RuntimeError):
    """The environment failed, so the agent must not be scored. The message contains no paths and no
    criteria."""


@dataclass(frozen=True)
class StepData:
    """Result of ``Episode.reset`` and ``Episode.step``."""

    observation: dict[str, Any]
    """The observation, as described in docs/reference/environment.md 2.1."""
    reward: float
    """The step's reward; 0.0 after a reset."""
    done: bool
    """Whether the episode is over."""


class Episode:
    """Player of tasks in one slot, one episode after another. Not thread-safe.

    ``max_steps``: maximum number of commands in an episode. ``reward_mode``: see ``RewardMeter``.
    ``chaos``: whether disturbances are allowed if ``reset`` does not say.
    """

    def __init__(
        self,
        slot: Slot,
        max_steps: int = DEFAULT_MAX_STEPS,
        *,
        reward_mode: str = "potential",
        chaos: bool = False,
    ) -> None:
        self._slot = slot
        self._max_steps = max_steps
        self._reward_mode = reward_mode
        self._chaos_by_default = chaos
        self._clear()

    def _clear(self) -> None:
        self._task: Task | None = None
        self._world: World | None = None
        self._tracker = Tracker()
        self._meter = RewardMeter(self._reward_mode)
        self._grader: Grader | EndStateGrader | None = None
        self._chaos: Chaos | None = None
        self._inventory = Inventory(self._slot.state)
        self._changes = AccountChanges()
        self._steps = self._hints = 0
        self._achieved = self._simulator_lost = self._must_reread = False
        self._unreadable = self._episode_id = ""

    @property
    def slot(self) -> Slot:
        """The slot in which the episodes are played."""
        return self._slot

    @property
    def done(self) -> bool:
        """Whether the episode is over: the task is achieved, a command broke the simulator, or no
        steps are left."""
        return self._achieved or self._simulator_lost or self._steps >= self._max_steps

    def reset(
        self,
        task: Task,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        chaos: bool | None = None,
        drifts: Sequence[int] | None = None,
    ) -> StepData:
        """Empty the account, set up the task and return the first observation.

        ``seed`` (default: the task's) determines the simulator's generated ids, the drifts and the
        chaos. ``chaos``: whether disturbances are allowed (None: as given to the constructor).
        ``drifts``: indices of the drifts that happen, which are then not drawn. Raises TaskError
        for an invalid task, and EpisodeError if its world cannot be built.
        """
        self._clear()
        by_end_state = is_graded_by_end_state(task)
        if not by_end_state:
            parse_criteria(task.success)
        if chaos and not self._slot.simulated:
            raise TaskError("chaos=true; a real account (BACKEND_TYPE=aws) is not disturbed")
        seed = task.seed if seed is None else seed
        goals = begin_targets(self._slot, task, seed, drifts) if by_end_state else None
        try:
            world = build_world(self._slot, task, seed, drifts)
        except SetupError as error:
            raise EpisodeError(str(error)) from error
        state = SlotState(self._slot)
        if goals is not None:
            grader = EndStateGrader if self._slot.simulated else RealAccountGrader
            self._grader = grader(world.task, goals, account_reader(self._slot, task, self._slot))
            self._meter = RewardMeter(self._reward_mode, falls=True)
        else:
            self._grader = Grader(parse_criteria(world.task.success), state)
        criteria = self._grader.criteria
        self._tracker = Tracker(world.present, criteria.operations)
        try:
            self._grader.start()
        except StateCallError as error:
            raise TaskError(f"a state check of the task cannot be made: {error.code}") from error
        except TargetError as error:
            raise EpisodeError(str(error)) from error
        except ConnectionError as error:
            raise EpisodeError(f"the account cannot be read: {type(error).__name__}") from error
        if self._slot.simulated and (self._chaos_by_default if chaos is None else chaos):
            self._chaos = Chaos(
                PROBABILITY[task.tier], chaos_rng(task.task_id, seed), self._grader, state
            )
        self._changes = AccountChanges(world.present)
        self._inventory = Inventory(
            self._slot.state, criteria.named_services | {made for made, _ in world.present}
        )
        self._task = world.task
        self._world = world
        self._episode_id = episode_id or uuid.uuid4().hex
        return StepData(self._observation(None, ""), 0.0, False)

    def step(self, command: str) -> StepData:
        """Run one command and grade it. After the end of the episode nothing is executed.

        A command that breaks the simulator ends the episode, and the score stays. After a command
        that leaves an unreadable account, the score stays as well and the task counts as not
        achieved. ``SimulatorWatch.blame`` decides which of the two it is. Raises EpisodeError
        before the first reset and if a real account cannot be read, and SimulatorLost if the
        simulator was lost before the command.
        """
        if self._task is None or self._grader is None:
            raise EpisodeError(NOT_RUNNING)
        if self.done:
            return StepData(self._observation(None, FINISHED), 0.0, True)
        self._steps += 1
        if is_hint_request(command):
            return self._hint()
        watch = SimulatorWatch(self._slot)
        try:
            result = self._slot.executor.run(command)
        except SimulatorLost as error:
            if watch.blame(error, begun=error.by_command) is Blame.ENVIRONMENT:
                raise
            return self._end_lost()
        rollbacks = self._tracker.rollbacks
        evidence = self._tracker.record(command, result)
        self._changes.record(evidence)
        for request in evidence:
            self._inventory.touch(request.service, changed=not request.reads)
        if result.lost:
            self._inventory.forget()
        before = self._meter.progress
        reward = None
        watch = SimulatorWatch(self._slot)
        try:
            grade = self._grader.evaluate(evidence, lost=result.lost or self._must_reread)
            self._must_reread = False
            self._achieved = grade.achieved
            if not self._grader.charges_rollback:
                self._tracker.rollbacks = rollbacks  # undoing uncredited work costs nothing
            if grade.progress > before:
                self._tracker.record_progress()
            reward = self._reward(grade.progress)
            may_disturb = (
                self._chaos is not None and self._meter.progress > before and not self.done
            )
            if (
                self._chaos
                and may_disturb
                and (disturbed := self._chaos.after_progress(self._tracker))
            ):
                self._grader.ignore_new_harms()
                self._inventory.touch(disturbed, changed=True)
        except (TargetError, TaskError) as error:
            raise EpisodeError(str(error)) from error
        except Exception as error:
            blame = watch.blame(error)
            if blame is Blame.ENVIRONMENT:
                raise EpisodeError(f"the account cannot be read: {type(error).__name__}") from error
            if blame is Blame.AGENT:
                return self._end_lost()
            self._record_unreadable(error)
            reward = self._reward(before) if reward is None else reward
        return StepData(self._observation(result, ""), reward, self.done)

    def _record_unreadable(self, error: Exception) -> None:
        """Record that the account's state is unknown. It is read again after the next command,
        whatever that is."""
        self._must_reread = True
        self._achieved = False
        self._unreadable = unreadable_kind(error)
        fault = error if self._unreadable == "grader" else None
        _LOG.warning(
            "an account cannot be graded (%s): %s",
            self._unreadable,
            type(error).__name__,
            exc_info=fault,
        )

    def _end_lost(self) -> StepData:
        self._simulator_lost = True
        self._achieved = False
        return StepData(self._observation(None, LOST), self._meter.standstill(), True)

    @property
    def setup_answers(self) -> tuple[Mapping[str, Any], ...]:
        """Answers to the set-up calls, from which the captures in a solution are filled; () before
        a reset."""
        return self._world.answers if self._world else ()

    def fill(self, commands: Sequence[str]) -> list[str]:
        """Return commands of this task with the values that its set-up captured. Raises
        EpisodeError before a reset, and CaptureError for a capture without a value."""
        if self._world is None:
            raise EpisodeError(NOT_RUNNING)
        return fill_setup(list(commands), self._world.answers)

    def missing(self) -> list[str]:
        """Describe what still prevents success. For the task's author; it is never shown to an
        agent."""
        return self._grader.missing() if self._grader else []

    def _hint(self) -> StepData:
        assert self._task is not None and self._grader is not None
        self._hints = min(self._hints + 1, LEVELS)
        text = hint_text(self._hints, self._grader.criteria, self._task.solution)
        reward = self._reward(self._meter.progress)
        return StepData(self._observation(None, "", text), reward, self.done)

    def _reward(self, progress: float) -> float:
        return self._meter.step(
            progress,
            achieved=self._achieved,
            last_failed=self._tracker.last_failed,
            rollbacks=self._tracker.rollbacks,
            idempotent_retries=self._tracker.idempotent_retries,
            hints=self._hints,
            chaos_survived=self._achieved and self._chaos is not None and self._chaos.survived(),
            harmed=self._grader is not None and self._grader.grade.harmed,
            needless_writes=self._grader.needless_writes if self._grader else 0,
        )

    def state(self) -> dict[str, Any]:
        """Return the session's state in the format of docs/reference/environment.md 2.1.

        It includes the inventory of the services that the task names or that requests were sent to.
        Whether chaos occurred is shown only after the end of the episode.
        """
        return {
            "episode_id": self._episode_id or None,
            "step_count": self._steps,
            "current_task": masked_task(self._task),
            "tracker": {
                "step_count": self._steps,
                "hints_used": self._hints,
                "progress": self._meter.progress,
                "commands_executed": list(self._tracker.commands),
                "credited_operations": self._grader.credited_operations if self._grader else [],
            },
            "infra_state": self.inventory(),
            "chaos_occurred": self.done and self._chaos is not None and self._chaos.occurred,
            "current_tier": self._task.tier if self._task else None,
        }

    def inventory(self) -> dict[str, dict[str, list[str]]]:
        """Return the names of the account's resources as {service: {type: names}}, or {} if the
        simulator does not answer."""
        if self._simulator_lost:
            return {}
        try:
            return self._inventory.read()
        except ConnectionError:
            return {}

    def _observation(
        self, result: CommandResult | None, error: str, hint: str = ""
    ) -> dict[str, Any]:
        failed = result is not None and not result.success
        observation = {
            "episode_id": self._episode_id,
            "step_count": self._steps,
            "command_success": not failed and not error,
            "command_output": result.stdout if result else "",
            "error": error or (result.stderr if result and failed else ""),
            "task": masked_task(self._task),
            "task_achieved": self._achieved,
            "partial_progress": self._meter.progress,
            "hints_used": self._hints,
            "hint_text": hint,
            "truncated": self.done and not self._achieved,
            "refusal": result.refusal if result else None,
            "steps_left": 0 if self._simulator_lost else max(0, self._max_steps - self._steps),
        }
        changes = self._changes.describe(self._tracker.disturbances if self.done else ())
        optional = {
            "account_changes": changes,
            "account_key": self._account_key(),
            "simulator_lost": self._simulator_lost,
            "account_unreadable": self._unreadable,
        }
        return observation | {name: value for name, value in optional.items() if value}

    def _account_key(self) -> str:
        """Return a digest of the account, or "" if the whole account is not known.

        It is not known on a real account, for a task that is not graded by its end state, and after
        a command that left the account unreadable.
        """
        hidden = self._simulator_lost or self._must_reread or not self._slot.simulated
        return (
            "" if hidden or not isinstance(self._grader, EndStateGrader) else self._grader.state_key
        )


def masked_task(task: Task | None) -> dict[str, Any] | None:
    """Return everything that an agent may know about its task (layer 3 of the ``grader`` module
    docstring, grader invisibility)."""
    if task is None:
        return None
    shown = {"task_id": task.task_id, "difficulty": task.tier, "description": task.description}
    return shown | (
        {"desired_state_spec": task.desired_state_spec} if task.desired_state_spec else {}
    )
