"""First process of a stage of a container, see ``container_process``: it runs commands on the
container's root, and reads and writes files there.

Before it serves the first request it has given up its privileges, so that a command gains nothing
by what it may do to this process.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import resource
import select
import selectors
import signal
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from realhf.env.containment import seccomp
from realhf.env.containment.container_usage import Accountant, count_sockets
from realhf.env.containment.frames import encode_frame, read_frame

PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
PR_SET_DUMPABLE = 4
_PR_SET_THP_DISABLE = 41
_MS_BIND = 0x1000
MS_REC = 0x4000
_KEPT = (0, 1, 3, 4, 5, 6, 7, 10)
"""Capabilities of a command: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID and
NET_BIND_SERVICE. They hold for what belongs to the container's only user."""
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64
"""Numbers of capabilities that are tried to be dropped."""
_TICK_S = 0.05
"""Seconds between two looks at the memory and the time of a running command."""
_NICENESS = 5
"""Niceness of the commands."""
_MAX_READ = 1 << 20
"""Maximum bytes of a file that ``read`` returns."""
_MAX_READS = 16
"""Maximum number of pieces of 64 KiB, the size of a pipe, that are read at a time."""
_MAX_OUTPUT = 16 << 20
"""Bytes of output after which a command is ended."""
_MAX_PIPES = 64
"""Maximum number of commands whose processes in the background may still write output."""
_MAX_SOCKETS = 1024
"""Maximum number of sockets of a container that has its own network; each holds less than 1 MiB."""
_QUEUED_SIGNALS = 4096
_SHELLS = ("/bin/bash", "/bin/sh")


@dataclass(frozen=True)
class Order:
    """What a container is made of, and its limits."""

    storage_bytes: int
    """Maximum bytes of all files that differ from those of the root; they are held in memory."""
    memory_bytes: int
    """Maximum bytes of memory of each process, and of all processes of a stage."""
    processes: int
    """Maximum number of processes and threads of the container."""
    image: str = ""
    """Folder with an unpacked image, which is the root; "" for the host's userland."""
    network: bool = False
    """Whether the host's network can be used."""
    hidden: tuple[str, ...] = ()
    """Absolute paths of folders of the host that are empty in the container, if they are within
    its userland; other folders are not in the container at all."""


class Libc:
    """C functions that raise OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, act: str, name: str, *arguments: Any) -> None:
        """Call a function. Raises OSError whose message begins with ``act``."""
        if getattr(self._libc, name)(*arguments) == -1:
            number = ctypes.get_errno()
            raise OSError(number, f"{act}: {os.strerror(number)}")

    def mount(self, source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
        """Mount a file system. Raises OSError."""
        act = f"mounting {kind or 'a folder'} at {target}"
        words = (source.encode(), target.encode(), kind.encode() or None)
        self.call(act, "mount", *words, ctypes.c_ulong(flags), data.encode() or None)

    def bind(self, source: str, target: str) -> None:
        """Mount a file or folder, with all that is mounted in it, at another place. Raises
        OSError."""
        self.mount(source, target, "", _MS_BIND | MS_REC)


def close_others(kept: int, null: int) -> None:
    """Close all descriptors but stderr and ``kept``; stdin and stdout become ``null``, a descriptor
    of ``/dev/null``."""
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def give_up_privileges(libc: Libc, order: Order) -> None:
    """Keep only the capabilities of a command, for this process and all that it starts, and set
    limits and the system call filter. Raises OSError."""
    for kind, limit in (
        (resource.RLIMIT_NPROC, order.processes),
        (resource.RLIMIT_DATA, order.memory_bytes),
        (resource.RLIMIT_FSIZE, order.storage_bytes),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        # Pages that are locked for sending would be counted nowhere.
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        ceiling = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (ceiling, ceiling))
    kept = 0
    for number in range(_CAPABILITIES):
        if number in _KEPT:
            kept |= 1 << number
            continue
        with contextlib.suppress(OSError):  # a number that this kernel does not know
            libc.call("dropping a capability", "prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    libc.call("giving up capabilities", "capset", header, sets)
    libc.call("prctl", "prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.call("prctl", "prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)
    libc.call("prctl", "prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not seccomp.install_for_programs():
        raise OSError(0, "the system call filter could not be installed")


class _Output:
    """The output of a command: the first and the last part of it."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0
        """Number of bytes that the command wrote."""
        self.omitted = 0
        """Number of bytes between the two parts."""

    def add(self, data: bytes) -> None:
        """Add what the command wrote."""
        self.size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self.omitted += surplus

    def text(self) -> str:
        """Return the output as text, with a remark where a part is left out."""
        head = self._head.decode("utf-8", "replace")
        tail = self._tail.decode("utf-8", "replace")
        return f"{head}\n[{self.omitted} bytes left out]\n{tail}" if self.omitted else head + tail


