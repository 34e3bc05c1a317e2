"""Reads success criteria: what a warm-up task asks, and tasks in the words of the public AWS RL environment.

    operation, params             a request that an agent has to send; of a warm-up task "s3:ListObjectsV2"
    operation, command_contains   the same in the words of the CLI ("create-table"), and a service or text beside it
    resource_exists               {service, name}: a resource of exactly this name
    steps                         [{operation, resource?}], in their order
    services                      services that have to be reached
    state_checks                  [{command, json_path, expected, output_contains}]: a command that only looks

A task of our own that asks for more says nothing here: it is graded by its end state. What has no equivalent here is
refused with its reason, because a task that nobody can solve looks like a policy that cannot learn.
Source: docs/reference/environment.md 6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import botocore.loaders
import jmespath
from botocore import xform_name
from jmespath.exceptions import JMESPathError, JMESPathTypeError

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import CommandResult
from realhf.aws.cli.policy import check_command
from realhf.aws.grading.inventory import LISTINGS, Caller, names_of
from realhf.aws.grading.tracker import Evidence, asks, has_effect, identity, mentions, same_resource
from realhf.aws.tasks.task import TaskError

MAX_CHECKS = 40
_TYPES: Mapping[str, type] = {
    **{"operation": str, "command_contains": str, "params": dict, "resource_exists": dict},
    **dict.fromkeys(("steps", "services", "state_checks"), list),
}
_CHECK_TYPES: Mapping[str, type] = {"command": str, "json_path": str, "output_contains": str}
_SERVICES: Mapping[str, str] = {"s3api": "s3", "ebs": "ec2"}
"""Names of services in such tasks, and the names in evidence that they stand for."""
_S3_WORDS: Mapping[str, str] = {
    **{"ls": "ListBuckets", "mb": "CreateBucket", "rb": "DeleteBucket", "rm": "DeleteObject"},
    **dict.fromkeys(("cp", "mv", "sync"), "PutObject"),
}
_KINDS: Mapping[str, str] = {"elasticache:create-cache-cluster": "cluster"}
"""What an operation makes, where that is not the rest of its name."""
_USUAL_KINDS: Mapping[str, str] = {
    **{"s3": "bucket", "dynamodb": "table", "sqs": "queue", "sns": "topic", "lambda": "function", "iam": "role"},
    **{"secretsmanager": "secret", "ecs": "cluster", "rds": "db-instance", "elasticache": "cluster"},
    **{"route53": "hosted-zone", "elbv2": "load-balancer", "efs": "file-system", "cognito-idp": "user-pool"},
    **{"ssm": "parameter", "events": "rule", "cloudformation": "stack", "apigateway": "rest-api"},
    **{"apigatewayv2": "api", "glue": "database", "firehose": "delivery-stream"},
}
"""What a resource of a service is, where no operation names it."""
_UNNAMED = frozenset(
    {("ec2", "instance"), ("ec2", "subnet"), ("ec2", "volume"), ("ec2", "vpc"), ("kms", "key"), ("sns", "subscription")}
)
"""What is listed by an id that AWS draws, or by what it leads to."""
_DRAWN_IDS = re.compile(
    r"--(user-pool|hosted-zone|rest-api|api|file-system|group|vpc|subnet|instance|volume|key|security-group)-ids?[ =]"
)
"""Options whose values AWS itself draws: nobody can make a resource with an id that a task's author chose."""
_LOOKING = ("get-", "list-", "describe-", "head-", "batch-get-", "query", "scan", "search-", "lookup-", "filter-", "ls")


class StateReader(Caller, Protocol):
    """Is what a check needs of a slot; see ``world.SlotState``."""

    def run(self, command: str) -> CommandResult:
        """Run a command that only looks. Raises ConnectionError when nothing is known of the answer."""
        ...


@dataclass(frozen=True)
class ListedResource:
    """Holds when the account lists a resource with exactly this name."""

    service: str
    kind: str
    name: str

    def holds(self, state: StateReader) -> bool:
        """Return whether it is true now. Raises StateCallError or ConnectionError when the state cannot be read."""
        return self.name in {identity(self.service, name) for name in names_of(state, self.service, self.kind)}


