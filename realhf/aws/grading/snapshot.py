"""Takes snapshots of a whole account: every resource by service, kind and identity, as normalised plain data.

Normalised: times that the service wrote are all the same, what is empty is as good as absent, states on their way are
where they lead, documents in JSON and XML are parsed, policies have one form. Texts that the simulator drew keep the
marks of ``simulator.account_state``; ``differences`` finds out what they name.
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

from realhf.aws.grading.meanings import DOCUMENT, Key, without_saying
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.task import ACCOUNT_ID

HOME_REGION = "us-east-1"
TIME = "<time>"
SETTLED = "<settled>"
_OWN_WORDS = frozenset({("lambda", "Variables"), ("dynamodb", "items"), ("s3", "metadata")})
"""Maps whose names are chosen by whoever writes them, by service."""
_LARGEST_TIME = 1e15
_DAY_S = 86_400.0
_HOUR_S = 3600.0
_REMEMBERED = 2048
_LONGEST_REMEMBERED = 4096
"""Records that are remembered, and their characters: most are as they were a command ago, and in every session."""
_DEEPEST = 24
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
"""Names of services whose modules are called otherwise."""
_ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_UNDER_WAY = frozenset(
    {
        *("pending", "creating", "inprogress", "in-progress", "in_progress", "provisioning", "modifying", "updating"),
        *("active", "available", "successful", "running", "created", "completed", "deployed", "ok", "success"),
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
        *("configuring-enhanced-monitoring", "initial", "healthy", "associated", "insufficient_data"),
    }
)
"""States of what is coming up and of what is up: time alone leads from one to the other."""
_STATES = re.compile(r"(state|status|statevalue|lifecyclestate|statuscode)$", re.IGNORECASE)
_NOT_STATED = frozenset(
    {
        *("RevisionId", "StateReason", "StateReasonCode", "StateReasonData", "StateUpdatedTimestamp"),
        *("LastUpdateStatus", "LastUpdateStatusReason", "LastUpdateStatusReasonCode", "LastModified"),
        *("LastModifiedDate", "last_modified", "LastUpdatedTime", "ETag", "etag", "_etag", "LockToken", "ItemCount"),
        *("TableSizeBytes", "SizeInBytes", "storedBytes", "storedSize", "CreatorRequestId", "ClientToken"),
        *("clientToken", "ClientRequestToken", "CallerReference", "SecurityGroupRuleId", "runtimeId", "md5"),
        *("md5_body", "seq", "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"),
        *("ApproximateNumberOfMessagesNotVisible", "starting_sequence_number", "SubscriptionsConfirmed"),
        *("SubscriptionsPending", "SubscriptionsDeleted", "activeServicesCount", "runningTasksCount"),
        *("pendingTasksCount", "events", "deployments", "history"),
    }
)
"""Fields that follow from other fields, or say only how often something was written."""
_ENDING = re.compile(r"delet|expir|end|disab|revo", re.IGNORECASE)
_GIVEN = frozenset({"StartDate", "EndDate"})
"""Times that no service sets."""
_ENDS = frozenset({"NotAfter", "NotBefore", "ValidTo"})
"""Times that the service sets, far from now."""
_UNSAID: Mapping[tuple[str, str], frozenset[str]] = {
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
"""Fields of one kind that count writes, that are readings, or that the service draws letter by letter and mixes."""
_SAID = '["",'
"""Begins the record that is no resource, but what the agent's requests said."""
STRUCTURES_WITHOUT_MEMBERS = frozenset({"EventBridgeConfiguration", "SimplePrefix", "SSES3"})
"""Structures of S3 that have no members: to be there is all that they say."""
_NO_RESOURCES = frozenset({("ssm", "parameter_history"), ("ecs", "task_def_latest"), ("iam", "access_keys_last_used")})


class SnapshotError(ConnectionError):
    """The account cannot be read."""


@dataclass(frozen=True)
class Snapshot:
    """Holds an account. ``serials``: a number of each resource, another one after it was made anew; ``said``: what the
    agent's requests that may have changed something said and were answered, None where that is not known."""

    resources: Mapping[Key, Mapping[str, Any]]
    serials: Mapping[Key, int] = field(default_factory=dict)
    said: str | None = field(default=None, compare=False)


