"""Grades an episode by what its account is in the end, compared with what the solution makes of it.

Which operation was used decides nothing. Progress is what the state is worth now: it falls when a part is undone.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from realhf.aws.grading.criteria import Criteria
from realhf.aws.grading.differences import Comparison, Freedom, Goal, Target, Verdict
from realhf.aws.grading.grader import Grade
from realhf.aws.grading.snapshot import Snapshot
from realhf.aws.grading.tracker import Evidence, is_read
from realhf.aws.tasks.task import Task, TaskError


def is_graded_by_end_state(task: Task) -> bool:
    """Return whether the account has to be as the solution leaves it: no other criteria are written."""
    return not task.success


def freedom_of(task: Task) -> Freedom:
    """Return what a task leaves to the agent. Raises TaskError for a free field that is not "service/kind: path"."""
    free = []
    for line in task.free:
        kind, colon, path = line.partition(":")
        if not colon or "/" not in kind or not path.strip():
            raise TaskError(f'task.free: {line!r} is not "service/kind: path"')
        free.append((kind.strip(), path.strip()))
    return Freedom(tuple(free), task.may_change)


class EndStateGrader:
    """Grades one episode. ``goals`` waits for what the solutions ask for, ``read`` takes a snapshot.
    Verification runs only where a request could have changed something. ``sparing``: a command that writes and mends
    nothing is counted in ``needless_writes``."""

    def __init__(
        self,
        task: Task,
        goals: Callable[[], tuple[Goal, ...]],
        read: Callable[[], Snapshot],
    ) -> None:
        self.criteria = Criteria(services=services_of(task.solution))
        self.needless_writes = 0
        self.grade = Grade(0.0, False)
        self.lost_ground = False
        self._goals, self._read = goals, read
        self._sparing = bool(task.possible_drifts)
        self._start: Snapshot | None = None
        self._comparisons: list[Comparison] = []
        self._verdict: Verdict | None = None
        self._excused: frozenset[str] = frozenset()
        self._ever_held: frozenset[str] = frozenset()
        self._operations: list[str] = []

    def start(self) -> None:
        """Look at the account right after set-up. Raises SnapshotError."""
        self._start = self._read()

    @property
    def credited_operations(self) -> list[str]:
        """Return the operations of the solution whose part of the target is there."""
        return self._operations

    def missing(self) -> list[str]:
        """Return in words what keeps the task from being achieved."""
        return self._judge().words()

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """Return the grade after a command that sent the requests ``added``. Raises SnapshotError when the account
        cannot be read."""
        wrote = any(not is_read(deed.operation) for deed in added)
        if self.grade.achieved or not (wrote or lost):
            self.lost_ground = False
            return self.grade
        before = self._verdict.held if self._verdict else frozenset()
        verdict = self._verdict = self._judge()
        self.lost_ground = bool(before - verdict.held)
        if self._sparing and wrote and not verdict.held - self._ever_held:
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

    def _judge(self) -> Verdict:
        if not self._comparisons:
            assert self._start is not None
            comparisons = [self._comparison(goal) for goal in self._goals()]
            if any(comparison.goal.asks_nothing for comparison in comparisons):
                raise TaskError("the account is as its solution leaves it before the first command")
            self._comparisons = comparisons
        now, targets = self._read(), [goal.target for goal in self._goals()]
        verdicts = [
            comparison.judge(self._seen(now, target))
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
