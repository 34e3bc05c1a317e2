"""What several runs of one experiment learned: a table of held-out success and one picture of their
curves.

    make train SEED=1; make train SEED=2; make train SEED=3
    python benchmarks/learning.py runs/grpo_aws/seed1-* runs/grpo_aws/seed2-* runs/grpo_aws/seed3-* --out curves.png
    python benchmarks/learning.py runs/... --metrics policy/clip_fraction policy/ratio_max --out clipping.png
    make train-all-tiers
    python benchmarks/learning.py runs/grpo_aws/all-tiers-seed1 --by-tier --out tiers.png

Runs that differ in more than their seed, such as in staleness, are also compared by kind: success
after training with the 95 % interval of all episodes (Wilson), and the difference from the first
kind named, seed by seed, with the 95 % interval of its mean (Student's t).

Held-out instances have names that training never saw. Every figure is read from the run folders.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
import yaml

from realhf.api.evaluation import wilson_interval
from realhf.aws.tasks.task import TIERS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5th percentile of Student's t distribution, by degrees of freedom."""
Z_975 = statistics.NormalDist().inv_cdf(0.975)
TIER = "source/success/"
"""Prefix of a metric: the curriculum's running success rate of a tier, which weights all its
templates equally regardless of how often each was drawn."""

UNSEEN = "unseen-"
"""Prefix of a group of held-out episodes: templates of a tier that never train."""


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run's summary, seed, metrics and running training success per step (mean of the
    tiers). Raises FileNotFoundError."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    success = [
        statistics.mean(value for name, value in row.items() if name.startswith(TIER))
        for row in rows
    ]
    rollout = plan["spec"]["rollout"]
    kind = (
        f"asynchronous, eta {rollout['options']['max_head_offpolicyness']}"
        if rollout
        else "synchronous"
    )
    kind += _learner(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    told = json.loads((folder / "evaluations.json").read_text(encoding="utf-8"))
    held_out = {int(step): report["sampled"]["overall"]["success"] for step, report in told.items()}
    found = {
        "seed": plan["spec"]["seed"],
        "kind": kind,
        "summary": summary,
        "success": success,
        "rows": rows,
    }
    return found | {
        "held_out": dict(sorted(held_out.items())),
        "reports": {int(step): told[step]["sampled"] for step in sorted(told, key=int)},
    }


def _learner(config: dict[str, Any]) -> str:
    """Return text about how a run's training differs from one GRPO update per step on all weights;
    "" if it does not."""
    ppo = config.get("ppo", {})
    rank = ((config.get("actor") or {}).get("lora") or {}).get("rank", 0)
    updates = ppo.get("ppo_n_minibatches", 1) * ppo.get("sample_reuse", 1)
    told = [ppo["algo"]] if ppo.get("algo", "grpo") != "grpo" else []
    told += [f"{updates} updates a step"] if updates > 1 else []
    told += [f"LoRA of rank {rank}"] if rank else []
    return "".join(f", {word}" for word in told)


Rate = tuple[float, float, float, int]
"""Success, the bounds of its 95 % interval (Wilson) and the number of episodes."""


def rates_by_tier(report: dict[str, dict[str, Any]]) -> dict[str, Rate]:
    """Return the rate of each group that has episodes, in the report of an evaluation. Groups of
    templates that never train (``unseen-``) are one."""
    counts: dict[str, tuple[float, int]] = {}
    for name, each in report.items():
        group = "unseen" if name.startswith(UNSEEN) else name
        solved, n_episodes = counts.get(group, (0.0, 0))
        counts[group] = (
            solved + each["success"] * each["episodes"],
            n_episodes + each["episodes"],
        )
    return {
        group: (solved / n_episodes, *wilson_interval(solved, n_episodes), n_episodes)
        for group, (solved, n_episodes) in counts.items()
        if n_episodes
    }


def tier_table(rates: dict[int, dict[str, Rate]]) -> str:
    """Return a Markdown table of rates in percent, with one row per evaluated train step. The cell
    of a group that an evaluation did not play is empty."""
    names = _order(rates)
    rows = ["| step | episodes | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for step, found in rates.items():
        cells = [_cell(found[name]) if name in found else "" for name in names]
        n_episodes = found["overall"][3] if "overall" in found else 0
        rows.append(f"| {step} | {n_episodes} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(rate: Rate) -> str:
    share, low, high, _ = rate
    return f"{100 * share:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _order(rates: dict[int, dict[str, Rate]]) -> list[str]:
    """Return the groups of all evaluations: the mean, the tiers of AWS from easy to hard, others,
    and the templates that never train."""
    names = {name for found in rates.values() for name in found}
    first = [name for name in ("overall", *TIERS) if name in names]
    last = ["unseen"] if "unseen" in names else []
    return [*first, *sorted(names - {*first, *last}), *last]


def draw_tiers(runs: list[dict[str, Any]], out: Path) -> None:
    """Plot the held-out success of each tier at each evaluation, with its interval: a panel for
    each run."""
    figure, panels = plt.subplots(
        len(runs), figsize=(7.5, 4.2 * len(runs)), layout="constrained", squeeze=False
    )
    for axes, run in zip(panels[:, 0], runs, strict=True):
        rates = run["rates"]
        width = max(max(rates) - min(rates), 1)
        names = _order(rates)
        for number, name in enumerate(names):
            steps = [step for step, found in rates.items() if name in found]
            shares = [rates[step][name][0] for step in steps]
            lows = [rates[step][name][1] for step in steps]
            highs = [rates[step][name][2] for step in steps]
            # Beside each other, so that the intervals can be told apart.
            offset = width * 0.008 * (number - (len(names) - 1) / 2)
            axes.errorbar(
                [step + offset for step in steps],
                shares,
                yerr=[
                    [max(share - low, 0) for share, low in zip(shares, lows, strict=True)],
                    [max(high - share, 0) for share, high in zip(shares, highs, strict=True)],
                ],
                marker="o",
                markersize=5,
                capsize=2,
                linewidth=2.4 if name == "overall" else 1.2,
                color="black" if name == "overall" else f"C{number}",
                label=name,
            )
        axes.set_xlabel("train step")
        axes.set_ylabel("held-out success, sampled")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.set_title(f"{run['kind']}, seed {run['seed']}", fontsize=9)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(out, dpi=130)


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per seed and decoding: success in percent before and
    after training."""
    tiers = ["overall", *sorted(set(runs[0]["summary"]["heldout_success_before"]) - {"overall"})]
    rows = [
        "| kind | seed | decoding | " + " | ".join(tiers) + " | wall s |",
        "|---" * (len(tiers) + 4) + "|",
    ]
    for run in runs:
        summary = run["summary"]
        for decoding, suffix in (("sampled", ""), ("greedy", "_greedy")):
            before = summary[f"heldout_success_before{suffix}"]
            after = summary[f"heldout_success_after{suffix}"]
            if not after:
                continue
            cells = [f"{100 * before[t]:.1f} -> {100 * after[t]:.1f}" for t in tiers]
            wall = f"{summary['wall_seconds']:.0f}" if not suffix else ""
            rows.append(
                f"| {run['kind']} | {run['seed']} | {decoding} | "
                + " | ".join(cells)
                + f" | {wall} |"
            )
    return "\n".join(rows)


def comparison(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per kind of run, in the order of their first occurrence,
    in percent and percentage points."""
    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    after = {
        (run["kind"], run["seed"]): 100 * run["summary"]["heldout_success_after"]["overall"]
        for run in runs
    }
    rows = [
        "| kind | seeds: success after | all | interval | difference | interval |",
        "|---" * 6 + "|",
    ]
    for kind in kinds:
        seeds = [seed for name, seed in after if name == kind]
        values = [after[kind, seed] for seed in seeds]
        episodes = sum(
            run["summary"]["heldout_episodes_after"]["overall"]
            for run in runs
            if run["kind"] == kind
        )
        low, high = wilson_interval(statistics.mean(values) / 100 * episodes, episodes)
        gaps = [
            after[kind, seed] - after[kinds[0], seed] for seed in seeds if (kinds[0], seed) in after
        ]
        rows.append(
            f"| {kind} | {', '.join(f'{value:.1f}' for value in values)} | "
            f"{statistics.mean(values):.1f} of {episodes}"
            f" | {100 * low:.1f} to {100 * high:.1f} | "
            f"{difference(gaps) if kind != kinds[0] else '| '}|"
        )
    return "\n".join(rows)


def difference(gaps: list[float]) -> str:
    """Return two table cells: the mean of the differences and its confidence interval."""
    mean = statistics.mean(gaps)
    if len(gaps) < 2:
        return f"{mean:+.1f} | "
    half = T_975.get(len(gaps) - 1, Z_975) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{mean:+.1f} | {mean - half:+.1f} to {mean + half:+.1f} "


def draw(runs: list[dict[str, Any]], out: Path, metrics: list[str]) -> None:
    """Plot the running success in training as lines and the held-out success as dots, and below
    them a panel for each of ``metrics``."""
    figure, every = plt.subplots(
        1 + len(metrics),
        figsize=(7.5, 3.8 + 2.2 * len(metrics)),
        layout="constrained",
        squeeze=False,
    )
    axes = every[0, 0]
    names = [
        run["kind"] if len({run["kind"] for run in runs}) > 1 else f"seed {run['seed']}"
        for run in runs
    ]
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(names))}
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        steps = list(range(1, len(run["success"]) + 1))
        label = name if name not in names[:number] else None
        (line,) = axes.plot(steps, run["success"], label=label, linewidth=1.4, color=colours[name])
        axes.plot(
            list(run["held_out"]),
            list(run["held_out"].values()),
            "o",
            color=line.get_color(),
            markersize=7,
        )
        for below, metric in zip(every[1:, 0], metrics, strict=True):
            below.plot(
                steps,
                [row.get(metric, math.nan) for row in run["rows"]],
                linewidth=1,
                color=colours[name],
            )
    for below, metric in zip(every[1:, 0], metrics, strict=True):
        below.set_ylabel(metric)
        below.grid(alpha=0.3)
    every[-1, 0].set_xlabel("train step")
    axes.set_ylabel("success")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title(
        "lines: running success in training, all tasks weighted equally; dots: held-out", fontsize=9
    )
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, dpi=130)