def take_snapshot(slot: Slot) -> Snapshot:
    """Return the account in a slot as it is now. Raises SnapshotError where it does not answer, holds too much, or is a
    real one."""
    if not slot.simulated:
        raise SnapshotError("a real account (BACKEND_TYPE=aws) is not read as a whole")
    try:
        return snapshot_of(slot.ministack.account_state(), time.time())
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"the account cannot be read: {error}") from error


def state_digest(start: Snapshot, now: Snapshot) -> str:
    """Return a digest of what differs between an account and what it was at the start, equal however it came about: a
    list says the same in any order, a resource that was made anew is what it says, and a text that the simulator drew
    is known by the resources that it names."""
    before = start.resources
    after = now.resources
    differing = [key for key in before.keys() | after.keys() if _differ(before.get(key), after.get(key))]
    parts = [(*key, before.get(key), after.get(key)) for key in differing]
    drawn = set(_DRAWN_TEXT.findall(json.dumps(parts, ensure_ascii=False)))
    labels = {text: _digest(_named_by(text, before, after)) for text in drawn}

    def said(text: str) -> str:
        return _DRAWN_TEXT.sub(lambda match: labels.get(match[0], ""), text)

    return _digest("|".join(_in_any_order(item, said) for item in part) for part in parts)


def _differ(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    return one is not other and one != other


def _named_by(drawn: str, *accounts: Mapping[Key, Mapping[str, Any]]) -> set[str]:
    """Return the resources that a drawn text names, without any such text in them."""
    return {
        "|".join(_in_any_order(item, lambda text: _DRAWN_TEXT.sub("", text)) for item in (*key, attributes))
        for resources in accounts
        for key, attributes in resources.items()
        if drawn in key[2]
    }


_DRAWN_TEXT = re.compile(f"{DRAWN}[^{END_DRAWN}]*{END_DRAWN}")


def _in_any_order(value: Any, said: Callable[[str], str]) -> str:
    """Return data as a text that does not depend on the order of maps and lists, its own texts as ``said``."""
    if isinstance(value, dict):  # records are JSON; to ask for any Mapping takes ten times as long
        items = (pair for pair in value.items() if pair[0] != "Sid" or "Effect" not in value)
        parts = sorted(f"{said(str(name))}:{_in_any_order(item, said)}" for name, item in items)
        return f"{{{','.join(parts)}}}"
    if isinstance(value, list):
        return f"[{','.join(sorted(_in_any_order(item, said) for item in value))}]"
    return json.dumps(said(value) if isinstance(value, str) else value)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode("utf-8", "surrogatepass")).hexdigest()


def snapshot_of(records: Iterable[str], now: float) -> Snapshot:
    """Return the snapshot of records as a simulator reports them, in JSON, at ``now`` (seconds since the epoch). Equal
    records become the same object, as long as it is remembered."""
    resources: dict[Key, Mapping[str, Any]] = {}
    serials: dict[Key, int] = {}
    hour = now // _HOUR_S * _HOUR_S
    said = None
    for record in records:
        if record.startswith(_SAID):
            said = json.loads(record)[-1]
            continue
        read = _remembered if len(record) <= _LONGEST_REMEMBERED else _resources
        for key, attributes, serial in read(record, hour):
            resources[key] = attributes
            serials[key] = serial
    return Snapshot(resources, serials, said)


