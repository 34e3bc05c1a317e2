"""Generate demonstrations: episodes of scripted agents, played in real environments and written as
JSONL.

``scripts`` writes what the agents play: solutions, and several kinds of mistakes.

    python -m realhf.aws.training.sft_data --out episodes.jsonl --episodes-per-task 20
    python -m realhf.aws.training.sft_data --out mixed.jsonl --mix recovery=0.3 habit=0.2 --tags starter

Every observation is the actual answer of the simulator and the CLI. Rows are split by template:
``--split heldout`` writes episodes of templates that training never sees.
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
from realhf.api.environment import AssistantMessage, ChatMessage, Environment, Opening, Turn
from realhf.api.generation import TokenSource
from realhf.api.rollout import RolloutOutcome
from realhf.aws.episode.pooled_environment import MESSAGE_TIMEOUT_S, pooled_environment
from realhf.aws.messages import OBSERVATION_CHARS, episode_task
from realhf.aws.scripts import DEFAULT_MIX, HABIT, KINDS, Script, write_scripts
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.captures import fill_setup, resolve
from realhf.aws.tasks.loader import TEMPLATE_SPLITS
from realhf.aws.tasks.task import TaskError
from realhf.base import event_loops
from realhf.base.files import atomic_file
from realhf.rollout.episode import EpisodeRequest, RecordingEnvironment, play_episode
from realhf.rollout.player import NO_TOKENS, EpisodePlayer


class ScriptSpeaker:
    """A ``TurnSource`` that sends the commands of a script instead of sampling from a model.

    ``recorder``: environment that records the episode; it supplies the outputs that later commands
    refer to.
    """

    tokens = None
    last_turn_cut = False

    def __init__(self, script: Script, recorder: RecordingEnvironment) -> None:
        self._lines = script.lines
        self._recorder = recorder
        self._outputs: list[str] = []
        """Outputs of the commands of the current command list, for ``${step1:...}`` captures."""
        self._sent: list[dict[str, Any]] = []
        """The assistant messages sent so far."""

    def open(self, opening: Opening) -> None:
        """Do nothing: a script does not depend on the opening of the episode."""

    async def next_turn(self) -> AssistantMessage:
        """Return the next command of the script, with its captures filled in."""
        line = self._lines[len(self._sent)]
        if line.number == 1:
            self._outputs = []
        answers = self._recorder.opening.info["setup_answers"]
        command = resolve(fill_setup(line.command, answers), self._outputs)
        self._sent.append(
            {"role": "assistant", "content": command} | ({} if line.learned else {"train": False})
        )
        return AssistantMessage(command, text=command)

    def observe(self, messages: Sequence[ChatMessage]) -> bool:
        """Keep the output of the last command for the captures in later commands. Always returns
        True (continue)."""
        if self._lines[len(self._sent) - 1].number:
            self._outputs.append(self._recorder.turns[-1].info["observation"]["command_output"])
        return True

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat messages.

        The first message (role ``user``) is the task description. It is followed by pairs of an
        ``assistant`` message with a command (``"train": false`` marks context that must not be
        imitated) and a ``user`` message with the answer as a policy reads it. Every user message
        also has the complete observation.
        """
        messages = _build_user_messages(self._recorder.opening)
        for sent, turn in zip(self._sent, self._recorder.turns, strict=True):
            messages += [sent, *_build_user_messages(turn)]
        return messages


def _build_user_messages(reply: Opening | Turn) -> list[dict[str, Any]]:
    """Return the messages of an opening or turn, each with the observation as an additional key.

    The random episode id is left out, so that the file depends on the seed alone.
    """
    observation = {
        key: value for key, value in reply.info["observation"].items() if key != "episode_id"
    }
    return [{**message, "observation": observation} for message in reply.messages]


_RETRIES = 1
"""Number of times that an episode whose simulator was lost is resumed or replayed."""


