"""Grading on a real account (BACKEND_TYPE=aws). The account's state is what its permitted list and
describe calls return.

The target is computed on a simulator that is read with the same calls. Whole accounts are never
compared. Instead, the changes that the solution makes in the simulator are required of the real
account, relative to its initial state. If an AWS default differs from the simulator's, a correct
episode is not accepted. Settings that the reads do not show are not graded. Source:
docs/reference/environment.md 7.
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
"""Replacement for every account id."""
_OWNER = "<owner>"
"""Replacement for the canonical user id of every account."""
_PAGING_MEMBERS = frozenset(
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
"""Members that describe the paging of an answer instead of the account, in lower case."""
_AMBIGUOUS_PREFIXES = ("sg-", "subnet-")
"""Id prefixes of resources whose names may also occur in other networks, so that they are
identified by id."""
_QUEUE_URL = re.compile(r"https?://[^/\s\"]+/(?=\d{12}/)")
_DENIED = re.compile(
    r"AccessDenied|Unauthorized|AuthFailure|ExpiredToken|OptInRequired|SubscriptionRequired|Internal"
)
"""Error codes that hide the state. All others mean that there is nothing to show."""
_BUSY = re.compile(r"Throttl|RequestLimitExceeded|TooManyRequests|SlowDown|ServiceUnavailable")
"""Error codes of transient errors."""
_CREATED = re.compile(r"^creat\w*(date|time|timestamp|at)?$", re.IGNORECASE)
"""Names of members that contain a creation time."""
_TOKENS = re.compile(r"(token|callerreference|creatorrequestid)$", re.IGNORECASE)
"""Names of members that contain idempotency tokens."""

_DESCRIPTIVE_ARGUMENTS = frozenset({"Version", "Sid", "Action"})
"""Arguments that only describe a request or a document. Reads do not always return them."""


class AccountReader:
    """Reader of an account through its list and describe calls.

    ``call``: sends an API request, like ``StateClient.call``. ``permits(service, operation)``:
    whether a call is allowed. ``services``: services to read. ``account``: account id.
    ``known_texts``: strings that contain names, such as a solution's commands; text that occurs in
    them is not treated as a generated id.
    """

    def __init__(
        self,
        call: Call,
        permits: Callable[[str, str], bool],
        services: frozenset[str],
        account: str,
        known_texts: Sequence[str],
    ) -> None:
        self._call = call
        self._permits = permits
        self._services = services
        self._account = account
        self._known_text = "\n".join(known_texts)
        self._hidden: frozenset[str] | None = None

    def read(self) -> Snapshot:
        """Return the account's present state.

        Raises SnapshotError if the account is too large, or if a read is denied now that was not
        denied at the first read. Raises ConnectionError if the account does not answer.
        """
        answers = walk(self._call, self._services, self._permits)
        if len(answers) >= MAX_CALLS:
            raise SnapshotError(f"the account needs more than {MAX_CALLS} reads")
        errors = {
            key: str(answer["error"]) for key, answer in answers.items() if set(answer) == {"error"}
        }
        for key, code in errors.items():
            if _BUSY.search(code):
                raise ConnectionError(f"{key} returned {code}")
        hidden = frozenset(key for key, code in errors.items() if _DENIED.search(code))
        if self._hidden is None:
            self._hidden = hidden
        elif more := hidden - self._hidden:
            raise SnapshotError(f"{min(more)} returned {errors[min(more)]}")
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
            for kind, identity, value in _named_structures(
                content, name, where, noun_of(name.split("/")[0])
            ):
                serials[service, kind, identity] = _serial(value)
                resources[service, kind, identity] = normalize_attributes(service, value, now)
        return Snapshot(resources, serials)

    def _anonymise(self, value: Any, owner: str) -> Any:
        """Return an answer in which generated ids are marked and the account's identity is
        replaced."""
        if isinstance(value, Mapping):
            members: dict[str, Any] = {}
            for name, item in value.items():
                if name == "ETag":  # The digest of an object's content stays as it is.
                    members["Content"] = item
                elif name.lower() not in _PAGING_MEMBERS:
                    members[self._anonymise_text(name, owner)] = self._anonymise(item, owner)
            return members
        if isinstance(value, list):
            return [self._anonymise(item, owner) for item in value]
        return self._anonymise_text(value, owner) if isinstance(value, str) else value

    def _anonymise_text(self, text: str, owner: str) -> str:
        text = _QUEUE_URL.sub("queue/", text.replace(owner, _OWNER)).replace(
            self._account, _ACCOUNT
        )
        return ID.sub(
            lambda match: (
                match[0] if match[0] in self._known_text else f"{DRAWN}{match[0]}{END_DRAWN}"
            ),
            text,
        )


def _texts(value: Any) -> Iterator[str]:
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, Mapping | list):
            yield from _texts(item)
        elif item not in (None, "", True, False):
            yield str(item)


def _named_structures(
    value: Mapping[str, Any], kind: str, where: str, about: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (kind, identity, attributes) for each named structure in an answer, and for the rest of
    the answer.

    ``where``: identity of the enclosing structure. ``about``: what the answer is about, as a noun.
    """
    rest: dict[str, Any] = {}
    for name, item in value.items():
        named = _identities(item, inner_noun(name, about)) if isinstance(item, list) else []
        if not named:
            rest[name] = item
        for identity, one in zip(named, item if named else (), strict=True):
            place = f"{where}|{identity}" if where else identity
            inner = one if isinstance(one, Mapping) else {}
            yield from _named_structures(inner, f"{kind}/{name}", place, inner_noun(name, about))
    yield kind, where, rest


