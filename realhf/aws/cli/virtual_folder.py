"""Keeps the virtual folder of a session: the only files a command may name, by plain relative names."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 64
MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 8 << 20
_PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")


def is_plain_name(name: str) -> bool:
    """Return whether a name cannot leave the folder: it has no separator, no leading dot or dash."""
    return _PLAIN_NAME.match(name) is not None and ".." not in name


def is_folder_name(name: str) -> bool:
    """Return whether a text is a plain name, perhaps written as ``./name``."""
    return is_plain_name(name.removeprefix("./"))


class VirtualFolder:
    """Wraps a real directory, private to one slot. Limits: 64 files, 1 MiB each, 8 MiB in all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """Give the session a file (task assets). Raises ValueError for a bad name or size."""
        if not is_plain_name(name):
            raise ValueError(f"asset name {name!r} is not a plain file name")
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"asset {name!r} has {len(content)} bytes, more than {MAX_FILE_BYTES}")
        (self.path / name).write_bytes(content)

    def names(self) -> list[str]:
        """Return the names of the files, sorted."""
        return sorted(os.listdir(self.path))

    def clear(self) -> None:
        """Remove everything inside."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)

    def enforce_limits(self) -> bool:
        """Remove the newest files until the limits hold. Returns whether something was removed."""
        files = [(os.lstat(path).st_mtime_ns, os.lstat(path).st_size, path) for path in _files(self.path)]
        files.sort(key=lambda file: file[0])
        total, removed = 0, False
        for position, (_, size, path) in enumerate(files):
            total += size
            if position >= MAX_FILES or size > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES:
                os.unlink(path)
                removed = True
        return removed


def _files(folder: Path | str) -> Iterator[str]:
    """Yield the paths of all files below, including those in folders that a recursive download made."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry.path
