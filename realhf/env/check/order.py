"""Says what is to be checked and what became of it: the order that a check gives its child process, and the events that
come back, one JSON list a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NOW, STAGE, VERDICT, FINDING, TIMES, ABOUT, FOLDER, FINGERPRINTS, EXIT, CRASH, END = (
    "now",
    "stage",
    "verdict",
    "finding",
    "times",
    "about",
    "folder",
    "fingerprints",
    "exit",
    "crash",
    "end",
)
"""Kinds of events. ``now``: a call begins (name, task, seconds that it may take); ``stage`` and ``verdict``: a check
begins and is over (name, outcome, remark); ``finding`` (index, fields) and ``times`` (index, count); ``about``: a map;
``folder``: one that holds the environment's code; ``fingerprints``: what was played; ``exit``: the environment ends the
process (status, place); ``crash``: the check itself failed (text); ``end``: all is done."""

ORDER, DUMP = "order.json", "dump"
"""Files of a check: what the child is to do, and where it writes the stacks of its threads."""
OK, FAULT, SKIPPED, READ = "ok", "fault", "not run", "read"


@dataclass(frozen=True)
class Order:
    """What is checked. ``timeout_s`` bounds one call of the environment, ``slow_s`` loading it and making its tasks;
    ``instances`` live at once; ``most_turns`` must end an episode; ``most_tasks`` are played. ``address`` is that of
    the environment's service. ``again``: the cases that another process played; if there are some, only their
    fingerprints are wanted. ``mutants``: if not 0, at most so many mutants of demonstrations are played, which ``seed``
    draws, and nothing else."""

    reference: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0
    slow_s: float = 60.0
    instances: int = 100
    most_turns: int = 100
    most_tasks: int = 8
    address: str = ""
    again: tuple[str, ...] = ()
    mutants: int = 0
    seed: int = 0

    def to_text(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Order:
        """Read what ``to_text`` wrote."""
        return Order(**json.loads(text))


class Reporter:
    """Writes events to a file descriptor, from the process that made it only: a fork of it reports nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    def tell(self, kind: str, *values: Any) -> None:
        """Write an event. Does nothing when nobody listens any more."""
        if os.getpid() != self._pid:
            return
        line = memoryview(json.dumps([kind, *values]).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BrokenPipeError:
            pass
