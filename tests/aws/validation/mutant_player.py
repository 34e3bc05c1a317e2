"""Plays a mutant as an agent would, and says what the grader paid and whether the mutant reached the *target*: the
account as the solution leaves it, made once for each instance.

Two judges say so, who share nothing: the comparison of snapshots of the whole state, which grades as well, and a walk
over every describe call, which sees what an agent sees.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.world import make_targets
from realhf.aws.grading.differences import Target, compare
from realhf.aws.grading.grader import freedom_of
from realhf.aws.grading.snapshot import Snapshot, take_snapshot
from realhf.aws.real_aws.describe_walker import walk
from realhf.aws.tasks.captures import CaptureError, resolve
from realhf.aws.tasks.task import Task
from tests.aws.validation.describe_answers import Said, disagreements
from tests.aws.validation.describe_answers import told as told_by
from tests.aws.validation.mutants import Mutant

MAX_STEPS = 64
"""Largest number of commands of a mutant: a second set-up takes more than an agent has."""
_SHOWN = 6
"""Most differences that are kept of one mutant."""
_UNDER_WAY = frozenset({"pending", "creating", "inprogress", "updating", "deleting", "modifying"})
_SETTLE_S, _SETTLE_TRIES = 0.3, 5
_API_SERVICES: Mapping[str, str] = {"s3api": "s3"}


@dataclass(frozen=True)
class Played:
    """Records what came of one mutant. ``equal``: its snapshot is as good as the target's; ``needless``: it wrote by an
    operation by which the solution writes nothing; ``differences`` of the snapshots and ``told``, of the describe
    calls' answers, both cut short. ``sent`` counts commands, ``failed`` those that failed."""

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

    @property
    def wrongly_paid(self) -> bool:
        """Return whether the grader paid for another state, or in full for a repair that was made blind."""
        blind = self.kind == "blind" and self.needless and self.score >= 1.0
        return self.achieved and (not self.equal or blind)

    @property
    def wrongly_refused(self) -> bool:
        """Return whether the grader did not pay for the wanted state."""
        return self.equal and not self.achieved

    @property
    def doubtful(self) -> bool:
        """Return whether the describe calls are of another opinion than the grader."""
        return self.achieved is bool(self.told)

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
    """Holds what the solutions leave, as snapshots and as the describe calls tell it of ``services`` (``start``: what
    the set-up leaves), and the writes of the first."""

    targets: tuple[Target, ...]
    services: frozenset[str]
    start: frozenset[Said]
    said: frozenset[Said]
    writes: tuple[str, ...]


class Targets:
    """Makes the target of each instance once, whoever asks first. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Future[Goal]] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], make: Callable[[], Goal]) -> Goal:
        """Return the target with this key; ``make`` it where there is none. Raises what ``make`` raises."""
        with self._lock:
            mine = key not in self._made
            future = self._made.setdefault(key, Future())
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
                raise
        return future.result()


def play_mutant(episode: Episode, task: Task, mutant: Mutant, targets: Targets) -> Played:
    """Play one mutant in an episode. Raises what ``Episode.reset`` and ``step`` raise."""
    goal = targets.get((task.task_id, task.seed), lambda: make_goal(episode, task))
    run = perform(episode, task, mutant.commands)
    differences = told = ["the simulator was lost"]
    if not run.lost:
        end, freedom = take_snapshot(episode.slot), freedom_of(task)
        verdicts = [compare(run.start, target, end, freedom) for target in goal.targets]
        differences = min((verdict.words() for verdict in verdicts), key=len)
        told = []
        if run.failed or run.writes != goal.writes:
            said = _said(episode, goal.services | _services(mutant.commands))
            told = [line for line in disagreements(goal.start, goal.said, said) if not _is_free(line, task)]
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
        failed=run.failed,
    )


def _is_free(line: str, task: Task) -> bool:
    """Return whether what the describe calls tell is of a field that the task leaves to the agent."""
    names = (path.replace("[]", "").rpartition(".")[2] for _, path in freedom_of(task).free)
    return any(re.search(rf"\.{re.escape(name)} = ", line, re.IGNORECASE) for name in names)


@dataclass
class Run:
    """Records an episode: the account after set-up, whether it was achieved, its return, the writes that succeeded, how
    many commands were sent and failed, and whether the simulator was lost over one."""

    start: Snapshot
    achieved: bool = False
    score: float = 0.0
    writes: tuple[str, ...] = ()
    sent: int = 0
    failed: int = 0
    lost: bool = False


def perform(episode: Episode, task: Task, commands: Sequence[str]) -> Run:
    """Set the task up without chaos and send commands until it is done."""
    achieved = episode.reset(task, chaos=False).observation["task_achieved"]
    run = Run(take_snapshot(episode.slot), achieved)
    outputs: list[str] = []
    for command in commands:
        if episode.done:
            break
        line = resolve(_filled(episode, command), outputs)
        step = episode.step(line)
        seen = step.observation
        outputs.append(seen["command_output"])
        run.sent += 1
        run.achieved, run.score = seen["task_achieved"], run.score + step.reward
        run.lost = run.lost or seen.get("simulator_lost", False)
        if not seen["command_success"]:
            run.failed += 1
        elif not is_look(line):
            run.writes = (*run.writes, line)
    return run


def is_look(line: str) -> bool:
    """Return whether a command only looks."""
    words = line.split()
    return len(words) > 2 and words[2].startswith(("describe-", "get-", "list-", "head-", "ls", "batch-get-"))


def _operation(line: str) -> str:
    return " ".join(line.split()[:3])


def _filled(episode: Episode, command: str) -> str:
    try:
        return episode.fill([command])[0]
    except CaptureError:  # the set-up's answer has no such field: the command fails as a person's would
        return command


def make_goal(episode: Episode, task: Task) -> Goal:
    """Play the solutions and look at what they leave. Raises what ``make_targets`` raises."""
    targets = make_targets(episode.slot, task, task.seed)
    services = _services(task.solution) | {command.service for command in task.setup if command.service}
    episode.reset(task, chaos=False)
    start = _said(episode, services)
    run = perform(episode, task, task.solution)
    return Goal(targets, services, start, _said(episode, services), run.writes)


def _services(commands: Iterable[str]) -> frozenset[str]:
    names = (command.split()[1] for command in commands if len(command.split()) > 1)
    return frozenset(_API_SERVICES.get(name, name) for name in names)


def _said(episode: Episode, services: Iterable[str]) -> frozenset[Said]:
    """Return what the describe calls tell of the account once it is settled."""
    for _ in range(_SETTLE_TRIES):
        said = told_by(walk(episode.slot.state.call, services))
        if not any(one.value.strip('"').lower() in _UNDER_WAY for one in said):
            break
        time.sleep(_SETTLE_S)
    return said
