"""Containment of a process that handles text written by an agent: resource limits, audit hooks, a
seccomp filter and bubblewrap (docs/reference/environment.md 5).

Right after a fork, a process applies the layers to itself: those of the kernel (no new privileges,
no network, resource limits, death with the parent) and those of the interpreter (an audit hook that
raises ``Denied`` for forbidden operations). Linux only.

bubblewrap needs Debian's package, version 0.7 or later, and a kernel that allows unprivileged user
namespaces; ``find_bubblewrap`` tests it by running a program in it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from realhf.base.installation import PACKAGE
from realhf.env.containment import seccomp

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_PROCESS_EVENTS = (
    "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.", "ctypes.",
    "os.kill", "signal.pthread_kill", "sys._current_frames", "webbrowser.", "cpython.run",
)  # fmt: skip
"""Prefixes of audit events that start or signal a process, or call C functions; always denied."""
_NETWORK_EVENTS = (
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
    "socket.gethostby", "socket.getnameinfo", "urllib.Request", "http.client.connect", "smtplib.", "ftplib.",
    "sqlite3.connect",
)  # fmt: skip
"""Prefixes of audit events that use the network; denied unless ``egress`` allows them."""
_WRITE_EVENTS = {
    "os.remove": (0,), "os.rename": (0, 1), "os.mkdir": (0,), "os.rmdir": (0,), "os.truncate": (0,),
    "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,), "os.chdir": (0,),
    "os.mkfifo": (0,), "tempfile.mkstemp": (0,), "tempfile.mkdtemp": (0,),
}  # fmt: skip
"""Audit events that change a path, with the positions of the paths among the arguments."""
_READ_EVENTS = {"os.listdir": (0,), "os.scandir": (0,)}
"""Audit events that list a folder, with the positions of the paths among the arguments."""
_LINK_EVENTS = (
    "os.symlink",
    "os.link",
    "os.mknod",
    "shutil.unpack",
    "resource.setrlimit",
    "resource.prlimit",
)
"""Prefixes of audit events that create links or devices, or change limits; always denied."""


class Denied(PermissionError):
    """Raised for an operation that the sandbox denied. The message names the rule, and never a path
    on the host."""


def _prctl(option: int, value: int) -> None:
    """Call prctl. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent() -> None:
    """Let the kernel send SIGKILL to this process when the thread that forked it exits. Must be
    called right after the fork."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_new_privileges() -> None:
    """Set no-new-privileges: no program started from this process can gain privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def leave_network() -> bool:
    """Move this process to a network namespace without interfaces; inherited sockets keep working.

    Must be called with a single thread. Return False if the kernel does not allow it; egress is
    then controlled by the audit hook and the seccomp filter alone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    isolated = libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    # A new user namespace clears the dumpable flag, without which the owner could not read
    # /proc/PID.
    _prctl(_PR_SET_DUMPABLE, 1)
    return isolated


def apply_network_mode(mode: str) -> bool:
    """Apply a network mode (see ``Containment.network_mode``): ``outer`` assumes that there is no
    network already, ``auto`` leaves the network if possible, ``plain`` keeps it. Return whether
    this process now has no network."""
    return mode == "outer" or (mode == "auto" and leave_network())


def verify_containment() -> None:
    """Try operations that the audit hooks must deny. Raises RuntimeError naming the first operation
    that was not denied."""
    attempts: dict[str, Callable[[], object]] = {
        "start a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "fork": os.fork,
        "connect out": lambda: socket.create_connection(("127.0.0.1", 1), timeout=1),
        "read a file of the host": lambda: os.open("/etc/hostname", os.O_RDONLY),
        "write to the system": lambda: os.open("/usr/realhf-probe", os.O_CREAT | os.O_WRONLY),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except Denied:
            continue
        except OSError as error:
            raise RuntimeError(f"not contained: could {name} ({error})") from None
        raise RuntimeError(f"not contained: could {name}")


def limit_resources(
    *, file_bytes: int, open_files: int, memory_bytes: int, address_bytes: int, cpu_s: int
) -> None:
    """Lower the resource limits of this process for its whole life.

    memory_bytes: private memory (RLIMIT_DATA). address_bytes: address space (RLIMIT_AS).
    """
    limits = {
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_AS: address_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (ceiling, ceiling))
    # Otherwise the size is ``ulimit -s``, which may be large, and every stack counts as private
    # memory.
    threading.stack_size(8 << 20)


def redirect_standard_streams(stderr_fd: int | None = None) -> None:
    """Make stdin empty, and send stdout and stderr to ``stderr_fd``, or discard them if it is
    None."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    target = null if stderr_fd is None else stderr_fd
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(null)


