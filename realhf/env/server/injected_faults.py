"""Simulates trouble for tests and benchmarks: slow steps, and steps that fail on purpose.

Nothing here happens unless it is asked for, and never on a real account. The faults of a session are drawn from the
seed and the number of the session, so that the same play meets the same faults.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNAVAILABLE, DISCONNECT, HANG = "unavailable", "disconnect", "hang"
"""Kinds of faults. ``unavailable``: an error frame that says the step was not executed; ``disconnect``: the connection
ends without an answer; ``hang``: there is no answer."""
KINDS = (UNAVAILABLE, DISCONNECT, HANG)
DEFAULT_KINDS = "unavailable=9,disconnect=1"


def parse_kinds(text: str) -> dict[str, float]:
    """Parse ``kind[=weight],...`` into weights (1 where none is given). Raises ValueError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        kind, given, weight = part.strip().partition("=")
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} (known: {', '.join(KINDS)})")
        if kind in weights:
            raise ValueError(f"{kind} is named twice")
        try:
            weights[kind] = float(weight) if given else 1.0
        except ValueError:
            raise ValueError(f"the weight of {kind} is {weight!r}, not a number") from None
        if not (math.isfinite(weights[kind]) and weights[kind] > 0):
            raise ValueError(f"the weight of {kind} is {weight}; it must be above 0")
    return weights


class SessionTrouble:
    """Draws what one session meets. ``latency_s`` is added to every step."""

    def __init__(self, latency_s: float, rate: float, weights: Mapping[str, float], seed: str) -> None:
        self.latency_s = latency_s
        self._rate = rate
        self._weights = dict(weights)
        self._random = random.Random(seed)

    def draw(self) -> str | None:
        """Return the fault of the next step request, or None. A request that is sent again draws again."""
        if self._rate <= 0 or self._random.random() >= self._rate:
            return None
        return self._random.choices(list(self._weights), list(self._weights.values()))[0]


@dataclass
class InjectedFaults:
    """Describes the trouble of one server. ``rate``: fraction of step requests that fail; ``kinds``: see
    ``parse_kinds``."""

    latency_ms: float = 0.0
    rate: float = 0.0
    kinds: str = DEFAULT_KINDS
    seed: int = 0
    _sessions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._weights = parse_kinds(self.kinds)

    def session(self) -> SessionTrouble:
        """Return the trouble of the next session that opens."""
        self._sessions += 1
        return SessionTrouble(self.latency_ms / 1000, self.rate, self._weights, f"{self.seed}/{self._sessions}")

    def described(self) -> dict[str, Any] | None:
        """Return what is simulated, for those who ask the server; None when nothing is."""
        found: dict[str, Any] = {}
        if self.latency_ms:
            found["step_latency_ms"] = self.latency_ms
        if self.rate:
            found |= {"fault_rate": self.rate, "fault_kinds": self.kinds, "fault_seed": self.seed}
        return found or None
