"""Defines what can go wrong when a run is spread over hosts."""

from __future__ import annotations


class ClusterError(OSError):
    """Is raised when workers cannot be started on the hosts that there are; the message names host and option."""
