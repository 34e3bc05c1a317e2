"""Virtual folder of a session. Commands can only access files in it, by plain relative names."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

MAX_FILES = 64
MAX_FOLDERS = 64
MAX_DEPTH = 10
"""Maximum number of nested folders. It keeps paths below the system's length limit."""
MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 8 << 20
_PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")


def is_plain_name(name: str) -> bool:
    """Return whether a name cannot lead outside the folder: no separator, no leading dot or dash,
    no ".."."""
    return _PLAIN_NAME.match(name) is not None and ".." not in name


def is_name_in_folder(name: str) -> bool:
    """Return whether a string is a plain file name, optionally with ``./`` in front."""
    return is_plain_name(name.removeprefix("./"))


_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
logger = logging.getLogger(__name__)


def empty_folder(path: Path) -> None:
    """Remove everything inside a folder, whatever its depth. Raises OSError.

    Entries two levels down are moved up first, which avoids recursion and overlong paths.
    """
    top = os.open(path, _FOLDER_FLAGS)
    moved = uuid.uuid4().hex
    try:
        number = 0
        while folders := _unlink_files(top):
            for name in folders:
                folder = os.open(name, _FOLDER_FLAGS, dir_fd=top)
                try:
                    for inner in _unlink_files(folder):
                        number += 1
                        os.rename(inner, f"{moved}-{number}", src_dir_fd=folder, dst_dir_fd=top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents, whatever their depth. If that fails, log a warning and
    leave the folder."""
    try:
        empty_folder(path)
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("a folder stays, since it cannot be removed: %s", error)


def _unlink_files(folder: int) -> list[str]:
    """Remove all files from an open folder, and return the names of its subfolders. ``folder``:
    file descriptor."""
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in children if is_folder]


class VirtualFolder:
    """Private directory of one simulator slot. Limits: 64 files of at most 1 MiB each, 8 MiB in
    total, 64 folders, ten levels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._initial_path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """Write a file for the task. Raises ValueError for an invalid name or size."""
        if not is_plain_name(name):
            raise ValueError(f"asset name {name!r} is not a plain file name")
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"asset {name!r} has {len(content)} bytes, more than {MAX_FILE_BYTES}")
        (self.path / name).write_bytes(content)

    def names(self) -> list[str]:
        """Return the file names, sorted."""
        return sorted(os.listdir(self.path))

    def clear(self) -> bool:
        """Remove everything inside and return True.

        If that fails, switch to a new folder and return False; the caller must then replace
        processes that use the old folder.
        """
        try:
            empty_folder(self.path)
        except OSError as error:
            logger.warning("a session's folder cannot be emptied and is left: %s", error)
            self.path = self._initial_path.with_name(
                f"{self._initial_path.name}-{uuid.uuid4().hex}"
            )
            self.path.mkdir(mode=0o700)
            return False
        return True

    def enforce_limits(self) -> int:
        """Remove the newest files until the limits hold. Return the number of folders that may
        still be created."""
        entries = list(_walk(self.path))
        files = [
            (entry.stat(follow_symlinks=False), entry.path)
            for entry in entries
            if not _is_folder(entry)
        ]
        files.sort(key=lambda file: file[0].st_mtime_ns)
        total = 0
        for position, (status, path) in enumerate(files):
            total += status.st_size
            if position >= MAX_FILES or status.st_size > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES:
                os.unlink(path)
        return max(0, MAX_FOLDERS - (len(entries) - len(files)))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder, at any depth."""
    pending = [os.fspath(folder)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if _is_folder(entry):
                    pending.append(entry.path)
                yield entry
