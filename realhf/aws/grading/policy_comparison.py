"""Parser of IAM policies, and comparison of policies by meaning instead of wording.

Patterns are those of IAM: ``*`` matches any text, ``?`` one character. ``combinations`` finds the
sets of patterns that a name can match: it returns each set that some name matches exactly, with an
example name. If two expressions over the patterns are equal for the example names, they are equal
for all names. This is exact: the patterns run side by side as automata over all texts, and texts
that lead to the same state are equivalent.

``compare_policies`` tests one request of every kind that the policies of either side distinguish.
``combinations`` chooses the principals, actions and resources that represent all others; conditions
are compared as formulas.

Guaranteed: policies that are reported as equal answer every request alike, and every gain is
listed. Without conditions and policy variables the reverse holds as well: policies that answer
alike are reported as equal. With conditions or variables, two ways to write the same policy may be
reported as different. The comparison knows three facts about conditions: a list of values means any
of them (none of them if negated), an exact value satisfies the patterns that it matches, and a key
has one value. It does not know which actions a service has or on which resources, so ``*`` on a
bucket allows more than ``s3:*`` on it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_CHARACTERS = 20_480
MAX_NAME_LENGTH = 2_048
"""Maximum length of a policy and of an ARN, in characters, as limited by AWS."""
_ANYTHING = ("*",)
_STATEMENT_KEYS = frozenset(
    {
        "Sid",
        "Effect",
        "Principal",
        "NotPrincipal",
        "Action",
        "NotAction",
        "Resource",
        "NotResource",
        "Condition",
    }
)
_PRINCIPAL_KINDS = frozenset({"AWS", "Service", "Federated", "CanonicalUser"})


class PolicyError(ValueError):
    """A document is not a policy that AWS would accept."""


@dataclass(frozen=True)
class Names:
    """A set of names: those that match one of the patterns or, if ``inverted``, all that match
    none."""

    patterns: tuple[str, ...] = _ANYTHING
    """IAM patterns."""
    inverted: bool = False
    """Whether the set consists of the names that match none of the patterns."""

    def has(self, name: str) -> bool:
        """Return whether the set contains ``name``."""
        return any(matches(pattern, name) for pattern in self.patterns) is not self.inverted


@dataclass(frozen=True)
class Statement:
    """One statement of a policy. An absent part restricts nothing."""

    allow: bool
    """Whether the effect is Allow; otherwise it is Deny."""
    principals: Names = Names()
    """Principals as "kind:name", or "*" for everybody."""
    actions: Names = Names()
    """Actions as "service:action" in lower case."""
    resources: Names = Names()
    """ARNs of the resources."""
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Conditions as (operator, key, values); operator and key are in lower case."""


def parse_policy(document: Any) -> tuple[Statement, ...]:
    """Parse the statements of a policy, given as an object or as JSON text. Raises PolicyError."""
    try:
        text = document if isinstance(document, str) else json.dumps(document, default=str)
        document = json.loads(text) if len(text) <= MAX_CHARACTERS else None
    except (ValueError, RecursionError):
        raise PolicyError("the policy is not JSON") from None
    if not isinstance(document, Mapping):
        raise PolicyError("the policy is not an object, or longer than AWS permits")
    statements = document.get("Statement")
    if isinstance(statements, Mapping):
        statements = [statements]
    if not isinstance(statements, list) or not statements:
        raise PolicyError("the policy has no statement")
    return tuple(map(_parse_statement, statements))


