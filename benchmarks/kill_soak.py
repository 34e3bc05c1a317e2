"""Runs of a tiny model whose processes are killed at random while they train: is a sample lost, or trained twice?

Every run is killed ``--kills`` times: master, model worker, rollout worker, generation worker, environment server, a
simulator or the launcher, or Ctrl-C stops it; after these two the same command goes on. At the end of each run its
journal is audited from the first record on. One line per run, then a tally; exit code 1 where a run did not balance.

    python benchmarks/kill_soak.py [--runs 100] [--kills 6] [--every 1.5] [--seed 1] [--env sql] [--json FILE]
        [--keep FOLDER]

``--env`` names an environment without a service, which lives in the rollout workers: then there is nothing of its own
to kill.

With ``--json`` it can be stopped by Ctrl-C and started again: runs that the file holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.killed_run import (
    AWS,
    CTRL_C,
    LAUNCHER,
    MARKS,
    SERVICE,
    KilledRun,
    Stuck,
    Verdict,
    kill_at_random,
    make_policy,
)

STUCK_S = 180.0
SCHEMA = 3


def kinds_of(environment: str) -> list[str]:
    """What is killed in runs on an environment."""
    return [kind for kind in (*MARKS, LAUNCHER, CTRL_C) if environment == AWS or kind not in SERVICE]


def play(runs: Path, policy: Path, number: int, options: argparse.Namespace) -> Verdict:
    """One run from its start to its balance. What it does is decided by seed and number, when it does it is not."""
    choice = random.Random(f"{options.seed}/{number}")
    run = KilledRun(
        runs,
        f"run{number}",
        policy,
        seed=choice.randrange(1 << 20),
        steps=options.steps,
        environment=options.env,
    )
    known = kinds_of(options.env)
    kinds = [choice.choice(known) for _ in range(options.kills)]
    run.start()
    try:
        kill_at_random(run, kinds, choice, every_s=options.every, timeout_s=STUCK_S)
        return run.verdict(run.wait(STUCK_S))
    except Stuck as error:
        return Verdict(None, run.kills, problems=[str(error)])
    finally:
        run.end()


def line(number: int, verdict: Verdict) -> str:
    """What is printed about a run."""
    kills = " ".join(f"{kind}:{count}" for kind, count in sorted(verdict.kills.items()))
    tally = verdict.tally
    books = "no journal"
    if tally is not None:
        books = f"admitted {tally.admitted} consumed {tally.consumed} lost {tally.lost} twice {tally.twice}"
    return f"run {number}: {'ok' if not verdict.problems else 'BAD'} {verdict.seconds:.0f} s  {books}  kills {kills}"


def entry(number: int, verdict: Verdict) -> dict[str, Any]:
    """A run in the JSON file."""
    tally = asdict(verdict.tally) if verdict.tally else None
    return {
        "run": number,
        "seconds": round(verdict.seconds, 1),
        "kills": dict(verdict.kills),
        "tally": tally,
        "stop_s": {how: [round(value, 2) for value in values] for how, values in verdict.stop_s.items()},
        "problems": verdict.problems,
    }


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all runs."""
    kills: Counter[str] = Counter()
    books: Counter[str] = Counter()
    for found in entries:
        kills.update(found["kills"])
        books.update(
            {
                name: (found["tally"] or {}).get(name, 0)
                for name in ("admitted", "consumed", "lost", "twice", "impossible", "rejected", "resumes")
            }
        )
    bad = [found["run"] for found in entries if found["problems"]]
    return {
        "runs": len(entries),
        "bad": bad,
        "kills": dict(kills),
        **books,
        "stop_s": {
            how: _spread([value for found in entries for value in found["stop_s"].get(how, ())])
            for how in (LAUNCHER, CTRL_C)
        },
        "seconds": round(sum(found["seconds"] for found in entries)),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values)} if values else {}


def earlier(path: Path | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs that the file holds already. Raises SystemExit for a file of other options."""
    if path is None or not path.exists():
        return []
    held = json.loads(path.read_text())
    if held["options"] != asked(options):
        raise SystemExit(f"{path} holds runs of other options: {held['options']}")
    return list(held["entries"])


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What decides the runs."""
    return {
        "schema": SCHEMA,
        "seed": options.seed,
        "kills": options.kills,
        "every": options.every,
        "steps": options.steps,
        "env": options.env,
    }


def save(path: Path | None, options: argparse.Namespace, entries: Sequence[dict[str, Any]]) -> None:
    """Write what there is so far, so that a later call goes on from it."""
    if path is not None:
        held = {
            "options": asked(options),
            "machine": platform.processor() or platform.machine(),
            "summary": summary(entries),
            "entries": list(entries),
        }
        path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=6, help="of each run")
    parser.add_argument("--every", type=float, default=1.5, help="seconds between them on average")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env", default=AWS, help="the environment that is played")
    parser.add_argument("--json", type=Path, help="write the result here, and go on from it")
    parser.add_argument("--keep", type=Path, help="folder for the runs that did not balance")
    return parser


def main() -> int:
    """Run the benchmark. Return the exit status: 1 when a run failed."""
    options = command_line().parse_args()
    entries = earlier(options.json, options)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="kill-soak-") as folder:
            policy = make_policy(Path(folder) / "policy", options.env)
            for number in range(len(entries), options.runs):
                runs = Path(folder) / f"runs{number}"
                runs.mkdir()
                verdict = play(runs, policy, number, options)
                entries.append(entry(number, verdict))
                save(options.json, options, entries)
                print(line(number, verdict), *(f"  {text}" for text in verdict.problems), sep="\n", flush=True)
                if verdict.problems and options.keep is not None:
                    shutil.copytree(runs, options.keep / f"run{number}", dirs_exist_ok=True)
                shutil.rmtree(runs)
    except KeyboardInterrupt:
        print(f"stopped after {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(json.dumps(summary(entries)))
    return 1 if summary(entries)["bad"] or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
