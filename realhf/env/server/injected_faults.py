"""Simulated faults of sessions, for testing clients.

Faults are simulated only if a setting asks for them, and never on a real account. A session's
faults depend on the seed and on the session's number, so that the same requests meet the same
faults.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.api.environment import DEFAULT_FAULT_KINDS

UNAVAILABLE = "unavailable"
"""Fault: an error frame that says that the step was not executed."""
DISCONNECT = "disconnect"
"""Fault: the connection ends without an answer."""
HANG = "hang"
"""Fault: no answer is sent."""
KINDS = (UNAVAILABLE, DISCONNECT, HANG)


def parse_kinds(text: str) -> dict[str, float]:
    """Parse ``kind[=weight],...`` into weights by kind; the default weight is 1. Raises
    ValueError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, weight = part.strip().partition("=")
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} (known: {', '.join(KINDS)})")
        if kind in weights:
            raise ValueError(f"{kind} is named twice")
        try:
            weights[kind] = float(weight) if equals else 1.0
        except ValueError:
            raise ValueError(f"the weight of {kind} is {weight!r}, not a number") from None
        if not (math.isfinite(weights[kind]) and weights[kind] > 0):
            raise ValueError(f"the weight of {kind} is {weight}; it must be above 0")
    return weights


class SessionFaults:
    """Simulated faults of one session. ``latency_s`` is added to every step."""

    def __init__(
        self, latency_s: float, rate: float, weights: Mapping[str, float], seed: str
    ) -> None:
        self.latency_s = latency_s
        self._rate = rate
        self._weights = dict(weights)
        self._random = random.Random(seed)

    def draw(self) -> str | None:
        """Draw the fault for the next step request; None for no fault. A repeated request draws
        again."""
        if self._rate <= 0 or self._random.random() >= self._rate:
            return None
        return self._random.choices(list(self._weights), list(self._weights.values()))[0]


@dataclass
class InjectedFaults:
    """Simulated faults of one server. Raises ValueError for unknown kinds of faults."""

    latency_ms: float = 0.0
    """Milliseconds added to every step."""
    rate: float = 0.0
    """Fraction of step requests that fail."""
    kinds: str = DEFAULT_FAULT_KINDS
    """Kinds of faults and their weights, in the format of ``parse_kinds``."""
    seed: int = 0
    """Seed from which the faults of all sessions are drawn."""
    _sessions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._weights = parse_kinds(self.kinds)

    def session(self) -> SessionFaults:
        """Return the simulated faults for the next session that opens."""
        self._sessions += 1
        return SessionFaults(
            self.latency_ms / 1000, self.rate, self._weights, f"{self.seed}/{self._sessions}"
        )

    def describe(self) -> dict[str, Any] | None:
        """Return the settings that simulate faults, for ``/metadata``; None if no faults are
        simulated."""
        settings: dict[str, Any] = {}
        if self.latency_ms:
            settings["step_latency_ms"] = self.latency_ms
        if self.rate:
            settings |= {
                "fault_rate": self.rate,
                "fault_kinds": self.kinds,
                "fault_seed": self.seed,
            }
        return settings or None