def package_roots() -> tuple[str, ...]:
    """Return the folders of the standard library, of the installed packages and of the time zones,
    which imports and data files need."""
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted(roots), "/usr/share/zoneinfo")


def package_folder() -> str:
    """Return the folder of this package, which contains tasks and answers that contained processes
    must not read. It may lie among the installed packages."""
    return str(PACKAGE)


@dataclass
class WriteBudget:
    """Remaining numbers of files and folders that a contained process may create."""

    files: int = 0
    """How many files may still be opened for writing."""
    folders: int = 0
    """How many folders may still be created."""
    depth: int = 0
    """Maximum depth of folders below a writable root."""

    def take_file(self) -> bool:
        """Use up one file; return False if none was left."""
        self.files -= 1
        return self.files >= 0

    def take_folder(self, depth: int) -> bool:
        """Use up one folder that lies below ``depth`` other folders; return False if none was left
        or it is too deep."""
        self.folders -= 1
        return self.folders >= 0 and depth < self.depth


@dataclass(frozen=True)
class AuditGuard:
    """Audit hook that restricts what a contained process's interpreter may do. Paths are compared
    after symbolic links are resolved."""

    read_roots: tuple[str, ...]
    """Folders whose files may be opened for reading (packages, time zones); files in this package's
    own folder are excluded."""
    write_roots: tuple[str, ...] = ()
    """Folders that may be read and written."""
    on_denied: Callable[[str, str], None] | None = None
    """Called with the rule and the text of each denied operation."""
    writes: WriteBudget | None = None
    """Limit on files and folders that may still be created; None for no limit. The owner may refill
    it."""
    egress: Callable[[str, tuple[object, ...]], bool] | None = None
    """Called with the name and arguments of a network event; returns whether it is allowed. None
    denies all."""

    def install(self) -> None:
        """Add the hook; it cannot be removed for the rest of the process's life."""
        sys.addaudithook(self._make_hook())

    def _make_hook(self) -> Callable[[str, tuple[object, ...]], None]:
        read_roots = tuple(_resolve_root(path) for path in self.read_roots + self.write_roots)
        write_roots = tuple(_resolve_root(path) for path in self.write_roots)
        hidden = _resolve_root(package_folder())
        verdicts: dict[str, str] = {}

        def inside(path: object, roots: tuple[str, ...]) -> bool:
            if isinstance(path, int) or path is None:
                return True
            resolved = os.path.realpath(os.fsdecode(path)) + "/"  # type: ignore[arg-type]
            return resolved.startswith(roots) and not resolved.startswith(hidden)

        def depth(path: object) -> int:
            resolved = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
            root = next(root for root in write_roots if f"{resolved}/".startswith(root))
            return resolved[len(root) :].count("/")

        def deny(rule: str, text: str) -> None:
            if self.on_denied is not None:
                self.on_denied(rule, text)
            raise Denied(f"{rule}: {text}")

        def hook(event: str, args: tuple[object, ...]) -> None:
            verdict = verdicts.get(event)
            if verdict is None:
                verdict = verdicts[event] = _classify(event)
            if verdict == "pass":
                return
            if verdict == "open":
                writes = _opens_for_writing(args[1], args[2])
                if not inside(args[0], write_roots if writes else read_roots) and (
                    writes or args[0] != os.devnull
                ):
                    deny("local-file", "this path cannot be opened here")
                if writes and self.writes is not None and not self.writes.take_file():
                    deny("local-file", "one command may not write more files")
            elif verdict == "read":
                if not inside(args[0], read_roots):
                    deny("local-file", "this folder cannot be listed here")
            elif verdict == "write":
                if not all(
                    inside(args[i], write_roots) for i in _WRITE_EVENTS[event] if i < len(args)
                ):
                    deny("local-file", "this path cannot be changed here")
                if (
                    event == "os.mkdir"
                    and self.writes is not None
                    and not self.writes.take_folder(depth(args[0]))
                ):
                    deny("local-file", "there are too many folders, or they are too deep")
            elif verdict != "egress" or self.egress is None or not self.egress(event, args):
                deny(verdict, "not allowed here")

        return hook


