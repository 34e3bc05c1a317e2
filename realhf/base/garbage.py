"""Keeps the garbage collector from walking through what a starting process imports and loads.

A process that imports torch makes a million objects of which none is garbage; to look through them again and again is
a fifth of its start.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_WHILE_STARTING = (50_000, 20, 100)


def collect_rarely() -> None:
    """Collect garbage less often until ``settle``: before a process imports and loads what it keeps."""
    gc.set_threshold(*_WHILE_STARTING)


def settle() -> None:
    """Leave out of every later collection what is there now, and collect as usual from here on."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
