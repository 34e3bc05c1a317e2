"""Bounds how old samples become: the counters of admission, and the gate that keeps slow rollouts from being overtaken.

Admission bounds how many samples are ahead of one; the gate decides which of the finished ones a step may take,
so that those left behind still fit into the steps that remain to them.
"""

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


class StragglerGate:
    """Admitted and unconsumed samples by admission version, and which of them have arrived.

    ``wait=False`` is the policy "drop": step batches are released without regard to stragglers, and ``drop_stale``
    discards what came too late. Operations are O(1), a check O(max_head_offpolicyness).
    """

    def __init__(self, batch_size: int, max_head_offpolicyness: int, *, wait: bool = True) -> None:
        if batch_size < 1 or max_head_offpolicyness < 0:
            raise ValueError("batch_size starts at 1, max_head_offpolicyness at 0")
        self._batch_size = batch_size
        self._eta = max_head_offpolicyness
        self._wait = wait
        self._known: dict[str, tuple[int, int]] = {}
        self._running: dict[int, dict[str, None]] = {}
        self._staged: dict[int, dict[str, None]] = {}
        self._n_staged = 0

    def __len__(self) -> int:
        """Samples that are admitted and neither forgotten nor released."""
        return len(self._known)

    @property
    def staged(self) -> int:
        """Samples that have arrived and wait for their step batch."""
        return self._n_staged

    def admit(self, id: str, version: int, order: int) -> None:
        """A sample was given out at policy version ``version``; ``order`` counts admissions. A sample that is tried
        again is forgotten first. Raises ValueError for a sample that is known."""
        if id in self._known:
            raise ValueError(f"{id} is admitted already")
        self._known[id] = (version, order)
        self._running.setdefault(version, {})[id] = None

    def stage(self, id: str) -> None:
        """The sample was accepted and has arrived. Raises ValueError for an unknown one and for a second time."""
        version = self._version(id)
        if id not in self._running.get(version, ()):
            raise ValueError(f"{id} has arrived already")
        _remove(self._running, version, id)
        self._staged.setdefault(version, {})[id] = None
        self._n_staged += 1

    def forget(self, id: str) -> None:
        """The sample was rejected or dropped, or will be admitted again. Raises ValueError for an unknown one."""
        version = self._version(id)
        if id in self._staged.get(version, ()):
            _remove(self._staged, version, id)
            self._n_staged -= 1
        else:
            _remove(self._running, version, id)
        del self._known[id]

    def release(self, step: int, *, final: bool = False) -> list[str] | None:
        """The step batch of consuming step ``step`` in the order of admission, or None: wait.

        Chosen are the earliest admission versions, then the earliest arrivals. ``final``: nothing will be admitted
        any more, so that a last step batch of fewer than ``batch_size`` is released once everything has arrived; an
        empty list means that nothing is left. Steps are asked for in ascending order.
        """
        outstanding = len(self._known)
        if self._n_staged < self._batch_size and not (final and outstanding == self._n_staged):
            return None
        if outstanding > self._batch_size and self._blocked_at(step) is not None:
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
        """Running samples that the step batch of ``step`` waits for, in the order of admission: those that would
        become too old, else, with too few arrived, all. Empty where it does not wait."""
        blocked = self._blocked_at(step)
        if blocked is None and self._n_staged >= self._batch_size:
            return []
        versions = [version for version in self._running if blocked is None or version <= blocked]
        return sorted((id for v in versions for id in self._running[v]), key=lambda id: self._known[id][1])

    def drop_stale(self, step: int) -> list[str]:
        """Policy "drop": forget and return the arrived samples that are too old for ``step``, in the order of
        admission."""
        versions = [version for version in self._staged if version < step - self._eta]
        stale = sorted((id for v in versions for id in self._staged[v]), key=lambda id: self._known[id][1])
        for id in stale:
            self.forget(id)
        return stale

    def overdue(self, step: int) -> int:
        """How many arrived samples will be too old when their step comes, if those from ``step`` on take them alone, as
        after a restart with a lower bound."""
        versions = [version for version in sorted(self._staged) for _ in self._staged[version]]
        return sum(step + i // self._batch_size - version > self._eta for i, version in enumerate(versions))

    def _blocked_at(self, step: int) -> int | None:
        """The first admission version up to which more samples would be left behind than the steps that remain to
        them can take, some of which run; None: the step batch may go. Between versions that occur, the count stays and
        the bound grows. Nobody waits for samples that have all arrived: a run that goes on with a lower bound has some
        that are too old already, and waiting makes them no younger."""
        if not self._wait:
            return None
        left, running, room = 0, 0, self._batch_size
        for version in sorted(self._running.keys() | self._staged.keys()):
            here = len(self._staged.get(version, ()))
            taken = min(room, here)
            room -= taken
            running += len(self._running.get(version, ()))
            left += here - taken + len(self._running.get(version, ()))
            if running and left > max(0, version + self._eta - step) * self._batch_size:
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
