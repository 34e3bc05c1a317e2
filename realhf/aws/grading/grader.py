"""Grades an episode: by evidence and verified state, or by the end state compared with what the solution makes of it.

This is for warm-up tasks and tasks of other makers, whose success criteria say what has to be asked or done; all other
tasks are graded by their end state. The populated field decides the strategy: ``state_checks``, ``steps``
(multi_step), ``resource_exists`` (resource_creation), else ``operation`` (command_match).
Source: docs/reference/environment.md 7.

The eight layers against reward hacking, each a function: 1 ground truth ``verified``, 2 dedup ``unspent_request``,
3 grader invisibility ``episode.masked_task``, 4 allow-list ``policy.check_command``, 5 no verification reward
``earns_credit``, 6 monotone progress ``reward.monotone_progress``, 7 exact names ``tracker.same_resource``, 8 final
state ``_judge``.

Which operation was used decides nothing. Progress is what the state is worth now: it falls when a part is undone.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.grading.criteria import Check, Criteria, StateReader, Step
from realhf.aws.grading.differences import Comparison, Freedom, Goal, Target, Verdict
from realhf.aws.grading.leftovers import is_under_way
from realhf.aws.grading.sent_settings import Deed, deeds_between
from realhf.aws.grading.snapshot import Snapshot, state_digest
from realhf.aws.grading.tracker import Evidence, is_read, same_resource
from realhf.aws.tasks.task import Task, TaskError
from realhf.base import process_clock

_UNDER_WAY_S = 0.5
"""Seconds in which an execution that the agent has started may end by itself, before it counts as left behind."""
_POLL_S = 0.05

INCOMPLETE_CREATION = 0.5
"""Progress when the required create was accepted but the resource is not there."""
STEP_SHARE = 0.7
"""Weight of the steps where a task has both steps and state checks."""


@dataclass(frozen=True)
class Grade:
    """Holds the progress in [0, 1] as of now, whether the task is achieved, and whether something of the set-up is
    harmed."""

    progress: float
    achieved: bool
    harmed: bool = False


class Grader:
    """Grades one episode. Call ``evaluate`` after every command; verification runs only where a request could have
    changed something, otherwise the last grade stands."""

    needless_writes = 0
    lost_ground = True
    """Whether a rollback is charged: always, for credit is given for operations."""

    def __init__(self, criteria: Criteria, state: StateReader) -> None:
        self.criteria = criteria
        self._state = state
        self._evidence: list[Evidence] = []
        self._credited: list[int] = []
        self._baseline = 0
        self.grade = Grade(0.0, False)

    def start(self) -> None:
        """Look at the world right after set-up. Raises TaskError for a task that is solved already or never will
        be."""
        checks = self.criteria.state_checks
        for check in checks:
            if check.asks_for_drawn_id():
                answer = self._state.run(check.command)
                if not answer.success and not answer.timed_out:
                    raise TaskError("a state check asks for an id that AWS draws and that the set-up has not made")
        self._baseline = self._checks_passing()
        if checks and self._baseline == len(checks):
            raise TaskError("every state check of the task holds before the first command")

    @property
    def credited_operations(self) -> list[str]:
        """Return the operations that progress has been given for, in the order of the criteria."""
        if self.criteria.steps:
            return [step.operation for step in self.criteria.steps[: len(self._credited)]]
        return [self.criteria.operation] if self.criteria.operation and self.grade.progress else []

    def missing(self) -> list[str]:
        """Return in words what keeps the task from being achieved: steps without credit, checks that fail now,
        services."""
        criteria = self.criteria
        found = [f"step {step.operation} {step.resource or ''}" for step in criteria.steps[len(self._credited) :]]
        found += [str(check) for check in criteria.checks if not verified(check, self._state)]
        return found + [f"service {s}" for s in sorted(criteria.services) if not services_reached([s], self._evidence)]

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``. Of a ``lost`` command nobody knows what it
        sent, so the state is read in any case. Raises StateCallError or ConnectionError when the simulator cannot be
        read."""
        self._evidence.extend(added)
        worthy = [deed for deed in added if earns_credit(deed, self.criteria)]
        if (worthy or lost) and not self.grade.achieved:
            self.grade = self._judge(worthy)
        return self.grade

    def holding(self) -> frozenset[str]:
        """Return which checks hold now, by their places. Raises ConnectionError."""
        return frozenset(str(place) for place, check in enumerate(self.criteria.checks) if self._holds(check))

    def _holds(self, check: Check) -> bool:
        try:
            return verified(check, self._state)
        except StateCallError:
            return False

    def excuse(self) -> None:
        """Excuse what is harmed by now: nothing, for such a task protects nothing."""

    def _judge(self, worthy: Sequence[Evidence]) -> Grade:
        """Return what there is now, whatever was undone in between (layer 8)."""
        criteria = self.criteria
        if not criteria.state_checks and not criteria.steps:
            return self._judge_creation() if criteria.resource else self._judge_request(worthy)
        self._credit_steps()
        n_steps = len(criteria.steps)
        n_checks = len(criteria.state_checks)
        passing = self._checks_passing()
        reached = services_reached(criteria.services, self._evidence)
        share = len(self._credited) / n_steps if n_steps else 0.0
        if not n_checks:
            complete = share == 1.0
            return Grade(share if reached or not complete else (n_steps - 1) / n_steps, complete and reached)
        repaired = max(0.0, (passing - self._baseline) / (n_checks - self._baseline))
        progress = STEP_SHARE * share + (1 - STEP_SHARE) * repaired if n_steps else repaired
        return Grade(progress, passing == n_checks and reached)

    def _judge_request(self, worthy: Sequence[Evidence]) -> Grade:
        """Return the grade of the requests of one command. Where the task asks for a look, one that also writes is none
        (``s3 rm --recursive`` lists what it deletes)."""
        writes = any(not deed.reads for deed in worthy)
        achieved = any(map(self.criteria.matches, worthy)) and not (is_read(self.criteria.operation) and writes)
        return Grade(float(achieved), achieved)

    def _judge_creation(self) -> Grade:
        resource = self.criteria.resource
        assert resource is not None
        if verified(resource, self._state):
            return Grade(1.0, True)
        accepted = any(
            deed.ok and deed.operation == self.criteria.operation and same_resource(deed.resource, resource.name)
            for deed in self._evidence
        )
        return Grade(INCOMPLETE_CREATION if accepted else 0.0, False)

    def _checks_passing(self) -> int:
        return sum(verified(check, self._state) for check in self.criteria.state_checks)

    def _credit_steps(self) -> None:
        """Credit steps in list order, each to a request of its own, as far as they go."""
        steps = self.criteria.steps
        while len(self._credited) < len(steps):
            deed = unspent_request(steps[len(self._credited)], self._evidence, self._credited)
            if deed is None:
                return
            self._credited.append(deed.index)


