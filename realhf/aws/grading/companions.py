"""Finds the grants without which AWS would refuse what a solution wires, and that no task asks for by name.

The table of wirings is ``companions.yaml``. A grant counts by what it allows, wherever it is written: not more than the
least, to the service for the source alone or for sources of the account alone, or to the role that the wiring names.
Source: docs/reference/environment.md 7.
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
"""By service, the kind of record that holds the policy of a resource, and where in it."""
_GROUPS = ("logs", "log_groups")


@dataclass(frozen=True)
class Wiring:
    """Is a row of the table, with the words of its file."""

    name: str
    wires: str
    to: str
    aws: str
    kind: tuple[str, str]
    """``from`` of the file: service and kind of the record."""
    source: str = ""
    role: bool = False
    trust: bool = False
    principal: str = ""
    actions: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    managed: tuple[str, ...] = ()
    condition: Mapping[str, Mapping[str, str]] | None = None
    source_arn: tuple[str, ...] = ()


@dataclass(frozen=True)
class Companions:
    """Holds what may be there beside the target. ``rights``: all of the target's with the grants; ``roles``: ARN of
    each role that may have one, by its key; ``policies``: names of the policies of resources, as in ``rights``."""

    rights: Rights
    roles: Mapping[Key, str]
    policies: frozenset[str]


@cache
def wirings() -> tuple[Wiring, ...]:
    """Return the table. Raises TypeError for a row that is malformed."""
    text = resources.files("realhf.aws.grading").joinpath("companions.yaml").read_text(encoding="utf-8")
    found = []
    for row in yaml.load(text, Loader=yaml.CSafeLoader):
        service, _, kind = row.pop("from").partition("/")
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        found.append(Wiring(kind=(service, kind), **{**row, **lists}))
    return tuple(found)


def companions_of(target: Resources, wanted: Rights, renamed: Callable[[str], str]) -> Companions:
    """Return what may be there beside a target, whose rights are ``wanted``; ``renamed`` is as in ``read_rights``."""
    held = {key: attributes for key, attributes in target.items()}
    roles = dict[Key, str]()
    policies = set[str]()
    by_arn = {str(one.get("Arn", "")): key for key, one in target.items() if key[:2] == ("iam", "roles")}
    number = 0
    for row in wirings():
        for key, attributes in target.items():
            if key[:2] != row.kind or row.trust:
                continue
            for words in _pairs(row, key, attributes, target):
                number += 1
                document = _document(row, words, target)
                if not row.role:
                    name = _grant(held, words["target"], document)
                    policies |= {renamed(name)} if name else set()
                elif (role := by_arn.get(words.get("role", ""))) is not None:
                    name = _grant_to_role(held, row, words, document)
                    policies |= {renamed(name)} if name else set()
                    roles[role] = renamed(words["role"])
                    given = held[role]
                    inline = {f"companion {number}": document} if row.actions else {}
                    held[role] = {
                        **given,
                        "InlinePolicies": {**given.get("InlinePolicies", {}), **inline},
                        "AttachedPolicies": [*given.get("AttachedPolicies", ()), *row.managed],
                    }
    return Companions(read_rights(held, renamed) if number else wanted, roles, frozenset(policies))


def narrowed_trusts(target: Resources) -> dict[Key, list[dict[str, Any]]]:
    """Return, for each role that services assume for what the target wires, its trust policy limited to the sources and
    the account, once for each way to name the sources."""
    roles = {str(one.get("Arn", "")): key for key, one in target.items() if key[:2] == ("iam", "roles")}
    wires: dict[Key, list[tuple[str, list[str]]]] = {}
    for row in wirings():
        for key, attributes in target.items():
            if key[:2] != row.kind or not row.trust:
                continue
            for words in _pairs(row, key, attributes, target):
                role = roles.get(words["role"])
                sources = _sources(row, words)
                if role and sources and isinstance(target[role].get("AssumeRolePolicyDocument"), Mapping):
                    wires.setdefault(role, []).append((row.principal, sources))
    return {
        role: [
            _narrowed(
                target[role]["AssumeRolePolicyDocument"], [(who, ways[min(way, len(ways) - 1)]) for who, ways in its]
            )
            for way in range(max(len(ways) for _, ways in its))
        ]
        for role, its in wires.items()
    }


def _narrowed(policy: Mapping[str, Any], sources: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a trust policy that lets each service in for its sources alone; what has none stays as it is."""
    statements = []
    for one in policy["Statement"]:
        named = one.get("Principal")
        services = named.get("Service", []) if isinstance(named, Mapping) and one.get("Effect") == "Allow" else []
        limited = {service for service, _ in sources if service in services}
        rest = [service for service in services if service not in limited]
        others = {who: names for who, names in named.items() if who != "Service"} if limited else {}
        others |= {"Service": rest} if rest else {}
        if others or not limited:
            statements.append({**one, "Principal": others} if limited else one)
        for service, source in sources:
            if service in limited:
                limit = {"ArnLike": {"aws:SourceArn": [source]}, "StringEquals": {"aws:SourceAccount": [ACCOUNT_ID]}}
                condition = _both(one.get("Condition") or {}, limit)
                statements.append({**one, "Principal": {"Service": [service]}, "Condition": condition})
    return {**policy, "Statement": statements}


