"""Seconds of every phase of the default job's step on a quiet machine, and beside a stranger that
keeps one core busy.

    python benchmarks/contention.py [--policy FOLDER] [--steps 24] [--block 3] [--strangers 1] [--pin]
        [--against CHECKOUT [--pairs 3]] [--json FILE] [OPTION=VALUE ...]

One run of ``experiment=grpo_aws`` goes on while strangers come and go: ``--block`` steps without
them, as many beside them, in turn. A stranger is a Python process that counts for ever; it is
started and ended here, by its number. The first steps of the run, and the first of each block, in
which the stranger came or went, are not counted. Nothing is evaluated meanwhile; further options
are handed to the run. Without ``--policy`` the run begins as ``make train`` does, from the warm
start, which is made first if it is not in ``runs/warm_start``.

The table shows medians and ranges; the ratio is that of the medians, its range that of neighbouring
blocks. Verdict: no phase takes more than 2.5 times as long beside one stranger. A phase of less
than 10 ms is shown and not judged: one turn of the stranger is longer.

``--against``: whole quiet runs of this checkout and another one, from the same weights, in turns,
each with its own ``.venv`` if it has one. Verdict: the median of the pairs' ratios of a step is at
most 1.05. What others on the machine use meanwhile is printed: the verdicts mean something only
where that is next to nothing.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from realhf.monitor.metrics import public_names
from realhf.monitor.summary import call_times

HERE = Path(__file__).resolve().parent.parent
WARM_UP = 3
"""Number of steps at the beginning that are not measured."""
WORST = 2.5
QUIET_SPEED = 1.05
JUDGED_S = 0.01
START_S = 600.0
STEP_S = 900.0
WARM_START_S = 3600.0
STOP_S = 30.0
OPTIONS = (
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "recover_mode=disabled",
)
Row = Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """Measurements of one step. ``phases``: seconds by phase (``step``: the whole step).
    ``others``: number of cores used by programs other than the run and the strangers."""

    phases: Row
    others: float


class Failed(RuntimeError):
    """A run failed or made no progress. The message ends with the last lines of its output."""


class Run:
    """Context manager for a launcher of ``checkout`` with its run folder."""

    def __init__(self, checkout: Path, runs: Path, trial: str, options: Sequence[str]) -> None:
        python = checkout / ".venv" / "bin" / "python"
        self._command = [
            str(python) if python.exists() else sys.executable,
            "-m",
            "realhf.launch",
            "experiment=grpo_aws",
            *OPTIONS,
            f"fileroot={runs}",
            f"trial_name={trial}",
            *options,
        ]
        self._checkout = checkout
        self._folder = runs / "grpo_aws" / trial
        self._output = runs / f"{trial}.txt"

    def __enter__(self) -> Run:
        environment = {**os.environ, "PYTHONPATH": str(self._checkout)}
        with self._output.open("wb") as log:
            self._process = psutil.Popen(
                self._command,
                stdout=log,
                stderr=log,
                cwd=self._checkout,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Interrupt the run as a user would, then kill the remaining processes."""
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = self._process.children(recursive=True)
            self._process.send_signal(signal.SIGINT)
        with suppress(psutil.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in [*children, self._process]:
            with suppress(psutil.Error):
                process.kill()

    def finish(self, within_s: float) -> None:
        """Wait for the end of the run. Raises Failed if it fails or takes longer than ``within_s``
        seconds."""
        with suppress(psutil.TimeoutExpired):
            if self._process.wait(within_s) == 0:
                return
        raise Failed(self._told("the run failed"))

    def steps(self, count: int, strangers: Sequence[psutil.Process] = ()) -> list[Step]:
        """Wait for the next ``count`` steps and return their measurements. Raises Failed."""
        found = []
        done = len(self._rows())
        for number in range(done, done + count):
            before = self._moment(strangers)
            self._wait_for(number + 1)
            wall, total, ours = (
                after - then for after, then in zip(self._moment(strangers), before, strict=True)
            )
            row = self._rows()[number]
            phases = call_times(row)
            found.append(Step({**phases, "step": row["time/step"]}, max(0.0, total - ours) / wall))
        return found

    def _wait_for(self, step: int) -> None:
        deadline = time.monotonic() + STEP_S + (START_S if step == 1 else 0.0)
        while len(self._rows()) < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Failed(self._told(f"step {step} did not come to its end"))
            time.sleep(0.02)

    def _told(self, what: str) -> str:
        tail = self._output.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"{what}: {' '.join(self._command)}", *tail])

    def _rows(self) -> list[dict[str, float]]:
        with suppress(FileNotFoundError):
            text = (self._folder / "metrics.jsonl").read_text(encoding="utf-8")
            return [public_names(json.loads(line)) for line in text.split("\n")[:-1]]
        return []

    def _moment(self, strangers: Sequence[psutil.Process]) -> tuple[float, float, float]:
        """Return (monotonic time, CPU seconds of the machine, CPU seconds of the run and the
        strangers)."""
        busy = psutil.cpu_times()
        used = sum(busy) - busy.idle - busy.iowait - busy.guest - busy.guest_nice
        processes: list[psutil.Process] = [self._process, *strangers]
        with suppress(psutil.Error):
            processes += self._process.children(recursive=True)
        return time.monotonic(), used, sum(map(_seconds, processes))


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for."""
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


@contextmanager
def busy(count: int, pin: bool) -> Iterator[Sequence[psutil.Process]]:
    """Context manager that runs ``count`` strangers, each on any core or, with ``pin``, on one
    fixed core."""
    strangers = [
        psutil.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        cores = sorted(os.sched_getaffinity(0))
        for number, stranger in enumerate(strangers if pin else ()):
            stranger.cpu_affinity([cores[number % len(cores)]])
        yield strangers
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def contended(
    args: argparse.Namespace, policy: str, runs: Path
) -> tuple[list[list[Step]], list[list[Step]]]:
    """Return blocks of steps without strangers, and blocks of steps with them, from one run."""
    quiet: list[list[Step]] = []
    beside: list[list[Step]] = []
    total = WARM_UP + 2 * args.steps + 2 * (args.block + 1)
    options = [f"actor.path={policy}", f"total_train_steps={total}", *args.options]
    with Run(HERE, runs, "contended", options) as run:
        run.steps(WARM_UP)
        for _ in range(-(-args.steps // (2 * args.block))):
            quiet.append(run.steps(args.block + 1)[1:])
            _say("quiet", quiet[-1])
            with busy(args.strangers, args.pin) as strangers:
                beside.append(run.steps(args.block + 1, strangers)[1:])
            _say("beside a stranger", beside[-1])
    return quiet, beside


def against(
    args: argparse.Namespace, policy: str, runs: Path
) -> tuple[list[list[Step]], list[list[Step]]]:
    """Return the steps of runs of this checkout, and of the other one, in turns and without
    strangers."""
    found: dict[Path, list[list[Step]]] = {HERE: [], args.against: []}
    options = [
        f"actor.path={policy}",
        f"total_train_steps={WARM_UP + args.steps + 1}",
        *args.options,
    ]
    for number in range(args.pairs):
        for side, checkout in (("here", HERE), ("there", args.against)):
            with Run(checkout, runs, f"{side}-{number}", options) as run:
                run.steps(WARM_UP)
                found[checkout].append(run.steps(args.steps))
            _say(side, found[checkout][-1])
    return found[HERE], found[args.against]


def _say(name: str, steps: Sequence[Step]) -> None:
    times = " ".join(f"{step.phases['step']:.2f}" for step in steps)
    print(
        f"  {name:18} steps of {times} s; others use "
        f"{statistics.fmean(step.others for step in steps):.2f} cores",
        flush=True,
    )


def table(
    names: tuple[str, str], ours: Sequence[Sequence[Step]], theirs: Sequence[Sequence[Step]]
) -> dict[str, dict[str, Any]]:
    """Print a line per phase: the medians of both sides with their ranges, and the ratio of the
    first to the second. Return these values."""
    result: dict[str, dict[str, Any]] = {}
    print(f"{'phase':14}" + "".join(f"{name + ', s':>36}" for name in names) + f"{'ratio':>24}")
    for phase in ours[0][0].phases:
        sides = [
            [[step.phases[phase] for step in block] for block in side] for side in (ours, theirs)
        ]
        flat = [[value for block in side for value in block] for side in sides]
        pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(*sides, strict=True)]
        medians = [statistics.median(values) for values in flat]
        result[phase] = {
            "medians": medians,
            "values": flat,
            "ratio": medians[0] / medians[1],
            "pairs": pairs,
        }
        shown = "".join(
            f"{f'{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})':>36}" for v in flat
        )
        print(
            f"{phase:14}{shown}{f'{medians[0] / medians[1]:.2f} ({min(pairs):.2f} to {max(pairs):.2f})':>24}"
        )
    return result


def warm_policy(options: Sequence[str]) -> str:
    """Return the path of the weights that ``make train`` starts from, creating them if they do not
    exist. Raises Failed."""
    from realhf.launch.build import build_experiment
    from realhf.launch.compose import compose_config

    runs = Path("runs").resolve()
    built = build_experiment(compose_config(["experiment=grpo_aws", f"fileroot={runs}", *options]))
    path = built.spec.models["actor"].path
    if not Path(path).exists():
        print(f"making the warm start {path}", flush=True)
        runs.mkdir(exist_ok=True)
        with Run(HERE, runs, "contention-warm-start", ["total_train_steps=1", *options]) as run:
            run.finish(WARM_START_S)
    return path


def measure(args: argparse.Namespace, runs: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return (measurements, verdicts)."""
    policy = str(args.policy.resolve()) if args.policy else warm_policy(args.options)
    figures: dict[str, Any] = {
        "cores": psutil.cpu_count(),
        "strangers": args.strangers,
        "pinned": args.pin,
    }
    verdicts: dict[str, bool] = {}
    if args.against is None or args.both:
        quiet, beside = contended(args, policy, runs)
        phases = figures["contended"] = table(("beside a stranger", "quiet"), beside, quiet)
        judged = {
            name: phase["ratio"]
            for name, phase in phases.items()
            if phase["medians"][1] >= JUDGED_S
        }
        slowest = max(judged, key=lambda name: judged[name])
        text = (
            f"no phase beside a stranger over {WORST:g} times as long ({slowest}: "
            f"{judged[slowest]:.2f})"
        )
        verdicts[text] = judged[slowest] <= WORST
    if args.against is not None:
        here, there = against(args, policy, runs)
        figures["against"] = phases = table(("here", "there"), here, there)
        ratio = statistics.median(phases["step"]["pairs"])
        text = (
            f"a quiet step at most {QUIET_SPEED:g} times as long as in {args.against} ({ratio:.3f})"
        )
        verdicts[text] = ratio <= QUIET_SPEED
    return figures, verdicts


