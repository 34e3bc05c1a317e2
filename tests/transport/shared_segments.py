"""Named shared memory that outlives its process."""

from __future__ import annotations

import os

_OF_OTHERS = ("sem.", ".org.chromium.")
"""Semaphores of process pools and a browser's memory come and go beside a test."""


def named_segments() -> set[str]:
    """Of all processes of this machine."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_OTHERS)}