def _pairs(row: Wiring, key: Key, attributes: Mapping[str, Any], target: Resources) -> Iterator[dict[str, str]]:
    """Yield the words of each wire in a record."""
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


def _document(row: Wiring, words: Mapping[str, str], target: Resources) -> dict[str, Any]:
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
    limits = [{"ArnLike": {"aws:SourceArn": one}} for one in _sources(row, words)]
    limits.append({"StringEquals": {"aws:SourceAccount": ACCOUNT_ID}})
    return {
        "Version": "2012-10-17",
        "Statement": [{**least, "Condition": _both(row.condition or {}, limit)} for limit in limits],
    }


def _sources(row: Wiring, words: Mapping[str, str]) -> list[str]:
    return [one for one in (words["source"], *(text.format(**words) for text in row.source_arn)) if one]


def _both(one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in (*one, *other)}


def _grant(held: dict[Key, Mapping[str, Any]], arn: str, document: Mapping[str, Any]) -> str:
    """Add statements to the policy of a resource of the target; returns the name of that policy, "" where there is no
    such resource."""
    service = arn.split(":")[2]
    kind, path = _PLACES[service]
    if service == "s3":
        name = arn.rpartition(":")[2]
        keys = [(service, kind, name)] if (service, "buckets", name) in held else []
    else:
        keys = [key for key, one in held.items() if key[:2] == (service, kind) and arn_of(service, key[2], one) == arn]
    for key in keys:
        held[key] = _with_statements(held.get(key, {}), path, document)
        return "/".join((*key, *path))
    return ""


def _grant_to_role(
    held: dict[Key, Mapping[str, Any]], row: Wiring, words: Mapping[str, str], document: Mapping[str, Any]
) -> str:
    """Add to the policy of a resource what the policy of a role would allow, which does as well in one account; returns
    as ``_grant``.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
    """
    (least,) = document["Statement"]
    patterns = [one for one in least["Resource"] if one.startswith(words["target"])]
    if not row.actions or not patterns or words["target"].split(":")[2] not in _PLACES:
        return ""
    statement = {**least, "Resource": patterns, "Principal": {"AWS": words["role"]}}
    return _grant(held, words["target"], {**document, "Statement": [statement]})


def _with_statements(value: Any, path: tuple[str, ...], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value with the statements of a document behind those of the policy at a path of it."""
    if path:
        known = value if isinstance(value, Mapping) else {}
        return {**known, path[0]: _with_statements(known.get(path[0]), path[1:], document)}
    if isinstance(value, str):
        value = json.loads(value)
    return {**document, "Statement": [*(value or {}).get("Statement", ()), *document["Statement"]]}
