"""Samples per second of the asynchronous experiment against the synchronous one, with and without a
slow environment.

    python benchmarks/asynchronous.py --policy runs/grpo_aws/RUN/policy
        [--latency 200 0] [--eta 1 4] [--niceness 0] [--pairs 3] [--steps 6] [--json FILE] [OPTION=VALUE ...]

Every run is a whole one: launcher, master, workers, environment server with its simulators,
training. All runs of one comparison have the same policy, seed, batch, group size and sessions;
further options are handed to all of them. They take turns, a ratio is that of one round, and only
whole steps between the first ones and the last are counted: a run is interrupted before it admits
its last samples. The latency is simulated by the environment server; 0 is the true one.

Other programs on the machine take cores from both sides, so the cores' use by them is printed as
well, and the CPU time of a sample, by process. On a busy machine give both sides
``torch_threads=1``: else each takes as many threads as others leave it cores, and the two sides are
not compared on the same number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SKIPPED = 2
"""Number of steps at the beginning of a run that are not measured."""
START_S = 600.0
STEP_S = 600.0
STOP_S = 30.0
TARGETS = {True: 1.8, False: 1.0}
"""Ratio that should be reached, by whether the latency is simulated."""
SAME = (
    "env.pool_size=64", "rollout.sessions=64", "seed=1", "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "monitor.trackers=[]", "monitor.progress=false", "recover_mode=disabled", "trial_name=measured",
)  # fmt: skip
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class Moment:
    """CPU times at one moment of a run. ``at``: monotonic time in seconds. ``cpu``: CPU seconds of
    each kind of process since its start. ``total``: CPU seconds of the whole machine since boot."""

    at: float
    cpu: dict[str, float]
    total: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one run. ``cpu``: CPU seconds per sample, by kind of process. ``others``:
    cores used by other programs. ``occupancy``: of generation and training, if the run reports it.
    ``row``: means of the run's metrics."""

    rate: float
    step_s: float
    cpu: Mapping[str, float]
    others: float
    occupancy: Mapping[str, float]
    row: Mapping[str, float]


class Failed(RuntimeError):
    """A run did not make progress. The message ends with the last lines of its output."""


def measure(command: Sequence[str], folder: Path, output: Path, steps: int, batch: int) -> Measured:
    """Start a run whose folder will be ``folder``, interrupt it after ``SKIPPED + steps`` steps and
    return its measurements. Raises Failed."""
    with output.open("wb") as log:
        run = psutil.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        moments = [
            _moment_of(run, folder, output, SKIPPED),
            _moment_of(run, folder, output, SKIPPED + steps),
        ]
    finally:
        _stop(run)
    rows = _rows(folder)[SKIPPED : SKIPPED + steps]
    return _measured(moments[0], moments[1], rows, steps, batch)


def _moment_of(run: psutil.Popen, folder: Path, output: Path, step: int) -> Moment:
    """Wait for the end of this step and return the CPU times at that moment. Raises Failed."""
    deadline = time.monotonic() + START_S + step * STEP_S
    while len(_rows(folder)) < step:
        if run.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(output.read_text(errors="replace").splitlines()[-12:])
            raise Failed(f"step {step} of {folder} did not come to its end:\n{tail}")
        time.sleep(0.02)
    busy = psutil.cpu_times()
    return Moment(
        time.monotonic(),
        _cpu(run),
        sum(busy) - busy.idle - busy.iowait - busy.guest - busy.guest_nice,
    )


def _stop(run: psutil.Popen) -> None:
    children = []
    with suppress(psutil.Error):
        children = run.children(recursive=True)
        run.send_signal(signal.SIGINT)
    with suppress(psutil.TimeoutExpired):
        run.wait(STOP_S)
    for process in [*children, run]:
        with suppress(psutil.Error):
            process.kill()


