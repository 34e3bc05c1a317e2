"""Snapshots of a whole account: all resources as normalized plain data, by service, kind and
identity, such as ``("iam", "roles", "reader")``. The *kind* is the simulator's name for a table of
records of one service.

Normalization makes equivalent accounts equal. Times that a service set become equal, empty values
count as absent, transitional states are replaced by the settled state, JSON and XML documents are
parsed, and policies are brought into one form. Names and ids that the simulator generated keep the
marks of ``simulator.account_state``; ``differences`` resolves them.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any
from xml.etree import ElementTree

from realhf.aws.grading.meanings import DOCUMENT, KeptAttributes, Key, drop_defaults
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.task import ACCOUNT_ID

HOME_REGION = "us-east-1"
TIME = "<time>"
"""Replacement for a time that a service set."""
SETTLED = "<settled>"
"""Replacement for every state of a resource that is starting or running."""
_USER_MAPS = frozenset({("lambda", "Variables"), ("dynamodb", "items"), ("s3", "metadata")})
"""Maps whose keys the user chooses, as (service, name of the map)."""
_MAX_TIME = 1e15
"""Numbers of at least this size are not Unix times."""
_DAY_S = 86_400.0
"""Seconds from now within which a time counts as set by the service."""
_HOUR_S = 3600.0
"""The present time is rounded down to a multiple of this, so that records read in the same hour can
be cached."""
_CACHED_RECORDS = 2048
"""Number of cached records. Most records equal those after the previous command, and those of other
sessions."""
_MAX_CACHED_RECORD_LENGTH = 4096
"""Maximum length of a cached record, in characters."""
_MAX_DEPTH = 24
"""Maximum nesting depth; deeper values are not read."""
_SERVICES: Mapping[str, str] = {
    "alb": "elbv2",
    "apigateway": "apigatewayv2",
    "apigateway_v1": "apigateway",
    "cloudwatch_logs": "logs",
    "cognito": "cognito-idp",
    "eventbridge": "events",
    "lambda_svc": "lambda",
    "waf": "wafv2",
}
"""botocore names of the services whose MiniStack module has a different name."""
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_SETTLING_STATES = frozenset(
    {
        *(
            "pending",
            "creating",
            "inprogress",
            "in-progress",
            "in_progress",
            "provisioning",
            "modifying",
            "updating",
        ),
        *(
            "active",
            "available",
            "successful",
            "running",
            "created",
            "completed",
            "deployed",
            "ok",
            "success",
        ),
        *(
            "insync",
            "in_sync",
            "in-sync",
            "applying",
            "backing-up",
            "starting",
            "ready",
            "valid",
            "create_complete",
            "update_complete",
        ),
        *(
            "configuring-enhanced-monitoring",
            "initial",
            "healthy",
            "associated",
            "insufficient_data",
        ),
    }
)
"""States of a resource that is starting or running. They differ only in the time that has
passed."""
_STATES = re.compile(r"(state|status|statevalue|lifecyclestate|statuscode)$", re.IGNORECASE)
"""Names of members that contain a state."""
_DERIVED_MEMBERS = frozenset(
    {
        *(
            "RevisionId",
            "StateReason",
            "StateReasonCode",
            "StateReasonData",
            "StateUpdatedTimestamp",
        ),
        *(
            "LastUpdateStatus",
            "LastUpdateStatusReason",
            "LastUpdateStatusReasonCode",
            "LastModified",
        ),
        *(
            "LastModifiedDate",
            "last_modified",
            "LastUpdatedTime",
            "ETag",
            "etag",
            "_etag",
            "LockToken",
            "ItemCount",
        ),
        *(
            "TableSizeBytes",
            "SizeInBytes",
            "storedBytes",
            "storedSize",
            "CreatorRequestId",
            "ClientToken",
        ),
        *(
            "clientToken",
            "ClientRequestToken",
            "CallerReference",
            "SecurityGroupRuleId",
            "runtimeId",
            "md5",
        ),
        *("md5_body", "seq", "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"),
        *(
            "ApproximateNumberOfMessagesNotVisible",
            "starting_sequence_number",
            "SubscriptionsConfirmed",
        ),
        *(
            "SubscriptionsPending",
            "SubscriptionsDeleted",
            "activeServicesCount",
            "runningTasksCount",
        ),
        *("pendingTasksCount", "events", "deployments", "history"),
    }
)
"""Members that follow from other members or only count writes. They are dropped."""
_ENDING = re.compile(r"delet|expir|end|disab|revo", re.IGNORECASE)
"""Names of members whose time marks an end, such as a deletion or an expiry."""
_USER_TIMES = frozenset({"StartDate", "EndDate"})
"""Members whose time the user sets."""
_DISTANT_TIMES = frozenset({"NotAfter", "NotBefore", "ValidTo"})
"""Members whose time a service sets, far from the present."""
_IGNORED: Mapping[tuple[str, str], frozenset[str]] = {
    ("ssm", "parameters"): frozenset({"Version"}),
    ("firehose", "streams"): frozenset({"id", "version"}),
    ("stepfunctions", "state_machines"): frozenset({"lastVersionNumber", "createVersionArn"}),
    ("lambda", "functions"): frozenset({"next_version", "architectures_declared"}),
    ("efs", "file_systems"): frozenset({"Name"}),
    ("cognito-idp", "user_pools"): frozenset({"_password"}),
    ("cloudwatch", "alarms"): frozenset({"StateValue"}),
    ("events", "rules"): frozenset({"CreatedBy"}),
    ("backup", "plans"): frozenset({"Versions"}),
    ("glue", "crawlers"): frozenset({"Version"}),
    ("glue", "tables"): frozenset({"VersionId"}),
    ("route53", "health_checks"): frozenset({"version"}),
}
"""Members of certain kinds that count writes, are measurements, or are generated character by
character. They are dropped."""
_TRANSCRIPT = '["",'
"""Beginning of the record that contains the transcript of the agent's requests instead of a
resource."""
STRUCTURES_WITHOUT_MEMBERS = frozenset({"EventBridgeConfiguration", "SimplePrefix", "SSES3"})
"""S3 structures without members, of which only the presence counts."""
_NO_RESOURCES = frozenset(
    {("ssm", "parameter_history"), ("ecs", "task_def_latest"), ("iam", "access_keys_last_used")}
)
"""Kinds of records that are not resources."""


class SnapshotError(ConnectionError):
    """The account cannot be read."""


@dataclass(frozen=True)
class Snapshot:
    """The state of an account at one time."""

    resources: Mapping[Key, Mapping[str, Any]]
    """Attributes of each resource, by key."""
    serials: Mapping[Key, int] = field(default_factory=dict)
    """A number for each resource that changes when the resource is deleted and created again."""
    transcript: str | None = field(default=None, compare=False)
    """The agent's requests that may have changed something, with their answers; None if they are
    unknown."""


def take_snapshot(slot: Slot) -> Snapshot:
    """Return the present state of a slot's account.

    Raises SnapshotError if the simulator does not answer, if the account is too large, or if it is
    a real account.
    """
    if not slot.simulated:
        raise SnapshotError("a real account (BACKEND_TYPE=aws) is not read as a whole")
    try:
        return snapshot_of(slot.ministack.account_state(), time.time())
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"the account cannot be read: {error}") from error


def state_digest(start: Snapshot, now: Snapshot) -> str:
    """Return a digest of the difference between an account and its start.

    Equal differences have equal digests, however they came about: lists are unordered, a replaced
    resource equals one with the same content, and a generated name is represented by the content of
    the resources that it names.
    """
    before = start.resources
    after = now.resources
    differing = [
        key for key in before.keys() | after.keys() if _differ(before.get(key), after.get(key))
    ]
    parts = [(*key, before.get(key), after.get(key)) for key in differing]
    drawn = set(_DRAWN_TEXT.findall(json.dumps(parts, ensure_ascii=False)))
    labels = {text: _digest(_resources_named_by(text, before, after)) for text in drawn}

    def relabel(text: str) -> str:
        return _DRAWN_TEXT.sub(lambda match: labels.get(match[0], ""), text)

    return _digest("|".join(_canonical_text(item, relabel) for item in part) for part in parts)


def _differ(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two values differ. Identical objects need no comparison, which is fast."""
    return one is not other and one != other


