"""What several runs of one experiment learned: a table of held-out success and one picture of their curves.

    make train SEED=1; make train SEED=2; make train SEED=3
    python benchmarks/learning.py runs/grpo_aws/seed1-* runs/grpo_aws/seed2-* runs/grpo_aws/seed3-* --out curves.png

Held-out instances have names that training never saw. Every figure is read from the run folders.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WINDOW = 5
"""Steps of the running mean of the training curves."""


def read_run(folder: Path) -> dict[str, Any]:
    """Summary, seed and training success per step of a finished run. Raises FileNotFoundError."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    success = [json.loads(line)["actor_gen/success"] for line in lines]
    return {"seed": plan["spec"]["seed"], "summary": summary, "success": success}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: one row per seed and decoding, success before -> after in percent."""
    tiers = ["overall", *sorted(set(runs[0]["summary"]["heldout_success_before"]) - {"overall"})]
    rows = ["| seed | decoding | " + " | ".join(tiers) + " | wall s |", "|---" * (len(tiers) + 3) + "|"]
    for run in runs:
        summary = run["summary"]
        for decoding, suffix in (("sampled", ""), ("greedy", "_greedy")):
            before, after = summary[f"heldout_success_before{suffix}"], summary[f"heldout_success_after{suffix}"]
            cells = [f"{100 * before[t]:.1f} -> {100 * after[t]:.1f}" for t in tiers]
            wall = f"{summary['wall_seconds']:.0f}" if not suffix else ""
            rows.append(f"| {run['seed']} | {decoding} | " + " | ".join(cells) + f" | {wall} |")
    return "\n".join(rows)


def running_mean(values: list[float]) -> list[float]:
    """Mean of the last ``WINDOW`` values at every position."""
    return [sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))]


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Training success over steps, and held-out success before and after as dots at both ends."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for run in runs:
        steps = list(range(1, len(run["success"]) + 1))
        (line,) = axes.plot(steps, running_mean(run["success"]), label=f"seed {run['seed']}", linewidth=1.8)
        ends = [run["summary"][f"heldout_success_{when}"]["overall"] for when in ("before", "after")]
        axes.plot([0, steps[-1] + 1], ends, "o", color=line.get_color(), markersize=7)
    axes.set_xlabel(f"train step (16 tasks x 8 rollouts; running mean of {WINDOW} steps)")
    axes.set_ylabel("success")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title("line: tasks in training, chosen for what can be learned - dots: held-out, before and after",
                   fontsize=9)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--out", type=Path, help="PNG to draw")
    args = parser.parse_args()
    runs = sorted((read_run(folder) for folder in args.runs), key=lambda run: run["seed"])
    print(table(runs))
    if args.out:
        draw(runs, args.out)
        print(f"curves: {args.out}")


if __name__ == "__main__":
    main()