def main() -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy", type=Path, help="folder of the actor's first weights (default: the warm start)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=24,
        help="steps that are measured, of all blocks or of each run",
    )
    parser.add_argument(
        "--block", type=int, default=3, help="steps in a row with or without strangers"
    )
    parser.add_argument("--strangers", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="each stranger stays on one core")
    parser.add_argument("--against", type=Path, help="another checkout: compare the quiet speed")
    parser.add_argument("--both", action="store_true", help="with --against: strangers as well")
    parser.add_argument("--pairs", type=int, default=3, help="quiet runs of each checkout")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args, options = parser.parse_known_args()
    if unknown := [text for text in options if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown: {' '.join(unknown)}")
    args.options = options
    args.against = args.against.resolve() if args.against else None
    # A run has a session of its own and would outlive a benchmark that is simply killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{psutil.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        runs = (args.runs or Path(kept)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        try:
            figures, verdicts = measure(args, runs)
        except Failed as error:
            print(f"contention: {error}", file=sys.stderr)
            return 2
    for text, reached in verdicts.items():
        print(f"{text}: {'reached' if reached else 'missed'}")
    if args.json:
        args.json.write_text(
            json.dumps({**figures, "verdicts": verdicts}, indent=2) + "\n", encoding="utf-8"
        )
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
