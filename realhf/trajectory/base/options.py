"""Defines how the state behaves: every rule that ``strict`` or the command line may change, as one frozen value.

Source: docs/reference/trajectory.md 3.12 (the strict switch) and the options named in 3.4 to 3.10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

DEFAULT_QUEUE_BYTES = 16 << 30
DEFAULT_QUARANTINE_BYTES = 256 << 20


_CHOICES = {
    "reregister": ("continue", "reset", "ignore"), "delivery": ("at_least_once", "at_most_once"),
    "stale_policy": ("quarantine", "last"), "min_rounding": ("floor", "ceil"),
}  # fmt: skip


@dataclass(frozen=True)
class StateOptions:
    """Holds the rules of one state. Sizes in bytes (0: no limit), times in seconds. The first twelve are the rows of
    the strict switch, each with the default of this server."""

    reregister: str = "continue"
    divisor_packing: bool = True
    weighted_fill: bool = True
    recheck_minimums: bool = True
    heartbeat_timeout_s: float = 300.0
    lease_anonymous: bool = True
    count_others_of_size_one: bool = True
    status_before_registration: bool = True
    fence_epochs: bool = True
    bound_staleness: bool = True
    bound_integers: bool = True
    forget_on_reset: bool = True

    lease_timeout_s: float = 600.0
    send_timeout_s: float = 60.0
    delivery: str = "at_least_once"
    max_queue_groups: int = 1_000_000
    max_queue_bytes: int = DEFAULT_QUEUE_BYTES
    quarantine_bytes: int = DEFAULT_QUARANTINE_BYTES
    max_quarantine_groups: int = 100_000
    buffer_expiry_s: float = 3600.0
    max_buffered_groups: int = 4096
    replay_ttl_s: float = 3600.0
    max_replays: int = 250_000
    env_expiry_s: float = 86_400.0
    max_staleness: int | None = None
    stale_policy: str = "quarantine"
    min_rounding: str = "floor"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name in (
            "heartbeat_timeout_s", "lease_timeout_s", "send_timeout_s", "buffer_expiry_s", "replay_ttl_s",
            "env_expiry_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds")


def strict(options: StateOptions, **chosen: Any) -> StateOptions:
    """Set every row of the strict switch to the original's behaviour, except the rows named in ``chosen``."""
    rows: dict[str, Any] = {
        "reregister": "ignore",
        "divisor_packing": False,
        "weighted_fill": False,
        "recheck_minimums": False,
        "heartbeat_timeout_s": math.inf,
        "lease_anonymous": False,
        "count_others_of_size_one": False,
        "status_before_registration": False,
        "fence_epochs": False,
        "bound_staleness": False,
        "bound_integers": False,
        "forget_on_reset": False,
    }
    return replace(options, **(rows | chosen))
