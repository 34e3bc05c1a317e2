"""Verifies whether a piece of the simulator's state is what a task demands: ground truth.

Checks are structured requests through the slot's state client, in the agent's account; nothing of a check is ever
written into a command line. There are three kinds: a *resource* with an exact name and attributes, looked up in the
``resource_table``, a *call* whose response is compared, and, in tasks of other makers, a *command* whose output is. The
checks of ``policy_check`` and ``unchanged_check`` build on resources and calls. Attribute keys and ``json_path`` are
JMESPath expressions; values compare by type. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jmespath
from botocore import xform_name
from jmespath.exceptions import JMESPathTypeError
from jmespath.functions import Functions, signature

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import CommandResult
from realhf.aws.cli.policy import check_command
from realhf.aws.cli.state_client import StateCallError, UnreadableAnswer
from realhf.aws.grading.resource_table import RESOURCES, Extra

_ABSENT_CODES = re.compile(r"NotFound|NoSuch|NonExistent|NotExist|^404$|^NotFound$")
_FIELD = re.compile(r"%\((.+?)\)s")
_ABSENT_ANSWERS = frozenset(
    {
        ("athena", "GetWorkGroup", "InvalidRequestException"),
        ("cloudformation", "DescribeStacks", "ValidationError"),
        ("dynamodb", "ListTagsOfResource", "AccessDeniedException"),
        ("ecs", "DescribeTaskDefinition", "ClientException"),
        ("secretsmanager", "GetSecretValue", "InvalidRequestException"),
    }
)
"""Operations that answer "there is none", or none any more, with a code of many meanings."""


class _Functions(Functions):
    @signature({"types": ["string", "null"]})
    def _func_json(self, text: str | None) -> Any:
        try:
            return None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return None


_OPTIONS = jmespath.Options(custom_functions=_Functions())


def search(path: str, value: Any) -> Any:
    """Return what the JMESPath expression finds in ``value``. Besides the standard functions there is ``json(text)``,
    the document that a text holds (null: none), for policies. A function of something that is not there finds nothing.
    """
    try:
        return jmespath.search(path, value, _OPTIONS)
    except JMESPathTypeError:
        return None


class StateReader(Protocol):
    """Is what a check needs of a slot; see ``world.SlotState``."""

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """See ``StateClient.call``."""
        ...

    def run(self, command: str) -> CommandResult:
        """Run a command that only looks. Raises ConnectionError when nothing is known of the answer."""
        ...


class Snapshot:
    """Reads the state at one moment of grading: each request is sent once, however many checks ask for it."""

    def __init__(self, state: StateReader) -> None:
        self._state = state
        self._answers: dict[str, dict[str, Any] | StateCallError] = {}
        self._results: dict[str, CommandResult] = {}

    def call(self, service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return what ``StateReader.call`` does; repeats its answer or its StateCallError."""
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

    def run(self, command: str) -> CommandResult:
        """Return what ``StateReader.run`` does; repeats its result."""
        if command not in self._results:
            self._results[command] = self._state.run(command)
        return self._results[command]


