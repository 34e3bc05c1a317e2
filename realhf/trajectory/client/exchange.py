"""Runs one operation as a generator of requests and pauses: the part that the sync and the async client share.

A driver runs it: it performs every ``Request``, sends back a ``Response`` or a ``Failed``, and waits out every
``Pause``. No operation does any I/O itself.
"""

from __future__ import annotations

import email.utils
import logging
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from realhf.trajectory.client.errors import Unreachable

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_TELL_EVERY_S = 10.0
"""Seconds between two log lines about failed attempts."""


@dataclass(frozen=True)
class Request:
    """Asks the driver for an HTTP request. ``path`` is relative to the server's URL."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True)
class Response:
    """Holds a whole answer, decompressed. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Failed:
    """Says that no whole answer came. ``headers``: those that came before it broke off."""

    cause: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pause:
    """Asks the driver to wait this many seconds."""

    seconds: float


T = TypeVar("T")
Steps: TypeAlias = Generator[Request | Pause, Response | Failed | None, T]
"""An operation with a result of type T."""


@dataclass(frozen=True)
class Retry:
    """Says how long attempts go on after the first: ``seconds``. ``clock``: seconds, monotonic."""

    seconds: float
    clock: Callable[[], float] = time.monotonic

    def wait_s(self, attempt: int, outcome: Response | Failed) -> float:
        """Return the pause after the ``attempt``-th failure in a row: doubling, jittered, not shorter than
        Retry-After."""
        backoff = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
        wanted = retry_after_s(outcome.headers.get("retry-after")) if isinstance(outcome, Response) else 0.0
        return max(wanted, backoff) * random.uniform(0.8, 1.2)


def retry_after_s(text: str | None, now: Callable[[], float] = time.time) -> float:
    """Return the seconds of a Retry-After header: a number, or a date; 0 for anything else."""
    if text is None:
        return 0.0
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, TypeError):
        return 0.0


def answered(
    request: Request, url: str, retry: Retry, mend: Callable[[Response | Failed], Steps[None]] | None = None
) -> Steps[Response]:
    """Return the first answer below 500; ``mend`` is done before each new attempt. Raises Unreachable, with the last
    cause, when there is none in time."""
    began, told, attempt = retry.clock(), retry.clock(), 0
    while True:
        outcome = yield request
        assert outcome is not None
        if isinstance(outcome, Response) and outcome.status < 500:
            return outcome
        attempt += 1
        wait = retry.wait_s(attempt, outcome)
        cause, now = _cause(outcome), retry.clock()
        if now + wait > began + retry.seconds:
            raise Unreachable(
                url,
                f"{request.method} {request.path}: {cause}; gave up after {attempt} attempts in {now - began:.1f} s",
            )
        if attempt == 1 or now - told > _TELL_EVERY_S:
            told = now
            logger.warning("%s: %s %s: %s; trying again", url, request.method, request.path, cause)
        yield Pause(wait)
        if mend is not None:
            yield from mend(outcome)


def _cause(outcome: Response | Failed) -> str:
    if isinstance(outcome, Failed):
        return outcome.cause
    return f"status {outcome.status}: {outcome.body[:200].decode('utf-8', 'replace')}"
