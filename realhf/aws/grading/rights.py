"""Says who may do what in an account, and what anybody may do in one state of it and not in another.

``read_rights`` resolves all policies of an account: for each user those of its own, attached ones and those of its
groups, within its permission boundary; for each role the same and who may assume it; for each other resource the
policies that hang on it, and the grants of keys. ``compare_rights`` compares two accounts holder by holder, by meaning
(see ``policy_comparison`` for what is certain and what is not). It errs on the side of caution:

- policies of AWS's own are known by name, but for the widest their content is not: each may allow anything, and is
  equal to nothing but itself;
- a document that cannot be read as a policy may allow anything, too;
- what needs more than MOST_STEPS steps to be compared is not: the holder is named among the ``unread``, and neither
  equality nor a gain is claimed.

Not looked at: what a holder comes to by way of another (assuming a role, passing one to a service), and settings that
are no policies: access lists of buckets, function URLs without a login, network rules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
"""Attributes of resources by service, kind and identity, as a ``Snapshot`` has them: documents parsed or as text."""
MOST_STEPS = 50_000
"""Most steps that the comparison of two accounts takes, at most a tenth of a second. Ten statements of ten actions and
five resources each take 4,000."""
_AWS_POLICIES = "arn:aws:iam::aws:policy/"
_DEEPEST = 12
_LITERAL = "\uf8ff{"
"""Stands for the beginning of a variable in policies of a language without variables, the one of 2008, which is meant
where no version is said."""


@dataclass(frozen=True)
class Rights:
    """Holds all rights in an account. ``users`` and ``roles``: what they may do, by ARN; ``groups``: what they pass
    on; ``resources``: what may be done with each, by whom, by a name that tells service, kind and identity."""

    users: Mapping[str, Policies]
    roles: Mapping[str, Policies]
    groups: Mapping[str, Policies]
    resources: Mapping[str, Policies]


@dataclass(frozen=True)
class MoreRights:
    """Tells of somebody who may do more. ``holder``: whose policies allow it, an identity or a resource; ``who``:
    "anybody", "another account", "a service" or "the account"; ``new``: whether the holder did not exist before."""

    holder: str
    gain: Gain
    who: str
    new: bool

    def __str__(self) -> str:
        who = self.holder if self.gain.principal == "" else f"{self.gain.principal} ({self.who})"
        return f"{who} may {self.gain}"


@dataclass(frozen=True)
class RightsChange:
    """Holds how the rights in two accounts differ: the holders whose policies mean something else, what is allowed
    beyond, and the holders whose policies are too much work to compare."""

    changed: tuple[str, ...] = ()
    more: tuple[MoreRights, ...] = ()
    unread: tuple[str, ...] = ()


def compare_rights(before: Rights, after: Rights) -> RightsChange:
    """Return how the rights in an account differ from those before."""
    budget = Budget(MOST_STEPS)
    changed: list[str] = []
    more: list[MoreRights] = []
    unread: list[str] = []
    let_in = [s.principals for one in (before, after) for p in one.resources.values() for s in p.statements if s.allow]
    for old, new, identity in (
        (before.users, after.users, True),
        (before.roles, after.roles, True),
        (before.groups, after.groups, True),
        (before.resources, after.resources, False),
    ):
        for holder in sorted(old.keys() | new.keys()):
            one = old.get(holder, Policies())
            other = new.get(holder, Policies())
            if one == other:
                continue
            try:
                found = compare_policies(one, other, budget)
            except TooManySteps:
                unread.append(holder)
                continue
            if found.equal:
                continue
            if not identity or found.gains or found.loses or _is_let_in(holder, let_in):
                changed.append(holder)
            if old is not before.groups:  # what a group passes on is counted with its members
                more += [_more(holder, gain, identity, holder not in old) for gain in found.gains]
    return RightsChange(tuple(changed), tuple(more), tuple(unread))


def read_rights(resources: Resources, renamed: Callable[[str], str] = str) -> Rights:
    """Return the rights in an account. ``renamed`` is applied to all names and texts that are read."""
    iam = {kind: {} for kind in _IAM_KINDS}
    others: dict[str, Policies] = {}
    for (service, kind, identity), attributes in resources.items():
        if service == "iam" and kind in iam:
            iam[kind][identity] = attributes
        elif service != "iam":
            others |= _hanging(service, kind, renamed(identity), attributes, renamed)
    managed = _Managed(iam["policies"], renamed)
    groups = {}
    members = {}
    for name, group in iam["groups"].items():
        inline = iam["group_inline_policies"].get(name, {})
        groups[name] = (*managed.attached(group), *_read_all(inline, renamed))
        for user in group.get("Users") or ():
            members.setdefault(str(user), []).append(name)
    users = {
        renamed(str(user.get("Arn", name))): Policies(
            (
                *managed.attached(user),
                *_read_all(iam["user_inline_policies"].get(name, {}), renamed),
                *(statement for group in members.get(name, ()) for statement in groups[group]),
            ),
            managed.boundary(user),
        )
        for name, user in iam["users"].items()
    }
    roles = {
        renamed(str(role.get("Arn", name))): Policies(
            (*managed.attached(role), *_read_all(role.get("InlinePolicies") or {}, renamed)), managed.boundary(role)
        )
        for name, role in iam["roles"].items()
    }
    for name, role in iam["roles"].items():
        arn = renamed(str(role.get("Arn", name)))
        others[f"trust in {arn}"] = Policies(read_document(role.get("AssumeRolePolicyDocument"), renamed), None, arn)
    return Rights(users, roles, {name: Policies(statements) for name, statements in groups.items()}, others)


_IAM_KINDS = ("users", "roles", "groups", "policies", "user_inline_policies", "group_inline_policies")


class _Managed:
    """Finds managed policies by ARN."""

    def __init__(self, policies: Mapping[str, Mapping[str, Any]], renamed: Callable[[str], str]) -> None:
        self._policies = {str(one.get("Arn", name)): one for name, one in policies.items()}
        self._renamed = renamed

    def attached(self, holder: Mapping[str, Any]) -> Iterator[Statement]:
        """Yield the statements of the policies that are attached to a user, role or group."""
        for arn in holder.get("AttachedPolicies") or ():
            yield from self._statements(str(arn))

    def boundary(self, holder: Mapping[str, Any]) -> tuple[Statement, ...] | None:
        """Return the statements of a permission boundary; None where there is none."""
        arn = holder.get("PermissionsBoundary")
        return tuple(self._statements(str(arn))) if arn else None

    def _statements(self, arn: str) -> tuple[Statement, ...]:
        policy = self._policies.get(arn)
        if policy is None:
            return _EVERYTHING if arn == _AWS_POLICIES + "AdministratorAccess" else _unknown(self._renamed(arn))
        version = (policy.get("Versions") or {}).get(policy.get("DefaultVersionId")) or {}
        return read_document(version.get("Document"), self._renamed)


def read_document(document: Any, renamed: Callable[[str], str] = str) -> tuple[Statement, ...]:
    """Return the statements of a policy, given as an object or as text; none where there is no document. All parts of
    a statement may be lists. What cannot be read as a policy is a statement that may allow anything."""
    if document in (None, "", {}):
        return ()
    text = document if isinstance(document, str) else json.dumps(document, sort_keys=True, default=str)
    return _statements_of(renamed(text))


@functools.lru_cache(maxsize=512)
def _statements_of(text: str) -> tuple[Statement, ...]:
    try:
        document = json.loads(text)
        if isinstance(document, dict) and document.get("Statement") == []:
            return ()
        if "${" in text and isinstance(document, dict) and document.get("Version") != "2012-10-17":
            text = text.replace("${", _LITERAL)
        return parse_policy(_with_single_effects(json.loads(text)) if '"Effect": [' in text else text)
    except (PolicyError, ValueError, RecursionError):
        return _unknown(f"a policy that cannot be read ({len(text)} characters)", text)


def _with_single_effects(document: Any) -> Any:
    """Return a policy with each effect that is a list of one as that one."""
    statements = document.get("Statement") if isinstance(document, Mapping) else None
    listed = statements if isinstance(statements, list) else [statements]
    return {
        "Statement": [
            {**one, "Effect": one["Effect"][0]}
            if isinstance(one, Mapping) and isinstance(one.get("Effect"), list) and len(one["Effect"]) == 1
            else one
            for one in listed
        ]
    }


def _unknown(name: str, content: str = "") -> tuple[Statement, ...]:
    """Return the statement of a policy whose content is not known."""
    return (Statement(True, conditions=(("says so", name, (content,) if content else ()),)),)


_EVERYTHING = (Statement(True),)


def _read_all(documents: Mapping[str, Any], renamed: Callable[[str], str]) -> Iterator[Statement]:
    for document in documents.values():
        yield from read_document(document, renamed)


def _hanging(
    service: str, kind: str, identity: str, attributes: Mapping[str, Any], renamed: Callable[[str], str]
) -> dict[str, Policies]:
    """Return the policies that hang on a resource, by name; a grant of a key is one, too."""
    if (service, kind) == ("kms", "grants"):
        return {f"kms/grants/{identity}": _key_grant(attributes, renamed)}
    documents = [*_documents(attributes, "")]
    if not documents:
        return {}
    owner = renamed(arn_of(service, identity, attributes))
    return {
        "/".join(filter(None, (service, kind, identity, path))): Policies(read_document(found, renamed), None, owner)
        for path, found in documents
    }


def _documents(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each policy that says for whom it is, with its path. Attributes are JSON, so a map is a ``dict``, which is
    ten times faster to ask for than any Mapping."""
    if isinstance(value, str) and value[:1] == "{" and '"Statement"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, dict) and depth <= _DEEPEST:
        statements = value.get("Statement")
        listed = statements if isinstance(statements, list) else [statements]
        if any(isinstance(one, dict) and ("Principal" in one or "NotPrincipal" in one) for one in listed):
            yield path, value
            return
        for name, item in value.items():
            if isinstance(item, (dict, list)) or (isinstance(item, str) and item[:1] == "{"):
                yield from _documents(item, f"{path}/{name}" if path else str(name), depth + 1)
    elif isinstance(value, list) and depth <= _DEEPEST:
        for number, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from _documents(item, f"{path}/{number}", depth + 1)


