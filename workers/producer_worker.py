"""Producer: plays AWS episodes with its own copy of a policy and pushes them to a trajectory
server.

    aws-env --port 8100 --pool-size 8 &
    python -m workers.producer_worker --server http://127.0.0.1:8000 --env-url http://127.0.0.1:8100 --policy FOLDER

It follows the pace that the server reports, waits for the trainer, and registers again when a new
run begins.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import realhf
from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import Model
from realhf.api.rollout import RolloutOutcome, parse_task
from realhf.api.source import SampleResult, SourceItem
from realhf.backends.embedded.compute_threads import threads
from realhf.base import process_clock
from realhf.env.curriculum import TaskSource
from realhf.env.loader.load import build_environment
from realhf.registry import backends
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.interface import ModelEngine
from realhf.rollout.player import EpisodePlayer, TurnAgent
from realhf.scheduler.process import run_guarded
from realhf.trajectory.client import Pace, StaleEpoch, TrajectoryClient
from realhf.trajectory.client.encoding import group_of

logger = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 60.0
"""Seconds that one request to the server may wait until the queue has room."""
WARN_EVERY_S = 10.0
"""Minimum interval in seconds between warnings about failed rounds."""


class AllEpisodesFailed(RuntimeError):
    """Raised when all episodes of a round failed. The message is the failure of the first
    episode."""


class PolicyEpisodes:
    """Player of a policy's episodes on tasks that a curriculum draws, with a pool of sessions. Use
    it as a context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        spec = ModelSpec("producer", options.policy)
        engine = backends.get("torch")().build(spec, seed=options.seed, total_train_steps=1)
        engine.use_threads(threads(torch.get_num_threads()))
        self._model = Model("producer", engine, engine.tokenizer, options.chat_template_kwargs)
        self._gen = GenConfig(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature
        )
        env_options = {"tiers": options.tiers, "tags": options.tags, "pool_size": options.sessions}
        self._tasks = TaskSource(options.seed, "aws", env_options)
        self._chat = TemplateChat(
            engine.tokenizer, system_prompt=None, template_kwargs=options.chat_template_kwargs
        )
        spec = build_environment("aws", env_options)
        limits = EpisodeLimits(options.max_turns, options.max_total_tokens, options.max_new_tokens)
        agent = TurnAgent(self._chat, limits, spec.system_prompt)
        player = EpisodePlayer(
            spec, options.env_url, agent, options.sessions, retries=1, patience_s=60.0
        )
        self._player = BlockingPlayer(player)
        self._rounds = 0

    def __enter__(self) -> PolicyEpisodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._player.close()

    def play(self, count: int) -> list[Mapping[str, Any]]:
        """Play a group of episodes for each of ``count`` tasks, and return the groups in the
        server's format.

        Tasks whose episodes all failed are omitted. Raises AllEpisodesFailed if no task remains.
        """
        items = self._tasks.next_batch(count)
        size = self._options.group_size
        self._rounds += 1
        engine = ModelEngine(
            self._model, self._chat, self._gen, self._options.seed * 1_000_003 + self._rounds
        )
        tasks = [parse_task(item.metadata) for item in items for _ in range(size)]
        requests = [EpisodeRequest(number, task) for number, task in enumerate(tasks)]
        outcomes = self._player.play(requests, engine).outcomes
        outcome_groups = [outcomes[start : start + size] for start in range(0, len(outcomes), size)]
        self._tasks.record(
            [_build_result(item, group) for item, group in zip(items, outcome_groups, strict=True)]
        )
        groups = [
            group
            for item, members in zip(items, outcome_groups, strict=True)
            if (group := group_of(members, template=item.metadata["template"])) is not None
        ]
        if not groups:
            raise AllEpisodesFailed(f"{outcomes[0].status}: {outcomes[0].message}")
        return groups


