"""Says what members of resources mean, where their names alone do not: which texts only describe, which are tags, which
lists have an order, and what goes without saying.

All of it stands in ``meanings.yaml``, by service, kind and member; what stands nowhere there counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from typing import Any

import yaml

Key = tuple[str, str, str]
"""Service, kind and identity of a resource. A kind with a ``/`` lies within a resource of the kind before it."""
Drops = Callable[[str, Mapping[str, Any]], bool]
"""Says whether a text is to be dropped from the innermost structure that holds it."""
DOCUMENT = "{document}"
"""Stands, in paths, before what somebody wrote in words of their own: none of it is the service's."""
_TAG_OF_RESOURCE = "aws:ResourceTag/"
_QUOTED_WORD = re.compile(r'"(\w+)"')
_REFERENCE = re.compile(r"\{([^{}]+)\}")
_BESIDE = "./"
"""Begins the path of a member that lies beside the one in question; other paths begin at the resource."""


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
    kind = f"{key[0]}/{key[1]}"
    steps = path.split(DOCUMENT)[0].replace("[]", "/").split("/")
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


def known_defaults() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return what AWS takes where nobody says anything, by "service/kind": rows of the file."""
    return _tables()["defaults"]


def without_saying(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return what a resource of a kind ("service/kind") says, without what AWS takes where nobody says anything."""
    if kind == "backup/selections":
        attributes = _selected_by_tag(attributes)
    for path in _tables()["descriptions_in_lists"].get(kind, ()):
        attributes = _without(attributes, path.split("/"), lambda _text, _holder: True)
    for default in _tables()["defaults"].get(kind, ()):
        attributes = _without(attributes, default["path"].split("/"), partial(_is_usual, default, attributes))
    for member in _tables()["quoted_words"].get(kind, ()):
        if isinstance(attributes.get(member), str):
            attributes = {**attributes, member: _QUOTED_WORD.sub(r"\1", attributes[member])}
    return attributes


def _is_usual(default: Mapping[str, Any], resource: Mapping[str, Any], text: str, holder: Mapping[str, Any]) -> bool:
    """Return whether a text is what a row of the defaults says, for a member of ``holder`` in ``resource``."""

    def found(path: str) -> str:
        return _said(holder, path.removeprefix(_BESIDE)) if path.startswith(_BESIDE) else _said(resource, path)

    usual = _REFERENCE.sub(lambda reference: found(reference[1]), default["is"])
    return text == usual and all(found(path) == value for path, value in default.get("where", {}).items())


def _selected_by_tag(selection: dict[str, Any]) -> dict[str, Any]:
    """Return a selection of AWS Backup by the one tag that a condition asks for as a list of this tag. Of several tags,
    all have to be there in conditions, and one in a list.

    https://docs.aws.amazon.com/aws-backup/latest/devguide/API_BackupSelection.html
    """
    conditions = selection.get("Conditions")
    asked = conditions.get("StringEquals") if isinstance(conditions, Mapping) and len(conditions) == 1 else None
    if not (isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], Mapping)):
        return selection
    key = str(asked[0].get("ConditionKey", ""))
    everything = selection.get("Resources", ["*"]) == ["*"]
    if not (key.startswith(_TAG_OF_RESOURCE) and everything) or {"ListOfTags", "NotResources"} & selection.keys():
        return selection
    tag = {**asked[0], "ConditionKey": key.removeprefix(_TAG_OF_RESOURCE), "ConditionType": "STRINGEQUALS"}
    rest = {name: value for name, value in selection.items() if name not in ("Conditions", "Resources")}
    return {**rest, "ListOfTags": [tag]}


def _said(attributes: Any, path: str) -> str:
    """Return what stands at a path as text, "" for nothing."""
    for step in path.split("/"):
        attributes = attributes.get(step) if isinstance(attributes, Mapping) else None
    return "" if attributes is None else _text(attributes)


def _text(value: Any) -> str:
    """Return a value as text; of a list its texts in the order of the alphabet."""
    if isinstance(value, list):
        return " ".join(sorted(map(_text, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without(value: Any, steps: list[str], drops: Drops, holder: Mapping[str, Any] | None = None) -> Any:
    """Return a value without the text, or the list of texts, at the end of these steps where that is to be dropped, nor
    what is empty then."""
    if not steps:
        items = value if isinstance(value, list) else [value]
        plain = not any(isinstance(item, Mapping | list) for item in items)
        return None if plain and drops(_text(value), holder or {}) else value
    step = steps[0].removesuffix("[]")
    through_list = steps[0].endswith("[]")
    if isinstance(value, Mapping) and step == "*":
        return {name: _without(item, steps[1:], drops, value) for name, item in value.items()}
    if not isinstance(value, Mapping) or step not in value:
        return value
    if through_list and isinstance(value[step], list):
        items = [_without(item, steps[1:], drops, value) for item in value[step]]
        kept: Any = [item for item in items if item is not None]
    else:
        kept = _without(value[step], steps[1:], drops, value)
    rest = {name: item for name, item in value.items() if name != step}
    left = rest if kept in (None, {}, []) else {**value, step: kept}
    return left or None
