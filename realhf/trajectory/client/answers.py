"""Reads the server's answers into values. Source: docs/reference/trajectory.md 2.3 to 2.8, 3.9, 3.10."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realhf.trajectory.client.errors import BadAnswer, Denied, LeaseLost, Refused, StaleEpoch
from realhf.trajectory.client.exchange import Response

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
