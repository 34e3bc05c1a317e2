"""Client side of the protocol: errors, retries, typed answers, and pacing of producers."""

from __future__ import annotations

import email.utils
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class TrajectoryError(Exception):
    """Base class of all client errors. ``url``: address of the failed request, or of the server."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"{url}: {cause}")
        self.url = url
        self.cause = cause


class BadGroup(ValueError):
    """Raised before anything is sent if a group is invalid for any server. The message names the
    field."""


class Unreachable(TrajectoryError):
    """Raised if no usable answer came before the deadline, because of connection errors, 5xx
    statuses, or a queue that stayed full."""


class BadAnswer(TrajectoryError):
    """Raised for an answer that does not follow the protocol, e.g. from another kind of server."""


class Refused(TrajectoryError):
    """Raised if the server rejected a request and a retry would not help. ``status``: HTTP
    status."""

    def __init__(self, url: str, cause: str, status: int) -> None:
        super().__init__(url, f"{status}: {cause}")
        self.status = status


class Denied(Refused):
    """Raised if the token is missing, wrong, or lacks the role that the request needs (401, 403)."""


class StaleEpoch(Refused):
    """Raised if the run for which this client registered has ended (409). The client must register
    again for the current run."""


class LeaseLost(Refused):
    """Raised if the lease is unknown (404), or has ended (409) because the batch was given to
    another trainer or is already acknowledged."""


class NotRegistered(TrajectoryError):
    """Raised if no trainer has registered, or if this client has not registered as an
    environment."""


class NoBatchYet(TrajectoryError):
    """Raised if there was no batch before the deadline. ``reason``: the last ``X-Batch-Reason``
    from the server."""

    def __init__(self, url: str, waited_s: float, reason: str) -> None:
        super().__init__(url, f"no batch within {waited_s:.1f} s ({reason})")
        self.reason = reason


_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 5.0


@dataclass(frozen=True)
class Response:
    """An HTTP response with its body decompressed."""

    status: int
    """HTTP status; 0 if no answer came."""
    headers: Mapping[str, str]
    """Headers received so far."""
    body: bytes
    """Decompressed body."""
    failure: str = ""
    """Why no complete answer came; "" for a complete one."""

    @property
    def cause(self) -> str:
        """Why this answer cannot be used."""
        return self.failure or f"status {self.status}: {self.body[:200].decode('utf-8', 'replace')}"


def retry_wait_s(attempt: int, response: Response) -> float:
    """Return the seconds to wait after the ``attempt``-th failure in a row: exponential back-off
    with jitter, but at least Retry-After."""
    backoff = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
    server_wait_s = 0.0 if response.failure else retry_after_s(response.headers.get("retry-after"))
    return max(server_wait_s, backoff) * random.uniform(0.8, 1.2)


def retry_after_s(text: str | None, now: Callable[[], float] = time.time) -> float:
    """Return the seconds in a Retry-After header, which is a number or a date; 0 for anything
    else."""
    if text is None:
        return 0.0
    if text.strip().isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, TypeError):
        return 0.0


_MAX_CAUSE_CHARS = 500
"""Maximum number of characters of an answer that an error message quotes."""


@dataclass(frozen=True)
class TrainerRegistration:
    """Result of registering a trainer."""

    trainer_id: int
    """128-bit id that the server assigned."""
    epoch: int | None
    """Epoch of the run; None from a server without epochs."""


@dataclass(frozen=True)
class EnvRegistration:
    """Result of registering an environment."""

    env_id: int
    """Id of the environment, a number."""
    wandb_name: str
    """Unique name of the environment."""
    checkpoint_dir: str
    """Checkpoint folder of the run."""
    checkpoint_interval: int
    """Steps between checkpoints."""
    starting_step: int
    """Step of the run at the time of registration."""
    num_steps: int
    """Number of steps of the run."""
    batch_size: int
    """Sequences per batch."""
    group_size: int
    """Sequences per group of this environment."""
    min_batch_allocation: float | None
    """Smallest share of every batch; None: no minimum."""
    epoch: int | None
    """Epoch of the run; None from a server without epochs."""


@dataclass(frozen=True)
class EnvStatus:
    """Answer of ``/status-env``. Queue sizes are in units of this environment's groups."""

    current_step: int
    """Current step of the run."""
    queue_size: int
    """Queued groups of all environments."""
    self_queue_size: int
    """Queued groups of this environment."""
    max_group_size: int
    """Largest queued group in sequences."""
    unallocated_fraction: float
    """Fraction of a batch that is not reserved by minimum allocations."""
    env_weight: float
    """Share of this environment in batches."""


