"""Policy-gradient training on the tasks of any environment: env=NAME, or env.path=FILE.py:Name for
a custom one.

GRPO, PPO, REINFORCE and related algorithms are settings of this experiment (ppo.algo). The graph
contains only the calls that the chosen algorithm needs.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ────┬──┬─► actor_train
                       ├─ packed_input_ids ─► teacher_inf ────┤  │   (teacher_inf only for distillation,
                       ├─ feedback_prompt_ids ► feedback_inf ─┤  │    feedback_inf only with ppo.feedback,
                       ├─ packed_input_ids ─────► ref_inf ────┤  │    ref_inf only with a KL term,
                       ├─ packed_input_ids ───► actor_inf ────┤  │    actor_inf only for a proximal policy,
                       ├─ packed_input_ids ──► critic_inf ────┘  │    critic_* only for value-based advantages)
                       └─ tokens, masks, logprobs ───────────────┴─► critic_train

With async_rl.enabled, rollout workers replace actor_gen and rew_inf and generate episodes while the
trainer trains:

rollout workers ── packed_input_ids, rewards, ... ──► StreamDataset ──► ref_inf, actor_inf, critic_inf ──► *_train
  (tokens from generation workers)  ▲──────────────── weights of every step ───────────────────────────────┘

The inference calls are independent of each other, and so are the two train calls: on different
workers they run concurrently. Both train calls compute the same advantages from the same inputs.
Values are computed with the critic's weights at the time when the batch arrives, regardless of
which policy weights sampled it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments import sft
from experiments.sft import BUILTIN, UNTRAINED, InitialWeights, resolve_initial_weights
from realhf.algorithms.options import (
    PASS_AT_K,
    PolicyGradientOptions,
    ResolvedOptions,
    batch_problems,
)
from realhf.algorithms.resolution import resolve
from realhf.algorithms.role_options import ACTOR, BUILTIN_RATE, CriticConfig, RewardModelConfig
from realhf.api.config import (
    CHECK,
    CONSTRAIN,
    ConfigError,
    EngineConfig,
    TeacherConfig,
    run_folder,
)
from realhf.api.environment import HELD_OUT, EnvironmentPart, EnvironmentSpec
from realhf.api.experiment import (
    EvaluationSpec,
    ExperimentSpec,
    HeldOutOptions,
    InterfaceType,
    MFCDef,
    ModelSpec,
    RolloutOptions,
    RolloutSpec,
    SourceSpec,
)
from realhf.api.graph import to_async
from realhf.api.keys import (
    FEEDBACK_PROMPT,
    FEEDBACK_RATIOS,
    ROLLOUT_KEY,
    TURN_KEYS,
    UNMASKED_LOGPROBS,
    VERIFIER_REWARDS,
)
from realhf.api.option import section
from realhf.api.parallel import resolve_parallel, untrained_backend
from realhf.api.sample import MicroBatchSpec
from realhf.api.source import GroupSignal
from realhf.base.dataclass_json import to_json_value
from realhf.base.hf_config import VALUE_HEAD_FILE
from realhf.base.installation import install_command
from realhf.base.plugin import absolute_reference
from realhf.env.loader.load import chosen_environment, with_environment

_log = logging.getLogger(__name__)
MESSAGE_TIMEOUT_S = 60.0
"""Default timeout in seconds of a message to an environment whose own limits do not exceed it."""
SESSIONS = 32
"""Default number of concurrent episodes if neither the configuration nor the environment limits
it."""
NO_CRITIC = (
    "only advantages that take values have a critic (ppo.adv_estimator=gae, which ppo.algo=ppo "
    "sets)"
)
NO_TEACHER = (
    "nothing is distilled (ppo.distill_weight, which ppo.algo=opd sets), the teacher is the policy "
    "itself "
    "(ppo.feedback), or it belongs to the other kind of teacher (teacher.path, teacher.url)"
)
NO_REWARD_MODEL = (
    "reward_model.path names no reward model, or this experiment has another use for it"
)
REWARD_SHAPING = ("reward_scaling", "reward_bias", "max_reward_clip")
"""Options of the section ``ppo`` that transform the environment's rewards."""
EPISODE_KEYS = (
    "packed_input_ids",
    "prompt_mask",
    "loss_mask",
    "packed_logprobs",
    "packed_versions",
    "env_rewards",
    "seq_no_eos_mask",
    "outcome",
    ROLLOUT_KEY,
)
"""Output keys of the call that generates episodes."""


