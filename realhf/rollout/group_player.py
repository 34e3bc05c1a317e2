"""Player of samples. A sample is a group of rollouts of one task; a policy decides what to do about
failed rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from realhf.api.calls import (
    AGENT_ERROR,
    ENGINE_ERROR,
    ENV_ERROR,
    TIMEOUT,
    EvaluationPart,
    RolloutLease,
)
from realhf.api.config import ON_FAILURE, GenConfig
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.evaluation import EpisodeResult
from realhf.api.generation import TokenSource
from realhf.api.rollout import AGENT_FAILED, POLICY_FAILED, RolloutOutcome, parse_task
from realhf.api.trace import NO_RECORDER, PlayedSample, RolloutRecorder
from realhf.base.dataclass_json import to_json_value
from realhf.env.loader.mixture import MixtureTasks
from realhf.rollout.episode import EpisodeRequest, make_outcome
from realhf.rollout.generation_client import ConstrainedTokens
from realhf.rollout.player import EpisodePlayer


def sampling_seed(run_seed: int, sample_id: str, member: int) -> int:
    """Return a 63-bit seed that depends only on the arguments.

    A rollout therefore draws the same random numbers regardless of where, when and with which other
    rollouts it is played, so that synchronous and asynchronous runs sample alike.
    """
    text = f"{run_seed}/{sample_id}/{member}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class TokenTexts:
    """Decoder of single tokens with a cache, based on ``tokenizer``. A token that holds only part
    of a character is decoded to the replacement character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        known = self._known
        for token in set(ids) - known.keys():
            known[token] = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return [known[token] for token in ids]