def verified(check: Check, state: StateReader) -> bool:
    """Return whether the simulator's state, as the grader itself reads it, is what the check demands (layer 1, ground
    truth). Nothing that an agent printed or wrote takes part; what cannot be read is not what was demanded."""
    try:
        return check.holds(state)
    except (UnreadableAnswer, RecursionError):
        return False


def unspent_request(step: Step, evidence: Iterable[Evidence], spent: Sequence[int]) -> Evidence | None:
    """Return the first accepted request for this step that has not paid for another one (layer 2, dedup)."""
    return next((deed for deed in evidence if deed.ok and deed.index not in spent and step.asks_for(deed)), None)


def earns_credit(deed: Evidence, criteria: Criteria) -> bool:
    """Return whether a request counts (layer 5, no verification reward): it must be accepted and able to have changed
    something, unless the task asks for a request and not for a state."""
    asks_only = not criteria.checks and not criteria.steps
    return deed.ok and (asks_only or not deed.reads or deed.operation in criteria.operations)


def services_reached(services: Iterable[str], evidence: Iterable[Evidence]) -> bool:
    """Return whether an accepted request went to each of the services."""
    return set(services) <= {deed.service for deed in evidence if deed.ok}


def is_graded_by_end_state(task: Task) -> bool:
    """Return whether the account has to be as the solution leaves it: no other criteria are written."""
    return not task.success


def free_field(line: str) -> tuple[str, str, str]:
    """Return (service/kind, path, values) of a free field. Raises TaskError for one without bounds."""
    kind, _, field = line.partition(":")
    path, _, values = field.partition(" = ")
    if "/" not in kind or not path.strip() or not values.strip():
        raise TaskError(f'task.free: {line!r} is not "service/kind: path = value | value"')
    return kind.strip(), path.strip(), values.strip()


def freedom_of(task: Task) -> Freedom:
    """Return what a task leaves to the agent. Raises TaskError for a free field without bounds."""
    return Freedom(tuple(map(free_field, task.free)), task.may_change, task.verbatim)


