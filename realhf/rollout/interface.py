"""Interface of the ``actor_gen`` model function call, in which the actor plays groups of multi-turn
episodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realhf.api.chat_template import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.environment import EnvironmentSpec, Task
from realhf.api.evaluation import evaluation_report
from realhf.api.experiment import HeldOutOptions, RolloutOptions
from realhf.api.model import MEANS_OVER, CallContext, GenOutput, GenRequest, Model
from realhf.api.rollout import RolloutOutcome, parse_task
from realhf.api.sample import SequenceSample
from realhf.env.loader.load import build_environment
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.feedback import Feedback
from realhf.rollout.group_player import (
    FailurePolicy,
    RolloutRecording,
    TokenTexts,
    describe_shortfall,
    episode_results,
    failure_policy,
    held_out_tasks,
    sampling_seed,
)
from realhf.rollout.player import EpisodePlayer, TurnAgent, check_whole_distribution
from realhf.rollout.rollout_sample import outcomes_to_sample, transcript


class ModelEngine:
    """``BatchEngine`` that uses a model's generation engine, with a seed."""

    def __init__(self, model: Model, chat: TemplateChat, config: GenConfig, seed: int) -> None:
        self.seconds = 0.0
        """Total time of generation, in seconds."""
        self.tokens = 0
        """Number of tokens sampled."""
        self._generator = model.engine.generator()
        self.context_limit = self._generator.context_limit
        self._stop_ids = chat.stop_ids
        self._config = config
        self._seed = seed

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Generate one batch. The seed of each batch is derived from ``round_index``."""
        started_at = time.perf_counter()
        outputs = self._generator.generate(
            requests,
            self._config,
            stop_ids=self._stop_ids,
            seed=(self._seed * 1_000_003 + round_index) % 2**63,
        )
        self.seconds += time.perf_counter() - started_at
        self.tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def free(self, slots: Sequence[int]) -> None:
        """Free the cache entries of these slots, whose episodes have finished."""
        self._generator.free(slots)


class EnvRolloutInterface:
    """Interface whose ``generate`` plays the groups of a training step and whose ``evaluate`` plays
    held-out episodes of every task.

    ``args`` are ``RolloutOptions.to_args()``; raises TypeError for an unknown one.
    """

    def __init__(self, **args: Any) -> None:
        self._options = RolloutOptions.from_args(args)
        self._policy: FailurePolicy = failure_policy(
            self._options.on_failure, self._options.retries, self._options.min_group_size
        )
        self._spec: EnvironmentSpec | None = None
        self._chat: TemplateChat | None = None
        self._player: BlockingPlayer | None = None
        self._texts: TokenTexts | None = None

    def generate(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, Any]]:
        """Play ``group_size`` rollouts of each sample's task (metadata: see ``parse_task``).

        Raises ValueError if ``gen`` truncates the distribution, because such tokens cannot be
        trained on, and RuntimeError if the failure policy ends the run.
        """
        options = self._options
        check_whole_distribution(options.gen)
        tasks = [
            parse_task({name: values[row] for name, values in sample.metadata.items()})
            for row in range(len(sample.ids))
        ]
        context.progress.total = len(tasks) * options.group_size
        seeds = [
            [sampling_seed(options.seed, i, member) for member in range(options.group_size)]
            for i in sample.ids
        ]
        groups, stats = self._play(model, tasks, options.gen, options.group_size, context, seeds)
        for sample_id, group in zip(sample.ids, groups, strict=True):
            self._recording(context).record_training(sample_id, group, context.step + 1)
        # With a minimum group size, ``outcomes_to_sample`` leaves out groups with fewer valid
        # rollouts.
        for group in groups:
            if self._policy.min_valid is None and not self._policy.accepts(group):
                raise RuntimeError(
                    f"{describe_shortfall(group)} (rollout.on_failure=minimum_group would leave "
                    f"such groups out)"
                )
        assert self._chat is not None
        if (feedback := Feedback.from_options(options, self._chat)) is not None:
            groups = [feedback(group) for group in groups]
        stats["episodes"] = [
            transcript(group[0], header=f"step {context.step + 1}, sample {sample_id}")
            for sample_id, group in list(zip(sample.ids, groups, strict=True))[
                : options.transcripts
            ]
        ]
        return outcomes_to_sample(
            sample.ids,
            groups,
            min_group_size=options.min_group_size,
            turns=options.turn_rewards,
            feedback=bool(options.feedback),
        ), stats

    def evaluate(
        self, model: Model, args: Mapping[str, Any], context: CallContext
    ) -> dict[str, Any]:
        """Measure success on held-out instances, sampled and greedy.

        ``args`` are ``HeldOutOptions.to_args()``. Returns {"sampled": {"overall": {success,
        episodes, ...}, group: ...}, "greedy": {...}}.
        """
        options = self._options
        held_out = HeldOutOptions.from_args(args)
        report = {}
        passes = [
            (greedy, held_out_tasks(self._environment(), held_out.split, count, held_out.templates))
            for greedy, count in (
                (False, held_out.episodes_per_task),
                (True, held_out.greedy_episodes_per_task),
            )
            if count > 0
        ]
        context.progress.total = sum(len(tasks) for _, tasks in passes)
        for greedy, tasks in passes:
            gen = replace(options.gen, temperature=0.0) if greedy else options.gen
            groups, _ = self._play(model, tasks, gen, 1, context)
            for task, group in zip(tasks, groups, strict=True):
                self._recording(context).record_evaluation(task, group, context.step, greedy=greedy)
            results = episode_results([outcome for group in groups for outcome in group])
            report["greedy" if greedy else "sampled"] = evaluation_report(results, context.step)
        return report

    def close(self) -> None:
        """Close the environments."""
        if self._player is not None:
            self._player.close()
            self._player = None

    def _recording(self, context: CallContext) -> RolloutRecording:
        return RolloutRecording(
            context.recorder, self._environment().name, self._options.gen, self._texts
        )

    def _environment(self) -> EnvironmentSpec:
        if self._spec is None:
            self._spec = build_environment(
                self._options.environment, self._options.environment_options
            )
        return self._spec

    def _play(
        self,
        model: Model,
        tasks: Sequence[Task],
        gen: GenConfig,
        group: int,
        context: CallContext,
        sampling_seeds: Sequence[Sequence[int]] | None = None,
    ) -> tuple[list[list[RolloutOutcome]], dict[str, Any]]:
        """Play ``group`` episodes of every task; return the outcomes of each task, and
        statistics."""
        player = self._get_player(model, context)
        assert self._chat is not None
        engine = ModelEngine(model, self._chat, gen, context.seed)
        longest = self._options.max_total_tokens
        if longest > engine.context_limit:
            raise ValueError(
                f"rollout.max_total_tokens={longest}: the context of the model holds "
                f"{engine.context_limit} tokens"
            )
        requests = [
            EpisodeRequest(
                number * group + member,
                task,
                sampling_seeds[number][member] if sampling_seeds else None,
            )
            for number, task in enumerate(tasks)
            for member in range(group)
        ]

        def count_finished() -> None:
            context.progress.finished += 1

        started_at = time.perf_counter()
        played = player.play(requests, engine, on_finished=count_finished)
        total = time.perf_counter() - started_at
        stats: dict[str, Any] = rollout_statistics(played.outcomes)
        stats |= {
            "rollout_seconds": total,
            "generation_seconds": engine.seconds,
            "env_seconds": total - engine.seconds,
            "generated_tokens": engine.tokens,
            **{f"retried/{kind}": float(count) for kind, count in played.retried.items()},
        }
        return [
            played.outcomes[start : start + group] for start in range(0, len(requests), group)
        ], stats

    def _get_player(self, model: Model, context: CallContext) -> BlockingPlayer:
        """Return the player; the first call creates it."""
        if self._player is None:
            spec = self._environment()
            options = self._options
            self._chat = TemplateChat(
                model.tokenizer,
                system_prompt=None,
                template_kwargs=model.chat_template_kwargs,
                stop_ids=options.gen.stop_ids,
                tool_parser=model.tool_parser,
            )
            self._texts = TokenTexts(model.tokenizer)
            limits = EpisodeLimits(
                options.max_turns, options.max_total_tokens, options.gen.max_new_tokens
            )
            self._player = BlockingPlayer(
                EpisodePlayer(
                    spec,
                    _address(spec, context),
                    TurnAgent(
                        self._chat,
                        limits,
                        spec.system_prompt,
                        keep_reasoning=options.keep_reasoning,
                    ),
                    options.sessions,
                    retries=self._policy.retries,
                    message_timeout_s=options.message_timeout_s,
                )
            )
        return self._player


def _address(spec: EnvironmentSpec, context: CallContext) -> str:
    """Return the address of the environment's service; "" if it has no service. Raises RuntimeError
    if a service is needed and none is registered."""
    if spec.launch is None:
        return ""
    urls = context.endpoints.get("env") or []
    if not urls:
        raise RuntimeError(
            f"no server of the environment {spec.name} is registered; actor_gen needs one (kind "
            f"'env')"
        )
    return urls[0]


def rollout_statistics(outcomes: Sequence[RolloutOutcome]) -> dict[str, Any]:
    """Return the statistics of episodes.

    These are means over valid episodes, including success by group, the named rewards and metrics
    and, in a mixture, success, reward and turns by environment; for each mean, the number of
    episodes that it covers (``MEANS_OVER``); the number of failed episodes by status; and, in a
    mixture, the number of episodes by environment.
    """
    valid = [outcome for outcome in outcomes if outcome.valid]
    means = {
        "reward": [outcome.reward or 0.0 for outcome in valid],
        "success": [float(outcome.achieved) for outcome in valid],
        "turns": [float(len(outcome.turns)) for outcome in valid],
        "out_of_turns": [float(outcome.out_of_turns) for outcome in valid],
    }
    if broken := [o.broken_rules for o in valid if o.broken_rules is not None]:
        means["broken_rules"] = broken
    for group in sorted({outcome.group for outcome in valid if outcome.group}):
        means[f"success/{group}"] = [
            float(outcome.achieved) for outcome in valid if outcome.group == group
        ]
    for name in sorted({outcome.environment for outcome in valid if outcome.environment}):
        own = [outcome for outcome in valid if outcome.environment == name]
        means[f"success/{name}"] = [float(outcome.achieved) for outcome in own]
        means[f"reward_of/{name}"] = [outcome.reward or 0.0 for outcome in own]
        means[f"turns_of/{name}"] = [float(len(outcome.turns)) for outcome in own]
    for name in sorted({name for outcome in valid for name in outcome.rewards}):
        means[f"reward/{name}"] = [outcome.rewards.get(name, 0.0) for outcome in valid]
    for name in sorted(
        {name for outcome in valid for name in outcome.metrics} - {"success", "progress"}
    ):
        means[f"metric/{name}"] = [
            value for o in valid if (value := o.metrics.get(name)) is not None
        ]
    failed = Counter(f"failed/{outcome.status}" for outcome in outcomes if not outcome.valid)
    played = Counter(f"n_rollouts_of/{each.environment}" for each in outcomes if each.environment)
    return {
        **{name: _mean(values) for name, values in means.items()},
        MEANS_OVER: {name: len(values) for name, values in means.items()},
        "rollouts": float(len(outcomes)),
        "failed_rollouts": float(len(outcomes) - len(valid)),
        **{name: float(count) for name, count in (failed + played).items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