def _opens_for_writing(mode: object, flags: object) -> bool:
    """Return whether the mode or flags of an ``open`` event allow writing."""
    if isinstance(mode, str):
        return any(char in mode for char in "wax+")
    return isinstance(flags, int) and bool(
        flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    )


def _resolve_root(path: str) -> str:
    """Return a folder's resolved path with a final slash, for comparison by prefix."""
    return os.path.realpath(path) + "/"


def _classify(event: str) -> str:
    """Return the name of the rule for an audit event; "pass" if it is allowed."""
    if event == "open":
        return "open"
    if event in _WRITE_EVENTS:
        return "write"
    if event in _READ_EVENTS:
        return "read"
    if event.startswith(_PROCESS_EVENTS):
        return "process-start"
    if event.startswith(_NETWORK_EVENTS):
        return "egress"
    if event.startswith(_LINK_EVENTS):
        return "local-file"
    return "pass"


HOOKS, FILTER, LIMITS, NETWORK, BUBBLEWRAP = LAYERS = (
    "hooks",
    "filter",
    "limits",
    "network",
    "bubblewrap",
)
"""Layers of containment: the interpreter's audit hooks, a seccomp filter, resource limits, an empty
network namespace, and a separate file system."""
_RESERVED_ADDRESS_BYTES = 3 << 29
"""Address space allowed beyond private memory: for shared mappings, and for memory that allocators
reserve for threads but never touch."""


@dataclass(frozen=True)
class ProcessGuard:
    """Limits for one kind of contained process."""

    file_bytes: int
    """Maximum size of a file that it writes."""
    open_files: int
    """Maximum number of open descriptors."""
    memory_bytes: int
    """Maximum bytes of private memory."""
    cpu_s: int
    """Maximum CPU time in seconds."""
    may_lack: frozenset[str] = frozenset()
    """Layers that may be missing; without any other layer the process must not run."""
    read_roots: tuple[str, ...] = field(default_factory=package_roots)
    """Folders that it may read, see ``AuditGuard``."""

    @property
    def address_bytes(self) -> int:
        """Maximum bytes of address space: private memory, plus room for shared mappings and for
        memory that allocators reserve for threads but never touch."""
        return self.memory_bytes + _RESERVED_ADDRESS_BYTES

    def apply(
        self,
        folder: str,
        on_denied: Callable[[str, str], None] | None = None,
        writes: WriteBudget | None = None,
    ) -> None:
        """Contain this process for the rest of its life; it can write only to ``folder``. Must be
        called with a single thread.

        on_denied, writes: see ``AuditGuard``. Raises RuntimeError naming a layer that is not
        effective and is not in ``may_lack``.
        """
        forbid_new_privileges()
        if not seccomp.install() and FILTER not in self.may_lack:
            raise RuntimeError("the system call filter could not be installed")
        limit_resources(
            file_bytes=self.file_bytes,
            open_files=self.open_files,
            memory_bytes=self.memory_bytes,
            address_bytes=self.address_bytes,
            cpu_s=self.cpu_s,
        )
        AuditGuard(self.read_roots, (folder,), on_denied, writes).install()
        if HOOKS not in self.may_lack:
            verify_containment()


PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Folders searched for bubblewrap, instead of those in PATH."""
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/alternatives",
)
"""Paths of the host that programs need to start, mounted read-only if they exist."""
_TEMPORARY_BYTES = 64 << 20
"""Size of each of the folders /tmp and /dev/shm in bubblewrap, which lie in memory; see
``mount_memory``."""
_LOG = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 20.0
"""Timeout in seconds for a test run of Python in bubblewrap."""
_NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent",
    "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
)  # fmt: skip
"""Options of bubblewrap: new namespaces, no capabilities, an unprivileged user, death with the
parent."""
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
"""Paths of the host that a program with a network needs."""
_CLEANUP_SCRIPT = '"$@" && /bin/rm -rf -- "$0"'
"""Shell program that runs a command and removes a folder once the command has succeeded.

