"""Computes 95 % confidence intervals of a proportion and of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959964
"""Quantile of the normal distribution for a two-sided 95 % interval."""


def wilson_interval(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Return the score interval (low, high) of a proportion (Wilson 1927); (0, 1) without observations."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], z: float = Z95) -> tuple[float, float, float] | None:
    """Return (mean, low, high) from the standard error of the sample; None without values. A single value has no
    spread, so its interval is the value itself."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    half = z * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else 0.0
    return mean, mean - half, mean + half
