"""Plays one sample, a group of rollouts of one task, in one ``GrpoPool``."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realhf.api.env import RolloutOutcome
from realhf.api.generation import TokenSource
from realhf.api.streaming import ENGINE_ERROR, ENV_ERROR, RolloutLease
from realhf.rollout.agents.episode_agent import EpisodeAgent
from realhf.rollout.client.aws_env import AwsEnv
from realhf.rollout.client.generation_client import NewEnough
from realhf.rollout.client.resuming_env import ResumingEnv
from realhf.rollout.episode.rollout_state import RolloutRequest
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.players.failure_policy import FailurePolicy
from realhf.rollout.players.grpo_pool import GrpoPool

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5


class GroupFailed(RuntimeError):
    """Too few rollouts of a sample are valid. ``outcome`` is a word of ``realhf.api.streaming``."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass
class PlayedGroup:
    """Holds the rollouts of a sample, in order, and how they went: ``failures`` and ``retried`` count by kind, also
    where a retry mended them."""

    outcomes: Sequence[RolloutOutcome]
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)

    def statistics(self) -> dict[str, Any]:
        """Return JSON-able metrics that travel with the sample."""
        valid = [outcome for outcome in self.outcomes if outcome.valid]
        return {
            "episode_s": [round(outcome.timings.get("wall_s", 0.0), 4) for outcome in valid],
            "turns": [len(outcome.turns) for outcome in valid],
            "tokens": sum(sum(outcome.loss_mask) for outcome in valid),
            "group_s": round(self.seconds, 4),
            "failed": dict(self.failures),
            "retried": dict(self.retried),
        }


class Player(Protocol):
    """Plays one sample after another."""

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play one sample. Raises GroupFailed."""
        ...

    async def close(self) -> None:
        """End what the player holds open."""
        ...


class GroupPlayer:
    """Plays samples on the sessions of ``pool``, which it connects when needed and closes. The cache rows ``first_slot
    .. first_slot + pool.size - 1`` are its own."""

    def __init__(
        self,
        pool: GrpoPool,
        agent: EpisodeAgent,
        llm: TokenSource,
        *,
        first_slot: int,
        run_seed: int,
        policy: FailurePolicy,
        chaos: bool,
        patience_s: float,
    ) -> None:
        self._pool, self._agent, self._llm = pool, agent, llm
        self._first_slot, self._run_seed = first_slot, run_seed
        self._policy = policy
        self._chaos, self._patience_s = chaos, patience_s

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play all rollouts at once; the policy decides what a failed one means."""
        began = time.perf_counter()
        played = PlayedGroup([])
        try:
            await self._connected()
            reset = reset_arguments(lease, self._chaos)
            numbers = {id(env): number for number, env in enumerate(self._pool.envs)}

            async def rollout(env: AwsEnv) -> RolloutOutcome:
                return await self._rollout(env, numbers[id(env)], lease, reset, played)

            played.outcomes = [_outcome(end) for end in await self._pool.run_group(rollout)]
        except ConnectionError as error:
            raise GroupFailed(ENV_ERROR, str(error)) from error
        played.seconds = time.perf_counter() - began
        valid = sum(outcome.valid for outcome in played.outcomes)
        if not self._policy.suffices(valid, self._pool.size):
            worst = next(outcome for outcome in played.outcomes if not outcome.valid)
            kind = ENGINE_ERROR if worst.status == "policy_error" else ENV_ERROR
            raise GroupFailed(
                kind, f"{valid} of {len(played.outcomes)} rollouts are valid; {worst.status}: {worst.message}"
            )
        return played

    async def _connected(self) -> None:
        """Wait until there is a session, over the restart of a server that has died: its death is not the sample's
        failure. Raises the last ConnectionError when the patience is over."""
        deadline, pause_s = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                await self._pool.connect()
                if not any(env.usable for env in self._pool.envs):
                    await self._pool.reopen(self._pool.envs[0])
                return
            except ConnectionError:
                if time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """End the sessions."""
        await self._pool.close()

    async def _rollout(
        self, env: AwsEnv, member: int, lease: RolloutLease, reset: Mapping[str, Any], played: PlayedGroup
    ) -> RolloutOutcome:
        tokens = NewEnough(self._llm, lease.version)
        wanted = RolloutRequest(
            member, reset, int(reset["seed"]), sampling_seed=sampling_seed(self._run_seed, lease.id, member)
        )
        attempts = 1 + self._policy.retries
        for attempt in range(attempts):
            session = ResumingEnv(
                env, reset=reset, retries=self._policy.retries, reopen=self._pool.reopen, patience_s=self._patience_s
            )
            outcome = await self._agent.play(session, wanted, tokens, self._first_slot + member)
            played.failures.update(session.failures)
            if session.resumed:
                played.retried["resumed"] += session.resumed
            if outcome.valid:
                break
            played.failures[outcome.status] += 1
            if attempt + 1 < attempts:
                played.retried[outcome.status] += 1
        return outcome


def reset_arguments(lease: RolloutLease, chaos: bool) -> dict[str, Any]:
    """Return the keyword arguments of the environment's reset for a sample of the task curriculum."""
    metadata = lease.metadata
    return {"task": json.loads(metadata["task"]), "seed": int(metadata["task_seed"]), "chaos": chaos}


def _outcome(end: Any) -> RolloutOutcome:
    """Return the outcome of an episode; a session that could not be opened at all ended before the agent had it."""
    if isinstance(end, RolloutOutcome):
        return end
    return RolloutOutcome(end.status, [], [], [], [], [], None, False, 0.0, (), -1, "", 0, message=end.message)


async def within(player: Player, lease: RolloutLease) -> PlayedGroup:
    """Run ``play`` within the sample's deadline. Raises GroupFailed."""
    try:
        async with asyncio.timeout(lease.deadline_s):
            return await player.play(lease)
    except TimeoutError:
        raise GroupFailed("timeout", f"not over after {lease.deadline_s:g} s") from None