The shell outlives the thread that started it, so bubblewrap's death with its parent means its death
with the shell. If the owner is killed before it can remove the folder, the shell removes it once
the zygote has exited.
"""


def find_bubblewrap() -> Path | None:
    """Return the path of bubblewrap; None if it is not installed, or if Python does not start in it
    with the options that are used here."""
    program = shutil.which("bwrap", path=PROGRAM_PATH)
    if program is None:
        return None
    probe = [
        *sandbox_command(Path(program)),
        sys.executable,
        "-I",
        "-S",
        "-c",
        "open('/proc/self/statm').close()",
    ]
    try:
        result = subprocess.run(
            probe, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(program) if result.returncode == 0 else None


def sandbox_command(
    program: Path,
    parts: Sequence[str] = (),
    writable: Sequence[Path] = (),
    private: Sequence[Path] = (),
    readable: Sequence[Path] = (),
    *,
    network: bool = False,
    start: Path = Path("/"),
) -> list[str]:
    """Return the words to put before the command of one of this package's Python programs so that
    it runs in bubblewrap.

    parts: files and folders of this package, relative to it, that are visible. The rest of the
    package is hidden, so that code that escapes the interpreter's hooks finds neither tasks nor
    answers. writable: folders of the host that can be changed. private: folders that are empty and
    belong to the sandbox. readable: further files and folders of the host that are visible.
    network: whether the host's network can be used. start: the working folder. Inherited
    descriptors keep working.
    """
    python = {
        sys.base_prefix,
        sys.prefix,
        *(root for root in package_roots() if os.path.isdir(root)),
    }
    words = [str(program), *_NAMESPACES, *([] if network else ["--unshare-net"])]
    words += ["--dev", "/dev", *mount_memory(program, _TEMPORARY_BYTES, "/dev/shm")]
    words += ["--remount-ro", "/dev", "--proc", "/proc"]
    words += mount_memory(program, _TEMPORARY_BYTES, "/tmp")
    for path in (*_SYSTEM, *(_NETWORK_FILES if network else ())):
        words += ["--ro-bind-try", path, path]
    for path in sorted(python):  # in this order a folder precedes the folders inside it
        words += ["--ro-bind", path, path]
    words += _hide_package(parts)
    for path in readable:
        words += ["--ro-bind", str(path), str(path)]
    for path in writable:
        words += ["--bind", str(path), str(path)]
    for path in private:
        words += ["--tmpfs", str(path)]
    return [*words, "--remount-ro", "/", "--chdir", str(start)]


def mount_memory(program: Path, size: int, folder: str) -> list[str]:
    """Return the options that mount an empty folder in memory, of at most ``size`` bytes if this
    bubblewrap can limit it."""
    limit = ["--size", str(size)] if _limits_memory(program) else []
    return [*limit, "--tmpfs", folder]


@functools.cache
def _limits_memory(program: Path) -> bool:
    """Return whether bubblewrap knows ``--size``: not before 0.7, nor where it is setuid. It says so
    while it reads its options."""
    try:
        result = subprocess.run(
            [program, "--size", "4096", "--help"],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    if b"--size" not in result.stderr:
        return True
    _LOG.warning(
        "%s refuses --size (it is older than 0.7, or setuid): the sandbox is kept, but what programs "
        "write to its /tmp and /dev/shm is not limited",
        program,
    )
    return False


def hide_folder(folder: str) -> list[str]:
    """Return the options that mount an empty, read-only folder over ``folder``."""
    return ["--tmpfs", folder, "--remount-ro", folder]


def _hide_package(parts: Sequence[str]) -> list[str]:
    """Return the options that hide this package's folder except for ``parts``."""
    package = package_folder()
    words = ["--tmpfs", package]
    for name in parts:
        words += ["--ro-bind", f"{package}/{name}", f"{package}/{name}"]
    return [*words, "--remount-ro", package]


def wrap_with_cleanup(command: Sequence[str], folder: Path) -> list[str]:
    """Return ``command`` wrapped in a shell that removes ``folder`` once the command has
    succeeded."""
    return ["/bin/sh", "-c", _CLEANUP_SCRIPT, str(folder), *command]
