"""Generates plays that do nothing for the task: a harmless look, the set-up once more, and the whole task done well on
resources of the agent's own, made for it with other names."""

from __future__ import annotations

import random
from collections.abc import Iterator

from realhf.aws.tasks.names import draw_name, is_name
from realhf.aws.tasks.task import SetupCommand, Task
from realhf.aws.validation.plays.command_line import as_steps, line_of, moved
from realhf.aws.validation.plays.play import Play

LOOK = "aws sts get-caller-identity"


def nothing_plays(task: Task) -> Iterator[Play]:
    """Yield a look; and, where the set-up is not what the task wants, every request of the set-up again and then a
    look."""
    yield Play("nothing", "looks", (LOOK,))
    if task.setup and not task.possible_drifts:
        again = tuple(as_steps(line_of(command)) for command in task.setup)
        yield Play("nothing", "makes the set-up again", (*again, LOOK), needs="none")


def unrelated_plays(task: Task) -> Iterator[Play]:
    """Yield the canonical solution on resources of the agent's own. What the set-up and the drifts do to the task's
    resources is done to those first."""
    own = own_names(task)
    world = [*task.setup, *task.possible_drifts]
    lines = [as_steps(_own_line(command, own)) for command in world]
    lines += [as_steps(_renamed(moved(command, len(world)), own)) for command in task.solution]
    yield Play("unrelated", "on own resources", tuple(lines))


def own_names(task: Task) -> dict[str, str]:
    """Return a name of the agent's own for each drawn name of the task."""
    rng = random.Random(f"own resources:{task.task_id}:{task.seed}")
    return {name: draw_name(rng, "train") for name in map(str, task.params.values()) if is_name(name)}


def _renamed(line: str, own: dict[str, str]) -> str:
    for name, other in own.items():
        line = line.replace(name, other)
    return line


def _own_line(command: SetupCommand, own: dict[str, str]) -> str:
    """Return a set-up command as a line about own resources. An agent has no file to upload, so it copies the
    set-up's."""
    if (command.service, command.operation) == ("s3", "PutObject") and "Body" in command.params:
        bucket, key = str(command.params["Bucket"]), str(command.params["Key"])
        return f"aws s3api copy-object --bucket {_renamed(bucket, own)} --key {key} --copy-source {bucket}/{key}"
    return _renamed(line_of(command), own)
