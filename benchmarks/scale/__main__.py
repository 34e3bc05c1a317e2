"""What coordination costs the master with thousands of workers: CPU per trajectory, memory per
episode, recovery.

    python -m benchmarks.scale [--workers 10000] [--episodes 100000] [--group 8] [--json FILE]

Real are, in this process: the master's RPC, heartbeats, admission service, journal on disk,
straggler gate, buffer, executor and checkpoint records of ``experiment=grpo_aws_async``. The
workers are simulated by a few processes that say over true sockets what true workers say. Each has
a connection of its own for admission, and for RPC and heartbeats, where the limit of descriptors
(``ulimit -n``) allows; else they share connections, and the table says so. Trainer and generation
workers answer at once; no tensor is moved, so that the stream of samples is not measured here.

Figures count episodes; a sample is a group of them, which is admitted and completed at once
(``--group 1``: each by itself). CPU is that of the master's threads: ``loop`` runs everything
above, ``heartbeat``, ``journal`` and ``zmq`` work beside it. A part of it grows with time and not
with episodes: signs of life, and requests of workers that wait; it is in every figure, and shown by
itself while nothing is finished. Memory is how much the master grows while all episodes are
admitted. At the end a tenth of the workers vanish without a word; recovery ends when as many
samples are in flight as before and none of the lost waits any more. The journal is audited. Exit
status 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scale.master import Simulation, make_plan, say
from realhf.base.event_loops import new_event_loop
from realhf.base.process import collect_garbage_normally
from realhf.dataflow.journal.audit import audit_folder

GOAL_PER_S = 3000.0
GOAL_BYTES = 4096.0
GOAL_RECOVERY_S = 30.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with a message if options contradict each other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=10_000, help="simulated rollout workers")
    parser.add_argument("--episodes", type=int, default=100_000, help="episodes in flight")
    parser.add_argument("--group", type=int, default=8, help="episodes of a sample")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a train step")
    parser.add_argument("--generation", type=int, default=8, help="simulated generation workers")
    parser.add_argument("--processes", type=int, default=2, help="that simulate the workers")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds in which nothing is finished"
    )
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window")
    parser.add_argument(
        "--lose", type=float, default=0.1, help="share of the workers that vanish at the end"
    )
    parser.add_argument(
        "--heartbeat", type=float, default=2.0, help="seconds between two signs of life of a worker"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds that anything may take"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the run's files go (default: the system's temporary folder)",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if (
        args.processes < 1
        or args.workers < args.processes
        or args.episodes < args.group * args.processes
    ):
        parser.error("there must be at least one worker and one sample for each process")
    if (
        not 0 <= args.lose < 1
        or args.windows < 1
        or args.group < 1
        or args.batch < 1
        or args.generation < 1
    ):
        parser.error("--lose is a share below 1; windows, group, batch and generation start at 1")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the simulation and return its measurements. If it fails, print the logs and raise its
    error."""
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=args.folder))
    try:
        plan = make_plan(folder, args)
        collect_garbage_normally()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            figures = runner.run(Simulation(plan, args).measure())
        say("... auditing the journal")
        tally = audit_folder(plan.spec.run_dir / "journal")
        return {**figures, "audit": {**asdict(tally), "balanced": tally.is_balanced}}
    except BaseException:
        for log in folder.rglob("*.log"):
            if log.parent.name != "journal":
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Return for each goal whether it is reached."""
    speed = statistics.median(row["per_master_second"] for row in figures["windows"])
    reached = {
        f"at least {GOAL_PER_S:g} episodes per CPU second of the master": speed >= GOAL_PER_S,
        f"less than {GOAL_BYTES:g} bytes per episode": figures["memory"]["bytes_per_episode"]
        < GOAL_BYTES,
        "the journal balances": figures["audit"]["balanced"],
    }
    if "recovery" in figures:
        reached[f"recovered within {GOAL_RECOVERY_S:g} s"] = (
            figures["recovery"]["recovered_s"] < GOAL_RECOVERY_S
        )
    return reached


def spread(rows: Sequence[dict[str, float]], name: str) -> str:
    """Return the median and range of a column as text."""
    values = [row[name] for row in rows]
    return f"{statistics.median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def show(figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the measurements."""
    lines = figures["connections"]
    rows = figures["windows"]
    print(
        f"{args.workers} workers, {args.episodes} episodes in flight, groups of {args.group}, "
        f"batches of {args.batch}; "
        f"connections: {lines['admission']} for admission, {2 * lines['rpc']} for RPC, "
        f"{lines['rpc']} for heartbeats"
    )
    print(
        f"registration: {figures['registration']['wall_s']:.1f} s, "
        f"{figures['registration']['master_cpu_s']:.1f} s CPU"
    )
    print(f"memory: {figures['memory']['bytes_per_episode']:,.0f} bytes per episode in flight")
    idle = figures["idle"]
    print(
        f"idle: {idle['loop']:.4f} CPU seconds of the loop per second, {idle['all']:.4f} of all "
        f"threads"
    )
    columns = {
        "per_loop_second": "episodes per CPU second of the loop",
        "per_master_second": "episodes per CPU second of the master",
        "loop_us": "us of the loop per episode",
        "master_us": "us of all threads per episode",
        "per_second": "episodes per second here",
        "in_flight": "episodes in flight",
        "age_mean": "versions from admission to training",
        "age_max": "most versions",
    }
    for name, title in columns.items():
        print(f"{title}: {spread(rows, name)}")
    threads = sorted(name for name in rows[0] if name.endswith("_s"))
    print(
        "CPU seconds by thread: "
        + ", ".join(f"{name[:-2]} {sum(row[name] for row in rows):.2f}" for name in threads)
    )
    if "recovery" in figures:
        found = figures["recovery"]
        print(
            f"loss of {found['workers_lost']} workers with {found['samples_lost']} samples: "
            f"noticed after "
            f"{found['first_noticed_s']:.1f} to {found['last_noticed_s']:.1f} s, recovered after "
            f"{found['recovered_s']:.1f} s, {found['loop_s']:.2f} s of the loop"
        )
    print(f"audit: {figures['audit']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a goal is missed."""
    args = parse(argv)
    figures = measure(args)
    host = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }
    print(f"{host['cpus']} CPUs, load average {host['load'][0]:.1f}")
    show(figures, args)
    reached = verdicts(figures)
    for verdict, ok in reached.items():
        print(f"{verdict}: {'reached' if ok else 'missed'}")
    if args.json:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
        }
        report = {"host": host, "settings": settings, **figures, "verdicts": reached}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
