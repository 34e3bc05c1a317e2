"""Plays one sample, a group of rollouts of one task, judges it, and decides what a failed rollout means for it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from realhf.api.calls import AGENT_ERROR, ENGINE_ERROR, ENV_ERROR, TIMEOUT, EvaluationPart, RolloutLease
from realhf.api.config import ON_FAILURE, GenConfig
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import TokenSource
from realhf.api.rollout import AGENT_FAILED, POLICY_FAILED, RolloutOutcome, parse_task
from realhf.api.trace import NO_RECORDER, PlayedSample, RolloutRecorder
from realhf.base.dataclass_json import to_json_value
from realhf.rollout.episode import EpisodeRequest, outcome_of
from realhf.rollout.generation_client import ConstrainedTokens
from realhf.rollout.player import Player


def sampling_seed(run_seed: int, sample_id: str, member: int) -> int:
    """Return 63 bits that depend on these three alone: a rollout draws the same numbers wherever, whenever and beside
    whatever it is played, so that a synchronous and an asynchronous run sample alike."""
    text = f"{run_seed}/{sample_id}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class TokenTexts:
    """Decodes tokens one by one with ``tokenizer``, each once. A token that holds a part of a character is shown as a
    replacement character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        known = self._known
        for token in set(ids) - known.keys():
            known[token] = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return [known[token] for token in ids]


