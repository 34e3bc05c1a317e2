"""Writes an episode as a person reads it."""

from __future__ import annotations

from realhf.api.env import RolloutOutcome


def transcript(outcome: RolloutOutcome, *, header: str = "") -> str:
    """Return the turns of an episode as text, with its outcome in the first line."""
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:.2f}"
    lines = [f"=== {header}: {outcome.group} task {outcome.task_id} (seed {outcome.seed}), {outcome.status}, {reward}"]
    if outcome.task_text:
        lines.append(f"task: {outcome.task_text}")
    for turn in outcome.turns:
        lines.append(f"  $ {turn.text.strip()}")
        if turn.output:
            lines.append(f"    {turn.output.strip()}")
    if outcome.message:
        lines.append(f"  {outcome.message}")
    return "\n".join(lines)