def normal_attributes(service: str, value: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return attributes of a service's resource in their normal form, as read at ``now`` (seconds since the epoch)."""
    normal = _normal(value, "", _Reading(service, now, frozenset()))
    return normal if isinstance(normal, dict) else {}


def _resources(record: str, now: float) -> list[tuple[Key, Mapping[str, Any], int]]:
    """Return the resources of a record with their serial numbers."""
    module, kind, region, name, serial, value = json.loads(record)
    service = _SERVICES.get(module, module)
    if (service, kind) in _NO_RESOURCES:
        return []
    if (service, kind) in _NUMBERED:
        name, value = _NUMBERED[service, kind](name, value)
    elif service in _RUN_TASKS:
        value = _of_revisions(value)
    identity = name if region in ("", HOME_REGION) else f"{region}:{name}"
    normal = _normal(value, "", _Reading(service, now, _UNSAID.get((service, kind), frozenset())))
    found = normal if isinstance(normal, dict) else {"": normal} if normal is not None else {}
    found = without_saying(f"{service}/{kind}", found) or {}
    if not found and (service, kind) in _LISTS:
        return []
    if (kind in _ACCESS_LISTS and _is_private(found)) or (service, kind, name, found.keys()) == _USUAL_BUS:
        return []
    return [((service, part, where), held, serial) for part, where, held in _hoisted(kind, identity, found)]


_remembered = lru_cache(_REMEMBERED)(_resources)


def _numbered(name: str, number: str) -> str:
    """Return the number that a service gave to a version of something as a drawn text: by what it names."""
    return f"{DRAWN}{name} no. {number}{END_DRAWN}"


def _function(name: str, value: Any) -> tuple[str, Any]:
    """Return a Lambda function with its versions under numbers that are drawn texts."""
    versions = dict(value.get("versions") or {})
    for number, version in versions.items():
        config = {**version.get("config", {}), "Version": _numbered(name, number)}
        config["FunctionArn"] = str(config.get("FunctionArn", "")).removesuffix(f":{number}")
        versions[number] = {**version, "config": config}
    aliases = {
        alias: {**held, "FunctionVersion": _numbered(name, held["FunctionVersion"])}
        if held.get("FunctionVersion") in versions
        else held
        for alias, held in (value.get("aliases") or {}).items()
    }
    named = {_numbered(name, number): version for number, version in versions.items()}
    return name, {**value, "versions": named, "aliases": aliases}


def _secret(name: str, value: Any) -> tuple[str, Any]:
    """Return a secret without the versions that were replaced."""
    versions = {
        number: version
        for number, version in (value.get("Versions") or {}).items()
        if set(version.get("Stages") or ()) - {"AWSPREVIOUS"}
    }
    return name, {**value, "Versions": versions}


def _secret_policy(arn: str, value: Any) -> tuple[str, Any]:
    """Return the policy of a secret under the secret's name."""
    return re.sub(f"-{DRAWN}.*", "", arn.rpartition(":secret:")[2]), value


def _task_definition(name: str, value: Any) -> tuple[str, Any]:
    """Return a revision of a task definition under a number that is a drawn text."""
    found = {key: item for key, item in _of_revisions(value).items() if key != "revision"}
    return _of_revisions(f"{_REVISED}{name}").removeprefix(_REVISED), found


def _of_revisions(value: Any) -> Any:
    """Return data with the numbers of task definitions as drawn texts."""
    if isinstance(value, Mapping):
        return {name: _of_revisions(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_of_revisions(item) for item in value]
    if isinstance(value, str) and _REVISED in value:
        return _REVISION.sub(lambda match: f"{match[1]}:{_numbered(match[2], match[3])}", value)
    return value


def _queue(name: str, value: Any) -> tuple[str, Any]:
    """Return a queue without S3's test messages, one for each time that a notification was set; others that services
    wrote without the time at which they did."""
    messages = [
        {**message, "body": _WRITTEN_AT.sub("", message["body"])} if _BY_SERVICE.search(message["body"]) else message
        for message in value.get("messages") or ()
        if "s3:TestEvent" not in message.get("body", "")
    ]
    return name, {**value, "messages": messages}


_NUMBERED: Mapping[tuple[str, str], Callable[[str, Any], tuple[str, Any]]] = {
    ("lambda", "functions"): _function,
    ("secretsmanager", "secrets"): _secret,
    ("ecs", "task_defs"): _task_definition,
    ("secretsmanager", "resource_policies"): _secret_policy,
    ("sqs", "queues"): _queue,
}
"""What of a kind depends on how often something was written, as what it names."""
_RUN_TASKS = frozenset({"ecs", "events", "scheduler"})
_REVISED = "task-definition/"
_REVISION = re.compile(rf"({_REVISED}([\w-]+)):(\d+)")
_BY_SERVICE = re.compile(r'"(eventSource|TopicArn)"')
_WRITTEN_AT = re.compile(r'"(eventTime|Timestamp)": ?"[^"]*",? ?')
_USUAL_BUS = ("events", "event_buses", "default", {"Arn", "Name"})
"""What every account has, and the simulator makes when it is first asked."""
_ALIAS_ARN = re.compile(rf"\Aarn:aws:kms:{HOME_REGION}:{ACCOUNT_ID}:alias/")
"""Begins the ARN of an alias, which names the same key as the alias alone:
https://docs.aws.amazon.com/kms/latest/developerguide/alias-access.html"""
_ACCOUNT = re.compile(r"\A\d{12}\Z")
"""A principal that is a whole account, in the short form:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_principal.html"""
_LISTS = frozenset({("iam", "account_aliases")})
"""Kinds of records that the simulator keeps as one list, which stays when all of it is removed."""
_ACCESS_LISTS = frozenset({"bucket_acl", "object_acl"})


def _is_private(access_list: Mapping[str, Any]) -> bool:
    """Return whether an access list gives nobody but the owner anything, as where there is none."""
    owners = [owner.get("ID") for owner in access_list.get("Owner", ())]
    grants = [grant for held in access_list.get("AccessControlList", ()) for grant in held.get("Grant", ())]
    return all(grantee.get("ID") in owners for grant in grants for grantee in grant.get("Grantee", ()))


def _hoisted(kind: str, identity: str, value: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a record, and before it each part of it that lies under a drawn name, as a resource of its own."""
    parts = list(_taken_out(kind, identity, value, 0))
    yield from parts
    yield kind, identity, value


def _taken_out(
    kind: str, identity: str, value: dict[str, Any], depth: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, item in list(value.items()):
        if not isinstance(item, dict) or depth > _DEEPEST:
            continue
        if DRAWN in name:
            del value[name]
            yield from _hoisted(f"{kind}/", f"{identity}/{name}", item)
        else:
            yield from _taken_out(f"{kind}/{name}", identity, item, depth + 1)


@dataclass(frozen=True)
class _Reading:
    """Says what is read: a record of a service, at a time, with the fields that say nothing in its kind."""

    service: str
    now: float
    unsaid: frozenset[str]


def _normal(value: Any, name: str, of: _Reading, depth: int = 0) -> Any:
    """Return the normal form; None for what is as good as absent."""
    if depth > _DEEPEST:
        return "<too deep>"
    if isinstance(value, dict):
        if "Statement" in value and isinstance(value["Statement"], dict | list):
            return normal_policy(value)
        found = {
            str(key): normal
            for key, item in value.items()
            if key not in _NOT_STATED and key not in of.unsaid
            if (normal := _normal_item(item, str(key), of, depth + 1)) is not None
        }
        return found or None
    if isinstance(value, list):
        items = [_normal(item, name, of, depth + 1) if item != "" else item for item in value]
        return [item for item in items if item is not None] or None
    if isinstance(value, str):
        return _normal_text(value, name, of, depth)
    if name not in _GIVEN and isinstance(value, int | float) and not isinstance(value, bool) and _is_now(value, of.now):
        return _moment(name)
    return value


def _normal_item(value: Any, name: str, of: _Reading, depth: int) -> Any:
    if (of.service, name) in _OWN_WORDS and isinstance(value, dict):
        return {DOCUMENT: _as_written(value, depth)} if value else None
    return _normal(value, name, of, depth)


def _as_written(value: Any, depth: int) -> Any:
    """Return what somebody wrote: nothing in it is the service's, whatever it is called. Policies and documents within
    are parsed."""
    if depth > _DEEPEST:
        return "<too deep>"
    if isinstance(value, dict):
        if isinstance(value.get("Statement"), dict | list):
            return normal_policy(value)
        return {str(key): _as_written(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item, depth + 1) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _as_written(json.loads(value), depth + 1)
        except (ValueError, RecursionError):
            return value
    return value


def _moment(name: str) -> str | None:
    """Return what a time that the service noted says: that something has an end, or nothing."""
    return TIME if _ENDING.search(name) else None


def _normal_text(text: str, name: str, of: _Reading, depth: int) -> Any:
    start = text[:1]
    if not start:
        return None
    if start in "{[":
        written = _as_written(text, depth)
        if not written or isinstance(written, str):
            return text
        policy = isinstance(written, dict) and isinstance(written.get("Statement"), list)
        return written if policy else {DOCUMENT: written}
    if start == "<" and "<!" not in text:
        try:
            return _plain_xml(ElementTree.fromstring(text)) or None
        except (ElementTree.ParseError, RecursionError):
            return text
    if _STATES.search(name) and text.lower() in _UNDER_WAY:
        return SETTLED
    text = _ALIAS_ARN.sub("alias/", text)
    if name in _ENDS:
        return None
    if _ISO_TIME.match(text) and name not in _GIVEN:
        try:
            moment = datetime.fromisoformat(text[:19] + "+00:00").timestamp()
        except ValueError:
            return text
        return _moment(name) if _is_now(moment, of.now) else text
    return (
        _moment(name)
        if text.isascii() and text.isdecimal() and len(text) in (10, 13) and _is_now(int(text), of.now)
        else text
    )


def _is_now(number: float, now: float) -> bool:
    return abs(number) < _LARGEST_TIME and (abs(number - now) < _DAY_S or abs(number / 1000 - now) < _DAY_S)


def _plain_xml(element: ElementTree.Element, depth: int = 0) -> Any:
    """Return an element as a map from the names of its children to lists of them, or its text; children that are empty
    are left out, but for structures without members. None of it is the service's."""
    if not len(element) or depth > _DEEPEST:
        return _ALIAS_ARN.sub("alias/", (element.text or "").strip())
    found: dict[str, list[Any]] = {}
    for child in element:
        name = child.tag.rpartition("}")[2]
        value = _plain_xml(child, depth + 1)
        if value or name in STRUCTURES_WITHOUT_MEMBERS:
            found.setdefault(name, []).append(value)
    return found


def normal_policy(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy in one form: statements and names as sorted lists."""
    written = document["Statement"]
    statements = [_normal_statement(one) for one in (written if isinstance(written, list) else [written])]
    old = {"Version": document["Version"]} if isinstance(document.get("Version"), str) else {}
    return old | {"Statement": sorted(statements, key=_by_what_it_permits)}


def _by_what_it_permits(statement: Any) -> str:
    named = isinstance(statement, Mapping) and "Sid" in statement
    return json.dumps({**statement, "Sid": ""} if named else statement, sort_keys=True)


def _normal_statement(statement: Any) -> Any:
    if not isinstance(statement, Mapping):
        return statement
    found = {
        name: value if name in ("Effect", "Sid") else _listed(value) for name, value in statement.items() if value != ""
    }
    for name in ("Principal", "NotPrincipal"):
        if found.get(name) == ["*"]:
            found[name] = {"AWS": ["*"]}
        if isinstance(found.get(name), Mapping) and "AWS" in found[name]:
            accounts = (_ACCOUNT.sub(r"arn:aws:iam::\g<0>:root", one) for one in found[name]["AWS"])
            found[name] = {**found[name], "AWS": sorted(set(accounts))}
    for name in ("Action", "NotAction"):
        if isinstance(found.get(name), list):
            found[name] = sorted({str(action).lower() for action in found[name]})
    found.pop("Condition", None) if not found.get("Condition") else None
    if found.get("Effect") == "Allow" and isinstance(found.get("Resource"), list):
        resources = set(found["Resource"])
        found["Resource"] = [one for one in found["Resource"] if not _is_version_of(one, resources)]
    return found


def _is_version_of(resource: str, resources: set[str]) -> bool:
    """Return whether a resource is every version of a function that is named as well: AWS writes both where it means
    one. https://docs.aws.amazon.com/lambda/latest/dg/lambda-api-permissions-ref.html"""
    function = resource.removesuffix(":*")
    return function != resource and function in resources and resource.startswith("arn:aws:lambda:")


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _listed(item) for name, item in value.items()}
    items = value if isinstance(value, list) else [value]
    return sorted({item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in items})
