"""Access rights in an account, and the comparison of the rights that two states of it grant.

``read_rights`` resolves all policies of an account. For each user these are the user's own
policies, the attached ones and those of the user's groups, within the permission boundary. Roles
are treated likewise, and the result also says who may assume them. For each other resource they are
the policies attached to it, and the grants of KMS keys. ``compare_rights`` compares two accounts
holder by holder, by meaning; ``policy_comparison`` describes what is exact. When in doubt, more
rights are assumed:

- AWS managed policies are known by name only, except AdministratorAccess. Each may allow anything,
  and equals nothing but itself.
- A document that cannot be parsed as a policy may allow anything.
- A holder whose comparison needs more than MAX_STEPS steps is listed in ``not_compared``. Nothing
  is claimed about it, neither equality nor a gain.

Not covered: rights that a holder obtains through another one (by assuming a role, or by passing one
to a service), and settings that are not policies: access lists of buckets, function URLs without
authentication, network rules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from realhf.aws.grading.meanings import derive
from realhf.aws.grading.policy_comparison import (
    Budget,
    Gain,
    Names,
    Policies,
    PolicyError,
    Statement,
    TooManySteps,
    compare_policies,
    parse_policy,
)
from realhf.aws.tasks.task import ACCOUNT_ID

Resources = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""Attributes of resources by (service, kind, identity), as in a ``Snapshot``. Policies in them are
parsed, or strings of JSON."""
MAX_STEPS = 50_000
"""Step budget for comparing two accounts, about 0.1 s at most. Ten statements with ten actions and
five resources each take 4,000 steps."""
_AWS_POLICIES = "arn:aws:iam::aws:policy/"
"""Prefix of the ARNs of AWS managed policies."""
_MAX_DEPTH = 12
"""Depth to which attributes are searched for policies."""
_LITERAL = "\uf8ff{"
"""Replacement for ``${`` in policies of version 2008-10-17, in which it does not begin a variable.
A policy that states no version has this version."""


@dataclass(frozen=True)
class Rights:
    """All rights in an account. The keys of the four mappings identify the holders."""

    users: Mapping[str, Policies]
    """Policies of each user, by ARN."""
    roles: Mapping[str, Policies]
    """Policies of each role, by ARN."""
    groups: Mapping[str, Policies]
    """Policies that each group gives its members, by name."""
    resources: Mapping[str, Policies]
    """Policies of each resource, by a name that joins service, kind, identity and path with "/". A
    role's trust policy is here as "trust in <ARN>"."""


@dataclass(frozen=True)
class GainedRight:
    """A right that one holder has gained."""

    holder: str
    """The identity or resource whose policies grant the right."""
    gain: Gain
    """The right."""
    who: str
    """Who gained the right: "anybody", "another account", "a service" or "the account"."""
    new: bool
    """Whether the holder did not exist before."""

    def __str__(self) -> str:
        who = self.holder if self.gain.principal == "" else f"{self.gain.principal} ({self.who})"
        return f"{who} may {self.gain}"


@dataclass(frozen=True)
class RightsChange:
    """The difference between the rights in two states of an account."""

    changed: tuple[str, ...] = ()
    """Holders whose policies differ in meaning."""
    gained: tuple[GainedRight, ...] = ()
    """Rights that were gained."""
    not_compared: tuple[str, ...] = ()
    """Holders whose policies need too many steps to compare."""


def compare_rights(before: Rights, after: Rights) -> RightsChange:
    """Return how the rights ``after`` differ from the rights ``before``."""
    budget = Budget(MAX_STEPS)
    changed: list[str] = []
    gained: list[GainedRight] = []
    not_compared: list[str] = []
    admitted = [
        statement.principals
        for rights in (before, after)
        for policies in rights.resources.values()
        for statement in policies.statements
        if statement.allow
    ]
    for old, new, identity in (
        (before.users, after.users, True),
        (before.roles, after.roles, True),
        (before.groups, after.groups, True),
        (before.resources, after.resources, False),
    ):
        for holder in sorted(old.keys() | new.keys()):
            old_policies = old.get(holder, Policies())
            new_policies = new.get(holder, Policies())
            if old_policies == new_policies:
                continue
            try:
                difference = compare_policies(old_policies, new_policies, budget)
            except TooManySteps:
                not_compared.append(holder)
                continue
            if difference.equal:
                continue
            # If only denials of an identity changed, that counts if a resource's own policy may
            # admit the identity.
            if (
                not identity
                or difference.gains
                or difference.loses
                or _is_admitted(holder, admitted)
            ):
                changed.append(holder)
            # Rights that a group gives are counted with the group's members.
            if old is not before.groups:
                gained += [
                    _build_gained_right(holder, gain, identity, holder not in old)
                    for gain in difference.gains
                ]
    return RightsChange(tuple(changed), tuple(gained), tuple(not_compared))


