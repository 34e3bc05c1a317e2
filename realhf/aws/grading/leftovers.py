"""Leftovers: resources that neither set-up nor solution contain and that only the agent can have
created.

Every additional resource counts as one, except resources that a service creates, resources that AWS
still shows after their removal, records of a use, and a stack that declares the required resources.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from realhf.aws.grading.meanings import is_setting
from realhf.aws.grading.snapshot import SETTLED, Key, Snapshot
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

Leaf = tuple[Key, str, str, int]
"""(resource, path, value as JSON, number that distinguishes equal leaves)."""
OWN = "own "
"""Prefix that marks the generated name of a resource without a counterpart in the target."""
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
"""Kinds that are records of runs, sent messages or measurements. AWS deletes them itself after some
time; no operation does."""
_RUNS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("stepfunctions", "executions"): ("status", SETTLED)
}
"""Kinds of runs that may still create something, with the member that shows the status and its
value while the run continues."""
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
"""Kinds of resources that AWS still shows after their removal, with the path and the value that
show the removal ("" for any value)."""
_ENDS_WITH_IT = '"DeleteOnTermination":"true"'
"""Text in a disk's attributes that shows that the disk is deleted with its instance."""
_STACK = ("cloudformation", "stacks")
_DECLARED = re.compile(r"^_resources/[^/]+/PhysicalResourceId$")
"""Path in a stack's record to the identity of a resource that the stack declares."""
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
"""CloudFormation types of policies and permissions. They are graded as grants, by their effect, so
it is not required that the account mentions their names."""
_LOG_GROUPS = ("logs", "log_groups")
_LOGS_OF: Mapping[tuple[str, str], str] = {
    ("codebuild", "projects"): "/aws/codebuild/",
    ("lambda", "functions"): "/aws/lambda/",
}
"""Kinds of resources for which AWS creates a log group on the first run, with the prefix of the log
group's name."""
_REVISIONS = ("ecs", "task_defs")
"""Kind of resource whose records are numbered revisions of a family."""
_CHOSEN_GROUP = "LoggingConfig/LogGroup"
"""Path of the log group that a function's configuration selects."""
_OF_A_NEW_GROUP = frozenset({"", "arn", "streams"})
"""Paths of a log group's leaves when a service has just created it: without retention, destinations
and tags."""
_LOG_GROUP_OF_FUNCTION = re.compile(r'\\?"LogGroup\\?": ?\\?"[^"]*"')
"""A function's automatic log group, which appears in every answer about the function."""
_PARTS = re.compile(r"[/:|]")
_OWN_TOKEN = re.compile(f"{DRAWN}{OWN}([^{END_DRAWN}]*){END_DRAWN}")


def find_leftovers(
    own: Mapping[Key, Sequence[Leaf]],
    others: Iterable[Leaf],
    wanted: Set[Key],
    transcript: str | None,
) -> set[Key]:
    """Return the resources that the agent left behind.

    ``own``: resources without a counterpart in the target, with their leaves. ``others``: the
    leaves of all other resources. ``wanted``: the resources that the solution creates.
    ``transcript``: the agent's requests that may have changed something, with their answers; None
    if they are unknown.
    """
    past = {key for key, leaves in own.items() if _is_finished(key, leaves)}
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
    leftovers = judged - stacks - _find_made_by_services(unnamed, own, known)
    return leftovers | {
        key for key in stacks if not _declares_wanted(own[key], known, wanted, leftovers)
    }


def _is_finished(key: Key, leaves: Sequence[Leaf]) -> bool:
    """Return whether a resource is the record of a finished use, or was removed and is still
    shown."""
    if key[:2] in _RECORDS_OF_USE:
        path, value = _RUNS.get(key[:2], ("", ""))
        return not any(leaf[1] == path and leaf[2] == f'"{value}"' for leaf in leaves if path)
    path, value = _KEPT_BY_AWS.get(key[:2], ("", ""))
    return bool(path) and any(leaf[1] == path and leaf[2].startswith(value) for leaf in leaves)


def is_under_way(account: Snapshot) -> bool:
    """Return whether anything that may still create resources is running in an account."""
    for key, attributes in account.resources.items():
        member, value = _RUNS.get(key[:2], ("", ""))
        if member and attributes.get(member) == value:
            return True
    return False


def _belongs_to_removed(key: Key, leaves: Sequence[Leaf], past: Iterable[Key]) -> bool:
    """Return whether a resource belongs to a removed one in ``past``: it lies within that resource,
    or is a disk deleted with an instance."""
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

    They must contain the last part of its identity. For a log group they must contain the whole
    name, because services name log groups by a path.
    """
    tokens = _OWN_TOKEN.findall(key[2])
    if tokens:
        return any(token in transcript or f"{OWN}{token}" in declared for token in tokens)
    name = key[2] if key[:2] == ("logs", "log_groups") else _PARTS.split(key[2])[-1]
    return name in transcript or name in declared


def _find_made_by_services(
    unnamed: Set[Key], own: Mapping[Key, Sequence[Leaf]], known: Sequence[Leaf]
) -> set[Key]:
    """Return the ``unnamed`` resources that services created as a consequence of resources in
    ``known``.

    Only kinds and names that services are known to use are included. A resource that a workflow or
    a stack created on the agent's behalf counts as the agent's, whatever its name.
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
        if any(_is_part_of(key, holder) for holder in holders)
        or (key[:2] == _REVISIONS and key[2].partition(":")[0] in families)
    }


def _is_part_of(key: Key, holder: Key) -> bool:
    """Return whether a resource is part of ``holder``."""
    return (
        key[0] == holder[0]
        and key[1].startswith(f"{holder[1]}/")
        and key[2].startswith(f"{holder[2]}/")
    )


def short_names(key: Key) -> Iterator[str]:
    """Yield the last part of a resource's identity, by which other resources refer to it. Yield
    nothing if AWS gives that name to many resources."""
    name = _PARTS.split(key[2])[-1]
    if name not in ("", "default"):
        yield name


def _declares_wanted(
    stack: Sequence[Leaf], known: Sequence[Leaf], wanted: Set[Key], leftovers: Set[Key]
) -> bool:
    """Return whether a stack declares a wanted resource, and no resource that is left over or
    missing."""
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
