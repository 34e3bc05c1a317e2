"""The protocol of a scheduler: start worker processes, say at once what they do, leave none behind."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class WorkerSpec:
    """One process: ``python -m module *argv``. Its standard error goes to ``log``; so does its standard
    output, unless ``events``: then every line of it is handed out as a ``WorkerLine``. ``niceness``: how far the worker
    and what it starts step back behind others where cores are short (0 to 19)."""

    name: str
    module: str
    argv: tuple[str, ...]
    log: Path
    events: bool = False
    niceness: int = 0


@dataclass(frozen=True)
class WorkerLine:
    """A line of the standard output of a worker started with ``events``."""

    name: str
    text: str


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker. ``exit_code`` is negative for a signal, as in ``subprocess``; what it wrote begins at byte
    ``log_from`` of ``log``, after what others of its name did."""

    name: str
    exit_code: int
    log: Path
    log_from: int = 0

    @property
    def reason(self) -> str:
        """'exit code 3' or 'killed by SIGKILL'."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


WorkerEvent = WorkerLine | WorkerExit


class Scheduler(Protocol):
    """Owned by one thread, the one that starts the workers: they die with it."""

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker. Raises OSError if the process cannot be made, ValueError on a name in use. The name of a
        worker that has ended is free; what that one left behind is killed first."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """What happened, in order; returns at the first event, or empty after ``timeout_s`` seconds.
        Lines of a worker come before its exit; every exit is reported once."""
        ...

    def stop(self, grace_s: float = 8.0) -> None:
        """Ask every worker to end (SIGTERM), kill what is left after ``grace_s`` seconds, with all its
        descendants. Nothing runs afterwards. May be called twice."""
        ...
