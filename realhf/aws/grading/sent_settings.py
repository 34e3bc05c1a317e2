"""Compares what was asked of a resource where the simulator drops it, so that no snapshot could show it.

For each write operation, ``kept_members.json`` says which members of a request reach the account of a simulator; the
command ``python -m realhf.aws.tasks members`` finds it out by sending requests with and without them.
``member_notes.yaml`` says by hand what no request can show: defaults that AWS documents, members that only steer a
request, texts and tags. A member of which neither says anything counts as one that is not kept.

A *setting* is a member of a request with the resource that the request is about, its *subject*; what counts is the
value that was sent last. Source: docs/reference/environment.md 7.
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
from realhf.aws.grading.stack_templates import OF_STACK, UNKNOWN, UnreadTemplate, declared
from realhf.aws.grading.tracker import identifying, identity, is_read
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

TABLE = Path(__file__).with_name("kept_members.json")
REMAKE = "python -m realhf.aws.tasks members tests/aws/validation/plays/*.yaml"
"""Makes the table anew."""
KEPT = "kept"
NOT_KEPT = "not kept"
NAMES = "names the resource"
STEERS = "steers the request only"
DEFAULT = "default"
TEXT = "text or tag"
NOT_PROBED = "not probed"
"""Begins a fate that a reason follows."""
_COMPARED = (NOT_KEPT, DEFAULT, NOT_PROBED)
ANY = "*"
"""Stands, in a path, for any key of a map."""
ELEMENT = "[]"
_MAKES = re.compile(r"^AWS::|:(Create|Run|Allocate|Request|Register|Import|Copy|Restore)")
_REPLACES = re.compile(r"^AWS::|:(Create|Run|Put|Set|Register|Request)")
"""Operations that say the whole of a thing, so that what they do not send is as it is by default."""
_CREATES = re.compile(r"^AWS::|:Create")
_VERB = re.compile(r"^[A-Z][a-z]+(?=[A-Z])")
_ENDS = re.compile(r":(Delete|Terminate|Deregister|Release|Remove|Schedule\w*Deletion)")
_RESTORES = re.compile(r":(Restore|Cancel)")
_VERSIONS = frozenset({"Qualifier", "Version", "VersionId", "Versions"})
"""Members that say of which version something is taken away, while the rest stays."""
_TAKES_AWAY = re.compile(
    r":(Delete|Terminate|Deregister|Release|Remove|Schedule\w*Deletion|Detach|Disassociate|Untag|Abort|Cancel)"
)
_STACKS = frozenset({"cloudformation:CreateStack", "cloudformation:UpdateStack"})
_TYPE = "AWS::"
_UNNAMED = "(unnamed)"
"""Begins the subject of what a template declares under no name that is known: it is compared whatever it is."""
_NAME_SUFFIX = re.compile(r"(name|identifier|id)$")
_UNREAD = "AWS::CloudFormation::Template"
"""Stands for a template that is not read: what it declares counts as asked otherwise."""
_TYPE_SERVICES: Mapping[str, str] = {
    "CertificateManager": "acm",
    "Cognito": "cognito-idp",
    "ElasticLoadBalancingV2": "elbv2",
    "KinesisFirehose": "firehose",
    "OpenSearchService": "opensearch",
}
"""botocore's names of services that types of resources call otherwise than in lower case."""
_ATTRIBUTES = "Attributes"
_ATTRIBUTE = frozenset({"AttributeName", "AttributeValue"})
"""Members of a request that sets one attribute: the value of the one says which."""
_TRUTHS = frozenset({"true", "false"})
_SHOWN_CHARS = 200
_MOST_VALUES = 30_000
"""Values of one episode that are read; who sends more has asked otherwise."""
_TELLING = 4
"""Length from which a text is hardly in an account by chance."""
_MOST_BITS = 10_000
"""Python refuses to write larger numbers in decimals."""
Steps = tuple[str, ...]
"""Leads to a member: its names, and ``ELEMENT`` for the elements of a list."""
Subject = tuple[str, ...]
"""Says what a request is about: a service, and the names or ids of a resource in it."""


@dataclass(frozen=True)
class Deed:
    """Records a write that was accepted, with what came and went by the command that sent it."""

    operation: str
    """The operation as "service:Operation", or the type of a resource that a template declares."""
    params: Mapping[str, Any]
    """Its parameters."""
    made: tuple[tuple[str, str], ...] = ()
    """The ids that services drew for what is there since, each behind its service."""
    born: frozenset[Key] = frozenset()
    """The resources that are there since."""
    gone: frozenset[Key] = frozenset()
    """The resources that are there no more, or were made anew."""


