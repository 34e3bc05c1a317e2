"""A run of a tiny model that stands still as a whole, again and again: does it go on, with the
workers it had?

At ``--moments`` random moments, from the start on, the launcher and all its processes are stopped
by SIGSTOP for ``--seconds``, as where a virtual machine is moved or a container is paused. Many
deadlines of the run are shorter than that; none may count the pause. After each the next step
comes, and no process has ended or was replaced. One line per run; exit code 1 where one failed.

    python benchmarks/pause_soak.py [--modes sync async] [--moments 10] [--seconds 40] [--seed 1] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from harness.killed_run import AWS, VERIFIER, KilledRun, Stuck, make_policy, pause_again_and_again

END_S = 240.0
MAX_STEPS = 400
ENVIRONMENTS = {"verifier": VERIFIER, "aws": AWS}


def play(
    folder: Path, policy: Path, mode: str, environment: str, options: argparse.Namespace
) -> list[str]:
    """Pause one run at all moments, print a line about it and return its problems."""
    choice = random.Random(f"{options.seed}/{mode}/{environment}")
    run = KilledRun(
        folder,
        f"{mode}_{environment}",
        policy,
        steps=MAX_STEPS,
        environment=ENVIRONMENTS[environment],
        synchronous=mode == "sync",
    )
    began = time.monotonic()
    problems: list[str] = []
    run.start()
    try:
        pause_again_and_again(run, options.moments, options.seconds, choice, END_S)
    except Stuck as error:
        problems.append(str(error))
    finally:
        run.end()
    problems += [f"a process ended: {death}" for death in run.deaths()]
    steps = len(run.finished_steps())
    print(
        f"{mode} {environment}: {options.moments} pauses of {options.seconds:g} s, {steps} steps, "
        f"{time.monotonic() - began:.0f} s: {'; '.join(problems) or 'ok'}",
        flush=True,
    )
    return problems


def main() -> int:
    """Run the benchmark. Return the exit status: 1 when a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument("--environment", choices=[*ENVIRONMENTS], default="verifier")
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = options.keep or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        policy = make_policy(Path(folder) / "policy")
        return int(
            any([play(runs, policy, mode, options.environment, options) for mode in options.modes])
        )


if __name__ == "__main__":
    sys.exit(main())
