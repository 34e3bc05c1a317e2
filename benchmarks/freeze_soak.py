"""Runs of a tiny model of which one process stands still for a while: does the run go on, and is a sample lost?

In each run one process is stopped by SIGSTOP at a random moment, for 5, 15 or 60 s: master, model worker, rollout
worker, generation worker, environment server, a simulator, a process that executes commands; or a verifier begins to
compute, holds the interpreter of its rollout worker and never ends. Five seconds are forgiven; after more the process
is killed and replaced, or the run begins again from its last checkpoint. From the freeze on the run may stand still for
as long as it takes to notice it (12 s at most), to start the run (as it did before) and ``--limit`` seconds; at its end
all steps are done, its journal balances from the first record on, and nothing of it is left running. One line per run;
exit code 1 where one failed.

    python benchmarks/freeze_soak.py [--runs 100] [--jobs 2] [--first 0] [--limit 30] [--json FILE] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.killed_run import AWS, VERIFIER, KilledRun, Stuck, Verdict, freeze_for, make_policy

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
"""(environment, kind, seconds), in turn."""


def play(runs: Path, policy: Path, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run from its start to its balance. What is frozen for how long is decided by the number, the moment by
    chance."""
    environment, kind, seconds = PLANS[number % len(PLANS)]
    choice = random.Random(f"{options.seed}/{number}")
    steps = 12 if environment == AWS else 20
    given = ("monitor.plot_every_steps=0",)
    run = KilledRun(
        runs, f"run{number}", policy, *given, seed=choice.randrange(1 << 20), steps=steps, environment=environment
    )
    stood = start_s = 0.0
    began = time.monotonic()
    run.start()
    try:
        run.wait_for_progress(0, STUCK_S)
        start_s = time.monotonic() - began
        until = time.monotonic() + choice.uniform(0.0, 6.0)
        while run.running and time.monotonic() < until:
            run.processes()
            time.sleep(0.1)
        stood = freeze_for(run, kind, seconds, choice, timeout_s=start_s + options.limit)
        verdict = run.verdict(run.wait(STUCK_S))
    except Stuck as error:
        verdict = Verdict(None, run.kills, problems=[str(error)])
    finally:
        run.end()
    return {
        "run": number,
        "environment": environment,
        "frozen": kind,
        "seconds": seconds,
        "started_s": round(start_s, 1),
        "stood_still_s": round(stood, 1),
        "took_s": round(verdict.seconds),
        "hit": bool(run.kills) or kind == VERIFIER,
        "deaths": run.deaths(),
        "tally": asdict(verdict.tally) if verdict.tally else None,
        "problems": verdict.problems,
    }


def line(entry: dict[str, Any]) -> str:
    """What is printed about a run."""
    tally = entry["tally"] or {}
    books = " ".join(f"{name} {tally.get(name)}" for name in ("consumed", "lost", "twice", "resumes"))
    return (
        f"run {entry['run']}: {'BAD' if entry['problems'] else 'ok' if entry['hit'] else 'ended before'} "
        f"{entry['environment']}: {entry['frozen']} {entry['seconds']} s, stood still {entry['stood_still_s']} s "
        f"(start {entry['started_s']})  "
        f"{books}  {'; '.join(entry['deaths'])}"
    )


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all runs."""
    hit = [entry for entry in entries if entry["hit"]]
    return {
        "runs": len(entries),
        "hit": len(hit),
        "bad": sorted(entry["run"] for entry in entries if entry["problems"]),
        "lost": sum((entry["tally"] or {}).get("lost", 0) for entry in entries),
        "twice": sum((entry["tally"] or {}).get("twice", 0) for entry in entries),
        "longest_still_s": {
            seconds: max((entry["stood_still_s"] for entry in hit if entry["seconds"] == seconds), default=0.0)
            for seconds in SECONDS
        },
    }


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time: frozen time is waiting")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds in which a run has to go on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--keep", type=Path, help="folder for the runs that failed")
    return parser


def main() -> int:
    """Run the benchmark. Return the exit status: 1 when a run failed."""
    options = command_line().parse_args()
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="freeze-soak-") as folder:
        policy = make_policy(Path(folder) / "policy")

        def one(number: int) -> None:
            runs = Path(folder) / f"runs{number}"
            runs.mkdir()
            entry = play(runs, policy, number, options)
            entries.append(entry)
            print(line(entry), *(f"  {text}" for text in entry["problems"]), sep="\n", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"summary": summary(entries), "entries": entries}, indent=1) + "\n")
            if entry["problems"] and options.keep is not None:
                shutil.copytree(runs, options.keep / f"run{number}", dirs_exist_ok=True)
            shutil.rmtree(runs, ignore_errors=True)

        with ThreadPoolExecutor(options.jobs) as jobs:
            for ended in [jobs.submit(one, number) for number in range(options.first, options.first + options.runs)]:
                ended.result()
    print(json.dumps(summary(entries)))
    return 1 if summary(entries)["bad"] or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
