"""Demonstrations: real episodes of scripted agents, written as JSONL.

    python -m realhf.aws.training.sft_data --out episodes.jsonl --episodes-per-task 20
    python -m realhf.aws.training.sft_data --out mixed.jsonl --mix recovery=0.3 habit=0.2 --tags starter

The five trajectory types (canonical, continuation, recovery, verification, hint) and the unsolved *habit* are
described in ``demonstrations``. Every observation is what the simulator and the CLI really answered. Rows are split
by template: ``--split heldout`` writes those of templates that training never sees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from realhf.aws.episode.episode import Episode
from realhf.aws.observation_text import observation_text
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.task import TaskError
from realhf.aws.training.demonstrations import DEFAULT_MIX, HABIT, KINDS, Script, write_scripts


def play(episode: Episode, script: Script) -> dict[str, Any]:
    """Play one script and return its row: task_id, template, tier, seed, kind, achieved, reward and messages.

    Roles: ``user`` the description, ``assistant`` a command (``"train": false`` where it is context, not to be
    imitated), ``user`` what a policy reads of the answer; the messages of the user carry the whole observation too.
    """
    step = episode.reset(script.task)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": step.observation["task"]["description"], "observation": _lasting(step.observation)}
    ]
    reward, outputs = 0.0, []
    for line in script.lines:
        if line.number == 1:
            outputs = []
        command = resolve(episode.fill([line.command])[0], outputs)
        step = episode.step(command)
        reward += step.reward
        seen = step.observation
        if line.number:
            outputs.append(seen["command_output"])
        messages.append({"role": "assistant", "content": command} | ({} if line.learned else {"train": False}))
        messages.append({"role": "user", "content": observation_text(seen), "observation": _lasting(seen)})
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
    """Yield rows in the order of the scripts, played on all free slots of a started pool. Raises RuntimeError when an
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
    """Return the observation without the random episode id: the file depends on the seed alone."""
    return {key: value for key, value in observation.items() if key != "episode_id"}


class Statistics:
    """Counts what a file holds, by tier and kind."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[tuple[int, bool, float]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        turns = sum(message["role"] == "assistant" for message in row["messages"])
        self._rows.setdefault((row["tier"], row["kind"]), []).append((turns, row["achieved"], row["reward"]))

    def groups(self) -> list[dict[str, Any]]:
        """Return one map per tier and kind: rows, achieved, and the means of turns and reward."""
        return [
            {
                "tier": tier,
                "kind": kind,
                "rows": len(rows),
                "achieved": sum(row[1] for row in rows),
                "mean_turns": sum(row[0] for row in rows) / len(rows),
                "mean_reward": sum(row[2] for row in rows) / len(rows),
            }
            for (tier, kind), rows in sorted(self._rows.items())
        ]

    def table(self) -> Table:
        """Return the groups as a table to print."""
        found = Table("tier", "kind", "rows", "achieved", "turns", "reward")
        for group in self.groups():
            found.add_row(
                group["tier"],
                group["kind"],
                str(group["rows"]),
                str(group["achieved"]),
                f"{group['mean_turns']:.1f}",
                f"{group['mean_reward']:.2f}",
            )
        return found


def _mix(texts: Sequence[str]) -> dict[str, float]:
    """Parse ``kind=share`` words. Raises ValueError."""
    mix = {}
    for text in texts:
        kind, _, share = text.partition("=")
        try:
            mix[kind] = float(share)
        except ValueError:
            raise ValueError(f"--mix takes kind=share, not {text!r}") from None
    return mix


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m realhf.aws.training.sft_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    default = " ".join(f"{kind}={share:g}" for kind, share in DEFAULT_MIX.items())
    add("--out", type=Path, required=True, help="JSONL file to write; statistics go to <out>.stats.json")
    add("--episodes-per-task", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--tiers", nargs="+", help="default: all")
    add("--tags", nargs="*", default=(), help="only templates with one of these tags")
    add("--split", choices=("train", "heldout"), default="train", help="which templates")
    add(
        "--mix",
        nargs="*",
        metavar="KIND=SHARE",
        help=f"kinds: {', '.join(KINDS)}; the rest is canonical (default: {default})",
    )
    add("--learn-mistakes", action="store_true", help="mistakes that are recovered from are marked for training too")
    add("--pool-size", type=int, default=4, help="simulators that play in parallel")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status; argparse exits on wrong options."""
    command_line = parser()
    options = command_line.parse_args(argv)
    try:
        scripts = write_scripts(
            options.episodes_per_task,
            options.seed,
            options.tiers,
            tags=options.tags,
            split=options.split,
            mix=DEFAULT_MIX if options.mix is None else _mix(options.mix),
            learn_mistakes=options.learn_mistakes,
        )
    except (TaskError, ValueError) as error:
        command_line.error(str(error))
    console, statistics = Console(stderr=True), Statistics()
    write(scripts, options.pool_size, options.out, statistics, console)
    options.out.with_name(options.out.name + ".stats.json").write_text(json.dumps(statistics.groups(), indent=1) + "\n")
    console.print(statistics.table())
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


def write(scripts: Sequence[Script], pool_size: int, out: Path, statistics: Statistics, console: Console) -> None:
    """Play and write all rows; ``out`` appears when it is complete."""
    pool = MiniStackPool(pool_size)
    partial = out.with_name(out.name + ".tmp")
    pool.start()
    try:
        with partial.open("w") as file:
            for row in track(play_all(scripts, pool), "playing episodes", total=len(scripts), console=console):
                statistics.add(row)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        partial.replace(out)
    finally:
        pool.stop()
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
