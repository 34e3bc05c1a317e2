"""Owns life and death of the workers of a run: which one is ended, and which one gets a successor.

A worker is dead when its process has ended, or when the master, its host or its start says so: whoever finds out tells
the launcher, which kills what is left of the process, so that a death is always an exit in the end. Then the worker is
started again, left out, or the run ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realhf.scheduler.base import WorkerExit, WorkerSpec

RESTARTABLE = ("rollout_worker", "generation", "env")
"""Kinds of workers that hold nothing which the run cannot do without."""
ONE_OF_SEVERAL = ("rollout_worker", "generation")
"""Kinds of which one can be missing while others run: they take its work."""
MAX_ERRORS = 3
MAX_QUICK_DEATHS = 3
QUICK_S = 10.0
LEAVE_S = 30.0
"""How long the process of a worker that has said good-bye to the master may take to end: one that stops a server of
vLLM takes up to 20 s, and says only then why it left."""
MASTER = "master"


@dataclass(frozen=True)
class Sentence:
    """Says that a worker is to be killed, and why; ``pid`` and ``started`` say which process of this name (0: the one
    that has it now)."""

    name: str
    cause: str
    pid: int = 0
    started: int = 0


class Supervisor:
    """Knows the workers of one run. With ``replaces``, as in an asynchronous run, a worker that fails by itself may do
    so ``MAX_ERRORS`` times; one that is killed, as often as it lived ``QUICK_S`` seconds before. ``join_s`` is how long
    a worker may take until the master has heard of it."""

    def __init__(self, *, replaces: bool = True, join_s: float = 240.0) -> None:
        self._replaces, self._join_s = replaces, join_s
        self._specs: dict[str, tuple[WorkerSpec, float]] = {}
        self._errors: Counter[str] = Counter()
        self._quick: Counter[str] = Counter()
        self._running: set[str] = set()
        self._joining: dict[str, float] = {}
        self._doomed: dict[str, tuple[float, Sentence]] = {}
        self.restarts: Counter[str] = Counter()

    def started(self, spec: WorkerSpec) -> None:
        """A worker is running."""
        self._specs[spec.name] = (spec, time.monotonic())
        self._running.add(spec.name)
        self._joining[spec.name] = time.monotonic() + self._join_s

    def begins(self, name: str) -> None:
        """A worker whose start was put off is being started now, and has its time to join from now on."""
        if name in self._running:
            self.started(self._specs[name][0])

    def told(self, message: Mapping[str, Any]) -> bool:
        """Take what the master says about the life of a worker; False for a message about something else."""
        if message["kind"] == "joined":
            self._joining.pop(message["name"], None)
        elif message["kind"] == "endpoint":
            self._joining.pop(MASTER, None)
            return False
        elif message["kind"] == "lost":
            wait_s, cause = 0.0, f"killed: {message['reason']}"
            if message["left"]:
                wait_s, cause = LEAVE_S, f"killed: it had left the run {LEAVE_S:g} s before and did not end"
            sentence = Sentence(message["name"], cause, message["pid"], message["started"])
            self._doomed[sentence.name] = time.monotonic() + wait_s, sentence
        else:
            return False
        return True

    def condemned(self) -> list[Sentence]:
        """Return whom to kill now, each once."""
        now = time.monotonic()
        late = [name for name, until in self._joining.items() if until <= now]
        due = [name for name, (at, _) in self._doomed.items() if at <= now]
        for name in late:
            del self._joining[name]
        unheard = f"killed: it did not register with the master within {self._join_s:g} s"
        silent = f"killed: it did not begin to listen within {self._join_s:g} s"
        found = [Sentence(name, silent if name == MASTER else unheard) for name in late]
        return found + [self._doomed.pop(name)[1] for name in due]

    def ended(self, exit_: WorkerExit) -> None:
        """A worker has ended, whoever did it."""
        self._running.discard(exit_.name)
        self._joining.pop(exit_.name, None)
        self._doomed.pop(exit_.name, None)

    def successor(self, exit_: WorkerExit) -> WorkerSpec | None:
        """The worker to start in place of one that ended; None when there is none, see ``dispensable``."""
        kind = exit_.name.partition("/")[0]
        self._running.discard(exit_.name)
        if not self._replaces or kind not in RESTARTABLE or exit_.name not in self._specs:
            return None
        spec, since = self._specs[exit_.name]
        self._errors[exit_.name] += exit_.exit_code > 0
        quick = time.monotonic() - since < QUICK_S
        self._quick[exit_.name] = self._quick[exit_.name] + 1 if quick else 0
        if self._errors[exit_.name] > MAX_ERRORS or self._quick[exit_.name] > MAX_QUICK_DEATHS:
            return None
        self.restarts[kind] += 1
        return spec

    def dispensable(self, name: str) -> bool:
        """Whether the run can go on without a worker that is not started again, because others of its kind run."""
        kind = name.partition("/")[0]
        others = any(other.startswith(f"{kind}/") for other in self._running)
        return self._replaces and kind in ONE_OF_SEVERAL and others
