"""Store interface. A store keeps rows of small tables, which are committed in order, and the
payloads that the rows refer to.

The engine executes commands on a state in memory and passes their changes to ``commit``; no request
is answered before ``commit`` returns. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realhf.trajectory.records import TABLES, Payload, PayloadRef, Record
from realhf.trajectory.store.segments import SegmentFile, Segments


class StoreFailure(RuntimeError):
    """Raised if the storage medium failed (disk full, server unreachable). The request must be
    treated as not stored.

    The message states the cause. The next ``reload`` returns what was really stored.
    """


class OutcomeUnknown(StoreFailure):
    """Raised if a commit was sent and it cannot be determined now whether it was stored."""


class PayloadLost(StoreFailure):
    """Raised if payloads that were read differ from what was stored, or if the medium reports that
    it does not have them. Not raised for a failed read. ``refs`` lists the payloads."""

    def __init__(self, store: str, refs: Sequence[PayloadRef]) -> None:
        super().__init__(f"{store}: {len(refs)} payloads are missing or damaged")
        self.refs = frozenset(refs)


class StateLost(RuntimeError):
    """Raised if another server took the write lock, or if other servers' changes can no longer be
    followed. Everything has to be reloaded."""


Key = int | str


@dataclass
class Changes:
    """Changes since the last commit."""

    rows: dict[tuple[str, Key], Record | None] = field(default_factory=dict)
    """Written rows (a record) and deleted rows (None), by (table, key)."""
    freed: list[PayloadRef] = field(default_factory=list)
    """Payloads that no record refers to any more."""
    cleared: bool = False
    """Whether every table was emptied before ``rows`` were written."""

    def __bool__(self) -> bool:
        return bool(self.rows) or bool(self.freed) or self.cleared


Snapshot = dict[str, list[Record]]
"""All records of each table, in any order."""


def empty_snapshot() -> Snapshot:
    """Return a snapshot without records."""
    return {table: [] for table in TABLES}


class TrajectoryStore(ABC):
    """Rows and payloads on one storage medium. The method descriptions here apply to a store that
    is used by one server.

    Every method is called on the event loop and must do slow work in another thread or process. If
    ``shared`` is true, other processes may write too, so the engine wraps each round in ``begin``
    and ``commit`` or ``abandon``.
    """

    shared = False
    name: str
    files: Segments | None = None
    """Payload files that may contain unused space; None if the store has none."""

    @abstractmethod
    async def open(self) -> Snapshot:
        """Return everything that was committed. Raises StoreFailure (unreachable, or a second
        server on one folder)."""

    @abstractmethod
    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """Store payloads. They are durable once a commit that starts afterwards returns. Raises
        StoreFailure, also if the payloads fit but too little space would remain for later commits.
        """

    @abstractmethod
    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Discard payloads staged for a command whose commit failed. Payloads that the commit
        stored after all are kept. Payloads that a command discards itself are in ``Changes.freed``
        instead."""

    @abstractmethod
    async def commit(self, changes: Changes) -> None:
        """Make changes durable, in the order of the calls. Raises StoreFailure (nothing was
        stored), OutcomeUnknown or StateLost; never raises once the changes are durable. After
        StoreFailure the engine undoes the changes; after the other errors, and always for a shared
        store, it calls ``reload``."""

    @abstractmethod
    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the bytes of staged payloads, checked against their CRC. Raises PayloadLost, and
        StoreFailure if they cannot be read now."""

    async def compact(
        self, live: Iterable[Payload], closed_files: Mapping[int, SegmentFile]
    ) -> int:
        """Free the space of payloads not in ``live``, in those ``closed_files`` that are mostly
        empty. Return the number of bytes freed. ``live`` must contain every payload that any commit
        may have stored; a thread iterates over it. Raises StoreFailure."""
        raise AssertionError(f"{self.name} has no files")

    async def begin(self) -> list[Changes]:
        """Take a shared store's write lock and return what other servers committed since the last
        call. Raises StateLost, StoreFailure."""
        raise AssertionError(f"one server has {self.name} for itself")

    async def abandon(self) -> None:
        """Release a shared store's write lock without a commit."""
        raise AssertionError(f"one server has {self.name} for itself")

    async def follow(self) -> list[Changes]:
        """Return what other servers committed to a shared store since the last call, without taking
        the lock. Raises the errors of ``begin``."""
        raise AssertionError(f"one server has {self.name} for itself")

    @abstractmethod
    async def reload(self) -> Snapshot:
        """Return everything that was committed to an open store. Raises StoreFailure."""

    def now(self) -> float | None:
        """Return the time that all servers of a shared store agree on, in seconds since 1970; None
        for a store used by one server."""
        return None

    def take_loss(self) -> str:
        """Return a description of committed data that the medium lost; each loss is reported once.
        "" if no loss is known."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Close the store."""
