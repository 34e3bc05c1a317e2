"""What each worker has in play, so that neither its requests nor its death cost a look at everything in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Hand:
    ids: dict[str, None] = field(default_factory=dict)
    suspects: int = 0


class Hands:
    """Samples by worker. A ``suspect`` must not be played beside another such."""

    def __init__(self) -> None:
        self._hands: dict[str, _Hand] = {}

    def add(self, worker: str, sample_id: str, suspect: bool) -> None:
        """A worker has got a sample."""
        hand = self._hands.setdefault(worker, _Hand())
        hand.ids[sample_id] = None
        hand.suspects += suspect

    def remove(self, worker: str, sample_id: str, suspect: bool) -> None:
        """It has it no longer. Raises KeyError where it never had."""
        hand = self._hands[worker]
        del hand.ids[sample_id]
        hand.suspects -= suspect
        if not hand.ids:
            del self._hands[worker]

    def of(self, worker: str) -> Sequence[str]:
        """Return what a worker has, in the order in which it got it."""
        hand = self._hands.get(worker)
        return list(hand.ids) if hand else []

    def suspected(self, worker: str) -> bool:
        """Return whether a worker has a suspect."""
        hand = self._hands.get(worker)
        return hand is not None and hand.suspects > 0
