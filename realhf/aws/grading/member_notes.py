"""Hand-written notes about request members (``member_notes.yaml``), and a check of the notes
against botocore's models.

A *member* is a parameter of an API request or a part of one, such as ``Tags.Key``. A member that
only controls a request and sets nothing, such as ``DryRun``, *steers* it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import yaml
from botocore.exceptions import UnknownServiceError
from botocore.model import OperationNotFoundError

from realhf.aws.tasks.task import TaskError

EVERY = "*"
"""Wildcard: all operations, where an operation is expected; any key of a map, in a path."""
_PAGES = "https://docs.aws.amazon.com/"
"""Required prefix of the links to the documentation of defaults."""
_KEYS = frozenset({"operation", "member", "value", "page"})
"""Required keys of an entry about a default."""
_CONDITION = "where"
"""Optional key of such an entry: other members, with their values, that must be sent for the
default to apply."""


@dataclass(frozen=True)
class Notes:
    """Facts about request members that no probe of the simulator can show."""

    defaults: Mapping[tuple[str, str], Any]
    """The value that AWS documents for a member that is not sent, by (operation, member path)."""
    conditional: tuple[Mapping[str, Any], ...]
    """Defaults that depend on other members: the entries of the file that have a ``where`` key."""
    steering: Mapping[str, frozenset[str]]
    """Paths of the members that only control how the request is carried out, such as ``DryRun``, by
    operation."""
    texts: Mapping[str, frozenset[str]]
    """Paths of the members that contain only descriptions or tags, by operation."""
    uses: frozenset[str]
    """Operations that use a resource without changing it."""

    def steers(self, operation: str, path: str) -> bool:
        """Return whether the request member at ``path`` only controls how the request is carried
        out, like ``DryRun``, and sets nothing on the resource."""
        return path in self.steering.get(operation, ()) or path in self.steering.get(EVERY, ())

    def is_text(self, operation: str, path: str) -> bool:
        """Return whether the request member at ``path`` contains only a description or a tag."""
        return path in self.texts.get(operation, ()) or path in self.texts.get(EVERY, ())


NOTES = Path(__file__).with_name("member_notes.yaml")
"""The package's notes file."""


@cache
def read_notes(file: Path = NOTES) -> Notes:
    """Return the notes in a file without checking them."""
    entries = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    defaults = entries["defaults"]
    return Notes(
        {
            (note["operation"], note["member"]): note["value"]
            for note in defaults
            if _CONDITION not in note
        },
        tuple(note for note in defaults if _CONDITION in note),
        {operation: frozenset(paths) for operation, paths in entries["steering"].items()},
        {operation: frozenset(paths) for operation, paths in entries["texts"].items()},
        frozenset(entries["uses"]),
    )


def check_notes(file: Path = NOTES) -> None:
    """Check the notes in a file against botocore's models, which takes about a second.

    Raises TaskError with file and line for an invalid note: one about a member that the model does
    not have, or a default without a link to the AWS documentation.
    """
    text = file.read_text(encoding="utf-8")
    entries = yaml.load(text, Loader=yaml.CSafeLoader)
    for line, problem in _find_problems(entries, yaml.compose(text, Loader=yaml.CSafeLoader)):
        raise TaskError(f"{file}:{line}: {problem}")


def _find_problems(entries: Any, root: Any) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) for each invalid note. ``root``: the YAML node tree of ``entries``."""
    nodes = {name.value: value for name, value in root.value}
    for note, node in zip(entries["defaults"], nodes["defaults"].value, strict=True):
        line = node.start_mark.line + 1
        if set(note) - {_CONDITION} != _KEYS:
            yield (
                line,
                f"a default has {', '.join(sorted(_KEYS))}, this one {', '.join(sorted(note))}",
            )
        elif not str(note["page"]).startswith(_PAGES):
            yield (
                line,
                f"the default of {note['operation']} {note['member']} has no link to a page of "
                f"{_PAGES}",
            )
        for member in (note.get("member", ""), *note.get(_CONDITION, ())):
            if member and not has_member(note["operation"], member):
                yield line, f"botocore's model of {note['operation']} has no member {member}"
    for part in ("steering", "texts"):
        for (operation, paths), (name, _) in zip(
            entries[part].items(), nodes[part].value, strict=True
        ):
            for path in paths:
                if operation != EVERY and not has_member(operation, path):
                    yield (
                        name.start_mark.line + 1,
                        f"botocore's model of {operation} has no member {path}",
                    )
    for operation, node in zip(entries["uses"], nodes["uses"].value, strict=True):
        if operation_model(operation) is None:
            yield node.start_mark.line + 1, f"botocore knows no operation {operation}"


def has_member(operation: str, path: str) -> bool:
    """Return whether botocore's model of an operation ("service:Operation") has a request member at
    ``path``."""
    shape: Any = getattr(operation_model(operation), "input_shape", None)
    for step in path.replace("[]", ".[]").split("."):
        kind = getattr(shape, "type_name", "")
        inner = (
            {"list": "member", "map": "value"}.get(kind, "")
            if step == "[]" or kind == "map"
            else ""
        )
        shape = getattr(shape, inner, None) if inner else getattr(shape, "members", {}).get(step)
    return shape is not None


@cache
def operation_model(operation: str) -> Any:
    """Return botocore's model of an operation ("service:Operation"), or None for an unknown
    operation.

    The type is Any because botocore's attributes are untyped.
    """
    service, _, name = operation.partition(":")
    try:
        return _session().get_service_model(service).operation_model(name)
    except (UnknownServiceError, OperationNotFoundError):
        return None


_session = cache(botocore.session.Session)
