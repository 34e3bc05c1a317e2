"""Grading of an episode: by requests and verified state, or by comparing the end state with the
solution's.

``Grader`` is for warm-up tasks and tasks of other makers, whose success criteria state the requests
or the state that count; ``EndStateGrader`` is for all other tasks. The field that is set decides
how ``Grader`` works: ``state_checks``, ``steps`` (multi_step), ``resource_exists``
(resource_creation), else ``operation`` (command_match).

The eight layers against reward hacking, each a function: 1 ground truth ``verified``, 2 dedup
``unspent_request``, 3 grader invisibility ``episode.masked_task``, 4 allow-list
``policy.check_command``, 5 no verification reward ``earns_credit``, 6 monotone progress
``reward.monotone_progress``, 7 exact names ``tracker.same_resource``, 8 final state ``_judge``.

End-state grading ignores which operations an agent used. Progress measures the present state: it
falls when a part of the work is undone. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.grading.criteria import Check, Criteria, CriteriaStep, StateReader
from realhf.aws.grading.differences import AccountVerdict, EpisodeComparison, Freedom, Goal, Target
from realhf.aws.grading.leftovers import is_under_way
from realhf.aws.grading.sent_settings import SentWrite, build_writes
from realhf.aws.grading.snapshot import Snapshot, state_digest
from realhf.aws.grading.tracker import Evidence, is_read, same_resource
from realhf.aws.tasks.task import Task, TaskError
from realhf.base import process_clock

_UNDER_WAY_S = 0.5
"""Seconds to wait for an execution that the agent has started to end by itself, before it counts as
left behind."""
_POLL_S = 0.05
"""Seconds between two looks at the account during that wait."""

INCOMPLETE_CREATION = 0.5
"""Progress if the required create was accepted but the resource does not exist."""
STEP_SHARE = 0.7
"""Weight of the steps in a task with both steps and state checks."""


@dataclass(frozen=True)
class Grade:
    """The result of grading, at the time of the last evaluation."""

    progress: float
    """Progress in [0, 1]."""
    achieved: bool
    """Whether the task is achieved."""
    harmed: bool = False
    """Whether a protected resource of the set-up is harmed."""


class Grader:
    """Grades one episode by its success criteria.

    Call ``evaluate`` after every command. The state is read only if a request could have changed
    something; otherwise the last grade stays valid.
    """

    needless_writes = 0
    """Not counted by this grader."""
    lost_ground = True
    """Whether a rollback is charged: always, because operations are credited."""

    def __init__(self, criteria: Criteria, state: StateReader) -> None:
        self.criteria = criteria
        self._state = state
        self._evidence: list[Evidence] = []
        self._credited: list[int] = []
        """Index of the request that was credited for each step, as far as the steps are done."""
        self._baseline = 0
        """Number of state checks that pass before the first command."""
        self.grade = Grade(0.0, False)

    def start(self) -> None:
        """Read the state right after set-up. Raises TaskError for a task that is already solved or
        unsolvable."""
        checks = self.criteria.state_checks
        for check in checks:
            if check.asks_for_drawn_id():
                answer = self._state.run(check.command)
                if not answer.success and not answer.timed_out:
                    raise TaskError(
                        "a state check asks for an id that AWS draws and that the set-up has not "
                        "made"
                    )
        self._baseline = self._count_passing_checks()
        if checks and self._baseline == len(checks):
            raise TaskError("every state check of the task holds before the first command")

    @property
    def credited_operations(self) -> list[str]:
        """The operations that have been credited, in the order of the criteria."""
        if self.criteria.steps:
            return [step.operation for step in self.criteria.steps[: len(self._credited)]]
        return [self.criteria.operation] if self.criteria.operation and self.grade.progress else []

    def missing(self) -> list[str]:
        """Describe what keeps the task from being achieved: steps without credit, failing checks,
        services."""
        criteria = self.criteria
        gaps = [
            f"step {step.operation} {step.resource or ''}"
            for step in criteria.steps[len(self._credited) :]
        ]
        gaps += [str(check) for check in criteria.checks if not verified(check, self._state)]
        return gaps + [
            f"service {s}"
            for s in sorted(criteria.services)
            if not services_reached([s], self._evidence)
        ]

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``.

        ``lost``: the requests of the command are unknown, so the state is read in any case. Raises
        StateCallError or ConnectionError if the simulator cannot be read.
        """
        self._evidence.extend(added)
        worthy = [request for request in added if earns_credit(request, self.criteria)]
        if (worthy or lost) and not self.grade.achieved:
            self.grade = self._judge(worthy)
        return self.grade

    def holding(self) -> frozenset[str]:
        """Return the positions of the checks that pass now, as text. Raises ConnectionError."""
        return frozenset(
            str(place) for place, check in enumerate(self.criteria.checks) if self._holds(check)
        )

    def _holds(self, check: Check) -> bool:
        """Return whether a check passes; a check that cannot be read fails."""
        try:
            return verified(check, self._state)
        except StateCallError:
            return False

    def excuse(self) -> None:
        """Do nothing: tasks with criteria protect no resources."""

    def _judge(self, worthy: Sequence[Evidence]) -> Grade:
        """Return the grade of the present state, whatever was undone in between (layer 8)."""
        criteria = self.criteria
        if not criteria.state_checks and not criteria.steps:
            return self._judge_creation() if criteria.resource else self._judge_request(worthy)
        self._credit_steps()
        n_steps = len(criteria.steps)
        n_checks = len(criteria.state_checks)
        passing = self._count_passing_checks()
        reached = services_reached(criteria.services, self._evidence)
        share = len(self._credited) / n_steps if n_steps else 0.0
        if not n_checks:
            complete = share == 1.0
            return Grade(
                share if reached or not complete else (n_steps - 1) / n_steps, complete and reached
            )
        repaired = max(0.0, (passing - self._baseline) / (n_checks - self._baseline))
        progress = STEP_SHARE * share + (1 - STEP_SHARE) * repaired if n_steps else repaired
        return Grade(progress, passing == n_checks and reached)

    def _judge_request(self, worthy: Sequence[Evidence]) -> Grade:
        """Return the grade of the requests of one command.

        If the task asks for a read, a command that also writes does not count (``s3 rm
        --recursive`` lists the objects that it deletes).
        """
        writes = any(not request.reads for request in worthy)
        achieved = any(map(self.criteria.matches, worthy)) and not (
            is_read(self.criteria.operation) and writes
        )
        return Grade(float(achieved), achieved)

    def _judge_creation(self) -> Grade:
        """Return the grade of a task that asks for a resource."""
        resource = self.criteria.resource
        assert resource is not None
        if verified(resource, self._state):
            return Grade(1.0, True)
        accepted = any(
            request.ok
            and request.operation == self.criteria.operation
            and same_resource(request.resource, resource.name)
            for request in self._evidence
        )
        return Grade(INCOMPLETE_CREATION if accepted else 0.0, False)

    def _count_passing_checks(self) -> int:
        """Return the number of state checks that pass now."""
        return sum(verified(check, self._state) for check in self.criteria.state_checks)

    def _credit_steps(self) -> None:
        """Credit the steps in order, each to a different request, until one has no request."""
        steps = self.criteria.steps
        while len(self._credited) < len(steps):
            request = unspent_request(steps[len(self._credited)], self._evidence, self._credited)
            if request is None:
                return
            self._credited.append(request.index)


