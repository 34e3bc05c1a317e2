"""C sources that the machine's compiler builds at first use, kept for later processes.

The library is made for this processor (``-march=native``), so it is not part of the package. It is
kept in ``~/.cache/realhf``, or ``realhf`` in ``$XDG_CACHE_HOME``, under a name that depends on
source, compiler, options and processor. Whoever may write there can make this process run code, so
the folder must belong to the user and be closed to all others, and nobody else may rename it.
Nothing is downloaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from realhf.base import process_clock

_OPTIONS = (
    "-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared",
    "-fvisibility=default",
)  # fmt: skip
_COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 60.0
"""Time limit for a call of the compiler, seconds. The library takes two seconds of one core."""
LOCK_TIMEOUT_S = 90.0
"""Time that a process waits for another one that builds the same library, seconds."""
_LOCK_POLL_S = 0.05


class NativeBuildError(Exception):
    """The library cannot be built or loaded on this machine; the text says why."""


def load_library(source: Path) -> ctypes.CDLL:
    """Return the library of a C source, which is built if no process of this user has built it
    before. Raises NativeBuildError."""
    errors = []
    for compiler in find_compilers():
        try:
            return _load_or_rebuild(compiler, source)
        except NativeBuildError as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{source.name}: {error}")
    raise NativeBuildError("; ".join(errors))


def _load_or_rebuild(compiler: str, source: Path) -> ctypes.CDLL:
    """Return the library of a C source. One that was damaged on the disk is built again."""
    path = _find_or_build(compiler, source)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_find_or_build(compiler, source)))


def _find_or_build(compiler: str, source: Path) -> Path:
    """Return the path of the library of a C source."""
    code = source.read_bytes()
    folder = cache_folder()
    described = "\0".join((compiler, _version(compiler), *_OPTIONS, _processor())).encode()
    name = f"{source.stem}-{hashlib.sha256(code + described).hexdigest()[:32]}.so"
    library = folder / name
    if _is_own_file(library):
        return library
    with _lock(folder / f"{source.stem}.lock"):
        if not _is_own_file(library):
            _build(compiler, source, library)
    return library


def find_compilers() -> list[str]:
    """Return the paths of the C compilers, without further names of one of them. Raises
    NativeBuildError if there is none."""
    found = [path for name in _COMPILERS if (path := shutil.which(name))]
    if not found:
        raise NativeBuildError(f"there is no C compiler ({', '.join(_COMPILERS)}) on PATH")
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def cache_folder() -> Path:
    """Return the folder of libraries, which is created if needed. Raises NativeBuildError if others
    than this user could write there."""
    parent = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored.
    folder = Path(parent if os.path.isabs(parent) else "~/.cache") / "realhf"
    try:
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise NativeBuildError(f"{folder}: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise NativeBuildError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise NativeBuildError(f"{folder} is open to other users: chmod 700 it")
    # Nor may others put another folder in its place.
    for above in folder.resolve().parents:
        found = above.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise NativeBuildError(f"{above}, above {folder.name}, belongs to another user")
        # Many systems give each user a group of the same number, of which they are the only member.
        own_group = found.st_gid == os.getegid() == os.geteuid()
        if found.st_mode & (0o002 if own_group else 0o022) and not found.st_mode & stat.S_ISVTX:
            raise NativeBuildError(f"{above}, above {folder.name}, can be written by other users")
    return folder


def _is_own_file(path: Path) -> bool:
    """Return whether a library exists and is a plain file of this user that others cannot write."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NativeBuildError(f"{path} is not a file that only this user can write")
    return True


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Context manager that holds the lock of a file between processes."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = process_clock.now() + LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if process_clock.now() >= deadline:
                raise NativeBuildError(f"another process has held {path} for {LOCK_TIMEOUT_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(compiler: str, source: Path, library: Path) -> None:
    """Compile a source to a temporary file, which then takes the library's name."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *_OPTIONS, "-o", str(built), str(source), "-lm"]
        done = _call(command)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
            # Above the first error is where it is.
            line = next((line for line in lines if "error" in line), lines[0])
            raise NativeBuildError(f"{compiler} ends with {done.returncode}: {line}")
        built.chmod(0o600)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(library)


def _call(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end. On timeout, its whole process group is killed: the compiler works
    in children."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise NativeBuildError(f"{command[0]}: {error}") from error
    with process:
        try:
            out, err = process.communicate(timeout=COMPILE_TIMEOUT_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise NativeBuildError(
                f"{command[0]} did not end within {COMPILE_TIMEOUT_S:g} s"
            ) from error
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@functools.cache
def _version(compiler: str) -> str:
    """Return what the compiler says about itself."""
    return _call([compiler, "--version"]).stdout.decode(errors="replace")


@functools.cache
def _processor() -> str:
    """Return what decides which instructions the processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    kept = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    first = [line for line in lines if line.split(":")[0].strip() in kept]
    return "\n".join((platform.machine(), *dict.fromkeys(first)))
