"""Protocol by which a benchmark process takes one training step at a time on its parent's orders.
It uses only the standard library, because it also runs in other Python environments.

The parent sends a line for every step (``step``, or ``given`` for a step with given completions)
and finally ``end``. The program answers each step with a line of JSON. Its other output goes to
standard error.
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
    """Channel to the parent process. Standard output of libraries is redirected to standard error,
    so that it does not mix with the answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, **fields: Any) -> None:
        """Send one answer to the parent."""
        print(json.dumps(fields), file=self._out, flush=True)

    def orders(self) -> Iterator[str]:
        """Yield ``STEP`` or ``GIVEN`` for each order, until the parent sends ``END`` or has
        exited."""
        for line in sys.stdin:
            order = line.strip()
            if order == END:
                return
            yield order


def peak_bytes() -> int:
    """Return the peak resident memory of this process and its descendants in bytes, as the sum of
    each one's own peak (``VmHWM``)."""
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