@dataclass
class Config(sft.Config):
    """sft.Config plus the sections ``ppo``, ``critic``, ``teacher`` and ``reward_model``."""

    ppo: PolicyGradientOptions = section(PolicyGradientOptions)
    critic: CriticConfig = section(CriticConfig, unused_because=NO_CRITIC)
    teacher: TeacherConfig = section(TeacherConfig, unused_because=NO_TEACHER)
    reward_model: RewardModelConfig = section(RewardModelConfig, unused_because=NO_REWARD_MODEL)

    def problems(self, name: str) -> Iterator[str]:
        """Yield a message for each of these: group or minibatch sizes that do not divide their
        batches, a critic warm-up as long as the run, and adapter dropout, which would make the
        trained policy differ from the sampling one."""
        del name
        yield from batch_problems(self.ppo, self)
        if self.critic.warmup_steps >= self.total_train_steps:
            yield (
                f"critic.warmup_steps={self.critic.warmup_steps}: the actor would never train, the "
                f"run has total_train_steps={self.total_train_steps}"
            )
        if self.actor.lora.rank and self.actor.lora.dropout:
            yield (
                f"actor.lora.dropout={self.actor.lora.dropout}: the policy in training would "
                f"differ from the one that sampled; set 0 (only experiment=sft can use dropout)"
            )


def config_class(environment: str) -> type[Config]:
    """Return the configuration class for an environment. Raises ValueError for an unknown
    environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError if options
    contradict each other."""
    streamed = config.async_rl.enabled
    ppo = policy_options(config, streamed=streamed)
    check_structured(config, ppo)
    first = resolve_initial_weights(config)
    models, mfcs = build_training_graph(config, ppo, first)
    spec = on_tasks(config.experiment, config, models, [actor_gen(config, ppo), *mfcs], first)
    return stream_rollouts(spec, config) if streamed else spec


def build_training_graph(
    config: Config, ppo: ResolvedOptions, first: InitialWeights
) -> tuple[dict[str, ModelSpec], list[MFCDef]]:
    """Return (models by role, calls) for everything that follows the generation of episodes. It
    does not depend on where the episodes come from."""
    actor = actor_spec(config, first)
    (scoring, mfcs) = build_reward_calls(config, ppo, first.path)
    if scoring and not ppo.rl_weight:
        raise ConfigError(
            f"reward_model.path: rewards have no effect with ppo.rl_weight=0 "
            f"(ppo.algo={ppo.algo}); remove it, or set ppo.rl_weight"
        )
    if scoring and ppo.credit != "episode":
        raise ConfigError(
            f"ppo.credit={ppo.credit}: a reward model scores whole episodes, not turns; remove "
            f"reward_model.path, or set ppo.credit=episode"
        )
    models = {"actor": actor, **scoring}
    if ppo.needs_reference:
        models["ref"] = reference_model(config, actor)
        mfcs.append(ref_inf(config))
    if ppo.needs_teacher:
        mfcs.append(teacher_inf(config))
        if not config.teacher.url:
            models["teacher"] = teacher_model(config, actor.path)
    if ppo.needs_feedback:
        mfcs.append(feedback_inf(config))
    if ppo.needs_actor_inf:
        mfcs.append(actor_inf(config))
    mfcs.append(actor_train(config, ppo))
    if ppo.needs_values:
        models["critic"] = critic_model(config, first.path)
        mfcs += [critic_inf(config, ppo), critic_train(config, ppo)]
    return models, mfcs


def policy_options(config: Config, *, streamed: bool = False) -> ResolvedOptions:
    """Return the resolved options of the section ``ppo``.

    ``loss_agg=constant`` divides by the maximum number of sampled tokens. ``sampler_differs`` is
    set if log-probabilities can differ between sampling and training: with asynchronous rollouts,
    with another engine, or in bfloat16, whose rounding differences exceed a typical clip range.
    Raises ConfigError for ``count=row`` if each rollout is a single row anyway.
    """
    if config.ppo.count == "row" and trains_one_sequence(config):
        raise ConfigError(
            "ppo.count=row has no effect where each rollout trains as one sequence: remove it, or "
            "set "
            "rollout.keep_reasoning=false, or in an asynchronous run rollout.agent"
        )
    return resolve(
        config.ppo,
        loss_scale_len=max_sampled_tokens(config),
        sampler_differs=streamed
        or config.actor.dtype != "float32"
        or config.engine.name != "embedded",
        scored_by_model=bool(config.reward_model.path),
        own=algorithm_options(config),
    )


