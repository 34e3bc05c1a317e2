"""Sets how long weights may take to arrive, by their size."""

from __future__ import annotations

BASE_S = 10.0
"""Seconds that any transfer may take, whatever its size."""
SLOWEST_BYTES_PER_S = 20e6
"""Slowest rate at which a transfer does not count as stuck."""


def transfer_s(nbytes: int) -> float:
    """Return the seconds after which a transfer of this size counts as stuck."""
    return BASE_S + nbytes / SLOWEST_BYTES_PER_S


def staging_s(nbytes: int) -> float:
    """Return the seconds that the bytes of a version add to a receiver's deadline: for one transfer to others that is
    under way, and for its own."""
    return 2 * nbytes / SLOWEST_BYTES_PER_S
