"""What the presets of ``ppo.algo`` learn in the same time: seeds of each on several environments,
and their curves.

    python benchmarks/algorithms.py --out curves.png
        [--presets grpo,dapo,...] [--environments aws,sql,countdown] [--seeds 1,2,3] [--steps 20] [--runs FOLDER]
        [--jobs 1] [--minutes 30] [OPTION=VALUE ...]

Every run starts from the warm-started policy of its environment and is ``experiment=policy_gradient
env=ENVIRONMENT ppo.algo=PRESET``, nothing else set but the number of steps and an evaluation every
five: each preset is as it was published. ``opd`` needs a teacher: the policy that ``grpo`` had at
the end of its first seed, whose training does not count.

A preset that plays or passes more takes longer for a step, so that steps are no measure. The curves
are over the seconds of train steps, and the table compares where they are at the end of the fastest
run: success of each seed, the mean, and the difference from the first preset, seed by seed, with
the 95 % interval of its mean (Student's t); beside them the same after the last step of each. The
machine should have nothing else to do. With ``--jobs`` several runs go on at once, each on its own
share of the cores: policies as small as these gain little by a second core, and all presets have
the same. A run that is there is not repeated, and one that was killed goes on: the same command
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
from learning import difference
from learning_gate import Failed, run

from realhf.algorithms.presets import PRESETS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

T = TypeVar("T")
EVERY_STEPS = 5
TEACHER = "grpo"
"""Preset whose policy, of the first seed, is the teacher for ``opd``."""


@dataclass(frozen=True)
class Curve:
    """Learning curve of a run. ``success``: share of held-out episodes solved, sampled, at each
    evaluation; the first is before training. ``seconds``: seconds of train steps until each
    evaluation."""

    seconds: tuple[float, ...]
    success: tuple[float, ...]

    def after(self, budget: float) -> float:
        """Return the success after ``budget`` seconds, interpolated linearly between
        evaluations."""
        return float(np.interp(budget, self.seconds, self.success))


def read_curve(folder: Path) -> Curve:
    """Return the learning curve of a finished run. Raises FileNotFoundError."""
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    spent = [0.0, *itertools.accumulate(row["time/step"] for row in rows)]
    told = json.loads((folder / "evaluations.json").read_text(encoding="utf-8"))
    steps = sorted(int(step) for step in told)
    return Curve(
        tuple(spent[step] for step in steps),
        tuple(told[str(step)]["sampled"]["overall"]["success"] for step in steps),
    )


def play(environment: str, preset: str, seed: int, asked: argparse.Namespace) -> Curve:
    """Train with a preset and seed, unless that run exists, and return its learning curve. Raises
    Failed."""
    runs: Path = asked.runs.resolve()
    folder = runs / environment / f"{preset}-seed{seed}"
    log = runs / f"{environment}-{preset}-seed{seed}.log"
    if not (folder / "summary.json").is_file():
        runs.mkdir(parents=True, exist_ok=True)
        teacher = [
            f"teacher.path={runs / environment / f'{TEACHER}-seed{asked.seeds[0]}' / 'policy'}"
        ]
        options = [
            *("experiment=policy_gradient", f"env={environment}", f"ppo.algo={preset}"),
            *(f"total_train_steps={asked.steps}", f"evaluation.every_steps={EVERY_STEPS}"),
            "evaluation.greedy_episodes_per_task=0",
            *(teacher if preset == "opd" else []),
            *(
                f"fileroot={runs}",
                f"experiment_name={environment}",
                f"trial_name={preset}-seed{seed}",
                f"seed={seed}",
            ),
            *asked.options,
        ]
        run([sys.executable, "-m", "realhf.launch", *options], log, asked.minutes)
    return read_curve(folder)


def play_all(asked: argparse.Namespace) -> dict[str, dict[str, dict[int, Curve]]]:
    """Return the learning curves by environment, preset and seed. A line is printed as each run
    ends. Raises Failed."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[number :: asked.jobs] for number in range(asked.jobs)]

    def take_a_share() -> None:
        # applies to this thread and the runs that it starts
        os.sched_setaffinity(0, shares.pop())

    whole = list(itertools.product(asked.environments, asked.presets, asked.seeds))
    found: dict[tuple[str, str, int], Curve] = {}
    with ThreadPoolExecutor(asked.jobs, initializer=take_a_share) as pool:
        for taught in (False, True):  # the teachers are trained first
            ahead = {
                pool.submit(play, *each, asked): each
                for each in whole
                if (each[1] == "opd") == taught
            }
            try:
                for done in as_completed(ahead):
                    found[ahead[done]] = curve = done.result()
                    at = zip(curve.seconds, curve.success, strict=True)
                    told = ", ".join(
                        f"{100 * success:.1f} % at {seconds:.0f} s" for seconds, success in at
                    )
                    environment, preset, seed = ahead[done]
                    print(
                        f"{environment} {preset} seed {seed}: {told}", file=sys.stderr, flush=True
                    )
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return {
        environment: {
            preset: {seed: found[environment, preset, seed] for seed in asked.seeds}
            for preset in asked.presets
        }
        for environment in asked.environments
    }


