"""Ground truth: whether a piece of the simulator's state is what a task demands.

Checks are structured requests through the slot's state client, in the agent's account; nothing of a check is
ever written into a command line. Two kinds: a *resource* with an exact name and attributes, looked up in the
``resource_table``, and a *call* whose response is compared. Attribute keys and ``json_path`` are JMESPath expressions;
values compare by type. Source: environment spec section 7.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jmespath
from botocore import xform_name
from jmespath.exceptions import JMESPathError

from realhf.env.command_table import ALLOWED
from realhf.env.resource_table import RESOURCES
from realhf.env.state_client import StateCallError
from realhf.env.task import TaskError
from realhf.env.tracker import is_read

_ABSENT_CODES = re.compile(r"NotFound|NoSuch|NonExistent|NotExist|^404$|^NotFound$")


class StateReader(Protocol):
    """What a check needs of a slot: ``StateClient`` has it."""

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]: ...


class Snapshot:
    """The state at one moment of grading: each request is sent once, however many checks ask for it."""

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._answers: dict[str, dict[str, Any] | StateCallError] = {}

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """As ``StateReader.call``; repeats its answer or its StateCallError."""
        key = f"{service}:{operation}:{params!r}"
        if key not in self._answers:
            try:
                self._answers[key] = self._state.call(service, operation, params)
            except StateCallError as error:
                self._answers[key] = error
        answer = self._answers[key]
        if isinstance(answer, StateCallError):
            raise answer
        return answer


@dataclass(frozen=True)
class ResourceCheck:
    """The resource with exactly this name exists and each attribute equals its value."""

    service: str
    type: str
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, state: StateReader) -> bool:
        found = self._object(state)
        return found is not None and all(
            equal(jmespath.search(path, found), value) for path, value in self.attributes.items()
        )

    def _object(self, state: StateReader) -> Any:
        lookup = RESOURCES[self.service, self.type]
        found = _response(state, self.service, lookup.operation, lookup.params, self.name)
        if found is not None:
            found = _named(jmespath.search(lookup.root, found), lookup.name_field, self.name)
        if found is None:
            return None
        for key, (operation, params, path) in lookup.extras.items():
            if any(re.match(rf"{key}\b", attribute) for attribute in self.attributes):
                extra = _response(state, self.service, operation, params, self.name)
                found = {**found, key: jmespath.search(path, extra or {})}
        return found


@dataclass(frozen=True)
class CallCheck:
    """A request and what its response must be. With ``json_path`` and ``expected``: the value there equals it;
    with ``absent``: there is no such value, or no such resource; ``output_contains``/``not_contains``: text in
    the serialised response; with none of them: the request succeeds."""

    service: str
    operation: str
    params: Mapping[str, Any]
    json_path: str = "@"
    expected: Any = None
    absent: bool = False
    output_contains: str = ""
    not_contains: str = ""

    def holds(self, state: StateReader) -> bool:
        response = _response(state, self.service, self.operation, self.params, None)
        if response is None:
            return self.absent
        if self.output_contains or self.not_contains:
            text = str(response)
            return self.output_contains in text and not (self.not_contains and self.not_contains in text)
        found = jmespath.search(self.json_path, response)
        if self.absent:
            return found is None or found == []
        return self.expected is None or equal(found, self.expected)


Check = ResourceCheck | CallCheck

_RESOURCE_KEYS = frozenset({"service", "type", "name", "attributes"})
_CALL_KEYS = frozenset({"call", "json_path", "expected", "absent", "output_contains", "not_contains"})


def parse_check(data: Any) -> Check:
    """A check from plain data: a resource map, or a map with ``call``. Raises TaskError."""
    if not isinstance(data, Mapping):
        raise TaskError(f"a check is an object, not {type(data).__name__}")
    call = data.get("call")
    unknown = set(data) - (_CALL_KEYS if call is not None else _RESOURCE_KEYS)
    if unknown:
        raise TaskError(f"check has the unknown key {sorted(unknown)[0]!r}")
    try:
        paths = [data["json_path"]] if "json_path" in data else list(data.get("attributes", ()))
        for path in paths:
            jmespath.compile(path)
        if call is not None:
            canonical = f"{call['service']}:{call['operation']}"
            if not (is_read(canonical) and operation_allowed(call["service"], call["operation"])):
                raise TaskError(f"a check may not call {canonical}")
            options = {key: value for key, value in data.items() if key != "call"}
            return CallCheck(call["service"], call["operation"], call.get("params", {}), **options)
        service = data["service"]
        kinds = [kind for owner, kind in RESOURCES if owner == service]
        kind = data.get("type", kinds[0] if len(kinds) == 1 else None)
        if (service, kind) not in RESOURCES:
            raise TaskError(f"no resource {service}:{kind} can be checked")
        return ResourceCheck(service, kind, data["name"], data.get("attributes", {}))
    except (KeyError, TypeError, JMESPathError) as error:
        raise TaskError(f"check is malformed: {type(error).__name__}: {error}") from None


@functools.lru_cache(maxsize=1024)
def operation_allowed(service: str, operation: str) -> bool:
    """Whether a task may have this request sent on its behalf: the table that binds agents binds tasks too."""
    return xform_name(operation, "-") in ALLOWED.get("s3api" if service == "s3" else service, ())


def equal(found: Any, expected: Any) -> bool:
    """Equality by value and type: 1 is neither "1" nor True."""
    if isinstance(expected, Mapping):
        return (
            isinstance(found, Mapping)
            and set(found) == set(expected)
            and all(equal(found[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(equal, found, expected))
    return type(found) is type(expected) and found == expected


def _response(
    state: StateReader, service: str, operation: str, params: Mapping[str, Any], name: str | None
) -> dict[str, Any] | None:
    """The response, or None where the resource does not exist. Other failures are raised: a broken simulator
    must not look like a failed task."""
    try:
        return state.call(service, operation, _with_name(params, name))
    except StateCallError as error:
        if _ABSENT_CODES.search(error.code):
            return None
        raise


def _with_name(params: Any, name: str | None) -> Any:
    if name is None:
        return params
    if isinstance(params, str):
        return params.replace("%s", name)
    if isinstance(params, Mapping):
        return {key: _with_name(value, name) for key, value in params.items()}
    return [_with_name(value, name) for value in params] if isinstance(params, list) else params


def _named(found: Any, name_field: str, name: str) -> Any:
    """The object whose ``name_field`` is exactly ``name``, out of one object or a list of them."""
    if not name_field:
        return found
    candidates = found if isinstance(found, list) else [found]
    return next((item for item in candidates if isinstance(item, Mapping) and item.get(name_field) == name), None)
