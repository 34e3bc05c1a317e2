"""Grading on a real account (BACKEND_TYPE=aws), whose state is the set of answers to its permitted
list and describe calls.

The target is computed on a simulator that is read with the same calls. Whole accounts are never
compared: the changes that the solution makes in the simulator are required of the real account
relative to its initial state. If an AWS default differs from the simulator's, a correct episode is
refused; settings that the reads do not show are not graded. Source: docs/reference/environment.md
7.
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

from realhf.aws.grading.differences import (
    EpisodeComparison,
    Goal,
    Target,
    canonical,
    is_opening,
    transfer_target,
)
from realhf.aws.grading.grader import EndStateGrader, Grade
from realhf.aws.grading.meanings import MemberPosition
from realhf.aws.grading.snapshot import Key, Snapshot, SnapshotError, normalize_attributes
from realhf.aws.grading.tracker import Evidence
from realhf.aws.real_aws.describe_walker import (
    ID,
    MAX_CALLS,
    Answers,
    Call,
    inner_noun,
    noun_of,
    own_names,
    walk,
)
from realhf.aws.simulator.account_state import DRAWN, END_DRAWN
from realhf.aws.tasks.task import TaskError

_ACCOUNT = "000000000000"
"""Replacement for the number of any account."""
_OWNER = "<owner>"
"""Replacement for the canonical user of any account."""
_PAGES = frozenset(
    {
        "istruncated",
        "keycount",
        "maxkeys",
        "truncated",
        "nexttoken",
        "marker",
        "nextmarker",
        "keymarker",
        "displayname",
    }
    | {"nextkeymarker", "versionidmarker", "nextversionidmarker", "maxitems", "startrecord"}
)
"""Members that describe the paging of an answer, not the account."""
_NAMESAKES = ("sg-", "subnet-")
"""Prefixes of ids of resources that have namesakes in other networks."""
_QUEUE_URL = re.compile(r"https?://[^/\s\"]+/(?=\d{12}/)")
_DENIED = re.compile(
    r"AccessDenied|Unauthorized|AuthFailure|ExpiredToken|OptInRequired|SubscriptionRequired|Internal"
)
"""Errors that hide the state, in contrast to errors that say there is none."""
_BUSY = re.compile(r"Throttl|RequestLimitExceeded|TooManyRequests|SlowDown|ServiceUnavailable")
"""Transient errors."""
_CREATED = re.compile(r"^creat\w*(date|time|timestamp|at)?$", re.IGNORECASE)
"""Members that contain a creation time."""
_TOKENS = re.compile(r"(token|callerreference|creatorrequestid)$", re.IGNORECASE)
"""Members that contain idempotency tokens."""

_VERBS = frozenset({"Version", "Sid", "Action"})
"""Arguments that only describe a request or a document; reads do not always return them."""


class WalkedAccount:
    """Reader of an account through its list and describe calls. ``permits(service, operation)``:
    the allowed calls. ``account``: the account number. ``words``: texts that contain names, so that
    nothing in them is treated as a generated id."""

    def __init__(
        self,
        call: Call,
        permits: Callable[[str, str], bool],
        services: frozenset[str],
        account: str,
        words: Sequence[str],
    ) -> None:
        self._call = call
        self._permits = permits
        self._services = services
        self._account = account
        self._words = "\n".join(words)
        self._hidden: frozenset[str] | None = None

    def read(self) -> Snapshot:
        """Return the current account. Raises SnapshotError when it is too large, or hides something
        that was visible or absent at the first read; ConnectionError when it does not answer."""
        answers = walk(self._call, self._services, self._permits)
        if len(answers) >= MAX_CALLS:
            raise SnapshotError(f"the account needs more than {MAX_CALLS} reads")
        errors = {
            key: str(answer["error"]) for key, answer in answers.items() if set(answer) == {"error"}
        }
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
            content, params = (
                self._anonymise(part, owner) for part in (answer, json.loads(arguments))
            )
            where = "|".join(_texts(params))
            for kind, identity, value in _things(content, name, where, noun_of(name.split("/")[0])):
                serials[service, kind, identity] = _serial(value)
                resources[service, kind, identity] = normalize_attributes(service, value, now)
        return Snapshot(resources, serials)

    def _anonymise(self, value: Any, owner: str) -> Any:
        """Return an answer with generated ids marked and the account's identity replaced."""
        if isinstance(value, Mapping):
            return {
                "Content" if name == "ETag" else self._text(name, owner): item
                if name == "ETag"  # the digest alone tells what is in an object
                else self._anonymise(item, owner)
                for name, item in value.items()
                if name.lower() not in _PAGES
            }
        if isinstance(value, list):
            return [self._anonymise(item, owner) for item in value]
        return self._text(value, owner) if isinstance(value, str) else value

    def _text(self, text: str, owner: str) -> str:
        text = _QUEUE_URL.sub("queue/", text.replace(owner, _OWNER)).replace(
            self._account, _ACCOUNT
        )
        return ID.sub(
            lambda match: match[0] if match[0] in self._words else f"{DRAWN}{match[0]}{END_DRAWN}",
            text,
        )


