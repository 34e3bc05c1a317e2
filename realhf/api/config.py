"""Configuration dataclasses, read by Hydra as structured configs: an unknown or mistyped option is an error.

Defaults here are the library's; ``configs/experiment/*.yaml`` holds what an experiment changes. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING


class ConfigError(ValueError):
    """A mistake in the configuration; the message names the option and fits on a terminal line."""


class Mode(Enum):
    """run trains; check validates and stops; graph prints the dataflow graph."""

    run = "run"
    check = "check"
    graph = "graph"


class RecoverMode(Enum):
    """auto resumes from the last valid checkpoint if there is one; resume demands it; disabled starts afresh."""

    auto = "auto"
    resume = "resume"
    disabled = "disabled"


class LRSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    """AdamW. Warm-up and decay are fractions of total_train_steps."""

    lr: float = 1e-6
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-5
    warmup_steps_proportion: float = 0.001
    lr_scheduler_type: LRSchedule = LRSchedule.constant
    gradient_clipping: float = 1.0


@dataclass
class ModelConfig:
    """A model role. ``path``: 'builtin' (the small policy made here), a folder, or a hub id.
    ``workers``: indices of the model workers that hold it. ``chat_template_kwargs``: variables of the tokenizer's chat
    template, for every text that is rendered with it, e.g. ``{enable_thinking: false}``."""

    path: str = "builtin"
    workers: list[int] = field(default_factory=lambda: [0])
    backend: str = "torch"
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ReferenceConfig:
    """The frozen reference policy: the actor's first weights."""

    workers: list[int] = field(default_factory=lambda: [0])


@dataclass
class BuiltinModelConfig:
    """The small policy for machines without downloads (a Qwen3 configuration)."""

    vocab_size: int = 1536
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 384
    max_positions: int = 1024


@dataclass
class WarmStartConfig:
    """Supervised warm start of the built-in policy on episodes really played against MiniStack.

    The demonstrations are of mixed quality, as logs of real operators are: ``habit_fraction`` of them make a
    mistake and leave it at that, ``recovery_fraction`` make one and repair it. A warm start on perfect episodes
    only would leave reinforcement learning little to do."""

    episodes_per_task: int = 45
    habit_fraction: float = 0.35
    recovery_fraction: float = 0.15
    train_steps: int = 400
    batch_size: int = 32
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            lr=2.5e-3, weight_decay=0.01, warmup_steps_proportion=0.05, lr_scheduler_type=LRSchedule.cosine, beta2=0.99
        )
    )
    cache_dir: str | None = None


@dataclass
class GenConfig:
    """Sampling. Rewards and log-probabilities are those of exactly this distribution.

    ``new_tokens_per_chunk``: an engine call returns after so many tokens at most, and a turn that is not over goes
    on in the next call. Rollouts that play in lockstep then wait for a chunk and not for the longest turn."""

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    new_tokens_per_chunk: int | None = None

    def truncations(self) -> list[str]:
        """The options, as ``top_p=0.9``, that draw tokens from a cut distribution. Training refuses them: the trainer
        knows the log-probabilities of the whole distribution only. Evaluation may use them."""
        whole = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value]


@dataclass
class PPOConfig:
    """Policy-gradient options. ``algo`` names a preset; a None takes the preset's value (see
    realhf.algorithms.policy_gradient.presets).

    Off-policy tokens (docs/reference/dataflow.md 10): ``use_decoupled_loss`` clips against the proximal policy, the
    weights at the start of the train step, and weighs every token by proximal over behaviour probability;
    ``recompute_logprob`` puts the proximal in the place of the behaviour log-probabilities instead.
    ``prox_logp_method``: where the proximal ones come from: the call ``actor_inf`` (default), ``recompute`` in the
    train call, or ``loglinear`` from versions, without a forward pass. ``behav_imp_weight_mode``: a weight above
    ``cap`` (5) or below ``floor`` (none) is set to 0 (``mask``, default), cut to it (``truncate``), or no weight is
    used (``none``); ``level``: weights of tokens, or the geometric mean of a sequence. ``discount``: of the
    return-to-go of reinforce_pp, per sampled token.

    ``recompute_logprob`` is on by default (with ``prox_logp_method`` recompute) where the ratio is that of a sequence
    (gspo): its clip range is narrower than the difference between the log-probabilities of generator and trainer.
    A train step makes ``sample_reuse`` passes over its batch, each in ``ppo_n_minibatches`` updates.
    ``loss_scale_len``: the divisor of ``loss_agg=constant`` (drgrpo); None takes the most tokens that the policy can
    sample in an episode. ``mask_too_long`` leaves sequences out that a limit of tokens ended, not one of turns."""

    algo: str = "grpo"
    group_size: int = 8
    adv_estimator: str | None = None
    loss: str | None = None
    ratio: str | None = None
    loss_agg: str | None = None
    eps_clip: float | None = None
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    kl_loss_coef: float | None = None
    kl_ctl: float | None = None
    kl_estimator: str | None = None
    entropy_coef: float = 0.0
    adv_norm: bool | None = None
    discount: float = 1.0
    use_decoupled_loss: bool = False
    recompute_logprob: bool | None = None
    prox_logp_method: str | None = None
    behav_imp_weight_mode: str | None = None
    behav_imp_weight_cap: float | None = None
    behav_imp_weight_floor: float | None = None
    behav_imp_weight_level: str | None = None
    loss_scale_len: int | None = None
    ppo_n_minibatches: int = 1
    sample_reuse: int = 1
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    max_reward_clip: float = 20.0
    mask_too_long: bool = False
    max_nonfinite_steps: int = 3