Values = frozenset[str]
"""What one request sent of a member, as text; none where it did not send it, or sent its default."""


@dataclass(frozen=True)
class Setting:
    """Holds what a resource was told of one of its members."""

    sent: tuple[Values, ...]
    """What each request of the last operation sent, in their order: where several things are known by one name, as the
    routes of a table, each has a request of its own."""
    operation: str
    """The last operation."""
    path: Steps
    """The member of its request."""
    fate: str
    """What becomes of it."""

    @property
    def last(self) -> Values:
        """What was sent last."""
        return self.sent[-1]

    @property
    def ever(self) -> Values:
        """What any of these requests sent."""
        return frozenset().union(*self.sent)


_UNSENT: tuple[Values, ...] = (frozenset(),)
Settings = Mapping[Subject, Mapping[Steps, Setting]]
Resources = Mapping[Key, Mapping[str, Any]]


@dataclass(frozen=True)
class Default:
    """Holds what AWS takes for a member that is not sent."""

    operation: str
    """The operation, or "service:" for all of a service."""
    path: str
    """The member, as ``said`` writes it."""
    value: str
    where: Mapping[str, str] = field(default_factory=dict)
    """What has to be sent beside, by member."""


class MemberTable:
    """Knows what becomes of members. ``fates``: for each operation, by path as ``said`` writes it; ``about``: which
    members name what a request is about; ``uses``: operations that only use a resource; ``defaults``: what AWS
    documents; ``noted``: the fate that is noted by hand for an operation and a path, or ""."""

    def __init__(
        self,
        fates: Mapping[str, Mapping[str, str]],
        about: Mapping[str, Sequence[str]],
        uses: Iterable[str] = (),
        defaults: Iterable[Default] = (),
        noted: Callable[[str, str], str] = lambda operation, path: "",
    ) -> None:
        self.uses = frozenset(uses)
        self._about = about
        self._fates = {operation: _tree(members) for operation, members in fates.items()}
        self._noted = noted
        self._defaults: defaultdict[tuple[str, Steps], list[Default]] = defaultdict(list)
        for one in defaults:
            self._defaults[service_of(one.operation), _plain(tuple(steps(one.path)))].append(one)

    def fate(self, operation: str, path: Steps) -> str:
        """Return what becomes of a member: what the table says of it, or of the structure that it lies in. Of an
        operation that was not probed the notes speak; what it only takes away is no setting."""
        if operation in self._fates:
            return self._probed(operation, path)
        noted = (self._noted(operation, said(path[:end])) for end in range(1, len(path) + 1))
        fate = next(filter(None, noted), "")
        if not fate and _TAKES_AWAY.search(operation):
            fate = NAMES
        return fate or NOT_PROBED

    def _probed(self, operation: str, path: Steps) -> str:
        found = NOT_PROBED
        node = self._fates.get(operation, {})
        for step in path:
            node = (node.get(step) if step else None) or node.get(ANY)  # "" holds the fate of the node itself
            if node is None:
                break
            found = node.get("", found)
        return found

    def is_default(self, deed: Deed, path: Steps, value: str) -> bool:
        """Return whether a value is the one that AWS documents for a member that is not sent. What it documents of one
        operation holds for the others that are about the same kind of thing, and for its type in a template."""
        known = self._defaults.get((service_of(deed.operation), _plain(path)), [])
        own = [one for one in known if one.operation == deed.operation]
        known = own or [one for one in known if _of_a_kind(one.operation, deed.operation)]
        return any(
            one.value.lower() == value.lower()
            and all(str(deed.params.get(member)) == wanted for member, wanted in one.where.items())
            for one in known
        )

    def about(self, deed: Deed) -> Sequence[str]:
        """Return the members that name what a request is about."""
        known = self._about.get(deed.operation)
        if known is None and deed.operation.startswith(_TYPE):
            noun = _noun(deed.operation).rpartition("::")[2].lower()
            known = [member for member in deed.params if _names_a(noun, member.lower())]
        if known is None:
            known = [identifying(service_of(deed.operation), deed.params)[0]]
        return known

    def subject(self, deed: Deed) -> Subject:
        """Return what a request is about: by the name that it gives, or by the ids that were drawn for it."""
        service = service_of(deed.operation)
        values = [deed.params.get(member) for member in self.about(deed)]
        named = [identity(service, value) for value in values if isinstance(value, str)]
        made = [name for its, name in deed.made if its == service]
        is_declared = deed.operation.startswith(_TYPE)
        if is_declared and any(
            value is not None and (value in UNKNOWN or not isinstance(value, str)) for value in values
        ):
            named = []
        if made and _MAKES.search(deed.operation):
            theirs = {part for key in deed.born if key[0] == service for part in _pieces(key[2])}
            if not (named and named[-1] in theirs):
                named = made
        if not named and is_declared:
            named = [f"{_UNNAMED} {deed.operation}"]
        return service, *named


