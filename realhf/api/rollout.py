"""What the master and the rollout workers say to each other about one sample (spec dataflow, section 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENV_ERROR, ENGINE_ERROR, TIMEOUT, CANCELLED, REJECTED = "env_error", "engine_error", "timeout", "cancelled", "rejected"

ON_FAILURE = ("drop", "retry", "raise")
"""What becomes of a rollout whose environment failed: left out, played once more, an error."""


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
        return {"id": self.id, "attempt": self.attempt, "order": self.order, "version": self.version,
                "deadline_s": self.deadline_s, "metadata": self.metadata, "values": self.values}  # fmt: skip

    @staticmethod
    def from_map(fields: Mapping[str, Any]) -> RolloutLease:
        """Undo of ``to_map``. Raises TypeError on other fields."""
        return RolloutLease(**fields)