def check_structured(config: Config, ppo: ResolvedOptions) -> None:
    """Raise ConfigError if ``rollout.agent_structured=constrain`` has no effect, or if the tokens
    that it samples could not be trained on."""
    if config.rollout.agent_structured != CONSTRAIN:
        return
    option = f"rollout.agent_structured={CONSTRAIN}"
    if not config.async_rl.enabled:
        raise ConfigError(
            f"{option}: no effect without async_rl.enabled, because rollout.agent plays in "
            f"asynchronous runs only"
        )
    if config.engine.name != "embedded":
        raise ConfigError(
            f"engine.name={config.engine.name}: {option} needs the log-probabilities with and "
            f"without the token mask, which only engine.name=embedded gives; use that, or "
            f"rollout.agent_structured={CHECK}"
        )
    if ppo.behav_imp_weight_mode == "none":
        raise ConfigError(
            f"{option}: the mask changes the distribution, and nothing corrects for it; set "
            f"ppo.correction (decoupled or tis), or rollout.agent_structured={CHECK}"
        )
    floor = "behav_imp_weight_floor" if ppo.behav_imp_weight_level == "product" else ""
    if ppo.behav_imp_sequence_floor is not None:
        floor = "behav_imp_sequence_floor"
    if floor and getattr(ppo, floor):
        raise ConfigError(
            f"ppo.{floor}={getattr(ppo, floor):g}: with {option} it would leave out the rows whose "
            f"tokens the mask has forced; set ppo.correction (decoupled or tis), or "
            f"rollout.agent_structured={CHECK}"
        )
    if find_spec("llguidance") is None:
        raise ConfigError(
            f"{option} needs the package llguidance, which is not installed: "
            f"{install_command('structured')}"
        )


def max_sampled_tokens(config: Config) -> int:
    """Return the maximum number of sampled tokens per episode: the sum of its turns' limits. If an
    episode trains as a single sequence, the limit of the sequence applies too."""
    in_turns = config.gen.max_new_tokens * config.rollout.max_turns
    return (
        min(in_turns, config.rollout.max_total_tokens) if trains_one_sequence(config) else in_turns
    )


def trains_one_sequence(config: Config) -> bool:
    """Return whether each episode trains as one sequence: no reasoning is dropped from the context,
    and no custom agent may hold several conversations."""
    return config.rollout.keep_reasoning and not (config.async_rl.enabled and config.rollout.agent)


def actor_spec(config: Config, first: InitialWeights) -> ModelSpec:
    """Return the specification of the actor, the role that plays and is trained."""
    actor = sft.actor_model(
        config, first.path, config.actor.optimizer, config.actor.lora.if_enabled()
    )
    return replace(actor, engine=episode_engine(config))


def episode_engine(config: sft.Config) -> EngineConfig:
    """Return the engine options with a maximum model length, which by default is the maximum length
    of an episode."""
    return replace(
        config.engine, max_model_len=config.engine.max_model_len or config.rollout.max_total_tokens
    )


def reference_model(config: Config, actor: ModelSpec) -> ModelSpec:
    """Return the specification of the reference, which keeps the initial weights of ``actor``."""
    return ModelSpec(
        "ref",
        actor.path,
        tuple(config.ref.workers),
        backend=untrained_backend(actor.backend),
        dtype=actor.dtype,
        experts=actor.experts,
        base_of="actor" if actor.lora is not None else "",
    )


