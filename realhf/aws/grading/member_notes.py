"""Reads what ``member_notes.yaml`` says by hand of the members of requests, and checks it against botocore's models."""

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
"""Stands, in place of an operation, for all of them, and in a path for any key of a map."""
_PAGES = "https://docs.aws.amazon.com/"
_KEYS = frozenset({"operation", "member", "value", "page"})
_CONDITION = "where"
"""Key of what has to be sent beside, by member, for a default to be that one."""


@dataclass(frozen=True)
class Notes:
    """Holds what no request can show."""

    defaults: Mapping[tuple[str, str], Any]
    """By operation and path, the value that AWS documents for a member that is not sent."""
    conditional: tuple[Mapping[str, Any], ...]
    """Defaults that depend on other members: rows of the file with ``where``."""
    steering: Mapping[str, frozenset[str]]
    """By operation, paths of members that only steer the request."""
    texts: Mapping[str, frozenset[str]]
    """By operation, paths of members that only describe: free texts and tags."""
    uses: frozenset[str]
    """Operations that only use a resource."""

    def steers(self, operation: str, path: str) -> bool:
        """Return whether a member only steers the request."""
        return path in self.steering.get(operation, ()) or path in self.steering.get(EVERY, ())

    def is_text(self, operation: str, path: str) -> bool:
        """Return whether a member only describes."""
        return path in self.texts.get(operation, ()) or path in self.texts.get(EVERY, ())


NOTES = Path(__file__).with_name("member_notes.yaml")
"""The notes that come with the package."""


@cache
def read_notes(file: Path = NOTES) -> Notes:
    """Return the notes in a file, unchecked."""
    found = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return Notes(
        {(note["operation"], note["member"]): note["value"] for note in found["defaults"] if _CONDITION not in note},
        tuple(note for note in found["defaults"] if _CONDITION in note),
        {operation: frozenset(paths) for operation, paths in found["steering"].items()},
        {operation: frozenset(paths) for operation, paths in found["texts"].items()},
        frozenset(found["uses"]),
    )


def check_notes(file: Path = NOTES) -> None:
    """Check notes against botocore's models, which takes a second. Raises TaskError that names file and line of what is
    no note: a default of a member that the model does not have, or without a link to a page of AWS."""
    text = file.read_text(encoding="utf-8")
    found = yaml.load(text, Loader=yaml.CSafeLoader)
    for line, problem in _problems(found, yaml.compose(text, Loader=yaml.CSafeLoader)):
        raise TaskError(f"{file}:{line}: {problem}")


def _problems(found: Any, root: Any) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong with it)."""
    nodes = {name.value: value for name, value in root.value}
    for note, node in zip(found["defaults"], nodes["defaults"].value, strict=True):
        line = node.start_mark.line + 1
        if set(note) - {_CONDITION} != _KEYS:
            yield line, f"a default has {', '.join(sorted(_KEYS))}, this one {', '.join(sorted(note))}"
        elif not str(note["page"]).startswith(_PAGES):
            yield line, f"the default of {note['operation']} {note['member']} has no link to a page of {_PAGES}"
        for member in (note.get("member", ""), *note.get(_CONDITION, ())):
            if member and not has_member(note["operation"], member):
                yield line, f"botocore's model of {note['operation']} has no member {member}"
    for part in ("steering", "texts"):
        for (operation, paths), (name, _) in zip(found[part].items(), nodes[part].value, strict=True):
            for path in paths:
                if operation != EVERY and not has_member(operation, path):
                    yield name.start_mark.line + 1, f"botocore's model of {operation} has no member {path}"
    for operation, node in zip(found["uses"], nodes["uses"].value, strict=True):
        if operation_model(operation) is None:
            yield node.start_mark.line + 1, f"botocore knows no operation {operation}"


def has_member(operation: str, path: str) -> bool:
    """Return whether botocore's model of an operation, "service:Operation", has a member at a path."""
    shape: Any = getattr(operation_model(operation), "input_shape", None)
    for step in path.replace("[]", ".[]").split("."):
        kind = getattr(shape, "type_name", "")
        inner = {"list": "member", "map": "value"}.get(kind, "") if step == "[]" or kind == "map" else ""
        shape = getattr(shape, inner, None) if inner else getattr(shape, "members", {}).get(step)
    return shape is not None


@cache
def operation_model(operation: str) -> Any:
    """Return botocore's model of an operation, "service:Operation"; None for an unknown one. Its attributes have no
    types."""
    service, _, name = operation.partition(":")
    try:
        return _session().get_service_model(service).operation_model(name)
    except (UnknownServiceError, OperationNotFoundError):
        return None


_session = cache(botocore.session.Session)
