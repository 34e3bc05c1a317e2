"""Reads success criteria that name operations in the words of the AWS CLI, as other makers' tasks do.

Such a task says ``operation: create-table`` where ours says ``dynamodb:CreateTable``, ``resource_exists`` without a
type, and paths that begin with ``$.``. Criteria are rewritten into the words of docs/reference/environment.md 6, so
that one grader serves both; what has no equivalent is refused with its reason, because a task that nobody can solve
looks like a policy that cannot learn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import botocore.loaders
from botocore import xform_name

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.grading.resource_table import RESOURCES
from realhf.aws.tasks.task import TaskError

_SERVICES: Mapping[str, str] = MappingProxyType({"s3api": "s3", "ebs": "ec2"})
"""Names of services in such tasks, and the names in evidence that they stand for."""
_S3_WORDS: Mapping[str, str] = MappingProxyType(
    {"ls": "ListBuckets", "mb": "CreateBucket", "rb": "DeleteBucket", "cp": "PutObject", "mv": "PutObject",
     "sync": "PutObject", "rm": "DeleteObject"}
)  # fmt: skip
_TYPES: Mapping[str, str] = MappingProxyType(
    {"ecs:create-cluster": "cluster", "elasticache:create-cache-cluster": "cluster", "ec2:create-volume": ""}
)
"""What an operation makes, where that is not the rest of its name; "" where what it makes has no name."""
_DEFAULT_TYPES: Mapping[str, str] = MappingProxyType(
    {"s3": "bucket", "dynamodb": "table", "sqs": "queue", "sns": "topic", "lambda": "function", "iam": "role"}
    | {"secretsmanager": "secret", "ecs": "cluster", "rds": "db-instance", "elasticache": "cluster"}
    | {"route53": "hosted-zone", "elbv2": "load-balancer", "efs": "file-system", "cognito-idp": "user-pool"}
    | {"ssm": "parameter", "events": "rule", "cloudformation": "stack", "apigateway": "rest-api"}
    | {"apigatewayv2": "api", "glue": "database", "firehose": "delivery-stream"}
)
"""What a resource of a service is, where no operation names it."""


_GENERATED_IDS = re.compile(
    r"--(user-pool|hosted-zone|rest-api|api|file-system|group|vpc|subnet|instance|volume|key|security-group)-ids?[ =]"
)
"""Options whose values AWS itself draws: nobody can make a resource with an id that a task's author chose."""


def names_drawn_id(command: str) -> bool:
    """Return whether a command asks for a resource by an id that AWS draws."""
    return _GENERATED_IDS.search(command) is not None


def from_cli_words(criteria: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the criteria in our own words; those that are in our words already come back as they are. Raises TaskError
    naming what this environment cannot grade."""
    if not _in_cli_words(criteria):
        return criteria
    found = {key: value for key, value in criteria.items() if value not in (None, [], {})}
    services = frozenset(_service(name) for name in found.get("services") or ())
    if services:
        found["services"] = sorted(services)
    if found.get("resource_exists"):
        found["resource_exists"] = _resource(found["resource_exists"], found.get("operation"))
    if _is_word(found.get("operation")):
        named = found.pop("command_contains", None)
        found["operation"], *others = _operations(found["operation"], _named_service(named))
        if others:
            raise TaskError(f"operation {criteria['operation']!r} belongs to several services; name one of them")
    if "steps" in found:
        found["steps"] = [_step(step, services) for step in found["steps"]]
    if "state_checks" in found:
        found["state_checks"] = [part for check in found["state_checks"] for part in _state_checks(check)]
    return found


def _in_cli_words(criteria: Mapping[str, Any]) -> bool:
    steps = [step for step in criteria.get("steps") or () if isinstance(step, Mapping)]
    checks = [check for check in criteria.get("state_checks") or () if isinstance(check, Mapping)]
    words = [criteria.get("operation"), *(step.get("operation") for step in steps)]
    return any(_is_word(word) for word in words) or any("command" in check for check in checks)


def _is_word(operation: Any) -> bool:
    return isinstance(operation, str) and operation != "" and ":" not in operation


def _service(name: Any) -> str:
    if not isinstance(name, str):
        raise TaskError("a service of task.success_criteria is not a text")
    service = _SERVICES.get(name, name)
    if _table_name(service) not in ALLOWED:
        raise TaskError(f"service {name[:60]!r} is not available here")
    return service


def _named_service(text: Any) -> frozenset[str]:
    """Return the service that ``command_contains`` names; none where it names something else."""
    known = isinstance(text, str) and _table_name(_SERVICES.get(text, text)) in ALLOWED
    return frozenset({_service(text)}) if known else _unavailable(text)


def _unavailable(text: Any) -> frozenset[str]:
    if isinstance(text, str) and text.isidentifier() and text.islower():
        raise TaskError(f"service {text[:60]!r} is not available here")
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


def _resource(check: Any, operation: Any) -> Any:
    if not isinstance(check, Mapping) or check.get("type") or not isinstance(check.get("service"), str):
        return check
    service, word = _service(check["service"]), operation if _is_word(operation) else ""
    made = _TYPES.get(f"{service}:{word}", word.partition("-")[2])
    kind = made if (service, made) in RESOURCES else _DEFAULT_TYPES.get(service, made)
    if (service, kind) not in RESOURCES or (word and _TYPES.get(f"{service}:{word}") == ""):
        raise TaskError(f"resource_exists of {check['service']!r} cannot be checked by a name")
    name = check.get("name")
    if (service, kind) == ("route53", "hosted-zone") and isinstance(name, str):
        name = name.rstrip(".") + "."
    return {**check, "service": service, "type": kind, "name": name}


def _step(step: Any, services: frozenset[str]) -> Any:
    if not isinstance(step, Mapping) or not _is_word(step.get("operation")):
        return step
    operation, *also = _operations(step["operation"], services)
    return {**step, "operation": operation, "also": also, "anywhere": True}


def _state_checks(check: Any) -> list[Any]:
    """Split a check that asks two things of one answer; values compare by their text, as its maker does."""
    if not isinstance(check, Mapping) or "command" not in check:
        return [check]
    path, text = check.get("json_path"), check.get("output_contains")
    rest = {key: value for key, value in check.items() if key not in ("json_path", "expected", "output_contains")}
    parts = []
    if path is not None and check.get("expected") is not None:
        wanted = str(path).removeprefix("$").removeprefix(".") or "@"
        parts.append({**rest, "json_path": wanted, "expected": check["expected"], "loose": True})
    if text or not parts:
        parts.append({**rest, "output_contains": text} if text else dict(rest))
    return parts
