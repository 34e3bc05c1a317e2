"""Says for people what an episode changed in its account.

It is read from the requests that were sent and succeeded, so that no further request is made. What a request changed
beside the resource that it names is not followed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from realhf.aws.grading.inventory import LISTINGS
from realhf.aws.grading.tracker import Evidence, identifying_parameter

MOST_RESOURCES = 40
"""Resources that are shown of one episode; it says how many more there are."""
MOST_CALLS = 6
"""Calls that are shown of one resource, the last ones."""
LONGEST = 160
"""Characters that are shown of a name, and of what a call set."""
NONE, THERE, CHANGED, GONE = "none", "there", "changed", "gone"
DISTURBED = "(disturbed by the environment)"
_MAKES = ("Create", "Put", "Register", "Request")
_UNMAKES = ("Delete", "Deregister")
_KEY_ENDINGS = ("Name", "Arn", "ARN", "Url", "URL", "Identifier", "Id")
_OTHER_NOUNS = frozenset({"cachecluster", "autoscalinggroup", "metricalarm"})
"""Resources whose operations call them by a longer word than lists of them do."""


@dataclass
class _Resource:
    before: str
    after: str
    calls: list[str] = field(default_factory=list)
    n_calls: int = 0

    def told(self) -> list[str]:
        """Return the last calls, behind a word about those before."""
        left = self.n_calls - len(self.calls)
        return [*([f"{left} calls, then"] if left else []), *self.calls]


class AccountChanges:
    """Follows one episode. ``present``: (service, name) of what the set-up made."""

    def __init__(self, present: frozenset[tuple[str, str]] = frozenset()) -> None:
        self._present = present
        self._known: dict[tuple[str, str, str], _Resource] = {}
        self._left_out = 0

    def record(self, deeds: Iterable[Evidence]) -> None:
        """Take the requests of a command."""
        for deed in deeds:
            if deed.ok and deed.resource and not deed.reads:
                self._take(deed)

    def described(self, disturbed: Collection[tuple[str, str]] = ()) -> list[dict[str, Any]]:
        """Return the changes so far: ``service``, ``type`` ("" where it is not known), ``name``, ``before`` (none or
        there), ``after`` (there, changed, gone or none), ``calls``. The last entry counts calls that are left out, if
        there are any: ``more``. ``disturbed``: (service, name) of what the environment itself changed, which is told
        among the calls."""
        found: list[dict[str, Any]] = [
            {
                "service": service,
                "type": kind,
                "name": name[:LONGEST],
                "before": one.before,
                "after": one.after,
                "calls": one.told() + ([DISTURBED] if (service, name) in disturbed else []),
            }
            for (service, kind, name), one in sorted(self._known.items())
        ]
        return found + ([{"more": self._left_out}] if self._left_out else [])

    def _take(self, deed: Evidence) -> None:
        key, name = identifying_parameter(deed.service, deed.params)
        operation = deed.operation.partition(":")[2]
        kind = _kind(deed.service, key)
        made, unmade = _is_about(operation, _MAKES, deed.service), _is_about(operation, _UNMAKES, deed.service)
        known = self._known.get((deed.service, kind, name))
        if known is None:
            if len(self._known) >= MOST_RESOURCES:
                self._left_out += 1
                return
            was = THERE if not made or (deed.service, name) in self._present else NONE
            known = self._known[deed.service, kind, name] = _Resource(was, was)
        if unmade:
            known.after = GONE if known.before == THERE else NONE
        else:
            known.after = CHANGED if known.before == THERE else THERE
        known.n_calls += 1
        known.calls = [*known.calls, _said(operation, deed.params, key)][-MOST_CALLS:]


def _is_about(operation: str, verbs: tuple[str, ...], service: str) -> bool:
    """Return whether an operation makes (or removes) a whole resource of the service, rather than a part of one."""
    verb = next((verb for verb in verbs if operation.startswith(verb)), None)
    if verb is None:
        return False
    noun = operation.removeprefix(verb).lower()
    return noun in _OTHER_NOUNS or noun in {kind.replace("-", "") for kind in _kinds(service)}


def _kind(service: str, key: str) -> str:
    """Return the type of the resource that a parameter names; "" where that is open."""
    ending = next((ending for ending in _KEY_ENDINGS if key.endswith(ending)), "")
    noun = key.removesuffix(ending).lower()
    kinds = _kinds(service)
    found = [kind for kind in kinds if kind.replace("-", "") == noun]
    return found[0] if found else next(iter(kinds)) if len(kinds) == 1 else ""


@cache
def _kinds(service: str) -> frozenset[str]:
    return frozenset(row[0] for row in LISTINGS.get(service, ()))


def _said(operation: str, params: Mapping[str, Any], key: str) -> str:
    """Return a call with what it set beside the name."""
    rest = {name: value for name, value in params.items() if name != key.partition(".")[0]}
    text = json.dumps(rest, ensure_ascii=True, default=ascii, separators=(", ", ": ")) if rest else ""
    return f"{operation} {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'}".rstrip()
