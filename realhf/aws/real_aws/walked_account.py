"""Grades on a real account (BACKEND_TYPE=aws), whose state is what its permitted list and describe calls answer.

The target is made on a simulator that is read by the same calls. Two accounts are never compared as wholes: what the
solution changes in the simulator is wanted of the real account as it was found. Where a default of AWS differs from
the simulator's the right play is refused; what the reads do not show is not graded at all.
Source: docs/reference/environment.md 7.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from realhf.aws.grading.differences import EpisodeComparison, Goal, Target, canonical, is_opening, transfer_target
from realhf.aws.grading.grader import EndStateGrader, Grade
from realhf.aws.grading.meanings import Member
from realhf.aws.grading.snapshot import Key, Snapshot, SnapshotError, normalize_attributes
from realhf.aws.grading.tracker import Evidence
from realhf.aws.real_aws.describe_walker import ID, MAX_CALLS, Answers, Call, inner_noun, noun_of, own_names, walk
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN
from realhf.aws.tasks.task import TaskError

_ACCOUNT = "000000000000"
"""Stands for the number of any account."""
_OWNER = "<owner>"
"""Stands for the canonical user of any account."""
_PAGES = frozenset(
    {"istruncated", "keycount", "maxkeys", "truncated", "nexttoken", "marker", "nextmarker", "keymarker", "displayname"}
    | {"nextkeymarker", "versionidmarker", "nextversionidmarker", "maxitems", "startrecord"}
)
"""Members that say how an answer was cut, not what there is."""
_NAMESAKES = ("sg-", "subnet-")
"""Begin ids of what has namesakes in other networks."""
_QUEUE_URL = re.compile(r"https?://[^/\s\"]+/(?=\d{12}/)")
_DENIED = re.compile(r"AccessDenied|Unauthorized|AuthFailure|ExpiredToken|OptInRequired|SubscriptionRequired|Internal")
"""Errors that hide what there is, rather than say that there is none."""
_BUSY = re.compile(r"Throttl|RequestLimitExceeded|TooManyRequests|SlowDown|ServiceUnavailable")
"""Errors that another try may not meet."""
_CREATED = re.compile(r"^creat\w*(date|time|timestamp|at)?$", re.IGNORECASE)
_TOKENS = re.compile(r"(token|callerreference|creatorrequestid)$", re.IGNORECASE)

_VERBS = frozenset({"Version", "Sid", "Action"})
"""Arguments that say how a request or a document is meant, and are not always told again."""


class WalkedAccount:
    """Reads an account by its list and describe calls. ``permits(service, operation)``: which may be sent; ``account``:
    its number; ``words``: texts in which names are given, so that nothing in them is a generated id."""

    def __init__(
        self,
        call: Call,
        permits: Callable[[str, str], bool],
        services: frozenset[str],
        account: str,
        words: Sequence[str],
    ) -> None:
        self._call, self._permits, self._services, self._account = call, permits, services, account
        self._words = "\n".join(words)
        self._hidden: frozenset[str] | None = None

    def read(self) -> Snapshot:
        """Return the account as it is now. Raises SnapshotError where it holds too much, or hides what it showed or
        did not have at the first reading; ConnectionError when it does not answer."""
        answers = walk(self._call, self._services, self._permits)
        if len(answers) >= MAX_CALLS:
            raise SnapshotError(f"the account needs more than {MAX_CALLS} reads")
        errors = {key: str(answer["error"]) for key, answer in answers.items() if set(answer) == {"error"}}
        for key, code in errors.items():
            if _BUSY.search(code):
                raise ConnectionError(f"{key} is answered with {code}")
        hidden = frozenset(key for key, code in errors.items() if _DENIED.search(code))
        if self._hidden is None:
            self._hidden = hidden
        elif more := hidden - self._hidden:
            raise SnapshotError(f"{min(more)} is answered with {errors[min(more)]}")
        return self._snapshot({key: answer for key, answer in answers.items() if key not in errors})

    def _snapshot(self, answers: Answers) -> Snapshot:
        owner = str((answers.get("s3:ListBuckets {}", {}).get("Owner") or {}).get("ID") or _OWNER)
        resources: dict[Key, Mapping[str, Any]] = {}
        serials: dict[Key, int] = {}
        now = time.time()
        for call, answer in answers.items():
            operation, arguments = call.split(" ", 1)
            service, name = operation.split(":")
            said, given = (self._named(part, owner) for part in (answer, json.loads(arguments)))
            where = "|".join(_texts(given))
            for kind, identity, value in _things(said, name, where, noun_of(name.split("/")[0])):
                serials[service, kind, identity] = _serial(value)
                resources[service, kind, identity] = normalize_attributes(service, value, now)
        return Snapshot(resources, serials)

    def _named(self, value: Any, owner: str) -> Any:
        """Return an answer with marks around generated ids, and without what names the account."""
        if isinstance(value, Mapping):
            return {
                "Content" if name == "ETag" else self._text(name, owner): item
                if name == "ETag"  # the digest alone tells what is in an object
                else self._named(item, owner)
                for name, item in value.items()
                if name.lower() not in _PAGES
            }
        if isinstance(value, list):
            return [self._named(item, owner) for item in value]
        return self._text(value, owner) if isinstance(value, str) else value

    def _text(self, text: str, owner: str) -> str:
        text = _QUEUE_URL.sub("queue/", text.replace(owner, _OWNER)).replace(self._account, _ACCOUNT)
        return ID.sub(lambda match: match[0] if match[0] in self._words else f"{DRAWN}{match[0]}{END_DRAWN}", text)


def _texts(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, Mapping | list):
            yield from _texts(item)
        elif item not in (None, "", True, False):
            yield str(item)


def _things(value: Mapping[str, Any], kind: str, where: str, about: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (kind, identity, attributes) of everything in an answer that names itself, and of the rest."""
    rest: dict[str, Any] = {}
    for name, item in value.items():
        named = _identities(item, inner_noun(name, about)) if isinstance(item, list) else []
        if not named:
            rest[name] = item
        for identity, one in zip(named, item if named else (), strict=True):
            place = f"{where}|{identity}" if where else identity
            inner = one if isinstance(one, Mapping) else {}
            yield from _things(inner, f"{kind}/{name}", place, inner_noun(name, about))
    yield kind, where, rest


