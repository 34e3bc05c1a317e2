"""Commands of somebody else's programs, contained: in bubblewrap if it works here, always with
resource limits, without new privileges, and without a network unless it is allowed.

A program is not an interpreter of ours, so it has neither audit hooks nor the system call filter.
Without bubblewrap it has the file access of this process. The number of its processes and the size
of the folder that it may write to are not bounded. Linux only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from realhf.env.containment.sandbox import PROGRAM_PATH, sandbox_command

_LAUNCHER = Path(__file__).with_name("launcher.py")
_FOLDER_PREFIX = "realhf-program-"
"""Beginning of the names of working folders."""
_MIN_ABANDONED_AGE_S = 60.0
"""Age in seconds below which an unlocked folder is kept, because its owner may not have locked it
yet."""
_REMOVAL_S = 60.0
"""Seconds that each step of a folder's removal may take."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOrder:
    """Limits of a program, which the launcher sets."""

    memory_bytes: int
    """Maximum bytes of private memory of each process."""
    cpu_s: int
    """Maximum CPU time of each process in seconds."""
    network: bool = False
    """Whether the program may use the network."""
    file_bytes: int = 256 << 20
    """Maximum size of a file that it writes."""
    open_files: int = 1024
    """Maximum number of open descriptors of each process."""
    own_namespaces: bool = True
    """Whether the launcher makes the namespaces, because bubblewrap does not."""


@dataclass(frozen=True)
class Program:
    """A command whose paths are absolute, and the files that it needs."""

    words: tuple[str, ...]
    """Words of the command."""
    files: tuple[Path, ...]
    """Files and folders that it may read."""


def find_program(words: Sequence[str], files: Sequence[str] = ()) -> Program:
    """Return the command with the paths of its words made absolute. It may read the files and
    folders that its words name, and those of ``files``.

    Raises ValueError if the program or one of ``files`` does not exist.
    """
    if not words:
        raise ValueError("the command is empty")
    found = shutil.which(os.path.expanduser(words[0]))
    if found is None:
        raise ValueError(f"there is no program {words[0]}")
    executable = Path(os.path.abspath(found))
    environment = executable.parent.parent
    is_python = (environment / "pyvenv.cfg").is_file()
    readable = {environment, executable.resolve()} if is_python else {executable}
    absolute = [str(executable)]
    for word in words[1:]:
        path = Path(word).expanduser()
        if not word.startswith("-") and path.exists():
            readable.add(path.absolute())
            word = str(path.absolute())
        absolute.append(word)
    for name in files:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise ValueError(f"there is no file or folder {name}")
        readable.add(path)
    return Program(tuple(absolute), tuple(sorted(readable)))


def contain(
    program: Program, order: LaunchOrder, folder: Path, bubblewrap: Path | None
) -> list[str]:
    """Return the words that start a program, contained. It may write to ``folder``, where it should
    be started; in bubblewrap, only there. ``bubblewrap``: its path, None to do without."""
    order = LaunchOrder(**{**asdict(order), "own_namespaces": bubblewrap is None})
    launched = [sys.executable, "-I", "-S", str(_LAUNCHER), json.dumps(asdict(order))]
    launched += program.words
    if bubblewrap is None:
        return launched
    return [
        *sandbox_command(
            bubblewrap,
            [str(_LAUNCHER.relative_to(_LAUNCHER.parent.parent.parent))],
            writable=[folder],
            readable=program.files,
            network=order.network,
            start=folder,
        ),
        *launched,
    ]


class WorkingFolder:
    """New folder that a program may write to. It is locked while its owner lives;
    ``remove_abandoned_folders`` removes those of killed owners."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder, once the programs have ended; may block."""
        remove_folder(self.path)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Remove the working folders of this user whose owners were killed; may block."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(folder)
                is_new = abs(time.time() - status.st_mtime) < _MIN_ABANDONED_AGE_S
                if status.st_uid == os.getuid() and not is_new:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_folder(path)
            finally:
                os.close(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder that programs wrote to, once they have ended; may block. What cannot be
    removed is logged."""
    # Programs of the system, because a tree may be deeper than the recursion of shutil.rmtree.
    for command in (("/bin/chmod", "-R", "u+rwX"), ("/bin/rm", "-rf")):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*command, "--", str(folder)], capture_output=True, timeout=_REMOVAL_S, check=False
            )
    if folder.exists():
        _LOG.warning("the working folder %s of a program could not be removed", folder)


def program_environment(
    program: Program, variables: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Return the environment variables of a program that is started in ``folder``. It inherits none
    of this process's, which may hold secrets."""
    return {
        "PATH": f"{Path(program.words[0]).parent}:{PROGRAM_PATH}",
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        **variables,
    }
