"""Comparison of three states of an account: after set-up, after the solution, and after the agent.

A state is a set of *leaves*: resource, path within it and value. Each element of a list is a leaf
of the list's path; the elements have no order. *Wanted* is what the solution adds and removes.
*Damage* is what both set-up and solution have and the agent's account lacks. *Extra* is what the
agent's account has and neither set-up nor solution does. Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

from realhf.aws.grading.companions import CompanionGrants, find_companions, narrow_trust_policies
from realhf.aws.grading.leftovers import OWN, Leaf, find_leftovers, mentions_any
from realhf.aws.grading.meanings import MemberPosition, derive, is_setting, only_describes
from realhf.aws.grading.policy_comparison import Gain, Policies, TooManySteps
from realhf.aws.grading.rights import Rights, RightsChange, compare_rights, read_rights
from realhf.aws.grading.sent_settings import (
    SentWrite,
    Settings,
    build_settings,
    build_writes,
    find_differing_settings,
    member_table,
)
from realhf.aws.grading.snapshot import Key, Snapshot
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

_ANYBODY = re.compile(r"global/AllUsers|AuthenticatedUsers|public-read|authenticated-read")
"""Values that grant access to everybody."""
_ANYWHERE = re.compile(r'"(0\.0\.0\.0/0|::/0)"')
"""Address ranges that include the whole internet."""
_OPEN_WHEN_TRUE = re.compile(
    r"(PubliclyAccessible|publiclyAccessible|MapPublicIpOnLaunch|privilegedMode)$"
)
"""Members that open a resource to others if they are true."""
_OPEN_WHEN_FALSE = re.compile(
    r"(DeletionProtection\w*|StorageEncrypted|Encrypted|encrypted|BlockPublic\w*|IgnorePublicAcls|RestrictPublicBuckets"
    r"|EnableLogFileValidation|IsLogging|deletion_protection\.enabled)$"
)
"""Members that remove a protection if they are false."""


def is_opening(key: Key, path: str, value: str) -> bool:
    """Return whether a value (as JSON) at a path of a resource weakens its protection."""
    field = path.removesuffix("[]").rpartition("/")[2]
    if key[0] == "iam" and path in ("AttachedPolicies[]", "Users[]"):
        return True
    if _OPEN_WHEN_TRUE.search(field):
        return value in ("true", '"true"')
    if _OPEN_WHEN_FALSE.search(field):
        return value in ("false", '"false"')
    if key[1] == "function_urls" and path == "AuthType":
        return value == '"NONE"'
    if _ANYWHERE.search(value):
        return key[1] == "security_groups" and path == "IpPermissions[]"
    return _ANYBODY.search(value) is not None


def is_disabling(path: str, value: str) -> bool:
    """Return whether a value (as JSON) that was added at a path stops the resource from working: a
    concurrency of zero, or a policy with an unconditional denial."""
    if path == "concurrency":
        return value in ("0", '"0"')
    if not path.endswith("{policy}"):
        return False
    statements = json.loads(value)["Statement"]
    return any(
        one.get("Effect") == "Deny" and not one.get("Condition")
        for one in statements
        if isinstance(one, dict)
    )


Wanted = tuple[str, Leaf]
"""``+`` and a leaf that should exist, or ``-`` and a leaf that should not."""
_TOKEN = re.compile(f"{DRAWN}([^{DRAWN}{END_DRAWN}]*){END_DRAWN}")
"""A generated name or id between its two marks; group 1 is the name without the marks."""
References = Mapping[str, Sequence[tuple[Key, str, str]]]
"""Leaves whose values contain a generated name, as (resource, path, value), by that name."""
_ANY = f"{DRAWN}{END_DRAWN}"
"""Stands for a generated name that refers to no resource."""
_POLICY = "{policy}"
"""End of the path of a policy; a policy is a single leaf."""
_VERBATIM = "{verbatim}"
"""Path of the leaf that contains the whole content of a resource to be compared word for word."""
_NAME = re.compile(r"^(config/)?(name|[A-Za-z]*Name|[A-Za-z]*Identifier|CreationToken)$")
"""Paths of names that a resource's creator chose."""
_NAME_TAG = '{"Key":"Name",'
"""Beginning of the value of the tag that names a resource."""
_USUAL_ENCRYPTION = '{"ApplyServerSideEncryptionByDefault":[{"SSEAlgorithm":["AES256"]}]}'
"""The encryption setting that AWS gives every new bucket."""
_OF_AWS = frozenset({"", "default"})
"""Identities that AWS itself gives to many resources."""
_VERSIONS = (None, "2008-10-17", "2012-10-17")
"""Versions of the policy language that AWS accepts; the simulator accepts any."""


@dataclass(frozen=True)
class Freedom:
    """The choices that a task leaves to an agent.

    The steps of a path are separated by dots, and quoted if a name contains a dot. Alternative
    values are separated by "|". Each is a glob, a range of numbers ("1..9"), or any resource of a
    kind ("@service/kind").
    """

    free: tuple[tuple[str, str, str], ...] = ()
    """Fields whose value the agent may choose: (service/kind, path, permitted values)."""
    may_change: tuple[str, ...] = ()
    """Globs of the set-up resources that may change, matched against service/kind/identity."""
    verbatim: tuple[str, ...] = ()
    """Kinds ("service/kind") whose policies are compared word for word."""


