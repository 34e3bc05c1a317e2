"""Success criteria: those of warm-up tasks, and of tasks in the format of the public AWS RL
environment.

    operation, params             a request that an agent has to send; in a warm-up task "s3:ListObjectsV2"
    operation, command_contains   the same as a CLI word ("create-table"), with a service or another text
    resource_exists               {service, name}: a resource with exactly this name
    steps                         [{operation, resource?}], in their order
    services                      services that must receive an accepted request
    state_checks                  [{command, json_path, expected, output_contains}]: a command that only reads

Tasks that ask for more are graded by their end state instead and have no criteria. Criteria of the
public environment that have no equivalent here are refused with a reason, because an unsolvable
task looks like a policy that cannot learn. Source: docs/reference/environment.md 6.
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
from realhf.aws.grading.inventory import LISTINGS, ListingClient, list_names
from realhf.aws.grading.tracker import (
    Evidence,
    answers_question,
    has_effect,
    identity,
    mentions,
    same_resource,
)
from realhf.aws.tasks.task import TaskError

MAX_CHECKS = 40
"""Maximum number of a task's steps, and of its state checks."""
_TYPES: Mapping[str, type] = {
    **{"operation": str, "command_contains": str, "params": dict, "resource_exists": dict},
    **dict.fromkeys(("steps", "services", "state_checks"), list),
}
"""Types of the known keys in the criteria."""
_CHECK_TYPES: Mapping[str, type] = {"command": str, "json_path": str, "output_contains": str}
"""Types of the known keys in a state check."""
_SERVICES: Mapping[str, str] = {"s3api": "s3", "ebs": "ec2"}
"""Services whose names in criteria differ from botocore's."""
_S3_WORDS: Mapping[str, str] = {
    **{"ls": "ListBuckets", "mb": "CreateBucket", "rb": "DeleteBucket", "rm": "DeleteObject"},
    **dict.fromkeys(("cp", "mv", "sync"), "PutObject"),
}
"""API operations of the high-level ``aws s3`` commands."""
_KINDS: Mapping[str, str] = {"elasticache:create-cache-cluster": "cluster"}
"""The kind of resource that an operation creates, where it is not simply the rest of the
operation's name."""
_USUAL_KINDS: Mapping[str, str] = {
    **{
        "s3": "bucket",
        "dynamodb": "table",
        "sqs": "queue",
        "sns": "topic",
        "lambda": "function",
        "iam": "role",
    },
    **{
        "secretsmanager": "secret",
        "ecs": "cluster",
        "rds": "db-instance",
        "elasticache": "cluster",
    },
    **{
        "route53": "hosted-zone",
        "elbv2": "load-balancer",
        "efs": "file-system",
        "cognito-idp": "user-pool",
    },
    **{"ssm": "parameter", "events": "rule", "cloudformation": "stack", "apigateway": "rest-api"},
    **{"apigatewayv2": "api", "glue": "database", "firehose": "delivery-stream"},
}
"""The default kind of resource of each service, used if the operation does not determine the
kind."""
_UNNAMED = frozenset(
    {
        ("ec2", "instance"),
        ("ec2", "subnet"),
        ("ec2", "volume"),
        ("ec2", "vpc"),
        ("kms", "key"),
        ("sns", "subscription"),
    }
)
"""Kinds of resources that are listed by a generated id or an endpoint instead of a name."""
_DRAWN_IDS = re.compile(
    r"--(user-pool|hosted-zone|rest-api|api|file-system|group|vpc|subnet|instance|volume|key|security-group)-ids?[ =]"
)
"""Options whose values AWS generates. No agent can create a resource whose id a task's author
chose."""
_READ_PREFIXES = (
    "get-",
    "list-",
    "describe-",
    "head-",
    "batch-get-",
    "query",
    "scan",
    "search-",
    "lookup-",
    "filter-",
    "ls",
)
"""Prefixes of the CLI operations that only read."""


class StateReader(ListingClient, Protocol):
    """The part of a slot that a check needs; see ``world.SlotState``."""

    def run(self, command: str) -> CommandResult:
        """Run a read-only command. Raises ConnectionError if the simulator gives no
        answer."""
        ...


@dataclass(frozen=True)
class ListedResource:
    """Check that the account lists a resource with a certain name."""

    service: str
    """The service's botocore name."""
    kind: str
    """Kind of resource, as in ``inventory.LISTINGS``."""
    name: str
    """Canonical name of the resource, see ``tracker.identity``."""

    def holds(self, state: StateReader) -> bool:
        """Return whether the check passes now.

        Raises StateCallError or ConnectionError if the state cannot be read.
        """
        return self.name in {
            identity(self.service, name) for name in list_names(state, self.service, self.kind)
        }


