"""Gathers the events of a check into what is shown and what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realhf.env.check.finding import Finding, difference
from realhf.env.check.order import ABOUT, FINDING, FINGERPRINTS, TIMES, VERDICT

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