def _names_a(noun: str, member: str) -> bool:
    """Return whether a property names a resource of a type, both in lower case, as DBInstanceIdentifier does."""
    stem = _NAME_SUFFIX.sub("", member)
    return member in (noun, "name", "family") or (stem != member and stem != "" and stem in noun)


def _tree(members: Mapping[str, str]) -> dict[str, Any]:
    """Return fates by path as a tree whose nodes hold theirs under ""."""
    root: dict[str, Any] = {}
    for text, fate in members.items():
        node = root
        for step in steps(text):
            node = node.setdefault(step, {})
        node[""] = fate
    return root


def said(path: Steps) -> str:
    """Return a path as it is written in the table: ``Statements[].Name``, keys of maps in braces."""
    return ".".join(path).replace(f".{ELEMENT}", ELEMENT)


def steps(text: str) -> list[str]:
    """Return the path that ``said`` wrote."""
    return text.replace(ELEMENT, f".{ELEMENT}").split(".")


def last_sent(deeds: Iterable[Deed], table: MemberTable, renamed: Callable[[str], str] = str) -> Settings:
    """Return the settings that requests leave, in their order; ``renamed`` is done to each text in them."""
    ledger = _Ledger(table, renamed)
    for deed in deeds:
        ledger.take(deed)
    return ledger.held


