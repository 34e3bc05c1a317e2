"""Parses IAM policies and compares them by what they mean, however they are written.

Patterns are those of IAM: ``*`` stands for any text, ``?`` for one character. ``combinations`` gives every combination
of patterns that some name matches while it matches none of the others, with such a name. So two expressions over the
patterns are equal for all names when they are equal for these few. The answer is exact: the patterns are run side by
side as automata over all texts, and texts after which every pattern is equally far are one.

``compare_policies`` looks at one request of every kind that the policies of both sides tell apart: the principals,
actions and resources that stand for all others come from ``pattern_sets``, and conditions are compared as formulas.

What is certain: policies that are called equal give the same answer to every request, and nobody gains anything that
is not listed. Without conditions and policy variables the reverse is certain as well. With them, two ways to
write one thing may count as two: of a condition it is known that a list of values means one of them, or none of them
where it is negated, that an exact value fits the patterns that it matches, and that a key has one value; nothing else.
Which actions a service has, and on what, is not known here, so ``*`` on a bucket is more than ``s3:*`` on it.
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

MOST_CHARACTERS = 20_480
LONGEST_NAME = 2_048
"""Longest policy and longest ARN, in characters, as AWS limits them."""
_ANYTHING = ("*",)
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
class Statement:
    """Holds one statement. A part that is not written restricts nothing."""

    allow: bool
    principals: Names = Names()
    actions: Names = Names()
    resources: Names = Names()
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


def parse_policy(document: Any) -> tuple[Statement, ...]:
    """Parse the statements of a policy, given as an object or as its JSON text. Raises PolicyError."""
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
    return tuple(map(_statement, statements))


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
    """Compile a pattern without stars."""
    return re.compile("".join("." if char == "?" else re.escape(char) for char in piece), re.DOTALL)


def _statement(entry: Any) -> Statement:
    if not isinstance(entry, Mapping):
        raise PolicyError("a statement is no object")
    unknown = set(entry) - _STATEMENT_KEYS
    if unknown:
        raise PolicyError(f"a statement has the unknown key {sorted(map(str, unknown))[0]!r}")
    if entry.get("Effect") not in ("Allow", "Deny"):
        raise PolicyError("the effect of a statement is neither Allow nor Deny")
    if ("Action" in entry) == ("NotAction" in entry):
        raise PolicyError("a statement names either Action or NotAction")
    actions = _names(entry, "Action", _texts)
    return Statement(
        allow=entry["Effect"] == "Allow",
        principals=_names(entry, "Principal", _principals),
        actions=Names(tuple(action.lower() for action in actions.patterns), actions.inverted),
        resources=_names(entry, "Resource", _texts),
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
    if any(len(item) > LONGEST_NAME for item in values):
        raise PolicyError("a name in a statement is longer than an ARN")
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


FEWEST_STEPS = 256
"""Least that a budget is charged for one call, in steps."""
_STEP_BITS = 512
"""How many characters of patterns one step looks at; longer sets of patterns pay for more steps."""
_SPARE = string.ascii_lowercase + string.digits + "".join(map(chr, range(0xE000, 0xF8FF)))
"""Characters of which one stands for all that no pattern names."""


class TooManySteps(Exception):
    """A comparison took more steps than it may; whoever wrote what is compared may have meant it to."""


class Budget:
    """Counts steps, each about a microsecond's work. ``spend`` raises TooManySteps when there are none left."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Take ``steps`` off. Raises TooManySteps."""
        self.left -= steps
        if self.left < 0:
            raise TooManySteps


def combinations(patterns: Sequence[str], budget: Budget) -> dict[int, str]:
    """Return, for each set of patterns that some non-empty name matches while it matches no other of them, such a
    name. A set is a number whose bit i stands for ``patterns[i]``. Raises TooManySteps.

    A pattern that holds a policy variable (``${aws:username}``) is matched by what the variable's value decides, so
    beside each name that it may match there is one that it does not, and what two such patterns have to do with one
    another is not looked at: more combinations may be given than exist, never fewer.
    """
    budget.spend(FEWEST_STEPS)
    plain = [re.sub(r"\$\{[^}]*\}", "*", pattern) for pattern in patterns]
    simple = all("?" not in pattern and "*" not in pattern[:-1] for pattern in plain)
    found = dict((_simple if simple else _automaton)(plain, budget))
    for bit in [1 << number for number, pattern in enumerate(patterns) if "${" in pattern]:
        budget.spend(2 * len(found))
        found |= {mask & ~bit: name for mask, name in found.items() if mask & bit and mask & ~bit not in found}
    return found


