"""Who holds which slot: the free list of a pool and the state of every slot. No process is touched here.

    starting -> free -> leased -> scrubbing -> free
                  \\________\\___________\\-> unhealthy -> respawning -> free

Every transition is one call under one lock, so a slot has one owner at any time: the free list, a lease, or the
one who scrubs or respawns it. Source: docs/reference/environment.md 3.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
EXHAUSTED = "MiniStack pool exhausted"


class SlotState(enum.StrEnum):
    """Says where an item is between start, lease, scrub and respawn."""

    STARTING = "starting"
    FREE = "free"
    LEASED = "leased"
    SCRUBBING = "scrubbing"
    UNHEALTHY = "unhealthy"
    RESPAWNING = "respawning"


class LeaseBook(Generic[Item]):
    """Tracks ``items`` (ports, slots) by their index; all are STARTING at first. Thread-safe."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = tuple(items)
        self._states = [SlotState.STARTING] * len(self._items)
        self._free: deque[int] = deque()
        self._leases: dict[int, object] = {}
        self._lock = threading.Condition()

    def take(self, patience_s: float = 0.0) -> int:
        """Take the least recently used free item, which is LEASED from now on, and return its index.

        Waits ``patience_s`` for one that is on its way back. Raises RuntimeError("MiniStack pool exhausted").
        """
        with self._lock:
            deadline = time.monotonic() + patience_s
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0 or all(state is SlotState.LEASED for state in self._states):
                    raise RuntimeError(EXHAUSTED)
                self._lock.wait(left)
            index = self._free.popleft()
            self._states[index] = SlotState.LEASED
            return index

    def grant(self, index: int, lease: object) -> None:
        """Note to whom a taken item is leased."""
        with self._lock:
            self._leases[index] = lease

    def give_back(self, index: int, lease: object) -> None:
        """End a lease; the item is SCRUBBING. Raises ValueError when this very lease is not in force."""
        with self._lock:
            if index not in self._leases or self._leases[index] is not lease:
                raise ValueError(f"slot {index} is not leased from this pool")
            del self._leases[index]
            self._states[index] = SlotState.SCRUBBING

    def free(self, index: int) -> None:
        """Make a started, scrubbed or respawned item free. Raises ValueError when it is free or leased."""
        with self._lock:
            if self._states[index] in (SlotState.FREE, SlotState.LEASED):
                raise ValueError(f"slot {index} is {self._states[index]}; it cannot become free")
            self._states[index] = SlotState.FREE
            self._free.append(index)
            self._lock.notify()

    def fail(self, index: int) -> None:
        """Mark an item as unhealthy: its owner found it dead or dirty."""
        with self._lock:
            self._states[index] = SlotState.UNHEALTHY

    def fail_if_free(self, index: int) -> bool:
        """Mark an item as unhealthy if it is free: an onlooker found it dead. Returns False when it was taken
        meanwhile: its holder will notice."""
        with self._lock:
            if self._states[index] is not SlotState.FREE:
                return False
            self._free.remove(index)
            self._states[index] = SlotState.UNHEALTHY
            return True

    def begin_respawn(self, index: int) -> bool:
        """Return whether the item was UNHEALTHY, so that the caller may respawn it."""
        with self._lock:
            if self._states[index] is not SlotState.UNHEALTHY:
                return False
            self._states[index] = SlotState.RESPAWNING
            return True

    def adopt(self, index: int) -> None:
        """Lease a respawned item to the caller without having been free."""
        with self._lock:
            if self._states[index] is not SlotState.RESPAWNING:
                raise ValueError(f"slot {index} is {self._states[index]}, not respawning")
            self._states[index] = SlotState.LEASED

    def in_state(self, state: SlotState) -> list[int]:
        """Return the indices of the items in this state."""
        with self._lock:
            return [index for index, current in enumerate(self._states) if current is state]

    def counts(self) -> dict[str, int]:
        """Return the number of items by state."""
        with self._lock:
            return {str(state): self._states.count(state) for state in SlotState}
