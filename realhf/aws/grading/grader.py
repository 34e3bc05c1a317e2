"""Graders of an episode: one by accepted requests and state checks, one by comparing the end state
with the solution's.

``Grader`` is for warm-up tasks and third-party tasks, whose success criteria list the requests or
the state that count. ``EndStateGrader`` is for all other tasks. ``Grader`` uses the criteria that
are set: ``state_checks`` and ``steps`` (multi_step), otherwise ``resource_exists``
(resource_creation), otherwise ``operation`` (command_match).

Eight layers protect against reward hacking, each implemented by one function: 1 ground truth
``check_passes``, 2 dedup ``find_unused_request``, 3 grader invisibility ``episode.masked_task``, 4
allow-list ``policy.check_command``, 5 no verification reward ``earns_credit``, 6 monotone progress
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
"""Seconds to wait for an execution that the agent started to end by itself, before it counts as
left behind."""
_POLL_S = 0.05
"""Seconds between two reads of the account during that wait."""

INCOMPLETE_CREATION = 0.5
"""Progress if the required create request was accepted but the resource does not exist."""
STEP_SHARE = 0.7
"""Weight of the steps in the progress of a task with both steps and state checks."""


@dataclass(frozen=True)
class Grade:
    """The result of the latest evaluation of an episode."""

    progress: float
    """Progress in [0, 1]."""
    achieved: bool
    """Whether the task is achieved."""
    harmed: bool = False
    """Whether the agent harmed a protected resource that the set-up made."""


class Grader:
    """Grader of one episode by its success criteria.

    Call ``evaluate`` after every command. The state is read only if a request could have changed
    something; otherwise the last grade stays valid.
    """

    needless_writes = 0
    """Always 0: only ``EndStateGrader`` counts needless writes."""
    charges_rollback = True
    """Whether a rollback costs reward. Always true here, because this grader credits operations."""

    def __init__(self, criteria: Criteria, state: StateReader) -> None:
        self.criteria = criteria
        self._state = state
        self._evidence: list[Evidence] = []
        self._credited: list[int] = []
        """Index of the request that was credited for each step completed so far."""
        self._baseline = 0
        """Number of state checks that pass before the first command."""
        self.grade = Grade(0.0, False)

    def start(self) -> None:
        """Read the state right after set-up. Raises TaskError if the task is already solved or
        cannot be solved."""
        checks = self.criteria.state_checks
        for check in checks:
            if check.asks_for_drawn_id():
                answer = self._state.run(check.command)
                if not answer.success and not answer.timed_out:
                    raise TaskError(
                        "a state check names a resource by a generated id that the set-up has not "
                        "created"
                    )
        self._baseline = self._count_passing_checks()
        if checks and self._baseline == len(checks):
            raise TaskError("every state check of the task passes before the first command")

    @property
    def credited_operations(self) -> list[str]:
        """The operations credited so far, in the order of the criteria."""
        if self.criteria.steps:
            return [step.operation for step in self.criteria.steps[: len(self._credited)]]
        return [self.criteria.operation] if self.criteria.operation and self.grade.progress else []

    def missing(self) -> list[str]:
        """Describe what still prevents success: uncredited steps, failing checks, and services
        without an accepted request."""
        criteria = self.criteria
        gaps = [
            f"step {step.operation} {step.resource or ''}"
            for step in criteria.steps[len(self._credited) :]
        ]
        gaps += [str(check) for check in criteria.checks if not check_passes(check, self._state)]
        return gaps + [
            f"service {s}"
            for s in sorted(criteria.services)
            if not services_reached([s], self._evidence)
        ]

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``.

        ``lost``: it is unknown which requests the command sent, so the state is read in any case.
        Raises StateCallError or ConnectionError if the simulator cannot be read.
        """
        self._evidence.extend(added)
        creditable = [request for request in added if earns_credit(request, self.criteria)]
        if (creditable or lost) and not self.grade.achieved:
            self.grade = self._judge(creditable)
        return self.grade

    def find_satisfied(self) -> frozenset[str]:
        """Return the indices, as strings, of the checks that pass now. Raises ConnectionError."""
        return frozenset(
            str(index) for index, check in enumerate(self.criteria.checks) if self._holds(check)
        )

    def _holds(self, check: Check) -> bool:
        """Return whether a check passes. A check whose state cannot be read fails."""
        try:
            return check_passes(check, self._state)
        except StateCallError:
            return False

    def ignore_new_harms(self) -> None:
        """Do nothing: tasks with success criteria protect no resources."""

    def _judge(self, creditable: Sequence[Evidence]) -> Grade:
        """Return the grade of the present state, whatever was done and undone before (layer 8 of
        the module docstring).

        ``creditable``: the requests of the last command that may earn credit.
        """
        criteria = self.criteria
        if not criteria.state_checks and not criteria.steps:
            return self._judge_creation() if criteria.resource else self._judge_request(creditable)
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

    def _judge_request(self, creditable: Sequence[Evidence]) -> Grade:
        """Return the grade of a task that asks for one request, after the requests of one command.

        If the task asks for a read, a command that also writes does not count. For example, ``s3 rm
        --recursive`` lists the objects that it deletes.
        """
        writes = any(not request.reads for request in creditable)
        achieved = any(map(self.criteria.matches, creditable)) and not (
            is_read(self.criteria.operation) and writes
        )
        return Grade(float(achieved), achieved)

    def _judge_creation(self) -> Grade:
        """Return the grade of a task that asks for a resource to be created."""
        resource = self.criteria.resource
        assert resource is not None
        if check_passes(resource, self._state):
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
        return sum(check_passes(check, self._state) for check in self.criteria.state_checks)

    def _credit_steps(self) -> None:
        """Credit the steps in order, each to a different request. Stop at the first step that no
        request meets."""
        steps = self.criteria.steps
        while len(self._credited) < len(steps):
            request = find_unused_request(
                steps[len(self._credited)], self._evidence, self._credited
            )
            if request is None:
                return
            self._credited.append(request.index)


