"""REINFORCE with a leave-one-out baseline on the tasks of any environment: no ratio, no clipping, no reference model.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─┬─► actor_train
                       └─ tokens, masks ───────────────────┘
"""

from __future__ import annotations

from experiments.grpo import (
    Config,
    actor_gen,
    actor_model,
    actor_train,
    on_tasks,
    policy_options,
    rew_inf,
    without_critic,
)
from experiments.sft import first_weights
from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec
from realhf.env.doors.section import with_environment


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    ppo = without_critic(policy_options(config))
    if ppo.loss != "reinforce" or ppo.scored_keys:
        raise ConfigError(
            f"{config.experiment} trains with loss reinforce, no KL term and no call actor_inf: leave ppo.loss, "
            "ppo.kl_ctl, ppo.kl_loss_coef and ppo.prox_logp_method=actor_inf, or use an experiment that starts with "
            "grpo"
        )
    first = first_weights(config)
    actor = actor_model(config, first.path)
    mfcs = [actor_gen(config), rew_inf(config), actor_train(config, ppo)]
    return on_tasks(config.experiment, config, {"actor": actor}, mfcs, first)