def read_rights(resources: Resources, rename: Callable[[str], str] = str) -> Rights:
    """Return the rights in an account. ``rename`` is applied to all names and policy documents that
    are read."""
    iam = {kind: {} for kind in _IAM_KINDS}
    others: dict[str, Policies] = {}
    for (service, kind, identity), attributes in resources.items():
        if service == "iam" and kind in iam:
            iam[kind][identity] = attributes
        elif service != "iam":
            others |= _attached_to_resource(service, kind, rename(identity), attributes, rename)
    managed = _ManagedPolicies(iam["policies"], rename)
    groups = {}
    members = {}
    for name, group in iam["groups"].items():
        inline = iam["group_inline_policies"].get(name, {})
        groups[name] = (*managed.attached(group), *_read_documents(inline, rename))
        for user in group.get("Users") or ():
            members.setdefault(str(user), []).append(name)
    users = {
        rename(str(user.get("Arn", name))): Policies(
            (
                *managed.attached(user),
                *_read_documents(iam["user_inline_policies"].get(name, {}), rename),
                *(statement for group in members.get(name, ()) for statement in groups[group]),
            ),
            managed.boundary(user),
        )
        for name, user in iam["users"].items()
    }
    roles = {
        rename(str(role.get("Arn", name))): Policies(
            (*managed.attached(role), *_read_documents(role.get("InlinePolicies") or {}, rename)),
            managed.boundary(role),
        )
        for name, role in iam["roles"].items()
    }
    for name, role in iam["roles"].items():
        arn = rename(str(role.get("Arn", name)))
        others[f"trust in {arn}"] = Policies(
            read_document(role.get("AssumeRolePolicyDocument"), rename), None, arn
        )
    return Rights(
        users, roles, {name: Policies(statements) for name, statements in groups.items()}, others
    )


_IAM_KINDS = (
    "users",
    "roles",
    "groups",
    "policies",
    "user_inline_policies",
    "group_inline_policies",
)
"""Kinds of IAM records that contain policies or refer to them."""


class _ManagedPolicies:
    """The managed policies of an account, with lookup by ARN."""

    def __init__(
        self, policies: Mapping[str, Mapping[str, Any]], rename: Callable[[str], str]
    ) -> None:
        self._policies = {str(one.get("Arn", name)): one for name, one in policies.items()}
        self._rename = rename

    def attached(self, holder: Mapping[str, Any]) -> Iterator[Statement]:
        """Yield the statements of the policies attached to a user, role or group."""
        for arn in holder.get("AttachedPolicies") or ():
            yield from self._statements(str(arn))

    def boundary(self, holder: Mapping[str, Any]) -> tuple[Statement, ...] | None:
        """Return the statements of the permission boundary of a user or role, or None if it has
        none."""
        arn = holder.get("PermissionsBoundary")
        return tuple(self._statements(str(arn))) if arn else None

    def _statements(self, arn: str) -> tuple[Statement, ...]:
        """Return the statements in the default version of the policy with this ARN."""
        policy = self._policies.get(arn)
        if policy is None:
            return (
                _EVERYTHING
                if arn == _AWS_POLICIES + "AdministratorAccess"
                else _unknown_policy(self._rename(arn))
            )
        version = (policy.get("Versions") or {}).get(policy.get("DefaultVersionId")) or {}
        return read_document(version.get("Document"), self._rename)


def read_document(document: Any, rename: Callable[[str], str] = str) -> tuple[Statement, ...]:
    """Return the statements of a policy given as an object or as JSON text. A missing or empty
    document has no statements.

    Any part of a statement may be a list. A document that cannot be parsed becomes one statement
    that may allow anything.
    """
    if document in (None, "", {}):
        return ()
    text = (
        document if isinstance(document, str) else json.dumps(document, sort_keys=True, default=str)
    )
    return _parse_statements(rename(text))


@functools.lru_cache(maxsize=512)
def _parse_statements(text: str) -> tuple[Statement, ...]:
    """Return the statements of a policy in JSON. The result is cached, because most policies occur
    in many snapshots."""
    try:
        document = json.loads(text)
        if isinstance(document, dict) and document.get("Statement") == []:
            return ()
        if "${" in text and isinstance(document, dict) and document.get("Version") != "2012-10-17":
            text = text.replace("${", _LITERAL)
        return parse_policy(
            _with_single_effects(json.loads(text)) if '"Effect": [' in text else text
        )
    except (PolicyError, ValueError, RecursionError):
        return _unknown_policy(f"a policy that cannot be read ({len(text)} characters)", text)


def _with_single_effects(document: Any) -> Any:
    """Return a policy in which an ``Effect`` that is a list of one value is replaced by that
    value."""
    statements = document.get("Statement") if isinstance(document, Mapping) else None
    listed = statements if isinstance(statements, list) else [statements]
    return {
        "Statement": [
            {**one, "Effect": one["Effect"][0]}
            if isinstance(one, Mapping)
            and isinstance(one.get("Effect"), list)
            and len(one["Effect"]) == 1
            else one
            for one in listed
        ]
    }


def _unknown_policy(name: str, content: str = "") -> tuple[Statement, ...]:
    """Return the statement that stands for a policy with unknown content."""
    return (Statement(True, conditions=(("says so", name, (content,) if content else ()),)),)


