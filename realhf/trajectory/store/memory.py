"""Keeps payloads in the records of the state, without any medium; a commit is done at once."""

from __future__ import annotations

from collections.abc import Sequence

from realhf.trajectory.base.records import Payload, PayloadRef
from realhf.trajectory.store.base import Changes, Snapshot, StoreFailure, empty_snapshot


class MemoryStore:
    """Implements ``Store`` in memory: everything is lost with the process."""

    shared = False
    files = None
    name = "memory"

    async def open(self) -> Snapshot:
        """See ``Store``."""
        return empty_snapshot()

    async def stage(self, payloads: Sequence[bytes], *, reserve: bool = True) -> list[PayloadRef]:
        """See ``Store``."""
        return list(payloads)

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Do nothing: the bytes go with their last holder."""

    async def commit(self, changes: Changes) -> None:
        """Do nothing: the state in memory is all there is."""

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """See ``Store``."""
        return [payload.ref for payload in payloads if isinstance(payload.ref, bytes)]

    async def begin(self) -> list[Changes]:
        """Raise AssertionError: the memory store is not shared."""
        raise AssertionError("the memory store is not shared")

    async def abandon(self) -> None:
        """Raise AssertionError: the memory store is not shared."""
        raise AssertionError("the memory store is not shared")

    async def follow(self) -> list[Changes]:
        """Raise AssertionError: the memory store is not shared."""
        raise AssertionError("the memory store is not shared")

    async def reload(self) -> Snapshot:
        """Raise StoreFailure: memory cannot be read again."""
        raise StoreFailure("memory cannot be read again")

    def now(self) -> None:
        """See ``Store``."""

    def take_loss(self) -> str:
        """See ``Store``. Nothing is ever forgotten."""
        return ""

    async def close(self) -> None:
        """See ``Store``."""
        ...
