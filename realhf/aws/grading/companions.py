"""Companion grants: permissions that AWS requires for the connections in a solution, although the
task does not mention them.

A *connection* is a setting by which one resource, the source, uses another, the target: a topic's
subscription that sends to a queue, or a bucket's notification that invokes a function. Each row of
``companions.yaml`` (``Wiring``) describes a kind of connection that needs a grant: its query
``wires`` finds the connections in the record of a resource, and templates describe the grant. A
grant is judged by what it allows, not by the policy that contains it. It may allow no more than the
least permission. A grant to a service must be limited to the connection's source, or to sources in
the account; a grant to a role must be to the role that the connection names. Source:
docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jmespath
import yaml

from realhf.aws.grading.rights import Resources, Rights, arn_of, read_rights
from realhf.aws.grading.snapshot import Key
from realhf.aws.tasks.task import ACCOUNT_ID

_PLACES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lambda": ("functions", ("policy",)),
    "s3": ("bucket_policies", ()),
    "sns": ("topics", ("attributes", "Policy")),
    "sqs": ("queues", ("attributes", "Policy")),
}
"""Kind of the record that contains a resource's policy, and the path to the policy within the
record, by service."""
_GROUPS = ("logs", "log_groups")


@dataclass(frozen=True)
class Wiring:
    """One row of ``companions.yaml``: a kind of connection and the grant that it needs. Fields are
    named as in the file."""

    name: str
    """Name of the kind of connection."""
    wires: str
    """JMESPath that finds the connections in a record. Each is a mapping with ``target``, a string
    that contains the target's ARN, and optionally other strings such as ``role`` or
    ``function``."""
    to: str
    """Regular expression for the target's ARN within ``target``."""
    aws: str
    """Link to the AWS documentation page."""
    kind: tuple[str, str]
    """``from`` in the file: service and kind of the record that defines the connection."""
    source: str = ""
    """Path to the ARN of the connection's source. The optional prefix "service/kind:" makes it a
    path in the record of that kind with the same name."""
    role: bool = False
    """Whether the grant goes into the policies of a role instead of the target's own policy. The
    role is that of the connection or of its function."""
    trust: bool = False
    """Whether the row is about the role's trust policy instead of a grant."""
    principal: str = ""
    """Service principal that receives the grant."""
    actions: tuple[str, ...] = ()
    """Actions that must be allowed."""
    resources: tuple[str, ...] = ()
    """Templates of the resources on which the actions must be allowed. Placeholders: {target},
    {name}, {account}, {group}, or the name of another string of the connection."""
    managed: tuple[str, ...] = ()
    """AWS managed policies that contain the grant."""
    condition: Mapping[str, Mapping[str, str]] | None = None
    """Condition of the smallest sufficient grant."""
    source_arn: tuple[str, ...] = ()
    """Templates of other ARNs that may stand for the source in a grant's condition."""


@dataclass(frozen=True)
class CompanionGrants:
    """The companion grants that an account may have in addition to the target state."""

    rights: Rights
    """All rights in the target state with the companion grants added."""
    roles: Mapping[Key, str]
    """ARN of each role that may have a companion grant, by the key of the role's record."""
    policies: frozenset[str]
    """Names of the resource policies that may contain a companion grant, in the notation of
    ``Rights.resources``."""


@cache
def read_wirings() -> tuple[Wiring, ...]:
    """Return the rows of ``companions.yaml``. Raises TypeError for a malformed row."""
    text = (
        resources.files("realhf.aws.grading")
        .joinpath("companions.yaml")
        .read_text(encoding="utf-8")
    )
    wirings = []
    for row in yaml.load(text, Loader=yaml.CSafeLoader):
        service, _, kind = row.pop("from").partition("/")
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        wirings.append(Wiring(kind=(service, kind), **{**row, **lists}))
    return tuple(wirings)


