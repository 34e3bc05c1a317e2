"""Defines what a scheduler does: it starts worker processes, reports at once what they do, and leaves none behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class WorkerSpec:
    """Describes one process, ``python -m module *argv``.

    Its standard error goes to ``log``, and its standard output too, unless ``events`` is set: then every line of
    standard output is handed out as a ``WorkerLine``. ``niceness`` (0 to 19) says how far the worker and what it starts
    give way to others where cores are short. ``gpu`` is the only GPU that the worker sees, numbered among those that
    its starter sees; None: all of these. ``host`` is the only host on which it may run; empty: the scheduler chooses.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    log: Path
    events: bool = False
    niceness: int = 0
    gpu: int | None = None
    host: str = ""


@dataclass(frozen=True)
class WorkerLine:
    """Carries one line of the standard output of a worker started with ``events``."""

    name: str
    text: str


@dataclass(frozen=True)
class WorkerExit:
    """Reports the end of a worker. ``exit_code`` is negative for a signal, as in ``subprocess``. What the worker wrote
    begins at byte ``log_from`` of ``log``, after what earlier workers of the same name wrote. ``cause`` is what the
    scheduler knows of it beside that, e.g. that its host was lost. ``words`` is why the worker failed as
    it says itself, if it could leave that beside its log, which may be on a full disk."""

    name: str
    exit_code: int
    log: Path
    log_from: int = 0
    cause: str = ""
    words: str = ""

    @property
    def reason(self) -> str:
        """Say why the worker ended: 'exit code 3', 'killed by SIGKILL', or the cause."""
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
    """Says something that a person should know."""

    text: str


@dataclass(frozen=True)
class WorkersWanted:
    """Says that a host has room for ``count`` more workers of a kind, in a run that can use them."""

    host: str
    kind: str
    count: int


@dataclass(frozen=True)
class WorkerStarts:
    """Says that a worker whose start was put off is being started now."""

    name: str


@dataclass(frozen=True)
class BeginAgain:
    """Says why the run is to begin again from its last checkpoint, with other keys."""

    why: str


WorkerEvent = WorkerLine | WorkerExit | Notice | WorkersWanted | WorkerStarts | BeginAgain


class Scheduler(Protocol):
    """Starts, watches and stops workers. One thread owns it, the one that starts the workers: they end with that
    thread."""

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker. Raises OSError if the process cannot be made, ValueError on a name in use or a GPU
        that is not there. The name of a worker that has ended is free again; processes that it left behind are killed
        first."""
        ...

    def wait(self, timeout_s: float) -> list[WorkerEvent]:
        """Return what happened, in order: at the first event, or an empty list after ``timeout_s`` seconds. Lines of a
        worker come before its exit; every exit is reported once."""
        ...

    def kill(self, name: str, cause: str, *, pid: int = 0, started: int = 0) -> None:
        """Kill a worker with all that it has started (SIGKILL, which also ends one that is stopped); its exit then has
        this ``cause``. With ``pid`` and ``started`` (see ``WorkerInfo``) only if it is this process: another that has
        the name by now is left alone, as is a name that nobody has."""
        ...

    def interrupt(self, name: str) -> None:
        """Send SIGINT to a worker of this machine, which saves what it can and ends by itself. The launcher sends it to
        the master. A name that no worker here has is left alone."""
        ...

    def stop(self, grace_s: float = 8.0) -> None:
        """Ask every worker to end (SIGTERM), and kill those still running after ``grace_s`` seconds, with all their
        descendants. Nothing runs afterwards. A second call does no harm."""
        ...


@dataclass(frozen=True)
class SchedulerDefinition:
    """Is what the name of a scheduler stands for. ``options`` is a dataclass with the scheduler's own options, all with
    defaults, which stand under ``scheduler:``; ``make`` returns a scheduler for an instance of it. It is called in the
    launcher, once for every job and once for the workers, on the thread that then owns the scheduler. With
    ``several_hosts`` workers may run on other hosts, so that the run has to listen on a network (``network.bind``).
    ``problems`` says what is wrong with the options for a run whose workers have these names, as ``OPTION: TEXT``.
    ``elsewhere`` says of a worker, by the options and its name, whether it runs on another host, which deals out its
    GPUs. ``script`` returns a batch script that launches a run with the options and these arguments, and finds the
    addresses itself; ``mode=check`` prints it."""

    options: type[Any]
    make: Callable[[Any], Scheduler]
    several_hosts: bool = False
    problems: Callable[[Any, Sequence[str]], Iterable[str]] | None = None
    elsewhere: Callable[[Any, str], bool] | None = None
    script: Callable[[Any, Sequence[str]], str] | None = None