class _Ledger:
    """Writes down what each resource is told, request by request. ``held``: the settings as they stand."""

    def __init__(self, table: MemberTable, renamed: Callable[[str], str]) -> None:
        self.held: dict[Subject, dict[Steps, Setting]] = {}
        self._table = table
        self._renamed = renamed
        self._there: defaultdict[Subject, dict[str, frozenset[Key]]] = defaultdict(dict)
        """What was created and is there, by its kind: the resources of the account that came with it."""
        self._at_top: defaultdict[tuple[Subject, str], set[Steps]] = defaultdict(set)
        """Settings by the first step of their path."""
        self._asked: defaultdict[tuple[Subject, str], set[Steps]] = defaultdict(set)
        """Settings by the operations that a subject has seen."""
        self._made_with: dict[tuple[str, str], Subject] = {}
        """Of each drawn id the resource that it was drawn with: later requests name that by the id."""
        self._stacks: dict[str, Mapping[str, Any]] = {}
        """The last request about each stack."""
        self._declared: dict[str, list[Deed]] = {}
        """What each stack declares."""
        self._left = _MOST_VALUES

    def take(self, deed: Deed) -> None:
        """Write down a request, and what the template declares that it sends."""
        if deed.gone:
            self._end_what_is_gone(deed.gone)
        if deed.operation in self._table.uses or is_read(deed.operation, deed.params):
            return
        self._take(deed)
        if deed.operation in _STACKS:
            name = identity("cloudformation", str(deed.params.get("StackName")))
            params = _as_it_stays(deed.params, self._stacks.get(name, {}))
            self._stacks[name] = params
            before = {(self._subject(one), one.operation) for one in self._declared.get(name, ())}
            self._declared[name] = _declared_by(params, deed)
            for subject, kind in before & {(self._subject(one), one.operation) for one in self._declared[name]}:
                self._forget(subject, set(self._asked.pop((subject, kind), ())))  # a template says all of it again
            for one in self._declared[name]:
                self._take(one)

    def _subject(self, deed: Deed) -> Subject:
        subject = self._table.subject(deed)
        if _MAKES.search(deed.operation):
            self._made_with |= {made: subject for made in deed.made if made[0] == subject[0]}
        for part in subject[1:]:
            subject = self._made_with.get((subject[0], part), subject)
        return tuple(self._renamed(part) for part in subject)

    def _take(self, deed: Deed) -> None:
        sent = self._sent_by(deed)
        self._left -= sum(len(values) for _, values in sent.values())
        if self._left < 0:
            deed = Deed(_UNREAD, {"TemplateBody": "more than is read of one episode"})
            sent = self._sent_by(deed)
        subject = self._subject(deed)
        kind = _noun(deed.operation)
        creates = _CREATES.search(deed.operation) is not None
        again = (subject, deed.operation) in self._asked
        stays = creates and self._is_there(subject, kind, deed)
        if creates and not stays:
            self._end(subject, kind)
            self._there[subject][kind] = _named(deed.born, self._table.subject(deed))
            again = (subject, deed.operation) in self._asked
        if _ENDS.search(deed.operation) and not _VERSIONS & deed.params.keys():
            self._end_by_request(subject, kind, deed)
        if _RESTORES.search(deed.operation):
            ended = {path for path, one in self.held.get(subject, {}).items() if _ENDS.search(one.operation)}
            self._forget(subject, ended)
        self._write(subject, deed, sent, again=again, stays=stays)

    def _write(
        self,
        subject: Subject,
        deed: Deed,
        sent: Mapping[Steps, tuple[Steps, set[str]]],
        *,
        again: bool,
        stays: bool,
    ) -> None:
        """Write down what a request sends. ``again``: not for the first time; ``stays``: to what is there already and
        stays as it was created."""
        held = self.held.setdefault(subject, {})
        top = {path[0] for path in sent} | {name.lower() for name in deed.params if name != _ATTRIBUTES}
        touched = {path for name in top for path in self._at_top.get((subject, name), ())}
        if again and _REPLACES.search(deed.operation):
            touched |= self._asked[subject, deed.operation]
        for path in touched:
            setting = held[path]
            values = frozenset(sent[path][1]) if path in sent else frozenset()
            if stays and path in sent:
                held[path] = replace(setting, sent=(values, *setting.sent))
            elif setting.operation == deed.operation:
                held[path] = replace(setting, sent=(*setting.sent, values))
            elif path not in sent and path[0] in top and not stays:
                self._forget(subject, {path})
        self._asked[subject, deed.operation] |= set()
        for path, (where, values) in sent.items():
            if path in held and (stays or held[path].operation == deed.operation):
                continue
            self._forget(subject, {path} & held.keys())
            fate = self._table.fate(deed.operation, where)
            before = _UNSENT if again else ()
            held[path] = Setting((*before, frozenset(values)), deed.operation, where, fate)
            self._at_top[subject, path[0]].add(path)
            self._asked[subject, deed.operation].add(path)

    def _is_there(self, subject: Subject, kind: str, deed: Deed) -> bool:
        """Return whether something that a request would create is there already, and was left as it is."""
        if kind in self._there[subject]:
            return True
        return bool(self._there[subject]) and not _named(deed.born, self._table.subject(deed))

    def _sent_by(self, deed: Deed) -> dict[Steps, tuple[Steps, set[str]]]:
        """Return the members that a request sends, with their values but for defaults."""
        found: dict[Steps, tuple[Steps, set[str]]] = {}
        about = self._table.about(deed)
        for path, value in leaves(deed.params):
            if path[0] not in about and _plain(path):
                _, values = found.setdefault(_plain(path), (path, set()))
                if not self._table.is_default(deed, path, value):
                    values.add(self._renamed(_as_meant(value)))
        return found

    def _end_what_is_gone(self, gone: frozenset[Key]) -> None:
        """Forget what was told of resources that are there no more, whatever request removed them."""
        for subject, kinds in list(self._there.items()):
            for kind, born in list(kinds.items()):
                if born and born & gone:
                    kinds[kind] = born - gone
                    if not kinds[kind]:
                        self._end(subject, kind)

    def _end_by_request(self, subject: Subject, kind: str, deed: Deed) -> None:
        """Forget what was told of something that nobody was seen to create: of a part, as the rules of a bucket, and of
        what the set-up made, if it is gone from the account."""
        if self._there[subject].get(kind):
            return
        if kind in self._there[subject]:
            if any(key[0] == subject[0] and set(_pieces(key[2])) & set(subject[1:]) for key in deed.gone):
                self._end(subject, kind)
            return
        held = self.held.get(subject, {})
        alone = {path for path, one in held.items() if _noun(one.operation) == kind and len(one.sent) == 1}
        self._forget(subject, alone)

    def _end(self, subject: Subject, kind: str) -> None:
        """Forget what was told of a thing and of its parts."""
        was_there = self._there[subject].pop(kind, None) is not None
        others = self._there[subject].keys()
        for other in list(self.held):
            inner = was_there and other[: len(subject)] == subject and len(other) > len(subject) > 1
            if other != subject and not inner:
                continue
            if inner:
                self._there.pop(other, None)
            self._forget(
                other,
                {
                    path
                    for path, one in self.held[other].items()
                    if inner or _noun(one.operation).startswith(kind) or (was_there and not others)
                },
            )

    def _forget(self, subject: Subject, paths: Set[Steps]) -> None:
        for path in paths:
            setting = self.held[subject].pop(path)
            self._at_top[subject, path[0]].discard(path)
            asked = self._asked.get((subject, setting.operation))
            if asked is not None:
                asked.discard(path)
                if not asked:
                    del self._asked[subject, setting.operation]


