"""Holds what a check found: one line each, merged where the same fault shows up again and again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