@dataclass(frozen=True)
class Target:
    """The states of an account in which a solution was played: after set-up, and after each of its
    commands."""

    start: Snapshot
    """The account after set-up."""
    states: tuple[Snapshot, ...]
    """The account after each command."""
    operations: tuple[tuple[str, ...], ...] = ()
    """Operations that each command sent, as "service:Operation"."""
    arguments: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Arguments of those operations, for each command."""
    others: tuple[Snapshot, ...] = ()
    """The account after each of the other solutions. A policy is also accepted if it allows no less
    than one solution's policy and no more than another's."""
    setup: tuple[SentWrite, ...] = ()
    """The write requests of the set-up, which are the same in every account of the task."""

    @property
    def end(self) -> Snapshot:
        """The account after the solution."""
        return self.states[-1]

    @property
    def writes(self) -> list[SentWrite]:
        """The write requests of the set-up and of the solution."""
        writes = list(self.setup)
        before = self.start
        for state, operations, arguments in zip(
            self.states, self.operations, self.arguments, strict=False
        ):
            writes += build_writes(before, state, zip(operations, arguments, strict=True))
            before = state
        return writes


@dataclass(frozen=True)
class Differences:
    """The differences between an account and its target, as strings."""

    missing: tuple[str, ...] = ()
    """Wanted leaves and rights that the account lacks."""
    damage: tuple[str, ...] = ()
    """Leaves that both set-up and solution have and the account lacks."""
    removed: tuple[str, ...] = ()
    """Resources that both set-up and solution have and that were removed or replaced."""
    openings: tuple[str, ...] = ()
    """Weakened protections, and rights beyond the target."""
    extra: tuple[str, ...] = ()
    """Leaves that neither set-up nor solution has."""
    left_behind: tuple[str, ...] = ()
    """Resources that the agent created and left behind, see ``leftovers``."""
    differing_requests: tuple[str, ...] = ()
    """Requests that differ from the solution's in members that the simulator does not store."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no differences."""
        return not any(
            (
                self.missing,
                self.damage,
                self.removed,
                self.openings,
                self.extra,
                self.left_behind,
                self.differing_requests,
            )
        )


@dataclass(frozen=True)
class AccountVerdict:
    """The result of comparing an account with a goal."""

    achieved: bool
    """Whether the task is achieved."""
    progress: float
    """Fraction of the solution's parts that are done, in [0, 1]."""
    harms: frozenset[str]
    """Harms that the agent did, as strings: damage, removed resources and openings."""
    differences: Differences
    """The differences from the target."""
    satisfied: frozenset[str] = frozenset()
    """Wanted leaves that the account satisfies, as strings."""
    parts: tuple[int, ...] = ()
    """Indices of the solution's commands whose effects are all present."""
    wrong_values: frozenset[str] = frozenset()
    """Leaves at the places of wanted leaves that occur neither in the solution's end state nor in
    any state before it."""

    @property
    def only_leftovers(self) -> bool:
        """Whether the only differences are resources that the agent has left behind."""
        differences = self.differences
        return (
            bool(differences.left_behind)
            and replace(differences, left_behind=(), extra=()).is_empty
        )

    def describe(self) -> list[str]:
        """Describe, for the author of a task, what prevents success."""
        differences = self.differences
        labelled = (
            ("missing", differences.missing),
            ("damaged", differences.damage),
            ("gone or made anew", differences.removed),
            ("opened", differences.openings),
            ("not asked for", differences.extra),
            ("left behind", differences.left_behind),
            ("asked otherwise", differences.differing_requests),
        )
        return [f"{label}: {text}" for label, texts in labelled for text in texts]


class Goal:
    """What a target requires in every episode of its task instance, computed once."""

    def __init__(self, target: Target, freedom: Freedom) -> None:
        self.target = target
        self.freedom = freedom
        self.read = _LeafReader(target, freedom)
        states = [self.read.leaves(state, {}) for state in (target.start, *target.states)]
        self.first = states[0]
        self.last = states[-1]
        self.intermediate = set[Leaf]().union(*states)
        """Leaves of all states of the solution. Some of them are not in its end state: a new trail,
        for example, does not log at first."""
        self.wanted = {("+", leaf) for leaf in self.last - self.first}
        self.wanted |= {("-", leaf) for leaf in self.first - self.last}
        self.parts = _split_parts(self.wanted, states)
        self.places = {leaf[:2] for _, leaf in self.wanted}
        """(resource, path) of the wanted leaves."""
        self._policies = {leaf[:2]: leaf for leaf in self.first if leaf[1].endswith(_POLICY)}
        self._policies |= {leaf[:2]: leaf for leaf in self.last if leaf[1].endswith(_POLICY)}
        self._alternatives: dict[tuple[Key, str], list[str]] = {}
        """Policies that are as good as the solution's, by (resource, path)."""
        for other in target.others:
            for key, path, value, _ in self.read.leaves(other, {}) - self.last:
                if path.endswith(_POLICY):
                    self._alternatives.setdefault((key, path), []).append(value)
        made = {leaf[0] for leaf in self.last} - {leaf[0] for leaf in self.first}
        for key, policies in narrow_trust_policies(target.end.resources).items():
            if key in made:
                place = (key, f"AssumeRolePolicyDocument{_POLICY}")
                self._alternatives.setdefault(place, []).extend(
                    json.dumps(_without_ids(policy)) for policy in policies
                )
        self.is_trivial = {self.normalize_policy(leaf) for leaf in self.first} == self.last
        """Whether the account after set-up is already equivalent to the account after the
        solution."""

    @cached_property
    def settings(self) -> Settings:
        """The settings that the requests of set-up and solution leave."""
        return build_settings(self.target.writes, member_table())

    @cached_property
    def rights(self) -> tuple[Rights, Rights]:
        """The rights in the account (before the solution, after it)."""
        before, wanted = (
            read_rights(state.resources, lambda text: _TOKEN.sub(r"\1", text))
            for state in (self.target.start, self.target.end)
        )
        return before, wanted

    @cached_property
    def companions(self) -> CompanionGrants:
        """The grants that AWS requires for the connections in the solution."""
        return find_companions(
            self.target.end.resources, self.rights[1], lambda text: _TOKEN.sub(r"\1", text)
        )

    def normalize_policy(self, leaf: Leaf) -> Leaf:
        """Return the target's leaf if ``leaf`` is a policy that means the same as the target's or
        is equally acceptable; otherwise return ``leaf``."""
        if not leaf[1].endswith(_POLICY):
            return leaf
        wanted = self._policies.get(leaf[:2])
        if wanted is None or wanted[2] == leaf[2]:
            return leaf
        accepted = (
            [wanted[2], *self._alternatives.get(leaf[:2], ())]
            if wanted in self.last
            else [wanted[2]]
        )
        between = any(
            _is_policy_between(*leaf[:2], low, leaf[2], high)
            for low in accepted
            for high in accepted
        )
        return wanted if between else leaf