def held_out_tasks(spec: EnvironmentSpec, split: str, episodes_per_task: int, templates: int) -> list[Task]:
    """Return instances of a split, those of a template one after the other with the seeds 0, 1, ...; of more than
    ``templates`` templates as many are taken, spread evenly."""
    tasks = spec.tasks(split)
    names = [*tasks.group_of]
    if len(names) > templates:
        names = [names[place * len(names) // templates] for place in range(templates)]
    drawn = [(name, tasks.instantiate(name, seed)) for name in names for seed in range(episodes_per_task)]
    return [replace(task, template=task.template or name) for name, task in drawn]


@dataclass(frozen=True)
class RolloutKeeper:
    """Hands played rollouts of the environment ``env`` to a ``recorder``, with the options ``gen`` of their sampling
    and the ``texts`` of their tokens."""

    recorder: RolloutRecorder
    env: str
    gen: GenConfig
    texts: TokenTexts | None = None

    def trained(self, id: str, rollouts: Sequence[RolloutOutcome], step: int, attempt: int = 0) -> None:
        """Keep the rollouts of a sample of train step ``step``."""
        self._keep(PlayedSample(id, rollouts, step, attempt=attempt), self.gen)

    def evaluated(self, task: Task, rollouts: Sequence[RolloutOutcome], step: int, *, greedy: bool) -> None:
        """Keep the episodes of one task of an evaluation after ``step`` steps, which plays the same tasks each time."""
        name, instance = "greedy" if greedy else "sampled", f"{task.id}/{task.seed}"
        gen = replace(self.gen, temperature=0.0) if greedy else self.gen
        self._keep(PlayedSample(f"eval/{name}/{step}/{instance}", rollouts, step, f"eval/{name}", key=instance), gen)

    def _keep(self, sample: PlayedSample, gen: GenConfig) -> None:
        self.recorder.played(replace(sample, env=self.env, sampling=to_json_value(gen), texts=self.texts))


def episode_results(outcomes: Sequence[RolloutOutcome]) -> list[EpisodeResult]:
    """Return what an evaluation keeps of episodes."""
    return [
        EpisodeResult(
            outcome.group,
            outcome.valid,
            bool(outcome.achieved),
            float(outcome.reward or 0.0),
            len(outcome.turns),
            out_of_turns=outcome.out_of_turns,
        )
        for outcome in outcomes
    ]


class GroupFailed(RuntimeError):
    """Too few rollouts of a sample are valid, or it was not over in time. ``outcome`` is a word of
    ``realhf.api.calls``."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class FailurePolicy:
    """``retries``: how often a rollout that failed is played again, and its lost session resumed. ``least``: how many
    valid rollouts suffice for a group; None is all."""

    retries: int
    least: int | None = None

    def suffices(self, group: Sequence[RolloutOutcome]) -> bool:
        """Return whether enough rollouts of a group are valid."""
        valid, size = sum(outcome.valid for outcome in group), len(group)
        return valid >= (size if self.least is None else min(self.least, size))


def first_failed(group: Sequence[RolloutOutcome]) -> RolloutOutcome:
    """Return the first rollout of a group that is not valid."""
    return next(outcome for outcome in group if not outcome.valid)


def shortfall(group: Sequence[RolloutOutcome]) -> str:
    """Say how many rollouts of a group are valid, and what became of the first that is not."""
    worst, valid = first_failed(group), sum(outcome.valid for outcome in group)
    return f"{valid} of {len(group)} rollouts are valid; {worst.status}: {worst.message}"


def failure_policy(name: str, retries: int, min_group_size: int) -> FailurePolicy:
    """Return the policy that the configuration names. Raises ValueError for an unknown one."""
    if name == "fail_fast":
        return FailurePolicy(0)
    if name == "retry":
        return FailurePolicy(retries)
    if name == "minimum_group":
        return FailurePolicy(retries, least=min_group_size)
    raise ValueError(f"rollout.on_failure={name!r}: {', '.join(ON_FAILURE)}")


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
            "out_of_turns": [int(outcome.out_of_turns) for outcome in valid],
            "tokens": sum(sum(row.loss_mask) for outcome in valid for row in (outcome, *outcome.branches)),
            "group_s": round(self.seconds, 4),
            "failed": dict(self.failures),
            "retried": dict(self.retried),
        }


class GroupPlayer:
    """Plays samples on the slots of ``player``: ``group_size`` rollouts of each at once. ``run_seed`` decides, with the
    sample's id, the random numbers of their tokens; ``policy`` decides what a failed rollout means. ``held_out``: the
    tasks of the environment, for evaluations, and ``pinned`` the tokens that a share of one is played with.
    ``recorder``, ``gen``, ``texts``: see ``RolloutKeeper``."""

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
        self._keeper = RolloutKeeper(recorder, held_out.name, gen or GenConfig(), texts)
        self._player, self._tokens, self._held_out, self._pinned = player, tokens, held_out, pinned
        self._group_size, self._run_seed, self._policy = group_size, run_seed, policy

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play all rollouts at once. None of their tokens comes from weights older than the sample's admission."""
        began = time.perf_counter()
        task = parse_task(lease.metadata)
        wanted = [
            EpisodeRequest(member, task, sampling_seed(self._run_seed, lease.id, member))
            for member in range(self._group_size)
        ]
        try:
            played = await self._player.play(wanted, ConstrainedTokens(self._tokens, min_version=lease.version))
        except asyncio.CancelledError:
            if time.perf_counter() - began > 0.99 * lease.deadline_s:
                late, timings = f"the sample was not over after {lease.deadline_s:g} s", {"wall_s": lease.deadline_s}
                lost = [outcome_of(task, None, TIMEOUT, message=late, timings=timings) for _ in wanted]
                self._keeper.trained(lease.id, lost, lease.version + 1, lease.attempt)
            raise
        self._keeper.trained(lease.id, played.outcomes, lease.version + 1, lease.attempt)
        if not self._policy.suffices(played.outcomes):
            status = first_failed(played.outcomes).status
            raise GroupFailed(_OUTCOMES.get(status, ENV_ERROR), shortfall(played.outcomes))
        return PlayedGroup(played.outcomes, time.perf_counter() - began, played.failures, played.retried)

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
        for request, outcome in zip(wanted, played.outcomes, strict=True):
            self._keeper.evaluated(request.task, [outcome], part.version, greedy=part.greedy)
        if lost := [outcome for outcome in played.outcomes if outcome.status == POLICY_FAILED]:
            raise GroupFailed(ENGINE_ERROR, shortfall(lost))
        return episode_results(played.outcomes)

    async def close(self) -> None:
        """Close the environments."""
        await self._player.close()


async def within(player: GroupPlayer, lease: RolloutLease) -> PlayedGroup:
    """Run ``play`` within the sample's deadline. Raises GroupFailed."""
    try:
        async with asyncio.timeout(lease.deadline_s):
            return await player.play(lease)
    except TimeoutError:
        raise GroupFailed(TIMEOUT, f"not over after {lease.deadline_s:g} s") from None
