"""A reward model, trained on pairs of episodes that the policy plays on the tasks of any environment.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─ rewards ─► reward_model_train
                       └─ packed_input_ids, loss_mask ────────────────────┘

The policy plays with its first weights and does not train. ``reward_model.path=RUN/policy`` gives what came out a part
in the rewards of every experiment of the policy gradient.
"""

from __future__ import annotations

from experiments.policy_gradient import BUILTIN, UNTRAINED, actor_gen, on_tasks, rew_inf, sampler
from experiments.preference import Config, pairwise, played, synchronous
from experiments.sft import FirstWeights, first_weights
from realhf.algorithms.role_options import BUILTIN_RATE
from realhf.api.experiment import ExperimentSpec, ModelSpec
from realhf.api.parallel import alone, parallel_of
from realhf.env.loader.load import with_environment

ROLE = "reward_model"


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    synchronous(config)
    first = first_weights(config)
    models = {"actor": player(config, first), ROLE: trained_model(config, first)}
    mfcs = [
        actor_gen(config, played(config)),
        rew_inf(config, played(config)),
        pairwise(config, ROLE, "reward_model", {"center": config.preference.center}),
    ]
    return on_tasks(config.experiment, config, models, mfcs, first, exported=ROLE)


def player(config: Config, first: FirstWeights) -> ModelSpec:
    """Return the role that plays and does not train."""
    actor = config.actor
    return ModelSpec(
        "actor",
        first.path,
        tuple(actor.workers),
        backend=alone(actor.backend),
        dtype=actor.dtype,
        experts=actor.experts,
        chat_template_kwargs=actor.chat_template_kwargs,
        tool_parser=actor.tool_parser,
        engine=sampler(config),
    )


def trained_model(config: Config, first: FirstWeights) -> ModelSpec:
    """Return the role that learns to score: a decoder with a value head, from the actor's first weights unless it has a
    path of its own. It learns at the actor's rate unless it has one of its own, or is small as the built-in policy."""
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
        optimizer=model.optimizer.at(BUILTIN_RATE if small else config.actor.optimizer.lr),
        parallel=parallel_of(ROLE, model),
        tokens_of=first.path if model.path else "",
    )
