"""Play the scripted solver of an environment and write the conversations as demonstrations, one
JSON object per line.

    python -m realhf.rollout.demonstrations sql --out episodes.jsonl --request '{"episodes_per_task": 20, "seed": 1}'

All answers come from the environment itself. The program fails if a script does not end as
expected, because a wrong demonstration would teach a wrong habit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import realhf
from realhf.api.chat_template import parse_turn
from realhf.api.environment import (
    AssistantMessage,
    Demonstration,
    DemonstrationRequest,
    Environment,
    EnvironmentSpec,
    Opening,
)
from realhf.api.generation import TokenSource
from realhf.api.rollout import RolloutOutcome
from realhf.api.tool_parser import HERMES
from realhf.base import event_loops
from realhf.env.loader.load import build_environment
from realhf.rollout.episode import EpisodeRequest, play_episode
from realhf.rollout.player import NO_TOKENS, EpisodePlayer

SCRIPT_FAMILY = HERMES
"""Syntax of the tool calls in the turns of a ``Demonstration``, independent of the model that
learns from them."""


def script_message(turn: AssistantMessage) -> dict[str, Any]:
    """Return a turn of a script as a message of the chat API.

    Its tool calls are in ``tool_calls``, so that the chat template of the model that learns from it
    renders them in its own syntax. Raises ValueError for a call that cannot be parsed.
    """
    if not turn.tool_calls:
        return {"role": "assistant", "content": turn.text}
    if problem := next((call.problem for call in turn.tool_calls if call.problem), ""):
        raise ValueError(f"a script writes a call that cannot be read ({problem}): {turn.text!r}")
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    calls = [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for call in turn.tool_calls
    ]
    return {"role": "assistant", "content": thought + turn.content, "tool_calls": calls}


class ScriptedTurns:
    """``TurnSource`` that plays the turns of a demonstration, without tokens, and records the
    conversation."""

    tokens = None
    last_turn_cut = False

    def __init__(self, demonstration: Demonstration) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._turns = [*demonstration.turns]
        self._is_learned = [*(demonstration.learned or (True,) * len(demonstration.turns))]

    def open(self, opening: Opening) -> None:
        """Record the environment's opening messages."""
        self.messages = [dict(message) for message in opening.messages]
        self.tools = opening.tools

    async def next_turn(self) -> AssistantMessage:
        """Return and record the next turn of the script."""
        text = self._turns.pop(0)
        is_learned = self._is_learned.pop(0)
        turn = parse_turn(text, SCRIPT_FAMILY)
        self.messages.append(script_message(turn) | ({} if is_learned else {"train": False}))
        return turn

    def observe(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Record the environment's answer; return whether the script has another turn."""
        self.messages += [dict(message) for message in messages]
        return bool(self._turns)


class ScriptAgent:
    """``EpisodeAgent`` that plays demonstrations and collects a row for each of them: task, kind,
    messages, tools, success and reward."""

    def __init__(self, scripts: Sequence[Demonstration], on_row: Callable[[], None]) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self._scripts = scripts
        self._on_row = on_row

    async def play(
        self, env: Environment, request: EpisodeRequest, llm: TokenSource, slot: int
    ) -> RolloutOutcome:
        """Play the script of a request and add its row. Raises RuntimeError if it does not end as
        expected."""
        script = self._scripts[request.index]
        turns = ScriptedTurns(script)
        outcome = await play_episode(env, request, turns, len(script.turns))
        if not outcome.valid or outcome.achieved is not script.succeeds:
            raise RuntimeError(
                f"the {script.kind} of task {script.task.id} ended as {outcome.status} "
                f"({outcome.message or 'no message'}), expected "
                f"{'success' if script.succeeds else 'no success'}"
            )
        self.rows[request.index] = {
            "task_id": script.task.id,
            "group": script.task.group,
            "seed": script.task.seed,
            "kind": script.kind,
            "messages": turns.messages,
            "tools": [*turns.tools],
            "achieved": outcome.achieved,
            "reward": outcome.reward,
        }
        self._on_row()
        return outcome


async def play_demonstrations(
    spec: EnvironmentSpec, scripts: Sequence[Demonstration]
) -> list[dict[str, Any]]:
    """Play the scripts and return a row for each, in order. Raises RuntimeError if one does not end
    as expected."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"playing demonstrations of {spec.name}", total=len(scripts))
        agent = ScriptAgent(scripts, lambda: progress.advance(bar))
        player = EpisodePlayer(spec, "", agent, 1, patience_s=0.0)
        await player.play_and_close(
            [EpisodeRequest(n, script.task) for n, script in enumerate(scripts)], NO_TOKENS
        )
    return [agent.rows[number] for number in range(len(scripts))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Returns the exit status; argparse exits on wrong options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("environment", help="a registered name, or file.py:Name")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="the environment's own options, as JSON"
    )
    parser.add_argument(
        "--request", type=json.loads, default={}, help="fields of DemonstrationRequest, as JSON"
    )
    args = parser.parse_args(argv)
    try:
        spec = build_environment(args.environment, args.options)
        if spec.demonstrate is None:
            raise ValueError(f"the environment {spec.name} has no scripted solver")
        request = DemonstrationRequest(**{"episodes_per_task": 20, "seed": 0, **args.request})
        rows = event_loops.run(play_demonstrations(spec, [*spec.demonstrate(request)]))
    except (ValueError, TypeError, RuntimeError) as error:
        print(f"demonstrations: {error}", file=sys.stderr)
        return 1
    if not rows:
        print(f"demonstrations: the scripted solver of {spec.name} returned none", file=sys.stderr)
        return 1
    args.out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    print(
        f"{len(rows)} demonstrations, {sum(row['achieved'] for row in rows)} successful: {args.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