@dataclass
class MicroBatchConfig:
    """n_mbs: at least this many micro-batches; max_tokens_per_mb: positions in one, padding included (None: no cap).
    Sequences are never cut, so it should hold the longest. The default is the smallest that costs no time at a million
    parameters on one core: 64 rollouts of 10,700 tokens train in 1.4 CPU seconds and 0.70 GB, with 4,096 in 1.4 and
    0.94, with 16,384 in 1.4 and 1.14."""

    n_mbs: int = 1
    max_tokens_per_mb: int | None = 2048


@dataclass
class RolloutConfig:
    """Multi-turn episodes. min_group_size: fewer valid rollouts give a group no gradient. agent: who plays, "" the
    built-in one or ``module:function`` (asynchronous experiments, see docs/asynchronous.md)."""

    max_turns: int = 6
    max_total_tokens: int = 1024
    min_group_size: int = 2
    on_failure: str = "retry"
    message_timeout_s: float = 60.0
    agent: str = ""


@dataclass
class EnvConfig:
    """The AWS environment server that the launcher starts. Port 0: any free port (range). ``tags``: train on
    templates with any of these tags ([]: all; None: "starter", the 39 that the built-in policy can learn, where each of
    the tiers has such, else all). ``chaos``:
    whether training and evaluation episodes may be perturbed (docs/reference/environment.md 7).

    SIMULATED, for tests and benchmarks: ``step_latency_ms`` is added to every step; ``fault_rate`` is the fraction of
    steps that fail, in the ways of ``fault_kinds`` (unavailable, disconnect, hang; with weights), by ``fault_seed``."""

    pool_size: int = 16
    host: str = "127.0.0.1"
    port: int = 0
    ministack_base_port: int = 0
    max_steps: int = 15
    tiers: list[str] = field(default_factory=lambda: ["warmup", "beginner", "intermediate"])
    tags: list[str] | None = None
    chaos: bool = False
    step_latency_ms: float = 0.0
    fault_rate: float = 0.0
    fault_kinds: str = "unavailable=9,disconnect=1"
    fault_seed: int = 0


@dataclass
class DatasetConfig:
    """train_bs_n_seqs: samples (task groups, or SFT episodes) of one train step. curriculum: learnability or priority.
    group_success: what a group counts as there: the fraction of its rollouts that achieved the task, or any.
    priority: constants of the priority curriculum that differ from its preset (key ``preset``: standard, slow)."""

    train_bs_n_seqs: int = 16
    curriculum: str = "learnability"
    group_success: str = "fraction"
    priority: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvaluationConfig:
    """Held-out evaluation: episodes per task template at the training temperature, and greedy."""

    episodes_per_task: int = 12
    greedy_episodes_per_task: int = 12
    every_steps: int = 0


@dataclass
class StreamConfig:
    """The trajectory server that groups come from: one that runs already (``url``; its bearer token is read from
    ``token_file``), or one that the launcher starts on ``host`` and ``port`` (0: any free port), whose queue lies in
    the run folder. ``max_staleness``: policy versions that a group may lie behind. ``wait_s``: how long a step waits
    for its batch."""

    url: str | None = None
    token_file: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_staleness: int | None = None
    wait_s: float = 900.0


