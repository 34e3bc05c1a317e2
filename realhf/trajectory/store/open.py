"""Choice of the store for an address (``sqlite:DIR``, ``memory`` or ``redis://host:port/db``), and
the in-memory store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from realhf.base.installation import install_command
from realhf.trajectory.records import Payload, PayloadRef
from realhf.trajectory.store.base import (
    Changes,
    Snapshot,
    StoreFailure,
    TrajectoryStore,
    empty_snapshot,
)
from realhf.trajectory.store.sqlite import SqliteStore


def open_store(url: str, *, durable: bool = False) -> TrajectoryStore:
    """Return the store for an address, without opening it. Raises ValueError for an address of an
    unknown form, or for Redis if the ``redis`` package is missing."""
    if url == "memory":
        return MemoryStore()
    if url.startswith("sqlite:") and url != "sqlite:":
        return SqliteStore(
            Path(url.removeprefix("sqlite:").removeprefix("//")).expanduser(), durable=durable
        )
    if url.startswith(("redis://", "rediss://", "unix://")):
        try:
            from realhf.trajectory.store.redis import RedisStore
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--store {url} needs redis ({error}): {install_command('redis')}"
            ) from error
        try:
            return RedisStore(url)
        except ValueError as error:
            raise ValueError(f"--store: no address of a Redis: {error}") from error
    raise ValueError(f"--store is {url!r}; give sqlite:DIR, memory or redis://host:port")


class MemoryStore(TrajectoryStore):
    """Store in memory; its data is lost when the process ends."""

    name = "memory"

    async def open(self) -> Snapshot:
        """Return an empty snapshot: the store is new."""
        return empty_snapshot()

    async def stage(self, payloads: Sequence[bytes]) -> list[PayloadRef]:
        """Return the payloads themselves as references."""
        return list(payloads)

    async def unstage(self, refs: Sequence[PayloadRef]) -> None:
        """Do nothing: the bytes are freed with their last reference."""

    async def commit(self, changes: Changes) -> None:
        """Do nothing: the state in memory is the only copy."""

    async def read(self, payloads: Sequence[Payload]) -> list[bytes]:
        """Return the payloads, which are their own references."""
        return [payload.ref for payload in payloads if isinstance(payload.ref, bytes)]

    async def reload(self) -> Snapshot:
        """Raise StoreFailure: memory cannot be read again."""
        raise StoreFailure("memory cannot be read again")

    async def close(self) -> None:
        """Do nothing."""
