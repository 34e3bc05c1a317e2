"""What several runs of one experiment learned: a table of held-out success and one picture of their curves.

    make train SEED=1; make train SEED=2; make train SEED=3
    python benchmarks/learning.py runs/grpo_aws/seed1-* runs/grpo_aws/seed2-* runs/grpo_aws/seed3-* --out curves.png

Held-out instances have names that training never saw. Every figure is read from the run folders.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TIER = "source/success/"
"""Metric: the curriculum's running success of a tier, a mean over its templates however often each was drawn."""


def read_run(folder: Path) -> dict[str, Any]:
    """Summary, seed and running training success per step, the mean of the tiers. Raises FileNotFoundError."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    success = [statistics.mean(value for name, value in row.items() if name.startswith(TIER)) for row in rows]
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


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Running success in training over steps, and held-out success before and after as dots at both ends."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for run in runs:
        steps = list(range(1, len(run["success"]) + 1))
        (line,) = axes.plot(steps, run["success"], label=f"seed {run['seed']}", linewidth=1.8)
        ends = [run["summary"][f"heldout_success_{when}"]["overall"] for when in ("before", "after")]
        axes.plot([0, steps[-1] + 1], ends, "o", color=line.get_color(), markersize=7)
    axes.set_xlabel("train step")
    axes.set_ylabel("success")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title("lines: running success in training, all tasks weighted equally; dots: held-out, before and after",
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
