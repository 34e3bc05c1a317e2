"""Comparison of request members (parameters of an API request, or parts of one) that the simulator
does not store and that no snapshot can therefore show.

``kept_members.json`` states for each write operation which request members reach the account of a
simulator. The command ``python -m realhf.aws.tasks members`` creates it by sending requests with
and without each member. ``member_notes.yaml`` adds facts that no request can show: defaults that
AWS documents, members that only control a request, descriptions and tags. What the two files state
about a member is its *fate*. A member in neither file counts as not stored.

A *setting* is a request member together with its *subject*, the resource that the request is about.
The value that was sent last counts. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from realhf.aws.grading.meanings import known_defaults, only_describes
from realhf.aws.grading.member_notes import Notes, read_notes
from realhf.aws.grading.snapshot import Key, Snapshot
from realhf.aws.grading.stack_templates import (
    OF_STACK,
    UNKNOWN,
    UnreadTemplate,
    read_declared_resources,
)
from realhf.aws.grading.tracker import identifying_parameter, identity, is_read
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

TABLE = Path(__file__).with_name("kept_members.json")
"""The package's table of members."""
REMAKE = "python -m realhf.aws.tasks members tests/aws/validation/plays/*.yaml"
"""The command that recreates the table."""
KEPT = "kept"
NOT_KEPT = "not kept"
NAMES = "names the resource"
STEERS = "steers the request only"
DEFAULT = "default"
TEXT = "text or tag"
"""The possible fates of a member, as written in the table."""
NOT_PROBED = "not probed"
"""Prefix of the fate of a member that was not probed; the reason follows."""
_COMPARED = (NOT_KEPT, DEFAULT, NOT_PROBED)
"""Prefixes of the fates that require comparing the values that were sent."""
ANY = "*"
"""Path step that matches any key of a map."""
ELEMENT = "[]"
"""Path step that stands for the elements of a list."""
_MAKES = re.compile(r"^AWS::|:(Create|Run|Allocate|Request|Register|Import|Copy|Restore)")
"""Operations that may create a resource with a generated id."""
_REPLACES = re.compile(r"^AWS::|:(Create|Run|Put|Set|Register|Request)")
"""Operations that set a resource as a whole: members that they omit return to their defaults."""
_CREATES = re.compile(r"^AWS::|:Create")
"""Operations that create a resource."""
_VERB = re.compile(r"^[A-Z][a-z]+(?=[A-Z])")
"""An operation's verb."""
_ENDS = re.compile(r":(Delete|Terminate|Deregister|Release|Remove|Schedule\w*Deletion)")
"""Operations that delete a resource."""
_RESTORES = re.compile(r":(Restore|Cancel)")
"""Operations that cancel a deletion."""
_VERSIONS = frozenset({"Qualifier", "Version", "VersionId", "Versions"})
"""Members of a delete request that select versions; the rest of the resource stays."""
_TAKES_AWAY = re.compile(
    r":(Delete|Terminate|Deregister|Release|Remove|Schedule\w*Deletion|Detach|Disassociate|Untag|Abort|Cancel)"
)
"""Operations that only remove something."""
_STACKS = frozenset({"cloudformation:CreateStack", "cloudformation:UpdateStack"})
"""Operations on a stack whose requests contain a template."""
_TYPE = "AWS::"
"""Prefix of CloudFormation's resource types."""
_UNNAMED = "(unnamed)"
"""Prefix that marks, in a subject, a declared resource without a known name. It is always
compared."""
_NAME_SUFFIX = re.compile(r"(name|identifier|id)$")
"""Suffix of the properties that name a resource."""
_UNREAD = "AWS::CloudFormation::Template"
"""Stands for a template that cannot be read. Everything that it declares counts as a difference."""
_TYPE_SERVICES: Mapping[str, str] = {
    "CertificateManager": "acm",
    "Cognito": "cognito-idp",
    "ElasticLoadBalancingV2": "elbv2",
    "KinesisFirehose": "firehose",
    "OpenSearchService": "opensearch",
}
"""botocore names of the services whose CloudFormation name, in lower case, is different."""
_ATTRIBUTES = "Attributes"
"""Member that contains a map of attributes."""
_ATTRIBUTE = frozenset({"AttributeName", "AttributeValue"})
"""Members of a request that sets a single attribute: the attribute's name and value."""
_TRUTHS = frozenset({"true", "false"})
"""Strings that spell booleans."""
_SHOWN_CHARS = 200
"""Number of characters of a value that a message shows."""
_MAX_VALUES = 30_000
"""Maximum number of values read in one episode. Values beyond it count as a difference."""
_TELLING = 4
"""Minimum length of a string that hardly occurs in an account by chance."""
_MAX_BITS = 10_000
"""Maximum size of an integer written in decimal, in bits; Python refuses to convert much larger
ones."""
MemberPath = tuple[str, ...]
"""Path to a member: the names along the way, and ``ELEMENT`` for the elements of a list."""
Subject = tuple[str, ...]
"""The resource that a request is about, as (service, names or ids of the resource ...)."""


