"""Leftovers: resources that neither set-up nor solution contain and that only the agent can have
made.

Every additional resource counts unless it is made by a service, still shown by AWS after its
removal, a record of a use, or the stack that declares the requested resources. Source:
docs/reference/environment.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from realhf.aws.grading.meanings import is_setting
from realhf.aws.grading.snapshot import SETTLED, Key, Snapshot
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

Leaf = tuple[Key, str, str, int]
"""Resource, path, value as JSON, and an index among equal leaves."""
OWN = "own "
"""Prefix of the drawn name of a resource that has no counterpart in the target."""
_RECORDS_OF_USE = frozenset(
    {
        *(("athena", "executions"), ("backup", "jobs"), ("batch", "jobs"), ("codebuild", "builds")),
        *(("glue", "job_runs"), ("glue", "workflow_runs"), ("ssm", "commands")),
        *(
            ("stepfunctions", "executions"),
            ("stepfunctions", "map_runs"),
            ("stepfunctions", "task_tokens"),
        ),
        *(("stepfunctions", "activity_tasks"), ("dynamodb", "closed_streams")),
        *(("cloudtrail", "events"), ("cloudwatch", "metrics"), ("logs", "log_records")),
        *(("ses", "sent_emails"), ("sns", "sms_messages")),
    }
)
"""Kinds of records of runs, sent messages or measurements. AWS removes them itself later; no
operation does."""
_RUNS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("stepfunctions", "executions"): ("status", SETTLED)
}
"""Kinds of runs that may still create something, with the member and the value of a running one."""
_KEPT_BY_AWS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("cloudformation", "stacks"): ("StackStatus", '"DELETE_COMPLETE"'),
    ("ec2", "instances"): ("State/Name", '"terminated"'),
    ("ec2", "nat_gateways"): ("State", '"deleted"'),
    ("ecs", "clusters"): ("status", '"INACTIVE"'),
    ("ecs", "services"): ("status", '"INACTIVE"'),
    ("ecs", "task_defs"): ("status", '"INACTIVE"'),
    ("kms", "keys"): ("KeyState", '"PendingDeletion"'),
    ("secretsmanager", "secrets"): ("DeletedDate", ""),
}
"""Kinds of resources that AWS still shows after their removal, with the path and the value ("" for
any) that mark a removed one."""
_ENDS_WITH_IT = '"DeleteOnTermination":"true"'
"""Marks a disk that is deleted with its instance."""
_STACK = ("cloudformation", "stacks")
_DECLARED = re.compile(r"^_resources/[^/]+/PhysicalResourceId$")
"""Path of the identity of a resource that a stack declares."""
_GRANTS = frozenset(
    {
        "AWS::IAM::ManagedPolicy",
        "AWS::IAM::Policy",
        "AWS::IAM::RolePolicy",
        "AWS::Lambda::Permission",
        "AWS::S3::BucketPolicy",
        "AWS::SNS::TopicInlinePolicy",
        "AWS::SNS::TopicPolicy",
        "AWS::SQS::QueueInlinePolicy",
        "AWS::SQS::QueuePolicy",
    }
)
"""Template types that are graded as grants, by their effect; a mention of their names proves
nothing."""
_LOG_GROUPS = ("logs", "log_groups")
_LOGS_OF: Mapping[tuple[str, str], str] = {
    ("codebuild", "projects"): "/aws/codebuild/",
    ("lambda", "functions"): "/aws/lambda/",
}
"""Kinds of resources for which AWS creates a log group on their first run, with the prefix of its
name."""
_REVISIONS = ("ecs", "task_defs")
"""Kind whose records are numbered revisions of a family."""
_CHOSEN_GROUP = "LoggingConfig/LogGroup"
"""Path of a log group that a function logs to by its own configuration."""
_OF_A_NEW_GROUP = frozenset({"", "arn", "streams"})
"""Paths of a log group as its service creates it: without expiry, destinations and tags."""
_LOG_GROUP_OF_FUNCTION = re.compile(r'\\?"LogGroup\\?": ?\\?"[^"]*"')
"""The automatic log group of a function, which is part of every answer about the function."""
_PARTS = re.compile(r"[/:|]")
_OWN_TOKEN = re.compile(f"{DRAWN}{OWN}([^{END_DRAWN}]*){END_DRAWN}")


def find_leftovers(
    own: Mapping[Key, Sequence[Leaf]],
    others: Iterable[Leaf],
    wanted: Set[Key],
    transcript: str | None,
) -> set[Key]:
    """Return the resources that the agent has left behind.

    ``own``: resources without a counterpart in the target, with their leaves. ``others``: the
    leaves of all other resources. ``wanted``: the resources that the solution makes.
    ``transcript``: the agent's requests that may have changed something with their answers, None if
    they are unknown.
    """
    past = {key for key, leaves in own.items() if _is_past(key, leaves)}
    judged = {
        key
        for key in own.keys() - past
        if not (is_setting(key) or _belongs_to_removed(key, own[key], past))
    }
    stacks = {key for key in judged if key[:2] == _STACK}
    declared = "\n".join(leaf[2] for key in stacks for leaf in own[key])
    transcript = _LOG_GROUP_OF_FUNCTION.sub("", transcript or "")
    known = [*others]
    unnamed = {key for key in judged - stacks if not _is_named(key, transcript, declared)}
    leftovers = judged - stacks - _made_by_services(unnamed, own, known)
    return leftovers | {
        key for key in stacks if not _declares_wanted(own[key], known, wanted, leftovers)
    }


def _is_past(key: Key, leaves: Sequence[Leaf]) -> bool:
    """Return whether a resource is a record of a finished use, or removed but still shown."""
    if key[:2] in _RECORDS_OF_USE:
        path, value = _RUNS.get(key[:2], ("", ""))
        return not any(leaf[1] == path and leaf[2] == f'"{value}"' for leaf in leaves if path)
    path, value = _KEPT_BY_AWS.get(key[:2], ("", ""))
    return bool(path) and any(leaf[1] == path and leaf[2].startswith(value) for leaf in leaves)


def is_under_way(account: Snapshot) -> bool:
    """Return whether something that may still create resources is running in an account."""
    for key, attributes in account.resources.items():
        member, value = _RUNS.get(key[:2], ("", ""))
        if member and attributes.get(member) == value:
            return True
    return False


def _belongs_to_removed(key: Key, leaves: Sequence[Leaf], past: Iterable[Key]) -> bool:
    """Return whether a resource is part of a removed one: lies in it, or is the disk of an
    instance."""
    for service, kind, identity in past:
        if (
            key[0] == service
            and key[1].startswith(f"{kind}/")
            and key[2].strip("/").startswith(f"{identity}/")
        ):
            return True
        if (
            key[:2] == ("ec2", "volumes")
            and kind == "instances"
            and any(identity in leaf[2] for leaf in leaves)
        ):
            return any(_ENDS_WITH_IT in leaf[2] for leaf in leaves)
    return False


def _is_named(key: Key, transcript: str, declared: str) -> bool:
    """Return whether the transcript or the agent's stacks name a resource.

    It is named by the last part of its identity; a log group by its whole name, because services
    name it by a path.
    """
    tokens = _OWN_TOKEN.findall(key[2])
    if tokens:
        return any(token in transcript or f"{OWN}{token}" in declared for token in tokens)
    name = key[2] if key[:2] == ("logs", "log_groups") else _PARTS.split(key[2])[-1]
    return name in transcript or name in declared


def _made_by_services(
    unnamed: Set[Key], own: Mapping[Key, Sequence[Leaf]], known: Sequence[Leaf]
) -> set[Key]:
    """Return those of the ``unnamed`` resources that services made as a consequence of known
    resources.

    Only kinds and names that services are known to use count. A resource that the agent had a
    workflow or a stack create, under whatever name, counts as the agent's.
    """
    known_keys = {leaf[0] for leaf in known}
    names = {f"{_LOGS_OF[key[:2]]}{key[2]}" for key in known_keys if key[:2] in _LOGS_OF}
    names |= {
        leaf[2].strip('"')
        for leaf in known
        if leaf[0][:2] in _LOGS_OF and leaf[1].endswith(_CHOSEN_GROUP)
    }
    groups = {
        key
        for key in unnamed
        if key[:2] == _LOG_GROUPS
        and key[2] in names
        and all(leaf[1] in _OF_A_NEW_GROUP for leaf in own[key])
    }
    holders = [*groups, *(key for key in known_keys if key[:2] == _LOG_GROUPS)]
    families = {key[2].partition(":")[0] for key in known_keys if key[:2] == _REVISIONS}
    return groups | {
        key
        for key in unnamed
        if any(_lies_in(key, holder) for holder in holders)
        or (key[:2] == _REVISIONS and key[2].partition(":")[0] in families)
    }


def _lies_in(key: Key, holder: Key) -> bool:
    """Return whether a resource is a part of another one."""
    return (
        key[0] == holder[0]
        and key[1].startswith(f"{holder[1]}/")
        and key[2].startswith(f"{holder[2]}/")
    )


def short_names(key: Key) -> Iterator[str]:
    """Yield the last part of an identity, by which others refer to it, unless AWS gives it to many
    resources."""
    name = _PARTS.split(key[2])[-1]
    if name not in ("", "default"):
        yield name


def _declares_wanted(
    stack: Sequence[Leaf], known: Sequence[Leaf], wanted: Set[Key], leftovers: Set[Key]
) -> bool:
    """Return whether a stack declares a wanted resource, and none that is left over or missing."""
    resources = {
        leaf[1].rpartition("/")[0]: leaf[2].strip('"') for leaf in stack if _DECLARED.match(leaf[1])
    }
    types = {
        leaf[1].rpartition("/")[0]: leaf[2].strip('"')
        for leaf in stack
        if leaf[1].endswith("/ResourceType")
    }
    names = {name for key in wanted for name in short_names(key)}
    seen = "\n".join([*{leaf[0][2]: None for leaf in known}, *(leaf[2] for leaf in known)])
    leftover_names = [name for key in leftovers for name in short_names(key)]
    return any(mentions_any(identity, names) for identity in resources.values()) and all(
        types.get(place) in _GRANTS
        or (mentions_any(seen, [identity]) and not mentions_any(identity, leftover_names))
        for place, identity in resources.items()
    )


def mentions_any(text: str, names: Iterable[str]) -> bool:
    """Return whether a text contains one of the names as a whole word."""
    return any(
        name in text and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
        for name in names
    )
