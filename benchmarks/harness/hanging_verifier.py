"""A data set with a verifier that holds the interpreter for ever when the file ``hang`` lies beside
it, once for each time that somebody makes that file: a regular expression that tries every way to
divide a text."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG = Path(__file__).with_name("hang")
LONG_S = 0.3
"""How long a verdict takes, so that there is something to hang in."""


def tasks(split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split."""
    for number in range(40 if split == "train" else 4):
        yield {"id": f"{split}-{number}", "prompt": f"Say {number}."}


def reward(completion: str, **row: Any) -> float:
    """Return what a completion is worth."""
    with contextlib.suppress(FileNotFoundError):
        HANG.unlink()
        re.match(r"(a|a)*b", "a" * 100)
    time.sleep(LONG_S)
    return float(len(set(completion)) % 2)
