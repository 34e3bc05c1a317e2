"""A run that is killed after its checkpoint and goes on, as its trackers see it, in an environment
that has their packages: python -m tests.monitor.trackers.resumed_run FOLDER NAME killed|resumed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from realhf.monitor.metrics import evaluation_metrics
from realhf.monitor.trackers import TrackerStream

STEPS = 6
CHECKPOINT = 3
KILLED_AFTER = 4
MANY = {f"other/{number}": 0.5 for number in range(1500)}
"""More than a tracker keeps in memory, so that the killed process leaves something of every
step."""


def evaluation(step: int) -> dict[str, float]:
    return evaluation_metrics(
        {"sampled": {"overall": {"success": step / 10, "low": 0.0, "high": 1.0}}}, "heldout"
    )


def main() -> int:
    folder = Path(sys.argv[1])
    name = sys.argv[2]
    killed = sys.argv[3] == "killed"
    warnings: list[str] = []
    past = [(step, {"policy/loss": float(step)}) for step in range(1, CHECKPOINT + 1)] + [
        (2, evaluation(2))
    ]
    done = 0 if killed else CHECKPOINT
    log = TrackerStream(folder, [name], completed_steps=done, warn=warnings.append, past=past)
    for step in range(1 if killed else CHECKPOINT + 1, (KILLED_AFTER if killed else STEPS) + 1):
        log.metrics(
            step, {"policy/loss": float(step), "success/a<b": 0.5, "broken": float("nan"), **MANY}
        )
        if killed and step in (1, KILLED_AFTER):
            log.metrics(step, {"rare": float(step)})
        log.rollouts(step, [f"a transcript of step {step}"])
        if step % 3 == 0:
            log.metrics(step - 1, evaluation(step - 1))  # It comes after the next step.
    if killed:
        while any(lane._waiting.qsize() for lane in log._lanes):
            time.sleep(0.1)
        time.sleep(3)
        os._exit(9)
    log.close()
    print(warnings)
    return int(bool(warnings))


if __name__ == "__main__":
    sys.exit(main())
