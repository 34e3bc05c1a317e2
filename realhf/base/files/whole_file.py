"""Writes files that are whole or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(out: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yield a path beside ``out`` to write to. It becomes ``out`` at the end of the block, and is removed where that is
    not reached: a full disk keeps what was there before and no half of what comes. What a killed process left is
    replaced by the next one that writes. ``synced``: the file is on the disk under its name when the block has ended.
    Raises OSError."""
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a file is wanted, and it is a folder", str(out))
    partial = out.with_name(f"{out.name}.partial")
    try:
        yield partial
        if synced:
            sync(partial)
        os.replace(partial, out)
    except BaseException:
        with suppress(OSError):  # the first error says more
            partial.unlink()
        raise
    if synced:
        sync(out.parent)


def write_whole(out: Path, text: str, *, synced: bool = False) -> None:
    """Write a text as a file that is whole or as it was before. Raises OSError."""
    with whole_file(out, synced=synced) as partial:
        partial.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
