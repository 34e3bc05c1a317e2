"""Compares policies by what they mean, however they are written.

``compare_policies`` looks at one request of every kind that the policies of both sides tell apart: the principals,
actions and resources that stand for all others come from ``pattern_sets``, and conditions are compared as formulas.

What is certain: policies that are called equal give the same answer to every request, and nobody gains anything that
is not listed. Without conditions and policy variables the reverse is certain as well. With them, two ways to
write one thing may count as two: of a condition it is known that a list of values means one of them, or none of them
where it is negated, that an exact value fits the patterns that it matches, and that a key has one value; nothing else.
Which actions a service has, and on what, is not known here, so ``*`` on a bucket is more than ``s3:*`` on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from realhf.aws.grading.iam_policy import Names, Statement, matches
from realhf.aws.grading.pattern_sets import Budget, combinations

Atom = tuple[str, str, tuple[str, ...]]
"""A condition: operator, key, values."""
Term = frozenset[Atom]
"""Conditions that hold together."""
Request = tuple[str, str, str]
"""Principal, action, resource."""
_MOST_TERMS = 16
"""Most alternatives that the lists of values of one statement are taken apart into."""
_ACTIONS: Mapping[str, str] = {
    service: f"{service}:*" for service in ("sqs", "sns", "s3", "lambda", "kms", "ecr", "secretsmanager")
} | {"iam": "sts:*"}
"""By service, the actions that a policy of its resources is about; a role is there to be assumed."""
_BELOW: Mapping[str, str] = {"s3": "/*", "lambda": ":*"}
"""How the names go on of what lies in a resource and is subject to its policy."""
_ONE_OF = frozenset({"stringequals", "stringlike", "arnequals", "arnlike", "ipaddress", "numericequals", "bool"})
_NONE_OF = frozenset({"stringnotequals", "stringnotlike", "arnnotequals", "arnnotlike", "notipaddress"})
_OPTIONAL = "ifexists"
_TLS = "aws:securetransport"


@dataclass(frozen=True)
class Policies:
    """Holds all that decides what one identity may do, or what may be done with one resource.

    ``statements``: those of all its policies. ``boundary``: those of its permission boundary, None without one.
    ``owner``: the ARN of the resource that the policies hang on; only requests for that resource count then.
    """

    statements: tuple[Statement, ...] = ()
    boundary: tuple[Statement, ...] | None = None
    owner: str = ""


@dataclass(frozen=True)
class Gain:
    """Tells what a statement allows that was not allowed before. ``principal``, ``action`` and ``resource`` are as the
    statement says them, ``conditions`` what it asks for; ``example`` is a request that is allowed now."""

    principal: str
    action: str
    resource: str
    conditions: tuple[str, ...]
    example: Request

    def __str__(self) -> str:
        where = f" where {' and '.join(self.conditions)}" if self.conditions else ""
        return f"{self.action} on {self.resource}{where}"


@dataclass(frozen=True)
class Comparison:
    """Says how policies differ from those before. ``equal``: both allow the same and deny the same, where a request
    that no statement is about is not a denied one, since another policy may allow it. ``gains``: what is allowed and
    was not, once for each statement that allows it. ``loses``: whether anything was allowed that is not."""

    equal: bool = True
    gains: tuple[Gain, ...] = ()
    loses: bool = False


def compare_policies(before: Policies, after: Policies, budget: Budget) -> Comparison:
    """Compare policies. A demand for TLS in ``after`` does not count where ``before`` does not speak of it. Raises
    TooManySteps."""
    if before == after:
        return Comparison()
    same, loses = True, False
    found: dict[Statement, Gain] = {}
    for kind in _kinds(before, after, budget):
        old, new = kind.before, kind.after
        if old == new:
            continue
        same = same and all(
            kind.implies(first.deny, second.deny) and kind.implies(first.deny + first.allow, second.deny + second.allow)
            for first, second in ((old, new), (new, old))
        )
        loses = loses or any(kind.gained(term, new, old) is not None for term in old.allow)
        for term in new.allow:
            granted = kind.gained(term, old, new)
            if granted is not None:
                source = next(one for one in kind.sources if any(part <= term for part in one.terms))
                found.setdefault(source.statement, _gain(source, granted, kind.request))
    return Comparison(same, tuple(found.values()), loses)


@dataclass(frozen=True)
class _Clause:
    """Is a statement with its conditions taken apart: it applies where one of the ``terms`` holds."""

    statement: Statement
    principals: Names
    terms: tuple[Term, ...]

    @property
    def allow(self) -> bool:
        """Whether it allows; else it denies."""
        return self.statement.allow


class _Conditions:
    """Knows what conditions have to do with one another."""

    def __init__(self, clauses: Sequence[_Clause], budget: Budget) -> None:
        atoms = {atom for clause in clauses for term in clause.terms for atom in term}
        budget.spend(len(atoms) ** 2)
        self._implied = {atom: {other for other in atoms if _follows(atom, other)} for atom in atoms}

    def closed(self, term: Term) -> Term | None:
        """Return the conditions with all that they imply; None where they cannot hold together."""
        if not term:
            return term
        whole = frozenset().union(*(self._implied[atom] for atom in term))
        exact = {(key, values[0]) for operator, key, values in whole if operator == "equals" and _plain(values)}
        if len({key for key, _ in exact}) < len(exact):
            return None
        if any(operator == "notequals" and (key, values[0]) in exact for operator, key, values in whole):
            return None
        return whole


@dataclass(frozen=True)
class _Answer:
    """Says when a request is denied and when it is allowed, if it is not denied: where one of the terms holds."""

    allow: tuple[Term, ...]
    deny: tuple[Term, ...]


@dataclass(frozen=True)
class _Kind:
    """Stands for all requests that the same statements are about."""

    request: Request
    before: _Answer
    after: _Answer
    sources: tuple[_Clause, ...]
    conditions: _Conditions
    budget: Budget

    def implies(self, first: Sequence[Term], second: Sequence[Term]) -> bool:
        """Return whether one of the second terms holds wherever one of the first does."""
        return all(self._met(second, self.conditions.closed(term)) for term in first)

    def gained(self, term: Term, old: _Answer, new: _Answer) -> Term | None:
        """Return conditions under which ``term`` of the new answer allows what the old does not; None if there are
        none."""
        holding = self.conditions.closed(term)
        if holding is None or self._met(new.deny, holding):
            return None
        if not self._met(old.allow, holding):
            return term
        for denial in old.deny:
            both = self.conditions.closed(term | denial)
            if both is not None and not self._met(new.deny, both):
                return term | denial
        return None

    def _met(self, terms: Sequence[Term], holding: Term | None) -> bool:
        self.budget.spend(1 + len(terms) // 8)
        return holding is None or any(term <= holding for term in terms)


def _kinds(before: Policies, after: Policies, budget: Budget) -> Iterator[_Kind]:
    """Yield every kind of request that the policies of the two tell apart."""
    budget.spend(len(_all(before)) + len(_all(after)))
    if not any(one[1] == _TLS for statement in _all(before) for one in statement.conditions):
        after = _with_tls(after)
    clauses: list[_Clause] = []
    parts: list[tuple[int, int]] = []
    for statements in (before.statements, before.boundary or (), after.statements, after.boundary or ()):
        begin = len(clauses)
        clauses += [clause for statement in statements for clause in _clauses(statement)]
        parts.append((begin, len(clauses)))
    budget.spend(len(clauses))
    conditions = _Conditions(clauses, budget)
    actions, resources = _about(after.owner or before.owner)
    live: dict[int, tuple[str, ...]] = {(1 << len(clauses)) - 1: ()}
    for sets, within in (
        ([clause.principals for clause in clauses], ()),
        ([clause.statement.actions for clause in clauses], actions),
        ([clause.statement.resources for clause in clauses], resources),
    ):
        kinds = _told_apart(sets, within, budget)
        budget.spend(len(live) * len(kinds))
        live = {one & other: (*names, name) for one, names in live.items() for other, name in kinds.items()}
    for mask, (who, what, where) in live.items():
        about = [[clauses[n] for n in range(*part) if mask >> n & 1] for part in parts]
        budget.spend(len(clauses))
        old = _answer(about[0], about[1] if before.boundary is not None else None, budget)
        new = _answer(about[2], about[3] if after.boundary is not None else None, budget)
        sources = tuple(clause for clause in about[2] if clause.allow)
        yield _Kind((who, what, where), old, new, sources, conditions, budget)


def _answer(clauses: Sequence[_Clause], boundary: Sequence[_Clause] | None, budget: Budget) -> _Answer:
    allow = dict.fromkeys(term for clause in clauses if clause.allow for term in clause.terms)
    deny = dict.fromkeys(term for clause in (*clauses, *(boundary or ())) if not clause.allow for term in clause.terms)
    if boundary is not None:
        limits = {term for clause in boundary if clause.allow for term in clause.terms}
        budget.spend(len(allow) * len(limits))
        allow = dict.fromkeys(term | limit for term in allow for limit in limits)
    return _Answer(tuple(allow), tuple(deny))


def _told_apart(names: Sequence[Names], within: Sequence[str], budget: Budget) -> dict[int, str]:
    """Return, for each choice of the sets that some name belongs to and to no other, such a name. Only names that
    match one of the patterns ``within`` count, if there are any. The sets are bits of a number."""
    bits: dict[Names, int] = {}
    for number, one in enumerate(names):
        bits[one] = bits.get(one, 0) | 1 << number
    patterns = {pattern: 0 for one in bits for pattern in one.patterns} | dict.fromkeys(within, 0)
    for number, pattern in enumerate(patterns):
        patterns[pattern] = 1 << number
    wanted = sum(patterns[pattern] for pattern in within)
    sets = [(sum({patterns[p] for p in one.patterns}), one.inverted, bit) for one, bit in bits.items()]
    found: dict[int, str] = {}
    matched = combinations(list(patterns), budget)
    budget.spend(len(matched) * len(sets))
    for mask, name in matched.items():
        if mask & wanted or not within:
            found.setdefault(sum(bit for of, inverted, bit in sets if (mask & of == 0) is inverted), name)
    return found


def _about(owner: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return patterns of the actions and the resources that policies of a resource are about; empty for any."""
    service = owner.split(":")[2] if owner.count(":") > 2 else ""
    if service not in _ACTIONS:
        return (), ()
    return (_ACTIONS[service],), (owner, *([owner + _BELOW[service]] if service in _BELOW else []))