def build_reward_calls(
    config: Config, ppo: ResolvedOptions, actor_path: str
) -> tuple[dict[str, ModelSpec], list[MFCDef]]:
    """Return (models, calls): the reward model, if one is configured, and the calls that compute
    ``rewards``.

    The reward model must use the tokenizer of the model in ``actor_path``. Raises ConfigError for a
    folder without a reward model, and for reward-shaping options that have no effect because
    ``reward_model.weight`` is 1.
    """
    model = config.reward_model
    if not model.path:
        return {}, [rew_inf(config, ppo)]
    if not (Path(model.path).expanduser() / VALUE_HEAD_FILE).is_file():
        raise ConfigError(
            f"reward_model.path={model.path}: not the folder of a reward model, {VALUE_HEAD_FILE} is "
            f"missing; experiment=reward_model exports one"
        )
    for name in REWARD_SHAPING if model.weight == 1 else ():
        if getattr(config.ppo, name) != getattr(PolicyGradientOptions, name):
            raise ConfigError(
                f"ppo.{name} has no effect with reward_model.weight=1, because the rewards are "
                f"then the reward model's alone: remove it"
            )
    mix_call = step_call(
        config,
        "reward_inf",
        "reward_model",
        InterfaceType.INFERENCE,
        "reward_model",
        {"weight": model.weight, **overlong_args(ppo)},
        inputs=("packed_input_ids", "loss_mask", VERIFIER_REWARDS, ROLLOUT_KEY),
        outputs=("rewards",),
    )
    scoring = ModelSpec(
        "reward_model",
        model.path,
        tuple(model.workers),
        dtype=model.dtype,
        head="value",
        experts=model.experts,
        tokens_of=actor_path,
    )
    return {"reward_model": scoring}, [rew_inf(config, ppo, VERIFIER_REWARDS), mix_call]


def algorithm_options(config: Config) -> Any:
    """Return the section ``algorithm``, which the launcher adds for ``ppo.algo=FILE.py:NAME``, or
    None if there is none."""
    return getattr(config, "algorithm", None)


def actor_gen(config: Config, ppo: ResolvedOptions, role: str = "actor") -> MFCDef:
    """Return the call that generates groups of episodes with the weights of ``role``, the actor or
    the reference.

    It has no input keys, because the task of a sample is metadata.
    """
    workers = (
        config.actor.workers if role == "actor" else (*config.ref.workers, config.actor.workers[0])
    )
    options = rollout_options_per_worker(config, workers)
    keys = EPISODE_KEYS
    if ppo.needs_feedback:
        options = replace(options, feedback=ppo.feedback, feedback_tokens=ppo.feedback_tokens)
        keys = (*keys, FEEDBACK_PROMPT)
    keys = (*keys, *unmasked_keys(config))
    args = options.to_args()
    generation = step_call(
        config, "actor_gen", role, InterfaceType.GENERATE, "env_rollout", args, outputs=keys
    )
    if not ppo.dynamic_sampling:
        return generation
    return replace(generation, resample=ppo.dynamic_sampling, signal=group_signal(config, ppo))


def unmasked_keys(config: Config) -> tuple[str, ...]:
    """Return the key of the log-probabilities without token masks, if tokens may have masks."""
    return (UNMASKED_LOGPROBS,) if config.rollout.agent_structured == CONSTRAIN else ()


def group_signal(config: Config, ppo: ResolvedOptions) -> GroupSignal:
    """Return the criterion by which dynamic sampling decides whether a group has a learning signal.

    A group has one if its environment rewards differ after clipping as in ``rew_inf``. The overlong
    penalty does not count: a group whose rewards differ only by length would only teach short
    answers. DAPO requires at least one right and one wrong answer (Yu et al. 2025, eq. 11).
    """
    bounds = [
        clip / ppo.reward_scaling - ppo.reward_bias
        for clip in (-ppo.max_reward_clip, ppo.max_reward_clip)
    ]
    k = ppo.pass_at_k if ppo.adv_estimator == PASS_AT_K else None
    return GroupSignal(max(2, config.rollout.min_group_size), min(bounds), max(bounds), k or 1)


def overlong_args(ppo: ResolvedOptions) -> dict[str, Any]:
    """Return the arguments of the overlong penalty for the call that outputs ``rewards``; {} if
    there is no penalty."""
    names = ("overlong_length", "overlong_buffer") if ppo.overlong_length is not None else ()
    return {name: getattr(ppo, name) for name in names}


def rew_inf(config: Config, ppo: ResolvedOptions, output: str = "rewards") -> MFCDef:
    """Return the call that shapes the environment's rewards and subtracts the overlong penalty.

    It needs no weights and runs on the actor's worker. With a reward model, ``output`` is the key
    of the verifier's rewards, which another call mixes with the reward model's. That call then also
    subtracts the penalty, so that the mixing weight does not scale it.
    """
    args: dict[str, Any] = {name: getattr(ppo, name) for name in REWARD_SHAPING} | {
        "output_key": output
    }
    keys = ("env_rewards", "outcome")
    if output == "rewards" and (penalty := overlong_args(ppo)):
        args |= penalty
        keys = (*keys, "packed_input_ids", "loss_mask", ROLLOUT_KEY)
    return step_call(
        config,
        "rew_inf",
        "actor",
        InterfaceType.INFERENCE,
        "outcome_reward",
        args,
        inputs=keys,
        outputs=(output,),
    )