class EpisodeComparison:
    """Comparison of the states of one episode with a goal. ``start``: the account at the start of
    the episode."""

    def __init__(self, start: Snapshot, goal: Goal) -> None:
        self.goal = goal
        # The starts are usually equal, because both accounts were set up with the same seed.
        if start == goal.target.start:
            self._start_names = {token: token for token in _generated_names([start])}
        else:
            self._start_names = _match_names(start, goal.target.start, {})
        self._start_serials = {
            _rename_key(key, self._start_names): serial for key, serial in start.serials.items()
        }

    def judge(self, end: Snapshot, sent: Sequence[SentWrite] | None = None) -> AccountVerdict:
        """Return the verdict about the account ``end``.

        ``sent``: the agent's writes. Their members that the simulator does not store are compared
        as well. None for an account that stores all members.
        """
        goal = self.goal
        first = self.goal.first
        last = self.goal.last
        names = _match_names(end, goal.target.end, self._start_names)
        names |= {token: f"{OWN}{token}" for token in _generated_names([end]) if token not in names}
        now = {
            goal.normalize_policy(leaf) if leaf[1].endswith(_POLICY) else leaf
            for leaf in goal.read.leaves(end, names)
        }
        missing_changes = list[str]()
        gained_rights = list[str]()
        new_resource_rights = list[str]()
        if now != last:
            rights = read_rights(
                end.resources,
                lambda text: _TOKEN.sub(lambda match: names.get(match[1], match[1]), text),
            )
            # Usually there are no companion grants; the comparison with the larger set of rights
            # that includes them is skipped then.
            grants = self._find_companion_grants(now)
            beyond = compare_rights(goal.companions.rights if grants else goal.rights[1], rights)
            missing_changes, gained_rights, new_resource_rights = self._find_excess_rights(
                rights, beyond
            )
            now = self._without_companions(now, grants, rights, beyond) if grants else now
        satisfied = {(sign, leaf) for sign, leaf in goal.wanted if (leaf in now) == (sign == "+")}
        removed = self._find_removed(end, names)
        damage = {
            leaf
            for leaf in (first & last) - now
            if leaf[0] not in removed and not self._may_change(leaf[0])
        }
        openings, disabled, extra, left_behind = self._find_extras(now, end.transcript)
        missing = [f"{sign} {_format_leaf(leaf)}" for sign, leaf in goal.wanted - satisfied]
        differences = Differences(
            missing=_sort_texts([*missing, *missing_changes]),
            damage=_sort_texts([*map(_format_leaf, damage), *disabled]),
            removed=_sort_texts("/".join(key) for key in removed),
            openings=_sort_texts([*openings, *gained_rights]),
            extra=_sort_texts([*extra, *new_resource_rights]),
            left_behind=_sort_texts("/".join(key) for key in left_behind),
        )
        # Skipped for an account that already differs, because the result would change nothing.
        if differences.is_empty and sent is not None:
            requests = self._find_differing_requests(end, sent, names)
            differences = replace(differences, differing_requests=_sort_texts(requests))
        return AccountVerdict(
            achieved=differences.is_empty,
            progress=_compute_progress(
                [part[1] <= satisfied for part in goal.parts], not differences.is_empty
            ),
            harms=frozenset([*differences.removed, *differences.openings, *differences.damage]),
            differences=differences,
            satisfied=frozenset(f"{sign} {_format_leaf(leaf)}" for sign, leaf in satisfied),
            parts=tuple(command for command, part in goal.parts if part <= satisfied),
            wrong_values=frozenset(
                _format_leaf(leaf) for leaf in now - goal.intermediate if leaf[:2] in goal.places
            ),
        )

    def _find_differing_requests(
        self, end: Snapshot, sent: Sequence[SentWrite], names: Mapping[str, str]
    ) -> list[str]:
        """Describe the settings that the simulator does not store and that differ from the
        solution's."""
        others = {mine: its for mine, its in names.items() if mine != its}
        pattern = re.compile("|".join(map(re.escape, sorted(others, key=len, reverse=True))))
        settings = build_settings(
            [*self.goal.target.setup, *sent],
            member_table(),
            (lambda text: pattern.sub(lambda match: others[match[0]], text)) if others else str,
        )
        target = self.goal.target.end.resources
        return find_differing_settings(settings, self.goal.settings, end.resources, target)

    def _find_removed(self, end: Snapshot, names: Mapping[str, str]) -> set[Key]:
        """Return the resources of both set-up and target that were removed or replaced."""
        end_serials = {_rename_key(key, names): serial for key, serial in end.serials.items()}
        target_start = self.goal.target.start.serials
        target_end = self.goal.target.end.serials
        return {
            key
            for key, serial in target_start.items()
            if target_end.get(key) == serial
            and end_serials.get(key) != self._start_serials.get(key)
            if not (is_setting(key) or self._may_change(key))
        }

    def _may_change(self, key: Key) -> bool:
        """Return whether the task permits the agent to change a resource."""
        return any(fnmatchcase("/".join(key), glob) for glob in self.goal.freedom.may_change)

    def _find_extras(
        self, now: Set[Leaf], transcript: str | None
    ) -> tuple[list[str], list[str], list[str], set[Key]]:
        """Return (openings, disabling, extras, left behind): the extra leaves that matter, and the
        resources that were left behind.

        ``openings`` describes values that weaken a protection, ``disabling`` values that stop a
        resource of the set-up from working, and ``extras`` all other extra leaves that matter.
        """
        goal = self.goal
        setup_names = {(leaf[0][0], leaf[0][2]) for leaf in goal.first}
        setup_keys = {leaf[0] for leaf in goal.first}
        known_keys = {leaf[0] for leaf in goal.last} | setup_keys
        kinds_by_name: dict[tuple[str, str], set[str]] = {}  # kinds by service and name
        for key in known_keys:
            for name in (key[2], re.split("[/:]", key[2])[-1]):
                kinds_by_name.setdefault((key[0], name), set()).add(key[1])
        users = {key[2] for key in known_keys if key[:2] == ("iam", "users")}
        openings = []
        disabled = []
        extra = []
        new_resources: dict[Key, list[Leaf]] = {}
        for leaf in now - goal.last - goal.first:
            if _is_aws_default(leaf) and ("s3", "buckets", leaf[0][2]) not in setup_keys:
                continue
            if leaf[0] not in known_keys:
                new_resources.setdefault(leaf[0], []).append(leaf)
            elif is_opening(*leaf[:3]):
                (extra if leaf in goal.intermediate else openings).append(leaf)
            elif (leaf[0][0], leaf[0][2]) in setup_names and is_disabling(*leaf[1:3]):
                disabled.append(leaf)
            elif not only_describes(leaf[0], leaf[1]):
                extra.append(leaf)
        for key, leaves in new_resources.items():
            if key[:2] == ("iam", "access_keys") and any(
                mentions_any(leaf[2], users) for leaf in leaves
            ):
                openings += leaves
            elif _is_part(key, kinds_by_name):
                if any(is_opening(*leaf[:3]) for leaf in leaves):
                    openings += leaves
                elif (key[0], key[2]) in setup_names and any(
                    is_disabling(*leaf[1:3]) for leaf in leaves
                ):
                    disabled += leaves
                elif is_setting(key):
                    extra += [leaf for leaf in leaves if not only_describes(*leaf[:2])]
        left_behind: set[Key] = set()
        if new_resources:
            wanted = {leaf[0] for leaf in goal.last} - setup_keys
            left_behind = find_leftovers(
                new_resources, (leaf for leaf in now if leaf[0] in known_keys), wanted, transcript
            )
        return (
            [*map(_format_leaf, openings)],
            [*map(_format_leaf, disabled)],
            [*map(_format_leaf, extra)],
            left_behind,
        )

    def _find_companion_grants(self, now: Set[Leaf]) -> dict[Leaf, str]:
        """Return the policy leaves beyond the target that may be companion grants, with the name of
        the policy's holder (a resource or a role)."""
        allowed = self.goal.companions
        holders = dict[Leaf, str]()
        for leaf in now - self.goal.last:
            key, path = leaf[:2]
            if path.endswith(_POLICY) and key[0] != "iam":
                name = _TOKEN.sub(r"\1", "/".join(filter(None, (*key, path.removesuffix(_POLICY)))))
                if name in allowed.policies:
                    holders[leaf] = name
            elif key in allowed.roles and (
                path.startswith("InlinePolicies/") or path == "AttachedPolicies[]"
            ):
                holders[leaf] = allowed.roles[key]
        return holders

    def _without_companions(
        self, now: set[Leaf], grants: Mapping[Leaf, str], rights: Rights, beyond: RightsChange
    ) -> set[Leaf]:
        """Return the leaves of an account without the companion grants.

        Grants that allow no more than AWS requires for the solution's connections are dropped. If a
        policy of the target was extended by such a grant, the target's own policy takes its place.

        ``grants``: the result of ``_find_companion_grants``. ``beyond``: how the account's
        ``rights`` differ from those of the target with its companion grants.
        """
        wanted = self.goal.rights[1]
        # ``exceeding``: holders with rights that neither the target nor the companion grants give.
        # ``lacking``: holders without some of the target's rights.
        exceeding = {one.holder for one in beyond.gained} | set(beyond.not_compared)
        lacking = {one.holder for one in compare_rights(rights, wanted).gained}
        policies_of_target = {
            (leaf[0], leaf[1]): leaf for leaf in self.goal.last if leaf[1].endswith(_POLICY)
        }
        companions = set[Leaf]()
        restored = set[Leaf]()
        for leaf, holder in grants.items():
            key, path = leaf[:2]
            of_role = key[0] == "iam"
            present, allowed = (one.roles if of_role else one.resources for one in (rights, wanted))
            if holder in exceeding or _denies(present, allowed, holder):
                continue
            if of_role:
                companions.add(leaf)
            elif holder not in lacking:
                companions |= {leaf, (key, "", "{}", 0)} if is_setting(key) else {leaf}
                restored |= (
                    {policies_of_target[key, path]} if (key, path) in policies_of_target else set()
                )
        # A managed policy that was created only to be attached as a companion grant is one, too.
        attached = {leaf[2].strip('"') for leaf in companions if leaf[1] == "AttachedPolicies[]"}
        companion_policies = {
            key
            for key, path, value, _ in now
            if key[:2] == ("iam", "policies") and path == "Arn"
            if value.strip('"') in attached
        }
        for key in companion_policies:
            leaves = {leaf for leaf in now if leaf[0] == key}
            if sum(leaf[1].endswith(_POLICY) for leaf in leaves) == 1:
                companions |= leaves - self.goal.last
        return (now - companions) | restored

    def _find_excess_rights(
        self, now: Rights, beyond: RightsChange
    ) -> tuple[list[str], list[str], list[str]]:
        """Describe the rights beyond the target, as (missing changes, openings, extras).

        Missing changes are rights that the set-up granted and that should have been removed, and
        holders whose policies need too many steps to compare. Openings are rights gained since the
        set-up by holders that existed, and by new users and roles. Extras are rights to a new
        resource that everybody has; other rights to a new resource are not counted.
        """
        keys = {leaf[0] for leaf in self.goal.first | self.goal.last}
        known = {(service, _TOKEN.sub(r"\1", f"{identity}/")) for service, _, identity in keys}
        before, wanted = self.goal.rights
        if now in (wanted, before):
            return [], [], []
        since_setup = compare_rights(before, now)
        changed_holders = {one.holder for one in since_setup.gained} | set(since_setup.not_compared)
        gained = [one for one in beyond.gained if one.holder in changed_holders]
        of_new_resources = [
            one for one in gained if one.new and not _is_attached_to(one.holder, known)
        ]
        still = [f"still: {one}" for one in beyond.gained if one.holder not in changed_holders]
        return (
            [*still, *(f"too much to compare: {holder}" for holder in beyond.not_compared)],
            [f"{one}" for one in gained if one not in of_new_resources],
            [
                f"{one}"
                for one in of_new_resources
                if not one.gain.principal or _admits_everybody(one.gain)
            ],
        )