def _cpu(run: psutil.Popen) -> dict[str, float]:
    """Return CPU seconds by kind of worker, including the processes that each worker started."""
    seconds = {"launch": _seconds(run)}
    for worker in run.children():
        with suppress(psutil.Error):
            words = worker.cmdline()
            kind = next((word for word in words if word.startswith("workers.")), "workers.other")[
                len("workers.") :
            ]
            for process in [worker, *worker.children(recursive=True)]:
                seconds[kind] = seconds.get(kind, 0.0) + _seconds(process)
    return seconds


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for."""
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


def _rows(folder: Path) -> list[dict[str, float]]:
    with suppress(FileNotFoundError):
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n")[:-1]]
    return []


def _measured(
    first: Moment, last: Moment, rows: Sequence[Mapping[str, float]], steps: int, batch: int
) -> Measured:
    wall = last.at - first.at
    samples = steps * batch
    spent = {name: last.cpu[name] - first.cpu.get(name, 0.0) for name in last.cpu}
    others = (last.total - first.total - sum(spent.values())) / wall
    row = {name: statistics.mean(row[name] for row in rows if name in row) for name in rows[0]}
    occupancy = {
        name: row[f"{name}/occupancy"]
        for name in ("generation", "training")
        if f"{name}/occupancy" in row
    }
    cpu = {name: seconds / samples for name, seconds in spent.items()}
    return Measured(samples / wall, wall / steps, cpu, max(0.0, others), occupancy, row)


def play(args: argparse.Namespace, side: str, latency: float, runs: Path) -> Measured:
    """Run one side once and return its measurements. ``side``: SYNCHRONOUS, or the staleness bound
    of an asynchronous run."""
    eta = 0 if side == SYNCHRONOUS else int(side)
    experiment = "grpo_aws" if side == SYNCHRONOUS else "grpo_aws_async"
    options = [
        f"experiment={experiment}",
        *SAME,
        f"actor.path={args.policy.resolve()}",
        f"fileroot={runs}",
        f"env.step_latency_ms={latency:g}",
        f"dataset.train_bs_n_seqs={args.batch}",
        f"total_train_steps={SKIPPED + args.steps + eta + 2}",
    ]
    if side != SYNCHRONOUS:
        options += [f"async_rl.max_head_offpolicyness={eta}", f"async_rl.niceness={args.niceness}"]
    command = [sys.executable, "-m", "realhf.launch", *options, *args.options]
    folder = runs / experiment / "measured"
    if folder.exists():
        os.rename(folder, folder.with_name(f"measured-{time.time_ns()}"))
    return measure(command, folder, runs / "output.txt", args.steps, args.batch)


def compare(args: argparse.Namespace, latency: float, runs: Path) -> dict[str, Any]:
    """Run all sides in turns, print a line per run and a summary per side, and return the
    measurements by side."""
    sides = [SYNCHRONOUS, *(str(eta) for eta in args.eta)]
    results: dict[str, list[Measured]] = {side: [] for side in sides}
    for number in range(args.pairs):
        for side in sides:
            results[side].append(play(args, side, latency, runs))
            print(f"  round {number + 1}, {_line(side, results[side][-1])}", flush=True)
    for side in sides:
        print(_summary(side, results[side], results[SYNCHRONOUS], TARGETS[latency > 0]), flush=True)
    return {side: [vars(measured) for measured in found] for side, found in results.items()}


def _name(side: str) -> str:
    return side if side == SYNCHRONOUS else f"asynchronous, staleness {side}"


def _line(side: str, run: Measured) -> str:
    shares = ", ".join(f"{name} {value:.2f}" for name, value in run.occupancy.items())
    cpu = ", ".join(
        f"{name} {1000 * value:.0f}" for name, value in sorted(run.cpu.items()) if value >= 0.0005
    )
    return "; ".join(
        [
            f"{_name(side)}: {run.rate:.2f} samples/s, {run.step_s:.2f} s a step",
            *([f"occupancy: {shares}"] if shares else []),
            f"CPU ms of a sample: {1000 * sum(run.cpu.values()):.0f} ({cpu})",
            f"others use {run.others:.1f} cores",
        ]
    )


def _summary(side: str, found: Sequence[Measured], base: Sequence[Measured], target: float) -> str:
    rates = [run.rate for run in found]
    line = (
        f"{_name(side):28} {statistics.median(rates):7.2f} samples/s ({min(rates):.2f} to "
        f"{max(rates):.2f})"
    )
    line += (
        f", {1000 * statistics.median(sum(run.cpu.values()) for run in found):5.0f} ms of CPU a "
        f"sample"
    )
    if side == SYNCHRONOUS:
        return line
    ratios = [run.rate / other.rate for run, other in zip(found, base, strict=True)]
    ratio = statistics.median(ratios)
    verdict = "" if ratio >= target else f": below {target:g}"
    return (
        f"{line}; {ratio:.2f} times the synchronous ({min(ratios):.2f} to "
        f"{max(ratios):.2f}){verdict}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy", type=Path, required=True, help="folder of the actor's first weights"
    )
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[200.0, 0.0], help="simulated ms of a step"
    )
    parser.add_argument(
        "--eta", type=int, nargs="+", default=[1, 4], help="bounds of the staleness"
    )
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured")
    parser.add_argument(
        "--niceness", type=int, default=0, help="async_rl.niceness of the asynchronous runs"
    )
    parser.add_argument("--batch", type=int, default=16, help="samples (groups) of a step")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args, options = parser.parse_known_args()
    # A run has a session of its own and would outlive a benchmark that is simply killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.options = options
    if unknown := [text for text in options if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown: {' '.join(unknown)}")
    figures: dict[str, Any] = {
        "cores": psutil.cpu_count(),
        "steps": args.steps,
        "batch": args.batch,
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        runs = (args.runs or Path(kept)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        for latency in args.latency:
            print(
                f"environment latency "
                f"{f'{latency:g} ms per step, simulated' if latency else 'as it is'}",
                flush=True,
            )
            figures[f"latency_{latency:g}_ms"] = compare(args, latency, runs)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
