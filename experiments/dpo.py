"""Direct preference optimisation on pairs of episodes that the policy plays on the tasks of any environment.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─ rewards ─┬─► actor_train
                       └─ packed_input_ids ──────► ref_inf ──────────┘

``preference.player=first`` (the default) plays with the policy's first weights, which are the reference, as Rafailov et
al. 2023 do; ``current`` with those that train (Guo et al. 2024, Direct Language Model Alignment from Online AI
Feedback).
"""

from __future__ import annotations

from dataclasses import replace

from experiments import policy_gradient
from experiments.policy_gradient import actor_gen, on_tasks, ref_inf, reference, rewarded
from experiments.preference import CURRENT, FIRST, Config, pairwise, played, synchronous
from experiments.sft import first_weights
from realhf.api.config import ConfigError
from realhf.api.experiment import ExperimentSpec
from realhf.env.loader.load import with_environment


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    synchronous(config)
    first, options = first_weights(config), config.preference
    actor = policy_gradient.actor_spec(config, first)
    scored, rewards = rewarded(config, played(config), first.path)
    ref, gen = reference(config, actor), actor_gen(config, played(config))
    if (options.player or (FIRST if actor.lora is None else CURRENT)) == FIRST:
        if actor.lora is not None:
            raise ConfigError(
                f"preference.player={FIRST}: with adapters (actor.lora.rank={actor.lora.rank}) the first weights score "
                f"and do not sample; set preference.player={CURRENT}"
            )
        ref = replace(
            ref,
            engine=actor.engine,
            chat_template_kwargs=actor.chat_template_kwargs,
            tool_parser=actor.tool_parser,
        )
        gen = actor_gen(config, played(config), "ref")
    args = {"beta": options.beta, "smoothing": options.smoothing, "temperature": config.gen.temperature}
    train = pairwise(config, "actor", "dpo", args, "packed_ref_logprobs")
    models = {"actor": actor, "ref": ref, **scored}
    return on_tasks(config.experiment, config, models, [gen, *rewards, ref_inf(config), train], first)