class Stage:
    """The first process of a stage: it runs commands, and reads and writes files in the root."""

    def __init__(self, connection: socket.socket, order: Order) -> None:
        self._connection = connection
        self._order = order
        self._selector = selectors.DefaultSelector()
        self._stream: IO[bytes] = connection.makefile("rb")
        self._pipes: list[int] = []
        self._accountant = Accountant()

    def serve(self) -> None:
        """Serve requests until the connection is closed. Between them, read what processes that
        were left running write, so that they do not wait for a reader."""
        self._selector.register(self._connection, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self._selector.select(_TICK_S)]
            self._reap()
            self._limit_memory()
            for source in ready:
                if isinstance(source, int):
                    self._read_output(source, None)
            if self._connection not in ready:
                continue
            request = read_frame(self._stream)
            if request is None:
                return
            acts = {"run": self._run, "put": self._put, "read": self._read, "clear": self._clear}
            try:
                answer = acts[request.pop("act")](**request)
            except (OSError, MemoryError) as error:
                answer = {"error": getattr(error, "strerror", None) or repr(error)}
            self._connection.sendall(encode_frame(answer))

    def _run(
        self,
        words: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        timeout_s: float,
        output_bytes: int,
    ) -> dict[str, Any]:
        """Run a command and return its exit code and its output; if it was ended, no code and the
        reason."""
        output = _Output(output_bytes)
        if len(self._pipes) >= _MAX_PIPES:
            self._close_pipe(self._pipes[0])
        read_end, write_end = os.pipe()
        try:
            child = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            return {"code": 126, "output": f"no process can be started: {error.strerror}"}
        if child == 0:
            _become_command(words, folder, variables, write_end)
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._selector.register(read_end, selectors.EVENT_READ)
        self._pipes.append(read_end)
        code = self._wait(child, time.monotonic() + timeout_s, read_end, output)
        ended = "" if code is not None else "it wrote more than 16 MiB"
        if code is None and output.size <= _MAX_OUTPUT:
            ended = f"it took more than {timeout_s:.3g} s"
        answer = {"code": code, "output": output.text(), "omitted": output.omitted}
        return answer | {"ended": ended}

    def _wait(self, child: int, deadline: float, pipe: int, output: _Output) -> int | None:
        """Read the output of a command until it exits, and return its exit code; None, after it was
        ended with its group, if it does not exit in time or writes too much."""
        process = os.pidfd_open(child)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        waiting.register(pipe, select.POLLIN)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                ready = dict(waiting.poll(1000 * min(_TICK_S, left_s)))
                if pipe in ready and not self._read_output(pipe, output):
                    waiting.unregister(pipe)
                if process in ready:
                    self._read_output(pipe, output)
                    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                for other in [each for each in self._pipes if each != pipe]:
                    self._read_output(other, None)
                self._reap(but=child)
                self._limit_memory(child)
                if output.size > _MAX_OUTPUT:
                    break
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-child, 0)
            self._read_output(pipe, output)
            return None
        finally:
            os.close(process)

    def _read_output(self, pipe: int, output: _Output | None) -> bool:
        """Read what is in a pipe; close it at its end. Return whether it is open."""
        if pipe not in self._pipes:
            return False
        for _ in range(_MAX_READS):
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self._close_pipe(pipe)
                return False
            if output is not None:
                output.add(data)
        return True

    def _close_pipe(self, pipe: int) -> None:
        self._pipes.remove(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)

    def _reap(self, but: int = 0) -> None:
        """Collect the processes that have exited, which would otherwise count towards the limit of
        processes; leave ``but``."""
        with contextlib.suppress(ChildProcessError):
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if exited.si_pid == but:
                    return
                os.waitpid(exited.si_pid, 0)

    def _limit_memory(self, starting: int = 0) -> None:
        """If all processes together hold more memory than allowed, or have more sockets, end those
        that hold most. ``starting``: see ``Accountant.measure``."""
        usages = self._accountant.measure(starting)
        memory = {pid: usage.memory for pid, usage in usages.items()}
        _end_largest(memory, sum(memory.values()), self._order.memory_bytes)
        if not self._order.network and (sockets := count_sockets()) > _MAX_SOCKETS:
            descriptors = {pid: usage.descriptors for pid, usage in usages.items()}
            # Those of a process that is ending are no reason to end another one.
            total = min(sockets, sum(descriptors.values()))
            _end_largest(descriptors, total, _MAX_SOCKETS)

    def _clear(self) -> dict[str, Any]:
        """End all other processes of the stage, and wait until none exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return {}

    def _put(self, path: str, data: str, mode: int, *, append: bool = False) -> dict[str, Any]:
        """Write a file, or append to it, and make the folders above it. Without data and with the
        mode of a folder, make the folder; with that of a link, ``data`` is its target."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(mode):
            target.mkdir(parents=True, exist_ok=True)
        elif stat.S_ISLNK(mode):
            target.unlink(missing_ok=True)
            target.symlink_to(data)
        else:
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
            descriptor = os.open(target, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return {"error": "Not a regular file"}
                file.write(base64.b64decode(data))
            target.chmod(stat.S_IMODE(mode))
        return {}

    def _read(self, path: str) -> dict[str, Any]:
        """Return the content of a regular file; not that of a link or a device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {"error": "Not a regular file"}
            data = file.read(_MAX_READ + 1)
        if len(data) > _MAX_READ:
            return {"error": f"larger than {_MAX_READ} bytes"}
        return {"data": base64.b64encode(data).decode()}


def _end_largest(sizes: Mapping[int, int], total: int, limit: int) -> None:
    """End the processes with the largest sizes until the rest of ``total`` is within the limit."""
    for pid in sorted(sizes, key=lambda pid: sizes[pid], reverse=True):
        if total <= limit:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        total -= sizes[pid]


def _become_command(
    words: Sequence[str], folder: str, variables: Mapping[str, str], output: int
) -> None:
    """Become a command in a session of its own."""
    try:
        os.setsid()
        os.nice(_NICENESS)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 1024)
        try:
            os.chdir(folder)
        except OSError as error:
            os.write(2, f"{folder}: {error.strerror}\n".encode())
            os._exit(126)
        shell = next((path for path in _SHELLS if os.path.exists(path)), _SHELLS[-1])
        command = [shell if words[0] == "sh" else words[0], *words[1:]]
        os.execvpe(command[0], command, dict(variables))
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)
