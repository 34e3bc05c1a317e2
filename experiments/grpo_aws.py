"""GRPO on AWS tasks.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ─┬─► actor_train
                       ├─ packed_input_ids ─────► ref_inf ─┤   (ref_inf only with a KL term,
                       ├─ packed_input_ids ───► actor_inf ─┤    actor_inf only for a proximal policy)
                       └─ tokens, masks, logprobs ─────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from experiments import sft_aws
from experiments.sft_aws import warm_start
from realhf.algorithms.policy_gradient.options import PolicyGradientOptions, ResolvedOptions, batch_problems
from realhf.algorithms.policy_gradient.resolve import resolve
from realhf.api.config import run_folder
from realhf.api.config.option import section
from realhf.api.experiment import EvaluationSpec, ExperimentSpec, ModelSpec, SourceSpec
from realhf.api.mfc import InterfaceType, MFCDef
from realhf.api.rollout import HeldOutOptions, RolloutOptions
from realhf.api.sample import MicroBatchSpec
from realhf.aws.options import environment_server
from realhf.aws.tasks.loader import load_templates, training_tags
from realhf.base.dataclass_json import to_plain

EPISODE_KEYS = (
    "packed_input_ids",
    "prompt_mask",
    "loss_mask",
    "packed_logprobs",
    "packed_versions",
    "env_rewards",
    "seq_no_eos_mask",
    "outcome",
)


@dataclass
class Config(sft_aws.Config):
    """With the policy gradient, beside the AWS environment that the supervised experiment has."""

    ppo: PolicyGradientOptions = section(PolicyGradientOptions)

    def problems(self, name: str) -> Iterator[str]:
        """Groups and minibatches must fit to rollouts and batches."""
        del name
        yield from batch_problems(self.ppo, self)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    ppo = policy_options(config)
    before = (warm_start(config),) if config.actor.path == "builtin" else ()
    actor = actor_model(config, path=str(before[0].artifact) if before else config.actor.path)
    models, mfcs = {"actor": actor}, [actor_gen(config), rew_inf(config)]
    if ppo.needs_reference:
        models["ref"] = ModelSpec(
            "ref", actor.path, tuple(config.ref.workers), backend=actor.backend, dtype=actor.dtype
        )
        mfcs.append(ref_inf(config))
    if ppo.needs_actor_inf:
        mfcs.append(actor_inf(config))
    mfcs.append(actor_train(config, ppo))
    return aws_experiment("grpo_aws", config, models, mfcs, before)


def policy_options(config: Config) -> ResolvedOptions:
    """The options of the policy gradient; ``loss_agg=constant`` divides by what an episode can sample at most."""
    return resolve(config.ppo, loss_scale_len=config.gen.max_new_tokens * config.rollout.max_turns)


def actor_gen(config: Config) -> MFCDef:
    """Groups of episodes, played by the actor. The task of a sample is metadata, so there are no input keys."""
    return _call(
        config,
        "actor_gen",
        "actor",
        InterfaceType.GENERATE,
        "env_rollout",
        rollout_options(config).to_args(),
        outputs=EPISODE_KEYS,
    )


def rew_inf(config: Config) -> MFCDef:
    """Outcomes to rewards; it needs no weights and runs where the actor is."""
    args = {name: getattr(config.ppo, name) for name in ("reward_scaling", "reward_bias", "max_reward_clip")}
    return _call(
        config,
        "rew_inf",
        "actor",
        InterfaceType.INFERENCE,
        "outcome_reward",
        args,
        inputs=("env_rewards", "outcome"),
        outputs=("rewards",),
    )


def ref_inf(config: Config) -> MFCDef:
    """Log-probabilities of the reference, for the KL term: of the trainable tokens, which are a third of all."""
    return _call(
        config,
        "ref_inf",
        "ref",
        InterfaceType.INFERENCE,
        "logprob",
        {"temperature": config.gen.temperature},
        inputs=("packed_input_ids", "loss_mask"),
        outputs=("packed_ref_logprobs",),
    )


def actor_inf(config: Config) -> MFCDef:
    """Log-probabilities of the actor before it trains on the step: the proximal policy's."""
    args = {"output_key": "proximal_logprobs", "temperature": config.gen.temperature}
    return _call(
        config,
        "actor_inf",
        "actor",
        InterfaceType.INFERENCE,
        "logprob",
        args,
        inputs=("packed_input_ids", "loss_mask"),
        outputs=("proximal_logprobs",),
    )


