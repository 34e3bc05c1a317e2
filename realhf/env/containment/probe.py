"""Selection of containment layers, and a self-test that tries to break each layer before the server
starts.

The kernel's layers are tested by calling C functions, which the interpreter's audit hooks do not
see; the hooks are tested by operations that the kernel would allow. A layer counts as active only
if the test passes, not merely because its installation reported success.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from realhf.env.containment import sandbox, seccomp
from realhf.env.containment.fork_server import ForkServer
from realhf.env.containment.frames import BadFrame, encode_frame, receive_frame
from realhf.env.containment.sandbox import (
    BUBBLEWRAP,
    FILTER,
    HOOKS,
    LAYERS,
    LIMITS,
    NETWORK,
    ProcessGuard,
    find_bubblewrap,
    package_folder,
)

PROBE = "probe"
"""Key of a fork request that asks for a probe."""


@dataclass(frozen=True)
class Attempt:
    """One forbidden operation that the self-test tried."""

    layer: str
    """The layer that must stop it, one of ``sandbox.LAYERS``."""
    act: str
    """The operation, as a verb phrase for messages."""
    stopped: bool
    """Whether the operation failed with an error that this layer causes, rather than for another
    reason."""
    outcome: str
    """Name of the error (such as EPERM), "denied" if a hook raised, or "possible" if the operation
    succeeded."""


@dataclass(frozen=True)
class ProbeTargets:
    """Targets of the operations that a probe tries."""

    port: int
    """Port of a listener on the host's loopback."""
    file: str
    """Path of a readable file of the host."""
    new_file: str
    """Path at which a file could be created on the host."""
    folder: str
    """Folder of the probe itself, which it may write to."""
    layers: tuple[str, ...]
    """The layers to try."""


def run_probe(guard: ProcessGuard, request: Mapping[str, Any], fds: list[int]) -> None:
    """Try the layers in the forked child, and send the attempts as a frame over the first
    descriptor; the other descriptors are closed. ``request`` holds the fields of
    ``ProbeTargets``."""
    channel = socket.socket(fileno=fds[0])
    for fd in fds[1:]:
        os.close(fd)
    targets = ProbeTargets(**{**request, "layers": tuple(request["layers"])})
    os.makedirs(targets.folder, exist_ok=True)
    attempts = [_try_network(targets)] if NETWORK in targets.layers else []
    calls = _LibcCalls()
    unlinked = os.memfd_create("probe")
    with socket.socket() as unconnected:
        replace(guard, may_lack=frozenset(LAYERS)).apply(targets.folder)
        attempts += [
            *_try_hooks(),
            *_try_system_calls(calls, unconnected, targets.port),
            *_try_limits(guard, unlinked),
        ]
        if BUBBLEWRAP in targets.layers:
            attempts += _try_file_system(calls, targets)
        channel.sendall(
            encode_frame(
                {
                    "attempts": [
                        vars(attempt) for attempt in attempts if attempt.layer in targets.layers
                    ]
                }
            )
        )