def ref_inf(config: Config) -> MFCDef:
    """Return the call that computes the reference's log-probabilities of the trained tokens, for
    the KL term."""
    return step_call(
        config,
        "ref_inf",
        "ref",
        InterfaceType.INFERENCE,
        "logprob",
        {"temperature": config.gen.temperature},
        inputs=("packed_input_ids", "loss_mask"),
        outputs=("packed_ref_logprobs",),
    )


def teacher_model(config: Config, actor_path: str) -> ModelSpec:
    """Return the specification of the teacher, a frozen role. It must use the tokenizer of the
    actor in ``actor_path``."""
    teacher = config.teacher
    return ModelSpec(
        "teacher",
        teacher.path,
        tuple(teacher.workers),
        dtype=teacher.dtype,
        experts=None,
        tokens_of=actor_path,
    )


def teacher_inf(config: Config) -> MFCDef:
    """Return the call that computes the teacher's log-probabilities, with the teacher's own role or
    through a server.

    The actor's worker sends the requests to a server. Raises ConfigError if no teacher is
    configured. For a server, also raises ConfigError if the temperature is not 1, because servers
    support no other, or if several workers share a sharded actor, because each would send requests
    for the same sequences.
    """
    teacher = config.teacher
    keys = ("packed_input_ids", "loss_mask")
    args: dict[str, Any] = {"output_key": "teacher_logprobs", "temperature": config.gen.temperature}
    role = "teacher"
    interface = "logprob"
    if teacher.url:
        if config.gen.temperature != 1:
            raise ConfigError(
                f"gen.temperature={config.gen.temperature:g}: a server returns log-probabilities "
                f"at temperature 1, so "
                "teacher.url needs gen.temperature=1; a teacher of teacher.path takes any"
            )
        if resolve_parallel("actor", config.actor).fsdp > 1:
            raise ConfigError(
                f"actor.backend={config.actor.backend}: all workers of a sharded actor would query "
                f"teacher.url and "
                "get slightly different values; use actor.backend=ddp, or a teacher of teacher.path"
            )
        role = "actor"
        interface = "served_logprob"
        args = {
            "url": teacher.url,
            "served_model": teacher.model,
            "token_file": teacher.token_file or "",
            "connections": teacher.connections,
            "timeout_s": config.rpc.call_timeout_s,
        }
    elif not teacher.path:
        raise ConfigError(
            f"ppo.distill_weight (ppo.algo={config.ppo.algo}): there is no teacher; set "
            f"teacher.path to a folder or a "
            "hub id, or teacher.url to a server"
        )
    return step_call(
        config,
        "teacher_inf",
        role,
        InterfaceType.INFERENCE,
        interface,
        args,
        inputs=keys,
        outputs=("teacher_logprobs",),
    )


def feedback_inf(config: Config) -> MFCDef:
    """Return the self-distillation call: the actor scores its own tokens, given feedback on the
    episode.

    Raises ConfigError for a custom agent, because feedback cannot be inserted into an agent's own
    prompts.
    """
    if config.async_rl.enabled and config.rollout.agent:
        raise ConfigError(
            f"rollout.agent={config.rollout.agent}: it writes its own prompts, so feedback cannot "
            f"be inserted; "
            "leave out ppo.feedback (ppo.algo=sdpo), or the agent"
        )
    return step_call(
        config,
        "feedback_inf",
        "actor",
        InterfaceType.INFERENCE,
        "self_teacher",
        {"temperature": config.gen.temperature},
        inputs=("packed_input_ids", "prompt_mask", "loss_mask", FEEDBACK_PROMPT),
        outputs=(FEEDBACK_RATIOS,),
    )


