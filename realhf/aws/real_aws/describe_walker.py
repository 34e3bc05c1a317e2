"""Reads an account by its list and describe calls, guided by botocore's models alone.

First the calls that need no argument; then, again and again, the calls whose arguments stand in an answer that is
already there, together with the arguments that led to it, until nothing new comes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.exceptions import UnknownServiceError
from botocore.model import MapShape, Shape

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.state_client import StateCallError

_session = functools.cache(botocore.session.Session)
OperationModel = Any
"""Is botocore's class of this name, whose attributes have no types."""


@functools.cache
def operation_models(service: str) -> Mapping[str, OperationModel]:
    """Return the operations of a service (botocore's name) by their API names; none for an unknown service."""
    try:
        model: Any = _session().get_service_model(service)
    except UnknownServiceError:
        return {}
    return {name: model.operation_model(name) for name in model.operation_names}


def members(shape: Any) -> Mapping[str, Shape]:
    """Return the members of a structure; none for any other shape."""
    return getattr(shape, "members", {})


def required_members(shape: Any) -> Sequence[str]:
    """Return the members that a structure must have."""
    return getattr(shape, "required_members", ())


def element(shape: Any) -> Shape | None:
    """Return the shape of a list's elements or of a map's values; None for any other shape."""
    return getattr(shape, "value" if isinstance(shape, MapShape) else "member", None)


def words(shape: Any) -> Sequence[str]:
    """Return the words that a text may be, those of the keys for a map; none where any text will do."""
    return words(shape.key) if isinstance(shape, MapShape) else getattr(shape, "enum", ())


def bounds(shape: Any) -> Mapping[str, Any]:
    """Return what the model says of a value's size: perhaps ``min`` and ``max``."""
    return getattr(shape, "metadata", {})


_VARIANTS = 8
"""Most calls that differ in a word of an enumeration."""
MAX_CALLS = 2000
"""Most calls of one walk; an account that needs more is read in part."""
_CLI_SERVICES = {"s3": "s3api"}
_READS = re.compile(r"(Get|List|Describe|Head|BatchGet|Scan)(?=[A-Z]|$)(?!.*History$)")
"""Operations that tell what there is, not what there was."""
_CATALOGUES = frozenset(
    {
        *("DescribeAvailabilityZones", "DescribeDBEngineVersions", "DescribeInstanceTypes", "DescribeRegions"),
        *("GetAccountSummary", "GetMetricStatistics", "GetSendQuota", "ListDocuments", "ListMetrics", "ListVersions"),
    }
)
"""Reads of what AWS offers to everybody, of readings, and of counts of what other reads list."""
_OF_ONES_OWN = {"OwnerIds": ["self"], "Owners": ["self"]}
"""Arguments that leave out what others share with everybody."""
_IDENTITY = re.compile(r"(name|id|arn|url|identifier|key|bucket)$", re.IGNORECASE)
_PARTS = ("name", "id", "arn", "identifier", "url")
ID = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|(?<=-)[0-9a-f]{8,17}\b|\b[0-9a-f]{16,64}\b"
    r"|\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8}\b|\bA[KIRSGN][A-Z]{2}[A-Z0-9]{12,17}\b|\b(?=[a-z]*\d)[a-z0-9]{10}\b"
    r"|\b(?=[a-z]*\d)[a-z0-9]{16}\b|(?<=\d_)[0-9A-Za-z]{9}\b|\bZ[A-Z0-9]{10,}\b|\b(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)\w{20,}={0,2}"
)
"""Ids by their looks: what a service made up, and no person would."""
Call = Callable[[str, str, dict[str, Any]], Mapping[str, Any]]
Answers = Mapping[str, Any]
"""By ``service:Operation {arguments}`` the answer; of an error its code."""


