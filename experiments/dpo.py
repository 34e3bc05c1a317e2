"""Direct preference optimization (DPO) on pairs of a file (``dataset.path``), or on preference
pairs of episodes. The policy plays the episodes, on the tasks of any environment.

(rows of a file) ── packed_input_ids, loss_mask ──► ref_inf ──► actor_train

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─ rewards ─┬─► actor_train
                       └─ packed_input_ids ──────► ref_inf ──────────┘

With ``preference.player=first`` (the default) the episodes are played with the policy's initial
weights, which are also the reference (Rafailov et al. 2023). With ``current`` they are played with
the weights in training (Guo et al. 2024, Direct Language Model Alignment from Online AI Feedback).
"""

from __future__ import annotations

from dataclasses import replace

from experiments import policy_gradient
from experiments.policy_gradient import (
    actor_gen,
    build_reward_calls,
    on_tasks,
    ref_inf,
    reference_model,
    step_call,
)
from experiments.preference import (
    CURRENT,
    FIRST,
    Config,
    check_synchronous,
    group_options,
    pairwise_train,
)
from experiments.row_file import evaluate_rows
from experiments.sft import (
    actor_model,
    evaluate_in_environment,
    file_of_rows,
    resolve_initial_weights,
)
from realhf.api.config import ConfigError, run_folder
from realhf.api.experiment import ExperimentSpec, InterfaceType
from realhf.data.row_formats import PREFERENCE
from realhf.env.loader.load import with_environment


def config_class(environment: str) -> type[Config]:
    """Return the configuration class for an environment. Raises ValueError for an unknown
    environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError if options
    contradict each other, and ConfigError for an invalid row."""
    if config.dataset.path is not None:
        return build_on_rows(config)
    check_synchronous(config)
    first = resolve_initial_weights(config)
    options = config.preference
    actor = policy_gradient.actor_spec(config, first)
    scored, rewards = build_reward_calls(config, group_options(config), first.path)
    ref = reference_model(config, actor)
    gen = actor_gen(config, group_options(config))
    if (options.player or (FIRST if actor.lora is None else CURRENT)) == FIRST:
        if actor.lora is not None:
            raise ConfigError(
                f"preference.player={FIRST}: with adapters (actor.lora.rank={actor.lora.rank}) the "
                f"first weights score "
                f"and do not sample; set preference.player={CURRENT}"
            )
        ref = replace(
            ref,
            engine=actor.engine,
            chat_template_kwargs=actor.chat_template_kwargs,
            tool_parser=actor.tool_parser,
        )
        gen = actor_gen(config, group_options(config), "ref")
    args = {
        "beta": options.beta,
        "smoothing": options.smoothing,
        "temperature": config.gen.temperature,
    }
    train = pairwise_train(config, "actor", "dpo", args, "packed_ref_logprobs")
    models = {"actor": actor, "ref": ref, **scored}
    return on_tasks(
        config.experiment, config, models, [gen, *rewards, ref_inf(config), train], first
    )


def build_on_rows(config: Config) -> ExperimentSpec:
    """Return the experiment on the pairs of a file. Raises ConfigError for an invalid row."""
    file = file_of_rows(config, PREFERENCE)
    options = config.preference
    actor = actor_model(config, file.model, config.actor.optimizer, config.actor.lora.if_enabled())
    tokens = ("packed_input_ids", "loss_mask")
    reference = step_call(
        config,
        "ref_inf",
        "ref",
        InterfaceType.INFERENCE,
        "logprob",
        {},
        inputs=tokens,
        outputs=("packed_ref_logprobs",),
    )
    loss = {"beta": options.beta, "smoothing": options.smoothing}
    train = step_call(
        config,
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "dpo",
        {**loss, "max_nonfinite_steps": config.ppo.max_nonfinite_steps},
        inputs=(*tokens, "rewards", "packed_ref_logprobs"),
    )
    spec = ExperimentSpec(
        name=config.experiment,
        models={"actor": actor, "ref": reference_model(config, actor)},
        mfcs=(reference, train),
        source=file.source((*tokens, "rewards"), actor.workers[0]),
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        evaluation=evaluate_rows(config, file.rows, loss),
        jobs=file.jobs,
        export_role="actor",
    )
    return evaluate_in_environment(spec, config)
