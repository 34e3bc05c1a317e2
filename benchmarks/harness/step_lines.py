"""Lets a measured program take one step at a time, as its parent says. It imports nothing but the
standard library, because it runs in other environments too.

The parent sends a line for every step (``step``, or ``given`` for one with completions that are
given) and ``end``; the program answers each with a line of JSON. What it prints otherwise goes to
its error output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = "step"
GIVEN = "given"
END = "end"


class Lines:
    """Holds the way to the parent, and keeps what libraries print out of it."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, **fields: Any) -> None:
        """Send one answer to the parent."""
        print(json.dumps(fields), file=self._out, flush=True)

    def orders(self) -> Iterator[str]:
        """Yield ``STEP`` or ``GIVEN`` until the parent says ``END`` or has gone."""
        for line in sys.stdin:
            order = line.strip()
            if order == END:
                return
            yield order


def peak_bytes() -> int:
    """Return the sum of the largest resident sizes that this process and those below it had so far
    (``VmHWM``)."""
    return sum(_peak(pid) for pid in (os.getpid(), *_below(os.getpid())))


def _peak(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM:")), 0
    )


def _below(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = [
                int(child) for child in (thread / "children").read_text(encoding="utf-8").split()
            ]
        except OSError:
            continue
        for child in children:
            found += [child, *_below(child)]
    return found
