"""Data exchanged with the child process of a check: the order that it gets, and the findings and
events that it sends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

_TEXT_CHARS = 300
"""Maximum number of characters of an environment's text that are quoted."""


def quote(value: object, limit: int = _TEXT_CHARS) -> str:
    """Return ``value`` as one printable line of at most ``limit`` characters."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # the environment's own __str__
        text = f"<{type(value).__name__}>"
    text = " ".join(text[: 4 * limit].split())
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fault_key(description: str) -> str:
    """Return a key that is equal for descriptions of the same fault in different episodes: the
    start of the description, without numbers."""
    return re.sub("[0-9]+", "0", description)[:80]


def format_count(number: int, thing: str) -> str:
    """Return ``1 task``, ``2 tasks`` or ``no tasks``."""
    return f"{f'{number:,}' if number else 'no'} {thing}{'' if number == 1 else 's'}"


def format_difference(before: str, after: str, limit: int = 80) -> str:
    """Return a string ``... and then ...`` with excerpts of two texts, starting shortly before
    their first difference."""
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    start = max(0, same - limit // 4) if max(len(before), len(after)) > limit else 0
    ahead = "…" if start else ""
    return f"{ahead}{quote(before[start:], limit)} and then {ahead}{quote(after[start:], limit)}"


@dataclass(frozen=True)
class Finding:
    """A fault of an environment, or a note about it.

    Findings with the same check, location and ``kind`` are merged.
    """

    check: str
    """Name of the check."""
    what: str
    """Description in one sentence."""
    mend: str = ""
    """How to fix it."""
    where: str = ""
    """``file:line in function`` of the environment's code; "" if unknown."""
    task: str = ""
    """Id of the task; "" if the finding does not concern a single task."""
    is_fault: bool = True
    """True for a fault, False for a note."""
    times: int = 1
    """Number of occurrences."""
    kind: str = ""
    """Key that is equal for the same fault; if it is "", ``what`` is the key."""

    def line(self) -> str:
        """Return the finding as one line: description, location, task, and how to fix it."""
        place = f", at {self.where}" if self.where else ""
        details = [f"task {quote(self.task, 80)}"] if self.task else []
        if self.times > 1:
            details.append(f"{self.times} times")
        after = f" ({', '.join(details)})" if details else ""
        return f"{self.check}: {self.what}{place}{after}.{f' {self.mend}.' if self.mend else ''}"


class Findings:
    """Collection of findings that merges equal ones and counts their occurrences."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str, str], Finding] = {}
        self.hits = 0
        """Number of faults added, including repeated ones."""

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        self.hits += finding.is_fault
        key = (finding.check, finding.where, finding.kind or finding.what)
        earlier = self._by_key.get(key)
        self._by_key[key] = (
            replace(earlier, times=earlier.times + finding.times) if earlier else finding
        )

    @property
    def all(self) -> list[Finding]:
        """All findings, in the order of their first occurrence."""
        return [*self._by_key.values()]

    def faults(self, *checks: str) -> int:
        """Return the number of distinct faults found by these checks; without arguments, by all
        checks."""
        return sum(
            finding.is_fault and (not checks or finding.check in checks)
            for finding in self._by_key.values()
        )


NOW = "now"
VERDICT = "verdict"
FINDING = "finding"
ABOUT = "about"
"""Kinds of events, which determine their values. ``now``: a call starts (check, call, task, time
limit in seconds). ``verdict``: a check has ended (name, outcome, remark). ``finding``: the fields
of a finding. ``about``: a map of properties of the environment and its process."""
FOLDER = "folder"
FINGERPRINTS = "fingerprints"
EXIT = "exit"
ENDED = "ended"
PASSPORT = "passport"
"""Keys of ``about`` that only the parent process uses: the folder of the environment's code, the
fingerprints of the episodes, the (status, location) with which the environment exited, a mark that
the checks are complete, and the path of the passport."""
ORDER = "order.json"
DUMP = "dump"
"""Names of the files of a check: the order for the child process, and the stacks of its threads."""
OK = "ok"
FAULT = "fault"
SKIPPED = "not run"
READ = "read"
"""Outcomes of a check; ``READ`` means that a person must judge the results."""


@dataclass(frozen=True)
class Order:
    """An order for the child process of a check: what to check, and the limits."""

    reference: str
    """Name of the environment, as ``load_definition`` takes it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the environment as plain values."""
    timeout_s: float = 10.0
    """Time limit in seconds for one call of the environment."""
    slow_s: float = 60.0
    """Time limit in seconds for loading the environment, and for making its tasks."""
    instances: int = 100
    """Number of instances played concurrently."""
    most_turns: int = 100
    """Number of turns within which an episode must end."""
    most_tasks: int = 8
    """Maximum number of tasks to play."""
    address: str = ""
    """Address of the environment's service; "" if it has none."""
    again: tuple[str, ...] = ()
    """Cases that another process played. If not empty, this process only computes their
    fingerprints."""
    mutants: int = 0
    """Maximum number of mutants of demonstrations. If not 0, only mutants are played."""
    seed: int = 0
    """Random seed for choosing demonstrations and mutants."""


def build_reporter(descriptor: int) -> Callable[..., None]:
    """Return a function that writes an event (a kind and its values) to a file descriptor.

    It does nothing in a fork of this process, or after the reader has closed the pipe.
    """
    pid = os.getpid()

    def write_event(kind: str, *values: Any) -> None:
        line = memoryview(json.dumps([kind, *values]).encode() + b"\n")
        with suppress(BrokenPipeError):
            while line and os.getpid() == pid:
                line = line[os.write(descriptor, line) :]

    return write_event