def actor_train(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """Advantages within each group, then one step on the objective that ``ppo`` was resolved to."""
    args = {"ppo": to_plain(config.ppo), "temperature": config.gen.temperature, "loss_scale_len": ppo.loss_scale_len}
    keys = (
        "packed_input_ids",
        "loss_mask",
        "packed_logprobs",
        "packed_versions",
        "rewards",
        "seq_no_eos_mask",
        "outcome",
        *ppo.scored_keys,
    )
    return _call(config, "actor_train", "actor", InterfaceType.TRAIN_STEP, "policy_gradient", args, inputs=keys)


def actor_model(config: Config, path: str) -> ModelSpec:
    """Return the role that is trained, with its first weights in ``path``."""
    actor = config.actor
    return ModelSpec(
        "actor",
        path,
        tuple(actor.workers),
        trainable=True,
        backend=actor.backend,
        dtype=actor.dtype,
        gradient_checkpointing=actor.gradient_checkpointing,
        optimizer=actor.optimizer,
        chat_template_kwargs=actor.chat_template_kwargs,
    )


def rollout_options(config: Config) -> RolloutOptions:
    """How training and evaluation play their episodes."""
    rollout = config.rollout
    return RolloutOptions(
        group_size=config.ppo.group_size,
        sessions=config.env.pool_size,
        gen=config.gen,
        max_turns=rollout.max_turns,
        max_total_tokens=rollout.max_total_tokens,
        min_group_size=rollout.min_group_size,
        message_timeout_s=rollout.message_timeout_s,
        on_failure=rollout.on_failure,
        chaos=config.env.chaos,
        seed=config.seed,
        transcripts=config.monitor.episodes_per_step,
    )


def aws_experiment(
    name: str,
    config: Config,
    models: dict[str, ModelSpec],
    mfcs: list[MFCDef],
    before: tuple[ExperimentSpec, ...],
) -> ExperimentSpec:
    """Tasks from the curriculum, held-out success before and after, the policy exported at the end."""
    dataset, tiers = config.dataset, list(config.env.tiers)
    tasks = {
        "tiers": tiers,
        "tags": training_tags(tiers, config.env.tags),
        "strategy": dataset.curriculum,
        "group_success": dataset.group_success,
        "priority": to_plain(dataset.priority),
    }
    source = SourceSpec("task_curriculum", tasks, worker=models["actor"].workers[0])
    return ExperimentSpec(
        name=name,
        models=models,
        mfcs=tuple(mfcs),
        source=source,
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        environment=environment_server(config.env),
        evaluation=held_out(config),
        before=before,
        export_role="actor",
        log_keys=("prompt_mask", "packed_versions", "seq_no_eos_mask"),
    )


def held_out(config: Config) -> EvaluationSpec:
    """Every template on names that training never sees, at the training temperature and greedy."""
    evaluation, tiers = config.evaluation, list(config.env.tiers)
    templates = load_templates(tiers, tags=training_tags(tiers, config.env.tags), split="train")
    held_out = HeldOutOptions(
        tuple((template.task_id, template.tier) for template in templates),
        "heldout",
        evaluation.episodes_per_task,
        evaluation.greedy_episodes_per_task,
    )
    played = rollout_options(config).to_args()
    return EvaluationSpec("actor", "env_rollout", played, held_out.to_args(), every_steps=evaluation.every_steps)


def _call(
    config: Config,
    name: str,
    role: str,
    kind: InterfaceType,
    interface: str,
    args: dict[str, Any],
    *,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
) -> MFCDef:
    return MFCDef(
        name,
        role,
        kind,
        interface,
        args,
        n_seqs=config.dataset.train_bs_n_seqs,
        input_keys=inputs,
        output_keys=outputs,
        mb_spec=MicroBatchSpec(config.mb_spec.n_mbs, config.mb_spec.max_tokens_per_mb),
        timeout_s=config.rpc.call_timeout_s,
    )