@dataclass(frozen=True)
class SentWrite:
    """An accepted write request, with the resources that its command created and removed."""

    operation: str
    """The operation as "service:Operation", or the type of a resource declared in a template."""
    params: Mapping[str, Any]
    """The request's parameters, or the declared properties."""
    generated_ids: tuple[tuple[str, str], ...] = ()
    """(service, id) of the ids that were generated for the new resources."""
    created: frozenset[Key] = frozenset()
    """Keys of the resources that are new or were replaced."""
    removed: frozenset[Key] = frozenset()
    """Keys of the resources that were removed or replaced."""


Values = frozenset[str]
"""The values, as strings, that one request sent for a member. Empty if it sent none or the
default."""


@dataclass(frozen=True)
class Setting:
    """The values that were sent for one member of a resource."""

    sent: tuple[Values, ...]
    """The values in each request with the last operation, in order. If several resources share a
    name, as the routes of a route table do, each of them has its own request."""
    operation: str
    """The last operation that sent the member."""
    path: MemberPath
    """The member's path in requests with that operation."""
    fate: str
    """The member's fate in the table."""

    @property
    def last(self) -> Values:
        """The values in the last request."""
        return self.sent[-1]

    @property
    def ever(self) -> Values:
        """The values in all of the requests."""
        return frozenset().union(*self.sent)


_UNSENT: tuple[Values, ...] = (frozenset(),)
"""``Setting.sent`` for a member that was never sent."""
Settings = Mapping[Subject, Mapping[MemberPath, Setting]]
"""Settings by subject and normalized path."""
Resources = Mapping[Key, Mapping[str, Any]]
"""Attributes of resources by key, as in a ``Snapshot``."""


@dataclass(frozen=True)
class Default:
    """The value that AWS uses for a member that is not sent."""

    operation: str
    """The operation, or "service:" for all operations of a service."""
    path: str
    """The member's path, as ``format_path`` writes it."""
    value: str
    """The default value, as a string."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Other members, with their values, that must be sent for the default to apply."""