def check_passes(check: Check, state: StateReader) -> bool:
    """Return whether a check passes in the simulator's state, which the grader reads itself (layer
    1 of the module docstring, ground truth).

    The output of the agent's commands is not used. A state that cannot be parsed fails the check.
    """
    try:
        return check.holds(state)
    except (UnreadableAnswer, RecursionError):
        return False


def find_unused_request(
    step: CriteriaStep, evidence: Iterable[Evidence], spent: Sequence[int]
) -> Evidence | None:
    """Return the first accepted request that meets a step and is not credited to another step yet;
    None if there is none (layer 2 of the module docstring, dedup).

    ``spent``: indices of the requests that are credited already.
    """
    return next(
        (
            request
            for request in evidence
            if request.ok and request.index not in spent and step.is_met_by(request)
        ),
        None,
    )


def earns_credit(request: Evidence, criteria: Criteria) -> bool:
    """Return whether a request may earn credit: it was accepted, and it can change state or is one
    that the criteria ask for.

    Other reads earn nothing, so that an agent is not rewarded for running the checks itself (layer
    5 of the module docstring). If the criteria have neither checks nor steps, any accepted request
    may earn credit.
    """
    asks_only = not criteria.checks and not criteria.steps
    return request.ok and (
        asks_only or not request.reads or request.operation in criteria.operations
    )


def services_reached(services: Iterable[str], evidence: Iterable[Evidence]) -> bool:
    """Return whether each of the services has received an accepted request."""
    return set(services) <= {request.service for request in evidence if request.ok}


def is_graded_by_end_state(task: Task) -> bool:
    """Return whether a task is graded by its end state, which it is if it has no success
    criteria."""
    return not task.success


def parse_free_field(line: str) -> tuple[str, str, str]:
    """Parse "service/kind: path = values" and return (service/kind, path, values).

    Raises TaskError if one of the three parts is missing.
    """
    kind, _, field = line.partition(":")
    path, _, values = field.partition(" = ")
    if "/" not in kind or not path.strip() or not values.strip():
        raise TaskError(f'task.free: {line!r} is not "service/kind: path = value | value"')
    return kind.strip(), path.strip(), values.strip()


def build_freedom(task: Task) -> Freedom:
    """Return the choices that a task leaves to the agent. Raises TaskError for a free field in the
    wrong format."""
    return Freedom(tuple(map(parse_free_field, task.free)), task.may_change, task.verbatim)