def _denies(now: Mapping[str, Policies], wanted: Mapping[str, Policies], holder: str) -> bool:
    """Return whether a holder's policies contain a denial that its policies in the target do
    not."""
    known = wanted.get(holder, Policies()).statements
    return any(not one.allow and one not in known for one in now.get(holder, Policies()).statements)


def _admits_everybody(gain: Gain) -> bool:
    """Return whether a gain is for everybody without conditions.

    Requiring TLS does not count as a condition. Other conditions do; the default policy of a topic
    has one.
    """
    narrowed = any(
        not condition.lower().startswith("aws:securetransport ") for condition in gain.conditions
    )
    return gain.principal in ("*", "AWS:*") and not narrowed


def _is_attached_to(holder: str, known: Iterable[tuple[str, str]]) -> bool:
    """Return whether the policy named ``holder`` is attached to one of the known resources, given
    as (service, identity) pairs."""
    service, _, path = holder.partition("/")
    where = f"{path.partition('/')[2]}/"
    return any(
        service == known_service and where.startswith(identity) for known_service, identity in known
    )


def _is_aws_default(leaf: Leaf) -> bool:
    """Return whether AWS gives a leaf to every new bucket. The simulator does not."""
    key, path, value, _ = leaf
    if key[:2] == ("s3", "bucket_encryption"):
        return (path, value) in (("", "{}"), ("Rule[]", _USUAL_ENCRYPTION))
    return (
        key[:2] == ("s3", "buckets")
        and path.startswith("_public_access_block/")
        and value == '"true"'
    )