class MemberTable:
    """The fates of request members, and the defaults that AWS documents for them.

    ``fates``: for each operation, the fates of its members by path (see ``format_path``).
    ``about``: the members that identify a request's resource, by operation. ``uses``: operations
    that only use a resource. ``defaults``: the documented defaults. ``fate_from_notes``: returns
    the fate that the notes give for an operation and a path, or "".
    """

    def __init__(
        self,
        fates: Mapping[str, Mapping[str, str]],
        about: Mapping[str, Sequence[str]],
        uses: Iterable[str] = (),
        defaults: Iterable[Default] = (),
        fate_from_notes: Callable[[str, str], str] = lambda operation, path: "",
    ) -> None:
        self.uses = frozenset(uses)
        self._about = about
        self._fates = {operation: _build_tree(members) for operation, members in fates.items()}
        self._fate_from_notes = fate_from_notes
        self._defaults: defaultdict[tuple[str, MemberPath], list[Default]] = defaultdict(list)
        for one in defaults:
            self._defaults[
                service_of(one.operation), _normalize_path(tuple(parse_path(one.path)))
            ].append(one)

    def fate(self, operation: str, path: MemberPath) -> str:
        """Return the fate of a member, or that of a structure around it if the member itself has
        none.

        For an operation that was not probed, the notes decide. A member of an operation that only
        removes something does not count as a setting.
        """
        if operation in self._fates:
            return self._probed_fate(operation, path)
        fates = (
            self._fate_from_notes(operation, format_path(path[:end]))
            for end in range(1, len(path) + 1)
        )
        fate = next(filter(None, fates), "")
        if not fate and _TAKES_AWAY.search(operation):
            fate = NAMES
        return fate or NOT_PROBED

    def _probed_fate(self, operation: str, path: MemberPath) -> str:
        """Return the fate of the deepest part of a path that the table lists, or NOT_PROBED."""
        fate = NOT_PROBED
        node = self._fates.get(operation, {})
        for step in path:
            # "" holds the fate of the node itself
            node = (node.get(step) if step else None) or node.get(ANY)
            if node is None:
                break
            fate = node.get("", fate)
        return fate

    def is_default(self, write: SentWrite, path: MemberPath, value: str) -> bool:
        """Return whether a value is a member's documented default.

        The default for one operation also applies to other operations on the same kind of resource,
        and to that kind's type in templates.
        """
        known = self._defaults.get((service_of(write.operation), _normalize_path(path)), [])
        own = [one for one in known if one.operation == write.operation]
        known = own or [one for one in known if _same_kind(one.operation, write.operation)]
        return any(
            one.value.lower() == value.lower()
            and all(str(write.params.get(member)) == wanted for member, wanted in one.where.items())
            for one in known
        )

    def about(self, write: SentWrite) -> Sequence[str]:
        """Return the members that identify the request's resource."""
        known = self._about.get(write.operation)
        if known is None and write.operation.startswith(_TYPE):
            noun = _noun_of(write.operation).rpartition("::")[2].lower()
            known = [member for member in write.params if _names_resource(noun, member.lower())]
        if known is None:
            known = [identifying_parameter(service_of(write.operation), write.params)[0]]
        return known

    def subject(self, write: SentWrite) -> Subject:
        """Return the resource that a write request is about, identified by the name in the request
        or by the ids that were generated for it."""
        service = service_of(write.operation)
        values = [write.params.get(member) for member in self.about(write)]
        named = [identity(service, value) for value in values if isinstance(value, str)]
        ids = [name for its, name in write.generated_ids if its == service]
        is_declared = write.operation.startswith(_TYPE)
        if is_declared and any(
            value is not None and (value in UNKNOWN or not isinstance(value, str))
            for value in values
        ):
            named = []
        if ids and _MAKES.search(write.operation):
            theirs = {
                part
                for key in write.created
                if key[0] == service
                for part in _split_identity(key[2])
            }
            if not (named and named[-1] in theirs):
                named = ids
        if not named and is_declared:
            named = [f"{_UNNAMED} {write.operation}"]
        return service, *named


def _names_resource(noun: str, member: str) -> bool:
    """Return whether a property names a resource of a type, as DBInstanceIdentifier does for
    DBInstance. ``noun`` (the type) and ``member`` must be in lower case."""
    stem = _NAME_SUFFIX.sub("", member)
    return member in (noun, "name", "family") or (stem != member and stem != "" and stem in noun)


def _build_tree(members: Mapping[str, str]) -> dict[str, Any]:
    """Return a nested dict of the member paths and their fates (see ``MemberTable``).

    A path's own fate is under the key "" of its node.
    """
    root: dict[str, Any] = {}
    for text, fate in members.items():
        node = root
        for step in parse_path(text):
            node = node.setdefault(step, {})
        node[""] = fate
    return root


def format_path(path: MemberPath) -> str:
    """Return a path in the table's notation: ``Statements[].Name``."""
    return ".".join(path).replace(f".{ELEMENT}", ELEMENT)


def parse_path(text: str) -> list[str]:
    """Return the steps of a path in the notation of ``format_path``."""
    return text.replace(ELEMENT, f".{ELEMENT}").split(".")


def build_settings(
    writes: Iterable[SentWrite], table: MemberTable, rename: Callable[[str], str] = str
) -> Settings:
    """Return the settings that result from write requests, given in order. ``rename`` is applied to
    every string."""
    ledger = _SettingsLedger(table, rename)
    for write in writes:
        ledger.record(write)
    return ledger.settings


