"""Policy-gradient training on the tasks of any environment: env=NAME, or env.path=FILE.py:Name for one of your own.

GRPO, PPO, REINFORCE and their kin are settings of it (ppo.algo); which calls there are follows from what they need.

(tasks) ──► actor_gen ──┬─ env_rewards, outcome ─► rew_inf ────┬──┬─► actor_train
                       ├─ packed_input_ids ─► teacher_inf ────┤  │   (teacher_inf only to distil,
                       ├─ feedback_prompt_ids ► feedback_inf ─┤  │    feedback_inf only by what the policy is told,
                       ├─ packed_input_ids ─────► ref_inf ────┤  │    ref_inf only with a KL term,
                       ├─ packed_input_ids ───► actor_inf ────┤  │    actor_inf only for a proximal policy,
                       ├─ packed_input_ids ──► critic_inf ────┘  │    critic_* only where advantages take values)
                       └─ tokens, masks, logprobs ───────────────┴─► critic_train

With async_rl.enabled rollout workers take the place of actor_gen and rew_inf, and play while the trainer trains:

rollout workers ── packed_input_ids, rewards, ... ──► StreamDataset ──► ref_inf, actor_inf, critic_inf ──► *_train
  (tokens from generation workers)  ▲──────────────── weights of every step ───────────────────────────────┘

The inference calls need nothing of each other, and neither do the two train calls: on different workers they run side
by side. Both train calls compute the same advantages from the same inputs. Values are those of the critic as it is when
the batch arrives, whatever weights sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import sft
from experiments.sft import BUILTIN, UNTRAINED, FirstWeights, first_weights
from realhf.algorithms.options import PASS_AT_K, PolicyGradientOptions, ResolvedOptions, batch_problems
from realhf.algorithms.resolution import resolve
from realhf.algorithms.role_options import ACTOR, BUILTIN_RATE, CriticConfig, RewardModelConfig
from realhf.api.config import ConfigError, EngineConfig, TeacherConfig, run_folder
from realhf.api.environment import HELD_OUT
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
from realhf.api.keys import FEEDBACK_PROMPT, FEEDBACK_RATIOS, ROLLOUT_KEY, TURN_KEYS, VERIFIER_REWARDS
from realhf.api.option import section
from realhf.api.parallel import alone, parallel_of
from realhf.api.sample import MicroBatchSpec
from realhf.api.source import GroupSignal
from realhf.base.dataclass_json import to_json_value
from realhf.base.hf_config import HEAD_FILE
from realhf.base.plugin import absolute
from realhf.env.loader.load import chosen_environment, with_environment

SESSIONS = 32
"""Episodes at once where neither the configuration nor the environment sets a number."""
NO_CRITIC = "only advantages that take values have a critic (ppo.adv_estimator=gae, which ppo.algo=ppo sets)"
NO_TEACHER = (
    "nothing is distilled (ppo.distill_weight, which ppo.algo=opd sets), the teacher is the policy itself "
    "(ppo.feedback), or it belongs to the other kind of teacher (teacher.path, teacher.url)"
)
NO_REWARD_MODEL = "reward_model.path names no reward model, or this experiment has another use for it"
VERIFIED = ("reward_scaling", "reward_bias", "max_reward_clip")
"""Options of the section ppo about the rewards that the environment gives."""
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


@dataclass
class Config(sft.Config):
    """With the policy gradient and its critic, beside the environment that the supervised experiment has."""

    ppo: PolicyGradientOptions = section(PolicyGradientOptions)
    critic: CriticConfig = section(CriticConfig, idle=NO_CRITIC)
    teacher: TeacherConfig = section(TeacherConfig, idle=NO_TEACHER)
    reward_model: RewardModelConfig = section(RewardModelConfig, idle=NO_REWARD_MODEL)

    def problems(self, name: str) -> Iterator[str]:
        """Groups and minibatches must fit to rollouts and batches; the critic's warm-up must end before the run."""
        del name
        yield from batch_problems(self.ppo, self)
        if self.critic.warmup_steps >= self.total_train_steps:
            yield (
                f"critic.warmup_steps={self.critic.warmup_steps}: the actor would never train, the run has "
                f"total_train_steps={self.total_train_steps}"
            )
        if self.actor.lora.rank and self.actor.lora.dropout:
            yield (
                f"actor.lora.dropout={self.actor.lora.dropout}: the policy that trains must be the one that sampled, "
                "without anything dropped; set 0, or train on demonstrations with it (sft)"
            )


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on an environment. Raises ValueError when there is no such environment."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    streamed = config.async_rl.enabled
    ppo, first = policy_options(config, streamed=streamed), first_weights(config)
    models, mfcs = policy_gradient(config, ppo, first)
    spec = on_tasks(config.experiment, config, models, [actor_gen(config, ppo), *mfcs], first)
    return asynchronous(spec, config) if streamed else spec


