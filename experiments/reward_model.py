"""Training of a reward model on preference pairs of episodes. The policy plays the episodes, on the
tasks of any environment.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─ rewards ─► reward_model_train
                       └─ packed_input_ids, loss_mask ────────────────────┘

The policy plays with its initial weights and is not trained. Any policy-gradient experiment can
then use the reward model with ``reward_model.path=RUN/policy``.
"""

from __future__ import annotations

from experiments.policy_gradient import (
    BUILTIN,
    UNTRAINED,
    actor_gen,
    episode_engine,
    on_tasks,
    rew_inf,
)
from experiments.preference import Config, check_synchronous, group_options, pairwise_train
from experiments.sft import InitialWeights, resolve_initial_weights
from realhf.algorithms.role_options import BUILTIN_RATE
from realhf.api.experiment import ExperimentSpec, ModelSpec
from realhf.api.parallel import resolve_parallel, untrained_backend
from realhf.env.loader.load import with_environment

ROLE = "reward_model"


def config_class(environment: str) -> type[Config]:
    """Return the configuration class for an environment. Raises ValueError for an unknown
    environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError if options
    contradict each other."""
    check_synchronous(config)
    first = resolve_initial_weights(config)
    models = {"actor": build_playing_model(config, first), ROLE: build_reward_model(config, first)}
    mfcs = [
        actor_gen(config, group_options(config)),
        rew_inf(config, group_options(config)),
        pairwise_train(config, ROLE, "reward_model", {"center": config.preference.center}),
    ]
    return on_tasks(config.experiment, config, models, mfcs, first, exported=ROLE)


def build_playing_model(config: Config, first: InitialWeights) -> ModelSpec:
    """Return the specification of the actor, which plays the episodes and is not trained."""
    actor = config.actor
    return ModelSpec(
        "actor",
        first.path,
        tuple(actor.workers),
        backend=untrained_backend(actor.backend),
        dtype=actor.dtype,
        experts=actor.experts,
        chat_template_kwargs=actor.chat_template_kwargs,
        tool_parser=actor.tool_parser,
        engine=episode_engine(config),
    )


def build_reward_model(config: Config, first: InitialWeights) -> ModelSpec:
    """Return the specification of the reward model, a decoder with a value head.

    Its initial weights are the actor's unless ``reward_model.path`` is set. Its learning rate
    defaults to the actor's, or to ``BUILTIN_RATE`` when it starts from the built-in policy.
    """
    model = config.reward_model
    small = not model.path and config.actor.path in (BUILTIN, UNTRAINED)
    return ModelSpec(
        ROLE,
        model.path or first.path,
        tuple(model.workers),
        trainable=True,
        backend=model.backend,
        dtype=model.dtype,
        head="value",
        experts=model.experts if model.path else config.actor.experts,
        gradient_checkpointing=model.gradient_checkpointing,
        compile=model.compile,
        optimizer=model.optimizer.with_default_lr(
            BUILTIN_RATE if small else config.actor.optimizer.lr
        ),
        parallel=resolve_parallel(ROLE, model),
        tokens_of=first.path if model.path else "",
    )