def _clauses(statement: Statement) -> Iterator[_Clause]:
    """Yield what a statement says, also about those who belong to the principals that it names. Whom an account as a
    whole is allowed something, it may be given by the account's own policies; a denial is for all of its members."""
    who = statement.principals
    clause = _Clause(statement, who, _terms(statement.conditions))
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


def _terms(conditions: Sequence[Atom]) -> tuple[Term, ...]:
    """Return the alternatives that a statement's conditions come to."""
    each = [_alternatives(*condition) for condition in conditions]
    if math.prod(map(len, each)) > _MOST_TERMS:
        each = [[frozenset({(operator, key, tuple(sorted(values)))})] for operator, key, values in conditions]
    return tuple({frozenset().union(*chosen): None for chosen in itertools.product(*each)})


def _alternatives(operator: str, key: str, values: tuple[str, ...]) -> list[Term]:
    suffix = _OPTIONAL if operator.endswith(_OPTIONAL) else ""
    base = operator.removesuffix(_OPTIONAL)
    if not values or base not in _ONE_OF | _NONE_OF:
        return [frozenset({(operator, key, tuple(sorted(set(values))))})]
    atoms = [(_exact(base, value) + suffix, key, (value.lower() if base == "bool" else value,)) for value in values]
    return [frozenset({atom}) for atom in atoms] if base in _ONE_OF else [frozenset(atoms)]