def actor_inf(config: Config) -> MFCDef:
    """Return the call that computes the actor's log-probabilities before the update of the step,
    which are those of the proximal policy."""
    args = {"output_key": "proximal_logprobs", "temperature": config.gen.temperature}
    return step_call(
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
    """Return the call that computes advantages and takes one optimization step on the policy
    objective.

    During the critic's warm-up it makes no update.
    """
    args = {
        "ppo": ppo.to_plain_values(config.ppo),
        "temperature": config.gen.temperature,
        "loss_scale_len": ppo.loss_scale_len,
        "first_step": config.critic.warmup_steps if ppo.needs_values else 0,
        **({} if ppo.own is None else {"algorithm": to_json_value(ppo.own)}),
    }
    keys = (
        "packed_input_ids",
        "loss_mask",
        "packed_logprobs",
        *unmasked_keys(config),
        "packed_versions",
        "rewards",
        "seq_no_eos_mask",
        "outcome",
        ROLLOUT_KEY,
        *ppo.scored_keys,
        *ppo.turn_keys,
    )
    return step_call(
        config,
        "actor_train",
        "actor",
        InterfaceType.TRAIN_STEP,
        "policy_gradient",
        args,
        inputs=keys,
    )


def critic_model(config: Config, actor_path: str) -> ModelSpec:
    """Return the specification of the critic, a decoder with a value head.

    Its initial weights are the actor's, from ``actor_path``, unless ``critic.path`` is set. Its
    learning rate defaults to the actor's, or to ``BUILTIN_RATE`` when it starts from the built-in
    policy.
    """
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
        experts=config.actor.experts if critic.path == ACTOR else critic.experts,
        gradient_checkpointing=critic.gradient_checkpointing,
        compile=critic.compile,
        optimizer=critic.optimizer.with_default_lr(
            BUILTIN_RATE if small else config.actor.optimizer.lr
        ),
        parallel=resolve_parallel("critic", critic),
        tokens_of="" if critic.path == ACTOR else actor_path,
    )


