"""Reader of a whole account through its list and describe calls, guided only by botocore's models.

It starts with the calls that need no argument. Then it makes the calls whose arguments appear in
previous answers, or among the arguments of the calls that led to those answers, until no new call
is possible.
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
"""botocore's class of this name. The type is Any because its attributes are untyped."""


@functools.cache
def operation_models(service: str) -> Mapping[str, OperationModel]:
    """Return the models of a service's operations, by API name; {} for an unknown service.
    ``service``: botocore's name."""
    try:
        model: Any = _session().get_service_model(service)
    except UnknownServiceError:
        return {}
    return {name: model.operation_model(name) for name in model.operation_names}


def members(shape: Any) -> Mapping[str, Shape]:
    """Return a structure's members, or {} for any other shape."""
    return getattr(shape, "members", {})


def required_members(shape: Any) -> Sequence[str]:
    """Return a structure's required members."""
    return getattr(shape, "required_members", ())


def element(shape: Any) -> Shape | None:
    """Return the shape of a list's elements or of a map's values, or None for any other shape."""
    return getattr(shape, "value" if isinstance(shape, MapShape) else "member", None)


def allowed_values(shape: Any) -> Sequence[str]:
    """Return the allowed values of a string shape or of a map's keys, or () if any string is
    allowed."""
    return allowed_values(shape.key) if isinstance(shape, MapShape) else getattr(shape, "enum", ())


def bounds(shape: Any) -> Mapping[str, Any]:
    """Return a shape's metadata in the model, which may contain its limits as ``min`` and
    ``max``."""
    return getattr(shape, "metadata", {})


_MAX_VARIANTS = 8
"""Maximum number of calls that differ only in an enumeration's value."""
MAX_CALLS = 2000
"""Maximum number of calls in one walk. Of a larger account, only a part is read."""
_CLI_SERVICES = {"s3": "s3api"}
_READS = re.compile(r"(Get|List|Describe|Head|BatchGet|Scan)(?=[A-Z]|$)(?!.*History$)")
"""Operations that return the current state rather than a history."""
_NOT_STATE = frozenset(
    {
        *(
            "DescribeAvailabilityZones",
            "DescribeDBEngineVersions",
            "DescribeInstanceTypes",
            "DescribeRegions",
        ),
        *(
            "GetAccountSummary",
            "GetMetricStatistics",
            "GetSendQuota",
            "ListDocuments",
            "ListMetrics",
            "ListVersions",
        ),
    }
)
"""Reads that do not show the account's own state: what AWS offers to all accounts, measurements,
and counts of what other reads list."""
_OWN_RESOURCES = {"OwnerIds": ["self"], "Owners": ["self"]}
"""Arguments that exclude other accounts' public resources."""
_IDENTITY = re.compile(r"(name|id|arn|url|identifier|key|bucket)$", re.IGNORECASE)
_PARTS = ("name", "id", "arn", "identifier", "url")
ID = re.compile(
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|(?<=-)[0-9a-f]{8,17}\b|\b[0-9a-f]{16,64}\b"
    r"|\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8}\b|\bA[KIRSGN][A-Z]{2}[A-Z0-9]{12,17}\b|\b(?=[a-z]*\d)[a-z0-9]{10}\b"
    r"|\b(?=[a-z]*\d)[a-z0-9]{16}\b|(?<=\d_)[0-9A-Za-z]{9}\b|\bZ[A-Z0-9]{10,}\b|\b(?=\w*[a-z])(?=\w*[A-Z])(?=\w*\d)\w{20,}={0,2}"
)
"""Ids that services generate, recognized by their format."""
Call = Callable[[str, str, dict[str, Any]], Mapping[str, Any]]
Answers = Mapping[str, Any]
"""Answers by ``service:Operation {arguments}``. The answer is {"error": code} if the call
failed."""


def walk(
    call: Call, services: Iterable[str], permits: Callable[[str, str], bool] | None = None
) -> Answers:
    """Return the answers to all permitted reads of these services.

    ``call(service, operation, arguments)`` returns an answer or raises StateCallError; its other
    errors, such as ConnectionError, are passed on. ``services``: botocore's names.
    ``permits(service, operation)``: restricts the reads further.
    """
    answers: dict[str, Any] = {}
    for service in sorted(set(services)):
        reads = [
            model for model in _reads(service) if permits is None or permits(service, model.name)
        ]
        _ServiceWalk(call, service, reads, answers).run()
    return answers


@functools.cache
def _reads(service: str) -> tuple[OperationModel, ...]:
    """Return the models of a service's reads that agents may use."""
    permitted = ALLOWED.get(_CLI_SERVICES.get(service, service), frozenset())
    found = sorted(operation_models(service).items())
    return tuple(
        model
        for name, model in found
        if _READS.match(name) and name not in _NOT_STATE and xform_name(name, "-") in permitted
    )


