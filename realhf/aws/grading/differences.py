"""Compares three states of an account: after set-up, as the solution leaves it, and as an agent leaves it.

A state is a set of *leaves*: resource, path within it and value. The elements of a list are leaves of its path in no
order. *Wanted* is what the solution adds and removes, *damage* what set-up and solution hold and the agent's account
does not, *extra* what neither of them holds. Source: docs/reference/environment.md 7.
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

from realhf.aws.grading.companions import Companions, companions_of, narrowed_trusts
from realhf.aws.grading.leftovers import OWN, Leaf, left_over, mentions
from realhf.aws.grading.meanings import Member, is_setting, only_describes
from realhf.aws.grading.policy_comparison import Gain, Policies, TooManySteps
from realhf.aws.grading.rights import Rights, RightsChange, compare_rights, read_rights
from realhf.aws.grading.sent_settings import Deed, Settings, deeds_between, last_sent, member_table, sent_otherwise
from realhf.aws.grading.snapshot import Key, Snapshot
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN

_ANYBODY = re.compile(r"global/AllUsers|AuthenticatedUsers|public-read|authenticated-read")
_ANYWHERE = re.compile(r'"(0\.0\.0\.0/0|::/0)"')
_OPEN_WHEN_TRUE = re.compile(r"(PubliclyAccessible|publiclyAccessible|MapPublicIpOnLaunch|privilegedMode)$")
_OPEN_WHEN_FALSE = re.compile(
    r"(DeletionProtection\w*|StorageEncrypted|Encrypted|encrypted|BlockPublic\w*|IgnorePublicAcls|RestrictPublicBuckets"
    r"|EnableLogFileValidation|IsLogging|deletion_protection\.enabled)$"
)


def is_opening(key: Key, path: str, value: str) -> bool:
    """Return whether a value (as JSON) at a path of a resource opens something."""
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
    """Return whether a value (as JSON) that was added at a path keeps a resource from working: a function that may not
    run at all, or a policy that denies something whatever the conditions."""
    if path == "concurrency":
        return value in ("0", '"0"')
    if not path.endswith("{policy}"):
        return False
    statements = json.loads(value)["Statement"]
    return any(one.get("Effect") == "Deny" and not one.get("Condition") for one in statements if isinstance(one, dict))


Wanted = tuple[str, Leaf]
"""``+`` and a leaf that should be there, or ``-`` and one that should not."""
_TOKEN = re.compile(f"{DRAWN}([^{DRAWN}{END_DRAWN}]*){END_DRAWN}")
References = Mapping[str, Sequence[tuple[Key, str, str]]]
"""Leaves, by the drawn names in them."""
_ANY = f"{DRAWN}{END_DRAWN}"
"""Stands for a drawn text that names nothing."""
_POLICY = "{policy}"
"""Ends the path of a policy, which is one leaf."""
_VERBATIM = "{verbatim}"
"""Path of all that a resource says, where words count."""
_NAME = re.compile(r"^(config/)?(name|[A-Za-z]*Name|[A-Za-z]*Identifier|CreationToken)$")
_NAME_TAG = '{"Key":"Name",'
_USUAL_ENCRYPTION = '{"ApplyServerSideEncryptionByDefault":[{"SSEAlgorithm":["AES256"]}]}'
_OF_AWS = frozenset({"", "default"})
_VERSIONS = (None, "2008-10-17", "2012-10-17")
"""Of the language of policies: AWS takes no others, the simulator takes any."""


@dataclass(frozen=True)
class Freedom:
    """Says what an agent may choose. ``free``: (service/kind, path, values to choose among) of fields;
    ``may_change``: globs of service/kind/identity; ``verbatim``: service/kind whose policies count word for word.
    A path has steps divided by dots, in quotes where a name has one. Values are divided by "|": a glob, bounds of a
    number ("1..9"), or what there is of a kind ("@service/kind")."""

    free: tuple[tuple[str, str, str], ...] = ()
    may_change: tuple[str, ...] = ()
    verbatim: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Holds the account after set-up, and after each command of a solution that was played in it."""

    start: Snapshot
    states: tuple[Snapshot, ...]
    operations: tuple[tuple[str, ...], ...] = ()
    """Operations that each command sent, as "service:Operation"."""
    arguments: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Arguments of these operations."""
    others: tuple[Snapshot, ...] = ()
    """The account as other solutions leave it: a policy between two of them is as good as they are."""
    setup: tuple[Deed, ...] = ()
    """The requests of the set-up, in every account of the task."""

    @property
    def end(self) -> Snapshot:
        """The account as the solution leaves it."""
        return self.states[-1]

    @property
    def deeds(self) -> list[Deed]:
        """The requests of the set-up and of the solution."""
        found = list(self.setup)
        before = self.start
        for state, operations, arguments in zip(self.states, self.operations, self.arguments, strict=False):
            found += deeds_between(before, state, zip(operations, arguments, strict=True))
            before = state
        return found


@dataclass(frozen=True)
class Differences:
    """Holds what keeps an account from its target, in words. ``missing``: what is wanted and not so, ``damage``: what
    was and is not, ``gone``: of it, whole resources that are gone or were made anew; ``openings`` and ``extra``: what
    nobody asked for; ``left``: of it, whole resources that the agent has left behind; ``unkept``: what was asked
    otherwise than by the solution, and is not kept by the simulator."""

    missing: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    unkept: tuple[str, ...] = ()

    @property
    def none(self) -> bool:
        """Whether there is no difference that counts."""
        counted = (self.missing, self.damage, self.gone, self.openings, self.extra, self.left, self.unkept)
        return not any(counted)


@dataclass(frozen=True)
class Verdict:
    """Judges an account. ``held``: the wanted leaves that it holds, ``progress`` their share by parts, in [0, 1];
    ``harms``: what was harmed, as far as an agent has to answer for it."""

    achieved: bool
    progress: float
    harms: frozenset[str]
    differences: Differences
    held: frozenset[str] = frozenset()
    parts: tuple[int, ...] = ()
    """Places of the solution's commands whose part is there."""
    spoilt: frozenset[str] = frozenset()
    """What stands where something is wanted, and is neither that, nor what was there, nor what leads to it."""

    @property
    def only_left(self) -> bool:
        """Whether all is as asked but for what the agent has left behind."""
        found = self.differences
        return bool(found.left) and replace(found, left=(), extra=()).none

    def words(self) -> list[str]:
        """Return, for the author of a task, what keeps it from being achieved."""
        found = self.differences
        named = (("missing", found.missing), ("damaged", found.damage), ("gone or made anew", found.gone))
        named += (("opened", found.openings), ("not asked for", found.extra), ("left behind", found.left))
        named += (("asked otherwise", found.unkept),)
        return [f"{what}: {text}" for what, texts in named for text in texts]