def policy_gradient(
    config: Config, ppo: ResolvedOptions, first: FirstWeights
) -> tuple[dict[str, ModelSpec], list[MFCDef]]:
    """Return the models, and the calls that follow the episodes, wherever these come from."""
    actor, (scoring, mfcs) = actor_spec(config, first), rewarded(config, ppo, first.path)
    if scoring and not ppo.rl_weight:
        raise ConfigError(
            f"reward_model.path: rewards teach nothing with ppo.rl_weight=0 (ppo.algo={ppo.algo}); leave it out, or "
            "set ppo.rl_weight"
        )
    if scoring and ppo.credit != "episode":
        raise ConfigError(
            f"ppo.credit={ppo.credit}: rewards of turns are the verifier's alone; leave out reward_model.path, or take "
            "ppo.credit=episode"
        )
    models = {"actor": actor, **scoring}
    if ppo.needs_reference:
        models["ref"] = reference(config, actor)
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
    """The options of the policy gradient; ``loss_agg=constant`` divides by what an episode can sample at most. In
    bfloat16 the two engines round differently, by far more than a clip range may have. Raises ConfigError for
    ``count=row`` where each rollout has one."""
    if config.ppo.count == "row" and one_sequence(config):
        raise ConfigError(
            "ppo.count=row has no effect where each rollout trains as one sequence: remove it, or set "
            "rollout.keep_reasoning=false, or in an asynchronous run rollout.agent"
        )
    return resolve(
        config.ppo,
        loss_scale_len=most_sampled(config),
        sampler_differs=streamed or config.actor.dtype != "float32" or config.engine.name != "embedded",
        scored_by_model=bool(config.reward_model.path),
        own=own_options(config),
    )


def most_sampled(config: Config) -> int:
    """The most tokens that the policy can sample in an episode: in its turns, and in one sequence if that is all that
    an episode trains as."""
    in_turns = config.gen.max_new_tokens * config.rollout.max_turns
    return min(in_turns, config.rollout.max_total_tokens) if one_sequence(config) else in_turns


def one_sequence(config: Config) -> bool:
    """Whether all that an episode trains as is one sequence: no reasoning is dropped, and no agent has branches."""
    return config.rollout.keep_reasoning and not (config.async_rl.enabled and config.rollout.agent)


def actor_spec(config: Config, first: FirstWeights) -> ModelSpec:
    """The role that plays and trains."""
    actor = sft.actor_model(config, first.path, config.actor.optimizer, config.actor.lora.chosen())
    return replace(actor, engine=sampler(config))


def sampler(config: Config) -> EngineConfig:
    """What samples tokens, for sequences as long as episodes may be."""
    return replace(config.engine, max_model_len=config.engine.max_model_len or config.rollout.max_total_tokens)


def reference(config: Config, actor: ModelSpec) -> ModelSpec:
    """The role that keeps the first weights of ``actor``."""
    return ModelSpec(
        "ref",
        actor.path,
        tuple(config.ref.workers),
        backend=alone(actor.backend),
        dtype=actor.dtype,
        experts=actor.experts,
        base_of="actor" if actor.lora is not None else "",
    )