class _ServiceWalk:
    """Walk over the reads of one service.

    A *record* is what is known about one resource, by lower-case name: the strings in its structure
    that identify it, those of the structures around it, and the arguments of the call that returned
    it. The key "" contains the kind of resource, such as "bucket".
    """

    def __init__(
        self, call: Call, service: str, reads: Sequence[OperationModel], answers: dict[str, Any]
    ) -> None:
        self._call = call
        self._service = service
        self._reads = reads
        self._answers = answers
        self._records: list[dict[str, Any]] = []

    def run(self) -> None:
        """Make calls until no answer provides the arguments of another call."""
        for model in self._reads:
            self._try_call(model, {})
        for record in self._records:  # grows during the loop
            if len(self._answers) >= MAX_CALLS:
                break
            for model in self._reads:
                self._try_call(model, record)

    def _try_call(self, model: OperationModel, record: Mapping[str, Any]) -> None:
        """Call an operation with the arguments that a record provides, unless it needs others. An
        empty record stands for a call without arguments."""
        arguments = _known_arguments(model, record)
        if bool(arguments) is not bool(record):
            return
        for fixed in _fixed_arguments(model):
            if {*required_members(model.input_shape)} <= {*arguments, *fixed}:
                self._call_once(model, arguments, fixed)

    def _call_once(
        self, model: OperationModel, arguments: dict[str, Any], fixed: Mapping[str, Any]
    ) -> None:
        chosen = {name: value for name, value in fixed.items() if isinstance(value, str)}
        operation = (
            f"{self._service}:{model.name}{'/' if chosen else ''}{'/'.join(chosen.values())}"
        )
        key = f"{operation} {json.dumps(arguments, sort_keys=True)}"
        if key in self._answers:
            return
        try:
            answer = plain(self._call(self._service, model.name, {**fixed, **arguments}))
        except StateCallError as error:
            self._answers[key] = {"error": error.code}
            return
        self._answers[key] = answer
        known = {name.lower(): value for name, value in arguments.items() if isinstance(value, str)}
        noun = noun_of(model.name)
        for record in _records(answer, noun, known):
            if record not in self._records and not _is_not_resource(record):
                self._records.append(record)


def plain(value: Any) -> Any:
    """Return an answer as plain data: times as strings, binary contents as digests, and JSON
    documents parsed."""
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


def _is_not_resource(record: Mapping[str, Any]) -> bool:
    """Return whether a record describes a tag, or a policy that every account has."""
    return record[""] in ("tag", "tagset") or str(record.get("arn", "")).startswith(
        "arn:aws:iam::aws:"
    )


def noun_of(name: str) -> str:
    """Return what a member or an operation is about, as a noun: "secret" for "SecretList" and
    "DescribeSecret"."""
    word = _READS.sub("", name).lower()
    for ending in ("summarylist", "summaries", "list", "items"):
        word = word.removesuffix(ending) or word
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _records(value: Any, noun: str, around: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each resource in an answer. ``around``: what the enclosing structures
    provide."""
    if isinstance(value, Mapping):
        own = {
            key.lower(): item
            for key, item in value.items()
            if isinstance(item, str) and _IDENTITY.search(key)
        }
        record = {**around, **own, "": noun}
        if own:
            yield record
        for key, item in value.items():
            yield from _records(
                item,
                inner_noun(key, noun),
                {name: one for name, one in record.items() if name not in _PARTS},
            )
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, str):
                yield {**around, noun: item, "": re.sub("(name|arn|url|id)$", "", noun)}
            else:
                yield from _records(item, noun, around)


def _known_arguments(model: OperationModel, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that a record provides: required ones, and optional ones that
    name the record's own resource."""
    required = required_members(model.input_shape)
    noun = noun_of(model.name)
    kind = record.get("", "")
    if not record or (not required and _is_same_noun(kind, noun)):
        return {}  # the call without arguments lists this resource already
    arguments = {
        name: _argument(name, member, noun, record)
        for name, member in members(model.input_shape).items()
        if name in required
        or name.lower().startswith(kind.removesuffix("e"))
        or (required and _IDENTITY.search(name))
    }
    return {name: value for name, value in arguments.items() if value is not None}


@functools.cache
def _fixed_arguments(model: OperationModel) -> tuple[Mapping[str, Any], ...]:
    """Return the arguments that a call has in any account, such as the page size. There is one set
    of arguments for each value of an enumeration."""
    required = required_members(model.input_shape)
    sets: list[dict[str, Any]] = [{}]
    for name, member in members(model.input_shape).items():
        values = _choices(member) if name in required else _full_detail_values(name, member)
        if values:
            sets = [{**one, name: value} for one in sets for value in values]
    return tuple(sets[:_MAX_VARIANTS])


def _is_same_noun(kind: str, noun: str) -> bool:
    return kind.removesuffix("e") == noun.removesuffix("e")


def _argument(name: str, shape: Shape, noun: str, record: Mapping[str, Any]) -> Any:
    lower = name.lower()
    kind = record.get("", "")
    if shape.type_name == "list":
        inner = element(shape)
        if inner is None or inner.type_name != "string" or not lower.endswith("s"):
            return None
        single = _argument(name.removesuffix("s"), inner, noun, record)
        return None if single is None else [single]
    if shape.type_name != "string" or not record:
        return None
    if lower in _PARTS:
        return (
            (record.get(lower) or record.get(kind))
            if kind and noun.startswith(kind.removesuffix("e"))
            else None
        )
    if lower in record and lower:
        return record[lower]
    if kind and _is_same_noun(lower, kind):
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
    """Return the values to use for a required member that no record provides: all values of an
    enumeration, or the largest page size."""
    if choice := allowed_values(shape):
        return choice
    return [bounds(shape).get("max", 60)] if shape.type_name in ("integer", "long") else []


def _full_detail_values(name: str, shape: Shape) -> Sequence[Any]:
    """Return the values of an optional member that requests all details, or that excludes other
    accounts' resources."""
    if name in _OWN_RESOURCES and shape.type_name == "list":
        return [_OWN_RESOURCES[name]]
    if name == "Scope" and "Local" in allowed_values(shape):
        return ["Local"]
    choice = allowed_values(element(shape)) if shape.type_name == "list" else ()
    return [[word] for word in ("All", "ALL") if word in choice][:1]


def own_names(part: Mapping[str, Any], noun: str) -> list[tuple[str, str]]:
    """Return the (kind of name, value) pairs that identify a structure, the best one first."""
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
    """Return what the member ``key`` is about, as a noun, in a structure that is about ``noun``."""
    return noun if key in ("Items", "items", "Item") else noun_of(key)