class _LibcCalls:
    """C functions whose errors are reported as the kernel returns them. They are bound before the
    audit hooks are installed, because the hooks deny binding."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self.fork = libc.fork
        self.socket = libc.socket
        self.connect = libc.connect
        self.execve = libc.execve
        self.open = libc.open
        self.sigqueue = libc.sigqueue
        self.prlimit = libc.prlimit
        self.syscall = libc.syscall
        self._errno = libc["__errno_location"]
        self._errno.restype = ctypes.POINTER(ctypes.c_int)

    def attempt(
        self, layer: str, act: str, function: Any, *arguments: Any, by: tuple[int, ...]
    ) -> Attempt:
        """Call a C function and return the attempt. It counts as stopped if the call fails with an
        error number in ``by``, which are those that the layer causes."""
        result = function(*arguments)
        number = self._errno()[0]
        if function is self.fork and result == 0:
            os._exit(0)
        if result != -1:
            return Attempt(layer, act, False, "possible")
        return Attempt(layer, act, number in by, errno.errorcode.get(number, str(number)))


def _try_network(targets: ProbeTargets) -> Attempt:
    """Connect to the host's loopback from Python before any filter is installed, so that only an
    empty network namespace can stop it."""
    act = "connect to the host"
    try:
        socket.create_connection(("127.0.0.1", targets.port), timeout=2.0).close()
    except OSError as error:
        return Attempt(NETWORK, act, True, _error_name(error))
    return Attempt(NETWORK, act, False, "possible")


def _try_system_calls(
    calls: _LibcCalls, unconnected: socket.socket, port: int
) -> Iterator[Attempt]:
    """Yield attempts that the seccomp filter must stop with EPERM."""
    expected = (errno.EPERM,)
    address = struct.pack(
        "=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton("127.0.0.1")
    )
    yield calls.attempt(FILTER, "fork", calls.fork, by=expected)
    yield calls.attempt(
        FILTER, "make a socket", calls.socket, socket.AF_INET, socket.SOCK_STREAM, 0, by=expected
    )
    yield calls.attempt(
        FILTER, "connect", calls.connect, unconnected.fileno(), address, len(address), by=expected
    )
    # The program does not exist: without a filter the call fails with ENOENT, and the child
    # continues.
    yield calls.attempt(
        FILTER, "start a program", calls.execve, b"/nonexistent/program", None, None, by=expected
    )
    # Without a filter these calls would have no effect: the signal is 0, and no new limit is given.
    parent = os.getppid()
    machine = seccomp.machine()
    yield calls.attempt(
        FILTER, "queue a signal of another process", calls.sigqueue, parent, 0, None, by=expected
    )
    yield calls.attempt(
        FILTER, "limit another process", calls.prlimit, parent, 0, None, None, by=expected
    )
    if machine is not None:  # Not every C library has a function of this name.
        act = "signal another process"
        yield calls.attempt(
            FILTER, act, calls.syscall, machine.tgkill, parent, parent, 0, by=expected
        )


def _try_file_system(calls: _LibcCalls, targets: ProbeTargets) -> Iterator[Attempt]:
    """Yield attempts that bubblewrap's file system must stop."""
    file = targets.file.encode()
    new_file = targets.new_file.encode()
    read_errors = (errno.ENOENT,)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    write_errors = (errno.EROFS, errno.ENOENT)
    yield calls.attempt(
        BUBBLEWRAP, "read a file of the host", calls.open, file, os.O_RDONLY, by=read_errors
    )
    yield calls.attempt(
        BUBBLEWRAP, "write on the host", calls.open, new_file, flags, 0o600, by=write_errors
    )


def _try_hooks() -> Iterator[Attempt]:
    """Yield attempts that the audit hooks must stop with ``Denied``."""
    acts: Mapping[str, Callable[[], Any]] = {
        "open a file": lambda: os.open("/proc/self/status", os.O_RDONLY),
        "list a folder": lambda: os.listdir("/"),
        "fork": _fork,
        "start a program": lambda: os.posix_spawn("/nonexistent/program", ["program"], {}),
        "connect": lambda: socket.create_connection(("127.0.0.1", 1), timeout=1),
        "load a library": lambda: ctypes.CDLL(None),
    }
    for act, attempt in acts.items():
        try:
            attempt()
        except sandbox.Denied:
            yield Attempt(HOOKS, act, True, "denied")
        except OSError as error:
            yield Attempt(HOOKS, act, False, _error_name(error))
        else:
            yield Attempt(HOOKS, act, False, "possible")


def _fork() -> None:
    """Fork a process that exits at once."""
    if os.fork() == 0:
        os._exit(0)


def _try_limits(guard: ProcessGuard, unlinked: int) -> Iterator[Attempt]:
    """Yield attempts that the resource limits must stop. ``unlinked``: descriptor of an anonymous
    memory file."""
    acts: Mapping[str, tuple[Callable[[], Any], int]] = {
        "take more memory": (
            lambda: mmap.mmap(-1, guard.memory_bytes, flags=mmap.MAP_PRIVATE),
            errno.ENOMEM,
        ),
        "share more memory": (lambda: mmap.mmap(-1, guard.address_bytes), errno.ENOMEM),
        "open more files": (
            lambda: fcntl.fcntl(unlinked, fcntl.F_DUPFD, guard.open_files),
            errno.EINVAL,
        ),
        "write a longer file": (lambda: os.pwrite(unlinked, b"x", guard.file_bytes), errno.EFBIG),
    }
    for act, (attempt, expected) in acts.items():
        try:
            attempt()
        except OSError as error:
            yield Attempt(LIMITS, act, error.errno == expected, _error_name(error))
        else:
            yield Attempt(LIMITS, act, False, "possible")


