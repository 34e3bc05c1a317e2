"""Says what members of resources mean, where their names alone do not: which texts only describe, which are tags.

All of it stands in ``meanings.yaml``, by service, kind and member; what stands nowhere there counts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