def _named(keys: Iterable[Key], subject: Subject) -> frozenset[Key]:
    """Return those of some resources that a subject names."""
    return frozenset(key for key in keys if key[0] == subject[0] and set(_pieces(key[2])) & set(subject[1:]))


def _as_meant(value: str) -> str:
    """Return a value so that it is the same for what means the same: a resource of this account by its name, a document
    without its spaces."""
    if value.startswith("arn:"):
        return identity("", value)
    if value.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(value), sort_keys=True)
        except (ValueError, RecursionError):
            return value
    return value


def _of_a_kind(one: str, other: str) -> bool:
    """Return whether two operations are about things of one kind, as CreateFunction and UpdateFunctionConfiguration;
    those of other kinds may have the same name."""
    nouns = sorted((_noun(name).rpartition("::")[2] for name in (one, other)), key=len)
    return nouns[1].startswith(nouns[0])


def _noun(operation: str) -> str:
    """Return what an operation is about: the whole of a thing begins the names of its parts, as Bucket and
    BucketCors."""
    name = operation.rpartition(":")[2]
    return name if operation.startswith(_TYPE) else _VERB.sub("", name).removesuffix("Deletion")


def _declared_by(params: Mapping[str, Any], deed: Deed) -> list[Deed]:
    """Return what a request about a stack declares: a resource is a deed whose operation is its type. Of a template
    that cannot be read, or lies elsewhere, nobody knows what it sets."""
    try:
        return [Deed(one.type, one.properties, deed.made, deed.born) for one in declared(params)]
    except UnreadTemplate:
        return [Deed(_UNREAD, {"TemplateBody": str(params.get("TemplateBody"))[:_SHOWN_CHARS]})]


