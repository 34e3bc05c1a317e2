"""Keeps a slow rollout from being overtaken until it is too old (docs/reference/dataflow.md 9, "Straggler gate").

Admission bounds how many samples are ahead of one; the gate decides which of the finished ones a step may take,
so that those left behind still fit into the steps that remain to them.
"""

from __future__ import annotations


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
        """How many arrived samples will be too old when their step comes, if those from ``step`` on take them alone."""
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
