"""Atomic writes of files and folders, reading of growing files, and digests of source files."""

from __future__ import annotations

import ast
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from realhf.base.dataclass_json import to_json_value

DAMAGED = ".damaged"
"""Suffix of the name under which an unreadable file is kept for inspection."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Error numbers that mean that the disk is full, failing or read-only, or that a limit was
reached."""
_PROBE_BYTES = 1 << 20
"""Size of the test file that checks whether the disk accepts data."""


def describe_disk_error(error: BaseException) -> str:
    """Describe the disk error that caused ``error``; "" if the disk is not the cause.

    Errors of other processes are recognised by their text.
    """
    number = getattr(error, "errno", None)
    text = str(error)
    return next(
        (
            os.strerror(known)
            for known in DISK_ERRORS
            if known == number or os.strerror(known) in text
        ),
        "",
    )


@contextmanager
def convert_disk_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises an OSError which names ``folder`` if its block fails because of
    the disk.

    Libraries report disk errors in different ways (torch reports an unexpected position). So any
    exception counts as a disk error if a test write to the folder also fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS and error.filename is None:
            error.filename = str(folder)
        raise
    except Exception as error:
        number = next(
            (known for known in DISK_ERRORS if os.strerror(known) in str(error)),
            _probe_disk(folder),
        )
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error


def _probe_disk(folder: Path) -> int | None:
    """Write a test file to a folder; return the error number if the disk refuses the data, else
    None."""
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
def atomic_file(out: Path, *, synced: bool = False) -> Iterator[Path]:
    """Context manager that yields a path next to ``out`` for writing a file, which replaces ``out``
    at the end of the block.

    If the block fails, for example because the disk is full, the partial file is removed and
    ``out`` stays unchanged. A partial file that a killed process has left is overwritten by the
    next write.

    synced: whether to flush the file and its folder entry to disk. Raises OSError.
    """
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, "expected a file, found a folder", str(out))
    partial = out.with_name(f"{out.name}.partial")
    try:
        with convert_disk_errors(out.parent):
            yield partial
        if synced:
            sync(partial)
        os.replace(partial, out)
    except BaseException:
        with suppress(OSError):  # the first error is more informative
            partial.unlink()
        raise
    if synced:
        sync(out.parent)


def write_atomic(out: Path, text: str, *, synced: bool = False) -> None:
    """Write a string to a file atomically. Raises OSError."""
    with atomic_file(out, synced=synced) as partial:
        partial.write_text(text, encoding="utf-8")


class RunFolderError(RuntimeError):
    """Raised when a file of a run folder cannot be read or written. The message names the file, the
    cause and a remedy."""


@contextmanager
def convert_run_folder_errors(folder: Path) -> Iterator[None]:
    """Context manager that converts OSErrors about files in ``folder`` to RunFolderError.

    Errors of a full disk are not converted, because they are reported elsewhere.
    """
    try:
        yield
    except OSError as error:
        inside = isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)
        if not inside or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunFolderError(
            f"{error.filename} cannot be used: {error.strerror}; repair or remove it, then run "
            "again, or start over with recover_mode=disabled, which deletes the run's files"
        ) from error


def dangling_link_error(path: Path) -> OSError:
    """Return the error to raise for a symbolic link whose target does not exist, typically because
    a disk is not mounted."""
    return OSError(
        errno.ENOENT, f"it is a link to {os.readlink(path)}, which does not exist", str(path)
    )


def unused_name(path: Path, ending: str) -> Path:
    """Return an unused path under which to keep an unreadable file: ``path`` with the suffix
    ``ending``, followed by a number if that path exists."""
    candidate = path.with_name(f"{path.name}{ending}")
    number = 1
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}{ending}-{number}")
    return candidate


