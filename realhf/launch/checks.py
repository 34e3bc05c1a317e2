"""Checks across options, made before any process starts. Every problem is reported, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from realhf.api.config import ConfigError, EnvConfig, ExperimentConfig, RecoverMode, StreamConfig, run_folder
from realhf.aws.tasks.task import TIERS, TaskError
from realhf.env.server.injected_faults import DEFAULT_KINDS
from realhf.launch.model import BUILTIN, model_problems

DTYPES = ("float32", "bfloat16")
"""Training in float16 needs a loss scale, which no backend here has."""

AT_LEAST: dict[str, float] = {
    "total_train_steps": 1,
    "torch_threads": 0,
    "ppo.group_size": 1,
    "ppo.ppo_n_minibatches": 1,
    "ppo.sample_reuse": 1,
    "ppo.max_nonfinite_steps": 1,
    "ppo.entropy_coef": 0,
    "ppo.max_reward_clip": 0,
    "gen.max_new_tokens": 1,
    "mb_spec.n_mbs": 1,
    "rollout.max_turns": 1,
    "rollout.max_total_tokens": 1,
    "rollout.min_group_size": 1,
    "env.pool_size": 1,
    "env.max_steps": 1,
    "dataset.train_bs_n_seqs": 1,
    "evaluation.episodes_per_task": 0,
    "evaluation.greedy_episodes_per_task": 0,
    "evaluation.every_steps": 0,
    "exp_ctrl.ckpt_freq_steps": 1,
    "exp_ctrl.keep": 1,
    "warm_start.episodes_per_task": 1,
    "warm_start.train_steps": 1,
    "warm_start.batch_size": 1,
    "monitor.episodes_per_step": 0,
    "monitor.plot_every_steps": 0,
    "actor.optimizer.gradient_clipping": 0,
    "actor.optimizer.weight_decay": 0,
    "env.step_latency_ms": 0,
    "env.fault_rate": 0,
    "async_rl.max_head_offpolicyness": 0,
    "async_rl.n_rollout_workers": 1,
    "async_rl.n_generation_workers": 1,
    "async_rl.generation_threads": 1,
    "async_rl.recover_retries": 0,
    "async_rl.on_failure.retries": 0,
    "async_rl.on_failure.max_attempts": 1,
    "async_rl.on_failure.max_deaths": 1,
    "async_rl.niceness": 0,
}
POSITIVE = (
    "actor.optimizer.lr",
    "warm_start.optimizer.lr",
    "gen.temperature",
    "rollout.message_timeout_s",
    "stream.wait_s",
    "async_rl.rollout_deadline_s",
    "async_rl.pause_timeout_s",
    "rpc.connect_timeout_s",
    "rpc.control_timeout_s",
    "rpc.call_timeout_s",
    "rpc.heartbeat_s",
    "rpc.dead_after_s",
)
PORTS = ("env.port", "env.ministack_base_port", "stream.port")


def check_config(config: ExperimentConfig) -> None:
    """Raise ConfigError that lists everything wrong with the values themselves. The experiment's module is imported
    already: names that it registers are known."""
    problems = [
        *_ranges(config),
        *_names(config),
        *_sizes(config),
        *model_problems("actor", config.actor, config.rollout.max_total_tokens),
        *_stream(config.stream),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _value(config: ExperimentConfig, option: str) -> float:
    value: object = config
    for part in option.split("."):
        value = getattr(value, part)
    assert isinstance(value, (int, float))
    return value


def _ranges(config: ExperimentConfig) -> Iterator[str]:
    for option, least in AT_LEAST.items():
        if _value(config, option) < least:
            yield f"{option}={_value(config, option)}: must be at least {least:g}"
    for option in POSITIVE:
        if _value(config, option) <= 0:
            yield f"{option}={_value(config, option)}: must be positive"
    for option in PORTS:
        if not 0 <= _value(config, option) < 65536:
            yield f"{option}={_value(config, option)}: a port lies between 0 (any free one) and 65535"
    for cut in config.gen.truncations():
        yield (
            f"gen.{cut}: tokens would be drawn from a cut distribution and trained with the log-probabilities of "
            "the whole one; training samples with top_p=1, top_k=0 and min_new_tokens=0"
        )
    if config.async_rl.niceness > 19:
        yield f"async_rl.niceness={config.async_rl.niceness}: at most 19"
    if config.env.fault_rate > 1:
        yield f"env.fault_rate={config.env.fault_rate}: a fraction, at most 1"
    if not config.env.fault_rate and (config.env.fault_kinds, config.env.fault_seed) != (DEFAULT_KINDS, 0):
        yield "env.fault_kinds, env.fault_seed: no effect without env.fault_rate"
    for role, workers in (("actor", config.actor.workers), ("ref", config.ref.workers)):
        if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
            yield f"{role}.workers={workers}: give different indices of model workers, from 0"
    for option, text in (("experiment_name", config.experiment_name), ("trial_name", config.trial_name)):
        if not re.fullmatch(r"[\w.-]+", text) or text.startswith("."):
            yield f"{option}={text!r}: use letters, digits, '_', '-' and '.'; it names a folder"


def _names(config: ExperimentConfig) -> Iterator[str]:
    from realhf.api.streaming import ON_FAILURE
    from realhf.builtins import advantage_estimators, backends, policy_losses

    known = {
        "actor.backend": (config.actor.backend, list(backends)),
        "actor.dtype": (config.actor.dtype, list(DTYPES)),
        "ppo.adv_estimator": (config.ppo.adv_estimator, list(advantage_estimators)),
        "ppo.loss": (config.ppo.loss, list(policy_losses)),
        "dataset.curriculum": (config.dataset.curriculum, ["learnability", "priority"]),
        "async_rl.engine": (config.async_rl.engine, ["embedded", "vllm"]),
        "async_rl.on_failure.policy": (config.async_rl.on_failure.policy, ["minimum_group", "retry", "fail_fast"]),
        "async_rl.staleness_policy": (config.async_rl.staleness_policy, ["wait", "drop"]),
        "async_rl.kv_policy": (config.async_rl.kv_policy, ["recompute", "keep"]),
        "async_rl.weights": (config.async_rl.weights, ["shm", "disk", "broadcast"]),
        "rollout.on_failure": (config.rollout.on_failure, list(ON_FAILURE)),
        "dataset.group_success": (config.dataset.group_success, ["fraction", "any"]),
        "scheduler": (config.scheduler, ["local"]),
    }
    for option, (value, allowed) in known.items():
        if value is not None and value not in allowed:
            yield f"{option}={value}: unknown (known: {', '.join(allowed)})"
    yield from _tasks(config.env)


def _tasks(env: EnvConfig) -> Iterator[str]:
    from realhf.aws.tasks.loader import training_tags

    unknown = [tier for tier in env.tiers if tier not in TIERS]
    for tier in unknown:
        yield f"env.tiers: unknown tier {tier!r} (known: {', '.join(TIERS)})"
    if not env.tiers:
        yield "env.tiers=[]: name at least one tier"
    if env.tiers and not unknown and env.tags is not None:
        try:
            training_tags(env.tiers, env.tags)
        except TaskError as error:
            yield f"env.tags={env.tags}: {error}"


def _sizes(config: ExperimentConfig) -> Iterator[str]:
    heads, hidden = config.builtin.num_heads, config.builtin.hidden_size
    if config.actor.path == BUILTIN:
        if heads < 1 or hidden % heads or (hidden // heads) % 2:
            yield (f"builtin.hidden_size={hidden}: must be num_heads={heads} times an even head width")
        if config.rollout.max_total_tokens > config.builtin.max_positions:
            yield (
                f"rollout.max_total_tokens={config.rollout.max_total_tokens}: the built-in policy has "
                f"builtin.max_positions={config.builtin.max_positions}"
            )
    if config.rollout.min_group_size > config.ppo.group_size:
        yield (
            f"rollout.min_group_size={config.rollout.min_group_size}: larger than "
            f"ppo.group_size={config.ppo.group_size}"
        )
    sequences = config.dataset.train_bs_n_seqs * config.ppo.group_size
    if config.ppo.ppo_n_minibatches > sequences:
        yield (
            f"ppo.ppo_n_minibatches={config.ppo.ppo_n_minibatches}: a step has dataset.train_bs_n_seqs times "
            f"ppo.group_size = {sequences} sequences"
        )
    if config.rpc.dead_after_s <= config.rpc.heartbeat_s:
        yield f"rpc.dead_after_s={config.rpc.dead_after_s}: must be longer than rpc.heartbeat_s"
    if config.recover_mode is RecoverMode.resume and not (run_folder(config) / "checkpoints").is_dir():
        yield f"recover_mode=resume: no checkpoint in {run_folder(config)}"


def _stream(stream: StreamConfig) -> Iterator[str]:
    if stream.url is not None and not re.match(r"https?://[^/]", stream.url):
        yield f"stream.url={stream.url}: give http://host:port"
    if stream.token_file is not None and not Path(stream.token_file).expanduser().is_file():
        yield f"stream.token_file={stream.token_file}: no such file"
    if stream.max_staleness is not None and stream.max_staleness < 0:
        yield f"stream.max_staleness={stream.max_staleness}: must be at least 0"
