"""Describes a mutant: command lines that are nearly the solution of a task, and what is known of
them before they are played."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from botocore import xform_name

from realhf.aws.real_aws.describe_walker import members
from realhf.aws.tasks.loader import is_name, whole_state
from realhf.aws.tasks.task import SetupCommand, Task
from tests.aws.validation.command_line import (
    CommandLine,
    operation_model,
    option_of,
    option_shapes,
    renumbered,
)
from tests.aws.validation.field_changes import Words, parsed_options
from tests.aws.validation.resource_deeds import Request, cli_service, identities

Kind = Literal[
    "field", "order", "neighbour", "damage", "blind", "beside", "members", "defaults", "companions"
]
KINDS: tuple[Kind, ...] = (
    *("field", "order", "neighbour", "damage", "blind"),
    *("beside", "members", "defaults", "companions"),
)
Expected = Literal["paid", "unpaid", ""]
"""Whether a mutant is to be paid, "" where only the state that it leaves can say."""


@dataclass(frozen=True)
class Mutant:
    """Holds command lines that an agent could send, captures unfilled. ``about``, ``place`` and
    ``what`` say in words how they differ from the solution: which part, where in it ("" for the
    whole), and what became of it."""

    kind: Kind
    about: str
    place: str
    what: str
    commands: tuple[str, ...]
    expected: Expected = ""
    """What is known of it by how it was made, if each command of ``proof`` succeeds."""
    proof: tuple[int, ...] = ()
    """Places in ``commands``."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.about}{self.place and ' '}{self.place}: {self.what}"


def words_of(task: Task) -> Words:
    """Return the names, ARNs and captures that a task speaks of."""
    world = [*task.setup, *task.decoys, *task.possible_drifts]
    names = [str(value) for value in task.params.values() if is_name(value)]
    names += [text for command in world for text in _names(command.params)]
    texts = [
        *task.solution,
        *whole_state(task),
        *(json.dumps(command.params, default=str) for command in world),
    ]
    texts += [f"${{setup{number}:{path}}}" for number, path in _answered(task.setup)]
    return Words.of(texts, names)


def _answered(setup: Iterable[SetupCommand]) -> Iterator[tuple[int, str]]:
    """Yield (number, path) of every id, ARN and URL in the answers to a set-up."""
    for number, command in enumerate(setup, 1):
        model = operation_model(cli_service(command.service), xform_name(command.operation, "-"))
        for name, path in identities(model) if model else ():
            if not name.lower().endswith("name"):
                yield number, path


def _names(params: Mapping[str, Any]) -> Iterator[str]:
    for member, value in params.items():
        if (
            isinstance(value, str)
            and member.lower().endswith(("name", "bucket", "key"))
            and "${" not in value
        ):
            yield value


def request_of(line: str, answer: str) -> Request:
    """Return the request that a command sends, its parameters by their API names as far as the
    model knows them."""
    command = CommandLine.parse(line)
    options = parsed_options(command, option_shapes(command.service, command.operation))
    model = operation_model(command.service, command.operation)
    known = members(model.input_shape) if model else ()
    named = {option_of(command.service, command.operation, member): member for member in known}
    params = {named[option]: value for option, value in options.items() if option in named}
    return Request(command.service, command.operation, params, answer)


def inserted(lines: Sequence[str], place: int, extra: Sequence[str]) -> tuple[str, ...]:
    """Return the commands with others before the one at ``place``; captures follow the commands
    that they refer to."""
    places = {
        number: number + (len(extra) if number > place else 0) for number in range(len(lines) + 1)
    }
    kept = [renumbered(line, places) for line in lines]
    return (*kept[:place], *extra, *kept[place:])


def replaced(lines: Sequence[str], place: int, line: str) -> tuple[str, ...]:
    return (*lines[:place], line, *lines[place + 1 :])
