"""Says what an agent has left behind: resources that neither set-up nor solution have, and that nobody else made.

Everything counts that is not found here to be something else: made by a service, kept by AWS for a while after it was
removed, the record of a use, or the stack that declares what was asked for. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from realhf.aws.grading.meanings import is_setting
from realhf.aws.grading.snapshot import SETTLED, Key, Snapshot
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

Leaf = tuple[Key, str, str, int]
"""Resource, path, value as JSON, and a number among equal ones."""
OWN = "own "
"""Begins the drawn name of what has no counterpart in the target."""
_RECORDS_OF_USE = frozenset(
    {
        *(("athena", "executions"), ("backup", "jobs"), ("batch", "jobs"), ("codebuild", "builds")),
        *(("glue", "job_runs"), ("glue", "workflow_runs"), ("ssm", "commands")),
        *(("stepfunctions", "executions"), ("stepfunctions", "map_runs"), ("stepfunctions", "task_tokens")),
        *(("stepfunctions", "activity_tasks"), ("dynamodb", "closed_streams")),
        *(("cloudtrail", "events"), ("cloudwatch", "metrics"), ("logs", "log_records")),
        *(("ses", "sent_emails"), ("sns", "sms_messages")),
    }
)
"""Kinds of records of what ran, was sent or was measured. No operation removes them: AWS itself does, later."""
_RUNS: Mapping[tuple[str, str], tuple[str, str]] = {("stepfunctions", "executions"): ("status", SETTLED)}
"""Kinds of uses that make something later, with the member and its value that say that one is still under way."""
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
"""Kinds of resources that AWS goes on to show after they were removed, with the path and value ("" for any) that say
so."""
_ENDS_WITH_IT = '"DeleteOnTermination":"true"'
_STACK = ("cloudformation", "stacks")
_DECLARED = re.compile(r"^_resources/[^/]+/PhysicalResourceId$")
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
"""Types of a template that are judged as grants, where they take effect; what names them says nothing."""
_LOG_GROUPS = ("logs", "log_groups")
_LOGS_OF: Mapping[tuple[str, str], str] = {
    ("codebuild", "projects"): "/aws/codebuild/",
    ("lambda", "functions"): "/aws/lambda/",
}
"""Kinds of resources for which AWS makes a log group when they first run, and how its name begins."""
_REVISIONS = ("ecs", "task_defs")
"""Kind whose records AWS numbers, one for each time that something of a name was registered."""
_CHOSEN_GROUP = "LoggingConfig/LogGroup"
_OF_A_NEW_GROUP = frozenset({"", "arn", "streams"})
"""Paths of a log group that its service made: it neither expires nor goes anywhere, and has no tags."""
_LOG_GROUP_OF_FUNCTION = re.compile(r'\\?"LogGroup\\?": ?\\?"[^"]*"')
"""What a function says of the group that Lambda makes for it, in every answer about the function."""
_PARTS = re.compile(r"[/:|]")
_OWN_TOKEN = re.compile(f"{DRAWN}{OWN}([^{END_DRAWN}]*){END_DRAWN}")


def left_over(own: Mapping[Key, Sequence[Leaf]], there: Iterable[Leaf], wanted: Set[Key], said: str | None) -> set[Key]:
    """Return which resources are left over. ``own``: those without a counterpart, with their leaves; ``there``: the
    leaves of all others; ``wanted``: the resources that the solution makes; ``said``: what the agent's requests that
    may have changed something said and were answered, None where that is not known."""
    past = {key for key, leaves in own.items() if _is_past(key, leaves)}
    judged = {key for key in own.keys() - past if not (is_setting(key) or _goes_with(key, own[key], past))}
    stacks = {key for key in judged if key[:2] == _STACK}
    declared = "\n".join(leaf[2] for key in stacks for leaf in own[key])
    said = _LOG_GROUP_OF_FUNCTION.sub("", said or "")
    known = [*there]
    unnamed = {key for key in judged - stacks if not _is_named(key, said, declared)}
    left = judged - stacks - _by_services(unnamed, own, known)
    return left | {key for key in stacks if not _declares_what_is_asked(own[key], known, wanted, left)}


def _is_past(key: Key, leaves: Sequence[Leaf]) -> bool:
    """Return whether something is a record of a use that is over, or removed and shown for a while."""
    if key[:2] in _RECORDS_OF_USE:
        path, value = _RUNS.get(key[:2], ("", ""))
        return not any(leaf[1] == path and leaf[2] == f'"{value}"' for leaf in leaves if path)
    path, value = _KEPT_BY_AWS.get(key[:2], ("", ""))
    return bool(path) and any(leaf[1] == path and leaf[2].startswith(value) for leaf in leaves)


def is_under_way(account: Snapshot) -> bool:
    """Return whether something runs in an account that may still make something."""
    for key, attributes in account.resources.items():
        member, value = _RUNS.get(key[:2], ("", ""))
        if member and attributes.get(member) == value:
            return True
    return False


def _goes_with(key: Key, leaves: Sequence[Leaf], past: Iterable[Key]) -> bool:
    """Return whether something is a part of what was removed: lies in it, or is the disk of a machine."""
    for service, kind, identity in past:
        if key[0] == service and key[1].startswith(f"{kind}/") and key[2].strip("/").startswith(f"{identity}/"):
            return True
        if key[:2] == ("ec2", "volumes") and kind == "instances" and any(identity in leaf[2] for leaf in leaves):
            return any(_ENDS_WITH_IT in leaf[2] for leaf in leaves)
    return False


def _is_named(key: Key, said: str, declared: str) -> bool:
    """Return whether requests, their answers or the agent's stacks name something: by the last part of its identity,
    but a log group, which services call by a path, as a whole."""
    tokens = _OWN_TOKEN.findall(key[2])
    if tokens:
        return any(token in said or f"{OWN}{token}" in declared for token in tokens)
    name = key[2] if key[:2] == ("logs", "log_groups") else _PARTS.split(key[2])[-1]
    return name in said or name in declared


def _by_services(unnamed: Set[Key], own: Mapping[Key, Sequence[Leaf]], known: Sequence[Leaf]) -> set[Key]:
    """Return those of the ``unnamed`` that services made in consequence of what is known, by kinds and names of theirs:
    who had a workflow or a stack make something else, under whatever name, has made it."""
    there = {leaf[0] for leaf in known}
    names = {f"{_LOGS_OF[key[:2]]}{key[2]}" for key in there if key[:2] in _LOGS_OF}
    names |= {leaf[2].strip('"') for leaf in known if leaf[0][:2] in _LOGS_OF and leaf[1].endswith(_CHOSEN_GROUP)}
    groups = {
        key
        for key in unnamed
        if key[:2] == _LOG_GROUPS and key[2] in names and all(leaf[1] in _OF_A_NEW_GROUP for leaf in own[key])
    }
    holders = [*groups, *(key for key in there if key[:2] == _LOG_GROUPS)]
    families = {key[2].partition(":")[0] for key in there if key[:2] == _REVISIONS}
    return groups | {
        key
        for key in unnamed
        if any(_lies_in(key, holder) for holder in holders)
        or (key[:2] == _REVISIONS and key[2].partition(":")[0] in families)
    }


def _lies_in(key: Key, holder: Key) -> bool:
    """Return whether something is a part of something else."""
    return key[0] == holder[0] and key[1].startswith(f"{holder[1]}/") and key[2].startswith(f"{holder[2]}/")


def names_of(key: Key) -> Iterator[str]:
    """Yield the last part of an identity, by which others name it; none that AWS gives to many."""
    name = _PARTS.split(key[2])[-1]
    if name not in ("", "default"):
        yield name


def _declares_what_is_asked(stack: Sequence[Leaf], there: Sequence[Leaf], wanted: Set[Key], left: Set[Key]) -> bool:
    """Return whether a stack declares something that is wanted, and nothing that is left over or nowhere to be
    seen."""
    resources = {leaf[1].rpartition("/")[0]: leaf[2].strip('"') for leaf in stack if _DECLARED.match(leaf[1])}
    types = {leaf[1].rpartition("/")[0]: leaf[2].strip('"') for leaf in stack if leaf[1].endswith("/ResourceType")}
    names = {name for key in wanted for name in names_of(key)}
    seen = "\n".join([*{leaf[0][2]: None for leaf in there}, *(leaf[2] for leaf in there)])
    theirs = [name for key in left for name in names_of(key)]
    return any(mentions(its, names) for its in resources.values()) and all(
        types.get(place) in _GRANTS or (mentions(seen, [its]) and not mentions(its, theirs))
        for place, its in resources.items()
    )


def mentions(text: str, names: Iterable[str]) -> bool:
    """Return whether one of the names stands in a text, and not as a part of a longer one."""
    return any(name in text and re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text) for name in names)