def _identities(items: list[Any], about: str) -> list[str]:
    """Return the names of a list's elements, or [] unless every element has a unique name."""
    names = [item if isinstance(item, str) else _own_name(item, about) for item in items]
    return [name for name in names if name] if all(names) and len(set(names)) == len(names) else []


def _own_name(item: Any, about: str) -> str:
    names = [name for _, name in own_names(item, about)] if isinstance(item, Mapping) else []
    ids = [name for name in names if name.startswith(_AMBIGUOUS_PREFIXES) and DRAWN in name]
    return next(iter(ids or names), "")


def _serial(value: Mapping[str, Any]) -> int:
    """Return the creation time in seconds since the epoch, or 0 if it is unknown."""
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
    """Grader of an episode on a real account. ``read`` must be ``AccountReader.read``."""

    may_drop_settings = False

    def start(self) -> None:
        """Read the account before the first command.

        Raises TaskError if the permitted reads do not show everything that the task asks for, and
        SnapshotError or ConnectionError if the account cannot be read.
        """
        self._accepted_writes: list[Evidence] = []
        super().start()
        for goal in self._goals():
            if unshown := find_unshown(goal.target):
                raise TaskError(
                    f"a real account is graded by its permitted reads, and none shows {unshown}"
                )

    def evaluate(self, added: Sequence[Evidence], *, lost: bool = False) -> Grade:
        """See ``EndStateGrader.evaluate``."""
        self._accepted_writes += [request for request in added if request.ok and not request.reads]
        return super().evaluate(added, lost=lost)

    def _build_comparison(self, goal: Goal) -> EpisodeComparison:
        assert self._start is not None
        return EpisodeComparison(
            self._start, Goal(transfer_target(goal.target, self._start), goal.freedom)
        )

    def _compared_part(self, now: Snapshot, target: Target) -> Snapshot:
        """Return the account without those attributes of new resources that the simulator does not
        report.

        They are AWS defaults, provided that the agent sent no members that the solution does not
        send. Otherwise, return the whole account.
        """
        requested = {
            (request.operation, name)
            for request in self._accepted_writes
            for name in _member_names(request.params)
        }
        if not requested <= {
            (operation, name)
            for operation, params in _requests(target)
            for name in _member_names(params)
        }:
            return now
        assert self._start is not None
        known = {
            (key[:2], name)
            for state in target.states
            for key, attributes in state.resources.items()
            for name in attributes
        }
        kinds = {kind for kind, _ in known} | {
            key[:2] for state in target.states for key in state.resources
        }
        kept = {
            key: attributes
            if key in self._start.resources
            else {
                name: value
                for name, value in attributes.items()
                if _is_graded(key, name, value, known)
            }
            for key, attributes in now.resources.items()
            if key in self._start.resources or key[:2] in kinds
        }
        return replace(now, resources=kept)


def _is_graded(key: Key, name: str, value: Any, known: set[tuple[tuple[str, str], str]]) -> bool:
    return (key[:2], name) in known or is_opening(
        key, name, canonical(value, MemberPosition.of(key).inner(name))
    )


def _member_names(params: Any) -> Iterator[str]:
    """Yield the names of all members in a request's parameters, except idempotency tokens."""
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
    """Find the first argument of the solution that no read shows among the changes that its command
    made.

    Returns a description of it, or "" if all arguments are shown.
    """
    before = target.start.resources
    for state, operations, arguments in zip(
        target.states, target.operations, target.arguments, strict=True
    ):
        changed = [
            f"{key[2]} {canonical(attributes, MemberPosition.of(key))}"
            for key, attributes in state.resources.items()
            if before.get(key) != attributes
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
    """Yield (name, value as text) for each argument of a request. JSON documents are parsed."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not (_TOKENS.search(key) or key in _DESCRIPTIVE_ARGUMENTS):
                yield from _arguments(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _arguments(item, name)
    elif value not in (None, ""):
        yield name, _QUEUE_URL.sub("queue/", str(value))