def _resources_named_by(drawn: str, *accounts: Mapping[Key, Mapping[str, Any]]) -> set[str]:
    """Return the contents of the resources that a generated name identifies, as canonical text
    without generated names."""
    return {
        "|".join(
            _canonical_text(item, lambda text: _DRAWN_TEXT.sub("", text))
            for item in (*key, attributes)
        )
        for resources in accounts
        for key, attributes in resources.items()
        if drawn in key[2]
    }


_DRAWN_TEXT = re.compile(f"{DRAWN}[^{END_DRAWN}]*{END_DRAWN}")
"""A generated name between its two marks."""


def _canonical_text(value: Any, relabel: Callable[[str], str]) -> str:
    """Return data as text that does not depend on the order of mappings and lists. ``relabel`` is
    applied to its strings."""
    if isinstance(value, dict):  # records are JSON; isinstance with Mapping takes ten times as long
        items = (pair for pair in value.items() if pair[0] != "Sid" or "Effect" not in value)
        parts = sorted(
            f"{relabel(str(name))}:{_canonical_text(item, relabel)}" for name, item in items
        )
        return f"{{{','.join(parts)}}}"
    if isinstance(value, list):
        return f"[{','.join(sorted(_canonical_text(item, relabel) for item in value))}]"
    return json.dumps(relabel(value) if isinstance(value, str) else value)


