"""Plays many instances of many templates at once and collects what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from rich.console import Console
from rich.progress import track

from realhf.env.episode import Episode
from realhf.env.pool import MiniStackPool
from realhf.env.tasks.acceptance import problems
from realhf.env.tasks.loader import Template, instantiate

Instance = tuple[int, int, str]
"""Template, seed, split of the names."""


def instances_of(templates: Sequence[Template], seeds: int) -> list[Instance]:
    """``seeds`` training instances of each template and one with held-out names."""
    return [
        (template.task_id, seed, split)
        for template in templates
        for seed, split in [*((seed, "train") for seed in range(seeds)), (0, "heldout")]
    ]


def validate(templates: Sequence[Template], seeds: int, pool_size: int, console: Console) -> dict[int, list[str]]:
    """Problems by template; its first instance is played thoroughly."""
    pool = MiniStackPool(pool_size)
    pool.start()
    episodes: SimpleQueue[Episode] = SimpleQueue()
    for _ in range(pool_size):
        episodes.put(Episode(pool.acquire()))

    def check(instance: Instance) -> list[str]:
        episode = episodes.get()
        try:
            return problems(episode, instantiate(*instance), thorough=instance[1:] == (0, "train"))
        except Exception as error:
            return [f"{type(error).__name__}: {error} {error.__cause__ or ''}"]
        finally:
            episodes.put(episode)

    instances = instances_of(templates, seeds)
    found: dict[int, list[str]] = {template.task_id: [] for template in templates}
    try:
        with ThreadPoolExecutor(pool_size) as threads:
            verdicts = track(threads.map(check, instances), "playing", total=len(instances), console=console)
            for (task_id, seed, split), wrong in zip(instances, verdicts, strict=True):
                found[task_id] += [f"{split} {seed}: {text}" for text in wrong]
    finally:
        pool.stop()
    return found
