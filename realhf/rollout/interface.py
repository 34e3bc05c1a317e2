"""Implements the ``actor_gen`` model function call: the actor plays groups of multi-turn episodes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realhf.api.chat import TemplateChat
from realhf.api.config import GenConfig
from realhf.api.env import RolloutOutcome
from realhf.api.model import CallContext, GenOutput, GenRequest, Model
from realhf.api.rollout import HeldOutOptions, RolloutOptions
from realhf.api.sample import SequenceSample
from realhf.rollout.agents.choice import check_whole_distribution
from realhf.rollout.episode.rollout_sample import outcomes_to_sample
from realhf.rollout.episode.sampling_seed import sampling_seed
from realhf.rollout.episode.transcript import transcript
from realhf.rollout.evaluation import evaluation_report
from realhf.rollout.players.multi_turn_pool import MultiTurnEnvPool


class EnginePolicy:
    """Gives a pool tokens from the generation engine of a model, with its chat format and a seed."""

    def __init__(self, model: Model, config: GenConfig, seed: int) -> None:
        self.chat = TemplateChat(model.tokenizer, template_kwargs=model.chat_template_kwargs)
        self.seconds = 0.0
        self.tokens = 0
        self._generator = model.engine.generator()
        self.context_limit = self._generator.context_limit
        self._config = config
        self._seed = seed

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        """Generate one batch; ``round_index`` gives every round a seed of its own."""
        began = time.perf_counter()
        outputs = self._generator.generate(
            requests, self._config, stop_ids=self.chat.stop_ids, seed=(self._seed * 1_000_003 + round_index) % 2**63
        )
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def free(self, slots: Sequence[int]) -> None:
        """Free these cache slots: their episodes are over."""
        self._generator.free(slots)


class EnvRolloutInterface:
    """``generate`` plays the groups of a training step, ``evaluate`` held-out episodes of every task.

    ``args`` are ``RolloutOptions.to_args()``; TypeError for an unknown one.
    """

    def __init__(self, **args: Any) -> None:
        self._options = RolloutOptions.from_args(args)
        self._pool: MultiTurnEnvPool | None = None

    def generate(
        self, model: Model, sample: SequenceSample, context: CallContext
    ) -> tuple[SequenceSample, dict[str, Any]]:
        """Play ``group_size`` rollouts of each sample's task (metadata ``task``: JSON, ``task_seed``). Raises
        ValueError when ``gen`` cuts the distribution: such tokens cannot be trained on."""
        options = self._options
        check_whole_distribution(options.gen)
        tasks = [{"task": json.loads(task), "chaos": options.chaos} for task in sample.metadata["task"]]
        seeds = [int(seed) for seed in sample.metadata["task_seed"]]
        policy = EnginePolicy(model, options.gen, context.seed)
        pool = self._connected_pool(context)
        own = [[sampling_seed(options.seed, i, member) for member in range(options.group_size)] for i in sample.ids]
        groups, stats = self._play(pool, policy, tasks, seeds, options.group_size, own)
        stats["episodes"] = [
            transcript(group[0], header=f"step {context.step}, sample {sample_id}")
            for sample_id, group in list(zip(sample.ids, groups, strict=True))[: options.transcripts]
        ]
        return outcomes_to_sample(sample.ids, groups, min_group_size=options.min_group_size), stats

    def evaluate(self, model: Model, args: Mapping[str, Any], context: CallContext) -> dict[str, Any]:
        """Measure success on held-out instances, sampled and greedy.

        ``args`` are ``HeldOutOptions.to_args()``. Returns {"sampled": {"overall": {success, episodes, ...}, tier: ...},
        "greedy": {...}}.
        """
        options, wanted = self._options, HeldOutOptions.from_args(args)
        report = {}
        for name, count, temperature in (
            ("sampled", wanted.episodes_per_task, options.gen.temperature),
            ("greedy", wanted.greedy_episodes_per_task, 0.0),
        ):
            if count < 1:
                continue
            tasks = [
                {"task_id": task_id, "split": wanted.split, "chaos": options.chaos}
                for task_id, _ in wanted.tasks
                for _ in range(count)
            ]
            seeds = [seed for _ in wanted.tasks for seed in range(count)]
            config = replace(options.gen, temperature=temperature)
            policy = EnginePolicy(model, config, context.seed)
            groups, _ = self._play(self._connected_pool(context), policy, tasks, seeds, 1)
            report[name] = evaluation_report([outcome for group in groups for outcome in group])
        return report

    def close(self) -> None:
        """Close the environment sessions."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the interface has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the interface has no state."""
        del state

    def _play(
        self,
        pool: MultiTurnEnvPool,
        policy: EnginePolicy,
        tasks: list[dict[str, Any]],
        seeds: list[int],
        group: int,
        sampling_seeds: list[list[int]] | None = None,
    ) -> tuple[list[list[RolloutOutcome]], dict[str, Any]]:
        longest = self._options.max_total_tokens
        if longest > policy.context_limit:
            raise ValueError(
                f"rollout.max_total_tokens={longest}: the context of the model holds {policy.context_limit} tokens"
            )
        began = time.perf_counter()
        groups = pool.run_groups(tasks, policy, group_size=group, seeds=seeds, sampling_seeds=sampling_seeds)
        total = time.perf_counter() - began
        outcomes = [outcome for members in groups for outcome in members]
        stats: dict[str, Any] = rollout_statistics(outcomes)
        stats |= {
            "rollout_seconds": total,
            "generation_seconds": policy.seconds,
            "env_seconds": total - policy.seconds,
            "generated_tokens": policy.tokens,
        }
        return groups, stats

    def _connected_pool(self, context: CallContext) -> MultiTurnEnvPool:
        if self._pool is None:
            urls = context.endpoints.get("env") or []
            if not urls:
                raise RuntimeError("no environment server is registered; actor_gen needs one (kind 'env')")
            options = self._options
            self._pool = MultiTurnEnvPool(
                urls[0],
                options.sessions,
                max_turns=options.max_turns,
                max_total_tokens=options.max_total_tokens,
                turn_tokens=options.gen.max_new_tokens,
                message_timeout_s=options.message_timeout_s,
                on_failure=options.on_failure,
            )
            self._pool.connect()
        return self._pool


def rollout_statistics(outcomes: Sequence[RolloutOutcome]) -> dict[str, float]:
    """Return means over valid episodes, success by tier, and the number of failed ones by status."""
    valid = [outcome for outcome in outcomes if outcome.valid]
    stats = {
        "reward": _mean([outcome.reward or 0.0 for outcome in valid]),
        "success": _mean([float(outcome.achieved) for outcome in valid]),
        "turns": _mean([float(len(outcome.turns)) for outcome in valid]),
        "rollouts": float(len(outcomes)),
        "failed_rollouts": float(len(outcomes) - len(valid)),
    }
    for tier in sorted({outcome.tier for outcome in valid}):
        stats[f"success/{tier}"] = _mean([float(outcome.achieved) for outcome in valid if outcome.tier == tier])
    for outcome in outcomes:
        if not outcome.valid:
            stats[f"failed/{outcome.status}"] = stats.get(f"failed/{outcome.status}", 0.0) + 1.0
    return stats


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