class AwsScriptAgent:
    """An ``EpisodeAgent`` that plays scripts and collects one row per episode.

    A row has the keys task_id, template, tier, seed, kind, messages (see
    ``ScriptSpeaker.messages``), achieved and reward. ``on_row`` is called after each new row.
    """

    def __init__(self, scripts: Sequence[Script], on_row: Callable[[], None]) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._scripts = scripts
        self._on_row = on_row
        self._failures: Counter[int] = Counter()

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play one script and store its row.

        Raises RuntimeError if an episode failed and is not retried, or if its outcome contradicts
        its kind: a ``habit`` must fail, all others must succeed. Such an error ends the whole run,
        because the rows would be incomplete.
        """
        script = self._scripts[request.index]
        task = script.task
        recorder = RecordingEnvironment(env)
        speaker = ScriptSpeaker(script, recorder)
        outcome = await play_episode(recorder, request, speaker, len(script.lines))
        if outcome.valid:
            if outcome.achieved is (script.kind == HABIT):
                raise RuntimeError(
                    f"{script.kind} episode of {task.template} (seed {task.seed}) is mislabelled"
                )
            self.rows[request.index] = {
                **{
                    "task_id": task.task_id,
                    "template": task.template,
                    "tier": task.tier,
                    "seed": task.seed,
                },
                **{"kind": script.kind, "messages": speaker.messages()},
                **{"achieved": outcome.achieved, "reward": outcome.reward},
            }
            self._on_row()
            return outcome
        self._failures[request.index] += 1
        if self._failures[request.index] > _RETRIES:
            raise RuntimeError(
                f"the episode {outcome.task_id} failed ({outcome.status}): {outcome.message}"
            )
        return outcome


def play_all(
    scripts: Sequence[Script],
    pool: MiniStackPool,
    on_row: Callable[[], None] = lambda: None,
    *,
    observation_chars: int = OBSERVATION_CHARS,
    show_ids: bool = False,
) -> list[dict[str, Any]]:
    """Play scripts on all free slots of a started pool, and return the rows in the order of the
    scripts.

    ``observation_chars`` and ``show_ids`` control how answers are shown to a policy, see
    ``pooled_environment``. Raises RuntimeError as soon as an episode fails or its outcome
    contradicts its kind.
    """
    agent = AwsScriptAgent(scripts, on_row)
    wanted = [
        EpisodeRequest(number, episode_task(script.task)) for number, script in enumerate(scripts)
    ]
    with pooled_environment(pool, observation_chars=observation_chars, show_ids=show_ids) as spec:
        player = EpisodePlayer(
            spec, "", agent, pool.free_count, retries=_RETRIES, message_timeout_s=MESSAGE_TIMEOUT_S
        )
        event_loops.run(player.play_and_close(wanted, NO_TOKENS))
    return [agent.rows[number] for number in range(len(scripts))]


def summarize_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return statistics for each pair of tier and kind: the number of rows, the number of solved
    episodes, the mean number of turns and the mean reward."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tier"], row["kind"]), []).append(row)
    return [
        {
            "tier": tier,
            "kind": kind,
            "rows": len(group),
            "achieved": sum(row["achieved"] for row in group),
            "mean_turns": sum(
                message["role"] == "assistant" for row in group for message in row["messages"]
            )
            / len(group),
            "mean_reward": sum(row["reward"] for row in group) / len(group),
        }
        for (tier, kind), group in sorted(groups.items())
    ]


def _parse_mix(texts: Sequence[str]) -> dict[str, float]:
    """Parse words of the form ``kind=share`` into a dict of shares by kind. Raises ValueError."""
    mix = {}
    for text in texts:
        kind, _, share = text.partition("=")
        try:
            mix[kind] = float(share)
        except ValueError:
            raise ValueError(f"--mix takes kind=share, not {text!r}") from None
    return mix


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.aws.training.sft_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    add = parser.add_argument
    default = " ".join(f"{kind}={share:g}" for kind, share in DEFAULT_MIX.items())
    add(
        "--out",
        type=Path,
        required=True,
        help="JSONL file to write; statistics go to <out>.stats.json",
    )
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
    add(
        "--learn-mistakes",
        action="store_true",
        help="mistakes that are recovered from are marked for training too",
    )
    add(
        "--slips",
        action="store_true",
        help="recoveries are from slips of the command line, which are never learned",
    )
    add("--phrasings", action="store_true", help="tasks are worded in further ways, too")
    add(
        "--observation-chars",
        type=int,
        default=OBSERVATION_CHARS,
        help="what a policy reads of an answer (%(default)s)",
    )
    add("--show-ids", action="store_true", help="it reads uuids and hexadecimal ids as they are")
    add("--pool-size", type=int, default=4, help="simulators that play in parallel")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line program.

    Returns the exit status: 0 on success, 1 if an episode failed. argparse exits by itself on
    invalid options.
    """
    command_line = build_parser()
    options = command_line.parse_args(argv)
    try:
        scripts = write_scripts(
            options.episodes_per_task,
            options.seed,
            options.tiers,
            tags=options.tags,
            split=options.split,
            mix=DEFAULT_MIX if options.mix is None else _parse_mix(options.mix),
            learn_mistakes=options.learn_mistakes,
            slips=options.slips,
            rephrased=options.phrasings,
            shown=options.observation_chars,
        )
    except (TaskError, ValueError) as error:
        command_line.error(str(error))
    console = Console(stderr=True)
    try:
        view = {"observation_chars": options.observation_chars, "show_ids": options.show_ids}
        rows = write_rows(scripts, options.pool_size, options.out, console, **view)
        statistics = summarize_rows(rows)
    except RuntimeError as error:
        print(f"sft_data: {error}", file=sys.stderr)
        return 1
    stats_file = options.out.with_name(options.out.name + ".stats.json")
    stats_file.write_text(json.dumps(statistics, indent=1) + "\n")
    table = Table("tier", "kind", "rows", "achieved", "turns", "reward")
    for group in statistics:
        head = (group["tier"], group["kind"], str(group["rows"]), str(group["achieved"]))
        table.add_row(*head, f"{group['mean_turns']:.1f}", f"{group['mean_reward']:.2f}")
    console.print(table)
    console.print(f"{len(scripts)} episodes written to {options.out}")
    return 0


def write_rows(
    scripts: Sequence[Script], pool_size: int, out: Path, console: Console, **view: Any
) -> list[dict[str, Any]]:
    """Play the scripts on a pool of ``pool_size`` slots, write the rows to ``out`` and return them.

    The file ``out`` appears only when it is complete. ``view``: keyword arguments for ``play_all``.
    """
    pool = MiniStackPool(pool_size)
    pool.start()
    try:
        with (
            atomic_file(out) as partial,
            partial.open("w") as file,
            Progress(*Progress.get_default_columns(), console=console) as progress,
        ):
            bar = progress.add_task("playing episodes", total=len(scripts))
            rows = play_all(scripts, pool, lambda: progress.advance(bar), **view)
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    finally:
        pool.stop()
    return rows


if __name__ == "__main__":
    sys.exit(main())
