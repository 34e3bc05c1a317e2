"""Reads checks from the plain data of a task: what may be written there, and that it only looks.

    a resource   {service, type, name, attributes?, loose?}
    a call       {call: {service, operation, params}, json_path?, expected? | absent? | output_contains? ...}
    a command    {command: line, json_path?, ...}, in tasks of other makers
    a policy     a resource or call with json_path and allows, refuses, tolerates, wider, owner; see ``policy_check``
    rights       {rights: {role | user | group: name}, refuses?}; see ``rights_check``
    unchanged    {unchanged: a resource with fields, or a call with json_path}; see ``unchanged_check``
    a list       several of these that must hold together

Source: docs/reference/environment.md 6 (success_criteria) and 5 (tasks are data from a client).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from realhf.aws.cli.policy import check_command
from realhf.aws.grading.iam_policy import PolicyError, parse_grant
from realhf.aws.grading.policy_check import PolicyCheck
from realhf.aws.grading.resource_table import RESOURCES
from realhf.aws.grading.rights_check import KINDS, RightsCheck
from realhf.aws.grading.tracker import is_read
from realhf.aws.grading.unchanged_check import UnchangedCheck
from realhf.aws.grading.verifier import (
    AllOf,
    CallCheck,
    Check,
    CommandCheck,
    Expectation,
    ResourceCheck,
    operation_allowed,
)
from realhf.aws.tasks.task import TaskError

_RESOURCE_KEYS = frozenset({"service", "type", "name", "attributes", "loose"})
_EXPECTATION_KEYS = frozenset({"json_path", "expected", "absent", "output_contains", "not_contains", "loose"})
_POLICY_KEYS = frozenset({"allows", "refuses", "tolerates", "wider", "owner", "json_path"})
_TYPES: Mapping[str, type] = MappingProxyType(
    {"name": str, "attributes": dict, "call": dict, "command": str, "json_path": str, "absent": bool, "loose": bool}
    | {"output_contains": str, "not_contains": str, "allows": list, "refuses": list, "wider": bool, "owner": str}
    | {"fields": list, "unchanged": dict, "tolerates": list, "rights": dict}
)
_LOOKING = ("get-", "list-", "describe-", "head-", "batch-get-", "query", "scan", "search-", "lookup-", "filter-", "ls")


def parse_check(data: Any) -> Check:
    """Parse a check, as the module describes it. Raises TaskError."""
    try:
        return _parse(data)
    except (KeyError, TypeError, AttributeError, JMESPathError, PolicyError) as error:
        raise TaskError(f"check is malformed: {type(error).__name__}: {error}") from None


def _parse(data: Any) -> Check:
    if isinstance(data, list) and data:
        return AllOf(tuple(map(parse_check, data)))
    if not isinstance(data, Mapping):
        raise TaskError(f"a check is an object, not {type(data).__name__}")
    for key, kind_of_value in _TYPES.items():
        if not isinstance(data.get(key), kind_of_value | None):
            raise TaskError(f"{key} of a check is not of type {kind_of_value.__name__}")
    if data.get("rights") is not None:
        return _rights_check(data)
    if data.get("unchanged") is not None:
        _refuse_unknown(data, {"unchanged", "description"})
        return parse_unchanged(data["unchanged"])
    for path in (data.get("json_path"), *(data.get("attributes") or ())):
        jmespath.compile(path or "@")
    if data.get("allows") is not None or data.get("refuses") is not None:
        return _policy_check(data)
    kind = next((kind for kind in ("call", "command") if data.get(kind) is not None), None)
    _refuse_unknown(data, _RESOURCE_KEYS if kind is None else _EXPECTATION_KEYS | {"call", "command", "description"})
    if kind is None:
        return _resource_check(data)
    set_keys = {key: data[key] for key in _EXPECTATION_KEYS & set(data) if data[key] is not None}
    return _call_check(data["call"], set_keys) if kind == "call" else _command_check(data["command"], set_keys)


def parse_unchanged(data: Mapping[str, Any]) -> UnchangedCheck:
    """Parse what a task protects. Raises TaskError."""
    try:
        if data.get("call") is not None:
            _refuse_unknown(data, {"call", "json_path", "description"})
            paths = [data.get("json_path") or "@"]
            source: ResourceCheck | CallCheck = _call_check(data["call"], {})
        else:
            _refuse_unknown(data, {"service", "type", "name", "fields", "description"})
            paths = list(data.get("fields") or ())
            source = _resource_check(data)
        for path in paths:
            jmespath.compile(path)
        return UnchangedCheck(source, tuple(paths))
    except (KeyError, TypeError, AttributeError, JMESPathError) as error:
        raise TaskError(f"what is protected is malformed: {type(error).__name__}: {error}") from None


def _refuse_unknown(data: Mapping[str, Any], known: Set[str]) -> None:
    unknown = set(data) - known
    if unknown:
        raise TaskError(f"check has the unknown key {sorted(unknown)[0]!r}")


def _rights_check(data: Mapping[str, Any]) -> RightsCheck:
    _refuse_unknown(data, {"rights", "refuses", "description"})
    ((kind, name),) = data["rights"].items() if len(data["rights"]) == 1 else [("", "")]
    if kind not in KINDS or not isinstance(name, str):
        raise TaskError(f"rights are those of one {', '.join(KINDS)}")
    if data.get("refuses") is None:
        return RightsCheck(kind, name)
    return RightsCheck(kind, name, tuple(map(parse_grant, data["refuses"])))


def _policy_check(data: Mapping[str, Any]) -> PolicyCheck:
    if data.get("call") is not None:
        _refuse_unknown(data, _POLICY_KEYS | {"call", "description"})
        source: ResourceCheck | CallCheck = _call_check(data["call"], {})
    else:
        _refuse_unknown(data, _POLICY_KEYS | _RESOURCE_KEYS | {"description"})
        source = _resource_check(data)
    return PolicyCheck(
        source,
        data["json_path"],
        tuple(map(parse_grant, data.get("allows") or ())),
        tuple(map(parse_grant, data.get("refuses") or ())),
        tuple(map(parse_grant, data.get("tolerates") or ())),
        bool(data.get("wider")),
        data.get("owner") or "",
    )


def _resource_check(data: Mapping[str, Any]) -> ResourceCheck:
    service = data["service"]
    kinds = [kind for owner, kind in RESOURCES if owner == service]
    kind = data.get("type", kinds[0] if len(kinds) == 1 else None)
    if (service, kind) not in RESOURCES:
        raise TaskError(f"no resource {service}:{kind} can be checked")
    return ResourceCheck(service, kind, data["name"], data.get("attributes") or {}, bool(data.get("loose")))


def _call_check(call: Mapping[str, Any], wanted: Mapping[str, Any]) -> CallCheck:
    canonical = f"{call['service']}:{call['operation']}"
    if not isinstance(call.get("params") or {}, dict):
        raise TaskError("params of a check's call are no object")
    if not (is_read(canonical) and operation_allowed(call["service"], call["operation"])):
        raise TaskError(f"a check may not call {canonical}")
    return CallCheck(call["service"], call["operation"], call.get("params") or {}, Expectation(**wanted))


def _command_check(command: str, wanted: Mapping[str, Any]) -> CommandCheck:
    verdict = check_command(command)
    if not verdict.operation.startswith(_LOOKING):
        raise TaskError("the command of a check may only look at what there is")
    return CommandCheck(command, Expectation(**wanted))
