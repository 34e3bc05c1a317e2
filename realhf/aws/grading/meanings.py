"""Meaning of resource members that the snapshot alone does not show: descriptions, tags, ordered
lists, and default values.

The facts are in ``meanings.yaml``, by service, kind and member. A member that is not listed there
is compared without changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Key = tuple[str, str, str]
"""(service, kind, identity) of a resource. A kind "a/b" is a part of resources of the kind "a"."""
Drops = Callable[[str, Mapping[str, Any]], bool]
"""Function that returns whether to drop a value, given as text, from the innermost mapping that
contains it."""
DOCUMENT = "{document}"
"""Path step that precedes the content of a user-written document. No member in it belongs to the
service."""
_TAG_OF_RESOURCE = "aws:ResourceTag/"
_QUOTED_WORD = re.compile(r'"(\w+)"')
_REFERENCE = re.compile(r"\{([^{}]+)\}")
_SIBLING = "./"
"""Prefix of a path relative to the mapping that contains the member; other paths are relative to
the resource."""


class KeptAttributes(dict[str, Any]):
    """A resource's attributes that several snapshots have in common and that never change. What is
    derived from them is kept with them, see ``derive``."""

    __slots__ = ("derived",)

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__(attributes)
        self.derived: dict[str, Any] = {}
        """What was derived from them, by name."""


def derive(attributes: Mapping[str, Any], name: str, compute: Callable[[], T]) -> T:
    """Return the result of ``compute``, which depends on nothing but a resource's attributes and
    kind. It is computed once if the attributes are kept."""
    if not isinstance(attributes, KeptAttributes):
        return compute()
    if name not in attributes.derived:
        attributes.derived[name] = compute()
    return attributes.derived[name]


@cache
def _tables() -> Mapping[str, Any]:
    text = (
        resources.files("realhf.aws.grading").joinpath("meanings.yaml").read_text(encoding="utf-8")
    )
    return yaml.load(text, Loader=yaml.CSafeLoader)


@cache
def _kinds_in(table: str) -> frozenset[str]:
    """Return the kinds ("service/kind") listed in a table."""
    return frozenset(_tables()[table])


@cache
def _paths(table: str, kind: str) -> tuple[list[str], ...]:
    """Return the paths that a table lists for a kind ("service/kind"), split into steps."""
    paths = _tables()[table].get(kind, ())
    return tuple(path.split("/") for path in ([paths] if isinstance(paths, str) else paths))


def holds_tags(key: Key) -> bool:
    """Return whether records of this kind contain a resource's tags and nothing else."""
    return f"{key[0]}/{key[1]}" in _kinds_in("tag_kinds")


def is_setting(key: Key) -> bool:
    """Return whether a record is a setting of a resource, for which only the content counts and not
    the identity."""
    return f"{key[0]}/{key[1]}" in _kinds_in("settings") or holds_tags(key)


def only_describes(key: Key, path: str) -> bool:
    """Return whether the value at a path of a resource is only a description or a tag."""
    if holds_tags(key):
        return True
    kind = f"{key[0]}/{key[1]}"
    steps = path.split(DOCUMENT)[0].replace("[]", "/").split("/")
    return any(
        len(steps) == len(known) and _matches_prefix(known, steps)
        for known in _paths("descriptions", kind)
    ) or any(
        len(steps) > len(known) and _matches_prefix(known, steps) for known in _paths("tags", kind)
    )


def _matches_prefix(known: list[str], steps: list[str]) -> bool:
    """Return whether two paths match up to the end of the shorter one; ``*`` in ``known`` matches
    any step."""
    return all(one in ("*", other) for one, other in zip(known, steps, strict=False))


@dataclass(frozen=True)
class MemberPosition:
    """The position of a value: in a member of a service's resource, or within a user-written
    document."""

    service: str
    """The resource's service."""
    name: str
    """Name of the innermost member around the value."""
    written: bool = False
    """Whether the value is part of a user-written document."""
    holder: str = ""
    """Name of the member that contains the document."""

    @classmethod
    def of(cls, key: Key) -> MemberPosition:
        """Return the position of a resource as a whole."""
        return cls(key[0], key[1])

    def inner(self, name: str) -> MemberPosition:
        """Return the position of the value under ``name``."""
        if name == DOCUMENT:
            return replace(self, written=True, holder=self.name)
        return replace(self, name=name) if name else self

    @property
    def in_order(self) -> bool:
        """Whether the order of a list matters at this position.

        In a document it matters unless the member is listed as unordered. Elsewhere it matters only
        if the member is listed as ordered.
        """
        if not self.written:
            return self.name in _members("ordered", self.service)
        unordered = _members("unordered", self.service)
        return self.name not in unordered and self.holder not in unordered

    @property
    def typed(self) -> bool:
        """Whether a number differs from the string that spells it at this position.

        It does in documents, whose types the service reads. For the service's own members the API
        model defines the type, so the two are equal.
        """
        return self.written and self.name not in _members("numbers_or_texts", self.service)


