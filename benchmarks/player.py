"""Episodes per second of a trivial environment through the player, with tokens that are there at
once.

    python benchmarks/player.py [--slots 64] [--episodes 4096] [--repeats 5] [--json FILE]

The environment is a class with one tool (docs/extend/environment.md), the tokenizer and chat
template are those of `actor.path=builtin_tiny`, and every episode has one turn with a tool call and
one that ends it. What is measured is the player with all around it: rendering, parsing, the wrapper
of the class and its threads, token buffers, outcomes; in lockstep as in synchronous runs, and free
as in asynchronous ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from realhf.api.chat_template import TemplateChat
from realhf.api.config import BuiltinModelConfig
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.builtin_policy import build_builtin_policy
from realhf.env.loader.load import build_environment
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import EpisodePlayer, PlayedEpisodes, TurnAgent

LEAST = 1500.0
"""Goal, in episodes per second."""
LIMITS = EpisodeLimits(max_turns=4, max_total_tokens=2048, turn_tokens=128)
CALL = '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>'


class Count:
    """Counts; the trivial environment."""

    def reset(self, seed: int = 0) -> str:
        """Begin an episode."""
        self.total = 0
        return "add one"

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what is added
        """
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        """Return 1 when one was added."""
        return float(self.total == 1)


class Immediate:
    """Engine that returns fixed turns without any computation: a tool call in the first turn of an
    episode, and "done" in the second."""

    def __init__(self, chat: TemplateChat) -> None:
        self._turns = [[*chat.encode(text), chat.stop_ids[0]] for text in (CALL, "done")]
        self._spoken: dict[int, int] = {}

    def output(self, request: GenRequest) -> GenOutput:
        """Return the next turn of a slot."""
        turn = self._spoken.get(request.slot, 0)
        self._spoken[request.slot] = 1 - turn
        ids = self._turns[turn]
        return GenOutput(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """See ``BatchEngine``."""
        del round_index
        return [self.output(request) for request in requests]

    def free(self, slots: Sequence[int]) -> None:
        """Do nothing: the turn counter of a slot restarts by itself."""
        del slots


class ImmediateTokens(Immediate):
    """The same engine as a ``TokenSource``."""

    async def generate(self, request: GenRequest) -> GenOutput:  # type: ignore[override]
        """See ``TokenSource``."""
        return self.output(request)


def episodes(count: int) -> list[EpisodeRequest]:
    """Return requests for ``count`` episodes."""
    return [EpisodeRequest(n, Task(f"t-{n}", seed=n), n) for n in range(count)]


def player(spec: EnvironmentSpec, chat: TemplateChat, slots: int) -> EpisodePlayer:
    """Return a player of the environment."""
    return EpisodePlayer(spec, "", TurnAgent(chat, LIMITS, spec.system_prompt), slots)


def in_lockstep(spec: EnvironmentSpec, chat: TemplateChat, slots: int, count: int) -> float:
    """Return the episodes per second when played as in a synchronous run."""
    blocking = BlockingPlayer(player(spec, chat, slots))
    blocking.play(episodes(slots), Immediate(chat))
    began = time.perf_counter()
    checked(blocking.play(episodes(count), Immediate(chat)))
    seconds = time.perf_counter() - began
    blocking.close()
    return count / seconds


async def freely(spec: EnvironmentSpec, chat: TemplateChat, slots: int, count: int) -> float:
    """Return the episodes per second when played as in an asynchronous run."""
    own = player(spec, chat, slots)
    await own.play(episodes(slots), ImmediateTokens(chat))
    began = time.perf_counter()
    checked(await own.play(episodes(count), ImmediateTokens(chat)))
    seconds = time.perf_counter() - began
    await own.close()
    return count / seconds


def checked(played: PlayedEpisodes) -> None:
    """Raise AssertionError unless every episode was played and solved."""
    wrong = [
        outcome for outcome in played.outcomes if outcome.reward != 1.0 or len(outcome.turns) != 2
    ]
    if wrong:
        raise AssertionError(
            f"{len(wrong)} episodes went wrong, e.g. {wrong[0].status}: {wrong[0].message}"
        )


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = build_environment(f"{Path(__file__).resolve()}:Count", {})
    found: dict[str, list[float]] = {"lockstep": [], "free": []}
    with tempfile.TemporaryDirectory() as folder:
        build_builtin_policy(
            None, Path(folder) / "policy", BuiltinModelConfig(hidden_size=32, num_heads=2), 1
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(Path(folder) / "policy")
    for _ in range(args.repeats):
        chat = TemplateChat(tokenizer, system_prompt=None)
        found["lockstep"].append(in_lockstep(spec, chat, args.slots, args.episodes))
        found["free"].append(asyncio.run(freely(spec, chat, args.slots, args.episodes)))
    for name, rates in found.items():
        median = statistics.median(rates)
        verdict = "reached" if median >= LEAST else f"below {LEAST:,.0f}"
        print(
            f"{name:9} {median:7,.0f} episodes/s ({min(rates):,.0f} to {max(rates):,.0f}): "
            f"{verdict}"
        )
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
