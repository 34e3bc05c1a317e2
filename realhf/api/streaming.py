"""Defines what the master says about one streamed sample, to the worker that plays it and to the worker that receives
it (docs/reference/dataflow.md 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import field

from realhf.base.messages import Message

ENV_ERROR, ENGINE_ERROR, AGENT_ERROR = "env_error", "engine_error", "agent_error"
TIMEOUT, CANCELLED, REJECTED = "timeout", "cancelled", "rejected"


class RolloutLease(Message, frozen=True):
    """Describes a sample to be played, which the master has admitted and given to one rollout worker. ``(id, attempt)``
    is the idempotency key; ``order`` counts admissions; ``version`` is the policy version at admission. The worker has
    ``deadline_s`` seconds. ``metadata`` and ``values`` are the source's item."""

    id: str
    attempt: int
    order: int
    version: int
    deadline_s: float
    metadata: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[int]] = field(default_factory=dict)


class EvaluationPart(Message, frozen=True):
    """Describes a share of a held-out evaluation, which a rollout worker plays beside its samples: of all instances
    (see ``HeldOutOptions``) every ``parts``-th from ``part`` on, ``greedy`` or at the training temperature. All tokens
    come from weights of ``version``, which the generation workers ``engines`` keep for it. ``(evaluation, part,
    greedy)`` names the share; the worker has ``deadline_s`` seconds."""

    evaluation: int
    part: int
    parts: int
    greedy: bool
    version: int
    engines: list[str]
    split: str
    episodes_per_task: int
    templates: int
    deadline_s: float


PayloadRef = list[int]
"""Where a payload lies: [segment, offset, bytes] in the payload log of the trainer's first rank, and [segment, offset,
bytes, rank] in that of another one."""


def rank_of(ref: Sequence[int]) -> int:
    """Return the rank of the trainer whose payload log holds a payload."""
    return ref[3] if len(ref) > 3 else 0


ACCEPTED, DUPLICATE, REFUSED = "accepted", "duplicate", "refused"
"""Answers to an arrival. ``accepted``: it will be trained; ``duplicate``: this attempt was accepted before, through the
same receiver; ``refused``: another attempt counts, or none, or this one was accepted through another receiver."""


class Arrival(Message, frozen=True):
    """Describes a sample that has arrived and is durable. ``ref`` says where it lies, ``meta`` is the encoded
    metadata-only sample. With ``error`` set the sample is unusable, and ``ref`` and ``meta`` are empty."""

    id: str
    attempt: int
    producer: str
    ref: PayloadRef = field(default_factory=list)
    meta: list[bytes] = field(default_factory=list)
    error: str = ""


def checked_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """Return the answers if there is a known one for every arrival. Raises ValueError otherwise."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)
