"""Writes demonstrations: real episodes of scripted agents, as JSONL.

``scripts`` writes what is played: solutions, and mistakes of several kinds.

    python -m realhf.aws.training.sft_data --out episodes.jsonl --episodes-per-task 20
    python -m realhf.aws.training.sft_data --out mixed.jsonl --mix recovery=0.3 habit=0.2 --tags starter

Every observation is what the simulator and the CLI really answered. Rows are split by template: ``--split heldout``
writes those of templates that training never sees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import realhf
from realhf.api.environment import AssistantMessage, ChatMessage, Environment, Opening, RolloutOutcome, Turn
from realhf.api.generation import TokenSource
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.messages import OBSERVATION_CHARS, episode_task
from realhf.aws.scripts import DEFAULT_MIX, HABIT, KINDS, Script, write_scripts
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import fill_setup, resolve
from realhf.aws.tasks.loader import TEMPLATE_SPLITS
from realhf.aws.tasks.task import TaskError
from realhf.base import event_loops
from realhf.base.files import whole_file
from realhf.rollout.episode import EpisodeRequest, Witness, play_episode
from realhf.rollout.player import NO_TOKENS, Player


class Reciting:
    """Is a ``Speaker`` without tokens, of ``script`` in the episode that ``seen`` witnesses."""

    tokens = None
    cut = False

    def __init__(self, script: Script, seen: Witness) -> None:
        self._lines, self._seen = script.lines, seen
        self._outputs: list[str] = []
        self._said: list[dict[str, Any]] = []

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``: the next command, its captures filled."""
        line = self._lines[len(self._said)]
        if line.number == 1:
            self._outputs = []
        answers = self._seen.opening.info["setup_answers"]
        command = resolve(fill_setup(line.command, answers), self._outputs)
        self._said.append({"role": "assistant", "content": command} | ({} if line.learned else {"train": False}))
        return AssistantMessage(command, text=command)

    def hear(self, messages: Sequence[ChatMessage]) -> bool:
        """See ``Speaker``: keep what the command printed, for the captures of later lines of its list."""
        if self._lines[len(self._said) - 1].number:
            self._outputs.append(self._seen.turns[-1].info["observation"]["command_output"])
        return True

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation. Roles: ``user`` the description, ``assistant`` a command (``"train": false`` where
        it is context, not to be imitated), ``user`` what a policy reads of the answer; the messages of the user carry
        the whole observation too."""
        found = _with_observation(self._seen.opening)
        for said, turn in zip(self._said, self._seen.turns, strict=True):
            found += [said, *_with_observation(turn)]
        return found


def _with_observation(heard: Opening | Turn) -> list[dict[str, Any]]:
    """Leaves out the random id of the episode: the file depends on the seed alone."""
    lasting = {key: value for key, value in heard.info["observation"].items() if key != "episode_id"}
    return [{**message, "observation": lasting} for message in heard.messages]


_RETRIES = 1
"""How often an episode is resumed or played again when its simulator is lost."""


class ScriptAgent:
    """Plays scripts and keeps their rows: task_id, template, tier, seed, kind, messages (``Reciting.messages``),
    achieved and reward. See ``EpisodeAgent``; ``on_row`` is called after each."""

    def __init__(self, scripts: Sequence[Script], on_row: Callable[[], None]) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._scripts, self._on_row = scripts, on_row
        self._failures: Counter[int] = Counter()

    async def play(self, env: Environment, wanted: EpisodeRequest, llm: TokenSource, slot: int) -> RolloutOutcome:
        """See ``EpisodeAgent``. Raises RuntimeError when an episode failed and is not played again, or when one of a
        kind that must succeed did not: either ends all others, since the rows would not be complete."""
        script, seen = self._scripts[wanted.index], Witness(env)
        task = script.task
        speaker = Reciting(script, seen)
        outcome = await play_episode(seen, wanted, speaker, len(script.lines))
        if outcome.valid:
            if outcome.achieved is (script.kind == HABIT):
                raise RuntimeError(f"{script.kind} episode of {task.template} (seed {task.seed}) is mislabelled")
            self.rows[wanted.index] = {
                **{"task_id": task.task_id, "template": task.template, "tier": task.tier, "seed": task.seed},
                **{"kind": script.kind, "messages": speaker.messages()},
                **{"achieved": outcome.achieved, "reward": outcome.reward},
            }
            self._on_row()
            return outcome
        self._failures[wanted.index] += 1
        if self._failures[wanted.index] > _RETRIES:
            raise RuntimeError(f"the episode {outcome.task_id} failed ({outcome.status}): {outcome.message}")
        return outcome


def play_all(
    scripts: Sequence[Script],
    pool: MiniStackPool,
    on_row: Callable[[], None] = lambda: None,
    *,
    observation_chars: int = OBSERVATION_CHARS,
    show_ids: bool = False,
) -> list[dict[str, Any]]:
    """Return the rows in the order of the scripts, played on all free slots of a started pool; what policies will read
    of the answers, see ``pooled_environment``, is in them. Raises RuntimeError as soon as an episode has failed, or one
    of a kind that must succeed did not."""
    agent = ScriptAgent(scripts, on_row)
    wanted = [EpisodeRequest(number, episode_task(script.task)) for number, script in enumerate(scripts)]
    with pooled_environment(pool, observation_chars=observation_chars, show_ids=show_ids) as spec:
        player = Player(spec, "", agent, pool.free_count, retries=_RETRIES, message_timeout_s=MESSAGE_TIMEOUT_S)
        event_loops.run(player.play_and_close(wanted, NO_TOKENS))
    return [agent.rows[number] for number in range(len(scripts))]


def statistics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one map per tier and kind: rows, achieved, and the means of turns and reward."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tier"], row["kind"]), []).append(row)
    return [
        {
            "tier": tier,
            "kind": kind,
            "rows": len(group),
            "achieved": sum(row["achieved"] for row in group),
            "mean_turns": sum(message["role"] == "assistant" for row in group for message in row["messages"])
            / len(group),
            "mean_reward": sum(row["reward"] for row in group) / len(group),
        }
        for (tier, kind), group in sorted(groups.items())
    ]


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
    found.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    add = found.add_argument
    default = " ".join(f"{kind}={share:g}" for kind, share in DEFAULT_MIX.items())
    add("--out", type=Path, required=True, help="JSONL file to write; statistics go to <out>.stats.json")
    add("--episodes-per-task", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--tiers", nargs="+", help="default: all")
    add("--tags", nargs="*", default=(), help="only templates with one of these tags")
    add("--split", choices=TEMPLATE_SPLITS, default="train", help="which templates")
    add(
        "--mix",
        nargs="*",
        metavar="KIND=SHARE",
        help=f"kinds: {', '.join(KINDS)}; the rest is canonical (default: {default})",
    )
    add("--learn-mistakes", action="store_true", help="mistakes that are recovered from are marked for training too")
    add("--slips", action="store_true", help="recoveries are from slips of the command line, which are never learned")
    add("--phrasings", action="store_true", help="tasks are worded in further ways, too")
    add(
        "--observation-chars",
        type=int,
        default=OBSERVATION_CHARS,
        help="what a policy reads of an answer (%(default)s)",
    )
    add("--show-ids", action="store_true", help="it reads uuids and hexadecimal ids as they are")
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
            slips=options.slips,
            rephrased=options.phrasings,
            shown=options.observation_chars,
        )
    except (TaskError, ValueError) as error:
        command_line.error(str(error))
    console = Console(stderr=True)
    try:
        read = {"observation_chars": options.observation_chars, "show_ids": options.show_ids}
        found = statistics(write(scripts, options.pool_size, options.out, console, **read))
    except RuntimeError as error:
        print(f"sft_data: {error}", file=sys.stderr)
        return 1
    options.out.with_name(options.out.name + ".stats.json").write_text(json.dumps(found, indent=1) + "\n")
    table = Table("tier", "kind", "rows", "achieved", "turns", "reward")
    for group in found:
        head = (group["tier"], group["kind"], str(group["rows"]), str(group["achieved"]))
        table.add_row(*head, f"{group['mean_turns']:.1f}", f"{group['mean_reward']:.2f}")
    console.print(table)
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


def write(scripts: Sequence[Script], pool_size: int, out: Path, console: Console, **read: Any) -> list[dict[str, Any]]:
    """Play and write all rows, and return them; ``out`` appears when it is complete. ``read``: see ``play_all``."""
    pool = MiniStackPool(pool_size)
    pool.start()
    try:
        with (
            whole_file(out) as partial,
            partial.open("w") as file,
            Progress(*Progress.get_default_columns(), console=console) as progress,
        ):
            bar = progress.add_task("playing episodes", total=len(scripts))
            rows = play_all(scripts, pool, lambda: progress.advance(bar), **read)
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    finally:
        pool.stop()
    return rows


if __name__ == "__main__":
    sys.exit(main())