def critic_inf(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """Return the call that computes the value of the state before each sampled token, with the
    critic's weights before their update."""
    args = _critic_args(config, ppo)
    keys = ("packed_input_ids", "loss_mask")
    return step_call(
        config,
        "critic_inf",
        "critic",
        InterfaceType.INFERENCE,
        "critic",
        args,
        inputs=keys,
        outputs=("values",),
    )


def critic_train(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """Return the call that trains the critic on returns, which are computed from the same inputs as
    the advantages in ``actor_train``."""
    behaviour = (
        ("packed_logprobs", *unmasked_keys(config), "packed_ref_logprobs")
        if ppo.kl_ctl != 0
        else ()
    )
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
    return step_call(
        config, "critic_train", "critic", InterfaceType.TRAIN_STEP, "critic", args, inputs=keys
    )


def _critic_args(config: Config, ppo: ResolvedOptions) -> dict[str, object]:
    """Return the arguments of the critic's interface. They are the same for both critic calls, so
    that both share one interface object and the scale of its values."""
    return {
        "ppo": ppo.to_plain_values(config.ppo),
        "critic": config.critic.to_critic_options(ppo.ppo_n_minibatches, ppo.sample_reuse),
        "loss_scale_len": ppo.loss_scale_len,
    }


def rollout_options(config: sft.Config, group_size: int) -> RolloutOptions:
    """Return the options for playing episodes, in training as well as evaluation. ``group_size``:
    rollouts per task in training.

    Raises ConfigError if a limit of the run does not fit those of the environment, see
    ``check_limits``.
    """
    rollout = config.rollout
    environment = chosen_environment(config.env)
    check_limits(config, environment.spec)
    max_sessions = environment.spec.concurrency
    return RolloutOptions(
        environment=environment.reference,
        environment_options=environment.options,
        group_size=group_size,
        sessions=min(
            rollout.sessions or max_sessions or SESSIONS,
            max_sessions or rollout.sessions or SESSIONS,
        ),
        gen=config.gen,
        max_turns=rollout.max_turns,
        max_total_tokens=rollout.max_total_tokens,
        min_group_size=rollout.min_group_size,
        message_timeout_s=_find_message_timeout(rollout.message_timeout_s, environment.spec),
        on_failure=rollout.on_failure,
        retries=rollout.retries,
        keep_reasoning=rollout.keep_reasoning,
        agent_structured=rollout.agent_structured,
        seed=config.seed,
        transcripts=config.monitor.episodes_per_step,
    )


def check_limits(config: sft.Config, spec: EnvironmentSpec) -> None:
    """Raise ConfigError if the limit of turns would end an environment's episodes before it scores
    them, if a limit of an environment of a mixture is higher than the run's, or if an environment
    may take longer for an answer than ``rollout.message_timeout_s`` says."""
    rollout = config.rollout
    bounds = {"max_turns": "rollout", "max_total_tokens": "rollout", "max_new_tokens": "gen"}
    for name, part in (spec.parts or {"": EnvironmentPart(spec, 1.0)}).items():
        for limit in fields(part.limits):
            value = getattr(part.limits, limit.name)
            section = bounds[limit.name]
            if value > (bound := getattr(getattr(config, section), limit.name)):
                raise ConfigError(
                    f"env.limits.{name}.{limit.name}={value}: more than "
                    f"{section}.{limit.name}={bound}, the limit of the whole run: raise that one "
                    f"or lower this one"
                )
        max_turns = part.limits.max_turns or rollout.max_turns
        if (environment_turns := part.spec.max_turns) > max_turns:
            limited = f"env.limits.{name}" if part.limits.max_turns else "rollout"
            own = f"env.of.{name}" if name else "env"
            raise ConfigError(
                f"{limited}.max_turns={max_turns} cuts episodes off before {part.spec.name} has "
                f"ended and scored them, which takes up to {environment_turns} turns "
                f"({own}.max_turns): raise the one or lower the other"
            )
        if (longest_s := part.spec.longest_call_s) > rollout.message_timeout_s > 0:
            raise ConfigError(
                f"rollout.message_timeout_s={rollout.message_timeout_s:g}: {part.spec.name} may "
                f"take {longest_s:g} s for an answer by the time limits of its tasks: set it to "
                f"{math.ceil(longest_s)} or more, or lower those"
            )


def _find_message_timeout(seconds: float, spec: EnvironmentSpec) -> float:
    """Return ``rollout.message_timeout_s``, or what its value 0 means for an environment."""
    if seconds:
        return seconds
    parts = [part.spec for part in spec.parts.values()] or [spec]
    slowest = max(parts, key=lambda part: part.longest_call_s)
    if slowest.longest_call_s <= MESSAGE_TIMEOUT_S:
        return MESSAGE_TIMEOUT_S
    _log_message_timeout(slowest.name, math.ceil(slowest.longest_call_s))
    return float(math.ceil(slowest.longest_call_s))


@functools.cache
def _log_message_timeout(name: str, seconds: int) -> None:
    """Say once how long a run waits."""
    _log.warning(
        "rollout.message_timeout_s is not set: %d s, since %s may take as long by the time limits of "
        "its tasks",
        seconds,
        name,
    )


def rollout_options_per_worker(config: Config, workers: Iterable[int]) -> RolloutOptions:
    """Return the rollout options for each of ``workers``. The environment's sessions are divided
    evenly between them.

    Workers keep their sessions open, so a worker that tried to open more than its share would wait
    forever.
    """
    options = rollout_options(config, config.ppo.group_size)
    return replace(options, sessions=max(1, options.sessions // len({*workers})))


def on_tasks(
    name: str,
    config: Config,
    models: dict[str, ModelSpec],
    mfcs: list[MFCDef],
    first: InitialWeights,
    exported: str = "actor",
) -> ExperimentSpec:
    """Return the experiment with these models and calls, on tasks drawn by the curriculum.

    ``exported``: role whose weights are saved at the end. If it is the actor, its success on
    held-out tasks is evaluated before and after training.
    """
    environment = chosen_environment(config.env)
    dataset = config.dataset
    mfcs = add_turn_rewards(mfcs)
    playing = next(call for call in mfcs if call.interface == "env_rollout")
    tasks = {
        "environment": environment.reference,
        "options": environment.options,
        "strategy": dataset.curriculum,
        "group_success": dataset.group_success,
        "untried_share": dataset.untried_share,
        "priority": to_json_value(dataset.priority),
    }
    return ExperimentSpec(
        name=name,
        models=models,
        mfcs=tuple(mfcs),
        source=SourceSpec(
            "mixture" if environment.spec.parts else "tasks",
            tasks,
            worker=models["actor"].workers[0],
        ),
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        environment=environment.spec.launch,
        evaluation=held_out_evaluation(config, playing) if exported == "actor" else None,
        before=first.before,
        jobs=first.jobs,
        export_role=exported,
        log_keys=("prompt_mask", "packed_versions", "seq_no_eos_mask", ROLLOUT_KEY),
    )


def stream_rollouts(spec: ExperimentSpec, config: Config) -> ExperimentSpec:
    """Return the asynchronous variant of an experiment, whose generating calls run on rollout
    workers.

    Raises ConfigError if a worker has too few sessions for a group, if the agent's file does not
    exist, or for an option without effect.
    """
    trainer_calls, rollout_calls = to_async(spec.mfcs)
    options = config.async_rl
    episodes = RolloutOptions.from_args(rollout_calls[0].interface_args)
    # Rollout workers get all sessions: the actor's workers play no episodes.
    episodes = replace(episodes, sessions=rollout_options(config, config.ppo.group_size).sessions)
    sessions = episodes.sessions // options.n_rollout_workers
    if sessions < config.ppo.group_size:
        pool = f": {spec.environment.section}.pool_size" if spec.environment else ""
        raise ConfigError(
            f"{episodes.sessions} episodes at once: each of "
            f"async_rl.n_rollout_workers={options.n_rollout_workers} "
            f"needs ppo.group_size={config.ppo.group_size} of them (rollout.sessions, and what the "
            f"environment allows{pool})"
        )
    rollout = RolloutSpec(
        "actor", tuple(rollout_calls), episodes, options, sessions, agent=resolve_agent(config)
    )
    trainer = spec.models["actor"].workers[0]
    streamed = {key for call in rollout_calls for key in call.output_keys}
    return replace(
        spec,
        mfcs=tuple(trainer_calls),
        rollout=rollout,
        source=replace(spec.source, keys=tuple(sorted(streamed)), worker=trainer),
    )


def resolve_agent(config: Config) -> str:
    """Return the reference to the agent with an absolute path, because rollout workers import it.
    Raises ConfigError if its file does not exist."""
    agent = absolute_reference(config.rollout.agent)
    file = agent.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"rollout.agent={config.rollout.agent}: there is no file {file}")
    return agent


def add_turn_rewards(mfcs: list[MFCDef]) -> list[MFCDef]:
    """Return the calls. If any of them reads turn rewards, ``env_rollout`` gets these as additional
    outputs."""
    if not any(key in TURN_KEYS for call in mfcs for key in call.input_keys):
        return mfcs
    return [
        replace(
            call,
            output_keys=(*call.output_keys, *TURN_KEYS),
            interface_args={**call.interface_args, "turn_rewards": True},
        )
        if call.interface == "env_rollout"
        else call
        for call in mfcs
    ]


def evaluate_episodes(config: sft.Config) -> EvaluationSpec:
    """Return the evaluation on held-out tasks of an experiment that plays no other episodes."""
    rollouts = rollout_options(config, group_size=1)
    # The shares of a mixture are about the groups of training.
    options = {k: v for k, v in rollouts.environment_options.items() if k != "weights"}
    if chosen_environment(config.env).spec.parts:
        rollouts = replace(rollouts, environment_options=options)
    args = rollouts.to_args()
    playing = step_call(
        config,
        "actor_gen",
        "actor",
        InterfaceType.GENERATE,
        "env_rollout",
        args,
        outputs=EPISODE_KEYS,
    )
    return held_out_evaluation(config, playing)


def held_out_evaluation(config: sft.Config, playing: MFCDef) -> EvaluationSpec:
    """Return the evaluation on held-out instances of the templates, with sampled and greedy
    episodes.

    It has the same interface arguments as the call ``playing``. So both share one interface and its
    sessions; the environment may not allow more sessions.
    """
    evaluation = config.evaluation
    final = HeldOutOptions(
        HELD_OUT,
        evaluation.episodes_per_task,
        evaluation.greedy_episodes_per_task,
        evaluation.templates,
    )
    share = evaluation.interim_share
    interim = replace(
        final,
        episodes_per_task=math.ceil(share * final.episodes_per_task),
        greedy_episodes_per_task=math.ceil(share * final.greedy_episodes_per_task),
    )
    return EvaluationSpec(
        "actor",
        playing.interface,
        playing.interface_args,
        final.to_args(),
        interim.to_args(),
        every_steps=evaluation.every_steps,
    )


def step_call(
    config: sft.Config,
    name: str,
    role: str,
    kind: InterfaceType,
    interface: str,
    args: dict[str, Any],
    *,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
) -> MFCDef:
    """Return the definition of a call that processes all samples of a step."""
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
