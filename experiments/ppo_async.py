"""PPO with a critic on the tasks of any environment, asynchronously: the graph of ``ppo`` without its generating calls.

rollout workers ── packed_input_ids, rewards, ... ──► StreamDataset ──┬─► ref_inf ────┬──┬─► actor_train
  (actor_gen, rew_inf; tokens from generation workers)                └─► critic_inf ─┘  └─► critic_train
                                ▲──────────── weights of every step ───────────────────────────┘

Values are those of the critic as it is when the batch arrives, whatever weights sampled it.
"""

from __future__ import annotations

from experiments import ppo
from experiments.grpo_async import asynchronous
from experiments.ppo import Config
from realhf.api.experiment import ExperimentSpec
from realhf.env.doors.section import with_environment


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return ``ppo`` with its rollouts streamed. Raises ConfigError for options that contradict."""
    return asynchronous(ppo.build(config, streamed=True), config)
