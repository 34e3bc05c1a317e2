"""``durable``: nothing is acknowledged whose file could lose its name with the power.

Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from realhf.trajectory.records import Encoding, GroupRecord, Payload, Place
from realhf.trajectory.store.base import Changes, StoreFailure
from realhf.trajectory.store.sqlite import SqliteStore


async def test_a_folder_that_could_not_be_flushed_is_flushed_by_the_next_commit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The first flush of the folder fails, and with it the commit. The payload is committed again by a second one,
    which must not believe that the new file's name is on the disk already."""
    flushed: list[bool] = []
    real = os.fsync

    def fail_on_the_first_folder(handle: int) -> None:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            return real(handle)
        flushed.append(bool(flushed))
        if not flushed[-1]:
            raise OSError("input/output error (set off by a test)")
        real(handle)

    store = SqliteStore(tmp_path, durable=True)
    await store.open()
    monkeypatch.setattr(os, "fsync", fail_on_the_first_folder)
    for number in range(3):
        refs = await store.stage([b"payload"])
        payload = Payload(refs[0], 7, Encoding.JSON, 7, 0)
        rows = {("groups", number): GroupRecord(number, number, Place.QUEUE, None, 4, payload, 0, 1.5)}
        if number == 0:
            with pytest.raises(StoreFailure):
                await store.commit(Changes(rows=rows))
        await store.commit(Changes(rows=rows))
    assert flushed == [False, True], "again after the failure, and not for names that have been flushed"
    await store.close()
