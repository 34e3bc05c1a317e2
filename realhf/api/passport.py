"""Says how far the reward of an environment was proved: of how many wrong plays it paid and how
many right ones it refused. The passport is one small file that ships with the environment, and each
run keeps a copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.api.evaluation import wilson_interval
from realhf.base.files import write_whole

PASSPORT_FILE = "passport.json"
"""Its copy in a run folder."""
MODIFIED = "-modified"
"""Stands behind a commit from which files differ."""
ENDING = ".passport.json"
_NONE = "this environment has no passport: nobody has measured which wrong plays it pays"
_LARGEST = 1 << 20


@dataclass
class Counts:
    """Counts plays of one kind: ``wrong`` ones, of which ``paid`` were paid in full, and ``right``
    ones, of which ``refused`` were not."""

    wrong: int = 0
    paid: int = 0
    right: int = 0
    refused: int = 0

    def add(self, *, right: bool, paid: bool) -> None:
        """Count a play."""
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
        """Return the counts as plain data, with Wilson's 95 % intervals of the two shares."""
        shares = {"paid_95": wilson_interval(self.paid, self.wrong)}
        shares |= {"refused_95": wilson_interval(self.refused, self.right)}
        return vars(self) | {name: [round(end, 6) for end in ends] for name, ends in shares.items()}


@dataclass(frozen=True)
class Passport:
    """Holds what was found by playing, by kind of play. ``commit`` ("" where it is not known) and
    ``date`` (a day, as 2026-11-28) say of what and when; ``command`` makes it anew."""

    environment: str
    command: str
    date: str
    commit: str
    kinds: Mapping[str, Counts] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write the passport. Raises OSError."""
        about = {name: value for name, value in vars(self).items() if name != "kinds"}
        kinds = {name: counts.to_json() for name, counts in sorted(self.kinds.items())}
        write_whole(file, json.dumps(about | {"kinds": kinds}, indent=1) + "\n")

    def line(self) -> str:
        """Return it as a line for people."""
        all_of = sum(self.kinds.values(), Counts())
        told = [
            f"of {number:,} {what} plays {bad:,} {fate} ({_percent(bad, number)})"
            for number, what, bad, fate in (
                (all_of.wrong, "wrong", all_of.paid, "were paid"),
                (all_of.right, "right", all_of.refused, "were refused"),
            )
        ]
        short = self.commit[:8] + (MODIFIED if self.commit.endswith(MODIFIED) else "")
        commit = f", commit {short}" if self.commit else ""
        return f"{self.environment}: {', '.join(told)}; {self.date}{commit}"


def _percent(number: int, of: int) -> str:
    """Return the 95 % interval of a share."""
    if not of:
        return "none was played"
    low, high = (100 * end for end in wilson_interval(number, of))
    return f"95 %: {low:.2f} to {high:.2f} %"


def read_passport(file: Path) -> Passport | None:
    """Return the passport in a file, None where there is none. Raises ValueError for a file that
    holds something else, and OSError."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        names = ("wrong", "paid", "right", "refused")
        kinds = {
            str(name): Counts(*(int(counts[one]) for one in names))
            for name, counts in found["kinds"].items()
        }
        about = {name: str(found[name]) for name in ("environment", "command", "date", "commit")}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} holds no passport: {type(error).__name__}: {error}") from None
    return Passport(**about, kinds=kinds)


def told(file: Path) -> str:
    """Return the passport in a file as a line; that there is none, where there is none."""
    try:
        passport = read_passport(file)
    except (ValueError, OSError) as error:
        return f"the passport of this environment cannot be read: {error}"
    return _NONE if passport is None else passport.line()
