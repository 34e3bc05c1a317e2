"""``run-api`` over a SQLite store that fails at random, as disks do.

    python -m tests.trajectory.faulty_server --fault-rate 0.05 --fault-seed 1 [flags of run-api]

A payload is written in part or not at all, a transaction does not begin, an error comes after the
commit was made, or what follows a commit fails.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.trajectory.http import service
from realhf.trajectory.http.cli import main as run_api
from realhf.trajectory.store.base import Changes, Snapshot
from realhf.trajectory.store.segments import Segments
from realhf.trajectory.store.sqlite import SqliteStore

SEGMENT_BYTES = 200_000
"""Small files, so that a wrong reference soon meets a file that is gone."""


class FaultySegments(Segments):
    """Files whose writes fail now and then, after some bytes."""

    def __init__(self, folder: Path, rate: float, rng: random.Random) -> None:
        super().__init__(folder, SEGMENT_BYTES)
        self._rate = rate
        self._rng = rng

    def write(self, staged: dict[int, bytes], durable: bool) -> None:
        if self._rng.random() < self._rate:
            part = dict(list(staged.items())[: self._rng.randrange(len(staged) + 1)])
            super().write(part, durable)
            raise OSError("no space left on device (a fault that was set off)")
        super().write(staged, durable)


class FaultySqliteStore(SqliteStore):
    """A store of which about every ``1 / rate``-th step of each kind fails."""

    def __init__(self, folder: Path, rate: float, seed: int) -> None:
        super().__init__(folder)
        self._rate, self._rng = rate, random.Random(seed)
        self.files = self._segments = FaultySegments(folder, rate, self._rng)
        self._ready = False

    async def open(self) -> Snapshot:
        snapshot = await super().open()
        self._ready = True
        return snapshot

    def _write(self, changes: Changes) -> None:
        if self._fails():
            raise sqlite3.OperationalError("database is locked (a fault that was set off)")
        super()._write(changes)
        if self._fails():
            raise sqlite3.OperationalError(
                "disk I/O error after the commit (a fault that was set off)"
            )

    async def _merge_log(self) -> None:
        await super()._merge_log()
        if self._fails():
            raise OSError("housekeeping failed (a fault that was set off)")

    def _fails(self) -> bool:
        return self._ready and self._rng.random() < self._rate


def main(argv: Sequence[str]) -> int:
    """Serve until a signal. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault-rate", type=float, required=True)
    parser.add_argument("--fault-seed", type=int, default=1)
    arguments, rest = parser.parse_known_args(argv)

    def open_faulty(url: str, *, durable: bool) -> FaultySqliteStore:
        return FaultySqliteStore(
            Path(url.removeprefix("sqlite:")), arguments.fault_rate, arguments.fault_seed
        )

    service.open_store = open_faulty  # type: ignore[assignment]
    return run_api(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
