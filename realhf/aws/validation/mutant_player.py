"""Plays a mutant as an agent would, and says what the grader paid and whether the mutant reached the *target*: the
account as the solution leaves it, made once for each instance.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from realhf.aws.episode.episode import Episode
from realhf.aws.grading.describe_walker import Said, disagreements, told, walk
from realhf.aws.tasks.captures import CaptureError, resolve
from realhf.aws.tasks.task import Task
from realhf.aws.validation.mutants import Mutant

MAX_STEPS = 64
"""Largest number of commands of a mutant: a second set-up takes more than an agent has."""
_SHOWN = 6
"""Most differences that are kept of one mutant."""
_UNDER_WAY = frozenset({"pending", "creating", "inprogress", "updating", "deleting", "modifying"})
_SETTLE_S, _SETTLE_TRIES = 0.3, 5
_API_SERVICES: Mapping[str, str] = {"s3api": "s3"}


@dataclass(frozen=True)
class Played:
    """Records what came of one mutant. ``equal``: it reached the target; ``needless``: it wrote more than the solution
    does; ``differences`` from the target, cut short. ``sent`` counts commands, ``failed`` those that failed."""

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
class _Target:
    """Holds what the set-up and what the solution leaves, as the describe calls tell it of ``services``, and the
    solution's writes."""

    services: frozenset[str]
    start: frozenset[Said]
    said: frozenset[Said]
    writes: tuple[str, ...]


class Targets:
    """Makes the target of each instance once, whoever asks first. Thread-safe."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Future[Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], make: Callable[[], Any]) -> Any:
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
    target: _Target = targets.get((task.task_id, task.seed), lambda: _target(episode, task))
    run = perform(episode, task, mutant.commands)
    differences = ["the simulator was lost"]
    if not run.lost:
        differences = disagreements(
            target.start, target.said, _said(episode, target.services | _services(mutant.commands))
        )
    return Played(
        task_id=task.task_id,
        seed=task.seed,
        kind=mutant.kind,
        says=str(mutant),
        commands=mutant.commands,
        achieved=run.achieved,
        score=run.score,
        equal=not differences,
        needless=run.writes != target.writes,
        differences=tuple(differences[:_SHOWN]),
        sent=run.sent,
        failed=run.failed,
    )


@dataclass
class Run:
    """Records an episode: whether it was achieved, its return, the writes that succeeded, how many commands were sent
    and failed, and whether the simulator was lost over one."""

    achieved: bool = False
    score: float = 0.0
    writes: tuple[str, ...] = ()
    sent: int = 0
    failed: int = 0
    lost: bool = False


def perform(episode: Episode, task: Task, commands: Sequence[str]) -> Run:
    """Set the task up without chaos and send commands until it is done."""
    run = Run(achieved=episode.reset(task, chaos=False).observation["task_achieved"])
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


def _filled(episode: Episode, command: str) -> str:
    try:
        return episode.fill([command])[0]
    except CaptureError:  # the set-up's answer has no such field: the command fails as a person's would
        return command


def _target(episode: Episode, task: Task) -> _Target:
    services = _services(task.solution) | {command.service for command in task.setup if command.service}
    episode.reset(task, chaos=False)
    start = _said(episode, services)
    run = perform(episode, task, task.solution)
    return _Target(services, start, _said(episode, services), run.writes)


def _services(commands: Iterable[str]) -> frozenset[str]:
    names = (command.split()[1] for command in commands if len(command.split()) > 1)
    return frozenset(_API_SERVICES.get(name, name) for name in names)


def _said(episode: Episode, services: Iterable[str]) -> frozenset[Said]:
    """Return what the describe calls tell of the account once it is settled."""
    for _ in range(_SETTLE_TRIES):
        said = told(walk(episode.slot.state.call, services))
        if not any(one.value.strip('"').lower() in _UNDER_WAY for one in said):
            break
        time.sleep(_SETTLE_S)
    return said
