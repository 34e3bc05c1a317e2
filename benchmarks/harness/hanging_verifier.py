"""A data set whose verifier can be made to hang. If the file ``hang`` lies next to this module, the
next verdict deletes it and then hangs for ever while holding the interpreter lock, in a regular
expression with exponential backtracking."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG = Path(__file__).with_name("hang")
"""File that makes the next verdict hang."""
LONG_S = 0.3
"""Duration of a normal verdict in seconds, so that a test can interrupt one."""


def tasks(split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split."""
    for number in range(40 if split == "train" else 4):
        yield {"id": f"{split}-{number}", "prompt": f"Say {number}."}


def reward(completion: str, **row: Any) -> float:
    """Return the reward of a completion."""
    with contextlib.suppress(FileNotFoundError):
        HANG.unlink()
        re.match(r"(a|a)*b", "a" * 100)
    time.sleep(LONG_S)
    return float(len(set(completion)) % 2)
