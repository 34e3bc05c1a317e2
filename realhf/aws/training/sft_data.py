"""Demonstrations: real episodes of scripted agents, written as JSONL.

    python -m realhf.aws.training.sft_data --out episodes.jsonl --episodes-per-task 20
    python -m realhf.aws.training.sft_data --out mixed.jsonl --mix recovery=0.3 habit=0.2 --tags starter

The five trajectory types (canonical, continuation, recovery, verification, hint) and the unsolved *habit* are
described in ``demonstrations``. Every observation is what the simulator and the CLI really answered. Rows are split
by template: ``--split heldout`` writes those of templates that training never sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from realhf.api.env import RolloutOutcome
from realhf.api.environment import Environment
from realhf.api.generation import TokenSource
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.messages import episode_task
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.task import TaskError
from realhf.aws.training.demonstrations import DEFAULT_MIX, HABIT, KINDS, Script, write_scripts
from realhf.aws.training.reciting import Reciting
from realhf.base.files.whole_file import whole_file
from realhf.rollout.episode import EpisodeRequest, Witness, play_episode
from realhf.rollout.player import NO_TOKENS, Player

_RETRIES = 1
"""How often an episode is resumed or played again when its simulator is lost."""


class ScriptAgent:
    """Plays scripts and keeps their rows; see ``EpisodeAgent``. ``on_row`` is called after each."""

    def __init__(self, scripts: Sequence[Script], on_row: Callable[[], None]) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._scripts, self._on_row = scripts, on_row
        self._failures: Counter[int] = Counter()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. Raises RuntimeError when an episode failed and is not played again, or when one of a
        kind that must succeed did not: either ends all others, since the rows would not be complete."""
        script, seen = self._scripts[wanted.index], Witness(env)
        speaker = Reciting(script, seen)
        outcome = await play_episode(seen, wanted, speaker, len(script.lines))
        if outcome.valid:
            if outcome.achieved is (script.kind == HABIT):
                raise RuntimeError(
                    f"{script.kind} episode of {script.task.template} (seed {script.task.seed}) is mislabelled"
                )
            self.rows[wanted.index] = _row(script, speaker.messages(), outcome)
            self._on_row()
            return outcome
        self._failures[wanted.index] += 1
        if self._failures[wanted.index] > _RETRIES:
            raise RuntimeError(f"the episode {outcome.task_id} failed ({outcome.status}): {outcome.message}")
        return outcome


def _row(script: Script, messages: list[dict[str, Any]], outcome: RolloutOutcome) -> dict[str, Any]:
    """Return the row of an episode: task_id, template, tier, seed, kind, messages (``Reciting.messages``), achieved and
    reward."""
    return {
        "task_id": script.task.task_id,
        "template": script.task.template,
        "tier": script.task.tier,
        "seed": script.task.seed,
        "kind": script.kind,
        "messages": messages,
        "achieved": outcome.achieved,
        "reward": outcome.reward,
    }


def play_all(
    scripts: Sequence[Script], pool: MiniStackPool, on_row: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Return the rows in the order of the scripts, played on all free slots of a started pool. Raises RuntimeError as
    soon as an episode has failed, or one of a kind that must succeed did not."""
    agent = ScriptAgent(scripts, on_row)
    wanted = [EpisodeRequest(number, episode_task(script.task)) for number, script in enumerate(scripts)]
    with pooled_environment(pool) as spec:
        player = Player(spec, "", agent, pool.free_count, retries=_RETRIES, message_timeout_s=MESSAGE_TIMEOUT_S)
        asyncio.run(player.play_and_close(wanted, NO_TOKENS))
    return [agent.rows[number] for number in range(len(scripts))]


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
    """Run the program. Returns the exit status: 0, 1 after an episode that failed; argparse exits on wrong options."""
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
    try:
        write(scripts, options.pool_size, options.out, statistics, console)
    except RuntimeError as error:
        print(f"sft_data: {error}", file=sys.stderr)
        return 1
    options.out.with_name(options.out.name + ".stats.json").write_text(json.dumps(statistics.groups(), indent=1) + "\n")
    console.print(statistics.table())
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


def write(scripts: Sequence[Script], pool_size: int, out: Path, statistics: Statistics, console: Console) -> None:
    """Play and write all rows; ``out`` appears when it is complete."""
    pool = MiniStackPool(pool_size)
    pool.start()
    try:
        with (
            whole_file(out) as partial,
            partial.open("w") as file,
            Progress(*Progress.get_default_columns(), console=console) as progress,
        ):
            bar = progress.add_task("playing episodes", total=len(scripts))
            for row in play_all(scripts, pool, lambda: progress.advance(bar)):
                statistics.add(row)
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
    finally:
        pool.stop()


if __name__ == "__main__":
    sys.exit(main())