def set_aside(path: Path) -> Path | None:
    """Rename an unreadable file, so that the next write does not replace it; return its new path.

    If the file is absent or empty, return None. Raises OSError.
    """
    if path.is_symlink() and not path.exists():
        raise dangling_link_error(path)
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return None
    new_path = unused_name(path, DAMAGED)
    os.replace(path, new_path)
    return new_path


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder next to ``out`` for writing files. The folder
    replaces ``out`` at the end of the block.

    If the block fails, the new folder is removed. If the process is killed, ``out`` is either the
    old or the new folder, provided that the file system can exchange two names atomically;
    otherwise ``out`` may be missing until the next writer restores it. Leftovers of killed writers
    are removed. Raises OSError.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(out)
    partial, backup = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that the folder is being written
        with convert_disk_errors(partial):
            yield partial
        if not os.path.lexists(out):
            os.replace(partial, out)
        elif not _exchange(partial, out):
            os.replace(out, backup)
            os.replace(partial, out)
    finally:
        if backup.exists() and not out.exists():
            with suppress(OSError):
                os.replace(backup, out)
        _remove(partial)
        if out.exists():
            _remove(backup)
        os.close(lock)


def recover_folder(out: Path) -> None:
    """Restore ``out`` if a process was killed in ``atomic_folder`` after it had moved ``out`` away,
    and remove leftovers next to it.

    Folders that another process is still writing are not changed. Raises OSError.
    """
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(\d+)\.(tmp|old)")
    leftovers = [
        out.with_name(text) for text in sorted(os.listdir(out.parent)) if pattern.fullmatch(text)
    ]
    leftovers = [
        path
        for path in leftovers
        if _is_abandoned(path) and _is_abandoned(path.with_suffix(".tmp"))
    ]
    for path in leftovers:
        if path.suffix == ".old" and not os.path.lexists(out):
            os.replace(path, out)
        else:
            _remove(path)


_MIN_ABANDONED_AGE_S = 60.0
"""Age in seconds below which an unlocked folder is kept if its writer's process id exists, because
that process may not have locked the folder yet."""


def _is_abandoned(path: Path) -> bool:
    """Return whether the process that was writing this folder in ``atomic_folder`` has ended."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid = int(path.suffixes[-2][1:])
        return (
            not Path(f"/proc/{pid}").exists()
            or abs(time.time() - os.fstat(handle).st_mtime) > _MIN_ABANDONED_AGE_S
        )
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_AT_FDCWD = -100
"""Constant of renameat2(2): paths are relative to the current directory."""
_RENAME_EXCHANGE = 2
"""Flag of renameat2(2): exchange the two names atomically."""


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system or the file system does not support
    it.

    Raises OSError for other failures.
    """
    import ctypes  # imported here because most processes never need it

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if (
        call is None
        or call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
    ):
        return call is not None
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises OSError if the file does not exist. Also raises it, without blocking, for a pipe or a
    device, from which reading could block or never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


CHUNK_BYTES = 8 * 2**20
"""Number of bytes that are read at once, and maximum length of a line in bytes."""
_HEAD_BYTES = 512
"""Number of bytes at the start of a file that are used to identify it, because a new file may reuse
the inode number of a deleted one."""


