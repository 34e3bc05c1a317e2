"""``python -m realhf.env.tasks validate``: play every task against MiniStack and print a table of verdicts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from rich.console import Console
from rich.progress import track
from rich.table import Table

from realhf.env.episode import Episode
from realhf.env.grader import criteria_of
from realhf.env.pool import MiniStackPool
from realhf.env.task import TaskError
from realhf.env.tasks.acceptance import problems
from realhf.env.tasks.loader import Template, instantiate, load_templates


def validate(templates: Sequence[Template], seeds: int, pool_size: int, console: Console) -> dict[int, list[str]]:
    """Problems by template, over ``seeds`` training and as many held-out instances each."""
    instances = [
        (template.task_id, seed, split)
        for template in templates
        for seed in range(seeds)
        for split in ("train", "heldout")
    ]
    pool = MiniStackPool(pool_size)
    pool.start()
    episodes: SimpleQueue[Episode] = SimpleQueue()
    for _ in range(pool_size):
        episodes.put(Episode(pool.acquire()))

    def check(instance: tuple[int, int, str]) -> list[str]:
        episode = episodes.get()
        try:
            return problems(episode, instantiate(*instance), with_mistakes=True)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            episodes.put(episode)

    found: dict[int, list[str]] = {template.task_id: [] for template in templates}
    try:
        with ThreadPoolExecutor(pool_size) as threads:
            verdicts = track(threads.map(check, instances), "playing", total=len(instances), console=console)
            for (task_id, seed, split), wrong in zip(instances, verdicts, strict=True):
                found[task_id] += [f"{split} {seed}: {text}" for text in wrong]
    finally:
        pool.stop()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m realhf.env.tasks", description=(__doc__ or "").strip())
    parser.add_argument("action", choices=["validate"])
    parser.add_argument("--tiers", nargs="+", help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="instances per template and split")
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    options = parser.parse_args(argv)
    try:
        templates = load_templates(options.tiers)
    except TaskError as error:
        parser.error(str(error))
    console = Console()
    found = validate(templates, options.seeds, options.pool_size, console)
    table = Table("id", "tier", "strategy", "task", "commands", "verdict")
    for template in templates:
        task, wrong = instantiate(template.task_id, 0), found[template.task_id]
        verdict = "[red]" + "\n".join(wrong) if wrong else "[green]ok"
        commands = "\n".join(" ".join(command.split()[1:3]) for command in task.solution)
        table.add_row(str(task.task_id), task.tier, criteria_of(task).strategy, task.template, commands, verdict)
    console.print(table)
    bad = sum(bool(wrong) for wrong in found.values())
    console.print(f"{len(templates)} tasks, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
