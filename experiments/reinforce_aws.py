"""REINFORCE with a leave-one-out baseline on AWS tasks: no ratio, no clipping, no reference model.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─┬─► actor_train
                       └─ tokens, masks ───────────────────┘
"""

from __future__ import annotations

from experiments.grpo_aws import Config, actor_gen, actor_model, actor_train, aws_experiment, policy_options, rew_inf
from experiments.sft_aws import warm_start
from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    ppo = policy_options(config)
    if ppo.loss != "reinforce" or ppo.scored_keys:
        raise ConfigError(
            "reinforce_aws trains with loss reinforce, no KL term and no call actor_inf: leave ppo.loss, "
            "ppo.kl_ctl, ppo.kl_loss_coef and ppo.prox_logp_method=actor_inf, or use experiment=grpo_aws"
        )
    before = (warm_start(config),) if config.actor.path == "builtin" else ()
    actor = actor_model(config, path=str(before[0].artifact) if before else config.actor.path)
    mfcs = [actor_gen(config), rew_inf(config), actor_train(config, ppo)]
    return aws_experiment("reinforce_aws", config, {"actor": actor}, mfcs, before)