class Goal:
    """Holds what a target asks of every episode of its instance, computed once. ``asks_nothing``: whether the set-up is
    as good as what the solution leaves."""

    def __init__(self, target: Target, freedom: Freedom) -> None:
        self.target = target
        self.freedom = freedom
        self.read = _Reading(target, freedom)
        states = [self.read.leaves(state, {}) for state in (target.start, *target.states)]
        self.first = states[0]
        self.last = states[-1]
        self.passed = set[Leaf]().union(*states)
        """What the solution itself passes through: a trail that is made does not log yet."""
        self.wanted = {("+", leaf) for leaf in self.last - self.first}
        self.wanted |= {("-", leaf) for leaf in self.first - self.last}
        self.parts = _parts(self.wanted, states)
        self.places = {leaf[:2] for _, leaf in self.wanted}
        self._policies = {leaf[:2]: leaf for leaf in self.first if leaf[1].endswith(_POLICY)}
        self._policies |= {leaf[:2]: leaf for leaf in self.last if leaf[1].endswith(_POLICY)}
        self._as_good: dict[tuple[Key, str], list[str]] = {}
        for other in target.others:
            for key, path, value, _ in self.read.leaves(other, {}) - self.last:
                if path.endswith(_POLICY):
                    self._as_good.setdefault((key, path), []).append(value)
        made = {leaf[0] for leaf in self.last} - {leaf[0] for leaf in self.first}
        for key, policies in narrowed_trusts(target.end.resources).items():
            if key in made:
                place = (key, f"AssumeRolePolicyDocument{_POLICY}")
                self._as_good.setdefault(place, []).extend(json.dumps(_without_ids(policy)) for policy in policies)
        self.asks_nothing = {self.meant(leaf) for leaf in self.first} == self.last

    @cached_property
    def settings(self) -> Settings:
        """What set-up and solution sent last of each member of a request."""
        return last_sent(self.target.deeds, member_table())

    @cached_property
    def rights(self) -> tuple[Rights, Rights]:
        """Who may do what before the solution and after it."""
        before, wanted = (
            read_rights(state.resources, lambda text: _TOKEN.sub(r"\1", text))
            for state in (self.target.start, self.target.end)
        )
        return before, wanted

    @cached_property
    def companions(self) -> Companions:
        """The grants that AWS needs for what the solution wires."""
        return companions_of(self.target.end.resources, self.rights[1], lambda text: _TOKEN.sub(r"\1", text))

    def meant(self, leaf: Leaf) -> Leaf:
        """Return a leaf, or where it is a policy that means the same the one that it should be."""
        if not leaf[1].endswith(_POLICY):
            return leaf
        wanted = self._policies.get(leaf[:2])
        if wanted is None or wanted[2] == leaf[2]:
            return leaf
        accepted = [wanted[2], *self._as_good.get(leaf[:2], ())] if wanted in self.last else [wanted[2]]
        between = any(_lies_between(*leaf[:2], low, leaf[2], high) for low in accepted for high in accepted)
        return wanted if between else leaf


