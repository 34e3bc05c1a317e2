"""What scripted agents do in demonstrations: the kinds of trajectories and their commands.

- *canonical*: the solution, nothing else.
- *continuation*: a solution of which the first steps are context and only the rest is to be learned.
- *recovery*: a mistake, what came of it, and then the right way.
- *verification*: a look at the account before the last step.
- *hint*: a hint is asked for first.
- *habit*: a mistake that is stuck to (nothing achieved): what a policy with room for improvement also does.

A mistake is one of the template's own or one that is possible everywhere: the last word of a name is left out.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from botocore import xform_name
from botocore.session import Session

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.episode.hints import HINT_COMMAND
from realhf.aws.tasks.loader import instantiate, load_templates, mistakes
from realhf.aws.tasks.names import is_name
from realhf.aws.tasks.task import Task

CANONICAL, CONTINUATION, RECOVERY = "canonical", "continuation", "recovery"
VERIFICATION, HINT, HABIT = "verification", "hint", "habit"
KINDS = (RECOVERY, HABIT, VERIFICATION, HINT, CONTINUATION, CANONICAL)
DEFAULT_MIX: Mapping[str, float] = MappingProxyType({CONTINUATION: 0.2, RECOVERY: 0.15, VERIFICATION: 0.05, HINT: 0.05})
"""Shares of the trajectory types; the rest is canonical."""
SHORTENED_SHARE = 0.6
"""Share of the mistakes that shorten a name; the others are the template's."""
PERSISTENCE = 3
"""Least number of commands of a habit episode: its last command is sent again."""
_SEED_BITS = 31


@dataclass(frozen=True)
class Line:
    """Is one command. ``number`` is its place (from 1) in the list that its captures refer to, 0 for one of no list;
    ``learned``: whether a trainer should imitate it."""

    command: str
    number: int = 0
    learned: bool = True


@dataclass(frozen=True)
class Script:
    """Is one episode to be played: the task and the lines of the scripted agent."""

    task: Task
    kind: str
    lines: tuple[Line, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """The command lines alone."""
        return tuple(line.command for line in self.lines)


def write_scripts(
    episodes_per_task: int,
    seed: int,
    tiers: Sequence[str] | None = None,
    *,
    tags: Sequence[str] = (),
    split: str = "train",
    mix: Mapping[str, float] = MappingProxyType({}),
    learn_mistakes: bool = False,
) -> list[Script]:
    """Return the episodes to play, shuffled, decided by ``seed``.

    Each template has exactly the rounded shares of each kind in ``mix``, the rest canonical. A template to which a kind
    cannot be applied (continuation of one step) gets canonical ones instead. ``split`` chooses templates, never rows.
    ``learn_mistakes``: the mistakes that are recovered from are to be imitated too. Raises ValueError for an impossible
    mix.
    """
    unknown = set(mix) - set(KINDS)
    if unknown:
        raise ValueError(f"unknown kind {sorted(unknown)[0]!r} in the mix; known: {', '.join(sorted(KINDS))}")
    if any(share < 0 for share in mix.values()) or sum(mix.values()) > 1 + 1e-9:
        raise ValueError("the mix holds shares of one: not negative, together at most 1")
    rng = random.Random(f"sft:{seed}")
    counted = [kind for kind in KINDS for _ in range(round(mix.get(kind, 0.0) * episodes_per_task))]
    kinds = (counted + [CANONICAL] * episodes_per_task)[:episodes_per_task]
    scripts = []
    for template in load_templates(tiers, tags=tags, split=split):
        for kind in kinds:
            task = instantiate(template.task_id, rng.getrandbits(_SEED_BITS))
            scripts.append(write_script(task, kind, rng, learn_mistakes=learn_mistakes))
    rng.shuffle(scripts)
    return scripts


def write_script(task: Task, kind: str, rng: random.Random, *, learn_mistakes: bool = False) -> Script:
    """Return one episode of this kind, or a canonical one where the task does not allow the kind."""
    solution = numbered(task.solution)
    if kind == HABIT:
        wrong, _ = _mistake(task, rng, any_way_back=False)
        return Script(task, kind, numbered(wrong + wrong[-1:] * (PERSISTENCE - len(wrong))))
    if kind == RECOVERY:
        wrong, right = _mistake(task, rng, any_way_back=True)
        return Script(task, kind, numbered(wrong, learned=learn_mistakes) + numbered(right))
    if kind == HINT:
        return Script(task, kind, (Line(HINT_COMMAND), *solution))
    if kind == VERIFICATION:
        return Script(task, kind, (*solution[:-1], Line(look_command(task)), solution[-1]))
    if kind == CONTINUATION and len(solution) > 1:
        cut = rng.randrange(1, len(solution))
        return Script(task, kind, numbered(task.solution[:cut], learned=False) + solution[cut:])
    return Script(task, CANONICAL, solution)


def numbered(commands: Sequence[str], *, learned: bool = True) -> tuple[Line, ...]:
    """Return the lines of one list, whose captures refer to each other."""
    return tuple(Line(command, number, learned) for number, command in enumerate(commands, start=1))


def _mistake(task: Task, rng: random.Random, *, any_way_back: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands of a wrong way, and of the way back."""
    written = [mistake for mistake in mistakes(task) if mistake.recovery or not any_way_back]
    if rng.random() < SHORTENED_SHARE or not written:
        wrong = with_short_names(task)
        if any_way_back:
            wrong = wrong[:1] if wrong[0] != task.solution[0] else (_misspelt(wrong[0]),)
        return wrong, task.solution
    mistake = rng.choice(written)
    return mistake.commands, mistake.recovery


def with_short_names(task: Task) -> tuple[str, ...]:
    """Return the solution with the last word of every drawn name left out; where no command has a drawn name (it may
    use identifiers alone), with the last letter of its operations left out."""
    drawn = [value for value in task.params.values() if is_name(value)]
    commands = task.solution
    for value in drawn:
        commands = tuple(command.replace(value, value.rpartition("-")[0]) for command in commands)
    return commands if commands != task.solution else tuple(_misspelt(command) for command in commands)


def _misspelt(command: str) -> str:
    words = command.split(" ")
    return " ".join([*words[:2], words[2][:-1], *words[3:]])


def look_command(task: Task) -> str:
    """Return a listing of the service that the task's last step is about, or its help where the listing is the task."""
    service = task.solution[-1].split()[1]
    listing = _listing("s3api" if service == "s3" else service)
    return listing if listing and listing not in task.solution else f"aws {service} help"


@functools.cache
def _listing(service: str) -> str:
    """Return a command of this CLI service that lists something and needs no argument, "" where there is none."""
    model: Any = Session().get_service_model("s3" if service == "s3api" else service)
    needs: dict[str, Any] = {
        xform_name(name, "-"): model.operation_model(name).input_shape for name in model.operation_names
    }
    looks = sorted(
        (op for op in ALLOWED[service] if op.startswith(("list-", "describe-")) and op in needs),
        key=lambda op: (op.startswith("describe-"), op),
    )
    free = [op for op in looks if needs[op] is None or not needs[op].required_members]
    return f"aws {service} {free[0]}" if free else ""
