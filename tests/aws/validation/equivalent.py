"""Generates other right ways: the canonical solution in other spellings, by ARN instead of name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from awscli.shorthand import BackCompatVisitor, ShorthandParseError, ShorthandParser
from botocore.model import ListShape, Shape

from realhf.aws.tasks.task import ACCOUNT_ID, Task
from tests.aws.validation.command_line import (
    CommandLine,
    each_document,
    option_shapes,
    quoted,
    renumbered,
    rewritten,
)
from tests.aws.validation.play import Needs, Play

Rewrite = Callable[[CommandLine], CommandLine | None]

_ARNS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("lambda", "--function-name"): "lambda:us-east-1:{account}:function:{name}",
        ("dynamodb", "--table-name"): "dynamodb:us-east-1:{account}:table/{name}",
        ("ecs", "--cluster"): "ecs:us-east-1:{account}:cluster/{name}",
        ("ecs", "--clusters"): "ecs:us-east-1:{account}:cluster/{name}",
        ("kms", "--key-id"): "kms:us-east-1:{account}:{name}",
        ("ssm", "--name"): "ssm:us-east-1:{account}:parameter/{name}",
        ("cloudtrail", "--name"): "cloudtrail:us-east-1:{account}:trail/{name}",
        ("rds", "--db-instance-identifier"): "rds:us-east-1:{account}:db:{name}",
    }
)
"""Options that take the name or the ARN, where the request is about something that exists."""
_ARN_OPTIONS: Mapping[tuple[str, str], str] = MappingProxyType(
    {("kinesis", "--stream-name"): "--stream-arn"}
)
LOOK = "aws sts get-caller-identity"
"""Changes nothing."""
_MAKES = ("create-", "put-parameter", "register-")


def equivalent_plays(task: Task) -> Iterator[Play]:
    """Yield the solution in each other spelling that changes one of its commands, and with looks in
    between."""
    lines = list(task.solution)
    spellings: tuple[tuple[str, Rewrite, Needs], ...] = (
        ("--option=value", _with_equals, "all"),
        ("options in reverse order", _reversed, "all"),
        ("region and output named", _with_globals, "all"),
        ("JSON for shorthand", _json_for_shorthand, "all"),
        ("policies with lists", _policies(_lists), "all"),
        ("policies with single values", _policies(_singles), "all"),
        ("policies in another key order", _policies(_reordered), "all"),
        ("s3 mb for create-bucket", _make_bucket, "all"),
        ("ARN for name", _by_arn, "all or skip"),
    )
    for name, rewrite, needs in spellings:
        changed = [_rewritten(line, rewrite) for line in lines]
        if changed != [_rewritten(line, lambda command: command) for line in lines]:
            yield Play("equivalent", name, tuple(changed), needs=needs)
    looks = [word for line in lines for word in (LOOK, line)]
    places = {number + 1: 2 * number + 2 for number in range(len(lines))}
    yield Play("equivalent", "looks in between", tuple(renumbered(line, places) for line in looks))


def _rewritten(line: str, rewrite: Rewrite) -> str:
    """Return the line in the one spelling that all rewritten lines have, so that only what
    ``rewrite`` changes differs."""
    command = CommandLine.parse(line)
    return str(rewrite(command) or command)


def _with_equals(command: CommandLine) -> CommandLine | None:
    joined = tuple(
        (f"{name}={quoted(values[0])}", ()) if len(values) == 1 else (name, values)
        for name, values in command.options
    )
    return replace(command, options=joined)


def _reversed(command: CommandLine) -> CommandLine | None:
    return replace(command, options=command.options[::-1]) if len(command.options) > 1 else None


def _with_globals(command: CommandLine) -> CommandLine | None:
    return replace(
        command, options=(*command.options, ("--region", ("us-east-1",)), ("--output", ("json",)))
    )


def _make_bucket(command: CommandLine) -> CommandLine | None:
    bucket = command.value("--bucket")
    if (command.service, command.operation, len(command.options)) != (
        "s3api",
        "create-bucket",
        1,
    ) or bucket is None:
        return None
    return CommandLine("s3", "mb", arguments=(f"s3://{bucket}",))


def _by_arn(command: CommandLine) -> CommandLine | None:
    if command.operation.startswith(_MAKES):
        return None
    options = []
    for name, values in command.options:
        pattern = _ARNS.get((command.service, name))
        if pattern and len(values) == 1 and not values[0].startswith(("arn:", "${")):
            values = (
                f"arn:aws:{pattern.format(account=ACCOUNT_ID, name=values[0].removeprefix('/'))}",
            )
        elif (command.service, name) in _ARN_OPTIONS:
            name = _ARN_OPTIONS[command.service, name]
            values = (f"arn:aws:kinesis:us-east-1:{ACCOUNT_ID}:stream/{values[0]}",)
        options.append((name, values))
    return replace(command, options=tuple(options))


def _json_for_shorthand(command: CommandLine) -> CommandLine | None:
    shapes = option_shapes(command.service, command.operation)
    options = []
    for name, values in command.options:
        shape = shapes.get(name)
        if shape is not None and shape.type_name in ("structure", "list", "map") and values:
            values = _as_json(shape, values)
        options.append((name, values))
    return replace(command, options=tuple(options))


def _as_json(shape: Shape, values: Sequence[str]) -> tuple[str, ...]:
    """Return the values of one option as one JSON text; unchanged where they are JSON, files or the
    output of a command."""
    if values[0].startswith(("{", "[", "file://")) or any(
        value.startswith("${") for value in values
    ):
        return tuple(values)
    if isinstance(shape, ListShape) and cast(Shape, shape.member).type_name not in (
        "structure",
        "list",
        "map",
    ):
        return (json.dumps(list(values)),)
    try:
        parsed = [ShorthandParser().parse(value) for value in values]
    except ShorthandParseError:
        return tuple(values)
    whole: Any = parsed if isinstance(shape, ListShape) else parsed[0]
    BackCompatVisitor().visit(whole, shape)
    return (json.dumps(whole),)


def _policies(change: Callable[[Any], Any]) -> Rewrite:
    """Return a rewrite of the policies in a command's options, embedded ones included."""

    def rewrite(command: CommandLine) -> CommandLine | None:
        options = []
        for name, values in command.options:
            if len(values) == 1 and any(
                "Statement" in document for document in each_document(values[0])
            ):
                values = (rewritten(values[0], change),)
            options.append((name, values))
        return replace(command, options=tuple(options))

    return rewrite


def _lists(policy: Any) -> Any:
    """Turn every action, resource and principal into a list."""
    return _with_statements(policy, lambda part: part if isinstance(part, list) else [part])


def _singles(policy: Any) -> Any:
    """Turn lists of one into what they hold, the statements included."""

    def single(part: Any) -> Any:
        return part[0] if isinstance(part, list) and len(part) == 1 else part

    changed = _with_statements(policy, single)
    return changed | {"Statement": single(changed["Statement"])}


def _reordered(policy: Any) -> Any:
    statements = [dict(reversed(statement.items())) for statement in reversed(policy["Statement"])]
    return dict(reversed((policy | {"Statement": statements}).items()))


def _with_statements(policy: Any, change: Callable[[Any], Any]) -> Any:
    """Return the policy with the actions, resources and principals of its statements changed. A
    wildcard principal stays."""
    statements = []
    for statement in policy["Statement"]:
        new = {
            key: change(part) if key in ("Action", "Resource") else part
            for key, part in statement.items()
        }
        if isinstance(new.get("Principal"), Mapping):
            new["Principal"] = {kind: change(part) for kind, part in new["Principal"].items()}
        statements.append(new)
    return policy | {"Statement": statements}