def _identities(items: list[Any], about: str) -> list[str]:
    """Return the names of the elements of a list; none unless each has one of its own."""
    found = [item if isinstance(item, str) else _own_name(item, about) for item in items]
    return [name for name in found if name] if all(found) and len(set(found)) == len(found) else []


def _own_name(item: Any, about: str) -> str:
    names = [name for _, name in own_names(item, about)] if isinstance(item, Mapping) else []
    ids = [name for name in names if name.startswith(_NAMESAKES) and DRAWN in name]
    return next(iter(ids or names), "")


def _serial(value: Mapping[str, Any]) -> int:
    """Return when something was made, in seconds since the epoch; 0 where nothing says so."""
    for name, item in value.items():
        if _CREATED.search(name) and isinstance(item, str):
            try:
                return int(float(item)) if item.isdecimal() else int(datetime.fromisoformat(item).timestamp())
            except ValueError:
                continue
    return 0


class RealAccountGrader(EndStateGrader):
    """Grades an episode on a real account; ``read`` is ``WalkedAccount.read``."""

    may_drop_settings = False

    def start(self) -> None:
        """Look at the account before the first command. Raises TaskError where the reads do not show what the task
        asks for, SnapshotError, ConnectionError."""
        self._sent: list[Evidence] = []
        super().start()
        for goal in self._goals():
            if unseen := not_shown(goal.target):
                raise TaskError(f"a real account is graded by its permitted reads, and none shows {unseen}")

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """See ``EndStateGrader.evaluate``."""
        self._sent += [deed for deed in added if deed.ok and not deed.reads]
        return super().evaluate(added, lost=lost)

    def _build_comparison(self, goal: Goal) -> EpisodeComparison:
        assert self._start is not None
        return EpisodeComparison(self._start, Goal(transfer_target(goal.target, self._start), goal.freedom))

    def _compared_part(self, now: Snapshot, target: Target) -> Snapshot:
        """Return the account without what the simulator does not tell of new resources, provided that the agent asked
        for nothing that the solution does not ask for: it is a default of AWS."""
        asked = {(deed.operation, name) for deed in self._sent for name in _names(deed.params)}
        if not asked <= {(operation, name) for operation, params in _requests(target) for name in _names(params)}:
            return now
        assert self._start is not None
        known = {(key[:2], name) for state in target.states for key, held in state.resources.items() for name in held}
        kinds = {kind for kind, _ in known} | {key[:2] for state in target.states for key in state.resources}
        kept = {
            key: held
            if key in self._start.resources
            else {name: value for name, value in held.items() if _counts(key, name, value, known)}
            for key, held in now.resources.items()
            if key in self._start.resources or key[:2] in kinds
        }
        return replace(now, resources=kept)


def _counts(key: Key, name: str, value: Any, known: set[tuple[tuple[str, str], str]]) -> bool:
    return (key[:2], name) in known or is_opening(key, name, canonical(value, Member.of(key).inner(name)))


def _names(params: Any) -> Iterator[str]:
    """Yield the names of all members of a request, but for tokens of a client."""
    if isinstance(params, Mapping):
        for name, value in params.items():
            if not _TOKENS.search(name):
                yield name
                yield from _names(value)
    elif isinstance(params, list):
        for item in params:
            yield from _names(item)


def _requests(target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for operations, arguments in zip(target.operations, target.arguments, strict=True):
        yield from zip(operations, arguments, strict=True)


def not_shown(target: Target) -> str:
    """Return the first argument of the solution that no read shows of what its command changes, in words; "" where all
    are shown."""
    before = target.start.resources
    for state, operations, arguments in zip(target.states, target.operations, target.arguments, strict=True):
        changed = [
            f"{key[2]} {canonical(held, Member.of(key))}"
            for key, held in state.resources.items()
            if before.get(key) != held
        ]
        if operations and not changed and before.keys() <= state.resources.keys():
            return f"what {operations[0]} does"
        text = " ".join(changed).replace("\\", "").replace(DRAWN, "").replace(END_DRAWN, "").lower()
        for operation, params in zip(operations, arguments, strict=True):
            for name, value in _arguments(params, ""):
                if re.search(rf"(?<!\w){re.escape(value.lower())}(?!\w)", text) is None:
                    return f"{name} of {operation}"
        before = state.resources
    return ""


def _arguments(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each argument of a request; documents are taken apart."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not (_TOKENS.search(key) or key in _VERBS):
                yield from _arguments(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _arguments(item, name)
    elif value not in (None, ""):
        yield name, _QUEUE_URL.sub("queue/", str(value))