def held_out_tasks(
    spec: EnvironmentSpec, split: str, episodes_per_task: int, templates: int
) -> list[Task]:
    """Return the task instances of a split: for each template, those with the seeds 0, 1, ...,
    ``episodes_per_task`` - 1.

    If there are more than ``templates`` templates, that many evenly spaced ones are selected. Of a
    mixture, that is the number for each environment.
    """
    tasks = spec.tasks(split)
    members = tasks.parts.values() if isinstance(tasks, MixtureTasks) else (tasks,)
    instances = []
    for member in members:
        names = [*member.group_of]
        if len(names) > templates:
            names = [names[number * len(names) // templates] for number in range(templates)]
        instances += [
            (name, member.instantiate(name, seed))
            for name in names
            for seed in range(episodes_per_task)
        ]
    return [replace(task, template=task.template or name) for name, task in instances]


@dataclass(frozen=True)
class RolloutRecording:
    """Recorder of the rollouts of an environment or a mixture."""

    recorder: RolloutRecorder
    """Destination of the records."""
    env: str
    """Name of the environment. Rollouts of a mixture are recorded under the name of their own."""
    gen: GenConfig
    """Sampling options used in training."""
    texts: TokenTexts | None = None
    """Decoder of the rollouts' tokens."""

    def record_training(
        self, id: str, rollouts: Sequence[RolloutOutcome], step: int, attempt: int = 0
    ) -> None:
        """Record the rollouts of a sample of train step ``step``."""
        self._record(PlayedSample(id, rollouts, step, attempt=attempt), self.gen)

    def record_evaluation(
        self, task: Task, rollouts: Sequence[RolloutOutcome], step: int, *, greedy: bool
    ) -> None:
        """Record the episodes of one task in an evaluation after ``step`` steps. Every evaluation
        has the same tasks."""
        name = "greedy" if greedy else "sampled"
        instance = f"{task.id}/{task.seed}"
        gen = replace(self.gen, temperature=0.0) if greedy else self.gen
        self._record(
            PlayedSample(
                f"eval/{name}/{step}/{instance}", rollouts, step, f"eval/{name}", key=instance
            ),
            gen,
        )

    def _record(self, sample: PlayedSample, gen: GenConfig) -> None:
        env = next((each.environment for each in sample.rollouts if each.environment), self.env)
        self.recorder.record_played(
            replace(sample, env=env, sampling=to_json_value(gen), texts=self.texts)
        )


def episode_results(outcomes: Sequence[RolloutOutcome]) -> list[EpisodeResult]:
    """Convert outcomes of episodes to results for an evaluation's report."""
    return [
        EpisodeResult(
            outcome.group,
            outcome.valid,
            bool(outcome.achieved),
            float(outcome.reward or 0.0),
            len(outcome.turns),
            out_of_turns=outcome.out_of_turns,
            environment=outcome.environment,
        )
        for outcome in outcomes
    ]


class GroupFailed(RuntimeError):
    """Error: too few rollouts of a sample are valid, or its deadline has passed.

    ``outcome`` is one of the failure outcomes of ``realhf.api.calls``.
    """

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class FailurePolicy:
    """Rules for handling failed rollouts."""

    retries: int
    """Number of times that a failed rollout is played again, and that a lost session is resumed."""
    min_valid: int | None = None
    """Minimum number of valid rollouts in a group; None: all must be valid."""

    def accepts(self, group: Sequence[RolloutOutcome]) -> bool:
        """Return whether a group has enough valid rollouts."""
        n_valid = sum(outcome.valid for outcome in group)
        size = len(group)
        return n_valid >= (size if self.min_valid is None else min(self.min_valid, size))


def find_first_failed(group: Sequence[RolloutOutcome]) -> RolloutOutcome:
    """Return the first rollout of a group that is not valid."""
    return next(outcome for outcome in group if not outcome.valid)


def describe_shortfall(group: Sequence[RolloutOutcome]) -> str:
    """Return an error text with the number of valid rollouts of a group and the error of the first
    invalid one."""
    failed = find_first_failed(group)
    n_valid = sum(outcome.valid for outcome in group)
    return f"{n_valid} of {len(group)} rollouts are valid; {failed.status}: {failed.message}"


def failure_policy(name: str, retries: int, min_group_size: int) -> FailurePolicy:
    """Return the policy with the given configuration name. Raises ValueError for an unknown one."""
    if name == "fail_fast":
        return FailurePolicy(0)
    if name == "retry":
        return FailurePolicy(retries)
    if name == "minimum_group":
        return FailurePolicy(retries, min_valid=min_group_size)
    raise ValueError(f"rollout.on_failure={name!r}: {', '.join(ON_FAILURE)}")


_OUTCOMES = MappingProxyType({POLICY_FAILED: ENGINE_ERROR, AGENT_FAILED: AGENT_ERROR})
"""``GroupFailed.outcome`` by the status of a failed rollout; ``ENV_ERROR`` for all others."""


@dataclass
class PlayedGroup:
    """Played rollouts of one sample."""

    outcomes: list[RolloutOutcome]
    """Outcomes of the members, in order."""
    seconds: float = 0.0
    """Duration of the group, in seconds."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failures by kind, including those that a retry repaired."""
    retried: Counter[str] = field(default_factory=Counter)
    """Number of retries by kind."""

    def statistics(self) -> dict[str, Any]:
        """Return metrics as JSON types, to be stored in the sample's metadata."""
        valid = [outcome for outcome in self.outcomes if outcome.valid]
        return {
            "episode_s": [round(outcome.timings.get("wall_s", 0.0), 4) for outcome in valid],
            "turns": [len(outcome.turns) for outcome in valid],
            "out_of_turns": [int(outcome.out_of_turns) for outcome in valid],
            "broken_rules": [
                outcome.broken_rules for outcome in valid if outcome.broken_rules is not None
            ],
            "tokens": sum(
                sum(row.loss_mask) for outcome in valid for row in (outcome, *outcome.branches)
            ),
            "group_s": round(self.seconds, 4),
            "failed": dict(self.failures),
            "retried": dict(self.retried),
        }


class GroupPlayer:
    """Player of samples on the slots of ``player``, which plays the ``group_size`` rollouts of a
    sample at once.

    Args:
        player: Plays the episodes.
        group_size: Number of rollouts of a sample.
        run_seed: Determines, with the sample's id, the random numbers of the tokens.
        policy: Rules for failed rollouts.
        held_out: The environment with its evaluation tasks.
        pinned: Function that returns the source of tokens for a share of an evaluation.
        recorder, gen, texts: See ``RolloutRecording``.
    """

    def __init__(
        self,
        player: EpisodePlayer,
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
        self._recording = RolloutRecording(recorder, held_out.name, gen or GenConfig(), texts)
        self._player = player
        self._tokens = tokens
        self._held_out = held_out
        self._pinned = pinned
        self._group_size = group_size
        self._run_seed = run_seed
        self._policy = policy

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        """Play all rollouts of a sample at once, with weights no older than the sample's admission
        version.

        Raises GroupFailed if too few of them are valid.
        """
        started_at = time.perf_counter()
        task = parse_task(lease.metadata)
        requests = [
            EpisodeRequest(member, task, sampling_seed(self._run_seed, lease.id, member))
            for member in range(self._group_size)
        ]
        try:
            played = await self._player.play(
                requests, ConstrainedTokens(self._tokens, min_version=lease.version)
            )
        except asyncio.CancelledError:
            # cancelled by the deadline: record it
            if time.perf_counter() - started_at > 0.99 * lease.deadline_s:
                message = f"the sample was not over after {lease.deadline_s:g} s"
                timings = {"wall_s": lease.deadline_s}
                lost = [
                    make_outcome(task, None, TIMEOUT, message=message, timings=timings)
                    for _ in requests
                ]
                self._recording.record_training(lease.id, lost, lease.version + 1, lease.attempt)
            raise
        self._recording.record_training(lease.id, played.outcomes, lease.version + 1, lease.attempt)
        if not self._policy.accepts(played.outcomes):
            status = find_first_failed(played.outcomes).status
            raise GroupFailed(_OUTCOMES.get(status, ENV_ERROR), describe_shortfall(played.outcomes))
        return PlayedGroup(
            played.outcomes, time.perf_counter() - started_at, played.failures, played.retried
        )

    async def evaluate(self, part: EvaluationPart) -> list[EpisodeResult]:
        """Play a share of a held-out evaluation, each task once.

        An episode whose environment fails is also a result. Raises GroupFailed if no engine has the
        share's weights any more.
        """
        tasks = held_out_tasks(self._held_out, part.split, part.episodes_per_task, part.templates)
        requests = [
            EpisodeRequest(
                index,
                task,
                sampling_seed(self._run_seed, f"held out/{part.greedy:d}/{task.id}/{task.seed}", 0),
            )
            for index, task in enumerate(tasks[part.part :: part.parts])
        ]
        played = await self._player.play(requests, self._pinned(part))
        for request, outcome in zip(requests, played.outcomes, strict=True):
            self._recording.record_evaluation(
                request.task, [outcome], part.version, greedy=part.greedy
            )
        if lost := [outcome for outcome in played.outcomes if outcome.status == POLICY_FAILED]:
            raise GroupFailed(ENGINE_ERROR, describe_shortfall(lost))
        return episode_results(played.outcomes)

    async def close(self) -> None:
        """Close the environments."""
        await self._player.close()


async def play_within_deadline(player: GroupPlayer, lease: RolloutLease) -> PlayedGroup:
    """Play a sample within its deadline. Raises GroupFailed, also after the deadline."""
    try:
        async with asyncio.timeout(lease.deadline_s):
            return await player.play(lease)
    except TimeoutError:
        raise GroupFailed(TIMEOUT, f"not over after {lease.deadline_s:g} s") from None