@dataclass(frozen=True)
class PushReceipt:
    """Confirmation that the server stored the groups."""

    groups: int
    """Number of groups that were pushed."""
    buffered: int
    """Number of groups that wait for others in the mix buffer."""
    quarantined: tuple[str, ...]
    """Reasons why some groups will never be delivered."""
    replayed: bool
    """Whether the server had already stored the groups, on an earlier attempt."""


@dataclass(frozen=True)
class Batch:
    """A batch of groups as their producers sent them, with all keys that an Atropos server
    returns."""

    groups: list[dict[str, Any]]
    """The groups. Rows of numbers are numpy arrays on the binary wire and lists on JSON."""
    lease_id: str
    """Id of the lease."""
    step: int
    """Step number that the server gave the batch."""
    min_version: int
    """Oldest policy version in the batch."""
    max_version: int
    """Newest policy version in the batch."""
    redelivered: bool
    """Whether the batch was delivered before."""

    @property
    def n_sequences(self) -> int:
        """Number of sequences in all groups."""
        return sum(len(group["tokens"]) for group in self.groups)


def json_object(response: Response, url: str) -> dict[str, Any]:
    """Return the body of an answer as a dict. Raises BadAnswer."""
    try:
        value = json.loads(response.body)
    except ValueError as error:
        raise BadAnswer(url, f"status {response.status} without JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadAnswer(url, f"a JSON object was due, not {type(value).__name__}")
    return value


def field_of(body: Mapping[str, Any], name: str, url: str) -> Any:
    """Return the value of a required key. Raises BadAnswer."""
    if name not in body:
        raise BadAnswer(url, f"the answer lacks {name!r}: {str(dict(body))[:_MAX_CAUSE_CHARS]}")
    return body[name]


def epoch_of(response: Response) -> int | None:
    """Return the value of ``X-Epoch``; None from a server without epochs."""
    text = response.headers.get("x-epoch", "")
    return int(text) if text.isdigit() else None


def check_response(response: Response, url: str) -> Response:
    """Return the answer if it is successful. Raises Refused or one of its subclasses."""
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
    """Return the server's explanation: its text, or the error list of a 422 formatted as
    ``body.0.tokens: message``."""
    try:
        detail = json.loads(response.body)["detail"]
    except (ValueError, KeyError, TypeError):
        return response.body[:_MAX_CAUSE_CHARS].decode("utf-8", "replace") or "no explanation"
    if isinstance(detail, list):
        parts = [
            f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg')}"
            for item in detail
            if isinstance(item, dict)
        ]
        return "; ".join(parts)[:_MAX_CAUSE_CHARS]
    return str(detail)[:_MAX_CAUSE_CHARS]


BATCHES_AHEAD = 3
"""Number of queued batches from which a producer should pause."""


@dataclass(frozen=True)
class Pace:
    """Advice for a producer on how fast to produce."""

    pause: bool
    """Whether to start nothing new, because enough is queued."""
    workers: int
    """Maximum number of groups to work on at once."""
    done: bool
    """Whether the queue already holds enough for the rest of the run."""
    status: EnvStatus
    """Values from which the advice was computed."""


def pace(status: EnvStatus, env: EnvRegistration) -> Pace:
    """Return the advice for one environment. If the batch size is unknown (below 1), the advice is
    never to pause."""
    batch = max(1, env.batch_size)
    group = max(1, env.group_size)
    queued = status.queue_size * group
    own = int(batch * (status.unallocated_fraction + max(0.0, env.min_batch_allocation or 0.0)))
    return Pace(
        pause=queued >= BATCHES_AHEAD * batch,
        workers=max(0, BATCHES_AHEAD * own // group - status.queue_size),
        done=status.current_step + queued // batch > env.num_steps,
        status=status,
    )