@dataclass
class FailureConfig:
    """What a rollout worker does about a rollout that failed. policy: ``minimum_group`` plays it again ``retries``
    times, then leaves it out if at least rollout.min_group_size others are valid; ``retry`` wants the whole group;
    ``fail_fast`` ends the run. A sample whose group did not come about is given back and admitted again, at most
    ``max_attempts`` times. max_deaths: a sample is given up when the worker that played it has died so often."""

    policy: str = "minimum_group"
    retries: int = 2
    max_attempts: int = 3
    max_deaths: int = 3


@dataclass
class AsyncConfig:
    """Asynchronous training. max_head_offpolicyness (eta): versions that the oldest token of a sample may lie behind
    the weights it trains; 0 is synchronous batches. max_concurrent_rollouts: samples in play or on their way to the
    trainer at once (None: as many as the environment's sessions hold, and two batches on their way). engine:
    embedded or vllm; vllm_url: a server that runs already (None: each generation worker starts one with
    vllm_executable). staleness_policy: wait for stragglers, or drop what is too old.
    kv_policy: recompute keys and values of running episodes under new weights, or keep them. weights: shm, disk or
    broadcast. rollout_deadline_s: a sample that takes longer is given back. pause_timeout_s: how long an engine may
    take to stop for new weights. recover_retries: how often the run begins again from its last checkpoint by itself,
    after the death of its master or of a model worker. keep_journal: what the journal needs no more is kept in its
    folder ``archive``, so that every sample of the run can be audited. niceness: how far rollouts, generation and
    environment step back behind the trainer (0 to 19), for cores that are busy all the time."""

    max_head_offpolicyness: int = 1
    max_concurrent_rollouts: int | None = None
    n_rollout_workers: int = 1
    n_generation_workers: int = 1
    generation_threads: int = 1
    engine: str = "embedded"
    vllm_url: str | None = None
    vllm_executable: str = "vllm"
    staleness_policy: str = "wait"
    kv_policy: str = "recompute"
    weights: str = "shm"
    rollout_deadline_s: float = 600.0
    pause_timeout_s: float = 30.0
    recover_retries: int = 1
    keep_journal: bool = False
    niceness: int = 0
    on_failure: FailureConfig = field(default_factory=FailureConfig)


@dataclass
class CheckpointConfig:
    """ckpt_freq_steps: recovery checkpoint; keep: how many stay."""

    ckpt_freq_steps: int = 5
    keep: int = 2


@dataclass
class RpcConfig:
    """Deadlines of the control plane, seconds."""

    connect_timeout_s: float = 120.0
    control_timeout_s: float = 30.0
    call_timeout_s: float = 1800.0
    heartbeat_s: float = 2.0
    dead_after_s: float = 8.0
    shm: bool = True


@dataclass
class MonitorConfig:
    """What a person sees. progress: live display; episodes_per_step: sampled episodes written as text;
    plot_every_steps: how often the pictures are drawn again (0: only at the end)."""

    progress: bool = True
    tensorboard: bool = True
    wandb: bool = False
    episodes_per_step: int = 2
    plot_every_steps: int = 20


@dataclass
class ExperimentConfig:
    """The whole configuration of ``python -m realhf.launch``. ``torch_threads`` 0: all cores but those
    of generation workers, shared by the model workers. ``experiment_path``: an experiment file outside the package (its
    YAML lies beside it)."""

    experiment: str = MISSING
    experiment_path: str | None = None
    experiment_name: str = "${experiment}"
    trial_name: str = "default"
    fileroot: str = "runs"
    seed: int = 1
    mode: Mode = Mode.run
    recover_mode: RecoverMode = RecoverMode.auto
    scheduler: str = "local"
    total_train_steps: int = 60
    torch_threads: int = 0

    actor: ModelConfig = field(default_factory=ModelConfig)
    ref: ReferenceConfig = field(default_factory=ReferenceConfig)
    builtin: BuiltinModelConfig = field(default_factory=BuiltinModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    gen: GenConfig = field(default_factory=GenConfig)
    mb_spec: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    async_rl: AsyncConfig = field(default_factory=AsyncConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    exp_ctrl: CheckpointConfig = field(default_factory=CheckpointConfig)
    rpc: RpcConfig = field(default_factory=RpcConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)


def run_folder(config: ExperimentConfig) -> Path:
    """<fileroot>/<experiment_name>/<trial_name>, absolute."""
    return Path(config.fileroot).expanduser().resolve() / config.experiment_name / config.trial_name