class Comparison:
    """Judges the states of one episode, which began with ``start``."""

    def __init__(self, start: Snapshot, goal: Goal) -> None:
        self.goal = goal
        if start == goal.target.start:  # as a rule, because both worlds were made with the same seed
            self._renamed = {token: token for token in _identifying([start])}
        else:
            self._renamed = _matching(start, goal.target.start, {})
        self._before = {_renamed_key(key, self._renamed): serial for key, serial in start.serials.items()}

    def judge(self, end: Snapshot, sent: Sequence[Deed] | None = None) -> Verdict:
        """Return the verdict about an account that these requests led to; None: it keeps whatever it was asked."""
        goal = self.goal
        first = self.goal.first
        last = self.goal.last
        names = _matching(end, goal.target.end, self._renamed)
        names |= {token: f"{OWN}{token}" for token in _identifying([end]) if token not in names}
        now = {goal.meant(leaf) for leaf in goal.read.leaves(end, names)}
        still = list[str]()
        opened = list[str]()
        more = list[str]()
        if now != last:
            rights = read_rights(
                end.resources, lambda text: _TOKEN.sub(lambda match: names.get(match[1], match[1]), text)
            )
            grants = self._grants(now)  # as a rule there are none, and the larger comparison is spared
            beyond = compare_rights(goal.companions.rights if grants else goal.rights[1], rights)
            still, opened, more = self._rights(rights, beyond)
            now = self._without_companions(now, grants, rights, beyond) if grants else now
        held = {(sign, leaf) for sign, leaf in goal.wanted if (leaf in now) == (sign == "+")}
        gone = self._gone(end, names)
        damage = {leaf for leaf in (first & last) - now if leaf[0] not in gone and not self._may_change(leaf[0])}
        openings, disabled, extra, left = self._extras(now, end.said)
        openings = openings + opened
        extra = extra + more
        told = Differences(
            missing=_told([*(f"{sign} {_said(leaf)}" for sign, leaf in goal.wanted - held), *still]),
            damage=_told([*map(_said, damage), *disabled]),
            gone=_told("/".join(key) for key in gone),
            openings=_told(openings),
            extra=_told(extra),
            left=_told("/".join(key) for key in left),
        )
        if told.none and sent is not None:  # of an account that is wrong anyway nobody needs to know it
            told = replace(told, unkept=_told(self._unkept(end, sent, names)))
        return Verdict(
            achieved=told.none,
            progress=_progress([part[1] <= held for part in goal.parts], not told.none),
            harms=frozenset([*told.gone, *told.openings, *told.damage]),
            differences=told,
            held=frozenset(f"{sign} {_said(leaf)}" for sign, leaf in held),
            parts=tuple(command for command, part in goal.parts if part <= held),
            spoilt=frozenset(_said(leaf) for leaf in now - goal.passed if leaf[:2] in goal.places),
        )

    def _unkept(self, end: Snapshot, sent: Sequence[Deed], names: Mapping[str, str]) -> list[str]:
        """Return what was asked otherwise than by the solution and is not kept."""
        others = {mine: its for mine, its in names.items() if mine != its}
        pattern = re.compile("|".join(map(re.escape, sorted(others, key=len, reverse=True))))
        settings = last_sent(
            [*self.goal.target.setup, *sent],
            member_table(),
            (lambda text: pattern.sub(lambda match: others[match[0]], text)) if others else str,
        )
        target = self.goal.target.end.resources
        return sent_otherwise(settings, self.goal.settings, end.resources, target)

    def _gone(self, end: Snapshot, names: Mapping[str, str]) -> set[Key]:
        """Return the resources that set-up and target have, and that are gone or were made anew."""
        there = {_renamed_key(key, names): serial for key, serial in end.serials.items()}
        made = self.goal.target.start.serials
        kept = self.goal.target.end.serials
        return {
            key
            for key, serial in made.items()
            if kept.get(key) == serial and there.get(key) != self._before.get(key)
            if not (is_setting(key) or self._may_change(key))
        }

    def _may_change(self, key: Key) -> bool:
        return any(fnmatchcase("/".join(key), glob) for glob in self.goal.freedom.may_change)

    def _extras(self, now: Set[Leaf], said: str | None) -> tuple[list[str], list[str], list[str], set[Key]]:
        """Return the openings, what disables something of the set-up and other extras that are not harmless, in words,
        and the resources that are left over."""
        goal = self.goal
        before = {(leaf[0][0], leaf[0][2]) for leaf in goal.first}
        made = {leaf[0] for leaf in goal.first}
        known = {leaf[0] for leaf in goal.last} | made
        held: dict[tuple[str, str], set[str]] = {}
        for key in known:
            for name in (key[2], re.split("[/:]", key[2])[-1]):
                held.setdefault((key[0], name), set()).add(key[1])
        users = {key[2] for key in known if key[:2] == ("iam", "users")}
        openings = []
        disabled = []
        extra = []
        own: dict[Key, list[Leaf]] = {}
        for leaf in now - goal.last - goal.first:
            if _is_usual(leaf) and ("s3", "buckets", leaf[0][2]) not in made:
                continue
            if leaf[0] not in known:
                own.setdefault(leaf[0], []).append(leaf)
            elif is_opening(*leaf[:3]):
                (extra if leaf in goal.passed else openings).append(leaf)
            elif (leaf[0][0], leaf[0][2]) in before and is_disabling(*leaf[1:3]):
                disabled.append(leaf)
            elif not only_describes(leaf[0], leaf[1]):
                extra.append(leaf)
        for key, leaves in own.items():
            if key[:2] == ("iam", "access_keys") and any(mentions(leaf[2], users) for leaf in leaves):
                openings += leaves
            elif _is_part(key, held):
                if any(is_opening(*leaf[:3]) for leaf in leaves):
                    openings += leaves
                elif (key[0], key[2]) in before and any(is_disabling(*leaf[1:3]) for leaf in leaves):
                    disabled += leaves
                elif is_setting(key):
                    extra += [leaf for leaf in leaves if not only_describes(*leaf[:2])]
        left: set[Key] = set()
        if own:
            wanted = {leaf[0] for leaf in goal.last} - made
            left = left_over(own, (leaf for leaf in now if leaf[0] in known), wanted, said)
        return [*map(_said, openings)], [*map(_said, disabled)], [*map(_said, extra)], left

    def _grants(self, now: Set[Leaf]) -> dict[Leaf, str]:
        """Return the policies that the target has not and that may be companions, with whose they are."""
        allowed = self.goal.companions
        found = dict[Leaf, str]()
        for leaf in now - self.goal.last:
            key, path = leaf[:2]
            if path.endswith(_POLICY) and key[0] != "iam":
                name = _TOKEN.sub(r"\1", "/".join(filter(None, (*key, path.removesuffix(_POLICY)))))
                if name in allowed.policies:
                    found[leaf] = name
            elif key in allowed.roles and (path.startswith("InlinePolicies/") or path == "AttachedPolicies[]"):
                found[leaf] = allowed.roles[key]
        return found

    def _without_companions(
        self, now: set[Leaf], grants: Mapping[Leaf, str], rights: Rights, beyond: RightsChange
    ) -> set[Leaf]:
        """Return the leaves of an account without those ``grants`` that allow no more than AWS needs for what the
        solution wires; a policy of the target that allows this as well is as in the target."""
        wanted = self.goal.rights[1]
        more = {one.holder for one in beyond.more} | set(beyond.unread)
        less = {one.holder for one in compare_rights(rights, wanted).more}
        places = {(leaf[0], leaf[1]): leaf for leaf in self.goal.last if leaf[1].endswith(_POLICY)}
        given = set[Leaf]()
        added = set[Leaf]()
        for leaf, holder in grants.items():
            key, path = leaf[:2]
            of_role = key[0] == "iam"
            held, known = (one.roles if of_role else one.resources for one in (rights, wanted))
            if holder in more or _denies(held, known, holder):
                continue
            if of_role:
                given.add(leaf)
            elif holder not in less:
                given |= {leaf, (key, "", "{}", 0)} if is_setting(key) else {leaf}
                added |= {places[key, path]} if (key, path) in places else set()
        attached = {leaf[2].strip('"') for leaf in given if leaf[1] == "AttachedPolicies[]"}
        own = {
            key
            for key, path, value, _ in now
            if key[:2] == ("iam", "policies") and path == "Arn"
            if value.strip('"') in attached
        }
        for key in own:
            leaves = {leaf for leaf in now if leaf[0] == key}
            if sum(leaf[1].endswith(_POLICY) for leaf in leaves) == 1:
                given |= leaves - self.goal.last
        return (now - given) | added

    def _rights(self, now: Rights, beyond: RightsChange) -> tuple[list[str], list[str], list[str]]:
        """Return who may do more than in the target: by what was so before, by whatever way it stays so, and who gained
        it since, those who were there before, users and roles that are new, and anybody by a new resource. What else a
        new resource allows is its own matter. Whose rights take too long to be compared counts among the first."""
        keys = {leaf[0] for leaf in self.goal.first | self.goal.last}
        known = {(service, _TOKEN.sub(r"\1", f"{identity}/")) for service, _, identity in keys}
        before, wanted = self.goal.rights
        if now in (wanted, before):
            return [], [], []
        had = compare_rights(before, now)
        more = {one.holder for one in had.more} | set(had.unread)
        found = [one for one in beyond.more if one.holder in more]
        own = [one for one in found if one.new and not _hangs_on(one.holder, known)]
        still = [f"still: {one}" for one in beyond.more if one.holder not in more]
        return (
            [*still, *(f"too much to compare: {holder}" for holder in beyond.unread)],
            [f"{one}" for one in found if one not in own],
            [f"{one}" for one in own if not one.gain.principal or _lets_everybody_in(one.gain)],
        )


