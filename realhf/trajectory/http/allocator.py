"""Configures the C allocator to keep the buffers of bodies, because new pages from the kernel cost more than a copy."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``malloc.h``."""
KEPT_BYTES = 64 << 20
"""How much free memory at the end of the heap stays with the process."""
_HEAP_BYTES = 16 << 20
"""Size below which buffers come from the heap; larger ones come straight from the kernel."""


def keep_buffers() -> bool:
    """Keep freed buffers of this process from now on. Returns False where the C library has no such setting."""
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(tune(_TRIM_THRESHOLD, KEPT_BYTES) and tune(_MMAP_THRESHOLD, _HEAP_BYTES))