def verified(check: Check, state: StateReader) -> bool:
    """Return whether a check passes in the simulator's state as the grader itself reads it (layer
    1, ground truth).

    The output of the agent's commands plays no role. A state that cannot be parsed fails the check.
    """
    try:
        return check.holds(state)
    except (UnreadableAnswer, RecursionError):
        return False


def unspent_request(
    step: CriteriaStep, evidence: Iterable[Evidence], spent: Sequence[int]
) -> Evidence | None:
    """Return the first accepted request for a step that is not credited to another step (layer 2,
    dedup)."""
    return next(
        (
            request
            for request in evidence
            if request.ok and request.index not in spent and step.is_met_by(request)
        ),
        None,
    )


def earns_credit(request: Evidence, criteria: Criteria) -> bool:
    """Return whether a request counts (layer 5, no verification reward).

    It must be accepted and able to change something, unless the task asks for a request instead of
    a state.
    """
    asks_only = not criteria.checks and not criteria.steps
    return request.ok and (
        asks_only or not request.reads or request.operation in criteria.operations
    )


def services_reached(services: Iterable[str], evidence: Iterable[Evidence]) -> bool:
    """Return whether each of the services received an accepted request."""
    return set(services) <= {request.service for request in evidence if request.ok}


def is_graded_by_end_state(task: Task) -> bool:
    """Return whether a task is graded by its end state: it has no success criteria."""
    return not task.success