def table(curves: Mapping[str, Mapping[int, Curve]]) -> list[str]:
    """Return the lines of a Markdown table for one environment. ``curves``: learning curves by
    preset and seed."""
    budget = min(curve.seconds[-1] for seeds in curves.values() for curve in seeds.values())
    rows = [
        f"| preset | seconds of steps | success at {budget:.0f} s, seeds | mean | difference | "
        f"interval"
        " | at the end | difference | interval |",
        "|---" * 9 + "|",
    ]
    first = next(iter(curves))
    for preset, seeds in curves.items():
        cells = []
        for at in (lambda curve: curve.after(budget), lambda curve: curve.success[-1]):
            now = {seed: 100 * at(curve) for seed, curve in seeds.items()}
            gaps = [value - 100 * at(curves[first][seed]) for seed, value in now.items()]
            cells.append(
                (
                    now,
                    f"{statistics.mean(now.values()):.1f} | "
                    f"{difference(gaps) if preset != first else '| '}",
                )
            )
        (now, soon), (_, later) = cells
        steps = statistics.mean(curve.seconds[-1] for curve in seeds.values())
        each = ", ".join(f"{value:.1f}" for value in now.values())
        rows.append(f"| `{preset}` | {steps:.0f} | {each} | {soon}| {later}|")
    return rows


def draw(found: Mapping[str, Mapping[str, Mapping[int, Curve]]], out: Path) -> None:
    """Plot a panel per environment: the mean over the seeds against the seconds of train steps,
    with a band from minimum to maximum."""
    figure, axes = plt.subplots(
        1, len(found), figsize=(5.2 * len(found), 4.4), layout="constrained", squeeze=False
    )
    for axis, (environment, curves) in zip(axes[0], found.items(), strict=True):
        for number, (preset, seeds) in enumerate(curves.items()):
            seconds = [
                statistics.mean(each)
                for each in zip(*(curve.seconds for curve in seeds.values()), strict=True)
            ]
            success = list(zip(*(curve.success for curve in seeds.values()), strict=True))
            style = "-" if number < 10 else "--"
            low, mean, high = ([of(each) for each in success] for of in (min, statistics.mean, max))
            (line,) = axis.plot(seconds, mean, style, label=preset, linewidth=1.4)
            axis.fill_between(seconds, low, high, color=line.get_color(), alpha=0.08)
        axis.set_title(f"{environment}: held-out success, sampled", fontsize=10)
        axis.set_xlabel("seconds of train steps")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("mean of the seeds; band: least to greatest")
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(out, dpi=110)


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a function that parses a comma-separated list."""
    return lambda text: [kind(word) for word in text.split(",") if word]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the tables and plot the curves. Return the exit status: 2 if a run
    failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--presets", type=listed(str), default=list(PRESETS), help="the first is compared with"
    )
    parser.add_argument("--environments", type=listed(str), default=["aws", "sql", "countdown"])
    parser.add_argument("--seeds", type=listed(int), default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20, help="of every run, a multiple of five")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/algorithms"), help="where the runs are kept"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at once, at most one for each core"
    )
    parser.add_argument("--minutes", type=float, default=30, help="longest time of a run")
    parser.add_argument("--out", type=Path, help="PNG to draw")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of every run")
    asked = parser.parse_args(argv)
    if unknown := set(asked.presets) - set(PRESETS):
        parser.error(f"--presets: {', '.join(sorted(unknown))}: not among {', '.join(PRESETS)}")
    if asked.steps < EVERY_STEPS or asked.steps % EVERY_STEPS:
        parser.error(f"--steps {asked.steps}: not a multiple of {EVERY_STEPS}")
    if not 1 <= asked.jobs <= (cores := len(os.sched_getaffinity(0))):
        parser.error(f"--jobs {asked.jobs}: from 1 to {cores}, the number of cores")
    if "opd" in asked.presets and TEACHER not in asked.presets[: asked.presets.index("opd")]:
        parser.error(f"--presets: opd learns from {TEACHER}, which must stand before it")
    try:
        found = play_all(asked)
    except Failed as error:
        print(f"algorithms: {error}", file=sys.stderr)
        return 2
    for environment, curves in found.items():
        print("\n".join(["", f"### {environment}", *table(curves)]))
    if asked.out:
        draw(found, asked.out)
        print(f"\ncurves: {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
