"""Plays many instances of many templates at once and collects what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from realhf.aws.episode.episode import DEFAULT_MAX_STEPS, Episode
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import Template, instantiate
from realhf.aws.validation.acceptance import problems

Instance = tuple[int, int, str]
"""Template, seed, split of the names."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def instances_of(templates: Sequence[Template], seeds: int) -> list[Instance]:
    """Return ``seeds`` training instances of each template and one with held-out names."""
    return [
        (template.task_id, seed, split)
        for template in templates
        for seed, split in [*((seed, "train") for seed in range(seeds)), (0, "heldout")]
    ]


@contextmanager
def _episodes(pool_size: int, max_steps: int) -> Iterator[SimpleQueue[Episode]]:
    """Give episodes in ``pool_size`` simulators of their own, which end with the context."""
    pool = MiniStackPool(pool_size)
    try:
        pool.start()
        episodes: SimpleQueue[Episode] = SimpleQueue()
        for _ in range(pool_size):
            episodes.put(Episode(pool.acquire(), max_steps))
        yield episodes
    finally:
        pool.stop()


@dataclass(frozen=True)
class Failure:
    """Says in words why there is no result."""

    text: str


def played(
    items: Sequence[Item],
    work: Callable[[Episode, Item], Result],
    pool_size: int,
    console: Console,
    max_steps: int = DEFAULT_MAX_STEPS,
) -> Iterator[Result | Failure]:
    """Yield the result of ``work`` for each item, in their order, ``pool_size`` at a time, with a progress bar. An item
    that a busy machine did not answer in time is tried again. An interrupt ends it after the items that are being
    played."""

    def turn(item: Item) -> Result | Failure:
        episode = episodes.get()
        try:
            return _attempted(lambda: work(episode, item))
        finally:
            episodes.put(episode)

    with _episodes(pool_size, max_steps) as episodes:
        threads = ThreadPoolExecutor(pool_size)
        try:
            yield from track(threads.map(turn, items), "playing", total=len(items), console=console)
        finally:
            threads.shutdown(cancel_futures=True)


def _attempted(work: Callable[[], Result], attempts: int = 3) -> Result | Failure:
    for left in reversed(range(attempts)):
        try:
            return work()
        except Exception as error:
            if not isinstance(error, OSError) or not left:
                return Failure(f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip())
    raise AssertionError("no attempt was made")


def validate(templates: Sequence[Template], seeds: int, pool_size: int, console: Console) -> dict[int, list[str]]:
    """Return problems by template; its first instance is played thoroughly."""
    instances = instances_of(templates, seeds)
    found: dict[int, list[str]] = {template.task_id: [] for template in templates}
    results = played(instances, _check, pool_size, console)
    for (task_id, seed, split), wrong in zip(instances, results, strict=True):
        texts = [wrong.text] if isinstance(wrong, Failure) else wrong
        found[task_id] += [f"{split} {seed}: {text}" for text in texts]
    return found


def _check(episode: Episode, instance: Instance) -> list[str]:
    return problems(episode, instantiate(*instance), thorough=instance[1:] == (0, "train"))