def _texts(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, Mapping | list):
            yield from _texts(item)
        elif item not in (None, "", True, False):
            yield str(item)


def _things(
    value: Mapping[str, Any], kind: str, where: str, about: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (kind, identity, attributes) of every named structure in an answer, and of the rest."""
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
    """Return the names of the elements of a list; [] unless each has a unique name."""
    names = [item if isinstance(item, str) else _own_name(item, about) for item in items]
    return [name for name in names if name] if all(names) and len(set(names)) == len(names) else []


def _own_name(item: Any, about: str) -> str:
    names = [name for _, name in own_names(item, about)] if isinstance(item, Mapping) else []
    ids = [name for name in names if name.startswith(_NAMESAKES) and DRAWN in name]
    return next(iter(ids or names), "")


def _serial(value: Mapping[str, Any]) -> int:
    """Return the creation time in seconds since the epoch; 0 if unknown."""
    for name, item in value.items():
        if _CREATED.search(name) and isinstance(item, str):
            try:
                return (
                    int(float(item))
                    if item.isdecimal()
                    else int(datetime.fromisoformat(item).timestamp())
                )
            except ValueError:
                continue
    return 0


class RealAccountGrader(EndStateGrader):
    """Grades an episode on a real account; ``read`` is ``WalkedAccount.read``."""

    may_drop_settings = False

    def start(self) -> None:
        """Read the account before the first command. Raises TaskError if the reads do not show what
        the task asks for, SnapshotError, ConnectionError."""
        self._sent: list[Evidence] = []
        super().start()
        for goal in self._goals():
            if unseen := find_unshown(goal.target):
                raise TaskError(
                    f"a real account is graded by its permitted reads, and none shows {unseen}"
                )

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """See ``EndStateGrader.evaluate``."""
        self._sent += [deed for deed in added if deed.ok and not deed.reads]
        return super().evaluate(added, lost=lost)

    def _build_comparison(self, goal: Goal) -> EpisodeComparison:
        assert self._start is not None
        return EpisodeComparison(
            self._start, Goal(transfer_target(goal.target, self._start), goal.freedom)
        )

    def _compared_part(self, now: Snapshot, target: Target) -> Snapshot:
        """Return the account without attributes of new resources that the simulator does not
        report. They are AWS defaults, provided that the agent requested nothing that the solution
        does not request."""
        asked = {
            (deed.operation, name) for deed in self._sent for name in _member_names(deed.params)
        }
        if not asked <= {
            (operation, name)
            for operation, params in _requests(target)
            for name in _member_names(params)
        }:
            return now
        assert self._start is not None
        known = {
            (key[:2], name)
            for state in target.states
            for key, held in state.resources.items()
            for name in held
        }
        kinds = {kind for kind, _ in known} | {
            key[:2] for state in target.states for key in state.resources
        }
        kept = {
            key: held
            if key in self._start.resources
            else {
                name: value for name, value in held.items() if _is_graded(key, name, value, known)
            }
            for key, held in now.resources.items()
            if key in self._start.resources or key[:2] in kinds
        }
        return replace(now, resources=kept)


def _is_graded(key: Key, name: str, value: Any, known: set[tuple[tuple[str, str], str]]) -> bool:
    return (key[:2], name) in known or is_opening(
        key, name, canonical(value, MemberPosition.of(key).inner(name))
    )


def _member_names(params: Any) -> Iterator[str]:
    """Yield the names of all members of a request except idempotency tokens."""
    if isinstance(params, Mapping):
        for name, value in params.items():
            if not _TOKENS.search(name):
                yield name
                yield from _member_names(value)
    elif isinstance(params, list):
        for item in params:
            yield from _member_names(item)


def _requests(target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for operations, arguments in zip(target.operations, target.arguments, strict=True):
        yield from zip(operations, arguments, strict=True)


def find_unshown(target: Target) -> str:
    """Return a description of the first argument of the solution that no read shows in what its
    command changes; "" if all are shown."""
    before = target.start.resources
    for state, operations, arguments in zip(
        target.states, target.operations, target.arguments, strict=True
    ):
        changed = [
            f"{key[2]} {canonical(held, MemberPosition.of(key))}"
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
    """Yield (name, text) of each argument of a request; JSON documents are parsed."""
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
