"""Finds the store that an address means: ``sqlite:DIR``, ``memory`` or ``redis://host:port/db``."""

from __future__ import annotations

from pathlib import Path

from realhf.base.extras import install_command
from realhf.trajectory.store.base import Store
from realhf.trajectory.store.memory import MemoryStore
from realhf.trajectory.store.sqlite import SqliteStore


def open_store(url: str, *, durable: bool = False) -> Store:
    """Make the store without opening it. Raises ValueError for an address of no known form, or a Redis without
    the ``redis`` package."""
    if url == "memory":
        return MemoryStore()
    if url.startswith("sqlite:") and url != "sqlite:":
        return SqliteStore(Path(url.removeprefix("sqlite:").removeprefix("//")).expanduser(), durable=durable)
    if url.startswith(("redis://", "rediss://", "unix://")):
        try:
            from realhf.trajectory.store.redis import RedisStore
        except ModuleNotFoundError as error:
            raise ValueError(f"--store {url} needs redis ({error}): {install_command('redis')}") from error
        try:
            return RedisStore(url)
        except ValueError as error:
            raise ValueError(f"--store: no address of a Redis: {error}") from error
    raise ValueError(f"--store is {url!r}; give sqlite:DIR, memory or redis://host:port")
