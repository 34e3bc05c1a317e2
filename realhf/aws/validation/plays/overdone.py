"""Generates what goes beyond the task: the canonical solution with more rights, wider ranges and other values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from realhf.aws.tasks.loader import get_template
from realhf.aws.tasks.names import is_name
from realhf.aws.tasks.task import Task
from realhf.aws.validation.plays.command_line import CommandLine, renumbered
from realhf.aws.validation.plays.documents import each_document, rewritten
from realhf.aws.validation.plays.play import Needs, Play

_EVERYWHERE = "0.0.0.0/0"
_ADMINISTRATOR = "arn:aws:iam::aws:policy/AdministratorAccess"
_STRANGER = "arn:aws:iam::444455556666:root"
_ALL_RIGHTS = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
_IDENTITIES: Mapping[str, str] = MappingProxyType(
    {
        "create-role": "--role-name",
        "create-user": "--user-name",
        "create-group": "--group-name",
    }
)


def overdone_plays(task: Task) -> Iterator[Play]:
    """Yield each way to overdo one of the solution's commands, and rights that nobody asked for."""
    yield from _wider_policies(task)
    yield from _wider_ranges(task)
    yield from _more_rights(task)
    yield from _other_values(task)


def _play(name: str, lines: list[str], needs: Needs = "all") -> Play:
    return Play("overdone", name, tuple(lines), needs)


def _wider_policies(task: Task) -> Iterator[Play]:
    for name, change in _WIDENINGS.items():
        changed = [_with_policies(line, change) for line in task.solution]
        if changed != [_with_policies(line, lambda statements: statements) for line in task.solution]:
            yield _play(f"policy: {name}", changed, "all or skip" if name in _PUBLIC else "all")


def _with_policies(line: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> str:
    """Return the command with the statements of its policies changed."""
    command = CommandLine.parse(line)
    for option, values in command.options:
        if len(values) == 1 and any("Statement" in document for document in each_document(values[0])):
            new = rewritten(values[0], lambda policy: policy | {"Statement": change(policy["Statement"])})
            command = command.with_value(option, new)
    return str(command)


Statements = list[dict[str, Any]]


def _each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Statements], Statements]:
    return lambda statements: [change(dict(statement)) for statement in statements]


def _and_more(part: Any, more: str) -> list[Any]:
    return [*(part if isinstance(part, list) else [part]), more]


def _any_action(statement: dict[str, Any]) -> dict[str, Any]:
    return statement | {"Action": _and_more(statement["Action"], "*")}


def _whole_service(statement: dict[str, Any]) -> dict[str, Any]:
    action = statement["Action"] if isinstance(statement["Action"], str) else statement["Action"][0]
    return statement | {"Action": action.partition(":")[0] + ":*"}


def _any_resource(statement: dict[str, Any]) -> dict[str, Any]:
    """Allow any resource in an identity's policy, the whole bucket in a bucket's. A queue's policy is about this
    queue."""
    resource = statement.get("Resource")
    if resource is None or not isinstance(resource, str):
        return statement
    if "Principal" not in statement:
        return statement | {"Resource": [resource, "*"]}
    bucket, _, key = resource.partition("/")
    return statement | ({"Resource": [resource, f"{bucket}/*"]} if key not in ("", "*") else {})


def _anybody(statement: dict[str, Any]) -> dict[str, Any]:
    """Open a statement to anybody. One with a condition stays as it is: the condition names the source, so nobody else
    would be let in; another play removes the condition."""
    return statement | ({"Principal": "*"} if "Principal" in statement and "Condition" not in statement else {})


def _other_account(statement: dict[str, Any]) -> dict[str, Any]:
    principal = statement.get("Principal")
    if not isinstance(principal, Mapping) or "Condition" in statement:
        return statement
    return statement | {"Principal": {**principal, "AWS": _and_more(principal.get("AWS", []), _STRANGER)}}


def _unconditional(statement: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in statement.items() if key != "Condition"}


