"""What the worker that receives finished samples tells the master, and the answers (dataflow spec, section 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        return {"id": self.id, "attempt": self.attempt, "producer": self.producer, "ref": self.ref,
                "meta": self.meta, "error": self.error}  # fmt: skip

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> Arrival:
        """Undo of ``to_map``. Raises TypeError on other fields."""
        return Arrival(**fields)


def checked_answers(arrivals: Sequence[Arrival], answers: Sequence[str]) -> list[str]:
    """The answers if there is a known one for every arrival. Raises ValueError otherwise."""
    if len(answers) != len(arrivals) or not set(answers) <= {ACCEPTED, DUPLICATE, REFUSED}:
        raise ValueError(f"{len(arrivals)} arrivals were answered with {list(answers)!r:.200}")
    return list(answers)