@dataclass(frozen=True)
class CommandCheck:
    """Check on the output of a command that only reads: it must contain a text, or be JSON with the
    expected value at a path.

    Values are compared as strings, ignoring case, as in the public environment.
    """

    command: str
    """The command line."""
    json_path: str = ""
    """JMESPath into the output, or "" for the whole output."""
    expected: Any = None
    """Expected value at the path, or None to compare nothing."""
    output_contains: str = ""
    """Text that the output must contain."""

    @property
    def service(self) -> str:
        """The botocore name of the service that the check reads."""
        service = check_command(self.command).service
        return "s3" if service == "s3api" else service

    def holds(self, state: StateReader) -> bool:
        """Return whether the check passes now. Truncated output fails, because an agent can cause
        it by creating many resources.

        Raises ConnectionError if the simulator gives no answer.
        """
        result = state.run(self.command)
        if not result.success or result.truncated or self.output_contains not in result.stdout:
            return False
        if self.expected is None:
            return True
        try:
            value = jmespath.search(self.json_path or "@", json.loads(result.stdout or "{}"))
        except (ValueError, RecursionError, JMESPathTypeError):
            return False
        return str(value).lower() == str(self.expected).lower()

    def asks_for_drawn_id(self) -> bool:
        """Return whether the command names a resource by an id that AWS generates."""
        return _DRAWN_IDS.search(self.command) is not None


Check = ListedResource | CommandCheck


@dataclass(frozen=True)
class CriteriaStep:
    """One step of a multi_step task."""

    operation: str
    """The required operation, e.g. "s3:CreateBucket"."""
    resource: str | None = None
    """Name of the resource, or None for any."""
    also: frozenset[str] = frozenset()
    """Operations that are accepted in place of ``operation``."""

    def is_met_by(self, request: Evidence) -> bool:
        """Return whether a request has an operation that this step accepts, and names the step's
        resource in some parameter."""
        if not has_effect(request.operation, self.operation) and request.operation not in self.also:
            return False
        if self.resource is None or same_resource(
            request.resource, identity(request.service, self.resource)
        ):
            return True
        return mentions(request.params, self.resource)


@dataclass(frozen=True)
class Criteria:
    """A task's parsed success criteria; see ``parse_criteria``."""

    operation: str = ""
    """Operation of the required request, or "" if none is required."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the request must have."""
    command_contains: str = ""
    """Text that the request's command line must contain."""
    resource: ListedResource | None = None
    """Resource that must exist."""
    steps: tuple[CriteriaStep, ...] = ()
    """The steps, in order."""
    services: frozenset[str] = frozenset()
    """Services that must receive an accepted request."""
    state_checks: tuple[CommandCheck, ...] = ()
    """Checks that must pass at the end."""

    @property
    def operations(self) -> frozenset[str]:
        """All operations that the criteria name."""
        steps = {operation for step in self.steps for operation in (step.operation, *step.also)}
        return frozenset(steps | ({self.operation} - {""}))

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks that must pass at the end."""
        return (*((self.resource,) if self.resource else ()), *self.state_checks)

    @property
    def named_services(self) -> frozenset[str]:
        """All services that the criteria refer to."""
        operations = {operation.partition(":")[0] for operation in self.operations}
        return self.services | operations | {check.service for check in self.checks}

    def matches(self, request: Evidence) -> bool:
        """Return whether one request meets the criteria, with exact names (layer 7 of the
        ``grader`` module docstring).

        The request must ask the required question about the required resource, by its name, ARN or
        URL. Its command line must contain ``command_contains`` and must show the answer, so a
        ``wait`` command does not count.
        """
        if not answers_question(request.operation, request.params, self.operation, self.params):
            return False
        return self.command_contains in request.command and not check_command(request.command).waits


def parse_criteria(data: Mapping[str, Any]) -> Criteria:
    """Parse a task's criteria. Raises TaskError, naming the part that cannot be graded."""
    data = {key: value for key, value in data.items() if value not in (None, [], {}, "")}
    _refuse_unknown(data, _TYPES.keys(), "")
    _check_types(data, _TYPES, "")
    services = frozenset(_parse_service(name) for name in data.get("services", ()))
    word = data.get("operation", "")
    contains = data.get("command_contains", "")
    operation = word
    if _is_cli_word(word):
        operation, *others = _find_operations(word, _named_service(contains))
        contains = ""
        if others:
            raise TaskError(f"operation {word!r} belongs to several services; name one of them")
    criteria = Criteria(
        operation=operation,
        params=data.get("params", {}),
        command_contains=contains,
        resource=_parse_resource(data["resource_exists"], word)
        if "resource_exists" in data
        else None,
        steps=tuple(_parse_step(step, services) for step in data.get("steps", ())),
        services=services,
        state_checks=tuple(map(_parse_state_check, data.get("state_checks", ()))),
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
            f"task.success_criteria{where} has the unknown key {key!r}; known: "
            f"{', '.join(sorted(known))}. What asks "
            "for more is graded by its end state: a solution, and no success_criteria"
        )


def _check_types(data: Mapping[str, Any], types: Mapping[str, type], where: str) -> None:
    for key, kind in types.items():
        if key in data and not isinstance(data[key], kind):
            raise TaskError(f"task.success_criteria{where}.{key} is not of type {kind.__name__}")