@dataclass(frozen=True)
class ResourceCheck:
    """Holds when the resource with exactly this name exists and each attribute equals its value."""

    service: str
    type: str
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    loose: bool = False

    def holds(self, state: StateReader) -> bool:
        """See ``Check``."""
        return any(map(self.fits, self.objects(state)))

    def fits(self, found: Mapping[str, Any]) -> bool:
        """Return whether this object has the attributes."""
        return all(equal(search(path, found), value, loose=self.loose) for path, value in self.attributes.items())

    def reading(self, state: StateReader) -> Any:
        """Return the attributes' values as they are, of everything of this name."""
        return [[search(path, found) for path in self.attributes] for found in self.objects(state)]

    def objects(self, state: StateReader, paths: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Return everything of this name: most kinds have one at most, but two networks may carry the same tag. What
        the attributes and ``paths`` need beyond the object itself is fetched."""
        lookup = RESOURCES[self.service, self.type]
        answer = _response(state, self.service, lookup.operation, lookup.params, self.name)
        found = None if answer is None else jmespath.search(lookup.root, answer)
        extras = _needed(lookup.extras, [*self.attributes, *paths])
        return [self._with_extras(state, extras, one) for one in _named(found, lookup.name_field, self.name)]

    def _with_extras(self, state: StateReader, extras: Mapping[str, Extra], found: dict[str, Any]) -> dict[str, Any]:
        for key, (operation, params, path) in extras.items():
            service, _, operation = operation.rpartition(":")
            params = _with_fields(_with_name(params, self.name), found)
            extra = None if params is None else _response(state, service or self.service, operation, params, None)
            found = {**found, key: jmespath.search(path, extra or {})}
        return found


@dataclass(frozen=True)
class Expectation:
    """Says what an answer must be.

    With ``json_path`` and ``expected``: the value there equals it (``loose``: its text does); with ``absent``: there is
    no such value, or no such resource; ``output_contains``/``not_contains``: text in the serialised answer, in which
    quotes of embedded documents are not escaped; with none: there is an answer.
    """

    json_path: str = "@"
    expected: Any = None
    absent: bool = False
    output_contains: str = ""
    not_contains: str = ""
    loose: bool = False

    def met_by(self, answer: Any) -> bool:
        """Return whether the answer is as expected; ``answer`` is None where the resource does not exist."""
        if answer is None:
            return self.absent
        if self.output_contains or self.not_contains:
            text = answer if isinstance(answer, str) else json.dumps(answer, default=str).replace('\\"', '"')
            return self.output_contains in text and not (self.not_contains and self.not_contains in text)
        found = search(self.json_path, answer)
        if self.absent:
            return found is None or found == []
        return self.expected is None or equal(found, self.expected, loose=self.loose)


@dataclass(frozen=True)
class CallCheck:
    """Holds when the response to a request is as ``wanted``."""

    service: str
    operation: str
    params: Mapping[str, Any]
    wanted: Expectation

    def holds(self, state: StateReader) -> bool:
        """See ``Check``."""
        return self.wanted.met_by(self.answer(state))

    def reading(self, state: StateReader) -> Any:
        """Return what is compared, as it is."""
        return search(self.wanted.json_path, self.answer(state) or {})

    def answer(self, state: StateReader) -> dict[str, Any] | None:
        """Return the response, None where the resource does not exist."""
        return _response(state, self.service, self.operation, self.params, None)


@dataclass(frozen=True)
class CommandCheck:
    """Holds when a command that only looks prints what is ``wanted``."""

    command: str
    wanted: Expectation

    @property
    def service(self) -> str:
        """See ``Check``."""
        service = check_command(self.command).service
        return "s3" if service in ("s3api", "s3") else service

    def reading(self, state: StateReader) -> Any:
        """Return what the command prints."""
        return state.run(self.command).stdout

    def holds(self, state: StateReader) -> bool:
        """See ``Check``. Truncated output fails: what an agent can flood cannot show that something is not there."""
        result = state.run(self.command)
        if result.truncated:
            return False  # what an agent can flood cannot show that something is not there
        if not result.success:
            return self.wanted.met_by(None)
        if self.wanted.output_contains or self.wanted.not_contains:
            return self.wanted.met_by(result.stdout)
        try:
            return self.wanted.met_by(json.loads(result.stdout or "{}"))
        except (ValueError, RecursionError):
            return False


class Check(Protocol):
    """Is one thing that must be true of the simulator's state."""

    @property
    def service(self) -> str:
        """Botocore's name of the service that the check reads."""
        ...

    def holds(self, state: StateReader) -> bool:
        """Return whether it is true now. Raises StateCallError or ConnectionError when the state cannot be read."""
        ...

    def reading(self, state: StateReader) -> Any:
        """Return what the check reads, to see whether a request changed anything there."""
        ...


@dataclass(frozen=True)
class AllOf:
    """Holds when several checks hold together."""

    checks: tuple[Check, ...]

    @property
    def service(self) -> str:
        """See ``Check``; the service of the first check."""
        return self.checks[0].service

    def holds(self, state: StateReader) -> bool:
        """See ``Check``."""
        return all(check.holds(state) for check in self.checks)

    def reading(self, state: StateReader) -> Any:
        """See ``Check``; one reading per check."""
        return [check.reading(state) for check in self.checks]


def of_one_object(checks: Iterable[Check]) -> list[ResourceCheck]:
    """Join what the resource checks demand of each name, so that one object has to meet all of it and not every
    namesake a part."""
    merged: dict[tuple[str, str, str, bool], dict[str, Any]] = {}
    parts = (check.checks if isinstance(check, AllOf) else (check,) for check in checks)
    for check in itertools.chain.from_iterable(parts):
        if isinstance(check, ResourceCheck):
            merged.setdefault((check.service, check.type, check.name, check.loose), {}).update(check.attributes)
    return [ResourceCheck(*key[:3], attributes, key[3]) for key, attributes in merged.items()]


def verified(check: Check | None, state: StateReader) -> bool:
    """Return whether the simulator's state, as the grader itself reads it, is what the check demands (layer 1, ground
    truth).

    Nothing that an agent printed or wrote takes part. Without a check there is nothing to verify. What cannot be read,
    or is nested too deeply to be compared, is not what was demanded.
    """
    try:
        return check is None or check.holds(state)
    except (UnreadableAnswer, RecursionError):
        return False


def reading_text(check: Check, state: StateReader) -> str:
    """Return what the check reads, as text to compare; the same text for everything that cannot be read."""
    try:
        return json.dumps(check.reading(state), sort_keys=True, default=str)
    except (UnreadableAnswer, RecursionError):
        return "unreadable"


@functools.lru_cache(maxsize=1024)
def operation_allowed(service: str, operation: str) -> bool:
    """Return whether a task may have this request sent on its behalf: the table that binds agents binds tasks too."""
    return xform_name(operation, "-") in ALLOWED.get("s3api" if service == "s3" else service, ())


def equal(found: Any, expected: Any, *, loose: bool = False) -> bool:
    """Return whether values are equal by value and type: 1 is neither "1" nor True, unless ``loose``: then their texts
    are compared."""
    if loose and isinstance(expected, str | int | float | bool):
        return str(found).lower() == str(expected).lower()
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
    """Return the response, or None where the resource does not exist. Other failures are raised: a broken simulator
    must not look like a failed task."""
    try:
        return state.call(service, operation, _with_name(params, name))
    except StateCallError as error:
        if _ABSENT_CODES.search(error.code) or (service, operation, error.code) in _ABSENT_ANSWERS:
            return None
        raise


def _needed(extras: Mapping[str, Extra], paths: list[str]) -> dict[str, Extra]:
    """Return the extras that the paths name, and those that these need in turn, which stand above them."""
    needed: dict[str, Extra] = {}
    for key, extra in reversed(list(extras.items())):
        if any(re.search(rf"\b{key}\b", path) for path in [*paths, *(str(params) for _, params, _ in needed.values())]):
            needed[key] = extra
    return dict(reversed(list(needed.items())))


def _with_name(params: Any, name: str | None) -> Any:
    if name is None:
        return params
    if isinstance(params, str):
        return params.replace("%s", name)
    if isinstance(params, Mapping):
        return {key: _with_name(value, name) for key, value in params.items()}
    return [_with_name(value, name) for value in params] if isinstance(params, list) else params


def _with_fields(params: Any, found: Any) -> Any:
    """Replace every ``%(path)s`` in ``params`` by what the path finds in the object, by its text where it is part of a
    longer one; returns None if one finds nothing."""
    if isinstance(params, str):
        whole = _FIELD.fullmatch(params)
        if whole:
            return search(whole[1], found) or None
        values = {path: search(path, found) for path in _FIELD.findall(params)}
        return None if None in values.values() else _FIELD.sub(lambda match: str(values[match[1]]), params)
    if isinstance(params, Mapping):
        filled = {key: _with_fields(value, found) for key, value in params.items()}
        return None if None in filled.values() else filled
    if isinstance(params, list):
        items = [_with_fields(value, found) for value in params]
        return None if None in items else items
    return params


def _named(found: Any, name_field: str, name: str) -> list[Any]:
    """Return the objects whose ``name_field`` is exactly ``name``, of one object or a list of them; those that were
    looked up by their name need no such field."""
    candidates = found if isinstance(found, list) else [] if found is None else [found]
    return [one for one in candidates if not name_field or (isinstance(one, Mapping) and one.get(name_field) == name)]
