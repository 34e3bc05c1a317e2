"""The first run: one command that trains an agent on a few easy AWS tasks, and what it learned, in a few minutes.

    python examples/first_run.py                            # the files of the run go to runs/first_run
    python examples/first_run.py seed=2 total_train_steps=30

It starts the launcher as anybody would, with options that make the default run short: the tasks of one tier, a shorter
warm start, fewer steps. Then it reads two files of the run folder. docs/quickstart.md explains a whole run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

OPTIONS = {
    "experiment": "grpo_aws",
    "trial_name": "first_run",
    "fileroot": "runs",
    "recover_mode": "disabled",  # begin anew where a folder of this name is there
    "env.tiers": "[warmup]",
    "warm_start.episodes_per_task": "30",
    "warm_start.train_steps": "200",
    "total_train_steps": "20",
    "evaluation.episodes_per_task": "8",
    "evaluation.greedy_episodes_per_task": "0",
}


def learned(run: Path) -> str:
    """What the run reached: the training rewards, and the success on held-out names before and after."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    rewards = [row["reward/mean"] for row in steps]
    lines = [f"reward of a training episode: {rewards[0]:.2f} in step 1, {rewards[-1]:.2f} in step {len(steps)}"]
    before, after = (summary.get(f"heldout_success_{when}") for when in ("before", "after"))
    if before and after:  # there are none with evaluation.episodes_per_task=0
        before, after = before["overall"], after["overall"]
        lines.append(f"tasks solved with names never seen: {before:.0%} before training, {after:.0%} after")
    lines.append(f"open {run / 'report.html'} for everything else, {run / 'episodes.txt'} for what the agent did")
    return "\n".join(lines)


def main(arguments: list[str]) -> str:
    """Train with these options of the launcher in place of ours, and print what was learned."""
    if wrong := [argument for argument in arguments if "=" not in argument]:
        sys.exit(f"{wrong[0]}: options are name=value, as for python -m realhf.launch")
    options = OPTIONS | dict(argument.split("=", 1) for argument in arguments)
    command = [sys.executable, "-m", "realhf.launch", *(f"{name}={value}" for name, value in options.items())]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if options.get("mode", "run") != "run":
        return ""  # mode=check and mode=graph train nothing
    found = learned(Path(options["fileroot"]) / options["experiment"] / options["trial_name"])
    print(found)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
