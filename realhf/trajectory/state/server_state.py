"""In-memory state of the server: tables of frozen records, and indexes derived from the tables.

Commands change it only through ``put``, ``delete`` and ``clear``, so a restored state, or one that
follows another instance, equals the state that executed the commands. Source:
docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from realhf.trajectory.records import (
    TABLES,
    ClosedLease,
    EnvRecord,
    GroupPlace,
    GroupRecord,
    LeaseRecord,
    Record,
    RunRecord,
    StateOptions,
    StoredReply,
    table_and_key,
)
from realhf.trajectory.state.queue_index import QueueIndex
from realhf.trajectory.store.base import Changes, Key, Snapshot

_Undo = tuple[str, Any, Any] | Callable[[], Any]
"""One undo step: (table, key, previous row or None), or a function that restores everything else.
"""
_INDEXES = (
    "tables", "envs", "groups", "leases", "closed", "replays", "queue", "with_stale", "stale", "buffers", "quarantine",
    "quarantine_bytes", "leased_groups", "waiting_bytes", "_versions",
)  # fmt: skip
"""Attributes that ``_empty`` creates, except the counters of ids and orders, which are never
reused."""


class TrajectoryState:
    """Tables, indexes and the changes since the last ``take_changes``. Not thread-safe: the event
    loop owns it.

    ``envs`` (in the order of registration), ``groups``, ``leases``, ``closed`` and ``replays`` are
    tables by key. ``queue`` contains the groups that may be packed; ``buffers`` the mix buffer of
    each environment and ``quarantine`` the groups that can never be served, both oldest first.
    ``stale`` contains queued groups that only fill a batch when nothing fresher does, and
    ``with_stale`` (only with that policy) all queued groups, the stale ones last. ``counters``
    count events since the start of the process.
    """

    def __init__(self, options: StateOptions) -> None:
        self.options = options
        self.counters: Counter[str] = Counter()
        self._changes = Changes()
        self._undo: list[_Undo] = []
        self._recording = True
        self._empty()

    def _empty(self) -> None:
        self.tables: dict[str, dict[Any, Any]] = {table: {} for table in TABLES}
        self.envs: dict[int, EnvRecord] = self.tables["envs"]
        self.groups: dict[int, GroupRecord] = self.tables["groups"]
        self.leases: dict[str, LeaseRecord] = self.tables["leases"]
        self.closed: dict[str, ClosedLease] = self.tables["closed"]
        self.replays: dict[str, StoredReply] = self.tables["replays"]
        self.queue = QueueIndex()
        self.with_stale = QueueIndex()
        self.stale: dict[int, GroupRecord] = {}
        self.buffers: dict[int | None, dict[int, GroupRecord]] = {}
        self.quarantine: dict[int, GroupRecord] = {}
        self.quarantine_bytes = 0
        self.leased_groups = 0
        self.waiting_bytes = 0
        self._versions: list[tuple[int, int, int]] = []
        self._next_id = 0
        self._next_order = 0

    @property
    def run(self) -> RunRecord:
        """The registration and its counters; an empty record before the first registration."""
        return self.tables["run"].get("run") or RunRecord()

    @property
    def max_staleness(self) -> int | None:
        """Largest number of policy versions that a group may lag behind the current one; None for
        no bound.

        Source: docs/reference/trajectory.md 3.9.
        """
        if self.options.is_strict("bound_staleness"):
            return None
        own = self.run.max_staleness
        return self.options.max_staleness if own is None else own

    @property
    def waiting_groups(self) -> int:
        """Number of groups that count towards the queue limit: queued, buffered and leased."""
        return (
            self.queue.groups
            + len(self.stale)
            + self.leased_groups
            + sum(map(len, self.buffers.values()))
        )

    def next_id(self) -> int:
        """Return an unused group id."""
        self._next_id += 1
        return self._next_id

    def next_order(self) -> int:
        """Return an order higher than all previous ones."""
        self._next_order += 1
        return self._next_order

    def put(self, table: str, key: Key, record: Record) -> None:
        """Write one row and update the indexes."""
        old = self.tables[table].get(key)
        self.tables[table][key] = record
        if isinstance(record, GroupRecord):
            if old is not None:
                self._leave(old)
                # Other instances that follow the changes must get groups in the order in which they
                # entered.
                self._changes.rows.pop((table, key), None)
            self._enter(record)
        elif isinstance(record, RunRecord):
            self._update_run(old or RunRecord(), record)
        if self._recording:
            self._changes.rows[(table, key)] = record
            self._undo.append((table, key, old))

    def put_run(self, record: RunRecord) -> None:
        """Write the registration and its counters."""
        self.put("run", "run", record)

    def delete(self, table: str, key: Key) -> None:
        """Remove one row. The payload of a deleted group is freed, unless it is the latest
        example."""
        old = self.tables[table].pop(key)
        if isinstance(old, GroupRecord):
            self._leave(old)
            latest = self.run.latest
            if latest is None or latest.id != old.id:
                self.discard(old.payload.ref)
        if self._recording:
            self._changes.rows[(table, key)] = None
            self._undo.append((table, key, old))

    def discard(self, *refs: Any) -> None:
        """Free staged payloads that no record refers to."""
        if self._recording:
            self._changes.freed.extend(refs)

    def clear(self, run: RunRecord) -> None:
        """Empty all tables and start again with ``run``."""
        kept_id = None if run.latest is None else run.latest.id
        refs = [group.payload.ref for group in self.groups.values() if group.id != kept_id]
        latest = self.run.latest
        if latest is not None and latest.id not in self.groups and latest.id != kept_id:
            refs.append(latest.payload.ref)
        next_id = self._next_id
        next_order = self._next_order
        before = {name: getattr(self, name) for name in _INDEXES}
        self._empty()
        self._next_id = next_id
        self._next_order = next_order
        if self._recording:
            self._changes = Changes(freed=[*self._changes.freed, *refs], cleared=True)
            self._undo.append(lambda: self.__dict__.update(before))
        self.put_run(run)

    def take_changes(self) -> Changes:
        """Return the changes since the last call and start collecting new ones. They can be undone
        until the next ``settle``."""
        changes = self._changes
        self._changes = Changes()
        return changes

    def settle(self) -> None:
        """Drop the undo log, because the changes so far are durable."""
        self._undo = []

    def undo(self) -> None:
        """Undo all changes since the last ``settle``, newest first. The cost is proportional to the
        changes, not to the size of the state."""
        steps = self._undo
        self._undo = []
        self._changes = Changes()
        self._recording = False
        touched = set[str | int | None]()
        try:
            for step in reversed(steps):
                if callable(step):
                    step()
                    continue
                table, key, old = step
                if old is not None:
                    self.put(table, key, old)
                elif key in self.tables[table]:
                    self.delete(table, key)
                touched.add(table)
                if isinstance(old, GroupRecord) and old.place is GroupPlace.BUFFER:
                    touched.add(old.env_id)
                if isinstance(old, GroupRecord) and old.place is GroupPlace.QUARANTINE:
                    touched.add("quarantine")
        finally:
            self._recording = True
            self._undo = []
        self._restore_order(touched)

    def _restore_order(self, touched: set[str | int | None]) -> None:
        """Sort the rows that ``undo`` restored, oldest first."""
        by_order = attrgetter("order")
        for env_id in touched & self.buffers.keys():
            held = sorted(self.buffers[env_id].values(), key=by_order)  # type: ignore[index]
            self.buffers[env_id] = {group.id: group for group in held}  # type: ignore[index]
        if "quarantine" in touched:
            self.quarantine = {
                group.id: group for group in sorted(self.quarantine.values(), key=by_order)
            }
        if "envs" in touched:
            self._sort_envs()

    def _sort_envs(self) -> None:
        envs = sorted(self.envs.items())
        self.envs.clear()
        self.envs.update(envs)

    def load(self, snapshot: Snapshot) -> None:
        """Replace the state with a committed snapshot."""
        self._empty()
        self._changes = Changes()
        self._undo = []
        groups: list[GroupRecord] = [
            record for record in snapshot["groups"] if isinstance(record, GroupRecord)
        ]
        records: Iterable[Record] = (
            *snapshot["run"],
            *snapshot["envs"],
            *sorted(groups, key=attrgetter("order")),
            *snapshot["leases"],
            *sorted(snapshot["closed"], key=attrgetter("closed_at")),
            *sorted(snapshot["replays"], key=attrgetter("stored_at")),
        )
        self._recording = False
        try:
            for record in records:
                self.put(*table_and_key(record), record)
            self._sort_envs()
        finally:
            self._recording = True

    def follow(self, changes: Changes) -> None:
        """Apply changes that another instance committed."""
        self._recording = False
        try:
            if changes.cleared:
                self._empty()
            for (table, key), record in changes.rows.items():
                if record is not None:
                    self.put(table, key, record)
                elif key in self.tables[table]:
                    self.delete(table, key)
        finally:
            self._recording = True

    def take_stale(self, limit: int) -> tuple[list[GroupRecord], bool]:
        """Return (at most ``limit`` queued groups beyond the staleness bound, whether there are
        more)."""
        bound = self.max_staleness
        if bound is None:
            return [], False
        oldest = self.run.current_version - bound
        stale = []
        while self._versions and self._versions[0][0] < oldest and len(stale) < limit:
            _, order, key = heapq.heappop(self._versions)
            group = self.groups.get(key)
            if group is not None and group.place is GroupPlace.QUEUE and group.order == order:
                stale.append(group)
        return stale, bool(self._versions) and self._versions[0][0] < oldest

    def newest_time(self) -> float:
        """Return the latest time that any record contains, in seconds since 1970."""
        times = (
            *(env.last_seen for env in self.envs.values()),
            *(group.arrived_at for group in self.groups.values()),
            *(lease.created_at for lease in self.leases.values()),
            *(closed.closed_at for closed in self.closed.values()),
            *(replay.stored_at for replay in self.replays.values()),
        )
        return max(times, default=0.0)

    def _enter(self, group: GroupRecord) -> None:
        self._next_id = max(self._next_id, group.id)
        self._next_order = max(self._next_order, group.order)
        if group.place is GroupPlace.QUARANTINE:
            self.quarantine[group.id] = group
            self.quarantine_bytes += group.payload.nbytes
            return
        self.waiting_bytes += group.payload.nbytes
        if group.place is GroupPlace.LEASED:
            self.leased_groups += 1
        elif group.place is GroupPlace.BUFFER:
            self.buffers.setdefault(group.env_id, {})[group.id] = group
        elif group.reason:
            self.stale[group.id] = group
            self.with_stale.add(group)
        else:
            self.queue.add(group)
            if self.options.stale_policy == "last":
                self.with_stale.add(group)
            if self.max_staleness is not None:
                heapq.heappush(self._versions, (group.policy_version, group.order, group.id))

    def _leave(self, group: GroupRecord) -> None:
        if group.place is GroupPlace.QUARANTINE:
            del self.quarantine[group.id]
            self.quarantine_bytes -= group.payload.nbytes
            return
        self.waiting_bytes -= group.payload.nbytes
        if group.place is GroupPlace.LEASED:
            self.leased_groups -= 1
        elif group.place is GroupPlace.BUFFER:
            del self.buffers[group.env_id][group.id]
            if not self.buffers[group.env_id]:
                del self.buffers[group.env_id]
        elif group.reason:
            del self.stale[group.id]
            self.with_stale.remove(group)
        else:
            self.queue.remove(group)
            if self.options.stale_policy == "last":
                self.with_stale.remove(group)

    def _update_run(self, old: RunRecord, new: RunRecord) -> None:
        if new.latest is not None:
            self._next_id = max(self._next_id, new.latest.id)
        if (
            old.latest is not None
            and (new.latest is None or new.latest.id != old.latest.id)
            and (old.latest.id not in self.groups)
        ):
            self.discard(old.latest.payload.ref)
        if (
            new.max_staleness is not None
            and old.max_staleness is None
            and self.max_staleness is not None
        ):
            queued = (
                group
                for group in self.groups.values()
                if group.place is GroupPlace.QUEUE and not group.reason
            )
            self._versions = [(group.policy_version, group.order, group.id) for group in queued]
            heapq.heapify(self._versions)
