"""Staleness limit: the admission counters, and the gate that prevents slow rollouts from becoming
too old.

Admission limits the number of samples that can be trained before any given sample. The gate decides
which of the finished samples a step may take, so that the samples left behind can still be trained
before they become too old.
"""

from __future__ import annotations


class StalenessManager:
    """Admission counters, in samples, and the capacity that follows from them.

    After a recovery at version v, pass ``version=v`` and ``consumed=v * batch_size``; ``accepted``
    is the same number plus the accepted samples that were restored. Raises ValueError on sizes
    below one and negative counters.
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
            raise ValueError(
                "batch_size and max_concurrent start at 1, max_head_offpolicyness at 0"
            )
        if version < 0 or not 0 <= consumed <= accepted:
            raise ValueError(
                f"impossible counters: version {version}, consumed {consumed}, accepted {accepted}"
            )
        self._batch_size = batch_size
        self._eta = max_head_offpolicyness
        self._max_concurrent = max_concurrent
        self.version = version
        """Lowest weight version among those that the current generation workers have loaded."""
        self.accepted = accepted
        """Number of samples accepted in the run that were or will be trained, without the dropped
        ones."""
        self.consumed = consumed
        """Number of accepted samples that were trained."""
        self.running = 0
        """Number of admitted samples without a final outcome."""
        self.rejected = 0
        """Number of admissions that ended without a sample."""
        self.dropped = 0
        """Number of samples accepted and discarded later."""
        self.admitted = 0
        """Number of admissions since this object was created."""

    @property
    def capacity(self) -> int:
        """Number of samples that may be admitted now.

        It is limited by concurrency and by staleness: even if all running and waiting samples are
        trained first, in whole batches, a new one is at most ``max_head_offpolicyness`` versions
        old when it is trained.
        """
        by_staleness = (self._eta + self.version + 1) * self._batch_size - (
            self.accepted + self.running
        )
        return max(0, min(self._max_concurrent - self.running, by_staleness))

    def admit(self, count: int = 1) -> None:
        """Count admitted samples. Raises ValueError beyond the capacity."""
        _check(count, self.capacity, "admitted", "there is capacity for")
        self.running += count
        self.admitted += count

    def accept(self, count: int = 1) -> None:
        """Count running samples as accepted: they are finished and will be trained. Raises
        ValueError if there are not that many."""
        _check(count, self.running, "accepted", "are running:")
        self.running -= count
        self.accepted += count

    def restore_accepted(self, count: int) -> None:
        """Count samples that were accepted before a restart and have been restored."""
        self.accepted += count

    def reject(self, count: int = 1) -> None:
        """Count running samples as rejected: they ended without a result or return to the queue.
        Raises ValueError if there are not that many."""
        _check(count, self.running, "rejected", "are running:")
        self.running -= count
        self.rejected += count

    def drop(self, count: int = 1) -> None:
        """Count accepted samples as dropped: they will never be trained, which frees their
        capacity. Raises ValueError if there are not that many that are accepted and not
        consumed."""
        _check(count, self.accepted - self.consumed, "dropped", "are accepted and not consumed:")
        self.accepted -= count
        self.dropped += count

    def consume(self, count: int) -> None:
        """Count accepted samples as trained. Raises ValueError if there are not that many."""
        _check(count, self.accepted - self.consumed, "consumed", "are accepted and not consumed:")
        self.consumed += count

    def set_version(self, version: int) -> None:
        """Set the version that all current generation workers have loaded. Raises ValueError for an
        older version."""
        if version < self.version:
            raise ValueError(
                f"the version of the weights cannot go back from {self.version} to {version}"
            )
        self.version = version

    def counters(self) -> dict[str, int]:
        """Return all counters and the capacity by name, for displays."""
        names = (
            "running",
            "accepted",
            "rejected",
            "consumed",
            "dropped",
            "version",
            "admitted",
            "capacity",
        )
        return {name: getattr(self, name) for name in names}


def _check(count: int, limit: int, verb: str, why: str) -> None:
    """Raise ValueError unless 0 <= count <= limit."""
    if not 0 <= count <= limit:
        raise ValueError(f"{count} samples cannot be {verb}; {why} {limit}")


class StragglerGate:
    """Gate that selects the samples of each step, by admission version, among those that have
    arrived.

    ``wait=False`` is the policy "drop": step batches are released without regard to stragglers, and
    ``drop_stale`` discards samples that arrived too late. Operations are O(1), a check
    O(max_head_offpolicyness).
    """

    def __init__(self, batch_size: int, max_head_offpolicyness: int, *, wait: bool = True) -> None:
        if batch_size < 1 or max_head_offpolicyness < 0:
            raise ValueError("batch_size starts at 1, max_head_offpolicyness at 0")
        self._batch_size = batch_size
        self._eta = max_head_offpolicyness
        self._wait = wait
        self._known: dict[str, tuple[int, int]] = {}
        """Admission version and admission number of every sample."""
        # Samples in play and arrived samples by admission version; the inner dicts are ordered
        # sets.
        self._running: dict[int, dict[str, None]] = {}
        self._staged: dict[int, dict[str, None]] = {}
        self._n_staged = 0

    def __len__(self) -> int:
        """Return the number of samples that have been admitted and neither forgotten nor
        released."""
        return len(self._known)

    @property
    def n_staged(self) -> int:
        """Number of samples that have arrived and wait for their step batch."""
        return self._n_staged

    def admit(self, id: str, version: int, order: int) -> None:
        """Add a sample that was leased at policy version ``version`` as admission number ``order``.

        A sample that is tried again must be forgotten first. Raises ValueError for a known sample.
        """
        if id in self._known:
            raise ValueError(f"{id} is admitted already")
        self._known[id] = (version, order)
        self._running.setdefault(version, {})[id] = None

    def stage(self, id: str) -> None:
        """Mark a sample as arrived. Raises ValueError for a sample that is unknown or has already
        arrived."""
        version = self._version(id)
        if id not in self._running.get(version, ()):
            raise ValueError(f"{id} has arrived already")
        _remove(self._running, version, id)
        self._staged.setdefault(version, {})[id] = None
        self._n_staged += 1

    def forget(self, id: str) -> None:
        """Remove a sample that was rejected or dropped, or will be admitted again. Raises
        ValueError for an unknown sample."""
        version = self._version(id)
        if id in self._staged.get(version, ()):
            _remove(self._staged, version, id)
            self._n_staged -= 1
        else:
            _remove(self._running, version, id)
        del self._known[id]

    def release(self, step: int, *, final: bool = False) -> list[str] | None:
        """Remove and return the ids of the step batch of ``step`` in the order of admission; None
        if the step must wait.

        Chooses the lowest admission versions and, among equal ones, the earliest arrivals.
        ``final`` means that there will be no more admissions. Then a last batch of fewer than
        ``batch_size`` is released once every sample has arrived, and an empty list means that no
        samples are left. Steps must be requested in ascending order.
        """
        outstanding = len(self._known)
        if self._n_staged < self._batch_size and not (final and outstanding == self._n_staged):
            return None
        if outstanding > self._batch_size and self._find_blocking_version(step) is not None:
            return None
        chosen: list[str] = []
        for version in sorted(self._staged):
            for id in self._staged[version]:
                if len(chosen) == self._batch_size:
                    break
                chosen.append(id)
        chosen.sort(key=lambda id: self._known[id][1])
        for id in chosen:
            self.forget(id)
        return chosen

    def stragglers(self, step: int) -> list[str]:
        """Return the running samples that ``step`` waits for, in the order of admission.

        These are the samples that would become too old or, if too few samples have arrived, all
        running samples. [] if the step need not wait.
        """
        blocked = self._find_blocking_version(step)
        if blocked is None and self._n_staged >= self._batch_size:
            return []
        versions = [version for version in self._running if blocked is None or version <= blocked]
        return sorted(
            (id for v in versions for id in self._running[v]), key=lambda id: self._known[id][1]
        )

    def drop_stale(self, step: int) -> list[str]:
        """Remove and return the arrived samples that are too old for ``step``, in the order of
        admission. For the policy "drop"."""
        versions = [version for version in self._staged if version < step - self._eta]
        stale = sorted(
            (id for v in versions for id in self._staged[v]), key=lambda id: self._known[id][1]
        )
        for id in stale:
            self.forget(id)
        return stale

    def count_overdue(self, step: int) -> int:
        """Return the number of arrived samples that will be too old even if the steps from ``step``
        on train nothing else.

        There can be such samples after a restart with a lower ``max_head_offpolicyness``.
        """
        versions = [version for version in sorted(self._staged) for _ in self._staged[version]]
        return sum(
            step + i // self._batch_size - version > self._eta for i, version in enumerate(versions)
        )

    def _find_blocking_version(self, step: int) -> int | None:
        """Return the lowest admission version v for which ``step`` must wait for stragglers; None
        if it need not wait.

        ``step`` must wait if, after it has taken its batch, more samples of versions up to v would
        be left than fit into the steps before they are too old (v + eta - step steps), and some of
        them are still running. Only versions that occur need a check: between them the count is
        constant and the limit grows.

        The step does not wait for samples that have all arrived. After a restart with a lower limit
        some of them may be too old already, and waiting would not help.
        """
        if not self._wait:
            return None
        n_left = 0
        n_running = 0
        batch_room = self._batch_size
        for version in sorted(self._running.keys() | self._staged.keys()):
            n_staged = len(self._staged.get(version, ()))
            n_taken = min(batch_room, n_staged)
            batch_room -= n_taken
            n_running += len(self._running.get(version, ()))
            n_left += n_staged - n_taken + len(self._running.get(version, ()))
            if n_running and n_left > max(0, version + self._eta - step) * self._batch_size:
                return version
        return None

    def _version(self, id: str) -> int:
        if id not in self._known:
            raise ValueError(f"{id} is not admitted")
        return self._known[id][0]


def _remove(table: dict[int, dict[str, None]], version: int, id: str) -> None:
    del table[version][id]
    if not table[version]:
        del table[version]