def find_companions(
    target: Resources, wanted: Rights, rename: Callable[[str], str]
) -> CompanionGrants:
    """Return the companion grants that an account may have in addition to ``target``.

    ``wanted``: the rights that ``target`` grants. ``rename``: as in ``read_rights``.
    """
    extended = {
        key: attributes for key, attributes in target.items()
    }  # becomes the target with all grants
    roles = dict[Key, str]()
    policies = set[str]()
    by_arn = {
        str(one.get("Arn", "")): key for key, one in target.items() if key[:2] == ("iam", "roles")
    }
    number = 0
    for row in read_wirings():
        for key, attributes in target.items():
            if key[:2] != row.kind or row.trust:
                continue
            for words in _connections(row, key, attributes, target):
                number += 1
                document = _least_grant(row, words, target)
                if not row.role:
                    name = _add_grant(extended, words["target"], document)
                    policies |= {rename(name)} if name else set()
                elif (role := by_arn.get(words.get("role", ""))) is not None:
                    name = _add_role_grant(extended, row, words, document)
                    policies |= {rename(name)} if name else set()
                    roles[role] = rename(words["role"])
                    attributes_of_role = extended[role]
                    inline = {f"companion {number}": document} if row.actions else {}
                    extended[role] = {
                        **attributes_of_role,
                        "InlinePolicies": {
                            **attributes_of_role.get("InlinePolicies", {}),
                            **inline,
                        },
                        "AttachedPolicies": [
                            *attributes_of_role.get("AttachedPolicies", ()),
                            *row.managed,
                        ],
                    }
    return CompanionGrants(
        read_rights(extended, rename) if number else wanted, roles, frozenset(policies)
    )


def narrow_trust_policies(target: Resources) -> dict[Key, list[dict[str, Any]]]:
    """Return trust policies that are narrower than the target's but equally acceptable, by role.

    They exist for the roles that services assume for connections in the target. Each policy limits
    the trust to the connection's sources and the account. There is one policy per way to name the
    sources.
    """
    roles = {
        str(one.get("Arn", "")): key for key, one in target.items() if key[:2] == ("iam", "roles")
    }
    sources_by_role: dict[Key, list[tuple[str, list[str]]]] = {}
    for row in read_wirings():
        for key, attributes in target.items():
            if key[:2] != row.kind or not row.trust:
                continue
            for words in _connections(row, key, attributes, target):
                role = roles.get(words["role"])
                sources = _source_arns(row, words)
                if (
                    role
                    and sources
                    and isinstance(target[role].get("AssumeRolePolicyDocument"), Mapping)
                ):
                    sources_by_role.setdefault(role, []).append((row.principal, sources))
    return {
        role: [
            _narrow_policy(
                target[role]["AssumeRolePolicyDocument"],
                [(principal, ways[min(way, len(ways) - 1)]) for principal, ways in sources],
            )
            for way in range(max(len(ways) for _, ways in sources))
        ]
        for role, sources in sources_by_role.items()
    }


