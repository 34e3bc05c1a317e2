"""Keeps which workers of a run ended before it did, why, and what was done about it, for the report.

``deaths.jsonl`` in the run folder has a line for each, by the launcher's clock.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from realhf.monitor.rollouts.plain_file import open_plain

DEATHS_FILE = "deaths.jsonl"
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Death:
    """The end of ``process`` at ``at`` (s since the epoch): ``why``, and what ``then`` became of its work."""

    at: float
    process: str
    why: str
    then: str


def note_death(run_dir: Path, process: str, why: str, then: str) -> None:
    """Append one line. A full disk must not end the run."""
    with contextlib.suppress(OSError), (run_dir / DEATHS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(Death(time.time(), process, why, then))) + "\n")


def deaths(run_dir: Path) -> list[Death]:
    """Read what can be read: a kill may have cut off the last line."""
    found: list[Death] = []
    try:
        with open_plain(run_dir / DEATHS_FILE) as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            death = Death(**json.loads(line))
            found.append(Death(float(death.at), *map(str, (death.process, death.why, death.then))))
    return found
