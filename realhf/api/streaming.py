"""What the master says about one streamed sample, to the worker that plays it and to the worker that receives it
(docs/reference/dataflow.md 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENV_ERROR, ENGINE_ERROR, TIMEOUT, CANCELLED, REJECTED = "env_error", "engine_error", "timeout", "cancelled", "rejected"


@dataclass(frozen=True)
class RolloutLease:
    """A sample to be played: admitted by the master, given to one rollout worker. ``(id, attempt)`` is the
    idempotency key; ``order`` counts admissions; ``version`` is the policy version at admission. The worker has
    ``deadline_s`` seconds. ``metadata`` and ``values`` are the source's item."""

    id: str
    attempt: int
    order: int
    version: int
    deadline_s: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        """msgpack-able."""
        return {
            "id": self.id,
            "attempt": self.attempt,
            "order": self.order,
            "version": self.version,
            "deadline_s": self.deadline_s,
            "metadata": self.metadata,
            "values": self.values,
        }

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> RolloutLease:
        """Undo of ``to_map``. Raises TypeError on other fields."""
        return RolloutLease(**fields)


ACCEPTED, DUPLICATE, REFUSED = "accepted", "duplicate", "refused"
"""Answers to an arrival: it will be trained; this attempt was accepted before; another attempt counts, or none."""


@dataclass(frozen=True)
class Arrival:
    """A sample that has arrived and is durable. ``ref`` is [segment, offset, bytes] in the payload log, ``meta`` the
    encoded metadata-only sample. With ``error`` set the sample is unusable, ``ref`` and ``meta`` are empty."""

    id: str
    attempt: int
    producer: str
    ref: list[int] = field(default_factory=list)
    meta: list[bytes] = field(default_factory=list)
    error: str = ""

    def to_map(self) -> dict[str, Any]:
        """msgpack-able."""
        return {
            "id": self.id,
            "attempt": self.attempt,
            "producer": self.producer,
            "ref": self.ref,
            "meta": self.meta,
            "error": self.error,
        }

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Arrival:
        """Undo of ``to_map``. Raises TypeError on other fields."""
        return Arrival(**fields)


def checked_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """The answers if there is a known one for every arrival. Raises ValueError otherwise."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)
