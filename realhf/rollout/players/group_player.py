"""Plays one sample, a group of rollouts of one task, and judges it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from realhf.api.config import GenConfig
from realhf.api.env import AGENT_FAILED, POLICY_FAILED, RolloutOutcome
from realhf.api.environment import EnvironmentSpec, task_of
from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import TokenSource
from realhf.api.streaming import AGENT_ERROR, ENGINE_ERROR, ENV_ERROR, TIMEOUT, EvaluationPart, RolloutLease
from realhf.api.trace import NO_RECORDER, PlayedSample, RolloutRecorder
from realhf.base.dataclass_json import to_json_value
from realhf.rollout.client.generation_client import NewEnough
from realhf.rollout.episode.held_out import episode_results, evaluated_sample, held_out_tasks
from realhf.rollout.episode.request import EpisodeRequest
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.episode.token_texts import TokenTexts
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
    tasks of the environment, for evaluations, and ``pinned`` the tokens that a share of one is played with.
    ``recorder`` keeps the rollouts, with the options ``gen`` of their sampling and the ``texts`` of their tokens."""

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
        recorder: RolloutRecorder = NO_RECORDER,
        gen: GenConfig | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._recorder, self._gen, self._texts = recorder, gen or GenConfig(), texts
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
        try:
            played = await self._player.play(wanted, NewEnough(self._tokens, lease.version))
        except asyncio.CancelledError:
            if time.perf_counter() - began > 0.99 * lease.deadline_s:
                self._keep(lease, [_too_late(request, lease.deadline_s) for request in wanted])
            raise
        self._keep(lease, played.outcomes)
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
        name = "greedy" if part.greedy else "sampled"
        gen = replace(self._gen, temperature=0.0) if part.greedy else self._gen
        for request, outcome in zip(wanted, played.outcomes, strict=True):
            self._recorder.played(
                evaluated_sample(name, part.version, request.task, [outcome], self._held_out.name, gen, self._texts)
            )
        if lost := [outcome for outcome in played.outcomes if outcome.status == POLICY_FAILED]:
            raise GroupFailed(ENGINE_ERROR, shortfall(lost))
        return episode_results(played.outcomes)

    def _keep(self, lease: RolloutLease, outcomes: list[RolloutOutcome]) -> None:
        self._recorder.played(
            PlayedSample(
                lease.id,
                outcomes,
                lease.version + 1,
                env=self._held_out.name,
                sampling=to_json_value(self._gen),
                attempt=lease.attempt,
                texts=self._texts,
            )
        )

    async def close(self) -> None:
        """Close the environments."""
        await self._player.close()


def _too_late(wanted: EpisodeRequest, deadline_s: float) -> RolloutOutcome:
    """Return the outcome of a rollout whose sample was not over in time."""
    task = wanted.task
    return RolloutOutcome(
        TIMEOUT, [], [], [], [], [], None, False, 0.0, (), task.id, task.group, task.seed,
        template=task.template, message=f"the sample was not over after {deadline_s:g} s",
        timings={"wall_s": deadline_s},
    )  # fmt: skip


async def within(player: SamplePlayer, lease: RolloutLease) -> PlayedGroup:
    """Run ``play`` within the sample's deadline. Raises GroupFailed."""
    try:
        async with asyncio.timeout(lease.deadline_s):
            return await player.play(lease)
    except TimeoutError:
        raise GroupFailed(TIMEOUT, f"not over after {lease.deadline_s:g} s") from None
