"""Plays the scripted solver of an environment and writes what was said as demonstrations, one JSON object per line.

    python -m realhf.rollout.demonstrations sql --out episodes.jsonl --request '{"episodes_per_task": 20, "seed": 1}'

Every answer is what the environment really said. A script that does not end as it should ends the program: a wrong
demonstration would teach a wrong habit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from realhf.api.chat import parse_turn
from realhf.api.environment import AssistantMessage, Demonstration, DemonstrationRequest, EnvironmentSpec, Opening
from realhf.env.doors.load import build_environment
from realhf.rollout.episode.played_episode import play_episode
from realhf.rollout.episode.request import EpisodeRequest
from realhf.rollout.players.slot_environment import SlotEnvironment

TIMEOUT_S = 60.0


class Script:
    """Speaks the turns of a demonstration, and writes the conversation down. A ``Speaker`` without tokens."""

    tokens = None
    cut = False

    def __init__(self, demonstration: Demonstration) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._turns = [*demonstration.turns]
        self._learned = [*(demonstration.learned or (True,) * len(demonstration.turns))]

    def open(self, opening: Opening) -> None:
        """See ``Speaker``."""
        self.messages = [dict(message) for message in opening.messages]
        self.tools = opening.tools

    async def speak(self) -> AssistantMessage:
        """See ``Speaker``."""
        text, learned = self._turns.pop(0), self._learned.pop(0)
        self.messages.append({"role": "assistant", "content": text} | ({} if learned else {"train": False}))
        return parse_turn(text, "hermes")

    def hear(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """See ``Speaker``."""
        self.messages += [dict(message) for message in messages]
        return bool(self._turns)


async def played(spec: EnvironmentSpec, scripts: Sequence[Demonstration]) -> list[dict[str, Any]]:
    """Return a row per script: task, kind, messages, tools, whether it succeeded, reward. Raises RuntimeError for a
    script that does not end as it should."""
    env = SlotEnvironment(
        spec.name, lambda: spec.make(""), message_timeout_s=TIMEOUT_S, patience_s=0.0, deterministic=False
    )
    rows = []
    try:
        for number, script in enumerate(track(scripts, "playing demonstrations", console=Console(stderr=True))):
            env.begin(0)
            speaker = Script(script)
            outcome = await play_episode(env, EpisodeRequest(number, script.task), speaker, len(script.turns))
            if not outcome.valid or outcome.achieved is not script.succeeds:
                raise RuntimeError(
                    f"{spec.name}: the {script.kind} of task {script.task.id} ended as {outcome.status} "
                    f"({outcome.message or 'no message'}), expected {'success' if script.succeeds else 'no success'}"
                )
            rows.append(
                {
                    "task_id": script.task.id,
                    "group": script.task.group,
                    "seed": script.task.seed,
                    "kind": script.kind,
                    "messages": speaker.messages,
                    "tools": [*speaker.tools],
                    "achieved": outcome.achieved,
                    "reward": outcome.reward,
                }
            )
    finally:
        await env.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status; argparse exits on wrong options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", help="a registered name, or file.py:Name")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--options", type=json.loads, default={}, help="the environment's own options, as JSON")
    parser.add_argument("--request", type=json.loads, default={}, help="fields of DemonstrationRequest, as JSON")
    args = parser.parse_args(argv)
    try:
        spec = build_environment(args.environment, args.options)
        if spec.demonstrate is None:
            raise ValueError(f"the environment {spec.name} has no scripted solver")
        request = DemonstrationRequest(**{"episodes_per_task": 20, "seed": 0, **args.request})
        rows = asyncio.run(played(spec, [*spec.demonstrate(request)]))
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"demonstrations: {error}", file=sys.stderr)
        return 1
    if not rows:
        print(f"demonstrations: the scripted solver of {spec.name} gave none", file=sys.stderr)
        return 1
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} demonstrations, {sum(row['achieved'] for row in rows)} successful: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