@dataclass(frozen=True)
class CommandCheck:
    """Holds when a command that only looks prints a text, or JSON with the expected value at a path. Values compare by
    their text, as the maker of such tasks does."""

    command: str
    json_path: str = ""
    expected: Any = None
    output_contains: str = ""

    @property
    def service(self) -> str:
        """Botocore's name of the service that the check reads."""
        service = check_command(self.command).service
        return "s3" if service == "s3api" else service

    def holds(self, state: StateReader) -> bool:
        """See ``ListedResource``. Truncated output fails: an agent can flood it."""
        result = state.run(self.command)
        if not result.success or result.truncated or self.output_contains not in result.stdout:
            return False
        if self.expected is None:
            return True
        try:
            found = jmespath.search(self.json_path or "@", json.loads(result.stdout or "{}"))
        except (ValueError, RecursionError, JMESPathTypeError):
            return False
        return str(found).lower() == str(self.expected).lower()

    def asks_for_drawn_id(self) -> bool:
        """Return whether it asks for a resource by an id that AWS draws."""
        return _DRAWN_IDS.search(self.command) is not None


Check = ListedResource | CommandCheck


@dataclass(frozen=True)
class Step:
    """One step of a multi_step task. ``also``: operations that serve as well."""

    operation: str
    resource: str | None = None
    also: frozenset[str] = frozenset()

    def asks_for(self, deed: Evidence) -> bool:
        """Return whether the request is of this step's operation, and names its resource in some parameter."""
        if not has_effect(deed.operation, self.operation) and deed.operation not in self.also:
            return False
        if self.resource is None or same_resource(deed.resource, identity(deed.service, self.resource)):
            return True
        return mentions(deed.params, self.resource)