class EndStateGrader:
    """Grades one episode. ``goals`` waits for what the solutions ask for, ``read`` takes a snapshot.
    Verification runs only where a request could have changed something. ``sparing``: a command that writes and mends
    nothing is counted in ``needless_writes``, and one that puts another value than the wanted one where one is
    wanted."""

    keeps_less = True
    """Whether the account may drop what it was asked, as a simulator's does."""

    def __init__(self, task: Task, goals: Callable[[], tuple[Goal, ...]], read: Callable[[], Snapshot]) -> None:
        self.criteria = Criteria(services=services_of(task.solution))
        self.needless_writes = 0
        self.grade = Grade(0.0, False)
        self.lost_ground = False
        self._goals = goals
        self._read = read
        self._sparing = bool(task.possible_drifts)
        self._start: Snapshot | None = None
        self._now: Snapshot | None = None
        self._unread: list[Evidence] = []
        """Requests since the account was read last."""
        self._sent: list[Deed] = []
        self._comparisons: list[Comparison] = []
        self._verdict: Verdict | None = None
        self._excused: frozenset[str] = frozenset()
        self._ever_held: frozenset[str] = frozenset()
        self._operations: list[str] = []
        self._digest: tuple[Snapshot | None, str] = (None, "")
        """``state_key`` and the snapshot that it describes."""

    def start(self) -> None:
        """Look at the account right after set-up. Raises SnapshotError."""
        self._start = self._now = self._read()

    @property
    def credited_operations(self) -> list[str]:
        """Return the operations of the solution whose part of the target is there."""
        return self._operations

    @property
    def state_key(self) -> str:
        """A digest of the account as it was last read, the same for equal accounts in all episodes of the task. Raises
        RuntimeError before ``start``."""
        if self._start is None or self._now is None:
            raise RuntimeError("the account was not read yet")
        digested, digest = self._digest
        if digested is not self._now:  # as a rule the last command only read
            digest = state_digest(self._start, self._now)
            self._digest = (self._now, digest)
        return digest

    def missing(self) -> list[str]:
        """Return in words what keeps the task from being achieved."""
        return self._judge().words()

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``. Raises SnapshotError when the account
        cannot be read."""
        self._unread += [deed for deed in added if deed.ok and not deed.reads]
        wrote = any(not deed.reads for deed in added)
        may_differ = wrote or lost or (self._now is not None and is_under_way(self._now))
        if self.grade.achieved or not may_differ:
            self.lost_ground = False
            return self.grade
        held_before: frozenset[str] = self._verdict.held if self._verdict else frozenset()
        spoilt_before: frozenset[str] = self._verdict.spoilt if self._verdict else frozenset()
        verdict = self._judge_settled()
        self._verdict = verdict
        self.lost_ground = bool(held_before - verdict.held)
        if self._sparing and wrote and (not verdict.held - self._ever_held or verdict.spoilt - spoilt_before):
            self.needless_writes += 1
        self._ever_held |= verdict.held
        self.grade = Grade(verdict.progress, verdict.achieved, bool(verdict.harms - self._excused))
        return self.grade

    def holding(self) -> frozenset[str]:
        """Return what of the target is there now. Raises SnapshotError."""
        return self._judge().held

    def excuse(self) -> None:
        """Excuse what is harmed by now and was not when last graded: it is not the agent's doing."""
        known = self._verdict.harms if self._verdict else frozenset()
        self._excused |= self._judge().harms - known

    def _judge_settled(self) -> Verdict:
        """Judge again what is only not over yet: an execution that ends by itself in a moment is not left behind."""
        verdict = self._judge()
        deadline = process_clock.now() + _UNDER_WAY_S
        while verdict.only_left and process_clock.now() < deadline:
            if self._now is None or not is_under_way(self._now):
                break
            time.sleep(_POLL_S)
            verdict = self._judge()
        return verdict

    def _judge(self) -> Verdict:
        if not self._comparisons:
            assert self._start is not None
            comparisons = [self._comparison(goal) for goal in self._goals()]
            if any(comparison.goal.asks_nothing for comparison in comparisons):
                raise TaskError("the account is as its solution leaves it before the first command")
            self._comparisons = comparisons
        now = self._read()
        targets = [goal.target for goal in self._goals()]
        assert self._now is not None
        self._sent += deeds_between(self._now, now, [(deed.operation, deed.params) for deed in self._unread])
        self._unread.clear()
        self._now = now
        verdicts = [
            comparison.judge(self._seen(now, target), self._sent if self.keeps_less else None)
            for comparison, target in zip(self._comparisons, targets, strict=True)
        ]
        best = max(verdicts, key=lambda verdict: (verdict.achieved, verdict.progress, -len(verdict.harms)))
        operations = targets[verdicts.index(best)].operations
        self._operations = [name for place in best.parts for name in operations[place]]
        return best

    def _comparison(self, goal: Goal) -> Comparison:
        assert self._start is not None
        return Comparison(self._start, goal)

    def _seen(self, now: Snapshot, target: Target) -> Snapshot:
        """Return what of an account is compared with a target: all of it."""
        return now


def services_of(commands: Iterable[str]) -> frozenset[str]:
    """Return the services that command lines are about."""
    words = (line.split() for line in commands)
    return frozenset("s3" if word[1] == "s3api" else word[1] for word in words if len(word) > 1)
