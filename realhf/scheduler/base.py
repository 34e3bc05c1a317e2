"""Interface of schedulers. A scheduler starts worker processes, reports their events, and leaves no
process behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker process, which runs ``python -m module *argv``."""

    name: str
    """Unique name, such as ``model_worker/0``."""
    module: str
    """Module that is run."""
    argv: tuple[str, ...]
    """Command-line arguments."""
    log: Path
    """File to which standard error is appended and, unless ``events`` is set, standard output."""
    events: bool = False
    """Whether each line of standard output is reported as a ``WorkerLine``."""
    niceness: int = 0
    """Niceness of the worker and its children, from 0 to 19."""
    gpu: int | None = None
    """Index of the GPU that the worker computes on, among the GPUs visible to the process that
    starts it. The worker sees only this one and ``further_gpus``; None if it sees all."""
    further_gpus: tuple[int, ...] = ()
    """Indices of the other GPUs of a server with tensor parallelism that the worker starts."""
    host: str = ""
    """The only host on which the worker may run; "" lets the scheduler choose."""


@dataclass(frozen=True)
class WorkerLine:
    """Event: a worker with ``events`` has written a line to standard output."""

    name: str
    """Name of the worker."""
    text: str
    """The line without its line break."""


@dataclass(frozen=True)
class WorkerExit:
    """Event: a worker has exited."""

    name: str
    """Name of the worker."""
    exit_code: int
    """Exit code, or the negative signal number if a signal ended the worker, as in
    ``subprocess``."""
    log: Path
    """Log file of the worker."""
    log_from: int = 0
    """Offset in bytes at which this worker's output begins in ``log``, after the output of earlier
    workers with the same name."""
    cause: str = ""
    """Cause that the scheduler knows, such as the loss of the host; "" if it knows none."""
    last_words: str = ""
    """Cause that the worker itself has written to memory (``write_last_words``), because its log
    may be on a full disk."""

    @property
    def reason(self) -> str:
        """Description of the exit: ``cause``, or a phrase such as 'exit code 3' or 'killed by
        SIGKILL'."""
        if self.cause:
            return self.cause
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


@dataclass(frozen=True)
class Notice:
    """Event: a message for the user."""

    text: str
    """The message."""


@dataclass(frozen=True)
class WorkersWanted:
    """Event: more workers are requested, because a host with spare capacity has joined an
    asynchronous run."""

    host: str
    """Name of the host."""
    kind: str
    """Kind of the workers, such as ``generation``."""
    count: int
    """Number of additional workers."""


@dataclass(frozen=True)
class DeferredStart:
    """Event: a worker whose start was deferred has now been started."""

    name: str
    """Name of the worker."""


@dataclass(frozen=True)
class RestartRequest:
    """Event: the run must restart from its last checkpoint with new keys."""

    why: str
    """Reason for the restart."""


WorkerEvent = WorkerLine | WorkerExit | Notice | WorkersWanted | DeferredStart | RestartRequest


class Scheduler(Protocol):
    """Interface of a scheduler of worker processes. All methods are called on the thread that
    starts the workers; the workers end when that thread ends."""

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker.

        The name of a worker that has ended can be used again; any processes that it has left behind
        are killed first. Raises OSError if the process cannot be created, and ValueError for a name
        in use or a GPU that does not exist.
        """
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Wait for events and return them in order. Return an empty list if none occurs within
        ``timeout_s`` seconds.

        A worker's lines come before its exit, and each exit is reported once.
        """
        ...

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """Kill a worker and all of its descendants with SIGKILL. Its exit is reported with
        ``cause``.

        If ``pid`` and ``started`` are given (see ``WorkerInfo``), the worker is killed only if they
        identify its current process. Unknown names are ignored.
        """
        ...

    def interrupt(self, name: str) -> None:
        """Send SIGINT to a worker on this machine. Unknown names are ignored. The launcher
        interrupts the master in this way, which then saves its progress and exits."""
        ...

    def stop(self, grace_s: float = 8.0) -> None:
        """Send SIGTERM to all workers. Those that still run after ``grace_s`` seconds are killed
        with all their descendants, so that no process is left. Further calls have no effect."""
        ...


@dataclass(frozen=True)
class SchedulerDefinition:
    """An entry of the scheduler registry."""

    options: type[Any]
    """Dataclass of the scheduler's options, which form the section ``scheduler``. All need
    defaults."""
    make: Callable[[Any], Scheduler]
    """Return a scheduler for an instance of ``options``. The launcher calls it once per job and
    once for the workers, on the thread that then owns the scheduler."""
    several_hosts: bool = False
    """Whether workers may run on other hosts. If so, the run needs ``network.bind``."""
    problems: Callable[[Any, Sequence[str]], Iterable[str]] | None = None
    """Return the problems of the options, each as ``OPTION: TEXT``, for a run whose workers have
    these names."""
    elsewhere: Callable[[Any, str], bool] | None = None
    """Return whether the worker with this name runs on another host, which then assigns its GPU."""
    script: Callable[[Any, Sequence[str]], str] | None = None
    """Return a batch script that launches a run with these options and arguments and determines the
    addresses itself. ``mode=check`` prints it."""
