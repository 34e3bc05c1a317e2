"""Decides what an IAM policy permits, whatever way it is written.

``parse_policy`` brings a document to one form: a statement or a list of them, names as text or list, principals in
every notation, ``NotAction`` and its kin. ``allows`` answers for one request as AWS does: an explicit deny wins, what
nobody allows is refused. ``exceeds`` finds a request that is allowed although no wanted ``Grant`` covers it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

FRESH = "\ufffb\ufffb\ufffb"
"""Stands for any text that nobody has named; a ``*`` takes it, a name and a ``?`` do not."""
MOST_REQUESTS = 4_000
"""Most requests that ``exceeds`` examines; a policy that needs more counts as too wide."""
MOST_COMPARISONS = 100_000
"""Most comparisons (requests times patterns) of ``exceeds``, a fraction of a second's work; a policy that needs more
counts as too wide."""
MOST_CHARACTERS, LONGEST_NAME = 20_480, 2_048
"""Longest policy and longest ARN, in characters, as AWS limits them."""
_ANYTHING = ("*",)
_ALWAYS: Mapping[str, str] = MappingProxyType({"aws:securetransport": "true"})
"""Condition values that every request has."""
_STATEMENT_KEYS = frozenset(
    {"Sid", "Effect", "Principal", "NotPrincipal", "Action", "NotAction", "Resource", "NotResource", "Condition"}
)
_PRINCIPAL_KINDS = frozenset({"AWS", "Service", "Federated", "CanonicalUser"})


class PolicyError(ValueError):
    """AWS would not take a document as a policy."""


@dataclass(frozen=True)
class Names:
    """Describes a set of names: those that match one of the patterns, or, ``inverted``, all others."""

    patterns: tuple[str, ...] = _ANYTHING
    inverted: bool = False

    def has(self, name: str) -> bool:
        """Return whether the set contains ``name``."""
        return any(matches(pattern, name) for pattern in self.patterns) is not self.inverted


@dataclass(frozen=True)
class Request:
    """Describes what somebody may ask for. ``principal`` is canonical: "Service:lambda.amazonaws.com", "AWS:arn:...";
    "" where the policy belongs to an identity. ``action`` is in lower case; ``context`` holds condition keys in lower
    case."""

    principal: str
    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Statement:
    """Holds one statement. A part that is not written restricts nothing."""

    allow: bool
    principals: Names = Names()
    actions: Names = Names()
    resources: Names = Names()
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()

    @property
    def size(self) -> int:
        """Return how many patterns and condition values are compared with a request at most."""
        names = len(self.principals.patterns) + len(self.actions.patterns) + len(self.resources.patterns)
        return names + sum(1 + len(values) for *_, values in self.conditions)

    def applies(self, request: Request, *, unknown: bool = False, known: Set[str] | None = None) -> bool:
        """Return whether the statement is about the request. A condition that is not understood counts as ``unknown``,
        and so does one on a key that the request has no value of, unless the key is ``known`` (None: all are)."""
        return (
            (not request.principal or self.principals.has(request.principal))
            and self.actions.has(request.action)
            and self.resources.has(request.resource)
            and all(_condition_met(*condition, request.context, unknown, known) for condition in self.conditions)
        )


@dataclass(frozen=True)
class Grant:
    """Describes requests that a policy should allow or refuse: each principal for each action on each resource,
    patterns all of them. Without principals the grant is for anybody. ``context``: condition values that such requests
    come with, "*" where any value that a policy asks for is the right one."""

    principals: tuple[str, ...] = ()
    actions: tuple[str, ...] = _ANYTHING
    resources: tuple[str, ...] = _ANYTHING
    context: Mapping[str, str] = field(default_factory=dict)

    def requests(self) -> Iterator[Request]:
        """Yield one request of every kind that the grant names."""
        for parts in itertools.product(self.principals or ("",), self.actions, self.resources):
            who, what, where = map(_example, parts)
            yield Request(who, what, where, self.context)

    def covers(self, request: Request) -> bool:
        """Return whether a policy that allows the request keeps to this grant."""
        return (
            (not self.principals or any(matches(pattern, request.principal) for pattern in self.principals))
            and any(matches(pattern, request.action) for pattern in self.actions)
            and any(matches(pattern, request.resource) for pattern in self.resources)
        )


def parse_policy(document: Any, owner: str = "") -> tuple[Statement, ...]:
    """Parse the statements of a policy, given as an object or as its JSON text. ``owner`` is the ARN of the resource
    that the policy hangs on; there ``*`` means no more than that resource. Raises PolicyError."""
    try:
        text = document if isinstance(document, str) else json.dumps(document, default=str)
        document = json.loads(text) if len(text) <= MOST_CHARACTERS else None
    except (ValueError, RecursionError):
        raise PolicyError("the policy is not JSON") from None
    if not isinstance(document, Mapping):
        raise PolicyError("the policy is no object, or longer than AWS permits")
    statements = document.get("Statement")
    if isinstance(statements, Mapping):
        statements = [statements]
    if not isinstance(statements, list) or not statements:
        raise PolicyError("the policy has no statement")
    return tuple(_statement(entry, owner) for entry in statements)


def parse_grant(data: Mapping[str, Any]) -> Grant:
    """Parse a grant as a task writes it: ``principal`` in the notation of policies, or a bare service name or ARN;
    ``action`` and ``resource``, each a text or a list; ``context`` of condition keys. Raises PolicyError."""
    unknown = set(data) - {"principal", "action", "resource", "context"}
    if unknown:
        raise PolicyError(f"a grant has the unknown key {sorted(unknown)[0]!r}")
    context = data.get("context") or {}
    if not isinstance(context, Mapping) or not all(isinstance(value, str) for value in context.values()):
        raise PolicyError("the context of a grant maps condition keys to texts")
    return Grant(
        principals=_wanted_principals(data["principal"]) if data.get("principal") is not None else (),
        actions=tuple(action.lower() for action in _texts(data.get("action", "*"))),
        resources=_texts(data.get("resource", "*")),
        context={str(key).lower(): value for key, value in context.items()},
    )


def allows(statements: Sequence[Statement], request: Request) -> bool:
    """Return whether the policy lets the request through; conditions that are not understood count against it."""
    return any(one.allow and one.applies(request) for one in statements) and not any(
        not one.allow and one.applies(request, unknown=True) for one in statements
    )


def exceeds(statements: Sequence[Statement], grants: Sequence[Grant]) -> Request | None:
    """Return a request that the policy allows and no grant covers, or None.

    Each pattern of the statements and the grants is tried with something that nobody named in place of its wildcards,
    so no list of AWS's actions is needed. Conditions narrow nothing here: who and what a policy is about does not
    depend on when.
    """
    actors = {"AWS:" + FRESH, "Service:" + FRESH, ""}
    actors |= {_example(p) for names in (one.principals for one in statements) for p in names.patterns}
    actions = {FRESH} | {_example(pattern) for one in statements for pattern in one.actions.patterns}
    resources = {FRESH} | {_example(pattern) for one in statements for pattern in one.resources.patterns}
    for grant in grants:
        actors |= {_example(pattern) for pattern in grant.principals}
        actions |= {_example(pattern) for pattern in grant.actions}
        resources |= {_example(pattern) for pattern in grant.resources}
    if not any(grant.principals for grant in grants):
        actors = {""}
    else:
        actors -= {"", FRESH}
    requests = len(actors) * len(actions) * len(resources)
    if requests > MOST_REQUESTS or requests * sum(one.size for one in statements) > MOST_COMPARISONS:
        return Request(FRESH, FRESH, FRESH)
    for who, what, where in itertools.product(sorted(actors), sorted(actions), sorted(resources)):
        request = Request(who, what, where)
        if may_allow(statements, request) and not any(grant.covers(request) for grant in grants):
            return request
    return None


def matches(pattern: str, text: str) -> bool:
    """Return whether the text fits a pattern of ``*`` (anything) and ``?`` (one character). No pattern that an agent
    could write takes long: the pieces between the stars are sought one after the other, never again."""
    first, *rest = pattern.split("*")
    if not rest:
        return len(text) == len(first) and _piece(first).match(text) is not None
    found = _piece(first).match(text)
    position = found.end() if found else -1
    for piece in rest[:-1]:
        found = _piece(piece).search(text, position) if position >= 0 else None
        position = found.end() if found else -1
    start = len(text) - len(rest[-1])
    return 0 <= position <= start and _piece(rest[-1]).match(text, start) is not None


@functools.lru_cache(maxsize=4096)
def _piece(piece: str) -> re.Pattern[str]:
    """Compile a pattern without stars; FRESH text matches no single character."""
    return re.compile("".join(f"[^{FRESH[0]}]" if char == "?" else re.escape(char) for char in piece), re.DOTALL)


def may_allow(statements: Sequence[Statement], request: Request, known: Set[str] = frozenset()) -> bool:
    """Return whether the policy could let the request through: conditions that are not understood count as met by what
    is allowed and as not met by what is denied. So do conditions on keys that the request has no value of, for a call
    may come with any; only of the ``known`` keys it is certain that such a request comes without them."""
    return any(one.allow and one.applies(request, unknown=True, known=known) for one in statements) and not any(
        not one.allow and one.applies(request, known=known) for one in statements
    )


def _example(pattern: str) -> str:
    """Return a text that fits the pattern and, as far as possible, no narrower one."""
    return pattern.replace("*", FRESH).replace("?", FRESH[:1])


def _statement(entry: Any, owner: str) -> Statement:
    if not isinstance(entry, Mapping):
        raise PolicyError("a statement is no object")
    unknown = set(entry) - _STATEMENT_KEYS
    if unknown:
        raise PolicyError(f"a statement has the unknown key {sorted(map(str, unknown))[0]!r}")
    if entry.get("Effect") not in ("Allow", "Deny"):
        raise PolicyError("the effect of a statement is neither Allow nor Deny")
    if ("Action" in entry) == ("NotAction" in entry):
        raise PolicyError("a statement names either Action or NotAction")
    actions, resources = _names(entry, "Action", _texts), _names(entry, "Resource", _texts)
    if owner and not resources.inverted:
        resources = Names(tuple(owner if pattern == "*" else pattern for pattern in resources.patterns))
    return Statement(
        allow=entry["Effect"] == "Allow",
        principals=_names(entry, "Principal", _principals),
        actions=Names(tuple(action.lower() for action in actions.patterns), actions.inverted),
        resources=resources,
        conditions=tuple(_conditions(entry.get("Condition") or {})),
    )


def _names(entry: Mapping[str, Any], key: str, read: Any) -> Names:
    if key in entry and f"Not{key}" in entry:
        raise PolicyError(f"a statement names both {key} and Not{key}")
    if f"Not{key}" in entry:
        return Names(read(entry[f"Not{key}"]), inverted=True)
    return Names(read(entry[key])) if key in entry else Names()


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values or not all(isinstance(item, str) for item in values):
        raise PolicyError("a part of a statement is neither a text nor a list of texts")
    if any(len(item) > LONGEST_NAME or FRESH[0] in item for item in values):
        raise PolicyError("a name in a statement is longer than an ARN or holds what no name holds")
    return tuple(dict.fromkeys(values))


def _principals(value: Any) -> tuple[str, ...]:
    """Return the canonical principals of ``"*"``, ``"arn"``, a list, or ``{"AWS": ..., "Service": ...}``."""
    if not isinstance(value, Mapping):
        value = {"AWS": value}
    if not value or not set(value) <= _PRINCIPAL_KINDS:
        raise PolicyError("a principal is of an unknown kind")
    found: list[str] = []
    for kind, names in value.items():
        for name in _texts(names):
            if kind == "AWS" and name == "*":
                found.append("*")
            elif kind == "AWS" and name.isdigit():
                found.append(f"AWS:arn:aws:iam::{name}:root")
            else:
                found.append(f"{kind}:{name}")
    return tuple(dict.fromkeys(found))


def _wanted_principals(value: Any) -> tuple[str, ...]:
    """Return what ``_principals`` does; besides, a bare name that ends in .amazonaws.com is a service."""
    if isinstance(value, Mapping):
        return _principals(value)
    found = [_principals({"Service" if name.endswith(".amazonaws.com") else "AWS": name}) for name in _texts(value)]
    return tuple(itertools.chain.from_iterable(found))


def _conditions(data: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (operator, key, values), operator and key in lower case."""
    if not isinstance(data, Mapping):
        raise PolicyError("a condition is no object")
    for operator, keys in data.items():
        if not isinstance(keys, Mapping):
            raise PolicyError("a condition's operator holds no object")
        for key, values in keys.items():
            listed: Iterable[Any] = values if isinstance(values, list) else [values]
            yield str(operator).lower(), str(key).lower(), tuple(_condition_text(value) for value in listed)


def _condition_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


def _condition_met(
    operator: str,
    key: str,
    values: tuple[str, ...],
    context: Mapping[str, str],
    unknown: bool,
    known: Set[str] | None,
) -> bool:
    """Operators on texts, ARNs and truth values. Of a key that is known to have no value, negated conditions and
    ``IfExists`` are met, and where ``unknown`` is, patterns that ask for no more than that there is one."""
    optional = operator.endswith("ifexists")
    operator = operator.removesuffix("ifexists")
    negated = "not" in operator
    kind = operator.replace("not", "")
    if kind not in ("stringequals", "stringequalsignorecase", "stringlike", "arnequals", "arnlike", "bool"):
        return unknown
    found = context.get(key, _ALWAYS.get(key))
    if found == "*":
        return True
    if found is None and known is not None and key not in known:
        return unknown
    if found is None:
        likes = known is not None and unknown and kind.endswith("like")
        return negated or optional or (likes and any(not value.strip("*?") for value in values))
    if kind in ("bool", "stringequalsignorecase"):
        return (found.lower() in {value.lower() for value in values}) is not negated
    if kind == "stringequals":
        return (found in values) is not negated
    return any(matches(value, found) for value in values) is not negated