def _denies(now: Mapping[str, Policies], wanted: Mapping[str, Policies], holder: str) -> bool:
    """Return whether a holder's policies have a denial that is not wanted."""
    known = wanted.get(holder, Policies()).statements
    return any(not one.allow and one not in known for one in now.get(holder, Policies()).statements)


def _lets_everybody_in(gain: Gain) -> bool:
    """Return whether a gain is for all the world; conditions narrow the policy that a topic has by itself."""
    narrowed = any(not condition.lower().startswith("aws:securetransport ") for condition in gain.conditions)
    return gain.principal in ("*", "AWS:*") and not narrowed


def _hangs_on(holder: str, known: Iterable[tuple[str, str]]) -> bool:
    """Return whether a policy hangs on a resource that is ``known`` by service and identity."""
    service, _, path = holder.partition("/")
    where = f"{path.partition('/')[2]}/"
    return any(service == its and where.startswith(identity) for its, identity in known)


def _is_usual(leaf: Leaf) -> bool:
    """Return whether AWS gives it to every new bucket, and the simulator to none that nobody gave it."""
    key, path, value, _ = leaf
    if key[:2] == ("s3", "bucket_encryption"):
        return (path, value) in (("", "{}"), ("Rule[]", _USUAL_ENCRYPTION))
    return key[:2] == ("s3", "buckets") and path.startswith("_public_access_block/") and value == '"true"'