def _is_part(key: Key, kinds_by_name: Mapping[tuple[str, str], Set[str]]) -> bool:
    """Return whether the name or path of a resource shows that it belongs to a resource of another
    kind."""
    ends = [match.start() for match in re.finditer("[/:|]", key[2])]
    names = [key[2][:end] for end in (*ends, None)]
    return any(
        kinds_by_name.get((key[0], name), set()) - {key[1]} for name in names if name not in _OF_AWS
    )


def _split_parts(wanted: Set[Wanted], states: Sequence[Set[Leaf]]) -> list[tuple[int, set[Wanted]]]:
    """Return the wanted leaves as (index, leaves) pairs: each leaf belongs to the solution's
    command that established it for good."""
    parts = []
    remaining = set(wanted)
    # Go backwards: a leaf belongs to the last command before which it was still wrong.
    for place, before in reversed(list(enumerate(states[:-1]))):
        part = {(sign, leaf) for sign, leaf in remaining if (leaf in before) != (sign == "+")}
        remaining -= part
        if part:
            parts.append((place, part))
    return parts[::-1]


def _is_policy_between(key: Key, path: str, low: str, policy: str, high: str) -> bool:
    """Return whether a policy allows everything that ``low`` allows and nothing that ``high`` does
    not.

    If ``low`` equals ``high``, return whether the policy has the same meaning.
    """
    try:
        documents = [json.loads(text) for text in (low, policy, high)]
        if documents[1].get("Version") not in (*_VERSIONS, documents[0].get("Version")):
            return False
        least, tested, most = (_rights_of_policy(key, path, document) for document in documents)
        changes = compare_rights(tested, least), compare_rights(most, tested)
        if low == high:
            return not any(change.changed or change.not_compared for change in changes)
        return not any(change.gained or change.not_compared for change in changes)
    except (TooManySteps, ValueError, RecursionError):
        return False