def _another_statement(statements: Statements) -> Statements:
    wide = statements[0] | {"Sid": "Wide", "Effect": "Allow", "Action": "*"}
    wide |= {key: "*" for key in ("Resource", "Principal") if key in wide}
    return [*statements, _unconditional(wide)]


def _denied(statements: Statements) -> Statements:
    return [statement | {"Effect": "Deny"} for statement in statements]


def _denied_as_well(statements: Statements) -> Statements:
    return [*statements, statements[0] | {"Sid": "Never", "Effect": "Deny"}]


_WIDENINGS: Mapping[str, Callable[[Statements], Statements]] = MappingProxyType(
    {
        "any action as well": _each(_any_action),
        "the whole service": _each(_whole_service),
        "any resource as well": _each(_any_resource),
        "anybody": _each(_anybody),
        "another account as well": _each(_other_account),
        "without its conditions": _each(_unconditional),
        "a statement that allows everything": _another_statement,
        "deny for allow": _denied,
        "denied as well": _denied_as_well,
    }
)


_PUBLIC = frozenset({"anybody", "a statement that allows everything"})
"""What a bucket that blocks public policies refuses."""


def _wider_ranges(task: Task) -> Iterator[Play]:
    """Widen rules of security groups: open to everybody, on all ports, for all protocols; and add one more rule."""
    for place, line in enumerate(task.solution):
        command = CommandLine.parse(line)
        if command.operation != "authorize-security-group-ingress":
            continue
        for name, option, value in (
            ("open to everybody", "--cidr", _EVERYWHERE),
            ("all ports", "--port", "1-65535"),
            ("all ports from its port on", "--port", f"{command.value('--port')}-65535"),
            ("all protocols", "--protocol", "all"),
        ):
            if command.value(option) not in (None, value):
                lines = list(task.solution)
                lines[place] = str(command.with_value(option, value))
                yield _play(f"ingress: {name}", lines)
        extra = command.with_value("--port", "22").with_value("--cidr", _EVERYWHERE)
        yield _play("ingress: SSH for everybody as well", _inserted(task, place, str(extra)))


def _more_rights(task: Task) -> Iterator[Play]:
    """Make every identity that the solution makes an administrator; not where nothing follows its making, for the
    episode ends there."""
    for place, line in enumerate(task.solution[:-1]):
        command = CommandLine.parse(line)
        option = _IDENTITIES.get(command.operation) if command.service == "iam" else None
        name = command.value(option) if option else None
        if option is None or name is None:
            continue
        kind = option.split("-")[2]
        attach = CommandLine("iam", f"attach-{kind}-policy", ((option, (name,)), ("--policy-arn", (_ADMINISTRATOR,))))
        yield _play(f"{kind} {name}: AdministratorAccess attached", _inserted(task, place + 1, str(attach)))
        document = (("--policy-name", ("all",)), ("--policy-document", (_ALL_RIGHTS,)))
        if kind == "group":
            continue
        put = CommandLine("iam", f"put-{kind}-policy", ((option, (name,)), *document))
        yield _play(f"{kind} {name}: inline policy that allows everything", _inserted(task, place + 1, str(put)))


def _inserted(task: Task, place: int, extra: str) -> list[str]:
    """Return the solution with one more command before the one at ``place``; captures follow the commands."""
    places = {number: number + (number > place) for number in range(1, len(task.solution) + 1)}
    lines = [renumbered(line, places) for line in task.solution]
    return [*lines[:place], extra, *lines[place:]]


def _other_values(task: Task) -> Iterator[Play]:
    """Exchange each value that the task draws for another one that it could have drawn: a grader has to check what the
    text demands."""
    kinds = get_template(task.task_id).params
    for key, value in task.params.items():
        others = [other for other in kinds[key] if other != value] if isinstance(kinds[key], list) else []
        if is_name(value) or not others:
            continue
        pattern = re.compile(rf"(?<![\w.-]){re.escape(str(value))}(?![\w-])")
        changed = [pattern.sub(str(others[-1]), line) for line in task.solution]
        if changed != list(task.solution):
            yield _play(f"{key} {others[-1]} for {value}", changed)
