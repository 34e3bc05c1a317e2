"""GRPO on groups of rollouts that external producers push to a trajectory server.

(slots of a batch) ───► stream_gen ──┬─ env_rewards, outcome ─► rew_inf ─┬─► actor_train
                                     ├─ packed_input_ids ─────► ref_inf ─┤   (ref_inf only with a KL term)
                                     └─ tokens, masks, logprobs ─────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments import policy_gradient
from experiments.policy_gradient import EPISODE_KEYS
from experiments.sft import resolve_initial_weights
from realhf.algorithms.resolution import resolve
from realhf.api.config import ConfigError, RecoverMode, run_folder
from realhf.api.experiment import ExperimentSpec, InterfaceType, MFCDef, ServiceSpec, SourceSpec
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.option import section
from realhf.aws.environment import AwsOptions


@dataclass
class Config(policy_gradient.Config):
    """policy_gradient.Config with the AWS environment, whose demonstrations warm-start the built-in
    policy."""

    env: AwsOptions = section(AwsOptions)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError if options
    contradict each other."""
    # The producers' limits are unknown here, so the longest sequence bounds the sampled tokens.
    longest = config.rollout.max_total_tokens
    ppo = resolve(
        config.ppo,
        loss_scale_len=longest,
        sampler_differs=True,
        scored_by_model=bool(config.reward_model.path),
        own=policy_gradient.algorithm_options(config),
    )
    if ppo.needs_values:
        raise ConfigError(
            f"ppo.adv_estimator={ppo.adv_estimator} (ppo.algo={ppo.algo}) takes the values of a "
            f"critic, which grpo_stream_http does not have: use experiment=ppo"
        )
    if ppo.turn_keys:
        option = f"credit={ppo.credit}" if ppo.credit != "episode" else f"loss_agg={ppo.loss_agg}"
        raise ConfigError(
            f"ppo.{option}: groups that producers push to a trajectory server contain no turn "
            f"boundaries"
        )
    if ppo.needs_feedback:
        raise ConfigError(
            f"ppo.feedback={ppo.feedback} (ppo.algo={config.ppo.algo}): groups that producers push "
            f"to a trajectory server contain no feedback on their rollouts"
        )
    if config.ppo.dynamic_sampling:
        raise ConfigError(
            "ppo.dynamic_sampling: producers play the groups that grpo_stream_http trains on, so "
            "it cannot sample again; set it to 0"
        )
    if len(config.actor.workers) > 1:
        raise ConfigError(
            f"actor.workers={list(config.actor.workers)}: grpo_stream_http trains on one worker, "
            f"which pulls its batches from the server; set actor.workers=[0], or use "
            f"experiment=grpo_async for several workers"
        )
    first = resolve_initial_weights(config)
    models, mfcs = policy_gradient.build_training_graph(config, ppo, first)
    # The producers sample the tokens: a vLLM server would be idle.
    models["actor"] = replace(
        models["actor"], engine=replace(models["actor"].engine, name="embedded")
    )
    n_groups = max_groups(config)
    return ExperimentSpec(
        name="grpo_stream_http",
        models=models,
        mfcs=tuple(replace(mfc, n_seqs=n_groups) for mfc in (stream_gen(config), *mfcs)),
        source=SourceSpec("trajectory_slots", worker=models["actor"].workers[0]),
        n_seqs=n_groups,
        total_train_steps=config.total_train_steps,
        seed=config.seed,
        run_dir=run_folder(config),
        before=first.before,
        jobs=first.jobs,
        services=() if config.stream.url else (trajectory_server(config),),
        export_role="actor",
        log_keys=("prompt_mask", "packed_versions", "seq_no_eos_mask", ROLLOUT_KEY),
    )


def max_groups(config: Config) -> int:
    """Return the maximum number of groups in a batch, which is reached if all groups have the
    minimum size."""
    return sequences_per_batch(config) // config.rollout.min_group_size


def sequences_per_batch(config: Config) -> int:
    """Return the number of sequences in a batch, summed over its groups."""
    return config.dataset.train_bs_n_seqs * config.ppo.group_size


def stream_gen(config: Config) -> MFCDef:
    """Return the call with which the actor's worker pulls the next batch from the server. Raises
    ConfigError if ``stream.wait_s`` is not shorter than the call timeout."""
    stream = config.stream
    if stream.wait_s >= config.rpc.call_timeout_s:
        raise ConfigError(
            f"stream.wait_s={stream.wait_s}: must be shorter than "
            f"rpc.call_timeout_s={config.rpc.call_timeout_s}"
        )
    args: dict[str, Any] = {
        "group": config.experiment_name,
        "project": config.trial_name,
        "batch_size": sequences_per_batch(config),
        "num_steps": config.total_train_steps,
        "max_tokens": config.rollout.max_total_tokens,
        "min_group_size": config.rollout.min_group_size,
        "temperature": config.gen.temperature,
        "wait_s": stream.wait_s,
        "url": stream.url or "",
        "token_file": stream.token_file or "",
        "ca_file": stream.ca_file or "",
        "max_staleness": stream.max_staleness,
        "fresh": config.recover_mode is RecoverMode.disabled,
        "transcripts": config.monitor.episodes_per_step,
    }
    return MFCDef(
        "stream_gen",
        "actor",
        InterfaceType.GENERATE,
        "trajectory_stream",
        args,
        output_keys=EPISODE_KEYS,
        timeout_s=config.rpc.call_timeout_s,
    )


def trajectory_server(config: Config) -> ServiceSpec:
    """Return the trajectory server that the launcher starts. Its queue is stored in the run
    folder."""
    stream = config.stream
    argv = (
        "--host",
        stream.host,
        "--port",
        str(stream.port),
        "--store",
        f"sqlite:{run_folder(config) / 'trajectory'}",
    )
    return ServiceSpec("trajectory/0", "workers.trajectory_worker", argv)
