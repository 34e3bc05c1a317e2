"""Says which held-out tasks are played, and computes their success, overall and by group, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.env import RolloutOutcome
from realhf.api.environment import EnvironmentSpec, Task
from realhf.base.intervals import wilson_interval


def held_out_tasks(spec: EnvironmentSpec, split: str, episodes_per_task: int, templates: int) -> list[Task]:
    """Return instances of a split, those of a template one after the other with the seeds 0, 1, ...; of more than
    ``templates`` templates as many are taken, spread evenly."""
    tasks = spec.tasks(split)
    names = [*tasks.group_of]
    if len(names) > templates:
        names = [names[place * len(names) // templates] for place in range(templates)]
    return [tasks.instantiate(name, seed) for name in names for seed in range(episodes_per_task)]


def evaluation_report(outcomes: Sequence[RolloutOutcome]) -> dict[str, dict[str, Any]]:
    """Return {"overall" or group: {success, low, high, reward, turns, episodes, failed}}.

    Failed episodes (environment errors) are counted in ``failed`` and enter no mean; ``low`` and ``high`` are the 95 %
    Wilson interval of the success rate.
    """
    report = {"overall": _summary(outcomes)}
    for group in sorted({outcome.group for outcome in outcomes if outcome.group}):
        report[group] = _summary([outcome for outcome in outcomes if outcome.group == group])
    return report


def _summary(outcomes: Sequence[RolloutOutcome]) -> dict[str, Any]:
    valid = [outcome for outcome in outcomes if outcome.valid]
    n = len(valid)
    successes = sum(outcome.achieved for outcome in valid)
    low, high = wilson_interval(successes, n)
    return {
        "success": successes / n if n else 0.0,
        "low": low,
        "high": high,
        "reward": sum(outcome.reward or 0.0 for outcome in valid) / n if n else 0.0,
        "turns": sum(len(outcome.turns) for outcome in valid) / n if n else 0.0,
        "episodes": n,
        "failed": len(outcomes) - n,
    }
