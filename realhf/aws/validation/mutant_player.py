"""Plays a mutant as an agent would and asks three judges: the grader, the comparison of whole states, and a walk over
every describe call.

The grader's verdict is that of the played episode. The state is compared with the *target*, the account as the solution
leaves it, made once for each instance.
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
    """Records what came of one mutant. ``differences``: of the whole states; ``answers``: of the describe calls, told
    apart only for a mutant that was paid; both are cut short. ``sent`` counts commands, ``failed`` those that failed.
    """

    task_id: int
    seed: int
    kind: str
    says: str
    commands: tuple[str, ...]
    achieved: bool
    equal: bool
    differences: tuple[str, ...]
    answers: tuple[str, ...]
    sent: int
    failed: int

    @property
    def wrongly_paid(self) -> bool:
        """Return whether the grader paid for another state."""
        return self.achieved and not self.equal

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
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


@dataclass(frozen=True)
class _Target:
    """Holds what the solution leaves, as the describe calls tell it: of ``services``."""

    services: frozenset[str]
    said: frozenset[Said]


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
    achieved, sent, failed, lost = perform(episode, task, mutant.commands)
    said = frozenset() if lost else _said(episode, target.services | _services(mutant.commands))
    differences = disagreements(target.said, said)[:_SHOWN]
    return Played(
        task.task_id,
        task.seed,
        mutant.kind,
        str(mutant),
        mutant.commands,
        achieved,
        not differences and not lost,
        tuple(differences),
        (),
        sent,
        failed,
    )


def perform(episode: Episode, task: Task, commands: Sequence[str]) -> tuple[bool, int, int, bool]:
    """Set the task up without chaos and send commands until it is done; returns (achieved, commands sent, commands that
    failed, whether the simulator was lost over one)."""
    achieved = episode.reset(task, chaos=False).observation["task_achieved"]
    outputs: list[str] = []
    failed, lost = 0, False
    for command in commands:
        if episode.done:
            break
        seen = episode.step(resolve(_filled(episode, command), outputs)).observation
        outputs.append(seen["command_output"])
        failed += not seen["command_success"]
        achieved, lost = seen["task_achieved"], lost or seen.get("simulator_lost", False)
    return achieved, len(outputs), failed, lost


def _filled(episode: Episode, command: str) -> str:
    try:
        return episode.fill([command])[0]
    except CaptureError:  # the set-up's answer has no such field: the command fails as a person's would
        return command


def _target(episode: Episode, task: Task) -> _Target:
    services = _services(task.solution) | {command.service for command in task.setup if command.service}
    perform(episode, task, task.solution)
    return _Target(services, _said(episode, services))


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
