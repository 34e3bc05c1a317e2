"""Says which held-out tasks an evaluation plays, and what it keeps of their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from realhf.api.config import GenConfig
from realhf.api.env import RolloutOutcome
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.evaluation import EpisodeResult
from realhf.api.trace import PlayedSample
from realhf.base.dataclass_json import to_json_value
from realhf.rollout.episode.token_texts import TokenTexts


def held_out_tasks(spec: EnvironmentSpec, split: str, episodes_per_task: int, templates: int) -> list[Task]:
    """Return instances of a split, those of a template one after the other with the seeds 0, 1, ...; of more than
    ``templates`` templates as many are taken, spread evenly."""
    tasks = spec.tasks(split)
    names = [*tasks.group_of]
    if len(names) > templates:
        names = [names[place * len(names) // templates] for place in range(templates)]
    drawn = [(name, tasks.instantiate(name, seed)) for name in names for seed in range(episodes_per_task)]
    return [replace(task, template=task.template or name) for name, task in drawn]


def evaluated_sample(
    name: str,
    step: int,
    task: Task,
    rollouts: Sequence[RolloutOutcome],
    env: str,
    gen: GenConfig,
    texts: TokenTexts | None,
) -> PlayedSample:
    """Return the episodes of one task as the evaluation ``name`` (sampled, greedy) after ``step`` steps keeps them: of
    the same tasks each time."""
    instance = f"{task.id}/{task.seed}"
    return PlayedSample(
        f"eval/{name}/{step}/{instance}",
        rollouts,
        step,
        f"eval/{name}",
        key=instance,
        env=env,
        sampling=to_json_value(gen),
        texts=texts,
    )


def episode_results(outcomes: Sequence[RolloutOutcome]) -> list[EpisodeResult]:
    """Return what an evaluation keeps of episodes."""
    return [
        EpisodeResult(
            outcome.group, outcome.valid, bool(outcome.achieved), float(outcome.reward or 0.0), len(outcome.turns)
        )
        for outcome in outcomes
    ]