def _digest(texts: Iterable[str]) -> str:
    """Return the hexadecimal SHA-256 digest of the texts, which does not depend on their order."""
    return hashlib.sha256("\n".join(sorted(texts)).encode("utf-8", "surrogatepass")).hexdigest()


def snapshot_of(records: Iterable[str], now: float) -> Snapshot:
    """Return the snapshot of the JSON records that a simulator reports. ``now``: when they were
    read (Unix time, s).

    Equal records yield the same object as long as they are cached.
    """
    resources: dict[Key, Mapping[str, Any]] = {}
    serials: dict[Key, int] = {}
    hour = now // _HOUR_S * _HOUR_S
    transcript = None
    for record in records:
        if record.startswith(_TRANSCRIPT):
            transcript = json.loads(record)[-1]
            continue
        read = _parse_cached if len(record) <= _MAX_CACHED_RECORD_LENGTH else _parse_record
        for key, attributes, serial in read(record, hour):
            resources[key] = attributes
            serials[key] = serial
    return Snapshot(resources, serials, transcript)


def normalize_attributes(service: str, value: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return a resource's normalized attributes. ``now``: when they were read (Unix time, s)."""
    normal = _normalize(value, "", _RecordContext(service, now, frozenset()))
    return normal if isinstance(normal, dict) else {}


def _parse_record(record: str, now: float) -> list[tuple[Key, Mapping[str, Any], int]]:
    """Return (key, attributes, serial) for each resource in a record."""
    module, kind, region, name, serial, value = json.loads(record)
    service = _SERVICES.get(module, module)
    if (service, kind) in _NO_RESOURCES:
        return []
    if (service, kind) in _NORMALIZERS:
        name, value = _NORMALIZERS[service, kind](name, value)
    elif service in _RUN_TASKS:
        value = _mark_revisions(value)
    identity = name if region in ("", HOME_REGION) else f"{region}:{name}"
    normal = _normalize(
        value, "", _RecordContext(service, now, _IGNORED.get((service, kind), frozenset()))
    )
    attributes = normal if isinstance(normal, dict) else {"": normal} if normal is not None else {}
    attributes = drop_defaults(f"{service}/{kind}", attributes) or {}
    if not attributes and (service, kind) in _LISTS:
        return []
    if (kind in _ACCESS_LISTS and _is_private(attributes)) or (
        service,
        kind,
        name,
        attributes.keys(),
    ) == _DEFAULT_BUS:
        return []
    return [
        ((service, part, where), part_attributes, serial)
        for part, where, part_attributes in _split_nested(kind, identity, attributes)
    ]


@lru_cache(_CACHED_RECORDS)
def _parse_cached(record: str, now: float) -> list[tuple[Key, Mapping[str, Any], int]]:
    """See ``_parse_record``."""
    return [
        (key, KeptAttributes(value), serial) for key, value, serial in _parse_record(record, now)
    ]


def _number_mark(name: str, number: str) -> str:
    """Return a version number marked like a generated name, so that versions are matched by content
    instead of number."""
    return f"{DRAWN}{name} no. {number}{END_DRAWN}"


def _normalize_function(name: str, value: Any) -> tuple[str, Any]:
    """Return a Lambda function with its version numbers marked like generated names."""
    versions = dict(value.get("versions") or {})
    for number, version in versions.items():
        config = {**version.get("config", {}), "Version": _number_mark(name, number)}
        config["FunctionArn"] = str(config.get("FunctionArn", "")).removesuffix(f":{number}")
        versions[number] = {**version, "config": config}
    aliases = {
        alias: {**entry, "FunctionVersion": _number_mark(name, entry["FunctionVersion"])}
        if entry.get("FunctionVersion") in versions
        else entry
        for alias, entry in (value.get("aliases") or {}).items()
    }
    named = {_number_mark(name, number): version for number, version in versions.items()}
    return name, {**value, "versions": named, "aliases": aliases}


def _normalize_secret(name: str, value: Any) -> tuple[str, Any]:
    """Return a secret without versions that are no longer in use."""
    versions = {
        number: version
        for number, version in (value.get("Versions") or {}).items()
        if set(version.get("Stages") or ()) - {"AWSPREVIOUS"}
    }
    return name, {**value, "Versions": versions}


def _normalize_secret_policy(arn: str, value: Any) -> tuple[str, Any]:
    """Return a secret's policy under the secret's name."""
    return re.sub(f"-{DRAWN}.*", "", arn.rpartition(":secret:")[2]), value


def _normalize_task_definition(name: str, value: Any) -> tuple[str, Any]:
    """Return a task definition's revision with its number marked like a generated name."""
    attributes = {key: item for key, item in _mark_revisions(value).items() if key != "revision"}
    return _mark_revisions(f"{_REVISED}{name}").removeprefix(_REVISED), attributes


def _mark_revisions(value: Any) -> Any:
    """Return data in which the revision numbers of task definitions are marked like generated
    names."""
    if isinstance(value, Mapping):
        return {name: _mark_revisions(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_mark_revisions(item) for item in value]
    if isinstance(value, str) and _REVISED in value:
        return _REVISION.sub(lambda match: f"{match[1]}:{_number_mark(match[2], match[3])}", value)
    return value


def _normalize_queue(name: str, value: Any) -> tuple[str, Any]:
    """Return a queue without S3's test messages, and without the times in messages that services
    wrote.

    S3 sends a test message whenever a notification is configured.
    """
    messages = [
        {**message, "body": _WRITTEN_AT.sub("", message["body"])}
        if _BY_SERVICE.search(message["body"])
        else message
        for message in value.get("messages") or ()
        if "s3:TestEvent" not in message.get("body", "")
    ]
    return name, {**value, "messages": messages}


_NORMALIZERS: Mapping[tuple[str, str], Callable[[str, Any], tuple[str, Any]]] = {
    ("lambda", "functions"): _normalize_function,
    ("secretsmanager", "secrets"): _normalize_secret,
    ("ecs", "task_defs"): _normalize_task_definition,
    ("secretsmanager", "resource_policies"): _normalize_secret_policy,
    ("sqs", "queues"): _normalize_queue,
}
"""Normalization of the kinds whose content depends on how often something was written."""
_RUN_TASKS = frozenset({"ecs", "events", "scheduler"})
"""Services whose records refer to revisions of task definitions."""
_REVISED = "task-definition/"
_REVISION = re.compile(rf"({_REVISED}([\w-]+)):(\d+)")
_BY_SERVICE = re.compile(r'"(eventSource|TopicArn)"')
"""Text that shows that a service wrote the message."""
_WRITTEN_AT = re.compile(r'"(eventTime|Timestamp)": ?"[^"]*",? ?')
"""The time in such a message."""
_DEFAULT_BUS = ("events", "event_buses", "default", {"Arn", "Name"})
"""The event bus that every account has. The simulator creates it on first use."""
_ALIAS_ARN = re.compile(rf"\Aarn:aws:kms:{HOME_REGION}:{ACCOUNT_ID}:alias/")
"""Beginning of a KMS alias's ARN, up to the alias itself, which identifies the same key:
https://docs.aws.amazon.com/kms/latest/developerguide/alias-access.html"""
_ACCOUNT = re.compile(r"\A\d{12}\Z")
"""Short form of a principal that is a whole account:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_principal.html"""
_LISTS = frozenset({("iam", "account_aliases")})
"""Kinds that the simulator stores as one list, whose record remains when the list is empty."""
_ACCESS_LISTS = frozenset({"bucket_acl", "object_acl"})
"""Kinds of S3 access control lists."""


def _is_private(access_list: Mapping[str, Any]) -> bool:
    """Return whether an access control list gives access to the owner only, which is equivalent to
    having no list."""
    owners = [owner.get("ID") for owner in access_list.get("Owner", ())]
    grants = [
        grant
        for entry in access_list.get("AccessControlList", ())
        for grant in entry.get("Grant", ())
    ]
    return all(
        grantee.get("ID") in owners for grant in grants for grantee in grant.get("Grantee", ())
    )


def _split_nested(
    kind: str, identity: str, value: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the parts of a record that are stored under generated names, as resources of their own,
    and then the rest of the record. Each is (kind, identity, attributes)."""
    parts = list(_extract_nested(kind, identity, value, 0))
    yield from parts
    yield kind, identity, value


def _extract_nested(
    kind: str, identity: str, value: dict[str, Any], depth: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Remove the parts stored under generated names from ``value``, and yield them."""
    for name, item in list(value.items()):
        if not isinstance(item, dict) or depth > _MAX_DEPTH:
            continue
        if DRAWN in name:
            del value[name]
            yield from _split_nested(f"{kind}/", f"{identity}/{name}", item)
        else:
            yield from _extract_nested(f"{kind}/{name}", identity, item, depth + 1)


@dataclass(frozen=True)
class _RecordContext:
    """Facts about the record that is being normalized."""

    service: str
    """The resource's service."""
    now: float
    """When the snapshot was taken (Unix time, s)."""
    ignored: frozenset[str]
    """Members that are dropped from resources of this kind."""


def _normalize(value: Any, name: str, context: _RecordContext, depth: int = 0) -> Any:
    """Return the normalized value of the member ``name``, or None if it counts as absent."""
    if depth > _MAX_DEPTH:
        return "<too deep>"
    if isinstance(value, dict):
        if "Statement" in value and isinstance(value["Statement"], dict | list):
            return normalize_policy(value)
        members = {
            str(key): normal
            for key, item in value.items()
            if key not in _DERIVED_MEMBERS and key not in context.ignored
            if (normal := _normalize_item(item, str(key), context, depth + 1)) is not None
        }
        return members or None
    if isinstance(value, list):
        items = [
            _normalize(item, name, context, depth + 1) if item != "" else item for item in value
        ]
        return [item for item in items if item is not None] or None
    if isinstance(value, str):
        return _normalize_text(value, name, context, depth)
    if (
        name not in _USER_TIMES
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and _is_now(value, context.now)
    ):
        return _normalize_time(name)
    return value


def _normalize_item(value: Any, name: str, context: _RecordContext, depth: int) -> Any:
    """Return a member's normalized value. A map whose keys the user chose becomes a document."""
    if (context.service, name) in _USER_MAPS and isinstance(value, dict):
        return {DOCUMENT: _parse_written(value, depth)} if value else None
    return _normalize(value, name, context, depth)


def _parse_written(value: Any, depth: int) -> Any:
    """Return the content of a user-written document, in which no member belongs to the service.

    Policies are normalized, and JSON documents within it are parsed.
    """
    if depth > _MAX_DEPTH:
        return "<too deep>"
    if isinstance(value, dict):
        if isinstance(value.get("Statement"), dict | list):
            return normalize_policy(value)
        return {str(key): _parse_written(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_parse_written(item, depth + 1) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _parse_written(json.loads(value), depth + 1)
        except (ValueError, RecursionError):
            return value
    return value


def _normalize_time(name: str) -> str | None:
    """Return TIME for an expiry or end time, otherwise None: other times only say when the service
    did something."""
    return TIME if _ENDING.search(name) else None


def _normalize_text(text: str, name: str, context: _RecordContext, depth: int) -> Any:
    """Return the normalized form of a string: parsed JSON or XML, the settled state, TIME, or the
    string itself."""
    start = text[:1]
    if not start:
        return None
    if start in "{[":
        written = _parse_written(text, depth)
        if not written or isinstance(written, str):
            return text
        policy = isinstance(written, dict) and isinstance(written.get("Statement"), list)
        return written if policy else {DOCUMENT: written}
    if start == "<" and "<!" not in text:
        try:
            return _parse_xml(ElementTree.fromstring(text)) or None
        except (ElementTree.ParseError, RecursionError):
            return text
    if _STATES.search(name) and text.lower() in _SETTLING_STATES:
        return SETTLED
    text = _ALIAS_ARN.sub("alias/", text)
    if name in _DISTANT_TIMES:
        return None
    if _ISO_TIME.match(text) and name not in _USER_TIMES:
        try:
            moment = datetime.fromisoformat(text[:19] + "+00:00").timestamp()
        except ValueError:
            return text
        return _normalize_time(name) if _is_now(moment, context.now) else text
    return (
        _normalize_time(name)
        if text.isascii()
        and text.isdecimal()
        and len(text) in (10, 13)
        and _is_now(int(text), context.now)
        else text
    )


def _is_now(number: float, now: float) -> bool:
    """Return whether a number is a Unix time, in seconds or milliseconds, within a day of
    ``now``."""
    return abs(number) < _MAX_TIME and (
        abs(number - now) < _DAY_S or abs(number / 1000 - now) < _DAY_S
    )


def _parse_xml(element: ElementTree.Element, depth: int = 0) -> Any:
    """Return an XML element as a mapping from child names to lists of children, or as its text if
    it has no children.

    Empty children are dropped, except structures that never have members. The content is
    user-written.
    """
    if not len(element) or depth > _MAX_DEPTH:
        return _ALIAS_ARN.sub("alias/", (element.text or "").strip())
    children: dict[str, list[Any]] = {}
    for child in element:
        name = child.tag.rpartition("}")[2]
        value = _parse_xml(child, depth + 1)
        if value or name in STRUCTURES_WITHOUT_MEMBERS:
            children.setdefault(name, []).append(value)
    return children


def normalize_policy(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy in canonical form: its statements, and the names in them, are sorted
    lists."""
    written = document["Statement"]
    statements = [
        _normalize_statement(one) for one in (written if isinstance(written, list) else [written])
    ]
    old = {"Version": document["Version"]} if isinstance(document.get("Version"), str) else {}
    return old | {"Statement": sorted(statements, key=_statement_sort_key)}


def _statement_sort_key(statement: Any) -> str:
    """Return a sort key for a statement that ignores its Sid."""
    named = isinstance(statement, Mapping) and "Sid" in statement
    return json.dumps({**statement, "Sid": ""} if named else statement, sort_keys=True)


def _normalize_statement(statement: Any) -> Any:
    """Return a statement with canonical principals, actions in lower case, and without redundant
    resources."""
    if not isinstance(statement, Mapping):
        return statement
    normal = {
        name: value if name in ("Effect", "Sid") else _as_sorted_lists(value)
        for name, value in statement.items()
        if value != ""
    }
    for name in ("Principal", "NotPrincipal"):
        if normal.get(name) == ["*"]:
            normal[name] = {"AWS": ["*"]}
        if isinstance(normal.get(name), Mapping) and "AWS" in normal[name]:
            accounts = (
                _ACCOUNT.sub(r"arn:aws:iam::\g<0>:root", one) for one in normal[name]["AWS"]
            )
            normal[name] = {**normal[name], "AWS": sorted(set(accounts))}
    for name in ("Action", "NotAction"):
        if isinstance(normal.get(name), list):
            normal[name] = sorted({str(action).lower() for action in normal[name]})
    normal.pop("Condition", None) if not normal.get("Condition") else None
    if normal.get("Effect") == "Allow" and isinstance(normal.get("Resource"), list):
        resources = set(normal["Resource"])
        normal["Resource"] = [
            one for one in normal["Resource"] if not _is_version_of(one, resources)
        ]
    return normal


def _is_version_of(resource: str, resources: set[str]) -> bool:
    """Return whether a resource is "all versions" of a function that is also in ``resources``. AWS
    writes both for a single function.

    https://docs.aws.amazon.com/lambda/latest/dg/lambda-api-permissions-ref.html
    """
    function = resource.removesuffix(":*")
    return function != resource and function in resources and resource.startswith("arn:aws:lambda:")


def _as_sorted_lists(value: Any) -> Any:
    """Return a value as a sorted list of distinct strings, in which other types are written as
    JSON. A mapping keeps its keys, and its values are converted likewise."""
    if isinstance(value, Mapping):
        return {str(name): _as_sorted_lists(item) for name, item in value.items()}
    items = value if isinstance(value, list) else [value]
    return sorted(
        {item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in items}
    )