@cache
def _members(table: str, service: str) -> frozenset[str]:
    """Return the members of a service that are listed in a table."""
    return frozenset(_tables()[table].get(service, ()))


def known_defaults() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return AWS's default values by "service/kind", as rows of the file."""
    return _tables()["defaults"]


def drop_defaults(kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a resource of a kind ("service/kind") without members that have
    AWS's default value, and in canonical form."""
    if kind == "backup/selections":
        attributes = _normalize_selection(attributes)
    for path in _tables()["descriptions_in_lists"].get(kind, ()):
        attributes = _without(attributes, path.split("/"), lambda _as_text, _holder: True)
    for default in _tables()["defaults"].get(kind, ()):
        attributes = _without(
            attributes, default["path"].split("/"), partial(_is_default, default, attributes)
        )
    for member in _tables()["quoted_words"].get(kind, ()):
        if isinstance(attributes.get(member), str):
            attributes = {**attributes, member: _QUOTED_WORD.sub(r"\1", attributes[member])}
    return attributes


def _is_default(
    default: Mapping[str, Any], resource: Mapping[str, Any], text: str, holder: Mapping[str, Any]
) -> bool:
    """Return whether ``text`` is the default value according to a row of the file. ``holder`` is
    the mapping in ``resource`` that contains the member."""

    def value_at(path: str) -> str:
        if path.startswith(_SIBLING):
            return _read_text(holder, path.removeprefix(_SIBLING))
        return _read_text(resource, path)

    expected = _REFERENCE.sub(lambda reference: value_at(reference[1]), default["is"])
    conditions = default.get("where", {})
    return text == expected and all(value_at(path) == value for path, value in conditions.items())


def _normalize_selection(selection: dict[str, Any]) -> dict[str, Any]:
    """Return an AWS Backup selection in canonical form: a condition on a single tag becomes a list
    of that tag.

    The two select the same resources. With several tags they differ: all conditions must match, but
    only one entry of the list.

    https://docs.aws.amazon.com/aws-backup/latest/devguide/API_BackupSelection.html
    """
    conditions = selection.get("Conditions")
    tags = (
        conditions.get("StringEquals")
        if isinstance(conditions, Mapping) and len(conditions) == 1
        else None
    )
    if not (isinstance(tags, list) and len(tags) == 1 and isinstance(tags[0], Mapping)):
        return selection
    key = str(tags[0].get("ConditionKey", ""))
    everything = selection.get("Resources", ["*"]) == ["*"]
    if (
        not (key.startswith(_TAG_OF_RESOURCE) and everything)
        or {"ListOfTags", "NotResources"} & selection.keys()
    ):
        return selection
    tag = {
        **tags[0],
        "ConditionKey": key.removeprefix(_TAG_OF_RESOURCE),
        "ConditionType": "STRINGEQUALS",
    }
    rest = {
        name: value for name, value in selection.items() if name not in ("Conditions", "Resources")
    }
    return {**rest, "ListOfTags": [tag]}


def _read_text(attributes: Any, path: str) -> str:
    """Return the value at a path as a string, or "" if there is none."""
    for step in path.split("/"):
        attributes = attributes.get(step) if isinstance(attributes, Mapping) else None
    return "" if attributes is None else _as_text(attributes)


def _as_text(value: Any) -> str:
    """Return a value as a string. A list becomes its items as strings, sorted and joined by
    spaces."""
    if isinstance(value, list):
        return " ".join(sorted(map(_as_text, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without(
    value: Any, steps: list[str], drops: Drops, holder: Mapping[str, Any] | None = None
) -> Any:
    """Return ``value`` without the scalar, or list of scalars, at the end of a path, if ``drops``
    says so.

    Containers that become empty are dropped too; the result is None if nothing is left. In a path,
    ``name[]`` stands for all elements of a list and ``*`` for all keys of a mapping.
    """
    if not steps:
        items = value if isinstance(value, list) else [value]
        plain = not any(isinstance(item, Mapping | list) for item in items)
        return None if plain and drops(_as_text(value), holder or {}) else value
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
    others = {name: item for name, item in value.items() if name != step}
    remaining = others if kept in (None, {}, []) else {**value, step: kept}
    return remaining or None
