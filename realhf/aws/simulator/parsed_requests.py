"""Counts what a simulator understood as requests: the other half of the account that a worker gives of what it sent.

The owner reads it over the control connection (``MiniStackProcess.requests``); an agent's worker cannot.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from realhf.aws.cli.http_grammar import RequestHead

KEPT = 2000
TARGET_CHARS = 500
"""Characters kept of a request's target."""
_SCOPE = re.compile(rb"Credential=[^/,]*/[0-9]+/[^/,]*/([a-z0-9-]+)/aws4_request")
_ACTION = re.compile(rb"(?:^|&)Action=([A-Za-z0-9]+)")
_FORM_BYTES = 4096


@dataclass(frozen=True)
class ParsedRequest:
    """Describes one request. ``number`` counts from 1; ``entrance`` is ``port`` (the agent's worker, or any other
    process that finds it), ``environment`` (the worker for command lines of tasks) or ``owner``. ``service`` is what
    the signature names, ``operation`` what JSON and query protocols say, "" for REST."""

    number: int
    entrance: str
    method: str
    target: str
    service: str
    operation: str


class ParsedRequests:
    """Counts every request that was parsed, whatever its answer, and every one that was refused, by reason."""

    def __init__(self) -> None:
        self.count = 0
        self.entrances: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self._recent: deque[ParsedRequest] = deque(maxlen=KEPT)

    def add(self, entrance: str, head: RequestHead, body: bytes) -> None:
        """Count a request."""
        self.count += 1
        self.entrances[entrance] = self.entrances.get(entrance, 0) + 1
        scope = _SCOPE.search(head.field(b"authorization"))
        self._recent.append(
            ParsedRequest(
                self.count,
                entrance,
                head.method,
                head.target[:TARGET_CHARS].decode("ascii"),
                scope[1].decode() if scope else "",
                _operation(head, body),
            )
        )

    def refuse(self, reason: str) -> None:
        """Count bytes that are not a request, or one that must not come from where it came."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def report(self, after: int = 0) -> dict[str, Any]:
        """Return ``count``, the same by ``entrances``, ``refused`` by reason, and the ``requests`` numbered above
        ``after`` that are kept."""
        recent = [asdict(request) for request in self._recent if request.number > after]
        return {
            "count": self.count,
            "entrances": dict(self.entrances),
            "refused": dict(self.refused),
            "requests": recent,
        }


def _operation(head: RequestHead, body: bytes) -> str:
    target = head.field(b"x-amz-target")
    if target:
        return target.rpartition(b".")[2].decode("latin-1")
    if head.field(b"content-type").startswith(b"application/x-www-form-urlencoded"):
        action = _ACTION.search(body[:_FORM_BYTES])
        return action[1].decode() if action else ""
    return ""
