"""Defines what a check is asked to do, what it finds, and the events that its child process
sends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

_TEXT_CHARS = 300
"""Longest quotation of what an environment said or raised."""


def quoted(value: object, limit: int = _TEXT_CHARS) -> str:
    """Return ``value`` as one printable line of at most ``limit`` characters."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # the environment's own __str__
        text = f"<{type(value).__name__}>"
    text = " ".join(text[: 4 * limit].split())
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def alike(what: str) -> str:
    """Return what two sentences share that tell of one fault in two episodes: the beginning,
    without its numbers."""
    return re.sub("[0-9]+", "0", what)[:80]


def counted(number: int, thing: str) -> str:
    """Return ``1 task``, ``2 tasks``, ``no tasks``."""
    return f"{f'{number:,}' if number else 'no'} {thing}{'' if number == 1 else 's'}"


def difference(one: str, other: str, limit: int = 80) -> str:
    """Say ``'...' and then '...'`` about two texts, from a little before the place where they
    part."""
    same = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    start = max(0, same - limit // 4) if max(len(one), len(other)) > limit else 0
    ahead = "…" if start else ""
    return f"{ahead}{quoted(one[start:], limit)} and then {ahead}{quoted(other[start:], limit)}"


@dataclass(frozen=True)
class Finding:
    """Is one thing that is wrong, or that a person should know. ``check`` names the check; ``what``
    is the fault in one sentence, ``mend`` how to mend it; ``where`` is ``file:line in function`` of
    the environment's code, "" where it cannot be known; ``is_fault`` tells a fault from a note;
    ``times`` counts how often it was seen. Findings with the same check, place and ``kind`` are
    one; without a kind, ``what`` is it."""

    check: str
    what: str
    mend: str = ""
    where: str = ""
    task: str = ""
    is_fault: bool = True
    times: int = 1
    kind: str = ""

    def line(self) -> str:
        """Return the finding as one line: what, where, task, how to mend it."""
        place = f", at {self.where}" if self.where else ""
        seen = [f"task {quoted(self.task, 80)}"] if self.task else []
        if self.times > 1:
            seen.append(f"{self.times} times")
        after = f" ({', '.join(seen)})" if seen else ""
        return f"{self.check}: {self.what}{place}{after}.{f' {self.mend}.' if self.mend else ''}"


class Findings:
    """Collects findings; the count of one that is known goes up."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Finding] = {}
        self.hits = 0
        """How often a fault was seen, also one that is known."""

    def add(self, finding: Finding) -> None:
        """Take a finding in."""
        self.hits += finding.is_fault
        key = (finding.check, finding.where, finding.kind or finding.what)
        known = self._found.get(key)
        self._found[key] = replace(known, times=known.times + finding.times) if known else finding

    @property
    def all(self) -> list[Finding]:
        """The findings in the order in which they came."""
        return [*self._found.values()]

    def faults(self, *checks: str) -> int:
        """Return how many faults there are, of these checks or of all."""
        return sum(
            found.is_fault and (not checks or found.check in checks)
            for found in self._found.values()
        )


NOW = "now"
VERDICT = "verdict"
FINDING = "finding"
ABOUT = "about"
"""Kinds of events. ``now``: a call begins (check, call, task, seconds that it may take);
``verdict``: a check is over (name, outcome, remark); ``finding``: its fields; ``about``: a map of
what is known of the environment and its process."""
FOLDER = "folder"
FINGERPRINTS = "fingerprints"
EXIT = "exit"
ENDED = "ended"
PASSPORT = "passport"
"""What only the parent needs to know, among what an ``about`` says: the folder that holds the
environment's code, what was played, how the environment ended its process (status, place), that all
is done, and where its passport lies."""
ORDER = "order.json"
DUMP = "dump"
"""Files of a check: what the child is to do, and where it writes the stacks of its threads."""
OK = "ok"
FAULT = "fault"
SKIPPED = "not run"
READ = "read"


@dataclass(frozen=True)
class Order:
    """What is checked. ``timeout_s`` bounds one call of the environment, ``slow_s`` loading it and
    making its tasks; ``instances`` live at once; ``most_turns`` must end an episode; ``most_tasks``
    are played. ``address`` is that of the environment's service. ``again``: the cases that another
    process played; if there are some, only their fingerprints are wanted. ``mutants``: if not 0, at
    most so many mutants of demonstrations are played, which ``seed`` draws, and nothing else."""

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


def reporter(descriptor: int) -> Callable[..., None]:
    """Return what writes an event, a kind and values, to a file descriptor. In a fork of this
    process it does nothing, nor when nobody listens any more."""
    pid = os.getpid()

    def tell(kind: str, *values: Any) -> None:
        line = memoryview(json.dumps([kind, *values]).encode() + b"\n")
        with suppress(BrokenPipeError):
            while line and os.getpid() == pid:
                line = line[os.write(descriptor, line) :]

    return tell
