"""GRPO on the tasks of any environment, asynchronously: the graph of ``grpo`` without its generating calls.

rollout workers ── packed_input_ids, rewards, ... ──► StreamDataset ──┬─► ref_inf ───┬─► actor_train
  (actor_gen, rew_inf; tokens from generation workers)                └─► actor_inf ─┘
                                ▲──────────── weights of every step ─────────────────────┘
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments import grpo
from experiments.grpo import Config
from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec, RolloutSpec
from realhf.api.graph import to_async
from realhf.api.rollout import RolloutOptions
from realhf.base.plugin import absolute
from realhf.env.doors.section import with_environment


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return ``grpo`` with its rollouts streamed. Raises ConfigError for options that contradict."""
    return asynchronous(grpo.build(config, streamed=True), config)


def asynchronous(spec: ExperimentSpec, config: Config) -> ExperimentSpec:
    """The same experiment with its rollouts streamed. Raises ConfigError when the sessions do not hold a group, when
    there is no file of the agent, or for an option that does nothing."""
    staying, leaving = to_async(spec.mfcs)
    options, episodes = config.async_rl, RolloutOptions.from_args(leaving[0].interface_args)
    episodes = replace(episodes, sessions=grpo.rollout_options(config).sessions)  # The actor's workers play none.
    sessions = episodes.sessions // options.n_rollout_workers
    if sessions < config.ppo.group_size:
        raise ConfigError(
            f"{episodes.sessions} episodes at once: each of async_rl.n_rollout_workers={options.n_rollout_workers} "
            f"needs ppo.group_size={config.ppo.group_size} of them (rollout.sessions, and what the environment allows: "
            "for AWS env.pool_size)"
        )
    rollout = RolloutSpec("actor", tuple(leaving), episodes, options, sessions, agent=chosen_agent(config))
    trainer = spec.models["actor"].workers[0]
    streamed = {key for call in leaving for key in call.output_keys}
    return replace(
        spec,
        mfcs=tuple(staying),
        rollout=rollout,
        source=replace(spec.source, keys=tuple(sorted(streamed)), worker=trainer),
    )


def chosen_agent(config: Config) -> str:
    """The agent that plays, a file of it by its absolute path. Raises ConfigError when there is no such file; rollout
    workers import it."""
    agent = absolute(config.rollout.agent)
    place = agent.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"rollout.agent={config.rollout.agent}: there is no file {place}")
    return agent