def matches(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern, in which ``*`` stands for any text and ``?`` for one
    character.

    The pieces between the stars are searched one after the other, so no pattern causes
    backtracking.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return len(text) == len(first) and _compile_piece(first).match(text) is not None
    match = _compile_piece(first).match(text)
    position = match.end() if match else -1
    for piece in rest[:-1]:
        match = _compile_piece(piece).search(text, position) if position >= 0 else None
        position = match.end() if match else -1
    start = len(text) - len(rest[-1])
    return 0 <= position <= start and _compile_piece(rest[-1]).match(text, start) is not None


@functools.lru_cache(maxsize=4096)
def _compile_piece(piece: str) -> re.Pattern[str]:
    """Return a pattern without stars as a regular expression."""
    return re.compile("".join("." if char == "?" else re.escape(char) for char in piece), re.DOTALL)


def _parse_statement(entry: Any) -> Statement:
    """Parse one statement. Raises PolicyError."""
    if not isinstance(entry, Mapping):
        raise PolicyError("a statement is not an object")
    unknown = set(entry) - _STATEMENT_KEYS
    if unknown:
        raise PolicyError(f"a statement has the unknown key {sorted(map(str, unknown))[0]!r}")
    if entry.get("Effect") not in ("Allow", "Deny"):
        raise PolicyError("the effect of a statement is neither Allow nor Deny")
    if ("Action" in entry) == ("NotAction" in entry):
        raise PolicyError("a statement names either Action or NotAction")
    actions = _parse_names(entry, "Action", _parse_texts)
    return Statement(
        allow=entry["Effect"] == "Allow",
        principals=_parse_names(entry, "Principal", _parse_principals),
        actions=Names(tuple(action.lower() for action in actions.patterns), actions.inverted),
        resources=_parse_names(entry, "Resource", _parse_texts),
        conditions=tuple(_parse_conditions(entry.get("Condition") or {})),
    )


def _parse_names(entry: Mapping[str, Any], key: str, read: Any) -> Names:
    """Return the names in the part ``key`` or ``Not<key>`` of a statement. ``read`` parses the
    part's value. Raises PolicyError."""
    if key in entry and f"Not{key}" in entry:
        raise PolicyError(f"a statement names both {key} and Not{key}")
    if f"Not{key}" in entry:
        return Names(read(entry[f"Not{key}"]), inverted=True)
    return Names(read(entry[key])) if key in entry else Names()


def _parse_texts(value: Any) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple without duplicates. Raises PolicyError."""
    values = [value] if isinstance(value, str) else value
    if (
        not isinstance(values, list | tuple)
        or not values
        or not all(isinstance(item, str) for item in values)
    ):
        raise PolicyError("a part of a statement is neither a string nor a list of strings")
    if any(len(item) > MAX_NAME_LENGTH for item in values):
        raise PolicyError("a name in a statement is longer than an ARN")
    return tuple(dict.fromkeys(values))


def _parse_principals(value: Any) -> tuple[str, ...]:
    """Return the principals as "kind:name", or "*" for everybody. AWS accepts them as ``"*"``,
    ``"arn"``, a list, or ``{"AWS": ..., "Service": ...}``. Raises PolicyError."""
    if not isinstance(value, Mapping):
        value = {"AWS": value}
    if not value or not set(value) <= _PRINCIPAL_KINDS:
        raise PolicyError("a principal is of an unknown kind")
    principals: list[str] = []
    for kind, names in value.items():
        for name in _parse_texts(names):
            if kind == "AWS" and name == "*":
                principals.append("*")
            elif kind == "AWS" and name.isdigit():
                principals.append(f"AWS:arn:aws:iam::{name}:root")
            else:
                principals.append(f"{kind}:{name}")
    return tuple(dict.fromkeys(principals))


def _parse_conditions(data: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each condition as (operator, key, values), operator and key in lower case. Raises
    PolicyError."""
    if not isinstance(data, Mapping):
        raise PolicyError("a condition is not an object")
    for operator, keys in data.items():
        if not isinstance(keys, Mapping):
            raise PolicyError("the value of a condition's operator is not an object")
        for key, values in keys.items():
            listed: Iterable[Any] = values if isinstance(values, list) else [values]
            yield (
                str(operator).lower(),
                str(key).lower(),
                tuple(_condition_text(value) for value in listed),
            )


def _condition_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


MIN_STEPS = 256
"""Minimum cost of one call of ``combinations``, in steps."""
_STEP_BITS = 512
"""Number of pattern characters that one step covers; larger sets of patterns cost more steps."""
_SPARE = string.ascii_lowercase + string.digits + "".join(map(chr, range(0xE000, 0xF8FF)))
"""Candidates for the character that stands for all characters that occur in no pattern."""


class TooManySteps(Exception):
    """A comparison exceeded its step budget. Its input may have been written to be expensive."""


class Budget:
    """Number of steps that a comparison may still take; a step takes about a microsecond."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Subtract ``steps``. Raises TooManySteps if the budget is exhausted."""
        self.left -= steps
        if self.left < 0:
            raise TooManySteps


def combinations(patterns: Sequence[str], budget: Budget) -> dict[int, str]:
    """Return each set of patterns that some non-empty name matches exactly, with an example name.

    A set is an integer whose bit i stands for ``patterns[i]``. Raises TooManySteps.

    Whether a pattern with a policy variable (``${aws:username}``) matches depends on the variable's
    value. So for each set that contains such a pattern, the set without it is returned too.
    Relations between such patterns are ignored: the result may contain sets that no name matches
    exactly, but it never lacks one that some name does.
    """
    budget.spend(MIN_STEPS)
    plain = [re.sub(r"\$\{[^}]*\}", "*", pattern) for pattern in patterns]
    simple = all("?" not in pattern and "*" not in pattern[:-1] for pattern in plain)
    names = dict((_combine_prefixes if simple else _combine_patterns)(plain, budget))
    for bit in [1 << number for number, pattern in enumerate(patterns) if "${" in pattern]:
        budget.spend(2 * len(names))
        names |= {
            mask & ~bit: name
            for mask, name in names.items()
            if mask & bit and mask & ~bit not in names
        }
    return names


def _combine_prefixes(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Yield the combinations of patterns whose only wildcard is a star at the end.

    Which of these patterns a name matches depends only on its longest common prefix with them. So
    it is enough to test the exact names, and each prefix with a spare character appended.
    """
    whole: dict[str, int] = {}
    starts: dict[str, int] = {"": 0}
    for number, pattern in enumerate(patterns):
        of, text = (starts, pattern[:-1]) if pattern.endswith("*") else (whole, pattern)
        of[text] = of.get(text, 0) | 1 << number
    spare = _spare_character(patterns)
    lengths = sorted({len(text) for text in starts})
    budget.spend((len(starts) + len(whole)) * len(lengths) * (1 + len(patterns) // _STEP_BITS))
    for name in [text + spare for text in starts] + [text for text in whole if text]:
        mask = whole.get(name, 0)
        for length in lengths:
            mask |= starts.get(name[:length], 0) if length <= len(name) else 0
        yield mask, name


def _combine_patterns(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Yield the combinations of arbitrary patterns, by a breadth-first search of their joint
    automaton.

    A state is the set of positions that the patterns have reached, one bit per position. The next
    character is one that a pattern has at one of these positions, or a spare one that stands for
    all others.
    """
    letters: dict[int, str] = {}  # bit of a position -> character that leads to the next position
    loops = ends = anything = start = named = 0
    steps: dict[str, int] = {}  # character -> positions from which it leads to the next one
    owners: dict[int, int] = {}  # bit of a pattern's last position -> bit of the pattern
    place = 1
    for number, pattern in enumerate(patterns):
        start |= place
        for char in pattern:
            if char == "*":
                loops |= place
                continue
            if char == "?":
                anything |= place
            else:
                letters[place] = char
                named |= place
                steps[char] = steps.get(char, 0) | place
            place <<= 1
        ends |= place
        owners[place] = 1 << number
        place <<= 1
    start |= place  # a unique position, so that no text leads back to the initial state
    spare = _spare_character(patterns)
    cost = 1 + place.bit_length() // _STEP_BITS
    origins: dict[int, tuple[int, str]] = {start: (0, "")}
    waiting = [start]
    seen: set[int] = set()
    for state in waiting:  # grows during the loop (breadth-first), so shorter names come first
        budget.spend(cost + state.bit_count())
        live = state & ends
        mask = 0
        while live:
            mask |= owners[live & -live]
            live &= live - 1
        if state != start and mask not in seen:
            seen.add(mask)
            yield mask, _spell_name(origins, state)
        nexts = {spare}
        live = state & named
        while live:
            nexts.add(letters[live & -live])
            live &= live - 1
        for char in sorted(nexts):
            budget.spend(cost)
            after = (state & (steps.get(char, 0) | anything)) << 1 | state & loops
            if after not in origins:
                origins[after] = state, char
                waiting.append(after)


def _spell_name(origins: Mapping[int, tuple[int, str]], state: int) -> str:
    """Return the text that leads from the initial state to ``state``. ``origins``: the predecessor
    of each state, and the character between the two."""
    chars: list[str] = []
    while (step := origins[state])[1]:
        state = step[0]
        chars.append(step[1])
    return "".join(reversed(chars))


def _spare_character(patterns: Sequence[str]) -> str:
    """Return a character that occurs in none of the patterns."""
    used = set("".join(patterns))
    return next(char for char in _SPARE if char not in used)


Atom = tuple[str, str, tuple[str, ...]]
"""One condition: (operator, key, values)."""
Term = frozenset[Atom]
"""A conjunction of conditions: it is satisfied if all of them are."""
AccessRequest = tuple[str, str, str]
"""One request: (principal, action, resource)."""
_MAX_TERMS = 16
"""Maximum number of terms into which the value lists of one statement are expanded."""
_ACTIONS: Mapping[str, str] = {
    service: f"{service}:*"
    for service in ("sqs", "sns", "s3", "lambda", "kms", "ecr", "secretsmanager")
} | {"iam": "sts:*"}
"""Pattern of the actions that a resource's policy can be about, by service. For "iam" the policy is
a role's trust policy, because a role can only be assumed."""
_BELOW: Mapping[str, str] = {"s3": "/*", "lambda": ":*"}
"""Suffix of the ARNs of a resource's parts that are subject to its policy, such as the objects of a
bucket, by service."""
_ONE_OF = frozenset(
    {"stringequals", "stringlike", "arnequals", "arnlike", "ipaddress", "numericequals", "bool"}
)
"""Operators that hold if any of the values matches."""
_NONE_OF = frozenset(
    {"stringnotequals", "stringnotlike", "arnnotequals", "arnnotlike", "notipaddress"}
)
"""Operators that hold if none of the values matches."""
_OPTIONAL = "ifexists"
"""Suffix of operators that also hold if the key is absent."""
_TLS = "aws:securetransport"
"""Condition key by which a policy requires TLS."""


@dataclass(frozen=True)
class Policies:
    """All policies that determine the rights of one identity, or the access to one resource."""

    statements: tuple[Statement, ...] = ()
    """The statements of all the policies."""
    boundary: tuple[Statement, ...] | None = None
    """The statements of the permission boundary, or None if there is none."""
    owner: str = ""
    """ARN of the resource that the policies are attached to, or "" for an identity. If it is set,
    only requests for that resource count."""


@dataclass(frozen=True)
class Gain:
    """Access that a statement allows now and that was not allowed before."""

    principal: str
    """The statement's principal pattern."""
    action: str
    """The statement's action pattern."""
    resource: str
    """The statement's resource pattern."""
    conditions: tuple[str, ...]
    """The conditions under which the access is new, as strings."""
    example: AccessRequest
    """An example of a request that is newly allowed."""

    def __str__(self) -> str:
        where = f" where {' and '.join(self.conditions)}" if self.conditions else ""
        return f"{self.action} on {self.resource}{where}"


@dataclass(frozen=True)
class PolicyDifference:
    """The difference between two sets of policies."""

    equal: bool = True
    """Whether the two sets allow and deny the same requests. A request that no statement matches
    does not count as denied, because another policy may allow it."""
    gains: tuple[Gain, ...] = ()
    """New access: one gain for each statement that allows something new."""
    loses: bool = False
    """Whether some request is no longer allowed."""


def compare_policies(before: Policies, after: Policies, budget: Budget) -> PolicyDifference:
    """Return the difference between two sets of policies. Raises TooManySteps.

    If ``before`` has no condition about TLS, a requirement of TLS in ``after`` is ignored.
    """
    if before == after:
        return PolicyDifference()
    equal = True
    loses = False
    gains: dict[Statement, Gain] = {}
    for kind in _request_kinds(before, after, budget):
        old = kind.before
        new = kind.after
        if old == new:
            continue
        equal = equal and all(
            kind.implies(first.deny, second.deny)
            and kind.implies(first.deny + first.allow, second.deny + second.allow)
            for first, second in ((old, new), (new, old))
        )
        loses = loses or any(kind.find_gain(term, new, old) is not None for term in old.allow)
        for term in new.allow:
            granted = kind.find_gain(term, old, new)
            if granted is not None:
                source = next(
                    one for one in kind.sources if any(part <= term for part in one.terms)
                )
                gains.setdefault(source.statement, _build_gain(source, granted, kind.request))
    return PolicyDifference(equal, tuple(gains.values()), loses)


@dataclass(frozen=True)
class _Clause:
    """A statement with its conditions expanded: it applies if one of its ``terms`` is satisfied."""

    statement: Statement
    """The statement."""
    principals: Names
    """The statement's principals and the identities that belong to them, such as the sessions of a
    role."""
    terms: tuple[Term, ...]
    """Alternative sets of conditions; one of them must be satisfied."""

    @property
    def allow(self) -> bool:
        """Whether the effect is Allow; otherwise it is Deny."""
        return self.statement.allow


class _Conditions:
    """Implications between the conditions in a set of clauses."""

    def __init__(self, clauses: Sequence[_Clause], budget: Budget) -> None:
        atoms = {atom for clause in clauses for term in clause.terms for atom in term}
        budget.spend(len(atoms) ** 2)
        self._implied = {
            atom: {other for other in atoms if _implies(atom, other)} for atom in atoms
        }

    def close(self, term: Term) -> Term | None:
        """Return a term extended by all conditions that it implies, or None if its conditions
        contradict each other."""
        if not term:
            return term
        whole = frozenset().union(*(self._implied[atom] for atom in term))
        exact = {
            (key, values[0])
            for operator, key, values in whole
            if operator == "equals" and _has_no_variables(values)
        }
        if len({key for key, _ in exact}) < len(exact):
            return None
        if any(
            operator == "notequals" and (key, values[0]) in exact for operator, key, values in whole
        ):
            return None
        return whole


@dataclass(frozen=True)
class _Answer:
    """The answer of policies to a request, depending on conditions: denied if a term of ``deny`` is
    satisfied, otherwise allowed if a term of ``allow`` is."""

    allow: tuple[Term, ...]
    """Terms under which the request is allowed."""
    deny: tuple[Term, ...]
    """Terms under which the request is denied."""


@dataclass(frozen=True)
class _RequestKind:
    """All requests that match the same statements, represented by one of them."""

    request: AccessRequest
    """The representative request."""
    before: _Answer
    """The old policies' answer."""
    after: _Answer
    """The new policies' answer."""
    sources: tuple[_Clause, ...]
    """The clauses of the new policies that allow the request."""
    conditions: _Conditions
    """Implications between the conditions."""
    budget: Budget
    """Step budget of the comparison."""

    def implies(self, first: Sequence[Term], second: Sequence[Term]) -> bool:
        """Return whether a term of ``second`` is satisfied whenever a term of ``first`` is."""
        return all(self._is_met(second, self.conditions.close(term)) for term in first)

    def find_gain(self, term: Term, old: _Answer, new: _Answer) -> Term | None:
        """Return conditions under which ``new`` allows the request by ``term`` although ``old``
        does not allow it; None if there are none.

        ``term``: a term of ``new.allow``.
        """
        closed_term = self.conditions.close(term)
        if closed_term is None or self._is_met(new.deny, closed_term):
            return None
        if not self._is_met(old.allow, closed_term):
            return term
        for denial in old.deny:
            both = self.conditions.close(term | denial)
            if both is not None and not self._is_met(new.deny, both):
                return term | denial
        return None

    def _is_met(self, terms: Sequence[Term], closed_term: Term | None) -> bool:
        """Return whether one of ``terms`` follows from ``closed_term``. None, a contradiction,
        implies everything."""
        self.budget.spend(1 + len(terms) // 8)
        return closed_term is None or any(term <= closed_term for term in terms)


def _request_kinds(before: Policies, after: Policies, budget: Budget) -> Iterator[_RequestKind]:
    """Yield every kind of request that the two sets of policies distinguish.

    A set of clauses is an integer with one bit per clause. ``live`` maps each set of clauses that
    some request can match to the principal, action and resource of such a request. It is computed
    in three steps: for the principals, then the actions, then the resources.
    """
    budget.spend(len(_all_statements(before)) + len(_all_statements(after)))
    if not any(
        one[1] == _TLS for statement in _all_statements(before) for one in statement.conditions
    ):
        after = _assume_tls_everywhere(after)
    clauses: list[_Clause] = []
    parts: list[tuple[int, int]] = []
    for statements in (
        before.statements,
        before.boundary or (),
        after.statements,
        after.boundary or (),
    ):
        begin = len(clauses)
        clauses += [clause for statement in statements for clause in _expand_clauses(statement)]
        parts.append((begin, len(clauses)))
    budget.spend(len(clauses))
    conditions = _Conditions(clauses, budget)
    actions, resources = _scope_of(after.owner or before.owner)
    live: dict[int, tuple[str, ...]] = {(1 << len(clauses)) - 1: ()}
    for sets, within in (
        ([clause.principals for clause in clauses], ()),
        ([clause.statement.actions for clause in clauses], actions),
        ([clause.statement.resources for clause in clauses], resources),
    ):
        kinds = _distinguish(sets, within, budget)
        budget.spend(len(live) * len(kinds))
        live = {
            one & other: (*names, name)
            for one, names in live.items()
            for other, name in kinds.items()
        }
    for mask, (principal, action, resource) in live.items():
        about = [[clauses[n] for n in range(*part) if mask >> n & 1] for part in parts]
        budget.spend(len(clauses))
        old = _build_answer(about[0], about[1] if before.boundary is not None else None, budget)
        new = _build_answer(about[2], about[3] if after.boundary is not None else None, budget)
        sources = tuple(clause for clause in about[2] if clause.allow)
        yield _RequestKind((principal, action, resource), old, new, sources, conditions, budget)


def _build_answer(
    clauses: Sequence[_Clause], boundary: Sequence[_Clause] | None, budget: Budget
) -> _Answer:
    """Return the answer of the matching clauses. If there is a permission ``boundary``, its
    matching clauses limit the answer."""
    allow = dict.fromkeys(term for clause in clauses if clause.allow for term in clause.terms)
    deny = dict.fromkeys(
        term
        for clause in (*clauses, *(boundary or ()))
        if not clause.allow
        for term in clause.terms
    )
    if boundary is not None:
        limits = {term for clause in boundary if clause.allow for term in clause.terms}
        budget.spend(len(allow) * len(limits))
        allow = dict.fromkeys(term | limit for term in allow for limit in limits)
    return _Answer(tuple(allow), tuple(deny))


def _distinguish(names: Sequence[Names], within: Sequence[str], budget: Budget) -> dict[int, str]:
    """Return each combination of the sets ``names`` to which some name belongs exactly, with an
    example name.

    A combination is an integer with one bit per set. If ``within`` is not empty, only names that
    match one of its patterns are considered.
    """
    bits: dict[Names, int] = {}
    for number, one in enumerate(names):
        bits[one] = bits.get(one, 0) | 1 << number
    patterns = {pattern: 0 for one in bits for pattern in one.patterns} | dict.fromkeys(within, 0)
    for number, pattern in enumerate(patterns):
        patterns[pattern] = 1 << number
    wanted = sum(patterns[pattern] for pattern in within)
    sets = [
        (sum({patterns[p] for p in one.patterns}), one.inverted, bit) for one, bit in bits.items()
    ]
    names_by_combination: dict[int, str] = {}
    matched = combinations(list(patterns), budget)
    budget.spend(len(matched) * len(sets))
    for mask, name in matched.items():
        if mask & wanted or not within:
            names_by_combination.setdefault(
                sum(bit for of, inverted, bit in sets if (mask & of == 0) is inverted), name
            )
    return names_by_combination


def _scope_of(owner: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (action patterns, resource patterns) of the requests that the policies of a resource
    can be about. Both are empty if there is no restriction.

    ``owner``: as in ``Policies``.
    """
    service = owner.split(":")[2] if owner.count(":") > 2 else ""
    if service not in _ACTIONS:
        return (), ()
    return (_ACTIONS[service],), (owner, *([owner + _BELOW[service]] if service in _BELOW else []))


def _expand_clauses(statement: Statement) -> Iterator[_Clause]:
    """Yield the clauses of a statement, extended to the identities that belong to its principals.

    If something is allowed to an account as a whole, the account's own policies decide which
    members may use it. A denial applies to all members.
    """
    who = statement.principals
    clause = _Clause(statement, who, _expand_terms(statement.conditions))
    if who == Names():
        yield clause
        return
    sessions: list[str] = []
    members: list[str] = []
    for pattern in who.patterns:
        arn = pattern.removeprefix("AWS:").split(":", 5)
        account, name = arn[4:] if len(arn) == 6 and arn[2] == "iam" else ("", "")
        if name == "root" and not who.inverted:
            members += [f"AWS:arn:aws:{service}::{account}:*" for service in ("iam", "sts")]
        elif name.startswith("role/"):
            sessions.append(f"AWS:arn:aws:sts::{account}:assumed-role/{name.rsplit('/', 1)[1]}/*")
    all_of = (*who.patterns, *sessions, *(members if not statement.allow else ()))
    yield replace(clause, principals=Names(tuple(dict.fromkeys(all_of)), who.inverted))
    if members and statement.allow:
        delegated = frozenset({("delegated", "by the account", ())})
        terms = tuple(term | delegated for term in clause.terms)
        yield replace(clause, principals=Names(tuple(dict.fromkeys(members))), terms=terms)


def _expand_terms(conditions: Sequence[Atom]) -> tuple[Term, ...]:
    """Return a statement's conditions as alternative terms, one of which must be satisfied."""
    each = [_alternatives(*condition) for condition in conditions]
    if math.prod(map(len, each)) > _MAX_TERMS:
        each = [
            [frozenset({(operator, key, tuple(sorted(values)))})]
            for operator, key, values in conditions
        ]
    return tuple({frozenset().union(*chosen): None for chosen in itertools.product(*each)})


def _alternatives(operator: str, key: str, values: tuple[str, ...]) -> list[Term]:
    """Return one condition as alternative terms, one for each value that satisfies it."""
    suffix = _OPTIONAL if operator.endswith(_OPTIONAL) else ""
    base = operator.removesuffix(_OPTIONAL)
    if not values or base not in _ONE_OF | _NONE_OF:
        return [frozenset({(operator, key, tuple(sorted(set(values))))})]
    atoms = [
        (
            _canonical_operator(base, value) + suffix,
            key,
            (value.lower() if base == "bool" else value,),
        )
        for value in values
    ]
    return [frozenset({atom}) for atom in atoms] if base in _ONE_OF else [frozenset(atoms)]


def _canonical_operator(operator: str, value: str) -> str:
    """Return an operator's canonical name: the operators that compare a string literally share
    one."""
    kind = operator.replace("not", "")
    exact = kind == "stringequals" or (
        kind in ("stringlike", "arnlike", "arnequals") and not set("*?") & set(value)
    )
    if not exact:
        return operator.replace("arnequals", "arnlike").replace("arnnotequals", "arnnotlike")
    return "notequals" if kind != operator else "equals"


def _implies(atom: Atom, other: Atom) -> bool:
    """Return whether the condition ``atom`` implies the condition ``other``. False if the
    comparison cannot tell."""
    if atom == other:
        return True
    operator, key, values = atom
    wider, same, patterns = other
    if key != same or (operator.endswith(_OPTIONAL) and not wider.endswith(_OPTIONAL)):
        return False
    operator = operator.removesuffix(_OPTIONAL)
    wider = wider.removesuffix(_OPTIONAL)
    if operator == wider and values == patterns:
        return True
    if (
        operator == wider == "arnlike"
        and len(values) == len(patterns) == 1
        and "?" not in patterns[0]
    ):
        narrow = values[0].split(":", 5)
        wide = patterns[0].split(":", 5)
        return (
            _has_no_variables(values + patterns)
            and len(narrow) == len(wide)
            and all(map(matches, wide, narrow))
        )
    if operator != "equals" or not _has_no_variables(values + patterns):
        return False
    if wider == "stringlike":
        return matches(patterns[0], values[0])
    name = values[0].split(":", 5)
    pattern = patterns[0].split(":", 5)
    return wider == "arnlike" and len(name) == len(pattern) and all(map(matches, pattern, name))


def _has_no_variables(values: Sequence[str]) -> bool:
    """Return whether none of the values contains a policy variable."""
    return not any("${" in value for value in values)


def _all_statements(policies: Policies) -> tuple[Statement, ...]:
    """Return the statements of the policies and of their permission boundary."""
    return policies.statements + (policies.boundary or ())


def _assume_tls_everywhere(policies: Policies) -> Policies:
    """Return the policies, including the boundary, as they apply to requests over TLS, which all
    clients use by default."""
    boundary = None if policies.boundary is None else _assume_tls(policies.boundary)
    return replace(policies, statements=_assume_tls(policies.statements), boundary=boundary)


def _assume_tls(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    """Return the statements that can apply to requests over TLS, without their conditions that
    require TLS."""
    plain = {("bool", _TLS, ("true",)), ("boolifexists", _TLS, ("true",))}
    never = {("bool", _TLS, ("false",))}
    return tuple(
        replace(
            one,
            conditions=tuple(condition for condition in one.conditions if condition not in plain),
        )
        for one in statements
        if not never & set(one.conditions)
    )


def _build_gain(source: _Clause, term: Term, request: AccessRequest) -> Gain:
    """Return the gain for a request that ``source`` newly allows under the conditions in
    ``term``."""
    statement = source.statement
    parts = zip((source.principals, statement.actions, statement.resources), request, strict=True)
    principal, action, resource = (_matching_pattern(names, example) for names, example in parts)
    conditions = tuple(sorted(" ".join([key, operator, *values]) for operator, key, values in term))
    return Gain(principal, action, resource, conditions, request)


def _matching_pattern(names: Names, example: str) -> str:
    """Return the pattern in ``names`` that the example matches; for an inverted set, "anything but"
    and its patterns."""
    if names.inverted:
        return "anything but " + ", ".join(names.patterns)
    return next(
        (pattern for pattern in names.patterns if matches(pattern, example)), names.patterns[0]
    )
