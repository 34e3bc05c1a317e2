"""Checks out of the plain data of a task: what may be written there, and that it only looks.

Source: environment spec section 6 (success_criteria) and 5 (tasks are data from a client).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from realhf.env.policy import check_command
from realhf.env.resource_table import RESOURCES
from realhf.env.task import TaskError
from realhf.env.tracker import is_read
from realhf.env.verifier import CallCheck, Check, CommandCheck, Expectation, ResourceCheck, operation_allowed

_RESOURCE_KEYS = frozenset({"service", "type", "name", "attributes", "loose"})
_EXPECTATION_KEYS = frozenset({"json_path", "expected", "absent", "output_contains", "not_contains", "loose"})
_TYPES: Mapping[str, type] = MappingProxyType(
    {"name": str, "attributes": dict, "call": dict, "command": str, "json_path": str, "absent": bool, "loose": bool}
    | {"output_contains": str, "not_contains": str}
)
_LOOKING = ("get-", "list-", "describe-", "head-", "batch-get-", "query", "scan", "search-", "lookup-", "filter-", "ls")


def parse_check(data: Any) -> Check:
    """A check from plain data: a resource map, or a map with ``call`` or ``command``. Raises TaskError."""
    if not isinstance(data, Mapping):
        raise TaskError(f"a check is an object, not {type(data).__name__}")
    kind = next((kind for kind in ("call", "command") if data.get(kind) is not None), None)
    unknown = set(data) - (_RESOURCE_KEYS if kind is None else _EXPECTATION_KEYS | {"call", "command", "description"})
    if unknown:
        raise TaskError(f"check has the unknown key {sorted(unknown)[0]!r}")
    try:
        paths = [data["json_path"]] if data.get("json_path") else list(data.get("attributes") or ())
        for path in paths:
            jmespath.compile(path)
        for key, kind_of_value in _TYPES.items():
            if not isinstance(data.get(key), kind_of_value | None):
                raise TaskError(f"{key} of a check is not of type {kind_of_value.__name__}")
        if kind is None:
            return _resource_check(data)
        set_keys = {key: data[key] for key in _EXPECTATION_KEYS & set(data) if data[key] is not None}
        return _call_check(data["call"], set_keys) if kind == "call" else _command_check(data["command"], set_keys)
    except (KeyError, TypeError, AttributeError, JMESPathError) as error:
        raise TaskError(f"check is malformed: {type(error).__name__}: {error}") from None


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
    names = [word for word in verdict.argv if not word.startswith("-")]
    if len(names) < 2 or not names[1].startswith(_LOOKING):
        raise TaskError("the command of a check may only look at what there is")
    return CommandCheck(command, Expectation(**wanted))
