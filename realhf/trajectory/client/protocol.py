"""Defines what client and server say to each other: errors, when to try again, answers as values, advice on pace."""

from __future__ import annotations

import email.utils
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class TrajectoryError(Exception):
    """Is the base of all errors of a client. ``url``: of the request, or of the server."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"{url}: {cause}")
        self.url = url
        self.cause = cause


class BadGroup(ValueError):
    """Is raised before anything is sent for a group that no server would take. The text names the field."""


class Unreachable(TrajectoryError):
    """Is raised when no usable answer came by the deadline: connection errors, 5xx, or a queue that stayed full."""


class BadAnswer(TrajectoryError):
    """Is raised for an answer that is not of this protocol, e.g. from another kind of server."""


class Refused(TrajectoryError):
    """Is raised when the server refused, and would refuse again. ``status``: of HTTP."""

    def __init__(self, url: str, cause: str, status: int) -> None:
        super().__init__(url, f"{status}: {cause}")
        self.status = status


class Denied(Refused):
    """Is raised when the token is missing, wrong, or without the role that the request needs (401, 403)."""


class StaleEpoch(Refused):
    """Is raised when the run that this client registered for has ended (409); register again for the present one."""


class LeaseLost(Refused):
    """Is raised when the lease is unknown (404), or has ended: given to another trainer, or acknowledged already
    (409)."""


class NotRegistered(TrajectoryError):
    """Is raised when no trainer has registered, or this client has not registered as an environment."""


class NoBatchYet(TrajectoryError):
    """Is raised when there was no batch by the deadline. ``reason``: the server's last ``X-Batch-Reason``."""

    def __init__(self, url: str, waited_s: float, reason: str) -> None:
        super().__init__(url, f"no batch within {waited_s:.1f} s ({reason})")
        self.reason = reason


_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0


@dataclass(frozen=True)
class Response:
    """Holds an answer, decompressed. ``failure`` says why no whole one came; headers are those that did."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    failure: str = ""

    @property
    def cause(self) -> str:
        """Why this answer is of no use."""
        return self.failure or f"status {self.status}: {self.body[:200].decode('utf-8', 'replace')}"


def retry_wait_s(attempt: int, response: Response) -> float:
    """Return the pause after the ``attempt``-th failure in a row: doubling, jittered, not shorter than Retry-After."""
    backoff = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
    wanted = 0.0 if response.failure else retry_after_s(response.headers.get("retry-after"))
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


_LONGEST_CAUSE = 500
"""Number of characters of an answer that an error quotes at most."""


@dataclass(frozen=True)
class TrainerRegistration:
    """Holds what a trainer learns by registering: the server's 128-bit id of this trainer, and the ``epoch`` of the
    run."""

    trainer_id: int
    epoch: int | None


@dataclass(frozen=True)
class EnvRegistration:
    """Holds what an environment learns by registering. ``batch_size`` in sequences; ``starting_step``: the current
    step."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    checkpoint_interval: int
    starting_step: int
    num_steps: int
    batch_size: int
    group_size: int
    min_batch_allocation: float | None
    epoch: int | None


@dataclass(frozen=True)
class EnvStatus:
    """Holds the answer of ``/status-env``: queue sizes in units of this environment's groups."""

    current_step: int
    queue_size: int
    self_queue_size: int
    max_group_size: int
    unallocated_fraction: float
    env_weight: float


@dataclass(frozen=True)
class PushReceipt:
    """Confirms that the server holds the groups.

    ``buffered``: how many wait for others of odd sizes; ``quarantined``: reasons for which some will never be
    delivered; ``replayed``: an earlier attempt had arrived already.
    """

    groups: int
    buffered: int
    quarantined: tuple[str, ...]
    replayed: bool


@dataclass(frozen=True)
class Batch:
    """Holds groups as their producers sent them, with all stock keys.

    Rows of numbers are numpy arrays on the binary wire and lists on JSON. ``step`` is the server's; the versions are
    the oldest and newest policy version in the batch.
    """

    groups: list[dict[str, Any]]
    lease_id: str
    step: int
    min_version: int
    max_version: int
    redelivered: bool

    @property
    def n_sequences(self) -> int:
        """The number of sequences of all groups."""
        return sum(len(group["tokens"]) for group in self.groups)


def json_object(response: Response, url: str) -> dict[str, Any]:
    """Return the body of a good answer as a map. Raises BadAnswer."""
    try:
        value = json.loads(response.body)
    except ValueError as error:
        raise BadAnswer(url, f"status {response.status} without JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadAnswer(url, f"a JSON object was due, not {type(value).__name__}")
    return value


def field_of(body: Mapping[str, Any], name: str, url: str) -> Any:
    """Return the value of a key that must be there. Raises BadAnswer."""
    if name not in body:
        raise BadAnswer(url, f"the answer lacks {name!r}: {str(dict(body))[:_LONGEST_CAUSE]}")
    return body[name]


def epoch_of(response: Response) -> int | None:
    """Return ``X-Epoch``; None from a server without epochs."""
    text = response.headers.get("x-epoch", "")
    return int(text) if text.isdigit() else None


def checked(response: Response, url: str) -> Response:
    """Return the answer itself if it is a good one. Raises Refused or one of its kinds."""
    if response.status < 300:
        return response
    cause = _detail(response)
    kind: type[Refused] = Refused
    if response.status in (401, 403):
        kind = Denied
    elif response.status == 409 and cause.startswith("epoch"):
        kind = StaleEpoch
    elif response.status in (404, 409) and "lease" in cause:
        kind = LeaseLost
    raise kind(url, cause, response.status)


def _detail(response: Response) -> str:
    """Return the server's explanation: a text, or the list of a 422 as ``body.0.tokens: message``."""
    try:
        detail = json.loads(response.body)["detail"]
    except (ValueError, KeyError, TypeError):
        return response.body[:_LONGEST_CAUSE].decode("utf-8", "replace") or "no explanation"
    if isinstance(detail, list):
        parts = [
            f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg')}" for item in detail if isinstance(item, dict)
        ]
        return "; ".join(parts)[:_LONGEST_CAUSE]
    return str(detail)[:_LONGEST_CAUSE]


BATCHES_AHEAD = 3
"""Number of queued batches from which a producer should pause."""


@dataclass(frozen=True)
class Pace:
    """Holds advice for a producer. ``pause``: enough is queued, begin nothing new; ``workers``: groups that may be in
    the making at once; ``done``: what is queued already suffices for the rest of the run."""

    pause: bool
    workers: int
    done: bool
    status: EnvStatus


def pace(status: EnvStatus, env: EnvRegistration) -> Pace:
    """Advise one environment. With an unregistered or empty batch size (below 1), no environment has to pause."""
    batch, group = max(1, env.batch_size), max(1, env.group_size)
    queued = status.queue_size * group
    own = int(batch * (status.unallocated_fraction + max(0.0, env.min_batch_allocation or 0.0)))
    return Pace(
        pause=queued >= BATCHES_AHEAD * batch,
        workers=max(0, BATCHES_AHEAD * own // group - status.queue_size),
        done=status.current_step + queued // batch > env.num_steps,
        status=status,
    )