class _SettingsLedger:
    """The settings of each resource, updated request by request."""

    def __init__(self, table: MemberTable, rename: Callable[[str], str]) -> None:
        self.settings: dict[Subject, dict[MemberPath, Setting]] = {}
        """The present settings."""
        self._table = table
        self._rename = rename
        self._existing: defaultdict[Subject, dict[str, frozenset[Key]]] = defaultdict(dict)
        """Created resources that still exist, by subject and kind. The value is the keys that
        appeared in the account when the resource was created."""
        self._paths_by_first_step: defaultdict[tuple[Subject, str], set[MemberPath]] = defaultdict(
            set
        )
        """Paths of settings, by subject and the path's first step."""
        self._paths_by_operation: defaultdict[tuple[Subject, str], set[MemberPath]] = defaultdict(
            set
        )
        """Paths of settings, by subject and operation."""
        self._subject_by_id: dict[tuple[str, str], Subject] = {}
        """Subject for which each generated id was made, by (service, id). Later requests name the
        resource by the id."""
        self._stacks: dict[str, Mapping[str, Any]] = {}
        """The last request about each stack, by the stack's name."""
        self._declared: dict[str, list[SentWrite]] = {}
        """The resources that each stack declares."""
        self._values_left = _MAX_VALUES
        """Number of values that may still be recorded."""

    def record(self, write: SentWrite) -> None:
        """Record a request and the resources that its template declares."""
        if write.removed:
            self._forget_removed(write.removed)
        if write.operation in self._table.uses or is_read(write.operation, write.params):
            return
        self._record_one(write)
        if write.operation in _STACKS:
            name = identity("cloudformation", str(write.params.get("StackName")))
            params = _complete_stack_request(write.params, self._stacks.get(name, {}))
            self._stacks[name] = params
            before = {(self._subject(one), one.operation) for one in self._declared.get(name, ())}
            self._declared[name] = _declared_writes(params, write)
            for subject, kind in before & {
                (self._subject(one), one.operation) for one in self._declared[name]
            }:
                # A template declares a resource completely, so earlier settings are dropped.
                self._forget(subject, set(self._paths_by_operation.pop((subject, kind), ())))
            for one in self._declared[name]:
                self._record_one(one)

    def _subject(self, write: SentWrite) -> Subject:
        """Return a request's subject with its parts renamed. A generated id is first replaced by
        the subject it was made for."""
        subject = self._table.subject(write)
        if _MAKES.search(write.operation):
            self._subject_by_id |= {
                generated: subject
                for generated in write.generated_ids
                if generated[0] == subject[0]
            }
        for part in subject[1:]:
            subject = self._subject_by_id.get((subject[0], part), subject)
        return tuple(self._rename(part) for part in subject)

    def _record_one(self, write: SentWrite) -> None:
        """Record one request, or one declared resource."""
        sent = self._sent_members(write)
        self._values_left -= sum(len(values) for _, values in sent.values())
        if self._values_left < 0:
            write = SentWrite(_UNREAD, {"TemplateBody": "more than is read of one episode"})
            sent = self._sent_members(write)
        subject = self._subject(write)
        kind = _noun_of(write.operation)
        creates = _CREATES.search(write.operation) is not None
        again = (subject, write.operation) in self._paths_by_operation
        # A create request for an existing resource does not change the resource.
        stays = creates and self._exists(subject, kind, write)
        if creates and not stays:
            self._forget_resource(subject, kind)
            self._existing[subject][kind] = _keys_named_by(
                write.created, self._table.subject(write)
            )
            again = (subject, write.operation) in self._paths_by_operation
        if _ENDS.search(write.operation) and not _VERSIONS & write.params.keys():
            self._forget_deleted(subject, kind, write)
        if _RESTORES.search(write.operation):
            ended = {
                path
                for path, one in self.settings.get(subject, {}).items()
                if _ENDS.search(one.operation)
            }
            self._forget(subject, ended)
        self._write(subject, write, sent, again=again, stays=stays)

    def _write(
        self,
        subject: Subject,
        write: SentWrite,
        sent: Mapping[MemberPath, tuple[MemberPath, set[str]]],
        *,
        again: bool,
        stays: bool,
    ) -> None:
        """Record the members that a request sends.

        ``sent``: the result of ``_sent_members``. ``again``: the operation was sent to the subject
        before. ``stays``: the resource exists already and keeps the values that it was created
        with.
        """
        settings = self.settings.setdefault(subject, {})
        top = {path[0] for path in sent} | {
            name.lower() for name in write.params if name != _ATTRIBUTES
        }
        # Settings that the request may change: those in the structures that it sends and, if the
        # operation sets a resource as a whole, those that its earlier requests set.
        touched = {
            path for name in top for path in self._paths_by_first_step.get((subject, name), ())
        }
        if again and _REPLACES.search(write.operation):
            touched |= self._paths_by_operation[subject, write.operation]
        for path in touched:
            setting = settings[path]
            values = frozenset(sent[path][1]) if path in sent else frozenset()
            if stays and path in sent:  # has no effect, so the last value remains the last one
                settings[path] = replace(setting, sent=(values, *setting.sent))
            elif setting.operation == write.operation:
                settings[path] = replace(setting, sent=(*setting.sent, values))
            elif (
                path not in sent and path[0] in top and not stays
            ):  # the structure around it was replaced by one without it
                self._forget(subject, {path})
        # Record the operation even if it sends no members: indexing creates the entry.
        self._paths_by_operation[subject, write.operation] |= set()
        for path, (where, values) in sent.items():
            if path in settings and (stays or settings[path].operation == write.operation):
                continue  # updated above
            self._forget(subject, {path} & settings.keys())
            fate = self._table.fate(write.operation, where)
            before = _UNSENT if again else ()
            settings[path] = Setting((*before, frozenset(values)), write.operation, where, fate)
            self._paths_by_first_step[subject, path[0]].add(path)
            self._paths_by_operation[subject, write.operation].add(path)

    def _exists(self, subject: Subject, kind: str, write: SentWrite) -> bool:
        """Return whether the resource that a create request names existed before and was left
        unchanged."""
        if kind in self._existing[subject]:
            return True
        return bool(self._existing[subject]) and not _keys_named_by(
            write.created, self._table.subject(write)
        )

    def _sent_members(self, write: SentWrite) -> dict[MemberPath, tuple[MemberPath, set[str]]]:
        """Return the members that a request sends as {normalized path: (path, values)}. Default
        values are left out."""
        members: dict[MemberPath, tuple[MemberPath, set[str]]] = {}
        about = self._table.about(write)
        for path, value in leaves(write.params):
            if path[0] not in about and _normalize_path(path):
                _, values = members.setdefault(_normalize_path(path), (path, set()))
                if not self._table.is_default(write, path, value):
                    values.add(self._rename(_normalize_value(value)))
        return members

    def _forget_removed(self, removed: frozenset[Key]) -> None:
        """Drop the settings of resources that no longer exist, whichever request removed them."""
        for subject, kinds in list(self._existing.items()):
            for kind, keys in list(kinds.items()):
                if keys and keys & removed:
                    kinds[kind] = keys - removed
                    if not kinds[kind]:
                        self._forget_resource(subject, kind)

    def _forget_deleted(self, subject: Subject, kind: str, write: SentWrite) -> None:
        """Drop the settings of a deleted resource whose creation was not recorded.

        Such a resource is either a part of another one, such as the rules of a bucket, or belongs
        to the set-up. A resource of the set-up is dropped only if it is gone from the account.
        """
        if self._existing[subject].get(kind):
            return
        if kind in self._existing[subject]:
            if any(
                key[0] == subject[0] and set(_split_identity(key[2])) & set(subject[1:])
                for key in write.removed
            ):
                self._forget_resource(subject, kind)
            return
        settings = self.settings.get(subject, {})
        # A setting with several requests belongs to several parts with the same name. It is unknown
        # which of them was deleted.
        single = {
            path
            for path, setting in settings.items()
            if _noun_of(setting.operation) == kind and len(setting.sent) == 1
        }
        self._forget(subject, single)

    def _forget_resource(self, subject: Subject, kind: str) -> None:
        """Drop the settings of a resource and of its parts."""
        existed = self._existing[subject].pop(kind, None) is not None
        others = self._existing[subject].keys()
        for other in list(self.settings):
            # A part of the resource has a longer subject that begins with the resource's own.
            inner = existed and other[: len(subject)] == subject and len(other) > len(subject) > 1
            if other != subject and not inner:
                continue
            if inner:
                self._existing.pop(other, None)
            self._forget(
                other,
                {
                    path
                    for path, one in self.settings[other].items()
                    if inner or _noun_of(one.operation).startswith(kind) or (existed and not others)
                },
            )

    def _forget(self, subject: Subject, paths: Set[MemberPath]) -> None:
        """Drop settings of a subject, also from the indices."""
        for path in paths:
            setting = self.settings[subject].pop(path)
            self._paths_by_first_step[subject, path[0]].discard(path)
            paths_of_operation = self._paths_by_operation.get((subject, setting.operation))
            if paths_of_operation is not None:
                paths_of_operation.discard(path)
                if not paths_of_operation:
                    del self._paths_by_operation[subject, setting.operation]