class EndStateGrader:
    """Grader of one episode that compares the account with the end states of the task's solutions.

    ``goals`` waits until the solutions have been played and returns their goals; ``read`` takes a
    snapshot. The account is read only if a request could have changed something.

    In drift tasks, ``needless_writes`` counts the commands that write but repair nothing, or that
    write a wrong value where the task requires a certain one.
    """

    may_drop_settings = True
    """Whether the account may drop settings that a request sent, as the simulator does."""

    def __init__(
        self, task: Task, goals: Callable[[], tuple[Goal, ...]], read: Callable[[], Snapshot]
    ) -> None:
        self.criteria = Criteria(services=services_of(task.solution))
        self.needless_writes = 0
        self.grade = Grade(0.0, False)
        self.charges_rollback = False
        self._goals = goals
        self._read = read
        self._counts_needless_writes = bool(task.possible_drifts)
        self._start: Snapshot | None = None
        self._now: Snapshot | None = None
        self._unread: list[Evidence] = []
        """Accepted writes since the last read of the account."""
        self._sent: list[SentWrite] = []
        """All accepted writes up to the last read of the account."""
        self._comparisons: list[EpisodeComparison] = []
        self._verdict: AccountVerdict | None = None
        self._ignored_harms: frozenset[str] = frozenset()
        """Harms that the environment caused and that are not charged to the agent."""
        self._ever_satisfied: frozenset[str] = frozenset()
        """Wanted leaves (see ``differences``) that the account has satisfied at some time."""
        self._operations: list[str] = []
        self._digest: tuple[Snapshot | None, str] = (None, "")
        """The last snapshot whose digest was computed, and that digest; a cache for
        ``state_key``."""

    def start(self) -> None:
        """Read the account right after set-up. Raises SnapshotError."""
        self._start = self._now = self._read()

    @property
    def credited_operations(self) -> list[str]:
        """The operations of those parts of the solution that the account has reached."""
        return self._operations

    @property
    def state_key(self) -> str:
        """A digest of the account as last read. Equal accounts have equal digests in all episodes
        of a task.

        Raises RuntimeError before ``start``.
        """
        if self._start is None or self._now is None:
            raise RuntimeError("the account has not been read yet")
        digested, digest = self._digest
        if digested is not self._now:  # computed only after a read: most commands change nothing
            digest = state_digest(self._start, self._now)
            self._digest = (self._now, digest)
        return digest

    def missing(self) -> list[str]:
        """Describe what still prevents success."""
        return self._judge().describe()

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``.

        ``lost``: it is unknown which requests the command sent, so the account is read in any case.
        Raises SnapshotError if the account cannot be read.
        """
        self._unread += [request for request in added if request.ok and not request.reads]
        wrote = any(not request.reads for request in added)
        may_differ = wrote or lost or (self._now is not None and is_under_way(self._now))
        if self.grade.achieved or not may_differ:
            self.charges_rollback = False
            return self.grade
        satisfied_before: frozenset[str] = self._verdict.satisfied if self._verdict else frozenset()
        wrong_before: frozenset[str] = self._verdict.wrong_values if self._verdict else frozenset()
        verdict = self._judge_settled()
        self._verdict = verdict
        self.charges_rollback = bool(satisfied_before - verdict.satisfied)
        if (
            self._counts_needless_writes
            and wrote
            and (
                not verdict.satisfied - self._ever_satisfied or verdict.wrong_values - wrong_before
            )
        ):
            self.needless_writes += 1
        self._ever_satisfied |= verdict.satisfied
        self.grade = Grade(
            verdict.progress, verdict.achieved, bool(verdict.harms - self._ignored_harms)
        )
        return self.grade

    def find_satisfied(self) -> frozenset[str]:
        """Return the wanted leaves (see ``differences``) that the account satisfies now. Raises
        SnapshotError."""
        return self._judge().satisfied

    def ignore_new_harms(self) -> None:
        """Ignore the harms that are new since the last grading: the environment caused them, not
        the agent."""
        known = self._verdict.harms if self._verdict else frozenset()
        self._ignored_harms |= self._judge().harms - known

    def _judge_settled(self) -> AccountVerdict:
        """Judge the account. If the only differences are unfinished executions, wait up to
        ``_UNDER_WAY_S`` for them to end.

        An execution that ends by itself within that time does not count as left behind.
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
        """Read the account and return its verdict against the goal that it matches best."""
        if not self._comparisons:
            assert self._start is not None
            # The goals are known only once the solutions have been played, so not at ``start``.
            comparisons = [self._build_comparison(goal) for goal in self._goals()]
            if any(comparison.goal.is_trivial for comparison in comparisons):
                raise TaskError(
                    "the account is already as the solution leaves it before the first command"
                )
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
        """Return the comparison of this episode with a goal. Overridden in subclasses for other
        kinds of accounts."""
        assert self._start is not None
        return EpisodeComparison(self._start, goal)

    def _compared_part(self, now: Snapshot, target: Target) -> Snapshot:
        """Return the part of the account that is compared with a target. Here it is the whole
        account."""
        return now


def services_of(commands: Iterable[str]) -> frozenset[str]:
    """Return the services that command lines address, by the API's names."""
    words = (line.split() for line in commands)
    return frozenset("s3" if word[1] == "s3api" else word[1] for word in words if len(word) > 1)