class Producer:
    """Client that pushes the groups of ``play(count)`` to the server, as an environment of its
    current run.

    ``run``
      produces: pushed groups;
      waits for: room at the server, then the episodes;
      unblocked by: the trainer, which consumes groups; the end of the run.
    """

    def __init__(
        self,
        client: TrajectoryClient,
        play: Callable[[int], list[Mapping[str, Any]]],
        options: argparse.Namespace,
    ) -> None:
        self._client = client
        self._play = play
        self._options = options
        self._failing_since: float | None = None
        """When the current series of failed rounds began (process_clock.now); None if the last
        round succeeded."""
        self._warned_at = -WARN_EVERY_S

    def run(self) -> int:
        """Play until the number ``groups`` of groups is pushed or, if that option is 0, until the
        run has enough. Returns the number of pushed groups.

        Raises TrajectoryError, and RuntimeError if all episodes have failed for ``patience_s``
        seconds.
        """
        pushed = 0
        groups: list[Mapping[str, Any]] = []
        self._register()
        while not self._options.groups or pushed < self._options.groups:
            try:
                pace = self._client.wait_for_room(ROOM_TIMEOUT_S)
                if pace.done:
                    break
                if not pace.pause:
                    groups = groups or self._play_round(self._choose_count(pace, pushed))
                    if groups:
                        self._client.push_many(groups)
                        self._log_push(groups)
                        pushed += len(groups)
                    groups = []
            except StaleEpoch:
                logger.info("a new run has begun; what was just played goes there")
                self._register()
        self._client.disconnect()
        return pushed

    def _play_round(self, count: int) -> list[Mapping[str, Any]]:
        """Play a round of ``count`` tasks and return their groups. Return [] if all episodes
        failed, for example because the environment's server is away.

        Raises RuntimeError if rounds have failed for ``patience_s`` seconds.
        """
        started_at = process_clock.now()
        try:
            groups = self._play(count)
        except AllEpisodesFailed as error:
            since = self._failing_since or started_at
            now = process_clock.now()
            if now - since >= self._options.patience_s:
                text = f"no episode has come to a result for {now - since:.0f} s, at last {error}"
                raise RuntimeError(text) from error
            if now - self._warned_at >= WARN_EVERY_S:
                logger.warning("no episode of this round came to a result: %s", error)
                self._warned_at = now
            self._failing_since = since
            return []
        self._failing_since = None
        return groups

    def _register(self) -> None:
        options = self._options
        env = self._client.register_env(
            options.name,
            group_size=options.group_size,
            max_token_length=options.max_total_tokens,
            wait_s=options.patience_s,
        )
        logger.info(
            "environment %s (%d) of a run of %d steps", env.wandb_name, env.env_id, env.num_steps
        )

    def _choose_count(self, pace: Pace, pushed: int) -> int:
        """Return the number of groups to play in the next round.

        It is limited by the number of groups that the sessions can play at once, the number that
        remains to be pushed, and the server's pace, but is at least 1.
        """
        at_once = max(1, self._options.sessions // self._options.group_size)
        remaining = self._options.groups - pushed if self._options.groups else at_once
        return max(1, min(at_once, remaining, pace.workers))

    @staticmethod
    def _log_push(groups: Sequence[Mapping[str, Any]]) -> None:
        scores = [score for group in groups for score in group["scores"]]
        logger.info(
            "pushed %d groups, mean score %.3f", len(groups), sum(scores) / max(1, len(scores))
        )


def _build_result(item: SourceItem, outcomes: Sequence[RolloutOutcome]) -> SampleResult:
    rewards = [outcome.reward if outcome.valid else None for outcome in outcomes]
    return SampleResult(item.id, item.metadata, rewards, [outcome.achieved for outcome in outcomes])


def build_parser() -> argparse.ArgumentParser:
    """Return a parser for the producer's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    add = parser.add_argument
    add("--server", required=True, help="URL of the trajectory server")
    add("--token-file", default="", help="file with the server's bearer token")
    add(
        "--ca-file",
        default="",
        help="PEM file of the CA that verifies an https server (for the environment's: "
        "SSL_CERT_FILE)",
    )
    add("--env-url", required=True, help="URL of an environment server (aws-env)")
    add("--policy", required=True, help="folder or hub id of a policy with the trainer's tokenizer")
    add("--name", default="aws", help="name of this environment at the server")
    add("--groups", type=int, default=0, help="groups to push; 0: until the run has enough")
    add("--group-size", type=int, default=8, help="episodes of one task")
    add("--sessions", type=int, default=8, help="environment sessions played at once")
    add("--max-turns", type=int, default=4)
    add("--max-total-tokens", type=int, default=640)
    add("--max-new-tokens", type=int, default=40)
    add("--temperature", type=float, default=1.0, help="must be the trainer's gen.temperature")
    add(
        "--chat-template-kwargs",
        type=json.loads,
        default={},
        metavar="JSON",
        help="variables of the policy's chat template, the trainer's actor.chat_template_kwargs",
    )
    add("--tiers", nargs="+", default=["warmup", "beginner", "intermediate"])
    add("--tags", nargs="*", default=["starter"])
    add(
        "--patience-s",
        type=float,
        default=600.0,
        help="seconds to wait for the server, the trainer and an episode that comes to a result",
    )
    add("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Play and push until the groups are pushed or the run has ended. Returns the exit code."""
    options = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

    def work() -> None:
        token = (
            Path(options.token_file).read_text(encoding="utf-8").strip()
            if options.token_file
            else ""
        )
        with (
            PolicyEpisodes(options) as episodes,
            TrajectoryClient(
                options.server, token=token, retry_for_s=options.patience_s, ca_file=options.ca_file
            ) as client,
        ):
            print(f"pushed {Producer(client, episodes.play, options).run()} groups", flush=True)

    return run_guarded(work)


if __name__ == "__main__":
    sys.exit(main())