def _error_name(error: OSError) -> str:
    """Return the symbolic name of an error, such as EPERM."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


SANDBOX_MODES = ("auto", "bwrap", "plain")
"""Values of SANDBOX: ``auto`` (bubblewrap if it works), ``bwrap`` (bubblewrap, or an error),
``plain`` (no bubblewrap)."""
LAMBDA_MODES = ("stub", "sandbox")
"""Values of LAMBDA: ``stub`` (the code of Lambda functions never runs) and ``sandbox`` (it runs in
bubblewrap)."""


class NotContained(RuntimeError):
    """Raised if a required layer is not effective, so that an agent's code could reach the host;
    the server must not start."""


@dataclass
class Containment:
    """The layers that a server uses, and what the self-test observed of them."""

    sandbox: str
    """One of ``SANDBOX_MODES``."""
    lambda_mode: str
    """One of ``LAMBDA_MODES``."""
    program: Path | None = None
    """Path of bubblewrap if simulators and CLI workers run in it, else None."""
    broker: Path | None = None
    """Path of bubblewrap if the code of Lambda functions runs in it, else None."""
    no_network: bool = False
    """Whether the zygotes reported that they have no network."""
    observed: Mapping[str, str] = field(default_factory=dict)
    """Result of the self-test for each layer, as a string (see ``describe_layers``)."""
    tested: Sequence[str] = field(default_factory=tuple)
    """Names of further self-tests that passed, for the text logged at start."""

    @classmethod
    def decide(cls, sandbox: str, lambda_mode: str) -> Containment:
        """Choose the layers for a sandbox mode and a Lambda mode. Raises RuntimeError if a mode
        requires bubblewrap and it does not work here."""
        bubblewrap = None if sandbox == "plain" and lambda_mode == "stub" else find_bubblewrap()
        if sandbox == "bwrap" and bubblewrap is None:
            raise RuntimeError(
                "SANDBOX=bwrap, but bubblewrap does not work here: install Debian's package "
                "bubblewrap and allow unprivileged user namespaces, or use SANDBOX=auto"
            )
        if lambda_mode == "sandbox" and bubblewrap is None:
            raise RuntimeError(
                "LAMBDA=sandbox runs code in bubblewrap, which does not work here: install "
                "Debian's "
                "package bubblewrap, or use LAMBDA=stub"
            )
        return cls(
            sandbox,
            lambda_mode,
            None if sandbox == "plain" else bubblewrap,
            bubblewrap if lambda_mode == "sandbox" else None,
        )

    @property
    def network_mode(self) -> str:
        """The zygotes' network mode: ``outer`` (bubblewrap has removed the network), ``auto``
        (leave the network if possible), ``plain`` (keep it)."""
        return "outer" if self.program else "plain" if self.sandbox == "plain" else "auto"

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that this configuration claims to be active; the self-test tries each of
        them."""
        optional = {NETWORK: self.no_network, BUBBLEWRAP: self.program is not None}
        return tuple(layer for layer in LAYERS if optional.get(layer, True))

    def statement(self) -> str:
        """Return the text to log at start: which layers were found to be active, and which are
        not."""
        file_system = "on: read-only system, private /tmp, own pids" if self.program else "off"
        if self.program is None and self.sandbox == "auto":
            file_system += (
                " (not installed or not permitted); so LAMBDA=sandbox and hosts beyond loopback "
                "are off"
            )
        code = (
            "runs in bubblewrap: no network, no process, 2 s CPU, 128 MB"
            if self.broker
            else "never runs (stub)"
        )
        network = "none" if self.no_network else "the host's, stopped by hooks and filter alone"
        lines = {
            "audit hooks": self._observation(HOOKS),
            "system call filter": self._observation(FILTER),
            "resource limits": self._observation(LIMITS),
            "network": f"{network}; {self._observation(NETWORK)}" if self.no_network else network,
            "bubblewrap": f"{file_system}; {self._observation(BUBBLEWRAP)}"
            if self.program
            else file_system,
            "Lambda code": code,
            "self-test": "; ".join(self.tested) or "not run",
        }
        return "containment:" + "".join(f"\n  {name}: {value}" for name, value in lines.items())

    def _observation(self, layer: str) -> str:
        return self.observed.get(layer, "not tried")