def _simple(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Answer for patterns without wildcards but a star at the end. What decides is then the longest beginning that
    a name shares with a pattern, so the whole names and the beginnings, prolonged by something else, are enough."""
    whole: dict[str, int] = {}
    starts: dict[str, int] = {"": 0}
    for number, pattern in enumerate(patterns):
        of, text = (starts, pattern[:-1]) if pattern.endswith("*") else (whole, pattern)
        of[text] = of.get(text, 0) | 1 << number
    spare = _spare(patterns)
    lengths = sorted({len(text) for text in starts})
    budget.spend((len(starts) + len(whole)) * len(lengths) * (1 + len(patterns) // _STEP_BITS))
    for name in [text + spare for text in starts] + [text for text in whole if text]:
        mask = whole.get(name, 0)
        for length in lengths:
            mask |= starts.get(name[:length], 0) if length <= len(name) else 0
        yield mask, name


def _automaton(patterns: Sequence[str], budget: Budget) -> Iterator[tuple[int, str]]:
    """Walk over all texts at once. A state is the set of places that the patterns have reached, one bit a place; what
    the next character can be is one of those that stand there, or any other."""
    letters: dict[int, str] = {}  # bit of a place -> the character that leads to the next place
    loops = ends = anything = start = named = 0
    steps: dict[str, int] = {}  # character -> places that it leads on from
    owners: dict[int, int] = {}  # bit of a last place -> bit of its pattern
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
    start |= place  # a place of its own, so that the state before any text is not met again
    spare = _spare(patterns)
    cost = 1 + place.bit_length() // _STEP_BITS
    came: dict[int, tuple[int, str]] = {start: (0, "")}
    waiting = [start]
    seen: set[int] = set()
    for state in waiting:  # grows while it is walked, so the shortest name of each kind comes first
        budget.spend(cost + state.bit_count())
        live = state & ends
        mask = 0
        while live:
            mask |= owners[live & -live]
            live &= live - 1
        if state != start and mask not in seen:
            seen.add(mask)
            yield mask, _name(came, state)
        nexts = {spare}
        live = state & named
        while live:
            nexts.add(letters[live & -live])
            live &= live - 1
        for char in sorted(nexts):
            budget.spend(cost)
            after = (state & (steps.get(char, 0) | anything)) << 1 | state & loops
            if after not in came:
                came[after] = state, char
                waiting.append(after)


def _name(came: Mapping[int, tuple[int, str]], state: int) -> str:
    """Return the text that leads to a state."""
    chars: list[str] = []
    while (step := came[state])[1]:
        state = step[0]
        chars.append(step[1])
    return "".join(reversed(chars))


def _spare(patterns: Sequence[str]) -> str:
    used = set("".join(patterns))
    return next(char for char in _SPARE if char not in used)


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
    same = True
    loses = False
    found: dict[Statement, Gain] = {}
    for kind in _kinds(before, after, budget):
        old = kind.before
        new = kind.after
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
    operator = operator.removesuffix(_OPTIONAL)
    wider = wider.removesuffix(_OPTIONAL)
    if operator == wider and values == patterns:
        return True
    if operator == wider == "arnlike" and len(values) == len(patterns) == 1 and "?" not in patterns[0]:
        narrow = values[0].split(":", 5)
        wide = patterns[0].split(":", 5)
        return _plain(values + patterns) and len(narrow) == len(wide) and all(map(matches, wide, narrow))
    if operator != "equals" or not _plain(values + patterns):
        return False
    if wider == "stringlike":
        return matches(patterns[0], values[0])
    name = values[0].split(":", 5)
    pattern = patterns[0].split(":", 5)
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
