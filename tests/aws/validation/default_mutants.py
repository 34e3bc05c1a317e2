"""Generates mutants that give what AWS takes where nobody says anything: they are to be paid. What
that is comes from the grader's table, how it is given from botocore's models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.model import Shape

from realhf.aws.grading.meanings import DOCUMENT, known_defaults
from realhf.aws.real_aws.describe_walker import element, members
from realhf.aws.tasks.task import Task
from tests.aws.validation.command_line import CommandLine, option_shapes
from tests.aws.validation.field_changes import parsed_options, with_member
from tests.aws.validation.mutant import Mutant, replaced
from tests.aws.validation.play import is_look
from tests.aws.validation.resource_deeds import cli_service

Path = tuple[str | int, ...]
_DEPTH = 5
_ATTRIBUTES = "attributes"
_STEM = 5
"""Letters that nouns and verbs of one thing share: subscriptions, subscribe."""
_REFERENCE = re.compile(r"\{([^{}]+)\}")
_WHOLE = frozenset({"PasswordPolicy"})
"""Structures of which AWS takes another whole where they are left out than members where these
are."""


def given_defaults(task: Task) -> Iterator[Mutant]:
    """Yield the solution with one default given that a command of it leaves out."""
    for place, line in enumerate(task.solution):
        command = CommandLine.parse(line)
        if is_look(line):
            continue
        shapes = option_shapes(command.service, command.operation)
        options = parsed_options(command, shapes)
        for kind, rows in known_defaults().items():
            if cli_service(kind.partition("/")[0]) != command.service:
                continue
            for row in rows:
                if not _may_be_given(row["path"], kind, command.operation):
                    continue
                value = _value(row, options)
                for path in (
                    _paths(shapes, options, row["path"].replace("[]", "").split("/"), ())
                    if value
                    else ()
                ):
                    about = f"command {place + 1}"
                    what = ".".join(map(str, path))
                    changed = with_member(line, path, value)
                    if changed:
                        commands = replaced(task.solution, place, changed)
                        yield Mutant(
                            "defaults", kind, about, f"{what} = {value}", commands, "paid", (place,)
                        )


def _may_be_given(path: str, kind: str, operation: str) -> bool:
    """Return whether an operation may give what stands at a path: what a document says is no
    option, and attributes are those of the thing that the operation is about."""
    service, _, records = kind.partition("/")
    if DOCUMENT in path or (
        service == "s3" and records != "buckets" and records.replace("_", "-") not in operation
    ):
        return False  # a setting of a bucket is none of its objects
    holders = [kind.rpartition("/")[2], *path.replace("[]", "").split("/")]
    if _ATTRIBUTES not in holders:
        return True
    return holders[holders.index(_ATTRIBUTES) - 1][:_STEM] in operation


def _value(row: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return the default that holds with these options, "" for none."""
    for path, value in row.get("where", {}).items():
        if str(_found(options, path.split("/")[-1]) or "") != value:
            return ""
    missing = False

    def found(reference: re.Match[str]) -> str:
        nonlocal missing
        value = _found(options, reference[1].split("/")[-1])
        missing = missing or value is None
        return str(value)

    usual = _REFERENCE.sub(found, row["is"])
    return "" if missing else usual


def _found(value: Any, name: str) -> Any:
    """Return the member of this name, however deep it lies; None where there is none."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return None
    for key, item in value.items():
        if _plain(key) == _plain(name):
            return item
    return next(
        (found for item in value.values() if (found := _found(item, name)) is not None), None
    )


def _plain(name: object) -> str:
    return str(name).replace("-", "").lower()


def _paths(
    shapes: Mapping[str, Shape], given: Any, steps: Sequence[str], path: Path
) -> Iterator[Path]:
    """Yield where a member of this name is missing, in what is given or in what may be given."""
    if len(path) > _DEPTH:
        return
    for name, shape in shapes.items():
        here = given.get(name) if isinstance(given, Mapping) else None
        inner = element(shape)
        if _plain(name) == _plain(steps[-1]) and inner is None and not members(shape):
            if here is None and (
                len(steps) == 1 or not path or _plain(path[-1]) in map(_plain, steps)
            ):
                yield (*path, name)
        elif (
            shape.type_name == "map"
            and _plain(name) == "attributes"
            and "attributes" in map(_plain, steps)
        ):
            if steps[-1] not in (here or {}):
                yield (*path, name, steps[-1])
        elif inner is not None and shape.type_name == "list" and isinstance(here, list) and here:
            yield from _paths(members(inner), here[0], steps, (*path, name, 0))
        elif members(shape) and (here is not None or name not in _WHOLE):
            yield from _paths(members(shape), here, steps, (*path, name))
