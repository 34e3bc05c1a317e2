"""Says which held-out tasks an evaluation plays, and what it keeps of their episodes."""

from __future__ import annotations

from collections.abc import Sequence

from realhf.api.env import RolloutOutcome
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.evaluation import EpisodeResult


def held_out_tasks(spec: EnvironmentSpec, split: str, episodes_per_task: int, templates: int) -> list[Task]:
    """Return instances of a split, those of a template one after the other with the seeds 0, 1, ...; of more than
    ``templates`` templates as many are taken, spread evenly."""
    tasks = spec.tasks(split)
    names = [*tasks.group_of]
    if len(names) > templates:
        names = [names[place * len(names) // templates] for place in range(templates)]
    return [tasks.instantiate(name, seed) for name in names for seed in range(episodes_per_task)]


def episode_results(outcomes: Sequence[RolloutOutcome]) -> list[EpisodeResult]:
    """Return what an evaluation keeps of episodes."""
    return [
        EpisodeResult(
            outcome.group, outcome.valid, bool(outcome.achieved), float(outcome.reward or 0.0), len(outcome.turns)
        )
        for outcome in outcomes
    ]
