"""What it costs that 20 % of the environment's steps fail: asynchronous runs with injected faults
and without.

    python benchmarks/faults.py [--rate 0.2] [--latency 0] [--pairs 3] [--steps 20] [--json FILE] [OPTION=VALUE ...]

These are whole runs of a tiny model: launcher, master, workers, environment server with its
simulators, training. They take turns; a ratio is that of one round. Faults (and latency, where
asked for) are simulated by the environment server: nine of ten faults are answers that a step was
not executed, the others are lost connections. Every failed step has to be mended: a rollout that is
left out instead would show in the figures printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynchronous import SKIPPED, measure
from harness.killed_run import make_policy

BATCH = 4
GROUP = 4
SESSIONS = 16
MOST = 1.3
"""Maximum acceptable slowdown."""
TINY = (
    "experiment=grpo_aws_async", f"env.pool_size={SESSIONS}", "env.tiers=[warmup]",
    f"dataset.train_bs_n_seqs={BATCH}", f"ppo.group_size={GROUP}", "gen.max_new_tokens=16", "rollout.max_turns=4",
    "rollout.max_total_tokens=1024", "evaluation.episodes_per_task=0", "evaluation.greedy_episodes_per_task=0",
    "torch_threads=1", "monitor.trackers=[]", "monitor.progress=false", "exp_ctrl.ckpt_freq_steps=1000",
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """Measurements of one run: samples per second, CPU seconds per sample, and the number of
    failures by kind and of failed rollouts until its last step."""

    rate: float
    cpu: float
    failures: dict[str, float]
    failed_rollouts: float


def play(options: argparse.Namespace, policy: Path, runs: Path, rate: float, number: int) -> Played:
    """Run with a fraction ``rate`` of failing steps, interrupt the run after the measured steps and
    return its measurements."""
    trial = f"rate{rate:g}-{number}"
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        *TINY,
        f"actor.path={policy}",
        f"fileroot={runs}",
        f"trial_name={trial}",
        f"seed={number + 1}",
        f"env.step_latency_ms={options.latency:g}",
        f"env.fault_rate={rate:g}",
        f"total_train_steps={SKIPPED + options.steps + 4}",
        *options.options,
    ]
    folder = runs / "grpo_aws_async" / trial
    measured = measure(command, folder, runs / f"{trial}.log", options.steps, BATCH)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    prefix = "failures/"
    kinds = sorted({name for row in rows for name in row if name.startswith(prefix)})
    failures = {name[len(prefix) :]: sum(row.get(name, 0.0) for row in rows) for name in kinds}
    failed = sum(row["rollouts/failed"] for row in rows)
    return Played(measured.rate, sum(measured.cpu.values()), failures, failed)


def line(name: str, played: Played) -> str:
    """Return the measurements of a run as one line."""
    kinds = (
        ", ".join(f"{kind} {count:.0f}" for kind, count in sorted(played.failures.items()))
        or "none"
    )
    return (
        f"{name}: {played.rate:.2f} samples/s, {1000 * played.cpu:.0f} ms of CPU a sample; "
        f"failures: {kinds}; "
        f"rollouts left out: {played.failed_rollouts:.0f}"
    )


def report(
    options: argparse.Namespace, clean: Sequence[Played], faulty: Sequence[Played]
) -> dict[str, Any]:
    """Print the result and return it for the JSON file."""
    slower = [one.rate / other.rate for one, other in zip(clean, faulty, strict=True)]
    verdict = "" if statistics.median(slower) <= MOST else f": above {MOST:g}"
    print(
        f"{options.rate:.0%} of the steps fail: {statistics.median(slower):.2f} times as slow "
        f"({min(slower):.2f} to {max(slower):.2f}){verdict}"
    )
    return {
        "rate": options.rate,
        "latency_ms": options.latency,
        "slower": slower,
        "clean": [vars(played) for played in clean],
        "faulty": [vars(played) for played in faulty],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=0.2, help="share of the steps that fail")
    parser.add_argument(
        "--latency", type=float, default=0.0, help="simulated milliseconds of every step"
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="training steps that are measured")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="for every run")
    options = parser.parse_args()
    clean = []
    faulty = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        runs = Path(folder)
        policy = make_policy(runs / "policy")
        for number in range(options.pairs):
            for rate, found in ((0.0, clean), (options.rate, faulty)):
                found.append(play(options, policy, runs, rate, number))
                print(line(f"round {number + 1}, {rate:.0%}", found[-1]), flush=True)
    result = report(options, clean, faulty)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
