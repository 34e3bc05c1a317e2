"""Says what members of resources mean, where their names alone do not: which texts only describe, which are tags, which
lists have an order.

All of it stands in ``meanings.yaml``, by service, kind and member; what stands nowhere there counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from realhf.aws.grading.snapshot import DOCUMENT, Key


@cache
def _tables() -> Mapping[str, Any]:
    text = resources.files("realhf.aws.grading").joinpath("meanings.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=yaml.CSafeLoader)


@cache
def _names(table: str) -> frozenset[str]:
    return frozenset(_tables()[table])


@cache
def _paths(table: str, kind: str) -> tuple[list[str], ...]:
    """Return the steps of each path that a table has for a kind ("service/kind")."""
    found = _tables()[table].get(kind, ())
    return tuple(path.split("/") for path in ([found] if isinstance(found, str) else found))


def holds_tags(key: Key) -> bool:
    """Return whether a record holds the tags of a resource, and nothing else."""
    return f"{key[0]}/{key[1]}" in _names("tag_kinds")


def is_setting(key: Key) -> bool:
    """Return whether a record is a setting of a resource: what it says counts, and not whether it was made anew."""
    return f"{key[0]}/{key[1]}" in _names("settings") or holds_tags(key)


def only_describes(key: Key, path: str) -> bool:
    """Return whether what stands at a path of a resource is a text that describes it, or a tag."""
    if holds_tags(key):
        return True
    kind, steps = f"{key[0]}/{key[1]}", path.split(DOCUMENT)[0].replace("[]", "/").split("/")
    return any(len(steps) == len(known) and _leads(known, steps) for known in _paths("descriptions", kind)) or any(
        len(steps) > len(known) and _leads(known, steps) for known in _paths("tags", kind)
    )


def _leads(known: list[str], steps: list[str]) -> bool:
    return all(one in ("*", other) for one, other in zip(known, steps, strict=False))


@dataclass(frozen=True)
class Member:
    """Says where a value stands. ``written``: in a document, in words of somebody's own."""

    service: str
    name: str
    written: bool = False
    holder: str = ""
    """Member that holds the document."""

    @classmethod
    def of(cls, key: Key) -> Member:
        """Return the place of a whole resource."""
        return cls(key[0], key[1])

    def inner(self, name: str) -> Member:
        """Return the place of what stands here under a name."""
        if name == DOCUMENT:
            return replace(self, written=True, holder=self.name)
        return replace(self, name=name) if name else self

    @property
    def in_order(self) -> bool:
        """Whether a list has an order here: in a document, unless it is known to have none; elsewhere where it is known
        to have one."""
        if not self.written:
            return self.name in _members("ordered", self.service)
        unordered = _members("unordered", self.service)
        return self.name not in unordered and self.holder not in unordered

    @property
    def typed(self) -> bool:
        """Whether a number is no text here: a service reads what a document says, of its own members the model has the
        type."""
        return self.written and self.name not in _members("numbers_or_texts", self.service)


@cache
def _members(table: str, service: str) -> frozenset[str]:
    return frozenset(_tables()[table].get(service, ()))
