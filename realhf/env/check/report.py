"""Defines what a check is asked to do, the events that its child process sends, and the report that is made of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    """Return what two sentences share that tell of one fault in two episodes: the beginning, without its numbers."""
    return re.sub("[0-9]+", "0", what)[:80]


def counted(number: int, thing: str) -> str:
    """Return ``1 task``, ``2 tasks``, ``no tasks``."""
    return f"{f'{number:,}' if number else 'no'} {thing}{'' if number == 1 else 's'}"


def difference(one: str, other: str, limit: int = 80) -> str:
    """Say ``'...' and then '...'`` about two texts, from a little before the place where they part."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - limit // 4) if max(len(one), len(other)) > limit else 0
    ahead = "…" if start else ""
    return f"{ahead}{quoted(one[start:], limit)} and then {ahead}{quoted(other[start:], limit)}"


@dataclass(frozen=True)
class Finding:
    """Is one thing that is wrong, or that a person should know. ``check`` names the check; ``what`` is the fault in one
    sentence, ``mend`` how to mend it; ``where`` is ``file:line in function`` of the environment's code, "" where it
    cannot be known; ``is_fault`` tells a fault from a note; ``times`` counts how often it was seen. Findings with the
    same check, place and ``kind`` are one; without a kind, ``what`` is it."""

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

    def to_json(self) -> dict[str, Any]:
        """Return what a person should know as a map for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}


class Findings:
    """Collects findings; ``emit`` gets each when it is new. The count of a finding that is known goes up."""

    def __init__(self, emit: Callable[[int, Finding], None]) -> None:
        self._emit = emit
        self._found: dict[tuple[str, str, str], int] = {}
        self.all: list[Finding] = []
        self.hits = 0
        """How often a fault was seen, also one that is known."""

    def add(self, finding: Finding) -> None:
        """Take a finding in."""
        self.hits += finding.is_fault
        key = (finding.check, finding.where, finding.kind or finding.what)
        if key in self._found:
            index = self._found[key]
            self.all[index] = replace(self.all[index], times=self.all[index].times + finding.times)
            return
        self._found[key] = len(self.all)
        self.all.append(finding)
        self._emit(len(self.all) - 1, finding)

    def faults(self, *checks: str) -> int:
        """Return how many faults there are, of these checks or of all."""
        return sum(found.is_fault and (not checks or found.check in checks) for found in self.all)


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


_DETERMINISM = "determinism"


class Report:
    """Holds what is known about an environment so far: ``about`` it, ``verdicts`` (check, outcome, remark) and
    ``findings`` in the order in which they came."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.about: dict[str, Any] = {}
        self.verdicts: list[tuple[str, str, str]] = []
        self.findings: list[Finding] = []
        self.fingerprints: Mapping[str, Sequence[Sequence[str]]] = {}
        self.seconds = 0.0

    def hear(self, event: Sequence[Any]) -> None:
        """Take an event of the child in."""
        kind, *values = event
        if kind == ABOUT:
            self.about.update(values[0])
        elif kind == VERDICT:
            self.verdicts.append((values[0], values[1], values[2]))
        elif kind == FINDING:
            self.findings.append(Finding(**values[1]))
        elif kind == TIMES:
            # The child numbers its findings from 0, and they come first.
            self.findings[values[0]] = replace(self.findings[values[0]], times=values[1])
        elif kind == FINGERPRINTS:
            self.fingerprints = values[0]

    def add(self, finding: Finding) -> None:
        """Take in a finding that the parent made."""
        self.findings.append(finding)

    def compare(self, other: Report) -> None:
        """Compare what another process played, which draws its hashes otherwise; what went wrong there counts."""
        faults = [finding for finding in other.findings if finding.is_fault]
        if faults:
            self.findings += [replace(finding, what=f"in another process, {finding.what}") for finding in faults]
            return
        again = other.fingerprints
        mend = "Nothing may depend on hash(), the order of a set, the clock or a process id"
        for key, turns in self.fingerprints.items():
            if key not in again:
                self.add(Finding(_DETERMINISM, f"another process has other tasks: {key!r} is missing there", mend))
                return
            for number, (one, two) in enumerate(zip(turns, again[key], strict=False)):
                if one[0] != two[0]:
                    name = f"turn {number}" if number else "the opening"
                    what = f"another process answers otherwise: {name} is {difference(one[1], two[1], 100)}"
                    self.add(Finding(_DETERMINISM, what, mend, task=key))
                    return

    @property
    def faults(self) -> int:
        """How many findings are faults."""
        return sum(finding.is_fault for finding in self.findings)

    @property
    def notes(self) -> int:
        """How many findings are only worth knowing."""
        return len(self.findings) - self.faults

    def to_json(self) -> dict[str, Any]:
        """Return everything as a map for JSON."""
        return {
            "reference": self.reference,
            "ok": not self.faults,
            **self.about,
            "checks": [{"name": name, "outcome": outcome, "remark": text} for name, outcome, text in self.verdicts],
            "findings": [{**finding.to_json(), "line": finding.line()} for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }
