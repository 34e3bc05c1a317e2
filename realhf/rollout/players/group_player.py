"""Plays one sample, a group of rollouts of one task, and judges it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from realhf.api.env import AGENT_FAILED, POLICY_FAILED, RolloutOutcome
from realhf.api.environment import EnvironmentSpec, task_of
from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import TokenSource
from realhf.api.streaming import AGENT_ERROR, ENGINE_ERROR, ENV_ERROR, TIMEOUT, EvaluationPart, RolloutLease
from realhf.rollout.client.generation_client import NewEnough
from realhf.rollout.episode.held_out import episode_results, held_out_tasks
from realhf.rollout.episode.request import EpisodeRequest
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.players.failure_policy import FailurePolicy, GroupFailed, shortfall
from realhf.rollout.players.player import Player

_OUTCOMES = MappingProxyType({POLICY_FAILED: ENGINE_ERROR, AGENT_FAILED: AGENT_ERROR})


@dataclass
class PlayedGroup:
    """Holds the rollouts of a sample, in order, and how they went: ``failures`` and ``retried`` count by kind, also
    where a retry mended them."""

    outcomes: list[RolloutOutcome]
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)

    def statistics(self) -> dict[str, Any]:
        """Return JSON-able metrics that travel with the sample."""
        valid = [outcome for outcome in self.outcomes if outcome.valid]
        return {
            "episode_s": [round(outcome.timings.get("wall_s", 0.0), 4) for outcome in valid],
            "turns": [len(outcome.turns) for outcome in valid],
            "tokens": sum(sum(row.loss_mask) for outcome in valid for row in (outcome, *outcome.branches)),
            "group_s": round(self.seconds, 4),
            "failed": dict(self.failures),
            "retried": dict(self.retried),
        }


class SamplePlayer(Protocol):
    """Plays one sample after another."""

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play one sample. Raises GroupFailed."""
        ...

    async def evaluate(self, part: EvaluationPart) -> list[EpisodeResult]:
        """Play a share of a held-out evaluation. Raises GroupFailed."""
        ...

    async def close(self) -> None:
        """End what the player holds open."""
        ...


class GroupPlayer:
    """Plays samples on the slots of ``player``: ``group_size`` rollouts of each at once. ``run_seed`` decides, with the
    sample's id, the random numbers of their tokens; ``policy`` decides what a failed rollout means. ``held_out``: the
    tasks of the environment, for evaluations, and ``pinned`` the tokens that a share of one is played with."""

    def __init__(
        self,
        player: Player,
        tokens: TokenSource,
        *,
        group_size: int,
        run_seed: int,
        policy: FailurePolicy,
        held_out: EnvironmentSpec,
        pinned: Callable[[EvaluationPart], TokenSource],
    ) -> None:
        self._player, self._tokens, self._held_out, self._pinned = player, tokens, held_out, pinned
        self._group_size, self._run_seed, self._policy = group_size, run_seed, policy

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play all rollouts at once. None of their tokens comes from weights older than the sample's admission."""
        began = time.perf_counter()
        task = task_of(lease.metadata)
        wanted = [
            EpisodeRequest(member, task, sampling_seed(self._run_seed, lease.id, member))
            for member in range(self._group_size)
        ]
        played = await self._player.play(wanted, NewEnough(self._tokens, lease.version))
        group = PlayedGroup(played.outcomes, time.perf_counter() - began, played.failures, played.retried)
        valid = sum(outcome.valid for outcome in group.outcomes)
        if not self._policy.suffices(valid, self._group_size):
            worst = next(outcome for outcome in group.outcomes if not outcome.valid)
            raise GroupFailed(_OUTCOMES.get(worst.status, ENV_ERROR), shortfall(group.outcomes))
        return group

    async def evaluate(self, part: EvaluationPart) -> list[EpisodeResult]:
        """Play a share of a held-out evaluation, each task once. An episode that its environment fails is a result;
        GroupFailed is raised when there are no tokens of these weights any more."""
        tasks = held_out_tasks(self._held_out, part.split, part.episodes_per_task, part.templates)
        wanted = [
            EpisodeRequest(
                index, task, sampling_seed(self._run_seed, f"held out/{part.greedy:d}/{task.id}/{task.seed}", 0)
            )
            for index, task in enumerate(tasks[part.part :: part.parts])
        ]
        played = await self._player.play(wanted, self._pinned(part))
        if lost := [outcome for outcome in played.outcomes if outcome.status == POLICY_FAILED]:
            raise GroupFailed(ENGINE_ERROR, shortfall(lost))
        return episode_results(played.outcomes)

    async def close(self) -> None:
        """Close the environments."""
        await self._player.close()


async def within(player: SamplePlayer, lease: RolloutLease) -> PlayedGroup:
    """Run ``play`` within the sample's deadline. Raises GroupFailed."""
    try:
        async with asyncio.timeout(lease.deadline_s):
            return await player.play(lease)
    except TimeoutError:
        raise GroupFailed(TIMEOUT, f"not over after {lease.deadline_s:g} s") from None
