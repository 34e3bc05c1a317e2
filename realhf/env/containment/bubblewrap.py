"""Runs a process tree under bubblewrap: it sees a read-only system, a private /tmp, no network and no process but its
own.

Needs Debian's ``bubblewrap`` and a kernel that allows unprivileged user namespaces; ``find`` really tries. Source:
docs/reference/environment.md 5, layer (d).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.env.containment.sandbox import own_package, package_roots

_PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives")
_PROBE_TIMEOUT_S = 20.0
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts", "--die-with-parent",
    "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
)  # fmt: skip
_KEEP_HOUSE = '"$@" && /bin/rm -rf -- "$0"'
"""Shell program that removes a folder after its command ended well. The shell outlives the thread that started it, so
here dying with the parent means dying with the shell. Whatever a killed owner could not remove is removed once the
zygote has ended by itself."""


def find() -> Path | None:
    """Return the program, when it is installed and a Python under it comes up with every option that is used here."""
    program = shutil.which("bwrap", path=_PROGRAM_PATH)
    if program is None:
        return None
    probe = [*sandboxed(Path(program)), sys.executable, "-I", "-S", "-c", "open('/proc/self/statm').close()"]
    try:
        done = subprocess.run(probe, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(program) if done.returncode == 0 else None


def sandboxed(
    program: Path, parts: Sequence[str] = (), writable: Sequence[Path] = (), private: Sequence[Path] = ()
) -> list[str]:
    """Return the words that go before a command: the sandbox of Python programs of this package.

    Of the host's files only ``writable`` can be changed; ``private`` folders are the sandbox's own; descriptors handed
    over keep working. Of the package only ``parts`` (files and folders, relative to it) are there: code that breaks out
    of the interpreter's guards finds no tasks and no answers.
    """
    python = {sys.base_prefix, sys.prefix, *(root for root in package_roots() if os.path.isdir(root))}
    words = [str(program), *_NAMESPACES, "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for path in _SYSTEM:
        words += ["--ro-bind-try", path, path]
    for path in sorted(python):  # a prefix comes before what is inside it
        words += ["--ro-bind", path, path]
    words += _own_code(parts)
    for path in writable:
        words += ["--bind", str(path), str(path)]
    for path in private:
        words += ["--tmpfs", str(path)]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def hidden(folder: str) -> list[str]:
    """Return the words that put an empty folder in the place of ``folder``."""
    return ["--tmpfs", folder, "--remount-ro", folder]


def _own_code(parts: Sequence[str]) -> list[str]:
    ours = own_package()
    words = ["--tmpfs", ours]
    for name in parts:
        words += ["--ro-bind", f"{ours}/{name}", f"{ours}/{name}"]
    return [*words, "--remount-ro", ours]


def housekept(command: Sequence[str], folder: Path) -> list[str]:
    """Return ``command`` under a shell that removes ``folder`` when it ends well."""
    return ["/bin/sh", "-c", _KEEP_HOUSE, str(folder), *command]