def _keys_named_by(keys: Iterable[Key], subject: Subject) -> frozenset[Key]:
    """Return the keys whose identity contains a name of the subject."""
    return frozenset(
        key
        for key in keys
        if key[0] == subject[0] and set(_split_identity(key[2])) & set(subject[1:])
    )


def _normalize_value(value: str) -> str:
    """Return a value in its canonical form: an ARN in this account as the resource's name, JSON
    without superfluous spaces."""
    if value.startswith("arn:"):
        return identity("", value)
    if value.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(value), sort_keys=True)
        except (ValueError, RecursionError):
            return value
    return value


def _same_kind(one: str, other: str) -> bool:
    """Return whether two operations concern the same kind of resource, as CreateFunction and
    UpdateFunctionConfiguration do. Resources of different kinds may share a name."""
    nouns = sorted((_noun_of(name).rpartition("::")[2] for name in (one, other)), key=len)
    return nouns[1].startswith(nouns[0])


def _noun_of(operation: str) -> str:
    """Return the noun in an operation's name, such as "Bucket" for CreateBucket; a CloudFormation
    type is returned unchanged. The noun of a resource's part begins with that of the resource, as
    BucketCors does."""
    name = operation.rpartition(":")[2]
    return name if operation.startswith(_TYPE) else _VERB.sub("", name).removesuffix("Deletion")


