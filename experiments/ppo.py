"""PPO with a critic on the tasks of any environment: env=NAME, or env.path=FILE.py:Name for one of your own.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ────┬──┬─► actor_train
                       ├─ packed_input_ids ─────► ref_inf ────┤  │
                       ├─ packed_input_ids ─────► critic_inf ─┘  │   (ref_inf only with a KL term,
                       └─ tokens, masks, logprobs ───────────────┴─► critic_train  actor_inf only if asked for)

``rew_inf``, ``ref_inf`` and ``critic_inf`` need nothing of each other, and neither do the two train calls: on different
workers they run side by side. Both train calls compute the same advantages from the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experiments import grpo
from experiments.grpo import actor_gen, call, on_tasks, policy_gradient, policy_options
from experiments.sft import BUILTIN, UNTRAINED, first_weights
from realhf.algorithms.critic.options import ACTOR, BUILTIN_RATE, CriticConfig
from realhf.algorithms.policy_gradient.options import ResolvedOptions
from realhf.api.config import ConfigError
from realhf.api.config.option import section
from realhf.api.experiment import ExperimentSpec, ModelSpec
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.mfc import InterfaceType, MFCDef
from realhf.api.parallel import parallel_of
from realhf.env.doors.section import with_environment

INTERFACE = "critic"


@dataclass
class Config(grpo.Config):
    """With the critic."""

    critic: CriticConfig = section(CriticConfig)

    def problems(self, name: str) -> Iterator[str]:
        """The critic's warm-up must end before the run does."""
        yield from super().problems(name)
        if self.critic.warmup_steps >= self.total_train_steps:
            yield (
                f"critic.warmup_steps={self.critic.warmup_steps}: the actor would never train, the run has "
                f"total_train_steps={self.total_train_steps}"
            )


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config, *, streamed: bool = False) -> ExperimentSpec:
    """Return the experiment that ``config`` describes; ``streamed``: older weights may sample its tokens. Raises
    ConfigError or ValueError for options that contradict."""
    ppo = policy_options(config, streamed=streamed)
    if not ppo.needs_values:
        raise ConfigError(
            f"ppo.adv_estimator={ppo.adv_estimator} (ppo.algo={ppo.algo}) reads no values, so the critic would do "
            "nothing. Leave it, or use an experiment without a critic, such as grpo"
        )
    first = first_weights(config)
    models, mfcs = policy_gradient(config, ppo, first, first_step=config.critic.warmup_steps)
    models["critic"] = critic_model(config, first.path)
    calls = [actor_gen(config), *mfcs, critic_inf(config, ppo), critic_train(config, ppo)]
    return on_tasks(config.experiment, config, models, calls, first)


def critic_model(config: Config, actor_path: str) -> ModelSpec:
    """Return the role that learns values: a decoder with a value head, from the actor's first weights in ``actor_path``
    unless it has a path of its own. It learns at the actor's rate unless it has one of its own, or is the small critic
    of the built-in policy."""
    critic = config.critic
    small = critic.path == ACTOR and config.actor.path in (BUILTIN, UNTRAINED)
    return ModelSpec(
        "critic",
        actor_path if critic.path == ACTOR else critic.path,
        tuple(critic.workers),
        trainable=True,
        backend=critic.backend,
        dtype=critic.dtype,
        head="value",
        gradient_checkpointing=critic.gradient_checkpointing,
        compile=critic.compile,
        optimizer=critic.optimizer.at(BUILTIN_RATE if small else config.actor.optimizer.lr),
        parallel=parallel_of("critic", critic),
    )


def critic_inf(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """Values of the states in which the policy sampled, before the critic trains on the step."""
    args = _critic_args(config, ppo)
    keys = ("packed_input_ids", "loss_mask")
    return call(
        config, "critic_inf", "critic", InterfaceType.INFERENCE, INTERFACE, args, inputs=keys, outputs=("values",)
    )


def critic_train(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """The critic's step on the returns of the batch: from what ``actor_train`` makes its advantages of."""
    behaviour = ("packed_logprobs", "packed_ref_logprobs") if ppo.kl_ctl != 0 else ()
    proximal = ("proximal_logprobs",) if ppo.kl_ctl != 0 and ppo.recompute_logprob else ()
    truncated = ("seq_no_eos_mask",) if ppo.mask_too_long else ()
    keys = (
        "packed_input_ids",
        "loss_mask",
        "rewards",
        "outcome",
        "values",
        ROLLOUT_KEY,
        *behaviour,
        *proximal,
        *truncated,
        *ppo.turn_keys,
    )
    args = _critic_args(config, ppo)
    return call(config, "critic_train", "critic", InterfaceType.TRAIN_STEP, INTERFACE, args, inputs=keys)


def _critic_args(config: Config, ppo: ResolvedOptions) -> dict[str, object]:
    """Arguments of the critic's interface; calls with the same ones share it, and with it the units of its values."""
    return {
        "ppo": ppo.chosen(config.ppo),
        "critic": config.critic.learning(ppo.ppo_n_minibatches, ppo.sample_reuse),
        "loss_scale_len": ppo.loss_scale_len,
    }