def walk(call: Call, services: Iterable[str], permits: Callable[[str, str], bool] | None = None) -> Answers:
    """Return what every permitted read of these services (botocore's names) answers. ``call(service, operation,
    arguments)`` returns an answer or raises StateCallError; ``permits(service, operation)`` leaves out further reads.
    Raises what else ``call`` raises, such as ConnectionError."""
    answers: dict[str, Any] = {}
    for service in sorted(set(services)):
        reads = [model for model in _reads(service) if permits is None or permits(service, model.name)]
        _Walk(call, service, reads, answers).run()
    return answers


@functools.cache
def _reads(service: str) -> tuple[OperationModel, ...]:
    """Return the models of the reads that are permitted in a service."""
    permitted = ALLOWED.get(_CLI_SERVICES.get(service, service), frozenset())
    found = sorted(operation_models(service).items())
    return tuple(
        model
        for name, model in found
        if _READS.match(name) and name not in _CATALOGUES and xform_name(name, "-") in permitted
    )


class _Walk:
    """Walks one service. A *record* is what is known of one thing: the scalars of a structure in an answer, those
    around it, and the arguments of the call, by lower-case name; "" holds the kind of thing, "bucket"."""

    def __init__(self, call: Call, service: str, reads: Sequence[OperationModel], answers: dict[str, Any]) -> None:
        self._call, self._service, self._reads, self._answers = call, service, reads, answers
        self._records: list[dict[str, Any]] = []

    def run(self) -> None:
        """Call until no answer gives the arguments of another call."""
        for model in self._reads:
            self._ask(model, {})
        for record in self._records:  # grows while it is walked
            if len(self._answers) >= MAX_CALLS:
                break
            for model in self._reads:
                self._ask(model, record)

    def _ask(self, model: OperationModel, record: Mapping[str, Any]) -> None:
        """Call an operation with the arguments that a record gives, {} standing for none, unless it needs others."""
        taken = _taken(model, record)
        if bool(taken) is not bool(record):
            return
        for always in _always(model):
            if {*required_members(model.input_shape)} <= {*taken, *always}:
                self._call_once(model, taken, always)

    def _call_once(self, model: OperationModel, taken: dict[str, Any], always: Mapping[str, Any]) -> None:
        chosen = {name: value for name, value in always.items() if isinstance(value, str)}
        operation = f"{self._service}:{model.name}{'/' if chosen else ''}{'/'.join(chosen.values())}"
        key = f"{operation} {json.dumps(taken, sort_keys=True)}"
        if key in self._answers:
            return
        try:
            answer = plain(self._call(self._service, model.name, {**always, **taken}))
        except StateCallError as error:
            self._answers[key] = {"error": error.code}
            return
        self._answers[key] = answer
        given = {name.lower(): value for name, value in taken.items() if isinstance(value, str)}
        noun = noun_of(model.name)
        for record in _records(answer, noun, given):
            if record not in self._records and not _is_no_thing(record):
                self._records.append(record)


def plain(value: Any) -> Any:
    """Return an answer as plain data: times as text, contents by their digest, documents in texts taken apart."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if hasattr(value, "read"):
        value = value.read()
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            return plain(json.loads(value))
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()[:7]}"
    return value


def _is_no_thing(record: Mapping[str, Any]) -> bool:
    """Return whether a record is of a tag, or of a policy that every account has."""
    return record[""] in ("tag", "tagset") or str(record.get("arn", "")).startswith("arn:aws:iam::aws:")


def noun_of(name: str) -> str:
    """Return what a member or an operation is about: "secret" of "SecretList" and "DescribeSecret"."""
    word = _READS.sub("", name).lower()
    for ending in ("summarylist", "summaries", "list", "items"):
        word = word.removesuffix(ending) or word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _records(value: Any, noun: str, around: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record of each thing in an answer."""
    if isinstance(value, Mapping):
        own = {key.lower(): item for key, item in value.items() if isinstance(item, str) and _IDENTITY.search(key)}
        record = {**around, **own, "": noun}
        if own:
            yield record
        for key, item in value.items():
            yield from _records(
                item, inner_noun(key, noun), {name: one for name, one in record.items() if name not in _PARTS}
            )
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, str):
                yield {**around, noun: item, "": re.sub("(name|arn|url|id)$", "", noun)}
            else:
                yield from _records(item, noun, around)