def _declared_writes(params: Mapping[str, Any], write: SentWrite) -> list[SentWrite]:
    """Return the resources that a request about a stack declares, as writes whose operation is the
    resource's type.

    An invalid or external template becomes a single ``_UNREAD`` write.
    """
    try:
        return [
            SentWrite(one.type, one.properties, write.generated_ids, write.created)
            for one in read_declared_resources(params)
        ]
    except UnreadTemplate:
        return [
            SentWrite(_UNREAD, {"TemplateBody": str(params.get("TemplateBody"))[:_SHOWN_CHARS]})
        ]


def _complete_stack_request(
    params: Mapping[str, Any], before: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the parameters of a request about a stack. If it reuses the previous template or
    values, they are filled in from ``before``, the last request."""
    known = {given.get("ParameterKey"): given for given in _parameters(before)}
    values = [
        known.get(given.get("ParameterKey"), given) if given.get("UsePreviousValue") else given
        for given in _parameters(params)
    ]
    body = (
        before.get("TemplateBody")
        if params.get("UsePreviousTemplate")
        else params.get("TemplateBody")
    )
    return {**params, "TemplateBody": body, "Parameters": values}


def _parameters(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries for stack parameters in a request."""
    entries = request.get("Parameters")
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _normalize_path(path: MemberPath) -> MemberPath:
    """Return a path in the form that APIs and templates share: in lower case, and without the step
    into a map of attributes."""
    return tuple(step.lower() for step in path if step.lower() != _ATTRIBUTES.lower())


def service_of(operation: str) -> str:
    """Return the botocore name of the service of an operation or a CloudFormation type."""
    if not operation.startswith(_TYPE):
        return operation.partition(":")[0]
    name = operation.split("::")[1]
    return _TYPE_SERVICES.get(name, name.lower())


def leaves(value: Any, path: MemberPath = ()) -> Iterator[tuple[MemberPath, str]]:
    """Yield (path, value as a string) for every scalar in parameters.

    None and empty lists are skipped, as if they had not been sent. An empty mapping is yielded as
    "{}", because its presence may switch something on.
    """
    if isinstance(value, Mapping):
        if not value and path:
            yield path, "{}"
        if value.keys() >= _ATTRIBUTE:
            yield from leaves(
                value["AttributeValue"], (*path, _ATTRIBUTES, str(value["AttributeName"]))
            )
        for name, item in value.items():
            if name not in _ATTRIBUTE or not value.keys() >= _ATTRIBUTE:
                yield from leaves(item, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, (*path, ELEMENT))
    elif isinstance(value, bool):
        yield path, str(value).lower()
    elif isinstance(value, int):
        yield path, hex(value) if value.bit_length() > _MAX_BITS else str(value)
    elif value is not None:
        yield path, str(value)


def find_differing_settings(
    mine: Settings, wanted: Settings, account: Resources, target: Resources
) -> list[str]:
    """Describe each setting of a target resource that the simulator does not store and that differs
    from the solution's.

    ``mine`` and ``wanted``: the settings of the agent and of the solution. A member that was not
    probed is skipped if both ``account`` and ``target`` show its value.
    """
    names = {(service, part) for service, _, where in target for part in _name_candidates(where)}
    names |= {(subject[0], part) for subject in wanted for part in subject[1:]}
    shown = _ShownValues(account)
    wanted_shown = _ShownValues(target)
    differences = []
    for subject in sorted(mine.keys() | wanted.keys()):
        is_known = any(
            (subject[0], part) in names or part.startswith(_UNNAMED) for part in subject[1:]
        )
        if subject[1:] and not is_known:
            continue  # not a resource of the target
        ours = mine.get(subject, {})
        its = wanted.get(subject, {})
        for path in sorted(ours.keys() | its.keys()):
            one = ours.get(path)
            other = its.get(path)
            is_shown = shown.has(subject, one) or wanted_shown.has(subject, one)
            if _matches(one, other) or (is_shown and wanted_shown.has(subject, other)):
                continue
            differences.append(f"{_describe_difference(one, other)}, of {' '.join(subject[1:])}")
    return differences


def _matches(mine: Setting | None, wanted_setting: Setting | None) -> bool:
    """Return whether a setting equals the solution's, or need not be compared because the account
    shows it.

    If several resources share a name, their requests may come in any order, and may be separate or
    combined.
    """
    if not any(
        setting and setting.fate.startswith(_COMPARED) for setting in (mine, wanted_setting)
    ):
        return True
    sent = mine.sent if mine else _UNSENT
    wanted = wanted_setting.sent if wanted_setting else _UNSENT
    ever = frozenset().union(*sent)
    allowed = frozenset().union(*wanted)
    several = mine is not None and ELEMENT in mine.path and bool(ever)
    if not sent[-1] and frozenset() not in wanted and not several:
        return False
    if mine is not None and mine.operation.startswith(_TYPE) and OF_STACK in ever:
        return bool(allowed) and ever <= allowed | {OF_STACK}
    if mine is not None and _CREATES.search(mine.operation) and not ever <= allowed:
        return False  # an existing resource keeps the values that it was created with
    return sent[-1] <= allowed and wanted[-1] <= ever


def _describe_difference(mine: Setting | None, wanted_setting: Setting | None) -> str:
    """Describe how a setting differs from the solution's."""
    one = mine or wanted_setting
    assert one is not None
    compared = next(
        setting
        for setting in (mine, wanted_setting)
        if setting and setting.fate.startswith(_COMPARED)
    )
    unknown = (
        f"; {REMAKE} finds out whether the simulator keeps it"
        if compared.fate.startswith(NOT_PROBED)
        else ""
    )
    sent, required = (
        ", ".join(sorted(setting.ever)) if setting and setting.ever else "nothing"
        for setting in (mine, wanted_setting)
    )
    return (
        f"{one.operation} {format_path(compared.path)} = {sent[:_SHOWN_CHARS]} and not "
        f"{required[:_SHOWN_CHARS]}{unknown}"
    )


class _ShownValues:
    """The settings that can be read back from an account's state: their value occurs under the
    member's name, or it is too distinctive to be a coincidence."""

    def __init__(self, account: Resources) -> None:
        self._account = account
        self._read: dict[Subject, tuple[frozenset[tuple[str, str]], frozenset[str]]] = {}

    def has(self, subject: Subject, setting: Setting | None) -> bool:
        """Return whether the account shows the last values of a setting. True if there is no
        setting, or if its fate requires no comparison."""
        if setting is None:
            return True
        if not setting.fate.startswith(NOT_PROBED):
            return not setting.fate.startswith(_COMPARED)
        if subject not in self._read:
            self._read[subject] = self._leaves(subject)
        named, values = self._read[subject]
        name = next((step for step in reversed(setting.path) if step != ELEMENT), "").lower()
        of_stack = {OF_STACK} if setting.operation.startswith(_TYPE) else set()
        return all(self._exists(name, value, named, values) for value in setting.last - of_stack)

    def _exists(
        self, name: str, value: str, named: frozenset[tuple[str, str]], values: frozenset[str]
    ) -> bool:
        """Return whether a value occurs under its member's name, or anywhere if it is
        distinctive."""
        if value[:1] in ("{", "["):
            try:
                inner = [
                    (path[-1].lower(), text) for path, text in leaves(json.loads(value), (name,))
                ]
            except (ValueError, RecursionError):
                inner = [(name, value)]
            if inner != [(name, value)]:
                return all(self._exists(step, text, named, values) for step, text in inner)
        plain = _normalize_value(value).lower()
        for text in (plain, plain.strip('"')):
            is_telling = len(text) >= _TELLING and not text.isdecimal() and text not in _TRUTHS
            if (name, text) in named or (is_telling and text in values):
                return True
        return False

    def _leaves(self, subject: Subject) -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
        """Return the values in the resources that a subject names, as ({(member name, value)},
        {value}).

        Descriptions and tags are left out.
        """
        named = {part for part in subject[1:] if not part.startswith(_UNNAMED)}
        pairs = set()
        for key, attributes in self._account.items():
            if key[0] != subject[0] or (
                named and not named & {*_split_identity(key[2]), _without_marks(key[2])}
            ):
                continue
            for path, value in leaves(attributes):
                if only_describes(key, "/".join(path)):
                    continue
                name = next((step for step in reversed(path) if step != ELEMENT), "").lower()
                pairs.add((name, _normalize_value(_without_marks(value)).lower()))
                if value[:1] in ("{", "["):
                    with suppress(ValueError, RecursionError):
                        inner = leaves(json.loads(value))
                        pairs |= {
                            (path[-1].lower() if path else "", text.lower()) for path, text in inner
                        }
        return frozenset(pairs), frozenset(value for _, value in pairs)


def _split_identity(where: str) -> list[str]:
    """Return a resource's identity and the parts of it, without marks."""
    plain = _without_marks(where)
    return [plain, *re.split("[/:|]", plain)]


def _name_candidates(where: str) -> Iterator[str]:
    """Yield a resource's identity and the last part of it, without marks."""
    plain = _without_marks(where)
    yield plain
    yield re.split("[/:|]", plain)[-1]


def build_writes(
    before: Snapshot, after: Snapshot, requests: Iterable[tuple[str, Mapping[str, Any]]]
) -> list[SentWrite]:
    """Return the requests of one command as writes, with the resources that the command created and
    removed.

    ``before`` and ``after``: the account before and after the command. ``requests``: (operation,
    parameters) pairs.
    """
    replaced = {
        key for key, serial in after.serials.items() if before.serials.get(key, serial) != serial
    }
    created = (after.resources.keys() - before.resources.keys()) | replaced
    removed = (before.resources.keys() - after.resources.keys()) | replaced
    generated_ids = tuple(
        sorted((key[0], _without_marks(key[2])) for key in created if DRAWN in key[2])
    )
    plain = [
        frozenset((service, kind, _without_marks(where)) for service, kind, where in keys)
        for keys in (created, removed)
    ]
    return [SentWrite(name, params, generated_ids, *plain) for name, params in requests]


def _without_marks(text: str) -> str:
    """Return a string without the marks around generated parts."""
    return text.replace(DRAWN, "").replace(END_DRAWN, "")


@cache
def member_table() -> MemberTable:
    """Return the package's table, with the notes."""
    return read_table(json.loads(TABLE.read_text(encoding="utf-8")), read_notes())


def table_text(table: Mapping[str, Any]) -> str:
    """Return a table as the text of its file. Each member has its own line, so that a diff is
    readable."""
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def read_table(table: Mapping[str, Any], notes: Notes) -> MemberTable:
    """Return the member table from the content of its file, with the notes."""
    operations = table["operations"]
    return MemberTable(
        {name: entry["members"] for name, entry in operations.items() if "members" in entry},
        {name: entry["about"] for name, entry in operations.items() if entry.get("about")},
        notes.uses,
        [*_defaults_of_notes(notes), *_defaults_of_accounts()],
        partial(_fate_from_notes, notes),
    )


def _defaults_of_notes(notes: Notes) -> Iterator[Default]:
    """Yield the defaults in the notes."""
    for (operation, path), value in notes.defaults.items():
        for _, text in leaves(value):
            yield Default(operation, path, text)
    for note in notes.conditional:
        for _, text in leaves(note["value"]):
            where = {member: str(value) for member, value in note["where"].items()}
            yield Default(note["operation"], note["member"], text, where)


def _defaults_of_accounts() -> Iterator[Default]:
    """Yield the defaults in ``meanings.yaml`` that requests write in the same way as accounts.

    A snapshot leaves a member out if it has its default value, so the same default must apply to
    the request.
    """
    for kind, rows in known_defaults().items():
        for row in rows:
            if "where" not in row and not row["is"].startswith("{"):
                yield Default(
                    f"{kind.partition('/')[0]}:",
                    row["path"].replace("[]", ELEMENT).replace("/", "."),
                    row["is"],
                )


def _fate_from_notes(notes: Notes, operation: str, path: str) -> str:
    """Return a member's fate according to the notes, or ""."""
    if notes.steers(operation, path):
        return STEERS
    return TEXT if notes.is_text(operation, path) else ""