_EVERYTHING = (Statement(True),)
"""The statements of AdministratorAccess."""


def _read_documents(
    documents: Mapping[str, Any], rename: Callable[[str], str]
) -> Iterator[Statement]:
    """Yield the statements of inline policies."""
    for document in documents.values():
        yield from read_document(document, rename)


def _attached_to_resource(
    service: str,
    kind: str,
    identity: str,
    attributes: Mapping[str, Any],
    rename: Callable[[str], str],
) -> dict[str, Policies]:
    """Return the policies attached to a resource, by name. A grant of a KMS key counts as a
    policy."""
    if (service, kind) == ("kms", "grants"):
        return {f"kms/grants/{identity}": _read_key_grant(attributes, rename)}
    policies = _policies_of(attributes)
    if not policies:
        return {}
    owner = rename(arn_of(service, identity, attributes))
    return {
        "/".join(filter(None, (service, kind, identity, path))): Policies(
            read_document(policy, rename), None, owner
        )
        for path, policy in policies
    }


def _policies_of(attributes: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (path, policy) for each policy in the attributes that has a principal."""
    return derive(attributes, "policies", lambda: [*_find_policies(attributes, "")])


def _find_policies(
    value: Any, path: str, depth: int = 0
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, policy) for each policy in the attributes that has a principal.

    Attributes are JSON, so every mapping is a ``dict``, for which ``isinstance`` is ten times
    faster than for Mapping.
    """
    if isinstance(value, str) and value[:1] == "{" and '"Statement"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, dict) and depth <= _MAX_DEPTH:
        statements = value.get("Statement")
        listed = statements if isinstance(statements, list) else [statements]
        if any(
            isinstance(one, dict) and ("Principal" in one or "NotPrincipal" in one)
            for one in listed
        ):
            yield path, value
            return
        for name, item in value.items():
            if isinstance(item, (dict, list)) or (isinstance(item, str) and item[:1] == "{"):
                yield from _find_policies(item, f"{path}/{name}" if path else str(name), depth + 1)
    elif isinstance(value, list) and depth <= _MAX_DEPTH:
        for number, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from _find_policies(item, f"{path}/{number}", depth + 1)


def arn_of(service: str, identity: str, attributes: Mapping[str, Any]) -> str:
    """Return the ARN of a resource if its identity or attributes contain it, otherwise ""."""
    if service == "s3":
        return f"arn:aws:s3:::{identity}" if not identity.startswith("arn:") else identity
    if identity.startswith("arn:"):
        return identity
    names = _ARN_FIELDS.get(service, ())
    for mapping in (attributes, attributes.get("attributes"), attributes.get("config")):
        if isinstance(mapping, Mapping):
            arn = next((mapping[name] for name in names if isinstance(mapping.get(name), str)), "")
            if arn:
                return arn
    return ""


_ARN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "sqs": ("QueueArn",),
    "sns": ("TopicArn", "arn"),
    "lambda": ("FunctionArn",),
    "kms": ("Arn",),
}
"""Names of the attributes that contain a resource's ARN, by service."""


def _read_key_grant(grant: Mapping[str, Any], rename: Callable[[str], str]) -> Policies:
    """Return the grant of a KMS key as policies of that key."""
    actions = tuple(f"kms:{name}".lower() for name in grant.get("Operations") or ())
    who = tuple(
        (f"Service:{name}" if name.endswith(".amazonaws.com") else f"AWS:{name}")
        for name in [rename(str(grant.get("GranteePrincipal", "")))]
    )
    owner = rename(str(grant.get("KeyId", "")))
    limits = grant.get("Constraints")
    conditions = (
        (("equals", "constraints", (json.dumps(limits, sort_keys=True),)),) if limits else ()
    )
    return Policies(
        (Statement(True, Names(who), Names(actions), Names(), conditions),) if actions else (),
        None,
        owner,
    )


def _build_gained_right(holder: str, gain: Gain, identity: bool, new: bool) -> GainedRight:
    """Return a gained right. If the holder is an identity (user, role or group), the account itself
    gains the right."""
    if identity:
        return GainedRight(holder, replace(gain, principal=""), "the account", new)
    return GainedRight(holder, gain, _classify_principal(gain.principal), new)


def _classify_principal(principal: str) -> str:
    """Return which kind of party a statement's principal stands for, as in ``GainedRight.who``."""
    if principal.startswith("Service:"):
        return "a service"
    arn = principal.removeprefix("AWS:").split(":", 5)
    if not principal.startswith("AWS:arn:") or len(arn) < 6 or set("*?") & set(arn[4]):
        return "anybody"
    return "the account" if arn[4] == ACCOUNT_ID else "another account"


def _is_admitted(holder: str, admitted: Iterable[Names]) -> bool:
    """Return whether a resource's policy may admit an identity by itself. If so, denials in the
    identity's own policies matter."""
    session = f":assumed-role/{holder.rsplit('/', 1)[-1]}/"
    return any(
        names.has(f"AWS:{holder}") or any(session in one for one in names.patterns)
        for names in admitted
    )