def _narrow_policy(policy: Mapping[str, Any], sources: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a trust policy that admits each service only for its sources. The statement of a
    service without sources is unchanged.

    ``sources``: (service principal, source ARN) pairs.
    """
    statements = []
    for one in policy["Statement"]:
        named = one.get("Principal")
        services = (
            named.get("Service", [])
            if isinstance(named, Mapping) and one.get("Effect") == "Allow"
            else []
        )
        limited = {service for service, _ in sources if service in services}
        rest = [service for service in services if service not in limited]
        others = {who: names for who, names in named.items() if who != "Service"} if limited else {}
        others |= {"Service": rest} if rest else {}
        if others or not limited:
            statements.append({**one, "Principal": others} if limited else one)
        for service, source in sources:
            if service in limited:
                limit = {
                    "ArnLike": {"aws:SourceArn": [source]},
                    "StringEquals": {"aws:SourceAccount": [ACCOUNT_ID]},
                }
                condition = _merge_conditions(one.get("Condition") or {}, limit)
                statements.append(
                    {**one, "Principal": {"Service": [service]}, "Condition": condition}
                )
    return {**policy, "Statement": statements}


def _connections(
    row: Wiring, key: Key, attributes: Mapping[str, Any], target: Resources
) -> Iterator[dict[str, str]]:
    """Yield the strings that fill the templates of ``row``, once for each connection in a record: a
    reference by which a resource sends to, or calls, another one.

    The strings are ``source``, ``identity``, ``account``, ``target``, ``name`` and those that the
    query ``row.wires`` finds."""
    kind, _, path = row.source.rpartition(":")
    namesake = (*kind.split("/"), key[2]) if kind else key
    source = jmespath.search(path.strip(), target.get(namesake, {})) if path else ""  # type: ignore[arg-type]
    common = {"source": str(source or ""), "identity": key[2], "account": ACCOUNT_ID}
    for wire in jmespath.search(row.wires, attributes) or ():
        words = {name: value for name, value in wire.items() if isinstance(value, str)}
        if "function" in words:
            function = words["function"].partition(":function:")[2].split(":")[0]
            config = target.get(("lambda", "functions", function), {}).get("config", {})
            words["role"] = str(config.get("Role", ""))
        for arn in sorted(set(re.findall(row.to, words.get("target", "")))):
            yield {**common, **words, "target": arn, "name": re.split("[:/]", arn)[-1]}


def _least_grant(row: Wiring, words: Mapping[str, str], target: Resources) -> dict[str, Any]:
    """Return the smallest policy that permits a connection."""
    groups = [key[2] for key in target if key[:2] == _GROUPS]
    patterns = [
        pattern.format(group=group, **words)
        for pattern in row.resources
        for group in (groups if "{group}" in pattern else [""])
    ]
    least = {"Effect": "Allow", "Action": [*row.actions], "Resource": patterns}
    if row.role:
        return {"Version": "2012-10-17", "Statement": [least]}
    least |= {"Principal": {"Service": row.principal}}
    limits = [{"ArnLike": {"aws:SourceArn": one}} for one in _source_arns(row, words)]
    limits.append({"StringEquals": {"aws:SourceAccount": ACCOUNT_ID}})
    return {
        "Version": "2012-10-17",
        "Statement": [
            {**least, "Condition": _merge_conditions(row.condition or {}, limit)}
            for limit in limits
        ],
    }


def _source_arns(row: Wiring, words: Mapping[str, str]) -> list[str]:
    """Return the ARNs by which a policy may name a connection's source."""
    return [
        one for one in (words["source"], *(text.format(**words) for text in row.source_arn)) if one
    ]


def _merge_conditions(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return one condition that requires both of two conditions."""
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in (*one, *other)}


def _add_grant(
    resources_by_key: dict[Key, Mapping[str, Any]], arn: str, document: Mapping[str, Any]
) -> str:
    """Append the statements of ``document`` to the policy of the resource with this ARN, in place.

    Returns the name of the policy, or "" if the target has no such resource.
    """
    service = arn.split(":")[2]
    kind, path = _PLACES[service]
    if service == "s3":
        name = arn.rpartition(":")[2]
        keys = [(service, kind, name)] if (service, "buckets", name) in resources_by_key else []
    else:
        keys = [
            key
            for key, one in resources_by_key.items()
            if key[:2] == (service, kind) and arn_of(service, key[2], one) == arn
        ]
    for key in keys:
        resources_by_key[key] = _append_statements(resources_by_key.get(key, {}), path, document)
        return "/".join((*key, *path))
    return ""


def _add_role_grant(
    resources_by_key: dict[Key, Mapping[str, Any]],
    row: Wiring,
    words: Mapping[str, str],
    document: Mapping[str, Any],
) -> str:
    """Append the grant that a role needs to the resource's own policy, in place. Within one
    account, either the role's policy or the resource's policy suffices.

    Returns the name of the policy, or "" if the resource cannot have one.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
    """
    (least,) = document["Statement"]
    patterns = [one for one in least["Resource"] if one.startswith(words["target"])]
    if not row.actions or not patterns or words["target"].split(":")[2] not in _PLACES:
        return ""
    statement = {**least, "Resource": patterns, "Principal": {"AWS": words["role"]}}
    return _add_grant(resources_by_key, words["target"], {**document, "Statement": [statement]})


def _append_statements(
    value: Any, path: tuple[str, ...], document: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``value`` with the statements of ``document`` appended to the policy at ``path`` in
    it."""
    if path:
        known = value if isinstance(value, Mapping) else {}
        return {**known, path[0]: _append_statements(known.get(path[0]), path[1:], document)}
    if isinstance(value, str):
        value = json.loads(value)
    return {**document, "Statement": [*(value or {}).get("Statement", ()), *document["Statement"]]}