def _is_part(key: Key, held: Mapping[tuple[str, str], Set[str]]) -> bool:
    """Return whether a resource is called after one of another kind that was ``held``, or lies in it by its name."""
    ends = [match.start() for match in re.finditer("[/:|]", key[2])]
    names = [key[2][:end] for end in (*ends, None)]
    return any(held.get((key[0], name), set()) - {key[1]} for name in names if name not in _OF_AWS)


def _parts(wanted: Set[Wanted], states: Sequence[Set[Leaf]]) -> list[tuple[int, set[Wanted]]]:
    """Return, by the place of the command of the solution that brought them to stay, what is wanted."""
    parts = []
    left = set(wanted)
    for place, before in reversed(list(enumerate(states[:-1]))):
        brought = {(sign, leaf) for sign, leaf in left if (leaf in before) != (sign == "+")}
        left -= brought
        if brought:
            parts.append((place, brought))
    return parts[::-1]


def _lies_between(key: Key, path: str, low: str, found: str, high: str) -> bool:
    """Return whether a policy allows all that one does, and nothing that another does not; with the same policy twice,
    whether it means the same."""
    try:
        documents = [json.loads(text) for text in (low, found, high)]
        if documents[1].get("Version") not in (*_VERSIONS, documents[0].get("Version")):
            return False
        least, there, most = (_rights_by(key, path, document) for document in documents)
        changes = compare_rights(there, least), compare_rights(most, there)
        if low == high:
            return not any(change.changed or change.unread for change in changes)
        return not any(change.more or change.unread for change in changes)
    except (TooManySteps, ValueError, RecursionError):
        return False


