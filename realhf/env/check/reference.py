"""Reads how a person names an environment on the command line."""

from __future__ import annotations

from pathlib import Path

from realhf.builtins import environments
from realhf.env.check.finding import close_match


def folders_of(reference: str) -> list[Path]:
    """Return the folder of ``file.py:Name``; none for a registered name or a module."""
    place = reference.rpartition(":")[0] or reference
    return [Path(place).expanduser().resolve().parent] if place.endswith(".py") else []


def check_reference(reference: str) -> None:
    """Raise ValueError with one sentence for a name that is not registered and a file that is not there. What is in a
    file is found out by loading it."""
    place, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise ValueError(f"there is no file {place}")
    elif (not place or not name) and reference not in environments:
        known = close_match(reference, [*environments])
        raise ValueError(f"unknown environment {reference!r}{known}; one of your own is file.py:Name or module:Name")
