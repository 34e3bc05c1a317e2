"""Runs of a tiny model whose processes are killed at random while they train: is a sample lost, or
trained twice?

Every run is killed ``--kills`` times: master, model worker, rollout worker, generation worker,
environment server, a simulator or the launcher, or Ctrl-C stops it; after these two the same
command goes on. At the end of each run its journal is audited from the first record on. One line
per run, then a tally; exit code 1 where a run did not balance.

    python benchmarks/kill_soak.py [--runs 100] [--kills 6] [--every 1.5] [--seed 1] [--env sql] [--json FILE]
        [--keep FOLDER]

``--env`` names an environment without a service, which lives in the rollout workers: then there is
nothing of its own to kill.

With ``--json`` it can be stopped by Ctrl-C and started again: runs that the file holds are not
repeated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.killed_run import AWS, CTRL_C, LAUNCHER, MARKS, SERVICE, KilledRun, kill_at_random
from harness.soak import Entry, bad, command_line, entry, soak, total, watched

STUCK_S = 180.0


def kinds_of(environment: str) -> list[str]:
    """Return the kinds of processes that are killed in runs with this environment."""
    return [
        kind for kind in (*MARKS, LAUNCHER, CTRL_C) if environment == AWS or kind not in SERVICE
    ]


def play(runs: Path, policy: Path, number: int, options: argparse.Namespace) -> Entry:
    """Play one run, kill processes in it and return its result. Seed and number decide what is
    killed; the moments are not reproducible."""
    choice = random.Random(f"{options.seed}/{number}")
    seed = choice.randrange(1 << 20)
    run = KilledRun(
        runs, f"run{number}", policy, seed=seed, steps=options.steps, environment=options.env
    )
    known = kinds_of(options.env)
    kinds = [choice.choice(known) for _ in range(options.kills)]

    def kills(run: KilledRun) -> None:
        kill_at_random(run, kinds, choice, every_s=options.every, timeout_s=STUCK_S)

    return entry(number, watched(run, kills, STUCK_S))


def line(found: Entry) -> str:
    """Return the line that is printed about a run."""
    kills = " ".join(f"{kind}:{count}" for kind, count in sorted(found["kills"].items()))
    tally = found["tally"]
    books = "no journal"
    if tally is not None:
        books = " ".join(
            f"{name} {tally[name]}" for name in ("admitted", "consumed", "lost", "twice")
        )
    good = "BAD" if found["problems"] else "ok"
    return f"run {found['run']}: {good} {found['seconds']:.0f} s  {books}  kills {kills}"


def summary(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return totals over all runs."""
    kills: Counter[str] = Counter()
    for found in entries:
        kills.update(found["kills"])
    books = ("admitted", "consumed", "lost", "twice", "impossible", "rejected", "resumes")
    return {
        "runs": len(entries),
        "bad": bad(entries),
        "kills": dict(kills),
        **{name: total(entries, name) for name in books},
        "stop_s": {
            how: _spread([value for found in entries for value in found["stop_s"].get(how, ())])
            for how in (LAUNCHER, CTRL_C)
        },
        "seconds": round(sum(found["seconds"] for found in entries)),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values)} if values else {}


def main() -> int:
    """Run the benchmark. Return the exit status: 1 when a run failed."""
    parser = command_line(__doc__, runs=100, jobs=1)
    parser.add_argument("--kills", type=int, default=6, help="of each run (%(default)s)")
    parser.add_argument(
        "--every", type=float, default=1.5, help="seconds between them on average (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="training steps of each run (%(default)s)"
    )
    parser.add_argument("--env", default=AWS, help="the environment that is played")
    options = parser.parse_args()
    return soak(
        options,
        lambda runs, policy, number: play(runs, policy, number, options),
        line,
        summary,
        options.env,
    )


if __name__ == "__main__":
    sys.exit(main())