@dataclass(frozen=True)
class Criteria:
    """Holds parsed success criteria; see ``parse_criteria``."""

    operation: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    command_contains: str = ""
    resource: ListedResource | None = None
    steps: tuple[Step, ...] = ()
    services: frozenset[str] = frozenset()
    state_checks: tuple[CommandCheck, ...] = ()

    @property
    def operations(self) -> frozenset[str]:
        """Every operation that the criteria name."""
        steps = {operation for step in self.steps for operation in (step.operation, *step.also)}
        return frozenset(steps | ({self.operation} - {""}))

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold in the end."""
        return (*((self.resource,) if self.resource else ()), *self.state_checks)

    @property
    def named_services(self) -> frozenset[str]:
        """Every service that the criteria are about."""
        operations = {operation.partition(":")[0] for operation in self.operations}
        return self.services | operations | {check.service for check in self.checks}

    def matches(self, deed: Evidence) -> bool:
        """Return whether a single request matches by exact names (layer 7): it asks the demanded question of the
        demanded resource, by its name, ARN or URL, and shows the answer, which a waiter does not. A text that the
        command has to contain must be in the line that sent the request."""
        asked = asks(deed.operation, deed.params, self.operation, self.params)
        return asked and self.command_contains in deed.command and not check_command(deed.command).waits


def parse_criteria(data: Mapping[str, Any]) -> Criteria:
    """Parse criteria from the plain data of a task. Raises TaskError naming what cannot be graded here."""
    data = {key: value for key, value in data.items() if value not in (None, [], {}, "")}
    _refuse_unknown(data, _TYPES.keys(), "")
    _check_types(data, _TYPES, "")
    services = frozenset(_service(name) for name in data.get("services", ()))
    word = data.get("operation", "")
    contains = data.get("command_contains", "")
    operation = word
    if _is_word(word):
        operation, *others = _operations(word, _named_service(contains))
        contains = ""
        if others:
            raise TaskError(f"operation {word!r} belongs to several services; name one of them")
    criteria = Criteria(
        operation=operation,
        params=data.get("params", {}),
        command_contains=contains,
        resource=_resource(data["resource_exists"], word) if "resource_exists" in data else None,
        steps=tuple(_step(step, services) for step in data.get("steps", ())),
        services=services,
        state_checks=tuple(map(_state_check, data.get("state_checks", ()))),
    )
    if not (criteria.operation or criteria.command_contains or criteria.steps or criteria.checks):
        raise TaskError("task.success_criteria names no operation, resource, steps or state checks")
    if max(len(criteria.steps), len(criteria.state_checks)) > MAX_CHECKS:
        raise TaskError(f"task.success_criteria has more than {MAX_CHECKS} steps or state checks")
    return criteria


def _refuse_unknown(data: Mapping[str, Any], known: Set[str], where: str) -> None:
    unknown = set(data) - known
    if unknown:
        key = sorted(map(str, unknown))[0][:60]
        raise TaskError(
            f"task.success_criteria{where} has the unknown key {key!r}; known: {', '.join(sorted(known))}. What asks "
            "for more is graded by its end state: a solution, and no success_criteria"
        )


def _check_types(data: Mapping[str, Any], types: Mapping[str, type], where: str) -> None:
    for key, kind in types.items():
        if key in data and not isinstance(data[key], kind):
            raise TaskError(f"task.success_criteria{where}.{key} is not of type {kind.__name__}")


def _is_word(operation: str) -> bool:
    return operation != "" and ":" not in operation


def _service(name: Any) -> str:
    if not isinstance(name, str):
        raise TaskError("a service of task.success_criteria is not a text")
    service = _SERVICES.get(name, name)
    if _table_name(service) not in ALLOWED:
        raise TaskError(f"service {name[:60]!r} is not available here")
    return service


def _named_service(text: str) -> frozenset[str]:
    """Return the service that ``command_contains`` names; none where it names something else."""
    if _table_name(_SERVICES.get(text, text)) in ALLOWED or (text.isidentifier() and text.islower()):
        return frozenset({_service(text)})
    return frozenset()


def _table_name(service: str) -> str:
    return "s3api" if service == "s3" else service


def _operations(word: str, services: frozenset[str]) -> list[str]:
    """List every operation that the CLI calls ``word``, as evidence names it, in these services (none: in all of them).
    Raises TaskError where there is none that an agent may use."""
    if word in _S3_WORDS and services <= {"s3"}:
        return [f"s3:{_S3_WORDS[word]}"]
    owners = sorted({_SERVICES.get(owner, owner) for owner, words in ALLOWED.items() if word in words})
    fitting = [owner for owner in owners if owner in services] or ([] if services else owners)
    if not fitting and len(owners) == 1 and not any(word in _api_names(service) for service in services):
        fitting = owners  # a list of services says what has to be reached, not that nothing else may be used
    if not fitting:
        where = f" of {', '.join(sorted(services))}" if services else ""
        raise TaskError(f"operation {word[:60]!r}{where} is not available here")
    return [f"{owner}:{_api_names(owner)[word]}" for owner in fitting]


@cache
def _api_names(service: str) -> Mapping[str, str]:
    """Return the CLI's words for the operations of a service that agents may use, with the names in its API. To read a
    large service takes some 100 ms, once per process."""
    model = botocore.loaders.create_loader().load_service_model(service, "service-2")
    return {xform_name(name, "-"): name for name in model["operations"]}


def _resource(check: Mapping[str, Any], operation: str) -> ListedResource:
    where = ".resource_exists"
    _refuse_unknown(check, {"service", "name"}, where)
    if not all(isinstance(check.get(key), str) for key in ("service", "name")):
        raise TaskError(f"task.success_criteria{where} needs a service and a name")
    service = _service(check["service"])
    word = operation if _is_word(operation) else xform_name(operation.partition(":")[2], "-")
    made = _KINDS.get(f"{service}:{word}", word.partition("-")[2])
    known = {kind for kind, *_ in LISTINGS.get(service, ())}
    kind = made if made in known else _USUAL_KINDS.get(service, made)
    if kind not in known or (service, kind) in _UNNAMED:
        raise TaskError(f"resource_exists of {check['service']!r} cannot be checked by a name")
    return ListedResource(service, kind, identity(service, check["name"]))


def _step(step: Any, services: frozenset[str]) -> Step:
    if not isinstance(step, Mapping):
        raise TaskError("a step of task.success_criteria is no object")
    step = {key: value for key, value in step.items() if value is not None}
    _refuse_unknown(step, {"operation", "resource"}, ".steps")
    if not step.get("operation") or not all(isinstance(value, str) for value in step.values()):
        raise TaskError("operation and resource of a step are texts")
    operation, *also = _operations(step["operation"], services) if _is_word(step["operation"]) else [step["operation"]]
    return Step(operation, step.get("resource"), frozenset(also))


def _state_check(check: Any) -> CommandCheck:
    where = ".state_checks"
    if not isinstance(check, Mapping) or not check.get("command"):
        raise TaskError(f"a check of task.success_criteria{where} has no command")
    check = {key: value for key, value in check.items() if value is not None}
    _refuse_unknown(check, _CHECK_TYPES.keys() | {"expected", "description"}, where)
    _check_types(check, _CHECK_TYPES, where)
    if not check_command(check["command"]).operation.startswith(_LOOKING):
        raise TaskError("the command of a check may only look at what there is")
    path = check.get("json_path", "").removeprefix("$").removeprefix(".")
    try:
        jmespath.compile(path or "@")
    except JMESPathError as error:
        raise TaskError(f"task.success_criteria{where}.json_path: {error}") from None
    return CommandCheck(check["command"], path, check.get("expected"), check.get("output_contains", ""))