def _as_it_stays(params: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a request about a stack with the template and the values that it keeps from ``before``,
    the last one."""
    known = {given.get("ParameterKey"): given for given in _parameters(before)}
    values = [
        known.get(given.get("ParameterKey"), given) if given.get("UsePreviousValue") else given
        for given in _parameters(params)
    ]
    body = before.get("TemplateBody") if params.get("UsePreviousTemplate") else params.get("TemplateBody")
    return {**params, "TemplateBody": body, "Parameters": values}


def _parameters(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the values of a stack's parameters in a request."""
    given = request.get("Parameters")
    return [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []


def _plain(path: Steps) -> Steps:
    """Return a path as it is the same for an API and for templates: in lower case, without the map of attributes."""
    return tuple(step.lower() for step in path if step.lower() != _ATTRIBUTES.lower())


def service_of(operation: str) -> str:
    """Return the service (botocore's name) of an operation, or of a type of resource of CloudFormation."""
    if not operation.startswith(_TYPE):
        return operation.partition(":")[0]
    name = operation.split("::")[1]
    return _TYPE_SERVICES.get(name, name.lower())


def leaves(value: Any, path: Steps = ()) -> Iterator[tuple[Steps, str]]:
    """Yield every value in parameters that holds no others, as text; what is empty or None is as good as not sent,
    but for a structure, which may switch something on."""
    if isinstance(value, Mapping):
        if not value and path:
            yield path, "{}"
        if value.keys() >= _ATTRIBUTE:
            yield from leaves(value["AttributeValue"], (*path, _ATTRIBUTES, str(value["AttributeName"])))
        for name, item in value.items():
            if name not in _ATTRIBUTE or not value.keys() >= _ATTRIBUTE:
                yield from leaves(item, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, (*path, ELEMENT))
    elif isinstance(value, bool):
        yield path, str(value).lower()
    elif isinstance(value, int):
        yield path, hex(value) if value.bit_length() > _MOST_BITS else str(value)
    elif value is not None:
        yield path, str(value)


def sent_otherwise(mine: Settings, wanted: Settings, account: Resources, target: Resources) -> list[str]:
    """Return, in words, each setting of a resource of the target that the simulator does not keep and that is not as
    the solution sent it. Of what was not probed, ``account`` and ``target`` may show that they have kept it."""
    names = {(service, part) for service, _, where in target for part in _parts(where)}
    names |= {(subject[0], part) for subject in wanted for part in subject[1:]}
    shown = _Shown(account)
    wanted_shown = _Shown(target)
    found = []
    for subject in sorted(mine.keys() | wanted.keys()):
        is_known = any((subject[0], part) in names or part.startswith(_UNNAMED) for part in subject[1:])
        if subject[1:] and not is_known:
            continue  # it is no resource of the target
        ours = mine.get(subject, {})
        its = wanted.get(subject, {})
        for path in sorted(ours.keys() | its.keys()):
            one = ours.get(path)
            other = its.get(path)
            is_shown = shown.has(subject, one) or wanted_shown.has(subject, one)
            if _is_as_wanted(one, other) or (is_shown and wanted_shown.has(subject, other)):
                continue
            found.append(f"{_in_words(one, other)}, of {' '.join(subject[1:])}")
    return found


def _is_as_wanted(mine: Setting | None, its: Setting | None) -> bool:
    """Return whether a setting needs no look, as the account tells it or it is as the solution sent it. Where several
    things have one name, each of them may have been asked for first, alone or with the others."""
    if not any(held and held.fate.startswith(_COMPARED) for held in (mine, its)):
        return True
    sent = mine.sent if mine else _UNSENT
    wanted = its.sent if its else _UNSENT
    ever = frozenset().union(*sent)
    allowed = frozenset().union(*wanted)
    several = mine is not None and ELEMENT in mine.path and bool(ever)
    if not sent[-1] and frozenset() not in wanted and not several:
        return False
    if mine is not None and mine.operation.startswith(_TYPE) and OF_STACK in ever:
        return bool(allowed) and ever <= allowed | {OF_STACK}
    if mine is not None and _CREATES.search(mine.operation) and not ever <= allowed:
        return False  # what is there already stays as it was created
    return sent[-1] <= allowed and wanted[-1] <= ever


def _in_words(mine: Setting | None, its: Setting | None) -> str:
    one = mine or its
    assert one is not None
    compared = next(held for held in (mine, its) if held and held.fate.startswith(_COMPARED))
    unknown = f"; {REMAKE} finds out whether the simulator keeps it" if compared.fate.startswith(NOT_PROBED) else ""
    sent, asked = (", ".join(sorted(held.ever)) if held and held.ever else "nothing" for held in (mine, its))
    return f"{one.operation} {said(compared.path)} = {sent[:_SHOWN_CHARS]} and not {asked[:_SHOWN_CHARS]}{unknown}"


class _Shown:
    """Tells which settings an account shows by itself: a value under the name of its member, or a value that is there
    hardly by chance."""

    def __init__(self, account: Resources) -> None:
        self._account = account
        self._read: dict[Subject, tuple[frozenset[tuple[str, str]], frozenset[str]]] = {}

    def has(self, subject: Subject, setting: Setting | None) -> bool:
        """Return whether all that was sent last of a member that was not probed is there; of nothing that is so."""
        if setting is None:
            return True
        if not setting.fate.startswith(NOT_PROBED):
            return not setting.fate.startswith(_COMPARED)
        if subject not in self._read:
            self._read[subject] = self._leaves(subject)
        named, values = self._read[subject]
        name = next((step for step in reversed(setting.path) if step != ELEMENT), "").lower()
        of_stack = {OF_STACK} if setting.operation.startswith(_TYPE) else set()
        return all(self._is_there(name, value, named, values) for value in setting.last - of_stack)

    def _is_there(self, name: str, value: str, named: frozenset[tuple[str, str]], values: frozenset[str]) -> bool:
        if value[:1] in ("{", "["):
            try:
                inner = [(path[-1].lower(), text) for path, text in leaves(json.loads(value), (name,))]
            except (ValueError, RecursionError):
                inner = [(name, value)]
            if inner != [(name, value)]:
                return all(self._is_there(step, text, named, values) for step, text in inner)
        plain = _as_meant(value).lower()
        for text in (plain, plain.strip('"')):
            is_telling = len(text) >= _TELLING and not text.isdecimal() and text not in _TRUTHS
            if (name, text) in named or (is_telling and text in values):
                return True
        return False

    def _leaves(self, subject: Subject) -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
        """Return what the resources show that a subject names: (name of a member, value), and values alone. What only
        describes them shows nothing."""
        named = {part for part in subject[1:] if not part.startswith(_UNNAMED)}
        found = set()
        for key, held in self._account.items():
            if key[0] != subject[0] or (named and not named & {*_pieces(key[2]), _unmarked(key[2])}):
                continue
            for path, value in leaves(held):
                if only_describes(key, "/".join(path)):
                    continue
                name = next((step for step in reversed(path) if step != ELEMENT), "").lower()
                found.add((name, _as_meant(_unmarked(value)).lower()))
                if value[:1] in ("{", "["):
                    with suppress(ValueError, RecursionError):
                        inner = leaves(json.loads(value))
                        found |= {(path[-1].lower() if path else "", text.lower()) for path, text in inner}
        return frozenset(found), frozenset(value for _, value in found)


def _pieces(where: str) -> list[str]:
    """Return the texts that an identity is put together from."""
    plain = _unmarked(where)
    return [plain, *re.split("[/:|]", plain)]


def _parts(where: str) -> Iterator[str]:
    """Yield the identity of a resource, and what it ends with."""
    plain = _unmarked(where)
    yield plain
    yield re.split("[/:|]", plain)[-1]


def deeds_between(before: Snapshot, after: Snapshot, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Deed]:
    """Return the requests of one command with what came and went, as the account tells before and after it."""
    anew = {key for key, serial in after.serials.items() if before.serials.get(key, serial) != serial}
    born = (after.resources.keys() - before.resources.keys()) | anew
    gone = (before.resources.keys() - after.resources.keys()) | anew
    made = tuple(sorted((key[0], _unmarked(key[2])) for key in born if DRAWN in key[2]))
    plain = [frozenset((service, kind, _unmarked(where)) for service, kind, where in keys) for keys in (born, gone)]
    return [Deed(name, params, made, *plain) for name, params in requests]


def _unmarked(text: str) -> str:
    return text.replace(DRAWN, "").replace(END_DRAWN, "")


@cache
def member_table() -> MemberTable:
    """Return the table that comes with the package."""
    return read_table(json.loads(TABLE.read_text(encoding="utf-8")), read_notes())


def table_text(table: Mapping[str, Any]) -> str:
    """Return a table as the text of its file: a line for each member, so that two of them can be compared."""
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def read_table(found: Mapping[str, Any], notes: Notes) -> MemberTable:
    """Return the table that ``realhf.aws.tasks members`` made, with what is noted by hand."""
    operations = found["operations"]
    return MemberTable(
        {name: entry["members"] for name, entry in operations.items() if "members" in entry},
        {name: entry["about"] for name, entry in operations.items() if entry.get("about")},
        notes.uses,
        [*_noted_defaults(notes), *_defaults_of_accounts()],
        partial(_noted, notes),
    )


def _noted_defaults(notes: Notes) -> Iterator[Default]:
    for (operation, path), value in notes.defaults.items():
        for _, text in leaves(value):
            yield Default(operation, path, text)
    for note in notes.conditional:
        for _, text in leaves(note["value"]):
            where = {member: str(value) for member, value in note["where"].items()}
            yield Default(note["operation"], note["member"], text, where)


def _defaults_of_accounts() -> Iterator[Default]:
    """Yield the defaults by which accounts are compared, where requests write them alike: what an account is taken to
    show is hidden where it is the default."""
    for kind, rows in known_defaults().items():
        for row in rows:
            if "where" not in row and not row["is"].startswith("{"):
                yield Default(
                    f"{kind.partition('/')[0]}:", row["path"].replace("[]", ELEMENT).replace("/", "."), row["is"]
                )


def _noted(notes: Notes, operation: str, path: str) -> str:
    if notes.steers(operation, path):
        return STEERS
    return TEXT if notes.is_text(operation, path) else ""