def _is_cli_word(operation: str) -> bool:
    """Return whether an operation is written as in the CLI (``create-table``) and not as
    ``service:Operation``."""
    return operation != "" and ":" not in operation


def _parse_service(name: Any) -> str:
    """Return a service's botocore name. Raises TaskError for a service that is not available."""
    if not isinstance(name, str):
        raise TaskError("a service of task.success_criteria is not a string")
    service = _SERVICES.get(name, name)
    if _table_name(service) not in ALLOWED:
        raise TaskError(f"service {name[:60]!r} is not available here")
    return service


def _named_service(text: str) -> frozenset[str]:
    """Return the service that ``command_contains`` names, as a set; empty if ``command_contains``
    is any other text."""
    if _table_name(_SERVICES.get(text, text)) in ALLOWED or (
        text.isidentifier() and text.islower()
    ):
        return frozenset({_parse_service(text)})
    return frozenset()


def _table_name(service: str) -> str:
    """Return a service's name in the command table ``ALLOWED``."""
    return "s3api" if service == "s3" else service


def _find_operations(word: str, services: frozenset[str]) -> list[str]:
    """Return all operations that the CLI calls ``word`` within these services, or within all
    services if ``services`` is empty.

    Raises TaskError if there is none that an agent may use.
    """
    if word in _S3_WORDS and services <= {"s3"}:
        return [f"s3:{_S3_WORDS[word]}"]
    owners = sorted(
        {_SERVICES.get(owner, owner) for owner, words in ALLOWED.items() if word in words}
    )
    fitting = [owner for owner in owners if owner in services] or ([] if services else owners)
    if (
        not fitting
        and len(owners) == 1
        and not any(word in _api_names(service) for service in services)
    ):
        fitting = owners  # ``services`` lists required services; others are not forbidden
    if not fitting:
        where = f" of {', '.join(sorted(services))}" if services else ""
        raise TaskError(f"operation {word[:60]!r}{where} is not available here")
    return [f"{owner}:{_api_names(owner)[word]}" for owner in fitting]


@cache
def _api_names(service: str) -> Mapping[str, str]:
    """Return a service's API operation names by their CLI words.

    Reading the model of a large service takes about 100 ms, once per process.
    """
    model = botocore.loaders.create_loader().load_service_model(service, "service-2")
    return {xform_name(name, "-"): name for name in model["operations"]}


def _parse_resource(check: Mapping[str, Any], operation: str) -> ListedResource:
    where = ".resource_exists"
    _refuse_unknown(check, {"service", "name"}, where)
    if not all(isinstance(check.get(key), str) for key in ("service", "name")):
        raise TaskError(f"task.success_criteria{where} needs a service and a name")
    service = _parse_service(check["service"])
    word = operation if _is_cli_word(operation) else xform_name(operation.partition(":")[2], "-")
    created_kind = _KINDS.get(f"{service}:{word}", word.partition("-")[2])
    listed_kinds = {kind for kind, *_ in LISTINGS.get(service, ())}
    kind = created_kind if created_kind in listed_kinds else _USUAL_KINDS.get(service, created_kind)
    if kind not in listed_kinds or (service, kind) in _UNNAMED:
        raise TaskError(f"resource_exists of {check['service']!r} cannot be checked by a name")
    return ListedResource(service, kind, identity(service, check["name"]))


def _parse_step(step: Any, services: frozenset[str]) -> CriteriaStep:
    if not isinstance(step, Mapping):
        raise TaskError("a step of task.success_criteria is not an object")
    step = {key: value for key, value in step.items() if value is not None}
    _refuse_unknown(step, {"operation", "resource"}, ".steps")
    if not step.get("operation") or not all(isinstance(value, str) for value in step.values()):
        raise TaskError("operation and resource of a step must be strings")
    operation, *also = (
        _find_operations(step["operation"], services)
        if _is_cli_word(step["operation"])
        else [step["operation"]]
    )
    return CriteriaStep(operation, step.get("resource"), frozenset(also))


def _parse_state_check(check: Any) -> CommandCheck:
    where = ".state_checks"
    if not isinstance(check, Mapping) or not check.get("command"):
        raise TaskError(f"a check of task.success_criteria{where} has no command")
    check = {key: value for key, value in check.items() if value is not None}
    _refuse_unknown(check, _CHECK_TYPES.keys() | {"expected", "description"}, where)
    _check_types(check, _CHECK_TYPES, where)
    if not check_command(check["command"]).operation.startswith(_READ_PREFIXES):
        raise TaskError("the command of a check may only read")
    path = check.get("json_path", "").removeprefix("$").removeprefix(".")
    try:
        jmespath.compile(path or "@")
    except JMESPathError as error:
        raise TaskError(f"task.success_criteria{where}.json_path: {error}") from None
    return CommandCheck(
        check["command"], path, check.get("expected"), check.get("output_contains", "")
    )
