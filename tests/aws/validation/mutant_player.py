"""Plays a mutant as an agent would, and says what the grader paid and whether the mutant reached
the *target*: the account as the solution leaves it, made once for each instance.

Two judges say so, who share nothing: the comparison of snapshots of the whole state, which grades
as well, and a walk over every describe call, which sees what an agent sees.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.world import make_targets
from realhf.aws.grading.differences import EpisodeComparison, Target
from realhf.aws.grading.differences import Goal as TargetGoal
from realhf.aws.grading.grader import build_freedom, services_of
from realhf.aws.grading.snapshot import take_snapshot
from realhf.aws.real_aws.describe_walker import walk
from realhf.aws.tasks.task import Task
from tests.aws.validation.describe_answers import Said, disagreements
from tests.aws.validation.describe_answers import told as told_by
from tests.aws.validation.mutant import Expected, Mutant
from tests.aws.validation.play import Run, run_commands

MAX_STEPS = 64
"""Largest number of commands of a mutant: a second set-up takes more than an agent has."""
_SHOWN = 6
"""Most differences that are kept of one mutant."""
_UNDER_WAY = frozenset({"pending", "creating", "inprogress", "updating", "deleting", "modifying"})
_SETTLE_S = 0.3
_SETTLE_TRIES = 5


@dataclass(frozen=True)
class Played:
    """Records what came of one mutant. ``equal``: its snapshot is as good as the target's, and what
    no snapshot could show was asked as the solution did; ``needless``: it wrote by an operation by
    which the solution writes nothing; ``differences`` of the snapshots and ``told``, of the
    describe calls' answers, both cut short. ``sent`` counts commands, ``failed`` those that failed.
    ``expected``: what is known of it by how it was made, "" where nothing is."""

    task_id: int
    seed: int
    kind: str
    says: str
    commands: tuple[str, ...]
    achieved: bool
    score: float
    equal: bool
    needless: bool
    differences: tuple[str, ...]
    told: tuple[str, ...]
    sent: int
    failed: int
    expected: Expected = ""

    @property
    def right(self) -> bool:
        """Return whether it is to be paid: as it is known by how it was made, else as the state
        says that it left."""
        return self.equal if self.expected == "" else self.expected == "paid"

    @property
    def wrongly_paid(self) -> bool:
        """Return whether the grader paid for what is wrong, or in full for a repair that was made
        blind."""
        blind = self.kind == "blind" and self.needless and self.score >= 1.0
        return self.achieved and (not self.right or blind)

    @property
    def wrongly_refused(self) -> bool:
        """Return whether the grader did not pay for what is right."""
        return self.right and not self.achieved

    @property
    def doubtful(self) -> bool:
        """Return whether the describe calls are of another opinion than the grader, where nothing
        better is known."""
        return not self.expected and self.achieved is bool(self.told)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data, as ``from_json`` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Played:
        """Return the record that plain data holds. Raises TypeError or KeyError for other data."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**fields)


@dataclass(frozen=True)
class Goal:
    """Holds what the solutions leave, as snapshots and as the describe calls tell it of
    ``services`` (``start``: what the set-up leaves), and the writes of the first."""

    targets: tuple[Target, ...]
    services: frozenset[str]
    start: frozenset[Said]
    said: frozenset[Said]
    writes: tuple[str, ...]


class Goals:
    """Makes what is asked of each instance once, whoever asks first. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Goal] = {}
        self._locks: defaultdict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)

    def of(self, episode: Episode, task: Task) -> Goal:
        """Return the goal of an instance, made in this episode where there is none."""
        key = task.task_id, task.seed
        with self._locks[key]:
            if key not in self._made:
                self._made[key] = make_goal(episode, task)
            return self._made[key]


def play_mutant(episode: Episode, task: Task, mutant: Mutant, goals: Goals) -> Played:
    """Play one mutant in an episode. Raises what ``Episode.reset`` and ``step`` raise."""
    goal = goals.of(episode, task)
    run = run_commands(episode, task, mutant.commands)
    differences = told = ["the simulator was lost"]
    if not run.lost:
        end = take_snapshot(episode.slot)
        freedom = build_freedom(task)
        verdicts = [
            EpisodeComparison(run.start, TargetGoal(target, freedom)).judge(end)
            for target in goal.targets
        ]
        differences = min((verdict.describe() for verdict in verdicts), key=len)
        differences += [word for word in episode.missing() if word.startswith("asked otherwise")]
        told = []
        if run.failures or run.writes != goal.writes:
            said = _said(episode, goal.services | services_of(mutant.commands))
            told = [
                line
                for line in disagreements(goal.start, goal.said, said)
                if not _is_free(line, task)
            ]
    return Played(
        task_id=task.task_id,
        seed=task.seed,
        kind=mutant.kind,
        says=str(mutant),
        commands=mutant.commands,
        achieved=run.achieved,
        score=run.score,
        equal=not differences,
        needless=bool(set(map(_operation, run.writes)) - set(map(_operation, goal.writes))),
        differences=tuple(differences[:_SHOWN]),
        told=tuple(told[:_SHOWN]),
        sent=run.sent,
        failed=len(run.failures),
        expected=mutant.expected if _is_proof(mutant, run) else "",
    )


def _is_proof(mutant: Mutant, run: Run) -> bool:
    """Return whether the commands were accepted without which nothing is known of a mutant before
    it is played."""
    return all(place < run.sent and place not in run.failed for place in mutant.proof)


def _is_free(line: str, task: Task) -> bool:
    """Return whether what the describe calls tell is of a field that the task leaves to the
    agent."""
    names = (path.replace("[]", "").rpartition(".")[2] for _, path, _ in build_freedom(task).free)
    return any(re.search(rf"\.{re.escape(name)} = ", line, re.IGNORECASE) for name in names)


def _operation(line: str) -> str:
    return " ".join(line.split()[:3])


def make_goal(episode: Episode, task: Task) -> Goal:
    """Play the solutions and look at what they leave. Raises what ``make_targets`` raises."""
    targets = make_targets(episode.slot, task, task.seed)
    services = services_of(task.solution) | {
        command.service for command in task.setup if command.service
    }
    episode.reset(task, chaos=False)
    start = _said(episode, services)
    run = run_commands(episode, task, task.solution)
    return Goal(targets, services, start, _said(episode, services), run.writes)


def _said(episode: Episode, services: Iterable[str]) -> frozenset[Said]:
    """Return what the describe calls tell of the account once it is settled."""
    for _ in range(_SETTLE_TRIES):
        said = told_by(walk(episode.slot.state.call, services))
        if not any(one.value.strip('"').lower() in _UNDER_WAY for one in said):
            break
        time.sleep(_SETTLE_S)
    return said