SIMULATORS = "simulators"
"""Name of the zygote of the simulators."""
WORKERS = "CLI workers"
"""Name of the zygote of the CLI workers."""
_FOLDERS = {SIMULATORS: "simulators", WORKERS: "files"}
"""Subfolder of the pool's folder that each zygote's children may write to."""
_PROBE_S = 30.0
"""Timeout in seconds of forking a probe, and of its answer."""


def probe_layers(
    zygotes: Mapping[str, ForkServer], root: Path, layers: Sequence[str]
) -> dict[str, list[Attempt]]:
    """Fork one probe, a disposable child, from each zygote, and return its attempts by the zygote's
    name. ``root`` is the pool's folder. Raises NotContained if a probe does not answer."""
    secret = root / "host-file"
    secret.write_text("a file of the host")
    attempts: dict[str, list[Attempt]] = {}
    with socket.create_server(("127.0.0.1", 0)) as canary:
        port = canary.getsockname()[1]
        for kind, zygote in zygotes.items():
            new_file = Path(package_folder()) / f"{root.name}-probe"
            targets = ProbeTargets(
                port,
                str(secret),
                str(new_file),
                str(root / _FOLDERS[kind] / "probe"),
                tuple(layers),
            )
            attempts[kind] = _probe(zygote, kind, targets)
            # A read-only file system refuses even to remove a missing file.
            if os.path.lexists(new_file):
                new_file.unlink(missing_ok=True)
            if NETWORK in layers and select.select([canary], [], [], 0)[0]:
                canary.accept()[0].close()
                attempts[kind].append(
                    Attempt(NETWORK, "connect to the host", False, "the listener was called")
                )
    return attempts


def _probe(zygote: ForkServer, kind: str, targets: ProbeTargets) -> list[Attempt]:
    """Fork a probe from a zygote and return its attempts. Raises NotContained."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = zygote.fork(
            {PROBE: asdict(targets)},
            [theirs.fileno()],
            f"containment probe of the {kind}",
            _PROBE_S,
        )
        theirs.close()
        try:
            answer = receive_frame(ours, _PROBE_S)
        except (TimeoutError, BadFrame) as error:
            reason = str(error) or f"no answer within {_PROBE_S:g} s"
            raise NotContained(f"the containment probe of the {kind} failed: {reason}") from error
        finally:
            child.kill()
    return [Attempt(**attempt) for attempt in answer["attempts"]]


def describe_layers(
    attempts_by_zygote: Mapping[str, Sequence[Attempt]],
    layers: Sequence[str],
    may_lack: frozenset[str],
    option: str = "--may-lack",
) -> dict[str, str]:
    """Return one line per layer that says what the self-test observed.

    Raises NotContained for a layer that was not tried or is not effective, unless it is in
    ``may_lack``; ``option`` is the name of the command-line option for that set, for the error.
    """
    lines: dict[str, str] = {}
    for layer in layers:
        attempts = [
            (kind, attempt)
            for kind, zygote_attempts in attempts_by_zygote.items()
            for attempt in zygote_attempts
            if attempt.layer == layer
        ]
        untried = sorted(set(attempts_by_zygote) - {kind for kind, _ in attempts})
        failures = [
            f"{kind} could {attempt.act} ({attempt.outcome})"
            for kind, attempt in attempts
            if not attempt.stopped
        ]
        failures += [f"{kind} were not tried" for kind in untried]
        if not failures:
            acts = dict.fromkeys(attempt.act for _, attempt in attempts)
            lines[layer] = f"holds; tried and stopped: {', '.join(acts)}"
        elif layer in may_lack:
            lines[layer] = f"DOES NOT HOLD, and may be missing: {'; '.join(failures)}"
        else:
            raise NotContained(
                f"containment layer {layer!r} does not hold: {'; '.join(failures)}. To start "
                f"without it, name it in "
                f"{option}"
            )
    return lines
