"""Passports: evidence of how reliable the reward of an environment is.

A passport counts how many wrong plays (episodes that do not solve the task) were paid the full
reward, and how many right plays were refused it. It is a small file that ships with the
environment; each run keeps a copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.api.evaluation import wilson_interval
from realhf.base.files import write_atomic

PASSPORT_FILE = "passport.json"
"""File name of the passport's copy in a run folder."""
MODIFIED = "-modified"
"""Suffix of ``Passport.commit`` if there were uncommitted changes."""
ENDING = ".passport.json"
"""Suffix of the file names of passports."""
_NONE = "this environment has no passport: it was not measured which wrong plays it pays"
_MAX_BYTES = 1 << 20
"""Maximum size of a passport file in bytes."""


@dataclass
class Counts:
    """Counts of plays of one kind."""

    wrong: int = 0
    """Wrong plays."""
    paid: int = 0
    """Wrong plays that got the full reward."""
    right: int = 0
    """Right plays."""
    refused: int = 0
    """Right plays that did not get the full reward."""

    def add(self, *, right: bool, paid: bool) -> None:
        """Count one play. ``right``: whether it solves the task; ``paid``: whether it got the full
        reward."""
        self.right += right
        self.wrong += not right
        self.paid += paid and not right
        self.refused += right and not paid

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.wrong + other.wrong,
            self.paid + other.paid,
            self.right + other.right,
            self.refused + other.refused,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values, with Wilson's 95 % intervals of the two error rates."""
        shares = {"paid_95": wilson_interval(self.paid, self.wrong)}
        shares |= {"refused_95": wilson_interval(self.refused, self.right)}
        return vars(self) | {name: [round(end, 6) for end in ends] for name, ends in shares.items()}


@dataclass(frozen=True)
class Passport:
    """Counts of plays of an environment by kind, and how they were measured."""

    environment: str
    """Name of the environment."""
    command: str
    """Command that repeats the measurement."""
    date: str
    """Day of the measurement, such as 2026-11-28."""
    commit: str
    """Commit of the measured code; "" if unknown."""
    kinds: Mapping[str, Counts] = field(default_factory=dict)
    """Counts by kind of play."""

    def write(self, file: Path) -> None:
        """Write the passport to a file. Raises OSError."""
        about = {name: value for name, value in vars(self).items() if name != "kinds"}
        kinds = {name: counts.to_json() for name, counts in sorted(self.kinds.items())}
        write_atomic(file, json.dumps(about | {"kinds": kinds}, indent=1) + "\n")

    def line(self) -> str:
        """Return the passport as one line of text."""
        total = sum(self.kinds.values(), Counts())
        rates = [
            f"of {number:,} {what} plays {bad:,} {fate} ({_percent(bad, number)})"
            for number, what, bad, fate in (
                (total.wrong, "wrong", total.paid, "were paid"),
                (total.right, "right", total.refused, "were refused"),
            )
        ]
        short = self.commit[:8] + (MODIFIED if self.commit.endswith(MODIFIED) else "")
        commit = f", commit {short}" if self.commit else ""
        return f"{self.environment}: {', '.join(rates)}; {self.date}{commit}"


def _percent(number: int, of: int) -> str:
    """Return the 95 % interval of a proportion as text."""
    if not of:
        return "none was played"
    low, high = (100 * end for end in wilson_interval(number, of))
    return f"95 %: {low:.2f} to {high:.2f} %"


def read_passport(file: Path) -> Passport | None:
    """Read a passport from a file; return None if the file does not exist.

    Raises ValueError if the file does not contain a passport, and OSError.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        names = ("wrong", "paid", "right", "refused")
        kinds = {
            str(name): Counts(*(int(counts[key]) for key in names))
            for name, counts in content["kinds"].items()
        }
        about = {name: str(content[name]) for name in ("environment", "command", "date", "commit")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a passport: {type(error).__name__}: {error}") from None
    return Passport(**about, kinds=kinds)


def describe_passport(file: Path) -> str:
    """Return the passport in a file as one line of text, or a line that says why there is none."""
    try:
        passport = read_passport(file)
    except (ValueError, OSError) as error:
        return f"the passport of this environment cannot be read: {error}"
    return _NONE if passport is None else passport.line()
