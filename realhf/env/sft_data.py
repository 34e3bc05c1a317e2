"""Demonstrations for a warm start: real episodes of scripted agents, written as JSONL.

    python -m realhf.env.sft_data --out episodes.jsonl --episodes-per-task 100 --recovery-fraction 0.3

Kinds: *canonical* plays the solution; *recovery* makes a mistake first and then does it right; *habit* makes a
mistake and sticks to it (nothing achieved): what a policy with room for improvement also does. A mistake is one
of the template's own, or one that is possible everywhere: the last word of a name is left out. Every observation
is what the simulator and the CLI really answered.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import track

from realhf.env.episode import Episode
from realhf.env.names import is_name
from realhf.env.pool import MiniStackPool
from realhf.env.task import Task, TaskError
from realhf.env.tasks.loader import instantiate, load_templates, mistakes

CANONICAL, RECOVERY, HABIT = "canonical", "recovery", "habit"
SHORTENED_SHARE = 0.6
"""Part of the mistakes that shorten a name; the others are the template's."""
PERSISTENCE = 3
"""Commands of a habit episode, at least: its last command is sent again."""
_SEED_BITS = 31


@dataclass(frozen=True)
class Script:
    """One episode to be played: the task and the commands of the scripted agent."""

    task: Task
    kind: str
    commands: tuple[str, ...]


def write_scripts(
    episodes_per_task: int,
    seed: int,
    tiers: Sequence[str] | None = None,
    *,
    tags: Sequence[str] = (),
    recovery_fraction: float = 0.0,
    habit_fraction: float = 0.0,
) -> list[Script]:
    """The episodes to play, shuffled, decided by ``seed``: per template exactly the rounded fractions of each
    kind. A template whose mistakes allow no way back gets its recoveries from the others. Raises ValueError."""
    if min(recovery_fraction, habit_fraction) < 0 or recovery_fraction + habit_fraction > 1:
        raise ValueError("recovery and habit fractions are shares of one: not negative, together at most 1")
    rng = random.Random(f"sft:{seed}")
    recoveries, habits = round(recovery_fraction * episodes_per_task), round(habit_fraction * episodes_per_task)
    scripts = []
    for template in load_templates(tiers, tags=tags, split="train"):
        for number in range(episodes_per_task):
            task = instantiate(template.task_id, rng.getrandbits(_SEED_BITS))
            kind = RECOVERY if number < recoveries else HABIT if number < recoveries + habits else CANONICAL
            scripts.append(Script(task, kind, _commands(task, kind, rng)))
    rng.shuffle(scripts)
    return scripts


def _commands(task: Task, kind: str, rng: random.Random) -> tuple[str, ...]:
    if kind == CANONICAL:
        return task.solution
    if rng.random() < SHORTENED_SHARE:
        short = with_short_names(task)
        return short[:1] + task.solution if kind == RECOVERY else _persistent(short)
    if kind == RECOVERY:
        mistake = rng.choice([mistake for mistake in mistakes(task) if mistake.recovery])
        return mistake.commands + mistake.recovery
    return _persistent(rng.choice(mistakes(task)).commands)


def with_short_names(task: Task) -> tuple[str, ...]:
    """The solution with the last word of every drawn name left out."""
    commands = task.solution
    for value in task.params.values():
        if is_name(value):
            commands = tuple(command.replace(value, value.rpartition("-")[0]) for command in commands)
    return commands


def _persistent(commands: tuple[str, ...]) -> tuple[str, ...]:
    return commands + commands[-1:] * (PERSISTENCE - len(commands))


def play(episode: Episode, script: Script) -> dict[str, Any]:
    """One row: task_id, template, tier, seed, kind, achieved, reward and messages. Roles: ``user`` the
    description, ``assistant`` a command, ``tool`` what came of it; user and tool messages carry the whole
    observation as well, so that a reader can render it as a rollout does."""
    step = episode.reset(script.task)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": script.task.description, "observation": _lasting(step.observation)}
    ]
    reward = 0.0
    for command in script.commands:
        step = episode.step(command)
        reward += step.reward
        seen = step.observation
        messages.append({"role": "assistant", "content": command})
        text = seen["command_output"] if seen["command_success"] else seen["error"]
        messages.append({"role": "tool", "content": text, "observation": _lasting(seen)})
        if step.done:
            break
    return {
        "task_id": script.task.task_id,
        "template": script.task.template,
        "tier": script.task.tier,
        "seed": script.task.seed,
        "kind": script.kind,
        "messages": messages,
        "achieved": bool(step.observation["task_achieved"]),
        "reward": reward,
    }


def play_all(scripts: Sequence[Script], pool: MiniStackPool) -> Iterator[dict[str, Any]]:
    """Rows in the order of the scripts, played on all free slots of a started pool. Raises RuntimeError when an
    episode of a kind that must succeed did not."""
    episodes: SimpleQueue[Episode] = SimpleQueue()
    slots = [pool.acquire() for _ in range(pool.free_count)]
    for slot in slots:
        episodes.put(Episode(slot))

    def run(script: Script) -> dict[str, Any]:
        episode = episodes.get()
        try:
            return play(episode, script)
        finally:
            episodes.put(episode)

    threads = ThreadPoolExecutor(len(slots))
    try:
        for row in threads.map(run, scripts):
            if row["achieved"] is (row["kind"] == HABIT):
                raise RuntimeError(f"{row['kind']} episode of {row['template']} (seed {row['seed']}) is mislabelled")
            yield row
    finally:
        threads.shutdown(cancel_futures=True)
        for slot in slots:
            pool.release(slot)


def _lasting(observation: dict[str, Any]) -> dict[str, Any]:
    """The observation without the random episode id: the file depends on the seed alone."""
    return {key: value for key, value in observation.items() if key != "episode_id"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m realhf.env.sft_data", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--episodes-per-task", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", nargs="+", help="default: all")
    parser.add_argument("--tags", nargs="*", default=(), help="only templates with one of these tags")
    parser.add_argument("--pool-size", type=int, default=4, help="simulators that play in parallel")
    parser.add_argument("--recovery-fraction", type=float, default=0.0)
    parser.add_argument("--habit-fraction", type=float, default=0.0)
    options = parser.parse_args(argv)
    try:
        scripts = write_scripts(
            options.episodes_per_task,
            options.seed,
            options.tiers,
            tags=options.tags,
            recovery_fraction=options.recovery_fraction,
            habit_fraction=options.habit_fraction,
        )
    except (TaskError, ValueError) as error:
        parser.error(str(error))
    pool = MiniStackPool(options.pool_size)
    partial = options.out.with_name(options.out.name + ".tmp")
    console = Console(stderr=True)
    pool.start()
    try:
        with partial.open("w") as file:
            rows = track(play_all(scripts, pool), "playing episodes", total=len(scripts), console=console)
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        partial.replace(options.out)
    finally:
        pool.stop()
        partial.unlink(missing_ok=True)
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