def transfer_target(target: Target, start: Snapshot) -> Target:
    """Return a target as it would be in another account: the solution's changes applied to
    ``start``.

    Generated names are replaced by those of the most similar resources in ``start``.
    """
    before = target.start.resources
    names = _match_names(target.start, start, {})

    def rename(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {rename(name): rename(item) for name, item in value.items()}
        if isinstance(value, list):
            return [rename(item) for item in value]
        return (
            _TOKEN.sub(lambda match: f"{DRAWN}{names.get(match[1], match[1])}{END_DRAWN}", value)
            if (isinstance(value, str) and DRAWN in value)
            else value
        )

    def apply_changes(state: Snapshot) -> Snapshot:
        now = dict(start.resources)
        serials = dict(start.serials)
        for key in before.keys() - state.resources.keys():
            now.pop(_rename_key(key, names), None)
        for key, attributes in state.resources.items():
            old = before.get(key, {})
            place = _rename_key(key, names)
            if key in before and old == attributes:
                continue
            kept = {
                name: item
                for name, item in now.get(place, {}).items()
                if name in attributes or name not in old
            }
            more = {
                name: rename(item) for name, item in attributes.items() if old.get(name) != item
            }
            now[place] = {**kept, **more}
            serials.setdefault(place, state.serials.get(key, 0))
        return Snapshot(now, serials)

    states = tuple(map(apply_changes, target.states))
    others = tuple(map(apply_changes, target.others))
    return replace(target, start=start, states=states, others=others)


def _rights_of_policy(key: Key, path: str, document: Any) -> Rights:
    """Return the rights in an account that contains only this policy."""
    if key[0] != "iam":
        return read_rights({key: {"": document}})
    if path.startswith("AssumeRole"):  # a trust policy: read it as that of some role
        return read_rights({("iam", "roles", "it"): {"AssumeRolePolicyDocument": document}})
    return read_rights({("iam", "roles", "it"): {"InlinePolicies": {"": document}}})


class _LeafReader:
    """Converter from snapshots to sets of leaves."""

    def __init__(self, target: Target, freedom: Freedom) -> None:
        self._states = (target.start, *target.states)
        self._known = _generated_names(self._states)
        self._verbatim = frozenset(freedom.verbatim)
        self._free: dict[str, list[tuple[list[str], str]]] = {}
        for kind, path, values in freedom.free:
            self._free.setdefault(kind, []).append((_parse_field_path(path), values))
        # Leaves by the ``id`` of the attributes object. ``snapshot`` caches parsed records, so an
        # unchanged resource has the same attributes object in both accounts.
        self._read = {
            id(attributes): [*_leaves(attributes, "", MemberPosition.of(key))]
            for state in self._states
            for key, attributes in state.resources.items()
        }

    def leaves(self, snapshot: Snapshot, names: Mapping[str, str]) -> set[Leaf]:
        """Return the leaves of a snapshot. ``names`` maps its generated names to those of the
        target, which replace them."""

        def rename(match: re.Match[str]) -> str:
            token = names.get(match[1], "" if names else match[1])
            return (
                f"{DRAWN}{token}{END_DRAWN}"
                if token in self._known or token.startswith(OWN)
                else _ANY
            )

        counted: Counter[tuple[Key, str, str]] = Counter()
        for key, attributes in snapshot.resources.items():
            place = key if DRAWN not in key[2] else (key[0], key[1], _TOKEN.sub(rename, key[2]))
            free = [
                (steps, partial(_is_permitted_value, values, snapshot))
                for steps, values in self._free.get(f"{key[0]}/{key[1]}", ())
            ]
            counted[place, "", "{}"] += 1
            read = None if free else self._read.get(id(attributes))
            if read is None and free:
                read = [*_leaves(_without(attributes, free), "", MemberPosition.of(key))]
            elif read is None:
                where = MemberPosition.of(key)
                read = derive(attributes, "leaves", partial(_list_leaves, attributes, where))
            if f"{key[0]}/{key[1]}" in self._verbatim:
                read = [*read, (_VERBATIM, canonical(attributes, MemberPosition.of(key)))]
            for path, value in read:
                if DRAWN in value:
                    value = _TOKEN.sub(rename, value)
                counted[place, path, value] += 1
        return {(*leaf, number) for leaf, count in counted.items() for number in range(count)}


def _list_leaves(attributes: Mapping[str, Any], where: MemberPosition) -> list[tuple[str, str]]:
    """Return (path, canonical text of the value) for each leaf of a resource."""
    return [*_leaves(attributes, "", where)]


def _leaves(value: Any, path: str, where: MemberPosition) -> Iterator[tuple[str, str]]:
    """Yield (path, canonical text of the value) for each leaf of a value."""
    if isinstance(value, Mapping):
        if isinstance(value.get("Statement"), list):
            yield path + _POLICY, canonical(_without_ids(value), where)
            return
        for name, item in value.items():
            yield from _leaves(item, f"{path}/{name}" if path else name, where.inner(name))
        if value or not path:
            return
    elif isinstance(value, list) and value and not where.in_order:
        for item in {canonical(item, where): None for item in value}:
            yield f"{path}[]", item
        return
    yield path, canonical(value, where)


def canonical(value: Any, where: MemberPosition) -> str:
    """Return a member's value as canonical text: values with equal meanings have equal texts.

    The order of a list is kept only where it has a meaning. Outside of documents, numbers and
    booleans equal the strings that spell them, because some requests send them as strings.
    """
    if isinstance(value, Mapping):
        if isinstance(value.get("Statement"), list):
            where = replace(where, written=False)
        inner = (
            f"{json.dumps(name)}:{canonical(value[name], where.inner(name))}"
            for name in sorted(value)
        )
        return "{" + ",".join(inner) + "}"
    if isinstance(value, list):
        items = [canonical(item, where) for item in value]
        return "[" + ",".join(items if where.in_order else sorted(items)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) and not where.typed:
        value = "true" if value else "false"
    return json.dumps(value if where.typed else str(value), ensure_ascii=False)


def _without_ids(policy: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a policy without the ids of its statements, which have no effect."""
    statements = [
        {name: item for name, item in one.items() if name != "Sid"}
        if isinstance(one, Mapping)
        else one
        for one in policy["Statement"]
    ]
    return {**policy, "Statement": statements}


Choices = Sequence[tuple[list[str], Callable[[str], bool]]]
"""Free fields, each as (steps of its path, function that tests a value)."""


def _without(value: Any, choices: Choices) -> Any:
    """Return a value without the scalars that the agent may choose. In a path, ``name[]`` stands
    for the elements of a list."""
    if isinstance(value, list):
        reduced = [(item, _without(item, choices)) for item in value]
        return [kept for item, kept in reduced if kept or not item]  # drop items that became empty
    if not isinstance(value, Mapping):
        return value
    remaining = {}
    for name, item in value.items():
        here = [
            (steps[1:], may) for steps, may in choices if steps[0].removesuffix("[]") in (name, "*")
        ]
        ends = [may for steps, may in here if not steps]
        if isinstance(item, Mapping | list):
            deeper = [(steps, may) for steps, may in here if steps]
            items = (
                [one for one in item if not _is_chosen(one, ends)]
                if isinstance(item, list)
                else item
            )
            kept = _without(items, deeper) if deeper else items
            if kept or not item:
                remaining[name] = kept
        elif not _is_chosen(item, ends):
            remaining[name] = item
    return remaining


def _is_chosen(value: Any, choices: Iterable[Callable[[str], bool]]) -> bool:
    """Return whether a value is a scalar that one of the tests permits."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return not isinstance(value, Mapping | list) and any(may(text) for may in choices)


def _parse_field_path(path: str) -> list[str]:
    """Return the steps of a free field's path."""
    return [step.strip('"') for step in re.findall(r'"[^"]*"|[^."]+', path)]


def _is_permitted_value(values: str, snapshot: Snapshot, text: str) -> bool:
    """Return whether ``text`` is one of the permitted values of a free field."""
    for value in map(str.strip, values.split("|")):
        low, dots, high = value.partition("..")
        if value.startswith("@"):
            if (*value[1:].split("/", 1), text) in snapshot.resources:
                return True
        elif dots and _is_number(low) and _is_number(high):
            if _is_number(text) and float(low) <= float(text) <= float(high):
                return True
        elif fnmatchcase(text, value):
            return True
    return False


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None


def has_field(snapshot: Snapshot, kind: str, path: str, values: str = "*") -> bool:
    """Return whether any resource of the given kind ("service/kind") has a permitted value at
    ``path``."""
    asked = [(_parse_field_path(path), partial(_is_permitted_value, values, snapshot))]
    attributes_of_kind = (
        attributes for key, attributes in snapshot.resources.items() if kind == f"{key[0]}/{key[1]}"
    )
    return any(_without(attributes, asked) != attributes for attributes in attributes_of_kind)


def _keys_with_tokens(snapshot: Snapshot) -> Iterator[tuple[Key, list[str]]]:
    """Yield (key, generated names) for each key that contains generated names."""
    for key in snapshot.resources:
        if DRAWN in key[2]:
            yield key, _TOKEN.findall(key[2])


def _generated_names(snapshots: Iterable[Snapshot]) -> set[str]:
    """Return the generated names in the keys of snapshots."""
    return {
        token
        for snapshot in snapshots
        for _, tokens in _keys_with_tokens(snapshot)
        for token in tokens
    }


def _rename_key(key: Key, names: Mapping[str, str]) -> Key:
    """Return a key with its generated names replaced. A name that is not in ``names`` stays."""
    if DRAWN not in key[2]:
        return key
    return (
        key[0],
        key[1],
        _TOKEN.sub(lambda match: f"{DRAWN}{names.get(match[1], match[1])}{END_DRAWN}", key[2]),
    )


def _match_names(one: Snapshot, other: Snapshot, names: Mapping[str, str]) -> dict[str, str]:
    """Return ``names`` extended: each further generated name in ``one`` is mapped to its best
    counterpart in ``other``.

    The names are matched greedily, in rounds. A round takes all pairs whose names are each other's
    unambiguous best match; if there are none, it takes the single most similar pair. Each round
    makes the remaining resources easier to distinguish.
    """
    counterparts = dict(names)
    ours = _group_by_names(one, counterparts)
    theirs = _group_by_names(other, {its: its for its in counterparts.values()})
    references = (_references(one), _references(other)) if ours and theirs else ({}, {})
    while ours and theirs:
        pairs = _rank_pairs(one, other, ours, theirs, counterparts, references)
        if not pairs:
            break
        for _, mine, its in [pair for pair in pairs if pair[0]] or pairs[:1]:
            if not any(a in counterparts for a in mine) and not set(its) & set(
                counterparts.values()
            ):
                counterparts.update(zip(mine, its, strict=True))
        ours = _group_by_names(one, counterparts)
        theirs = _group_by_names(other, {its: its for its in counterparts.values()})
    return counterparts


def _group_by_names(
    snapshot: Snapshot, known: Mapping[str, str]
) -> dict[tuple[str, ...], list[Key]]:
    """Return the keys of resources, grouped by the one generated name in them that is not
    ``known``.

    Keys with several unknown names wait for a later round: a part of another resource is matched
    after that resource.
    """
    keys_by_name: dict[tuple[str, ...], list[Key]] = {}
    for key, tokens in _keys_with_tokens(snapshot):
        unknown = tuple(dict.fromkeys(token for token in tokens if token not in known))
        if len(unknown) == 1:
            keys_by_name.setdefault(unknown, []).append(key)
    return keys_by_name


def _rank_pairs(
    one: Snapshot,
    other: Snapshot,
    ours: Mapping[tuple[str, ...], list[Key]],
    theirs: Mapping[tuple[str, ...], list[Key]],
    names: Mapping[str, str],
    references: tuple[References, References],
) -> list[tuple[bool, tuple[str, ...], tuple[str, ...]]]:
    """Return the pairs of names, most similar first, as (whether each is the other's unambiguous
    best match, our name, their name)."""
    back = {its: its for its in names.values()}
    mine = {its: _blank_leaves(one, keys, names) for its, keys in ours.items()}
    their = {its: _blank_leaves(other, keys, back) for its, keys in theirs.items()}
    named = {its: _find_references(references[0], its[0], names) for its in ours}
    others_named = {its: _find_references(references[1], its[0], back) for its in theirs}
    scored = []
    for a, records in mine.items():
        for b, others in their.items():
            shared = records.keys() & others.keys()
            if (
                shared
                and len(a) == len(b)
                and not any(_has_other_name(records[key], others[key]) for key in shared)
            ):
                alike = sum(sum((records[key] & others[key]).values()) for key in shared)
                alike += sum((named[a] & others_named[b]).values())
                scored.append((alike * 1000 - abs(len(records) - len(others)), a == b, a, b))
    scored.sort(key=lambda pair: (-pair[0], not pair[1], pair[2], pair[3]))
    best: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for score, _, a, b in scored:
        best.setdefault((True, a), []).append(score)
        best.setdefault((False, b), []).append(score)
    return [
        (
            all(
                scores[0] == score and scores[1:2] != [score]
                for scores in (best[True, a], best[False, b])
            ),
            a,
            b,
        )
        for score, _, a, b in scored
    ]


def _references(snapshot: Snapshot) -> References:
    """Return the leaves that contain the generated name of another resource, by that name."""
    leaves_by_name: dict[str, list[tuple[Key, str, str]]] = {}
    for key, attributes in snapshot.resources.items():
        own = set(_TOKEN.findall(key[2]))
        for path, value in _leaves(attributes, "", MemberPosition.of(key)):
            if DRAWN in value:
                for token in set(_TOKEN.findall(value)) - own:
                    leaves_by_name.setdefault(token, []).append((key, path, value))
    return leaves_by_name


def _find_references(
    references: References, token: str, names: Mapping[str, str]
) -> Counter[tuple[Key, str, str]]:
    """Return the leaves that refer to the generated name ``token``, with ``token`` itself replaced
    by ``OWN``."""
    counterparts = {**names, token: OWN}
    return Counter(
        (
            _blank_key(key, names),
            path,
            _TOKEN.sub(lambda match: counterparts.get(match[1], ""), value),
        )
        for key, path, value in references.get(token, ())
    )


def _has_other_name(one: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> bool:
    """Return whether two resources, given by their leaves, have different names that their creators
    chose."""
    names, others = (
        {
            _NAME_TAG if value.startswith(_NAME_TAG) else path: value
            for path, value in leaves
            if _is_name(path, value)
        }
        for leaves in (one, other)
    )
    return any(names[path] != others[path] for path in names.keys() & others.keys())


def _is_name(path: str, value: str) -> bool:
    """Return whether a leaf is a name that a resource's creator chose."""
    return _NAME.search(path) is not None or value.startswith(_NAME_TAG)


def _blank_key(key: Key, names: Mapping[str, str]) -> Key:
    """Return a key in which known generated names are replaced by their counterparts and unknown
    ones are removed."""
    return key[0], key[1], _TOKEN.sub(lambda match: names.get(match[1], ""), key[2])


def _blank_leaves(
    snapshot: Snapshot, keys: Iterable[Key], names: Mapping[str, str]
) -> dict[Key, Counter[tuple[str, str]]]:
    """Return the leaves of resources by key. Generated names are treated as in ``_blank_key``."""

    def named(text: str) -> str:
        return _TOKEN.sub(lambda match: names.get(match[1], ""), text)

    return {
        _blank_key(key, names): Counter(
            (path, named(value))
            for path, value in _leaves(snapshot.resources[key], "", MemberPosition.of(key))
        )
        for key in keys
    }


def _compute_progress(parts: Sequence[bool], wrong: bool) -> float:
    """Return the fraction of parts that are complete. It is less than 1 if ``wrong``: if any
    difference remains."""
    share = sum(parts) / len(parts) if parts else 0.0
    return min(share, (len(parts) - 0.5) / len(parts)) if wrong and parts else share


def _format_leaf(leaf: Leaf) -> str:
    """Return a leaf as a string for messages."""
    key, path, value, number = leaf
    more = f" (no. {number + 1})" if number else ""
    text = f"{'/'.join(key)} {path} = {value[:300]}{more}"
    return text.replace(DRAWN, "").replace(END_DRAWN, "")


def _sort_texts(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(texts))
