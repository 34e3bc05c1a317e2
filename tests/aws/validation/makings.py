"""Finds command lines by which something is made: for each operation that makes something, how the
solutions and set-ups of all tasks send it, with what they need before; for the others, what
botocore's model demands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.real_aws.describe_walker import members, required_members
from realhf.aws.tasks.loader import instantiate, is_name, load_templates, whole_state
from realhf.aws.tasks.task import TIERS
from tests.aws.validation.command_line import (
    CommandLine,
    as_steps,
    captured_steps,
    moved,
    operation_model,
    option_of,
    option_words,
    renumbered,
    sendable,
)
from tests.aws.validation.field_changes import Words, samples
from tests.aws.validation.resource_deeds import identities

MAKES = re.compile(
    r"(create|put|register|request|run|allocate|subscribe|verify|copy|import|publish-version|add|attach|associate"
    r"|authorize|change-resource|mb)(-|$)"
)
"""Operations that may leave something behind."""
MAKES_ANEW = re.compile(r"(create|run|allocate|request|register|mb)(-|$)")
"""Operations that leave something behind even where they name nothing."""
_USES_OR_TAGS = re.compile(r"put-(events|records?|metric-data|log-events)$|tag|copy-object$")
_OWN_NAME = re.compile(r"(name|identifier|bucket|alias)$", re.IGNORECASE)
_PART = re.compile(r"(Name|Id|Arn|Identifier|Url)$")
_MADE_UP = "made-up-name"
_LONGEST = 8
"""Most commands that something is made by."""


@dataclass(frozen=True)
class Making:
    """Holds command lines of which the last makes something, and the others what it needs; captures
    refer to these lines. ``names``: names in them that somebody chose."""

    lines: tuple[str, ...]
    names: tuple[str, ...]

    def called(self, name: str) -> tuple[str, ...]:
        """Return the lines with another name instead of theirs."""
        lines = self.lines
        for number, old in enumerate(self.names):
            lines = tuple(
                line.replace(old, f"{name}-{number}" if number else name) for line in lines
            )
        return lines


def makings(service: str, most: int) -> Iterator[tuple[str, Making]]:
    """Yield (operation, how it is sent) for what the command line may make in a service, the
    shortest ways first."""
    for operation in sorted(ALLOWED.get(service, ())):
        if not MAKES.match(operation) or _USES_OR_TAGS.search(operation):
            continue
        known = _written().get((service, operation), ())
        yield from ((operation, making) for making in known[:most])
        made_up = None if known else _made_up(service, operation)
        if made_up is not None:
            yield operation, made_up


@cache
def _written() -> Mapping[tuple[str, str], list[Making]]:
    """Return how tasks send each operation, by the command line's names of service and
    operation."""
    found: dict[tuple[str, str], dict[Making, None]] = {}
    for template in load_templates(TIERS[1:]):
        task = instantiate(template.task_id, 0)
        setup = [sendable(command) for command in task.setup]
        solution = whole_state(task) if task.possible_drifts else task.solution
        names = [str(value) for value in task.params.values() if is_name(value)]
        for solved in (solution, *task.any_of):
            lines = [*map(as_steps, setup), *(as_steps(moved(line, len(setup))) for line in solved)]
            for making in _makings_in(lines, names):
                service, operation = making.lines[-1].split()[1:3]
                found.setdefault((service, operation), {}).setdefault(making)
    return {key: sorted(ways, key=lambda way: len(way.lines)) for key, ways in found.items()}


def _makings_in(lines: Sequence[str], names: Sequence[str]) -> Iterator[Making]:
    """Yield what the commands of a list make, each with those that it needs."""
    for place, line in enumerate(lines):
        words = line.split()
        if len(words) < 3 or not MAKES.match(words[2]):
            continue
        needed = sorted(_needed(lines, place))
        if len(needed) <= _LONGEST and all(lines[one] for one in needed):
            places = {old + 1: new + 1 for new, old in enumerate(needed)}
            kept = tuple(renumbered(lines[one], places) for one in needed)
            yield Making(kept, tuple(name for name in names if any(name in one for one in kept)))


def _needed(lines: Sequence[str], place: int) -> set[int]:
    """Return the places of a command and of those before it that it needs: whose answers it uses,
    and that make in the same service what it names."""
    line = lines[place]
    direct = {number - 1 for number in captured_steps(line)}
    direct |= {
        other for other in range(place) if lines[other] and _makes_what_it_names(lines[other], line)
    }
    return {place}.union(*(_needed(lines, other) for other in direct if other < place))


def _makes_what_it_names(maker: str, line: str) -> bool:
    service, operation = maker.split()[1:3]
    if service.removesuffix("api") != line.split()[1].removesuffix("api") or not MAKES.match(
        operation
    ):
        return False
    command = CommandLine.parse(maker)
    named = [
        value for option, values in command.options for value in values if _OWN_NAME.search(option)
    ]
    named += [value.removeprefix("s3://") for value in command.arguments]
    return any(
        len(name) > 2 and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", line)
        for name in named
    )


def _made_up(service: str, operation: str) -> Making | None:
    """Return a request with what the model demands and a name, behind those that make what it is
    about; None where no value can be made up."""
    model = operation_model(service, operation)
    if model is None:
        return None
    shapes = members(model.input_shape)
    noun = operation.partition("-")[2].replace("-", "")
    params: dict[str, Any] = {}
    before: list[str] = []
    texts = [member for member, shape in shapes.items() if shape.type_name == "string"]
    owned = [member for member in texts if _owner(service, member, operation)]
    for member in required_members(model.input_shape) or owned:
        owner = _owner(service, member, operation)
        values = samples(member, shapes[member], Words((_MADE_UP,), (), ()))
        if owner is not None:
            before.append(owner[0])
            params[member] = owner[1].format(len(before))
        elif values:
            params[member] = 1 if 1 in values else values[0]
        else:
            return None
    for member, shape in shapes.items():
        if shape.type_name == "string" and member.lower() in (
            "name",
            f"{noun}name",
            f"{noun}identifier",
        ):
            params[member] = _MADE_UP
    options = (
        option_words(option_of(service, operation, member), value)
        for member, value in params.items()
    )
    return Making((*before, " ".join(["aws", service, operation, *options])), (_MADE_UP,))


def _owner(service: str, member: str, operation: str) -> tuple[str, str] | None:
    """Return the line that makes what a member names, and its value, a capture with the line's
    number left open; None for what no single line makes."""
    noun = _PART.sub("", member)
    making = f"create-{xform_name(noun, '-')}"
    model = operation_model(service, making)
    if making == operation or model is None or (service, making) not in _written():
        return None
    way = _written()[service, making][0]
    if len(way.lines) > 1 or not way.names:
        return None
    line = way.called(_MADE_UP)[0]
    values = (values for _, values in CommandLine.parse(line).options)
    if member.lower().endswith(("name", "bucket")):
        named = any(value == (_MADE_UP,) for value in values)
        return (line, _MADE_UP) if named else None
    paths = (path for name, path in identities(model) if name == member)
    path = next(paths, "")
    return (line, f"${{{{step{{}}:{path}}}}}") if path else None