def main() -> None:
    """Print the table of the runs, and plot their curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="PNG to draw")
    parser.add_argument(
        "--metrics", nargs="*", default=[], help="draw these metrics, too (docs/metrics.md)"
    )
    parser.add_argument(
        "--by-tier",
        action="store_true",
        help="print and draw the sampled held-out success of each tier at each evaluation",
    )
    args = parser.parse_args()
    if args.by_tier and args.metrics:
        parser.error("--by-tier draws no metrics: give either it or --metrics")
    runs = [read_run(folder) for folder in args.runs]
    order = list(dict.fromkeys(run["kind"] for run in runs))
    runs.sort(key=lambda run: (order.index(run["kind"]), run["seed"]))
    if len(order) > 1:
        print(comparison(runs), end="\n\n")
    print(table(runs))
    if args.by_tier:
        for run in runs:
            run["rates"] = {
                step: rates
                for step, each in run["reports"].items()
                if (rates := rates_by_tier(each))
            }
            if not run["rates"]:
                parser.error(f"--by-tier: the run of seed {run['seed']} has no evaluations")
            print(f"\n{run['kind']}, seed {run['seed']}:\n\n{tier_table(run['rates'])}")
    if args.out and args.by_tier:
        draw_tiers(runs, args.out)
        print(f"success by tier: {args.out}")
    elif args.out:
        draw(runs, args.out, args.metrics)
        print(f"curves: {args.out}")


if __name__ == "__main__":
    main()
