"""Defines how a worker computes together with the other workers of a model role, its *ranks*.

Every rank of a group call gets the whole batch and computes what concerns all of it alike; the engine divides the
sequences and sums gradients and statistics over ranks. No algorithm knows ranks.
"""

from __future__ import annotations

import contextlib
from typing import Protocol


class CollectiveBroken(RuntimeError):
    """What several ranks compute together broke off, because another rank failed, left or was too slow."""


class Group(Protocol):
    """The ranks of a role as the model host sees them: the attribute ``ranks`` of their engines. Outside ``together``
    a rank is alone: it computes every sequence of a batch, and waits for nobody."""

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Compute with the other ranks meanwhile. Raises CollectiveBroken when they do not come, or come for something
        else than ``what``. An error inside breaks off what the others compute; those raise CollectiveBroken."""
        ...

    def abort(self, reason: str) -> None:
        """Break off for good what the ranks compute together. May be called on any thread."""
        ...