class LineTail:
    """Reader of the complete lines that were appended to a file since the last read.

    ``epoch`` counts how often the file was replaced or truncated. When it increases, lines that
    were read before are no longer valid. Lines of a deleted file stay valid. ``torn`` is the number
    of bytes after the last complete line.

    tail_bytes: if given, start reading at most this many bytes before the end of the file. The
    first line, which identifies the file, is read in any case.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self.epoch = self.torn = 0
        self._tail_bytes = tail_bytes
        self._file_id: tuple[int, int] | None = None
        self._head = b""
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Yield the new complete lines without line ends. ``epoch`` is updated before the first one
        is yielded.

        An incomplete last line is yielded once it is complete. An absent file, or one that is not a
        regular file, has no lines. Raises OSError if the file cannot be read.
        """
        try:
            file = open_plain(self.path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL):
                return
            raise
        with file:
            about = os.fstat(file.fileno())
            file_id = (about.st_dev, about.st_ino)
            head = file.read(_HEAD_BYTES)
            fresh = (
                file_id != self._file_id
                or about.st_size < self._offset
                or not head.startswith(self._head)
            )
            if fresh:
                self.epoch += self._file_id is not None
                self._file_id = file_id
                self._offset = 0
            self._head = head[: about.st_size]
            if fresh and self._tail_bytes is not None and about.st_size > self._tail_bytes:
                file.seek(0)
                first = file.readline(CHUNK_BYTES)
                file.seek(max(file.tell(), about.st_size - self._tail_bytes) - 1)
                file.readline(CHUNK_BYTES)
                self._offset = file.tell()
                yield first.rstrip(b"\n")
            yield from self._new_lines(file, about.st_size)

    def _new_lines(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        """Yield the new lines up to ``size`` bytes."""
        while self._offset < size:
            file.seek(self._offset)
            chunk = file.read(min(CHUNK_BYTES, size - self._offset))
            end = chunk.rfind(b"\n") + 1
            if end == 0 and len(chunk) < CHUNK_BYTES:
                break
            self._offset += end or len(chunk)  # valid lines are shorter: skip this one in chunks
            yield from filter(None, chunk[:end].split(b"\n"))
        self.torn = max(0, size - self._offset)


_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""Pattern of a dotted name."""


def digest_folders(root: Path, folders: Iterable[str]) -> str:
    """Return a SHA-256 digest of the names and contents of all files in the given folders of
    ``root``, except compiled and hidden files."""
    digest = hashlib.sha256()
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and path.suffix != ".pyc" and not hidden:
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def find_imported_files(package: Path, roots: Iterable[str]) -> list[Path]:
    """Return the files of ``package`` that contain the modules ``roots`` (such as
    ``realhf.api.sample``) and all modules that these import directly or indirectly.

    Modules named in a string count as imported, because code may start them with ``python -m``.
    Raises FileNotFoundError for a root that does not exist.
    """
    file_of: dict[str, str] = {}
    pending = list(roots)
    for root in pending:
        if not _find_module_file(package, root):
            raise FileNotFoundError(f"{package} has no module {root}")
    while pending:
        name = pending.pop()
        if name not in file_of:
            file = file_of[name] = _find_module_file(package, name)
            if file:
                pending += _module_names_in(Path(file).read_text(encoding="utf-8"))
    return sorted({Path(file) for file in file_of.values() if file})


def find_matching_files(package: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of ``package`` that match any of the patterns.

    Raises FileNotFoundError for a pattern without a match.
    """
    matches: set[Path] = set()
    for pattern in patterns:
        files = {path for path in package.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
        if not files:
            raise FileNotFoundError(f"no file of {package} matches {pattern}")
        matches |= files
    return sorted(matches)


@cache
def _module_names_in(text: str) -> frozenset[str]:
    return frozenset(_iterate_module_names(ast.parse(text)))


def _iterate_module_names(module: ast.Module) -> Iterator[str]:
    """Yield all names that may be modules: ``from a.b import c`` yields ``a.b`` and ``a.b.c``."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _MODULE.fullmatch(node.value)
        ):
            yield node.value


def _find_module_file(package: Path, module: str) -> str:
    """Return the path of a module of the package, or of the non-empty ``__init__.py`` of a
    subpackage; "" for other names.

    The path is built as a string, because thousands of names are looked up and creating a ``Path``
    costs more than the file system call.
    """
    first, _, rest = module.partition(".")
    if first != package.name or not rest:
        return ""
    path = f"{package}/{rest.replace('.', '/')}"
    if os.path.isfile(f"{path}.py"):
        return f"{path}.py"
    initial = f"{path}/__init__.py"
    return initial if os.path.isfile(initial) and os.path.getsize(initial) else ""


def content_key(options: Any, files: Iterable[Path] = ()) -> str:
    """Return the first 16 hex digits of a SHA-256 digest of ``options`` (dataclasses, mappings,
    scalars) and of the names and contents of ``files``.

    Raises FileNotFoundError for a missing file.
    """
    digest = hashlib.sha256(json.dumps(to_json_value(options), sort_keys=True).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
