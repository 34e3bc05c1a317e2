"""Defines the contract of a store: rows of small tables, committed in order, and payloads beside them.

The engine executes commands on a state in memory and hands their changes to ``commit``; no request is answered before
it returns. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from realhf.trajectory.records import TABLES, Payload, PayloadRef, Record
from realhf.trajectory.store.segments import SegmentFile, Segments


class StoreFailure(RuntimeError):
    """Is raised when the medium refused (disk full, server away), so nothing of the request may count as kept.

    The text names the cause. What was really kept is what the next ``reload`` returns.
    """


class OutcomeUnknown(StoreFailure):
    """Is raised when a commit was sent and its outcome cannot be asked for at present: it may have been kept, or
    not."""


class PayloadLost(StoreFailure):
    """Is raised for payloads that were read and are not what was stored, or that the medium says it does not have.
    Never for a failure to read. ``refs`` names them."""

    def __init__(self, store: str, refs: Sequence[PayloadRef]) -> None:
        super().__init__(f"{store}: {len(refs)} payloads are missing or damaged")
        self.refs = frozenset(refs)


class StateLost(RuntimeError):
    """Is raised when another server took the write lock, or changes of others can no longer be followed: load
    everything anew."""


Key = int | str


@dataclass
class Changes:
    """Holds rows written (a record) and deleted (None) since the last commit, and payloads that no record refers to any
    more. ``cleared``: every table was emptied before ``rows`` were written."""

    rows: dict[tuple[str, Key], Record | None] = field(default_factory=dict)
    freed: list[PayloadRef] = field(default_factory=list)
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows) or bool(self.freed) or self.cleared


Snapshot = dict[str, list[Record]]
"""All records of each table, in any order."""


def empty_snapshot() -> Snapshot:
    """Return a snapshot without any records."""
    return {table: [] for table in TABLES}


class Store(ABC):
    """Stores rows and payloads on one medium. What is given here holds for a store that one server has for itself.

    Every method is called from the event loop and does its slow work elsewhere. ``shared``: other processes may write
    too, so the engine wraps each round in ``begin`` and ``commit`` or ``abandon``.
    """

    shared = False
    name: str
    files: Segments | None = None
    """The files in which there may be room to give back; None if there never are any."""

    @abstractmethod
    async def open(self) -> Snapshot:
        """Return everything that was committed. Raises StoreFailure (unreachable, or a second server on one folder)."""

    @abstractmethod
    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """Keep payloads; they are durable once a commit that was begun afterwards returns. Raises StoreFailure, also
        where there is room for the payloads and too little for what has to follow."""

    @abstractmethod
    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Give up staged payloads of a command whose commit failed. Those that a commit kept after all stay; payloads
        that a command gave up itself are in ``Changes.freed``."""

    @abstractmethod
    async def commit(self, changes: Changes) -> None:
        """Make changes durable, in the order of the calls. Raises StoreFailure (nothing kept), OutcomeUnknown or
        StateLost; the engine undoes the changes after the first, and calls ``reload`` after the others and wherever
        the store is shared. Once the changes are durable it raises nothing."""

    @abstractmethod
    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the bytes of staged payloads, checked against their CRC. Raises PayloadLost, and StoreFailure where
        they cannot be read at present."""

    async def compact(self, live: Iterable[Payload], ended: Mapping[int, SegmentFile]) -> int:
        """Give back the room of all but the ``live`` payloads in those of the ``ended`` files that are mostly empty;
        return how many bytes. ``live`` has to be all that any commit may have kept; a thread walks through it. Raises
        StoreFailure."""
        raise AssertionError(f"{self.name} has no files")

    async def begin(self) -> list[Changes]:
        """Take the write lock of a shared store; return what others committed since the last call. Raises StateLost,
        StoreFailure."""
        raise AssertionError(f"one server has {self.name} for itself")

    async def abandon(self) -> None:
        """Give up the write lock of a shared store without a commit."""
        raise AssertionError(f"one server has {self.name} for itself")

    async def follow(self) -> list[Changes]:
        """Return what others committed to a shared store since the last call, without the lock. Raises as ``begin``."""
        raise AssertionError(f"one server has {self.name} for itself")

    @abstractmethod
    async def reload(self) -> Snapshot:
        """Return everything that was committed to a store that is open. Raises StoreFailure."""

    def now(self) -> float | None:
        """Return the time, in seconds since 1970, that all servers of a shared store go by; None where there is but
        one server."""
        return None

    def take_loss(self) -> str:
        """Describe what the medium has forgotten of what this server knows to be committed; each loss is reported once.
        An empty text means that no loss is known."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Release the medium."""