def _exact(operator: str, value: str) -> str:
    """Return one name for all operators that compare a text as it stands."""
    kind = operator.replace("not", "")
    exact = kind == "stringequals" or (kind in ("stringlike", "arnlike", "arnequals") and not set("*?") & set(value))
    if not exact:
        return operator.replace("arnequals", "arnlike").replace("arnnotequals", "arnnotlike")
    return "notequals" if kind != operator else "equals"


def _follows(atom: Atom, other: Atom) -> bool:
    """Return whether the second condition holds wherever the first does, as far as is known."""
    if atom == other:
        return True
    operator, key, values = atom
    wider, same, patterns = other
    if key != same or (operator.endswith(_OPTIONAL) and not wider.endswith(_OPTIONAL)):
        return False
    operator, wider = operator.removesuffix(_OPTIONAL), wider.removesuffix(_OPTIONAL)
    if operator == wider and values == patterns:
        return True
    if operator == wider == "arnlike" and len(values) == len(patterns) == 1 and "?" not in patterns[0]:
        narrow, wide = values[0].split(":", 5), patterns[0].split(":", 5)
        return _plain(values + patterns) and len(narrow) == len(wide) and all(map(matches, wide, narrow))
    if operator != "equals" or not _plain(values + patterns):
        return False
    if wider == "stringlike":
        return matches(patterns[0], values[0])
    name, pattern = values[0].split(":", 5), patterns[0].split(":", 5)
    return wider == "arnlike" and len(name) == len(pattern) and all(map(matches, pattern, name))


def _plain(values: Sequence[str]) -> bool:
    return not any("${" in value for value in values)


def _all(policies: Policies) -> tuple[Statement, ...]:
    return policies.statements + (policies.boundary or ())


def _with_tls(policies: Policies) -> Policies:
    """Return what is left of the policies for requests that come over TLS, as all do that nobody thought about."""
    boundary = None if policies.boundary is None else _over_tls(policies.boundary)
    return replace(policies, statements=_over_tls(policies.statements), boundary=boundary)


def _over_tls(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    plain = {("bool", _TLS, ("true",)), ("boolifexists", _TLS, ("true",))}
    never = {("bool", _TLS, ("false",))}
    return tuple(
        replace(one, conditions=tuple(condition for condition in one.conditions if condition not in plain))
        for one in statements
        if not never & set(one.conditions)
    )


def _gain(source: _Clause, term: Term, request: Request) -> Gain:
    said = source.statement
    parts = zip((source.principals, said.actions, said.resources), request, strict=True)
    who, what, where = (_said(names, example) for names, example in parts)
    conditions = tuple(sorted(" ".join([key, operator, *values]) for operator, key, values in term))
    return Gain(who, what, where, conditions, request)


def _said(names: Names, example: str) -> str:
    """Return the pattern that the example fits, as the statement has it."""
    if names.inverted:
        return "anything but " + ", ".join(names.patterns)
    return next((pattern for pattern in names.patterns if matches(pattern, example)), names.patterns[0])
