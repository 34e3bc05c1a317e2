"""Runs of a tiny model of which one process stands still for a while: does the run go on, and is a
sample lost?

In each run one process is stopped by SIGSTOP at a random moment, for 5, 15 or 60 s: master, model
worker, rollout worker, generation worker, environment server, a simulator, a process that executes
commands; or a verifier begins to compute, holds the interpreter of its rollout worker and never
ends. Five seconds are forgiven; after more the process is killed and replaced, or the run begins
again from its last checkpoint. From the freeze on the run may stand still for as long as it takes
to notice it (12 s at most), to start the run (as it did before) and ``--limit`` seconds; at its end
all steps are done, its journal balances from the first record on, and nothing of it is left
running. One line per run; exit code 1 where one failed.

    python benchmarks/freeze_soak.py [--runs 100] [--jobs 2] [--first 0] [--limit 30] [--json FILE] [--keep FOLDER]

With ``--json`` it can be stopped by Ctrl-C and started again: runs that the file holds are not
repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.killed_run import AWS, VERIFIER, KilledRun, freeze_for
from harness.soak import Entry, bad, command_line, entry, soak, total, watched

SECONDS = (5, 15, 60)
STUCK_S = 240.0
LIGHT = ("master", "model_worker", "rollout_worker", "generation")
ON_AWS = ("env", "ministack", "executor")
PLANS = [
    (environment, kind, seconds)
    for seconds in SECONDS
    for environment, kinds in ((VERIFIER, (*LIGHT, VERIFIER)), (AWS, ON_AWS))
    for kind in kinds
]
"""Combinations of (environment, kind of process, seconds), used in turn."""


def play(runs: Path, policy: Path, number: int, options: argparse.Namespace) -> Entry:
    """Play one run, freeze a process in it and return its result. The run's number decides which
    process is frozen for how long; the moment is random."""
    environment, kind, seconds = PLANS[number % len(PLANS)]
    choice = random.Random(f"{options.seed}/{number}")
    steps = 12 if environment == AWS else 20
    run = KilledRun(
        runs,
        f"run{number}",
        policy,
        seed=choice.randrange(1 << 20),
        steps=steps,
        environment=environment,
    )
    started_s = stood_still_s = 0.0
    began = time.monotonic()

    def freezes(run: KilledRun) -> None:
        nonlocal started_s, stood_still_s
        run.wait_for_progress(0, STUCK_S)
        started_s = time.monotonic() - began
        until = time.monotonic() + choice.uniform(0.0, 6.0)
        while run.running and time.monotonic() < until:
            run.processes()
            time.sleep(0.1)
        stood_still_s = freeze_for(run, kind, seconds, choice, timeout_s=started_s + options.limit)

    verdict = watched(run, freezes, STUCK_S)
    return entry(
        number,
        verdict,
        environment=environment,
        frozen=kind,
        frozen_s=seconds,
        started_s=round(started_s, 1),
        stood_still_s=round(stood_still_s, 1),
        hit=bool(run.kills) or kind == VERIFIER,
        deaths=run.deaths(),
    )


def line(found: Entry) -> str:
    """Return the line that is printed about a run."""
    tally = found["tally"] or {}
    books = " ".join(
        f"{name} {tally.get(name)}" for name in ("consumed", "lost", "twice", "resumes")
    )
    return (
        f"run {found['run']}: "
        f"{'BAD' if found['problems'] else 'ok' if found['hit'] else 'ended before'} "
        f"{found['environment']}: {found['frozen']} {found['frozen_s']} s, stood still "
        f"{found['stood_still_s']} s "
        f"(start {found['started_s']})  {books}  {'; '.join(found['deaths'])}"
    )


def summary(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return totals over all runs."""
    hit = [found for found in entries if found["hit"]]
    return {
        "runs": len(entries),
        "hit": len(hit),
        "bad": bad(entries),
        "lost": total(entries, "lost"),
        "twice": total(entries, "twice"),
        "longest_still_s": {
            seconds: max(
                (found["stood_still_s"] for found in hit if found["frozen_s"] == seconds),
                default=0.0,
            )
            for seconds in SECONDS
        },
    }


def main() -> int:
    """Run the benchmark. Return the exit status: 1 when a run failed."""
    parser = command_line(__doc__, runs=100, jobs=2)
    parser.add_argument(
        "--limit",
        type=float,
        default=30.0,
        help="seconds in which a run has to go on (%(default)s)",
    )
    options = parser.parse_args()
    return soak(
        options, lambda runs, policy, number: play(runs, policy, number, options), line, summary
    )


if __name__ == "__main__":
    sys.exit(main())