def parse_free_field(line: str) -> tuple[str, str, str]:
    """Parse "service/kind: path = values" into (service/kind, path, values).

    Raises TaskError for a free field without bounds.
    """
    kind, _, field = line.partition(":")
    path, _, values = field.partition(" = ")
    if "/" not in kind or not path.strip() or not values.strip():
        raise TaskError(f'task.free: {line!r} is not "service/kind: path = value | value"')
    return kind.strip(), path.strip(), values.strip()


def build_freedom(task: Task) -> Freedom:
    """Return the choices that a task leaves to the agent. Raises TaskError for a free field without
    bounds."""
    return Freedom(tuple(map(parse_free_field, task.free)), task.may_change, task.verbatim)


class EndStateGrader:
    """Grades one episode by comparing the account with the end states of the solutions.

    ``goals`` waits for the goals of the solutions and returns them; ``read`` takes a snapshot. The
    account is read only if a request could have changed something.

    In drift tasks, ``needless_writes`` counts commands that write and repair nothing, or that set a
    wrong value where a certain one is wanted.
    """

    may_drop_settings = True
    """Whether the account may drop settings that were requested, as the simulator does."""

    def __init__(
        self, task: Task, goals: Callable[[], tuple[Goal, ...]], read: Callable[[], Snapshot]
    ) -> None:
        self.criteria = Criteria(services=services_of(task.solution))
        self.needless_writes = 0
        self.grade = Grade(0.0, False)
        self.lost_ground = False
        self._goals = goals
        self._read = read
        self._counts_needless_writes = bool(task.possible_drifts)
        self._start: Snapshot | None = None
        self._now: Snapshot | None = None
        self._unread: list[Evidence] = []
        """Accepted writes since the account was read last."""
        self._sent: list[SentWrite] = []
        """All writes until the account was read last."""
        self._comparisons: list[EpisodeComparison] = []
        self._verdict: AccountVerdict | None = None
        self._excused: frozenset[str] = frozenset()
        """Harms that the agent does not answer for."""
        self._ever_satisfied: frozenset[str] = frozenset()
        """Wanted leaves that the account has had at some time."""
        self._operations: list[str] = []
        self._digest: tuple[Snapshot | None, str] = (None, "")
        """``state_key`` and the snapshot that it describes."""

    def start(self) -> None:
        """Read the account right after set-up. Raises SnapshotError."""
        self._start = self._now = self._read()

    @property
    def credited_operations(self) -> list[str]:
        """The operations of the solution whose part of the target state is reached."""
        return self._operations

    @property
    def state_key(self) -> str:
        """A digest of the account as last read, equal for equal accounts in all episodes of the
        task.

        Raises RuntimeError before ``start``.
        """
        if self._start is None or self._now is None:
            raise RuntimeError("the account was not read yet")
        digested, digest = self._digest
        if digested is not self._now:  # usually the last command only read
            digest = state_digest(self._start, self._now)
            self._digest = (self._now, digest)
        return digest

    def missing(self) -> list[str]:
        """Describe what keeps the task from being achieved."""
        return self._judge().describe()

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``.

        ``lost``: the requests of the command are unknown, so the account is read in any case.
        Raises SnapshotError if the account cannot be read.
        """
        self._unread += [request for request in added if request.ok and not request.reads]
        wrote = any(not request.reads for request in added)
        may_differ = wrote or lost or (self._now is not None and is_under_way(self._now))
        if self.grade.achieved or not may_differ:
            self.lost_ground = False
            return self.grade
        satisfied_before: frozenset[str] = self._verdict.satisfied if self._verdict else frozenset()
        wrong_before: frozenset[str] = self._verdict.wrong_values if self._verdict else frozenset()
        verdict = self._judge_settled()
        self._verdict = verdict
        self.lost_ground = bool(satisfied_before - verdict.satisfied)
        if (
            self._counts_needless_writes
            and wrote
            and (
                not verdict.satisfied - self._ever_satisfied or verdict.wrong_values - wrong_before
            )
        ):
            self.needless_writes += 1
        self._ever_satisfied |= verdict.satisfied
        self.grade = Grade(verdict.progress, verdict.achieved, bool(verdict.harms - self._excused))
        return self.grade

    def holding(self) -> frozenset[str]:
        """Return the wanted leaves that the account has now. Raises SnapshotError."""
        return self._judge().satisfied

    def excuse(self) -> None:
        """Excuse new harms since the last grading: the environment caused them, not the agent."""
        known = self._verdict.harms if self._verdict else frozenset()
        self._excused |= self._judge().harms - known

    def _judge_settled(self) -> AccountVerdict:
        """Judge the account; if only unfinished executions differ, wait for them up to
        ``_UNDER_WAY_S``.

        An execution that ends by itself within that time is not left behind.
        """
        verdict = self._judge()
        deadline = process_clock.now() + _UNDER_WAY_S
        while verdict.only_leftovers and process_clock.now() < deadline:
            if self._now is None or not is_under_way(self._now):
                break
            time.sleep(_POLL_S)
            verdict = self._judge()
        return verdict

    def _judge(self) -> AccountVerdict:
        """Read the account and return the verdict of the goal that it matches best."""
        if not self._comparisons:
            assert self._start is not None
            # The goals are known only once the solutions have been played, so not at ``start``.
            comparisons = [self._build_comparison(goal) for goal in self._goals()]
            if any(comparison.goal.is_trivial for comparison in comparisons):
                raise TaskError("the account is as its solution leaves it before the first command")
            self._comparisons = comparisons
        now = self._read()
        targets = [goal.target for goal in self._goals()]
        assert self._now is not None
        self._sent += build_writes(
            self._now, now, [(request.operation, request.params) for request in self._unread]
        )
        self._unread.clear()
        self._now = now
        verdicts = [
            comparison.judge(
                self._compared_part(now, target), self._sent if self.may_drop_settings else None
            )
            for comparison, target in zip(self._comparisons, targets, strict=True)
        ]
        best = max(
            verdicts, key=lambda verdict: (verdict.achieved, verdict.progress, -len(verdict.harms))
        )
        operations = targets[verdicts.index(best)].operations
        self._operations = [name for place in best.parts for name in operations[place]]
        return best

    def _build_comparison(self, goal: Goal) -> EpisodeComparison:
        """Return the comparison of this episode with a goal. Subclasses for other accounts override
        it."""
        assert self._start is not None
        return EpisodeComparison(self._start, goal)

    def _compared_part(self, now: Snapshot, target: Target) -> Snapshot:
        """Return the part of the account that is compared with a target: all of it."""
        return now


def services_of(commands: Iterable[str]) -> frozenset[str]:
    """Return the services of command lines."""
    words = (line.split() for line in commands)
    return frozenset("s3" if word[1] == "s3api" else word[1] for word in words if len(word) > 1)
