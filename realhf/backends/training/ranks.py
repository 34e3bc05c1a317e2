"""Says what the workers of a role have in common while they train one model: the collaborator of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn


class Ranks(Protocol):
    """Joins the engines of one role, which all get the same calls with the same batch, in the same order.

    Every method but ``own``, ``settle`` and ``abort`` is a collective: all ranks call it with tensors of the same
    shape. One that cannot end because a rank is lost raises within the deadline of the implementation.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether the passes themselves are collectives (sharded weights), so that a rank which has nothing left to
        compute has to take part in those of the others."""
        ...

    def own(self, costs: Sequence[int]) -> list[int]:
        """Return which rows of sequences this rank computes, given the positions of each. Every row is that of one
        rank; a rank may have none."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Add ``tensor`` up over the ranks, in place: the same bits on all of them."""
        ...

    def gather(self, numbers: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the numbers of every rank, in the order of ranks. Names may differ from rank to rank."""
        ...

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of the parameters over the ranks. A gradient may be None on a rank that had nothing to
        compute; it counts as 0."""
        ...

    def settle(self) -> None:
        """Wait until what this rank has begun with the others is complete on its device. Raises where it was broken
        off meanwhile: a collective of a GPU that is broken off ends without an error, with a part of its sums."""
        ...

    def abort(self, reason: str = "") -> None:
        """Give up what the ranks have in common, so that nobody waits for this one."""
        ...


class SingleRank:
    """Is the ``Ranks`` of a role on one worker."""

    rank, size, in_step = 0, 1, False

    def own(self, costs: Sequence[int]) -> list[int]:
        """Return all sequences."""
        return list(range(len(costs)))

    def sum_(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""
        del tensor

    def gather(self, numbers: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the numbers alone."""
        return [dict(numbers)]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients as they are."""
        del parameters

    def settle(self) -> None:
        """Do nothing: there are no others."""

    def abort(self, reason: str = "") -> None:
        """Do nothing: nobody waits."""
        del reason
