"""Writes files and folders that are whole or absent, and says when the disk is to blame that they are not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_PROBE_BYTES = 1 << 20


def disk_reason(error: BaseException) -> str:
    """Why the disk is to blame for an error, here or in another process that put it into words; "" where it is not."""
    number, text = getattr(error, "errno", None), str(error)
    return next((os.strerror(every) for every in DISK_ERRORS if every == number or os.strerror(every) in text), "")


@contextmanager
def disk_blamed(folder: Path) -> Iterator[None]:
    """Raise an OSError that names ``folder`` where a writer in it fails because of the disk. Libraries say what they
    like of it, torch that a position is unexpected: so who fails without a word of the disk, on one that takes nothing
    more, has failed because of it."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS and error.filename is None:
            error.filename = str(folder)
        raise
    except Exception as error:
        number = next((every for every in DISK_ERRORS if os.strerror(every) in str(error)), _refusal(folder))
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error


def _refusal(folder: Path) -> int | None:
    """The error number with which a disk refuses to take more; None if it takes more."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in DISK_ERRORS else None
    finally:
        with suppress(OSError):
            probe.unlink()
    return None


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
        with disk_blamed(out.parent):
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


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` to write to. It becomes ``out``, in place of what was there, at the end of
    the block, and is removed where that is not reached. Whoever is killed leaves no ``out``, or the one before. Raises
    OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, before = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with disk_blamed(partial):
            yield partial
        if out.exists():
            os.replace(out, before)
        os.replace(partial, out)
    finally:
        if before.exists() and not out.exists():
            with suppress(OSError):
                os.replace(before, out)
        shutil.rmtree(partial, ignore_errors=True)
        if out.exists():
            shutil.rmtree(before, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
