"""Generates mutants that grant what AWS needs for what a solution wires: the least of it, which is
to be paid, and more than that, which is not. The wirings come from the grader's table, the ARNs
from the commands of the task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from realhf.aws.grading.companions import Wiring, read_wirings
from realhf.aws.tasks.task import ACCOUNT_ID, Task
from tests.aws.validation.command_line import CommandLine, moved, quoted, sendable
from tests.aws.validation.field_changes import OTHER_ACCOUNT
from tests.aws.validation.mutant import Expected, Mutant, inserted
from tests.aws.validation.resource_deeds import cli_service

_ROLE = re.compile(r"arn:aws:iam::\d+:role/([\w-]+)")
_ARN = re.compile(r"arn:aws:[\w:/.*+=@-]+")
_HAS_GRANTS: Mapping[str, str] = {
    "sqs": '"?Policy"?[:=]',
    "lambda": " add-permission ",
    "s3": " put-bucket-policy ",
}
"""How a task's commands look that write the policy of a resource: what it lets in is that task's
own matter."""
_OTHER_ACTIONS: Mapping[str, str] = {
    "sqs": "sqs:ReceiveMessage",
    "s3": "s3:DeleteObject",
    "lambda": "lambda:GetFunction",
    "kinesis": "kinesis:DeleteStream",
    "logs": "logs:DeleteLogGroup",
    "sns": "sns:Subscribe",
    "states": "states:StopExecution",
    "dynamodb": "dynamodb:DeleteTable",
}
"""By prefix of the actions of a grant, one that no wiring of the table has."""

_SAID = ("RedrivePolicy", "EventSourceArn")
"""Members that stand in the command that wires, where a row is about them: its other ARNs are of
other wires."""


def companions(task: Task) -> Iterator[Mutant]:
    """Yield the solution with the least grant for each wire in it, in each way that counts as the
    least, and with one action, resource or principal more."""
    lines = [*(line for line in map(sendable, task.setup) if line), *task.solution]
    last = len(task.solution) - 1
    for row in read_wirings():
        for line in lines:
            command = CommandLine.parse(line)
            if command.service.removesuffix("api") != cli_service(row.kind[0]).removesuffix("api"):
                continue
            if any(word in row.wires and word not in line for word in _SAID):
                continue
            for what, expected, grant in _grants(row, command, line, lines):
                extra = [moved(one, last) for one in grant]
                proof = tuple(range(last, last + len(extra)))
                commands = inserted(task.solution, last, extra)
                about = "the least" if expected == "paid" else "more than the least"
                yield Mutant("companions", about, row.name, what, commands, expected, proof)


def _grants(
    row: Wiring, command: CommandLine, line: str, lines: Sequence[str]
) -> Iterator[tuple[str, Expected, list[str]]]:
    """Yield (what, whether it is to be paid, commands that grant it)."""
    role = _ROLE.search(line)
    if row.role:
        if role is not None:
            yield from _of_a_role(row, role[1], _targets(row, command, line))
        return
    source = _source(row, command)
    for target in _targets(row, command, line):
        service = target.split(":")[2]
        name = re.split("[:/]", target)[-1]
        if service not in _HAS_GRANTS or not source or "${" in target:
            continue
        if any(re.search(_HAS_GRANTS[service], one) and name in one for one in lines):
            continue
        prefix = command.value("--s3-key-prefix")
        for what, expected, grant in _statements(
            row, target, source, f"{prefix}/" if prefix else ""
        ):
            yield what, expected, _written(service, name, grant)


def _targets(row: Wiring, command: CommandLine, line: str) -> list[str]:
    """Return the ARNs of what a command wires to, of its own resource where the row means that."""
    here = f"us-east-1:{ACCOUNT_ID}"
    own = {
        "cloudtrail": ("--s3-bucket-name", "arn:aws:s3:::{}"),
        "lambda": ("--function-name", f"arn:aws:lambda:{here}:function:{{}}"),
        "codebuild": ("--name", f"arn:aws:codebuild:{here}:project/{{}}"),
    }
    option, arn = own.get(row.kind[0], ("", ""))
    name = command.value(option)
    texts = [*_ARN.findall(line), *([arn.format(name)] if name else [])]
    return sorted({text for text in texts if re.fullmatch(row.to, text) and not _ROLE.search(text)})


def _source(row: Wiring, command: CommandLine) -> str:
    """Return the ARN of what a command wires, "" where it does not say it."""
    here = f"us-east-1:{ACCOUNT_ID}"
    match row.kind[0]:
        case "sns":
            found = command.value("--topic-arn")
        case "events":
            rule = command.value("--rule")
            found = rule and f"arn:aws:events:{here}:rule/{rule}"
        case "s3":
            bucket = command.value("--bucket")
            found = bucket and f"arn:aws:s3:::{bucket}"
        case "cloudtrail":
            trail = command.value("--name")
            found = trail and f"arn:aws:cloudtrail:{here}:trail/{trail}"
        case _:
            found = None
    return found if found and "${" not in found else ""


def _statements(
    row: Wiring, target: str, source: str, prefix: str
) -> Iterator[tuple[str, Expected, dict[str, Any]]]:
    words = {
        "target": target,
        "account": ACCOUNT_ID,
        "name": re.split("[:/]", target)[-1],
        "group": "",
    }
    words |= {"prefix": prefix}
    resources = [pattern.format(**words) for pattern in row.resources]
    least = {"Effect": "Allow", "Principal": {"Service": row.principal}, "Action": [*row.actions]}
    least |= {"Resource": resources if len(resources) > 1 else resources[0]}
    given = {name: dict(value) for name, value in (row.condition or {}).items()}
    by_account = {
        **given,
        "StringEquals": {**given.get("StringEquals", {}), "aws:SourceAccount": ACCOUNT_ID},
    }
    by_source = {**given, "ArnLike": {"aws:SourceArn": source}}
    limited = {**least, "Condition": by_source}
    yield "for the source", "paid", limited
    yield "for the account", "paid", {**least, "Condition": by_account}
    yield (
        "for both",
        "paid",
        {**least, "Condition": {**by_account, "ArnLike": by_source["ArnLike"]}},
    )
    yield "an action more", "unpaid", {**limited, "Action": [*row.actions, _other(row)]}
    yield (
        "another principal",
        "unpaid",
        {**limited, "Principal": {"AWS": f"arn:aws:iam::{OTHER_ACCOUNT}:root"}},
    )
    yield "anybody", "unpaid", {**least, "Principal": "*"}
    yield "for any source", "unpaid", least
    yield (
        "for a source of another account",
        "unpaid",
        {
            **least,
            "Condition": {
                **given,
                "ArnLike": {"aws:SourceArn": source.replace(ACCOUNT_ID, OTHER_ACCOUNT) + "*"},
            },
        },
    )


def _other(row: Wiring) -> str:
    return _OTHER_ACTIONS[row.actions[0].partition(":")[0]]


def _written(service: str, name: str, statement: Mapping[str, Any]) -> list[str]:
    """Return the commands that give a resource a policy of one statement."""
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    if service == "sqs":
        attributes = quoted(json.dumps({"Policy": policy}))
        url = "${step1:QueueUrl}"
        change = f"aws sqs set-queue-attributes --queue-url {url} --attributes {attributes}"
        return [f"aws sqs get-queue-url --queue-name {name}", change]
    if service == "s3":
        return [f"aws s3api put-bucket-policy --bucket {name} --policy {quoted(policy)}"]
    principal = statement["Principal"]
    who = principal if isinstance(principal, str) else next(iter(principal.values()))
    limits = {
        key.lower(): value
        for limit in statement.get("Condition", {}).values()
        for key, value in limit.items()
    }
    options = [f"--{option} {limits[key]}" for key, option in _LIMITS.items() if key in limits]
    actions = statement["Action"]
    line = (
        f"aws lambda add-permission --function-name {name} --statement-id companion --principal "
        f"{quoted(who)}"
    )
    return [" ".join([line, "--action", actions[-1], *options])]


_LIMITS = {"aws:sourcearn": "source-arn", "aws:sourceaccount": "source-account"}


def _elsewhere(resource: str) -> str:
    """Return another resource than one: of another account where it says one, else a namesake."""
    return (
        resource.replace(ACCOUNT_ID, OTHER_ACCOUNT) if ACCOUNT_ID in resource else f"{resource}-2"
    )


def _of_a_role(
    row: Wiring, role: str, targets: Sequence[str]
) -> Iterator[tuple[str, Expected, list[str]]]:
    for policy in row.managed:
        yield (
            policy,
            "paid",
            [f"aws iam attach-role-policy --role-name {role} --policy-arn {policy}"],
        )
    administrator = "arn:aws:iam::aws:policy/AdministratorAccess"
    yield (
        administrator,
        "unpaid",
        [f"aws iam attach-role-policy --role-name {role} --policy-arn {administrator}"],
    )
    for target in targets if row.actions else ():
        words = {"target": target, "account": ACCOUNT_ID, "name": re.split("[:/]", target)[-1]}
        resources = [
            pattern.format(**words) for pattern in row.resources if "{group}" not in pattern
        ]
        least = {"Effect": "Allow", "Action": [*row.actions], "Resource": resources}
        for what, expected, statement in (
            ("the least", "paid", least),
            ("one action of it", "paid", {**least, "Action": row.actions[0]}),
            ("an action more", "unpaid", {**least, "Action": [*row.actions, _other(row)]}),
            (
                "another resource as well",
                "unpaid",
                {**least, "Resource": [*resources, _elsewhere(resources[0])]},
            ),
            ("any resource", "unpaid", {**least, "Resource": "*"}),
        ):
            policy = quoted(json.dumps({"Version": "2012-10-17", "Statement": [statement]}))
            line_of = (
                f"aws iam put-role-policy --role-name {role} --policy-name companion "
                f"--policy-document {policy}"
            )
            if row.resources != ("*",) or "resource" not in what:
                yield what, expected, [line_of]  # type: ignore[misc]