def transferred(target: Target, start: Snapshot) -> Target:
    """Return a target as it is in another account: what the solution changes, done to ``start``. Texts that are drawn
    stand for what is most alike there."""
    before = target.start.resources
    names = _matching(target.start, start, {})

    def renamed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {renamed(name): renamed(item) for name, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return (
            _TOKEN.sub(lambda match: f"{DRAWN}{names.get(match[1], match[1])}{END_DRAWN}", value)
            if (isinstance(value, str) and DRAWN in value)
            else value
        )

    def changed(state: Snapshot) -> Snapshot:
        now = dict(start.resources)
        serials = dict(start.serials)
        for key in before.keys() - state.resources.keys():
            now.pop(_renamed_key(key, names), None)
        for key, held in state.resources.items():
            old = before.get(key, {})
            place = _renamed_key(key, names)
            if key in before and old == held:
                continue
            kept = {name: item for name, item in now.get(place, {}).items() if name in held or name not in old}
            more = {name: renamed(item) for name, item in held.items() if old.get(name) != item}
            now[place] = {**kept, **more}
            serials.setdefault(place, state.serials.get(key, 0))
        return Snapshot(now, serials)

    states = tuple(map(changed, target.states))
    others = tuple(map(changed, target.others))
    return replace(target, start=start, states=states, others=others)


def _rights_by(key: Key, path: str, document: Any) -> Rights:
    """Return the rights in an account that holds one policy."""
    if key[0] != "iam":
        return read_rights({key: {"": document}})
    if path.startswith("AssumeRole"):  # of a role, whichever it is
        return read_rights({("iam", "roles", "it"): {"AssumeRolePolicyDocument": document}})
    return read_rights({("iam", "roles", "it"): {"InlinePolicies": {"": document}}})


class _Reading:
    """Reads snapshots as sets of leaves."""

    def __init__(self, target: Target, freedom: Freedom) -> None:
        self._states = (target.start, *target.states)
        self._known = _identifying(self._states)
        self._verbatim = frozenset(freedom.verbatim)
        self._free: dict[str, list[tuple[list[str], str]]] = {}
        for kind, path, values in freedom.free:
            self._free.setdefault(kind, []).append((_steps(path), values))
        # a resource that is as in the target is the same object, as long as ``snapshot`` remembers it
        self._read = {
            id(held): [*_leaves(held, "", Member.of(key))]
            for state in self._states
            for key, held in state.resources.items()
        }

    def leaves(self, snapshot: Snapshot, names: Mapping[str, str]) -> set[Leaf]:
        """Return the leaves, drawn texts by the name that the target has for them."""

        def renamed(match: re.Match[str]) -> str:
            token = names.get(match[1], "" if names else match[1])
            return f"{DRAWN}{token}{END_DRAWN}" if token in self._known or token.startswith(OWN) else _ANY

        counted: Counter[tuple[Key, str, str]] = Counter()
        for key, attributes in snapshot.resources.items():
            place = key if DRAWN not in key[2] else (key[0], key[1], _TOKEN.sub(renamed, key[2]))
            free = [
                (steps, partial(_is_among, values, snapshot))
                for steps, values in self._free.get(f"{key[0]}/{key[1]}", ())
            ]
            counted[place, "", "{}"] += 1
            read = None if free else self._read.get(id(attributes))
            if read is None:
                read = _leaves(_without(attributes, free), "", Member.of(key))
            if f"{key[0]}/{key[1]}" in self._verbatim:
                read = [*read, (_VERBATIM, canonical(attributes, Member.of(key)))]
            for path, value in read:
                if DRAWN in value:
                    value = _TOKEN.sub(renamed, value)
                counted[place, path, value] += 1
        return {(*leaf, number) for leaf, count in counted.items() for number in range(count)}


def _leaves(value: Any, path: str, where: Member) -> Iterator[tuple[str, str]]:
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


def canonical(value: Any, where: Member) -> str:
    """Return the value of a member as text that is the same for what means the same: lists in any order but where it
    has a meaning, and outside of documents numbers and truths as texts, as which some requests have them."""
    if isinstance(value, Mapping):
        if isinstance(value.get("Statement"), list):
            where = replace(where, written=False)
        inner = (f"{json.dumps(name)}:{canonical(value[name], where.inner(name))}" for name in sorted(value))
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
    """Return a policy without the ids of its statements, which permit nothing."""
    statements = [
        {name: item for name, item in one.items() if name != "Sid"} if isinstance(one, Mapping) else one
        for one in policy["Statement"]
    ]
    return {**policy, "Statement": statements}


Choices = Sequence[tuple[list[str], Callable[[str], bool]]]
"""Fields by the steps that lead to them, and whether a value may be chosen there."""


def _without(value: Any, choices: Choices) -> Any:
    """Return a value without the texts, numbers and truths that may be chosen; ``name[]`` goes through a list."""
    if isinstance(value, list):
        left = [(item, _without(item, choices)) for item in value]
        return [kept for item, kept in left if kept or not item]  # what is empty is as good as absent
    if not isinstance(value, Mapping):
        return value
    found = {}
    for name, item in value.items():
        here = [(steps[1:], may) for steps, may in choices if steps[0].removesuffix("[]") in (name, "*")]
        ends = [may for steps, may in here if not steps]
        if isinstance(item, Mapping | list):
            deeper = [(steps, may) for steps, may in here if steps]
            items = [one for one in item if not _is_chosen(one, ends)] if isinstance(item, list) else item
            kept = _without(items, deeper) if deeper else items
            if kept or not item:
                found[name] = kept
        elif not _is_chosen(item, ends):
            found[name] = item
    return found


def _is_chosen(value: Any, choices: Iterable[Callable[[str], bool]]) -> bool:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return not isinstance(value, Mapping | list) and any(may(text) for may in choices)


def _steps(path: str) -> list[str]:
    return [step.strip('"') for step in re.findall(r'"[^"]*"|[^."]+', path)]


def _is_among(values: str, snapshot: Snapshot, text: str) -> bool:
    """Return whether a text is one of the values of a free field."""
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
    """Return whether a resource of the kind ("service/kind") has one of these values at this path."""
    asked = [(_steps(path), partial(_is_among, values, snapshot))]
    found = (attributes for key, attributes in snapshot.resources.items() if kind == f"{key[0]}/{key[1]}")
    return any(_without(attributes, asked) != attributes for attributes in found)


def _tokens(snapshot: Snapshot) -> Iterator[tuple[Key, list[str]]]:
    for key in snapshot.resources:
        if DRAWN in key[2]:
            yield key, _TOKEN.findall(key[2])


def _identifying(snapshots: Iterable[Snapshot]) -> set[str]:
    return {token for snapshot in snapshots for _, tokens in _tokens(snapshot) for token in tokens}


def _renamed_key(key: Key, names: Mapping[str, str]) -> Key:
    if DRAWN not in key[2]:
        return key
    return key[0], key[1], _TOKEN.sub(lambda match: f"{DRAWN}{names.get(match[1], match[1])}{END_DRAWN}", key[2])


def _matching(one: Snapshot, other: Snapshot, names: Mapping[str, str]) -> dict[str, str]:
    """Return ``names`` and, for each further drawn name in ``one``, that of the most similar resources of ``other``."""
    found = dict(names)
    ours = _by_names(one, found)
    theirs = _by_names(other, {its: its for its in found.values()})
    references = (_references(one), _references(other)) if ours and theirs else ({}, {})
    while ours and theirs:
        pairs = _pairs(one, other, ours, theirs, found, references)
        if not pairs:
            break
        for _, mine, its in [pair for pair in pairs if pair[0]] or pairs[:1]:
            if not any(a in found for a in mine) and not set(its) & set(found.values()):
                found.update(zip(mine, its, strict=True))
        ours = _by_names(one, found)
        theirs = _by_names(other, {its: its for its in found.values()})
    return found


def _by_names(snapshot: Snapshot, known: Mapping[str, str]) -> dict[tuple[str, ...], list[Key]]:
    """Return the keys of resources by the drawn names in them that are not ``known``."""
    found: dict[tuple[str, ...], list[Key]] = {}
    for key, tokens in _tokens(snapshot):
        open_ = tuple(dict.fromkeys(token for token in tokens if token not in known))
        if len(open_) == 1:  # what lies in something is matched after it
            found.setdefault(open_, []).append(key)
    return found


def _pairs(
    one: Snapshot,
    other: Snapshot,
    ours: Mapping[tuple[str, ...], list[Key]],
    theirs: Mapping[tuple[str, ...], list[Key]],
    names: Mapping[str, str],
    references: tuple[References, References],
) -> list[tuple[bool, tuple[str, ...], tuple[str, ...]]]:
    """Return (whether each is without a doubt the best for the other, names, names), the most alike first."""
    back = {its: its for its in names.values()}
    mine = {its: _skeletons(one, keys, names) for its, keys in ours.items()}
    their = {its: _skeletons(other, keys, back) for its, keys in theirs.items()}
    named = {its: _named_by(references[0], its[0], names) for its in ours}
    others_named = {its: _named_by(references[1], its[0], back) for its in theirs}
    scored = []
    for a, records in mine.items():
        for b, others in their.items():
            shared = records.keys() & others.keys()
            if shared and len(a) == len(b) and not any(_named_otherwise(records[key], others[key]) for key in shared):
                alike = sum(sum((records[key] & others[key]).values()) for key in shared)
                alike += sum((named[a] & others_named[b]).values())
                scored.append((alike * 1000 - abs(len(records) - len(others)), a == b, a, b))
    scored.sort(key=lambda pair: (-pair[0], not pair[1], pair[2], pair[3]))
    best: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for score, _, a, b in scored:
        best.setdefault((True, a), []).append(score)
        best.setdefault((False, b), []).append(score)
    return [
        (all(scores[0] == score and scores[1:2] != [score] for scores in (best[True, a], best[False, b])), a, b)
        for score, _, a, b in scored
    ]


def _references(snapshot: Snapshot) -> References:
    """Return, by drawn name, the leaves of other resources that have it."""
    found: dict[str, list[tuple[Key, str, str]]] = {}
    for key, attributes in snapshot.resources.items():
        own = set(_TOKEN.findall(key[2]))
        for path, value in _leaves(attributes, "", Member.of(key)):
            if DRAWN in value:
                for token in set(_TOKEN.findall(value)) - own:
                    found.setdefault(token, []).append((key, path, value))
    return found


def _named_by(references: References, token: str, names: Mapping[str, str]) -> Counter[tuple[Key, str, str]]:
    """Return what refers to a drawn name, as ``_skeleton`` does but for the name itself."""
    told = {**names, token: OWN}
    return Counter(
        (_blank(key, names), path, _TOKEN.sub(lambda match: told.get(match[1], ""), value))
        for key, path, value in references.get(token, ())
    )


def _named_otherwise(one: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> bool:
    """Return whether two resources bear different names, given by whoever made them."""
    names, others = (
        {_NAME_TAG if value.startswith(_NAME_TAG) else path: value for path, value in leaves if _names(path, value)}
        for leaves in (one, other)
    )
    return any(names[path] != others[path] for path in names.keys() & others.keys())


def _names(path: str, value: str) -> bool:
    return _NAME.search(path) is not None or value.startswith(_NAME_TAG)


def _blank(key: Key, names: Mapping[str, str]) -> Key:
    """Return a key with the known drawn names in it by their counterparts, and others as one."""
    return key[0], key[1], _TOKEN.sub(lambda match: names.get(match[1], ""), key[2])


def _skeletons(
    snapshot: Snapshot, keys: Iterable[Key], names: Mapping[str, str]
) -> dict[Key, Counter[tuple[str, str]]]:
    """Return the leaves of resources with the drawn texts that have a counterpart by its name, and others as one."""

    def named(text: str) -> str:
        return _TOKEN.sub(lambda match: names.get(match[1], ""), text)

    return {
        _blank(key, names): Counter(
            (path, named(value)) for path, value in _leaves(snapshot.resources[key], "", Member.of(key))
        )
        for key in keys
    }


def _progress(parts: Sequence[bool], wrong: bool) -> float:
    """Return the share of parts that hold completely; nothing is complete while anything is wrong."""
    share = sum(parts) / len(parts) if parts else 0.0
    return min(share, (len(parts) - 0.5) / len(parts)) if wrong and parts else share


def _said(leaf: Leaf) -> str:
    key, path, value, number = leaf
    more = f" (no. {number + 1})" if number else ""
    text = f"{'/'.join(key)} {path} = {value[:300]}{more}"
    return text.replace(DRAWN, "").replace(END_DRAWN, "")


def _told(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(texts))
