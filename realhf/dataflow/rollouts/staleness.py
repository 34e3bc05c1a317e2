"""How many samples may be admitted without one becoming too old (docs/reference/dataflow.md 9, "Admission")."""

from __future__ import annotations


class StalenessManager:
    """The counters of admission, in samples, and the capacity that follows from them. One writer: the master.

    ``running``: admitted, outcome not final. ``accepted``: all that were accepted in this lineage and that were
    or will be trained; ``consumed`` of them were. ``rejected``: ended without a sample. ``dropped``: accepted
    and discarded later, taken out of ``accepted``. ``version``: the lowest weights version that a living
    generation server has acknowledged. ``admitted``: leases given since this object was made.

    After a recovery at version v: ``version=v``, ``consumed=v * batch_size`` and ``accepted`` = that and the
    accepted samples which were found again. Raises ValueError on sizes below one and negative counters.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_head_offpolicyness: int,
        max_concurrent: int,
        version: int = 0,
        accepted: int = 0,
        consumed: int = 0,
    ) -> None:
        if batch_size < 1 or max_concurrent < 1 or max_head_offpolicyness < 0:
            raise ValueError("batch_size and max_concurrent start at 1, max_head_offpolicyness at 0")
        if version < 0 or not 0 <= consumed <= accepted:
            raise ValueError(f"impossible counters: version {version}, consumed {consumed}, accepted {accepted}")
        self._batch_size = batch_size
        self._eta = max_head_offpolicyness
        self._max_concurrent = max_concurrent
        self.version = version
        self.accepted = accepted
        self.consumed = consumed
        self.running = 0
        self.rejected = 0
        self.dropped = 0
        self.admitted = 0

    @property
    def capacity(self) -> int:
        """Samples that may be admitted now: within the concurrency, and such that even if all that are under way
        and waiting are trained first, in whole batches, none is more than ``max_head_offpolicyness`` versions old."""
        by_staleness = (self._eta + self.version + 1) * self._batch_size - (self.accepted + self.running)
        return max(0, min(self._max_concurrent - self.running, by_staleness))

    def admit(self, count: int = 1) -> None:
        """Raises ValueError beyond the capacity."""
        _check(count, self.capacity, "admitted", "there is capacity for")
        self.running += count
        self.admitted += count

    def accept(self, count: int = 1) -> None:
        """Running samples were finished and will be trained."""
        _check(count, self.running, "accepted", "are running:")
        self.running -= count
        self.accepted += count

    def restore_accepted(self, count: int) -> None:
        """Samples that had been accepted before a restart were found again."""
        self.accepted += count

    def reject(self, count: int = 1) -> None:
        """Running samples ended without a result, or go back to be admitted anew."""
        _check(count, self.running, "rejected", "are running:")
        self.running -= count
        self.rejected += count

    def drop(self, count: int = 1) -> None:
        """Accepted samples that will never be trained: their room is free again."""
        _check(count, self.accepted - self.consumed, "dropped", "are accepted and not consumed:")
        self.accepted -= count
        self.dropped += count

    def consume(self, count: int) -> None:
        """Accepted samples became part of a training step."""
        _check(count, self.accepted - self.consumed, "consumed", "are accepted and not consumed:")
        self.consumed += count

    def set_version(self, version: int) -> None:
        """Every living generation server has these weights. Raises ValueError for a version that goes back."""
        if version < self.version:
            raise ValueError(f"the version of the weights cannot go back from {self.version} to {version}")
        self.version = version

    def counters(self) -> dict[str, int]:
        """All counters and the capacity, for displays."""
        names = ("running", "accepted", "rejected", "consumed", "dropped", "version", "admitted", "capacity")
        return {name: getattr(self, name) for name in names}


def _check(count: int, limit: int, verb: str, why: str) -> None:
    if not 0 <= count <= limit:
        raise ValueError(f"{count} samples cannot be {verb}; {why} {limit}")