def arn_of(service: str, identity: str, attributes: Mapping[str, Any]) -> str:
    """Return the ARN of a resource as far as it can be told, else nothing."""
    if service == "s3":
        return f"arn:aws:s3:::{identity}" if not identity.startswith("arn:") else identity
    if identity.startswith("arn:"):
        return identity
    names = _ARN_FIELDS.get(service, ())
    for held in (attributes, attributes.get("attributes"), attributes.get("config")):
        if isinstance(held, Mapping):
            found = next((held[name] for name in names if isinstance(held.get(name), str)), "")
            if found:
                return found
    return ""


_ARN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "sqs": ("QueueArn",),
    "sns": ("TopicArn", "arn"),
    "lambda": ("FunctionArn",),
    "kms": ("Arn",),
}


def _key_grant(grant: Mapping[str, Any], renamed: Callable[[str], str]) -> Policies:
    actions = tuple(f"kms:{name}".lower() for name in grant.get("Operations") or ())
    who = tuple(
        (f"Service:{name}" if name.endswith(".amazonaws.com") else f"AWS:{name}")
        for name in [renamed(str(grant.get("GranteePrincipal", "")))]
    )
    owner = renamed(str(grant.get("KeyId", "")))
    limits = grant.get("Constraints")
    conditions = (("equals", "constraints", (json.dumps(limits, sort_keys=True),)),) if limits else ()
    return Policies((Statement(True, Names(who), Names(actions), Names(), conditions),) if actions else (), None, owner)


def _more(holder: str, gain: Gain, identity: bool, new: bool) -> MoreRights:
    if identity:
        return MoreRights(holder, replace(gain, principal=""), "the account", new)
    return MoreRights(holder, gain, _who(gain.principal), new)


def _who(principal: str) -> str:
    """Return to whom a principal belongs, as a statement says it."""
    if principal.startswith("Service:"):
        return "a service"
    arn = principal.removeprefix("AWS:").split(":", 5)
    if not principal.startswith("AWS:arn:") or len(arn) < 6 or set("*?") & set(arn[4]):
        return "anybody"
    return "the account" if arn[4] == ACCOUNT_ID else "another account"


def _is_let_in(holder: str, let_in: Iterable[Names]) -> bool:
    """Return whether a resource may let the identity in, so that denials among its own policies count."""
    session = f":assumed-role/{holder.rsplit('/', 1)[-1]}/"
    return any(names.has(f"AWS:{holder}") or any(session in one for one in names.patterns) for names in let_in)
