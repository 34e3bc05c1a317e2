"""No medium at all: payloads stay in the records, and a commit is done as soon as it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from realhf.trajectory.base.records import Payload, PayloadRef
from realhf.trajectory.store.base import Changes, Snapshot, StoreFailure, empty_snapshot


class MemoryStore:
    """Loses everything with the process."""

    shared = False
    reloads = False
    files = None
    name = "memory"

    async def open(self) -> Snapshot:
        return empty_snapshot()

    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        return list(payloads)

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """The bytes go with their last holder."""

    async def commit(self, changes: Changes) -> None:
        """The state in memory is all there is."""

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        return [payload.ref for payload in payloads if isinstance(payload.ref, bytes)]

    async def begin(self) -> list[Changes]:
        raise AssertionError("the memory store is not shared")

    async def abandon(self) -> None:
        raise AssertionError("the memory store is not shared")

    async def follow(self) -> list[Changes]:
        raise AssertionError("the memory store is not shared")

    async def reload(self) -> Snapshot:
        raise StoreFailure("memory cannot be read again")

    def take_loss(self) -> str:
        return ""

    async def close(self) -> None: ...