def rewarded(config: Config, ppo: ResolvedOptions, actor_path: str) -> tuple[dict[str, ModelSpec], list[MFCDef]]:
    """The calls that make ``rewards`` of what the environment gave, and the reward model beside it, if there is
    one, which reads the tokens of the model in ``actor_path``. Raises ConfigError for a folder that holds none, and for
    options of the verifier's rewards where these have no part."""
    model = config.reward_model
    if not model.path:
        return {}, [rew_inf(config, ppo)]
    if not (Path(model.path).expanduser() / HEAD_FILE).is_file():
        raise ConfigError(
            f"reward_model.path={model.path}: no folder that holds {HEAD_FILE}, so no reward model; "
            "experiment=reward_model exports one"
        )
    for name in VERIFIED if model.weight == 1 else ():
        if getattr(config.ppo, name) != getattr(PolicyGradientOptions, name):
            raise ConfigError(
                f"ppo.{name} has no effect with reward_model.weight=1, which leaves the verifier no part in the "
                "rewards: remove it"
            )
    mixed = call(
        config,
        "reward_inf",
        "reward_model",
        InterfaceType.INFERENCE,
        "reward_model",
        {"weight": model.weight, **overlong(ppo)},
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
    return {"reward_model": scoring}, [rew_inf(config, ppo, VERIFIER_REWARDS), mixed]


def own_options(config: Config) -> Any:
    """The section ``algorithm`` that the launcher adds for ``ppo.algo=FILE.py:NAME``; None without it."""
    return getattr(config, "algorithm", None)


def actor_gen(config: Config, ppo: ResolvedOptions, role: str = "actor") -> MFCDef:
    """Groups of episodes, played by the actor, or by the reference in its place. The task of a sample is metadata, so
    there are no input keys."""
    workers = config.actor.workers if role == "actor" else (*config.ref.workers, config.actor.workers[0])
    options, keys = of_one_worker(config, workers), EPISODE_KEYS
    if ppo.needs_feedback:
        options = replace(options, feedback=ppo.feedback, feedback_tokens=ppo.feedback_tokens)
        keys = (*keys, FEEDBACK_PROMPT)
    args = options.to_args()
    played = call(config, "actor_gen", role, InterfaceType.GENERATE, "env_rollout", args, outputs=keys)
    return (
        replace(played, resample=ppo.dynamic_sampling, signal=signal(config, ppo)) if ppo.dynamic_sampling else played
    )


def signal(config: Config, ppo: ResolvedOptions) -> GroupSignal:
    """Which groups teach something: by the environment's rewards, cut where ``rew_inf`` cuts them, and without the
    penalty for length. DAPO judges by the answers, of which some must be right and some wrong (Yu et al. 2025, eq. 11):
    a group that differs in its lengths alone would teach nothing but to be short."""
    ends = [end / ppo.reward_scaling - ppo.reward_bias for end in (-ppo.max_reward_clip, ppo.max_reward_clip)]
    k = ppo.pass_at_k if ppo.adv_estimator == PASS_AT_K else None
    return GroupSignal(max(2, config.rollout.min_group_size), min(ends), max(ends), k or 1)


def overlong(ppo: ResolvedOptions) -> dict[str, Any]:
    """Arguments about the penalty for length, of the call that makes ``rewards``; {} without one."""
    names = ("overlong_length", "overlong_buffer") if ppo.overlong_length is not None else ()
    return {name: getattr(ppo, name) for name in names}


def rew_inf(config: Config, ppo: ResolvedOptions, output: str = "rewards") -> MFCDef:
    """Outcomes to rewards, less for rollouts that are too long; it needs no weights and runs where the actor is. Beside
    a reward model, which mixes what is called ``output`` then, no length counts yet: the penalty has no part of 1."""
    args: dict[str, Any] = {name: getattr(ppo, name) for name in VERIFIED} | {"output_key": output}
    keys = ("env_rewards", "outcome")
    if output == "rewards" and (penalty := overlong(ppo)):
        args |= penalty
        keys = (*keys, "packed_input_ids", "loss_mask", ROLLOUT_KEY)
    return call(
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
    """Log-probabilities of the reference, for the KL term: of the trainable tokens, which are a third of all."""
    return call(
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
    """Return the frozen role that judges the tokens of the actor, whose first weights and tokenizer are in
    ``actor_path``."""
    teacher = config.teacher
    return ModelSpec(
        "teacher", teacher.path, tuple(teacher.workers), dtype=teacher.dtype, experts=None, tokens_of=actor_path
    )


def teacher_inf(config: Config) -> MFCDef:
    """Log-probabilities of the teacher: of a role of its own, or of a server, which the actor's worker asks. Raises
    ConfigError without a teacher, and for a server where tokens are not sampled at temperature 1, the only one that it
    knows, or where several workers would ask it for the same."""
    teacher, keys = config.teacher, ("packed_input_ids", "loss_mask")
    args: dict[str, Any] = {"output_key": "teacher_logprobs", "temperature": config.gen.temperature}
    role, interface = "teacher", "logprob"
    if teacher.url:
        if config.gen.temperature != 1:
            raise ConfigError(
                f"gen.temperature={config.gen.temperature:g}: a server says log-probabilities at temperature 1, so "
                "teacher.url needs gen.temperature=1; a teacher of teacher.path takes any"
            )
        if parallel_of("actor", config.actor).fsdp > 1:
            raise ConfigError(
                f"actor.backend={config.actor.backend}: all workers of an actor that is cut over them would ask "
                "teacher.url, and be told other digits; use actor.backend=ddp, or a teacher of teacher.path"
            )
        role, interface = "actor", "served_logprob"
        args = {
            "url": teacher.url,
            "served_model": teacher.model,
            "token_file": teacher.token_file or "",
            "connections": teacher.connections,
            "timeout_s": config.rpc.call_timeout_s,
        }
    elif not teacher.path:
        raise ConfigError(
            f"ppo.distill_weight (ppo.algo={config.ppo.algo}): there is no teacher; set teacher.path to a folder or a "
            "hub id, or teacher.url to a server"
        )
    return call(
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
    """What the actor makes of its tokens when it has read what became of them. Raises ConfigError for an agent of one's
    own, whose prompts are not the environment's."""
    if config.async_rl.enabled and config.rollout.agent:
        raise ConfigError(
            f"rollout.agent={config.rollout.agent}: what it asks the policy is its own, so nothing can be told there; "
            "leave out ppo.feedback (ppo.algo=sdpo), or the agent"
        )
    return call(
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
    """Log-probabilities of the actor before it trains on the step: the proximal policy's."""
    args = {"output_key": "proximal_logprobs", "temperature": config.gen.temperature}
    return call(
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
    """Advantages, then one step on the objective that ``ppo`` was resolved to; no update while only a critic trains."""
    args = {
        "ppo": ppo.chosen(config.ppo),
        "temperature": config.gen.temperature,
        "loss_scale_len": ppo.loss_scale_len,
        "first_step": config.critic.warmup_steps if ppo.needs_values else 0,
        **({} if ppo.own is None else {"algorithm": to_json_value(ppo.own)}),
    }
    keys = (
        "packed_input_ids",
        "loss_mask",
        "packed_logprobs",
        "packed_versions",
        "rewards",
        "seq_no_eos_mask",
        "outcome",
        ROLLOUT_KEY,
        *ppo.scored_keys,
        *ppo.turn_keys,
    )
    return call(config, "actor_train", "actor", InterfaceType.TRAIN_STEP, "policy_gradient", args, inputs=keys)


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
        experts=config.actor.experts if critic.path == ACTOR else critic.experts,
        gradient_checkpointing=critic.gradient_checkpointing,
        compile=critic.compile,
        optimizer=critic.optimizer.at(BUILTIN_RATE if small else config.actor.optimizer.lr),
        parallel=parallel_of("critic", critic),
        tokens_of="" if critic.path == ACTOR else actor_path,
    )


def critic_inf(config: Config, ppo: ResolvedOptions) -> MFCDef:
    """Values of the states in which the policy sampled, before the critic trains on the step."""
    args = _critic_args(config, ppo)
    keys = ("packed_input_ids", "loss_mask")
    return call(
        config, "critic_inf", "critic", InterfaceType.INFERENCE, "critic", args, inputs=keys, outputs=("values",)
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
    return call(config, "critic_train", "critic", InterfaceType.TRAIN_STEP, "critic", args, inputs=keys)


def _critic_args(config: Config, ppo: ResolvedOptions) -> dict[str, object]:
    """Arguments of the critic's interface; calls with the same ones share it, and with it the units of its values."""
    return {
        "ppo": ppo.chosen(config.ppo),
        "critic": config.critic.learning(ppo.ppo_n_minibatches, ppo.sample_reuse),
        "loss_scale_len": ppo.loss_scale_len,
    }


def rollout_options(config: Config) -> RolloutOptions:
    """How training and evaluation play their episodes. Raises ConfigError for an environment that would be cut off
    before it scores them."""
    rollout, environment = config.rollout, chosen_environment(config.env)
    if (own := environment.spec.max_turns) > rollout.max_turns:
        raise ConfigError(
            f"rollout.max_turns={rollout.max_turns} cuts episodes off before {environment.spec.name} has ended and "
            f"scored them, which takes up to {own} turns (env.max_turns): raise the one or lower the other"
        )
    most = environment.spec.concurrency
    return RolloutOptions(
        environment=environment.reference,
        environment_options=environment.options,
        group_size=config.ppo.group_size,
        sessions=min(rollout.sessions or most or SESSIONS, most or rollout.sessions or SESSIONS),
        gen=config.gen,
        max_turns=rollout.max_turns,
        max_total_tokens=rollout.max_total_tokens,
        min_group_size=rollout.min_group_size,
        message_timeout_s=rollout.message_timeout_s,
        on_failure=rollout.on_failure,
        retries=rollout.retries,
        keep_reasoning=rollout.keep_reasoning,
        seed=config.seed,
        transcripts=config.monitor.episodes_per_step,
    )


def of_one_worker(config: Config, workers: Iterable[int]) -> RolloutOptions:
    """The options of each of the ``workers`` that play for training or evaluation, which is the first one's of the
    actor. Together they have the sessions of the environment: each keeps its own, and would wait in vain for more than
    there are."""
    options = rollout_options(config)
    return replace(options, sessions=max(1, options.sessions // len({*workers})))


def on_tasks(
    name: str,
    config: Config,
    models: dict[str, ModelSpec],
    mfcs: list[MFCDef],
    first: FirstWeights,
    exported: str = "actor",
) -> ExperimentSpec:
    """Tasks from the curriculum; the policy, or another role, exported at the end, and held-out success before and
    after if it is the policy."""
    environment, dataset, mfcs = chosen_environment(config.env), config.dataset, with_turns(mfcs)
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
        source=SourceSpec("tasks", tasks, worker=models["actor"].workers[0]),
        n_seqs=config.dataset.train_bs_n_seqs,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        environment=environment.spec.launch,
        evaluation=held_out(config, playing) if exported == "actor" else None,
        before=first.before,
        jobs=first.jobs,
        export_role=exported,
        log_keys=("prompt_mask", "packed_versions", "seq_no_eos_mask", ROLLOUT_KEY),
    )


def asynchronous(spec: ExperimentSpec, config: Config) -> ExperimentSpec:
    """The same experiment with its rollouts streamed. Raises ConfigError when the sessions do not hold a group, when
    there is no file of the agent, or for an option that does nothing."""
    staying, leaving = to_async(spec.mfcs)
    options, episodes = config.async_rl, RolloutOptions.from_args(leaving[0].interface_args)
    episodes = replace(episodes, sessions=rollout_options(config).sessions)  # The actor's workers play none.
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


def with_turns(mfcs: list[MFCDef]) -> list[MFCDef]:
    """The same calls; where one has rewards per turn among its inputs, the call that plays episodes makes them."""
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


def held_out(config: Config, playing: MFCDef) -> EvaluationSpec:
    """Every template on instances that training never sees, at the training temperature and greedy. It has the
    arguments of the call ``playing``, because only then it plays in the sessions of that: an environment may have no
    others."""
    evaluation = config.evaluation
    wanted = HeldOutOptions(
        HELD_OUT, evaluation.episodes_per_task, evaluation.greedy_episodes_per_task, evaluation.templates
    )
    share = evaluation.interim_share
    interim = replace(
        wanted,
        episodes_per_task=math.ceil(share * wanted.episodes_per_task),
        greedy_episodes_per_task=math.ceil(share * wanted.greedy_episodes_per_task),
    )
    return EvaluationSpec(
        "actor",
        playing.interface,
        playing.interface_args,
        wanted.to_args(),
        interim.to_args(),
        every_steps=evaluation.every_steps,
    )


def call(
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
    """A call that takes the samples of a whole step."""
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
