"""The scheduler contract: starts worker processes, reports their events, and leaves no process
behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class WorkerSpec:
    """A worker process to start: ``python -m module *argv``."""

    name: str
    """Unique name, such as ``model_worker/0``."""
    module: str
    """Module that is run."""
    argv: tuple[str, ...]
    """Command-line arguments."""
    log: Path
    """File that standard error is appended to, and standard output unless ``events`` is set."""
    events: bool = False
    """Whether each line of standard output is reported as a ``WorkerLine``."""
    niceness: int = 0
    """Niceness of the worker and its children, from 0 to 19."""
    gpu: int | None = None
    """The only GPU that the worker sees, numbered among those visible to its starter; None for
    all."""
    host: str = ""
    """The only host on which the worker may run; "" lets the scheduler choose."""


@dataclass(frozen=True)
class WorkerLine:
    """A line of the standard output of a worker started with ``events``."""

    name: str
    """Name of the worker."""
    text: str
    """The line without its line break."""


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker."""

    name: str
    """Name of the worker."""
    exit_code: int
    """Exit code; the negative signal number for a signal, as in ``subprocess``."""
    log: Path
    """Log file of the worker."""
    log_from: int = 0
    """Offset in bytes at which the output of this worker begins in ``log``, after earlier ones of
    the same name."""
    cause: str = ""
    """Cause known to the scheduler, such as the loss of the host."""
    last_words: str = ""
    """Cause that the worker itself left in memory (``write_last_words``), since its log may be on a
    full disk."""

    @property
    def reason(self) -> str:
        """The cause of the exit in words: 'exit code 3', 'killed by SIGKILL', or ``cause``."""
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
    """A message for the user."""

    text: str
    """The message."""


@dataclass(frozen=True)
class WorkersWanted:
    """A request for more workers: a host with spare capacity has joined an asynchronous run."""

    host: str
    """Name of the host."""
    kind: str
    """Kind of the workers, such as ``generation``."""
    count: int
    """Number of additional workers."""


@dataclass(frozen=True)
class DeferredStart:
    """The actual start of a worker whose start was deferred."""

    name: str
    """Name of the worker."""


@dataclass(frozen=True)
class RestartRequest:
    """A request to restart the run from its last checkpoint, with new keys."""

    why: str
    """Reason for the restart."""


WorkerEvent = WorkerLine | WorkerExit | Notice | WorkersWanted | DeferredStart | RestartRequest


class Scheduler(Protocol):
    """A scheduler of worker processes. It belongs to the thread that starts the workers, which end
    with it."""

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker.

        The name of an ended worker can be used again; processes that it left behind are killed
        first. Raises OSError if the process cannot be created, and ValueError for a name in use or
        a GPU that does not exist."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Wait for events and return them in order, or an empty list after ``timeout_s`` seconds.

        Lines of a worker come before its exit, and each exit is reported once."""
        ...

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """Kill a worker and all of its descendants with SIGKILL, and report ``cause`` with its
        exit.

        With ``pid`` and ``started`` (see ``WorkerInfo``) only if they identify the current process
        of that name. Unknown names are ignored."""
        ...

    def interrupt(self, name: str) -> None:
        """Send SIGINT to a worker on this machine, which then saves its progress and exits. Unknown
        names are ignored. The launcher sends it to the master."""
        ...

    def stop(self, grace_s: float = 8.0) -> None:
        """Send SIGTERM to all workers, and kill those still running after ``grace_s`` seconds, with
        all their descendants. No process is left afterwards. Further calls have no effect."""
        ...


@dataclass(frozen=True)
class SchedulerDefinition:
    """An entry of the registry of schedulers."""

    options: type[Any]
    """Dataclass of the scheduler's options, all with defaults, the section ``scheduler``."""
    make: Callable[[Any], Scheduler]
    """Return a scheduler for an instance of ``options``. The launcher calls it once per job and
    once for the workers, on the thread that then owns the scheduler."""
    several_hosts: bool = False
    """Whether workers may run on other hosts, so that the run needs ``network.bind``."""
    problems: Callable[[Any, Sequence[str]], Iterable[str]] | None = None
    """Return what is wrong with the options, as ``OPTION: TEXT``, for a run with workers of these
    names."""
    elsewhere: Callable[[Any, str], bool] | None = None
    """Return whether a worker, by the options and its name, runs on another host, which then
    assigns its GPUs."""
    script: Callable[[Any, Sequence[str]], str] | None = None
    """Return a batch script that launches a run with the options and these arguments, and
    determines the addresses itself. ``mode=check`` prints it."""