def _taken(model: OperationModel, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a record gives to a call: all that it must have, and of others what names the record's
    own thing."""
    required, noun, kind = required_members(model.input_shape), noun_of(model.name), record.get("", "")
    if not record or (not required and _same(kind, noun)):
        return {}  # it stands in the list of all
    found = {
        name: _argument(name, member, noun, record)
        for name, member in members(model.input_shape).items()
        if name in required or name.lower().startswith(kind.removesuffix("e")) or (required and _IDENTITY.search(name))
    }
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _always(model: OperationModel) -> tuple[Mapping[str, Any], ...]:
    """Return the arguments that a call has in any account, how much is listed at once and the like; one set for each
    word of an enumeration."""
    required = required_members(model.input_shape)
    found: list[dict[str, Any]] = [{}]
    for name, member in members(model.input_shape).items():
        values = _choices(member) if name in required else _everything(name, member)
        if values:
            found = [{**one, name: value} for one in found for value in values]
    return tuple(found[:_VARIANTS])


def _same(kind: str, noun: str) -> bool:
    return kind.removesuffix("e") == noun.removesuffix("e")


def _argument(name: str, shape: Shape, noun: str, record: Mapping[str, Any]) -> Any:
    lower, kind = name.lower(), record.get("", "")
    if shape.type_name == "list":
        inner = element(shape)
        if inner is None or inner.type_name != "string" or not lower.endswith("s"):
            return None
        single = _argument(name.removesuffix("s"), inner, noun, record)
        return None if single is None else [single]
    if shape.type_name != "string" or not record:
        return None
    if lower in _PARTS:
        return (record.get(lower) or record.get(kind)) if kind and noun.startswith(kind.removesuffix("e")) else None
    if lower in record and lower:
        return record[lower]
    if kind and _same(lower, kind):
        return record.get(f"{kind}name") or record.get("name") or record.get("arn")
    if lower in ("resourcearn", "resourcename", "resource", "resourceid"):
        return record.get("arn") or record.get(f"{kind}arn")
    for part in _PARTS:
        if lower in (f"{kind}{part}", f"{kind.removesuffix('e')}{part}"):
            return record.get(part) or (
                record.get("name") or record.get("arn") if part in ("id", "identifier") else None
            )
    return None


def _choices(shape: Shape) -> Sequence[Any]:
    """Return the values for a required member that no record gives: each of an enumeration, or the most that is listed
    at once."""
    if choice := words(shape):
        return choice
    return [bounds(shape).get("max", 60)] if shape.type_name in ("integer", "long") else []


def _everything(name: str, shape: Shape) -> Sequence[Any]:
    """Return the value of an optional member that has everything told, or nothing but what is one's own."""
    if name in _OF_ONES_OWN and shape.type_name == "list":
        return [_OF_ONES_OWN[name]]
    if name == "Scope" and "Local" in words(shape):
        return ["Local"]
    choice = words(element(shape)) if shape.type_name == "list" else ()
    return [[word] for word in ("All", "ALL") if word in choice][:1]


def own_names(part: Mapping[str, Any], noun: str) -> list[tuple[str, str]]:
    """Return the (kind of name, value) pairs by which a structure names itself, the best first."""
    found = []
    for key, value in part.items():
        match = _IDENTITY.search(key)
        if match is None or not isinstance(value, str) or not value:
            continue
        base = key.lower()[: match.start()]
        if not base or (noun and (noun.endswith(base) or base.endswith(noun))):
            found.append((match[1].lower(), value))
    order = ("key", "name", "bucket", "id", "identifier", "arn", "url")
    return sorted(found, key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order))


def inner_noun(key: str, noun: str) -> str:
    """Return what a member of a structure about ``noun`` is about."""
    return noun if key in ("Items", "items", "Item") else noun_of(key)
