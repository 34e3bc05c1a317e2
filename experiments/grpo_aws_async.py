"""GRPO on AWS tasks, asynchronously: the graph of ``grpo_aws`` without its generating calls.

rollout workers ── packed_input_ids, rewards, ... ──► StreamDataset ──┬─► ref_inf ───┬─► actor_train
  (actor_gen, rew_inf; tokens from generation workers)                └─► actor_inf ─┘
                                ▲──────────── weights of every step ─────────────────────┘
"""

from __future__ import annotations

from dataclasses import replace

from experiments import grpo_aws
from experiments.grpo_aws import Config
from realhf.api.config import AsyncConfig, ConfigError, RolloutConfig
from realhf.api.experiment import ExperimentSpec, RolloutSpec
from realhf.api.graph import to_async


def build(config: Config) -> ExperimentSpec:
    """Return ``grpo_aws`` with its rollouts streamed. Raises ConfigError for options that contradict."""
    return asynchronous(grpo_aws.build(config), config)


def asynchronous(spec: ExperimentSpec, config: Config) -> ExperimentSpec:
    """The same experiment with its rollouts streamed. Raises ConfigError when the sessions do not hold a group,
    or for an option that does nothing."""
    options = config.async_rl
    staying, leaving = to_async(spec.mfcs)
    sessions = config.env.pool_size // options.n_rollout_workers
    if sessions < config.ppo.group_size:
        raise ConfigError(
            f"env.pool_size={config.env.pool_size}: each of async_rl.n_rollout_workers="
            f"{options.n_rollout_workers} needs ppo.group_size={config.ppo.group_size} sessions"
        )
    if config.rollout.on_failure != RolloutConfig.on_failure:
        raise ConfigError(
            f"rollout.on_failure={config.rollout.on_failure}: has no effect on rollouts of an "
            "asynchronous run; async_rl.on_failure.policy says what a failed one means"
        )
    for option in () if options.engine == "vllm" else ("vllm_url", "vllm_executable"):
        if getattr(options, option) != getattr(AsyncConfig, option):
            raise ConfigError(f"async_rl.{option}: has no effect with async_rl.engine={options.engine}")
    rollout = RolloutSpec(
        "actor", tuple(leaving), grpo_aws.rollout_options(config), options, sessions, agent=config.rollout.agent
    )
    trainer = spec.models["actor"].workers[0]
    streamed = {key for call in leaving for key in call.output_keys}
    return replace(
        spec,
        name="grpo_aws_async",
        mfcs=tuple(staying),
        rollout=rollout,
        source=replace(spec.source, keys=tuple(sorted(streamed)), worker=trainer),
    )
