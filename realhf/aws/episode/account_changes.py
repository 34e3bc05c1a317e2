"""Human-readable summary of what an episode changed in its account.

It is derived from the accepted requests, so it sends none itself. Side effects of a request on
resources that it does not name are not included.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from realhf.aws.grading.inventory import LISTINGS
from realhf.aws.grading.tracker import Evidence, identifying_parameter

MAX_RESOURCES = 40
"""Maximum number of resources listed for one episode. The summary counts the calls about others."""
MAX_CALLS = 6
"""Maximum number of calls listed for one resource; the last ones are listed."""
LONGEST = 160
"""Maximum length of a name, and of the text of a call's parameters, in characters."""
NONE = "none"
THERE = "there"
CHANGED = "changed"
GONE = "gone"
DISTURBED = "(disturbed by the environment)"
_CREATE_VERBS = ("Create", "Put", "Register", "Request")
_DELETE_VERBS = ("Delete", "Deregister")
_KEY_ENDINGS = ("Name", "Arn", "ARN", "Url", "URL", "Identifier", "Id")
_OTHER_NOUNS = frozenset({"cachecluster", "autoscalinggroup", "metricalarm"})
"""Kinds of resources whose names in operations are longer than in ``LISTINGS``."""


@dataclass
class _Resource:
    """State of one resource before the episode and now, with the calls that changed it."""

    before: str
    """State before the episode: NONE or THERE."""
    after: str
    """Present state: THERE, CHANGED, GONE or NONE."""
    calls: list[str] = field(default_factory=list)
    """The last calls, as strings."""
    n_calls: int = 0
    """Number of calls in total."""

    def call_lines(self) -> list[str]:
        """Return the last calls, preceded by a line with the number of earlier ones."""
        earlier = self.n_calls - len(self.calls)
        return [*([f"{earlier} calls, then"] if earlier else []), *self.calls]


class AccountChanges:
    """Summary of the changes in one episode. ``present``: (service, name) of the resources that the
    set-up created."""

    def __init__(self, present: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._present = present
        self._known: dict[tuple[str, str, str], _Resource] = {}
        self._n_omitted = 0

    def record(self, requests: Iterable[Evidence]) -> None:
        """Add the requests of one command."""
        for request in requests:
            if request.ok and request.resource and not request.reads:
                self._add(request)

    def describe(self, disturbed: Collection[tuple[str, str]] = ()) -> list[dict[str, Any]]:
        """Return the changes so far, one dict for each resource.

        Keys: ``service``, ``type`` ("" if unknown), ``name``, ``before`` (none or there), ``after``
        (there, changed, gone or none), ``calls``. If calls about further resources were left out,
        the last entry is ``{"more": number of those calls}``. ``disturbed``: (service, name) of the
        resources that the environment itself changed, which is noted among their calls.
        """
        changes: list[dict[str, Any]] = [
            {
                "service": service,
                "type": kind,
                "name": name[:LONGEST],
                "before": one.before,
                "after": one.after,
                "calls": one.call_lines() + ([DISTURBED] if (service, name) in disturbed else []),
            }
            for (service, kind, name), one in sorted(self._known.items())
        ]
        return changes + ([{"more": self._n_omitted}] if self._n_omitted else [])

    def _add(self, request: Evidence) -> None:
        key, name = identifying_parameter(request.service, request.params)
        operation = request.operation.partition(":")[2]
        kind = _kind(request.service, key)
        creates = _is_about(operation, _CREATE_VERBS, request.service)
        deletes = _is_about(operation, _DELETE_VERBS, request.service)
        resource = self._known.get((request.service, kind, name))
        if resource is None:
            if len(self._known) >= MAX_RESOURCES:
                self._n_omitted += 1
                return
            before = THERE if not creates or (request.service, name) in self._present else NONE
            resource = self._known[request.service, kind, name] = _Resource(before, before)
        if deletes:
            resource.after = GONE if resource.before == THERE else NONE
        else:
            resource.after = CHANGED if resource.before == THERE else THERE
        resource.n_calls += 1
        resource.calls = [*resource.calls, _call_text(operation, request.params, key)][-MAX_CALLS:]


def _is_about(operation: str, verbs: tuple[str, ...], service: str) -> bool:
    """Return whether an operation has one of the verbs and applies to a whole resource of the
    service, not to a part of one."""
    verb = next((verb for verb in verbs if operation.startswith(verb)), None)
    if verb is None:
        return False
    noun = operation.removeprefix(verb).lower()
    return noun in _OTHER_NOUNS or noun in {kind.replace("-", "") for kind in _kinds(service)}


def _kind(service: str, key: str) -> str:
    """Return the type of the resource that a parameter names, or "" if it is ambiguous."""
    ending = next((ending for ending in _KEY_ENDINGS if key.endswith(ending)), "")
    noun = key.removesuffix(ending).lower()
    kinds = _kinds(service)
    found = [kind for kind in kinds if kind.replace("-", "") == noun]
    return found[0] if found else next(iter(kinds)) if len(kinds) == 1 else ""


@cache
def _kinds(service: str) -> frozenset[str]:
    return frozenset(row[0] for row in LISTINGS.get(service, ()))


def _call_text(operation: str, params: Mapping[str, Any], key: str) -> str:
    """Return a call as a string: the operation, and its parameters without the resource's name."""
    rest = {name: value for name, value in params.items() if name != key.partition(".")[0]}
    text = (
        json.dumps(rest, ensure_ascii=True, default=ascii, separators=(", ", ": ")) if rest else ""
    )
    return f"{operation} {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}".rstrip()
