"""Plays against the grader: what a person wrote, the score that its class may earn, and what came
of it when played.

What goes wrong is generated in ``mutants``, other spellings of a solution in ``equivalent``. What a
person wrote is in ``plays/<tier>.yaml``, by the task's number.

    413:
      harmful:
        - name: revokes the live rule
          commands: [...]
          needs: one

Places and captures are as in a task's solution; ``needs`` is as in ``Play``, "all" unless said.
Instead of commands, a play may say which texts of the solution it ``change``s; ``where`` keeps it
to the instances with these parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import yaml

from realhf.aws.episode.episode import Episode
from realhf.aws.grading.snapshot import Snapshot, take_snapshot
from realhf.aws.tasks.captures import CaptureError, resolve
from realhf.aws.tasks.loader import fill, instantiate, with_drifts
from realhf.aws.tasks.task import Task, TaskError

Kind = Literal["nothing", "unrelated", "harmful", "overdone", "equivalent"]
KINDS: tuple[Kind, ...] = ("nothing", "unrelated", "harmful", "overdone", "equivalent")
ASKED: Mapping[Kind, str] = MappingProxyType(
    {
        "nothing": "0",
        "unrelated": "0",
        "harmful": "at most 0",
        "overdone": "below 1",
        "equivalent": "1",
    }
)
"""For each class of plays, the score that it must earn."""

Needs = Literal["all", "one", "none", "all or skip"]


_KEYS = frozenset({"name", "commands", "change", "needs", "where"})


@dataclass(frozen=True)
class Play:
    """Holds a command list with the class that its score is judged by. Captures refer to its own
    commands and to the set-up.

    ``needs`` says how many of the commands must succeed for the play to prove anything: "all",
    "one" or "none"; "all or skip" is for a variant that the simulator may not know: where a command
    fails, the play counts as skipped. ``written``: a person wrote it; the other plays are generated
    from the canonical solution and the set-up.
    """

    kind: Kind
    name: str
    commands: tuple[str, ...]
    needs: Needs = "all"
    written: bool = False


@dataclass(frozen=True)
class Outcome:
    """Records what a play earned. ``failures`` are the commands that failed, with their errors;
    ``sent`` counts commands."""

    play: Play
    achieved: bool
    score: float
    sent: int
    failures: tuple[str, ...]

    @property
    def skipped(self) -> bool:
        """Return whether the play is void, because the simulator does not know the variant that it
        tries."""
        return self.play.needs == "all or skip" and bool(self.failures)

    @property
    def problem(self) -> str:
        """Say what is wrong, "" for an outcome within the bounds of its class."""
        if self.skipped:
            return ""
        if not self._within_bounds():
            failed = f"; failed: {'; '.join(self.failures)}" if self.failures else ""
            return f"scored {self.score:.3f}, asked {ASKED[self.play.kind]}{failed}"
        if self.play.needs == "all" and self.failures:
            return f"proves nothing, for a command failed: {self.failures[0]}"
        if self.play.needs == "one" and len(self.failures) >= self.sent:
            return (
                f"proves nothing, for every command failed: "
                f"{self.failures[0] if self.failures else 'none was sent'}"
            )
        return ""

    def _within_bounds(self) -> bool:
        match self.play.kind:
            case "equivalent":
                return self.achieved and self.score == 1.0
            case "overdone":
                return not self.achieved and self.score < 1.0
            case "harmful":
                return not self.achieved and self.score <= 0.0
            case _:
                return not self.achieved and self.score == 0.0


@dataclass
class Run:
    """Records an episode: the account after set-up, whether it was achieved, its return, how many
    commands were sent, the writes that succeeded, the commands that failed with their errors and
    their places, and whether the simulator was lost."""

    start: Snapshot
    achieved: bool
    score: float = 0.0
    sent: int = 0
    writes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    lost: bool = False
    failed: frozenset[int] = frozenset()


def run_commands(
    episode: Episode, task: Task, commands: Sequence[str], drifts: Sequence[int] | None = None
) -> Run:
    """Set the task up without chaos, with these drifts (None: those that its seed draws), and send
    commands until it is done. Raises what ``Episode.reset`` and ``step`` raise."""
    achieved = episode.reset(task, chaos=False, drifts=drifts).observation["task_achieved"]
    run = Run(take_snapshot(episode.slot), achieved)
    outputs = list[str]()
    for place, command in enumerate(commands):
        if episode.done:
            break
        # without such a field in the set-up's answer it fails, as a person's would
        with suppress(CaptureError):
            command = episode.fill([command])[0]
        line = resolve(command, outputs)
        step = episode.step(line)
        seen = step.observation
        outputs.append(seen["command_output"])
        run.sent += 1
        run.achieved, run.score = seen["task_achieved"], run.score + step.reward
        run.lost = run.lost or seen.get("simulator_lost", False)
        if not seen["command_success"]:
            run.failures += (f"{line}: {' '.join(seen['error'].split())[:160]}",)
            run.failed |= {place}
        elif not is_look(line):
            run.writes += (line,)
    return run


def is_look(line: str) -> bool:
    """Return whether a command only looks."""
    words = line.split()
    return len(words) > 2 and words[2].startswith(
        ("describe-", "get-", "list-", "head-", "ls", "batch-get-")
    )


def perform(episode: Episode, task: Task, play: Play) -> Outcome:
    """Play against the task with all drifts that it may have."""
    drifts = range(len(task.possible_drifts)) if task.possible_drifts else None
    run = run_commands(episode, task, play.commands, drifts)
    return Outcome(play, run.achieved, run.score, run.sent, run.failures)


def written_plays(task: Task) -> list[Play]:
    """Return the plays written for this task, places filled. Raises TaskError for a malformed
    entry."""
    found = []
    for kind in KINDS:
        for entry in _entries().get(task.task_id, {}).get(kind, ()):
            needs = entry.get("needs", "all")
            if (
                set(entry) - _KEYS
                or not ("commands" in entry) ^ ("change" in entry)
                or needs not in get_args(Needs)
            ):
                raise TaskError(
                    f"plays of task {task.task_id}: malformed {kind} play {entry.get('name')!r}"
                )
            if not (where := entry.get("where", {})).keys() <= task.params.keys():
                raise TaskError(
                    f"plays of task {task.task_id}: {entry['name']!r} asks for other parameters: "
                    f"{where}"
                )
            if any(str(task.params[name]) != value for name, value in where.items()):
                continue
            commands = tuple(fill(list(entry.get("commands") or ()), task.params)) or _changed(
                task, entry["change"]
            )
            found.append(Play(kind, entry["name"], commands, needs, written=True))
    return found


def _changed(task: Task, change: Mapping[str, str]) -> tuple[str, ...]:
    """Return the solution with texts replaced. Raises TaskError for one that it does not have."""
    found = "\n".join(task.solution)
    for old, new in (fill(list(pair), task.params) for pair in change.items()):
        if old not in found:
            raise TaskError(f"plays of task {task.task_id}: the solution has no {old!r}")
        found = found.replace(old, new)
    return tuple(found.split("\n"))


def written_ids() -> frozenset[int]:
    """Return the tasks that have an entry."""
    return frozenset(_entries())


class _OneOfEach(yaml.CSafeLoader):
    """Refuses a key that a map has twice, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            raise TaskError(f"{node.start_mark}: a key is there twice")
        return found


@cache
def _entries() -> dict[int, Mapping[str, Any]]:
    entries: dict[int, Mapping[str, Any]] = {}
    for file in sorted(Path(__file__).with_name("plays").glob("*.yaml")):
        for task_id, entry in (yaml.load(file.read_text(), Loader=_OneOfEach) or {}).items():
            unknown = set(entry) - set(KINDS)
            if unknown or task_id in entries:
                raise TaskError(
                    f"{file.name}: task {task_id} is there twice or has an unknown class {unknown}"
                )
            entries[task_id] = entry
    return entries


def instance_to_play(template_id: int, seed: int) -> Task:
    """Return the instance that plays are made of: a drift task with every drift that it may have,
    and their repairs."""
    task = instantiate(template_id, seed)
    return with_drifts(task, range(len(task.possible_drifts)))
