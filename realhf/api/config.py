"""Configuration schema for Hydra: dataclasses of the sections that all experiments share. Unknown
options are errors.

The defaults in this module are the library's; ``configs/experiment/*.yaml`` overrides them for each
experiment. Options of an algorithm or an environment are defined next to its code
(``realhf/algorithms/options.py``, ``realhf/environments/sql/definition.py``) and added by the
experiments that use it. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from realhf.api.option import MAX_SEED, option, section
from realhf.api.tool_parser import AUTO, FAMILIES


class ConfigError(ValueError):
    """Raised for an invalid configuration. Each line of the message names an option."""


_NO_ADAPTERS = "there are no adapters with rank 0"


class LRSchedule(Enum):
    """Learning rate schedule after the warm-up: constant, or a decay to 0 at the last train
    step."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    """AdamW optimizer. Warm-up and decay span the train steps of the run."""

    lr: float = option(
        1e-6, "Peak learning rate, reached after the warm-up.", above=0, on_resume="warns"
    )
    weight_decay: float = option(0.05, "AdamW weight decay (decoupled).", at_least=0)
    beta1: float = option(
        0.9, "AdamW beta1, the decay rate of the first moment.", at_least=0, at_most=1
    )
    beta2: float = option(
        0.95, "AdamW beta2, the decay rate of the second moment.", at_least=0, at_most=1
    )
    eps: float = option(
        1e-5, "AdamW epsilon, added to the denominator for numerical stability.", at_least=0
    )
    warmup_steps_proportion: float = option(
        0.001,
        "Fraction of the train steps over which the learning rate warms up linearly from 0.",
        at_least=0,
        at_most=1,
    )
    lr_scheduler_type: LRSchedule = option(
        LRSchedule.constant,
        "Learning rate schedule after the warm-up: constant, or linear or cosine decay to 0.",
    )
    gradient_clipping: float = option(
        1.0,
        "Maximum gradient norm; larger gradients are rescaled to it. 0 disables clipping.",
        at_least=0,
    )
    offload: bool = option(
        False,
        "Offload the AdamW moments to host memory between steps (GPUs only, backends torch and "
        "ddp).",
        on_resume="free",
    )


@dataclass
class ParallelConfig:
    """Parallelism of a role's training. The product of the sizes is the number of its workers."""

    dp: int = option(0, "Data-parallel size; 0 infers it from the number of workers.", at_least=0)
    fsdp: int = option(
        0,
        "Number of workers that each replica is sharded over; 0 means all of them with backend "
        "fsdp2, otherwise 1.",
        at_least=0,
    )
    tp: int = option(
        1, "Tensor-parallel size; no backend supports a value above 1 yet.", at_least=1
    )


@dataclass
class LoraConfig:
    """LoRA: low-rank adapters on linear layers, trained while the base weights are frozen."""

    rank: int = option(
        0,
        "Rank of the LoRA adapters, which train while all other weights are frozen; 0 trains the "
        "full weights.",
        at_least=0,
    )
    alpha: float = option(
        32.0,
        "LoRA alpha: an adapter's output is scaled by alpha / rank.",
        above=0,
        unused_because=_NO_ADAPTERS,
    )
    targets: list[str] = option(
        [],
        "Linear layers that get adapters, by name or suffix, e.g. [q_proj, v_proj]; empty means "
        "all linear layers "
        "of the blocks.",
        unused_because=_NO_ADAPTERS,
    )
    dropout: float = option(
        0.0,
        "Dropout on the inputs of the adapters during training; supervised training only.",
        at_least=0,
        at_most=0.9,
        unused_because=_NO_ADAPTERS,
    )

    def if_enabled(self) -> LoraConfig | None:
        """Return a copy with plain values, or None if ``rank`` is 0, which disables the
        adapters."""
        return (
            LoraConfig(self.rank, self.alpha, list(self.targets), self.dropout)
            if self.rank
            else None
        )


@dataclass
class ModelConfig:
    """A model role: its initial weights, the workers that hold it, and its training."""

    path: str = option(
        "builtin", "Model to load: 'builtin' (the small built-in policy), a folder, or a hub id."
    )
    warm_start: bool = option(
        False,
        "Fine-tune the model of actor.path on demonstrations first, as configured in warm_start; "
        "the built-in "
        "policy always is.",
        unused_because="it applies to pretrained models, in experiments that do not train on "
        "demonstrations themselves",
    )
    workers: list[int] = option(
        [0], "Indices of the model workers that hold the model.", at_least=0, on_resume="free"
    )
    backend: str = option(
        "torch",
        "Training backend: torch on one worker, ddp with a replica on each of several, fsdp2 with "
        "the model "
        "sharded over several.",
        registry="backends",
        on_resume="free",
    )
    parallel: ParallelConfig = section(ParallelConfig, on_resume="free")
    dtype: str = option(
        "float32",
        "Data type of the weights; for pretrained models on GPUs that have it the default is "
        "bfloat16. float16 is not supported, since no backend scales the loss.",
        choices=("float32", "bfloat16"),
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass, which trades time for memory.",
        on_resume="free",
    )
    compile: bool = option(
        False,
        "Compile the transformer blocks with torch.compile for training and scoring. The first "
        "steps take minutes, "
        "and a compiler is required (g++ on the CPU, triton on GPUs).",
        on_resume="free",
    )
    experts: bool = option(
        False,
        "Allow training a mixture of experts, without the router's auxiliary loss and with the "
        "trainer's own "
        "routing, which can differ from the generator's in bfloat16.",
        unused_because="the model is the actor's, so actor.experts applies",
    )
    chat_template_kwargs: dict[str, Any] = option(
        {},
        "Variables passed to the chat template whenever text is rendered, e.g. {enable_thinking: "
        "false}.",
    )
    tool_parser: str = option(
        AUTO,
        "Syntax in which the policy's tool calls are parsed (docs/extend/tool_syntax.md); auto "
        "detects it from the chat template, plain parses none.",
        choices=(AUTO, *FAMILIES),
        unused_because="the model generates no episodes; actor.tool_parser configures the one "
        "that does",
    )
    optimizer: OptimizerConfig = section(OptimizerConfig)
    lora: LoraConfig = section(LoraConfig)


@dataclass
class ReferenceConfig:
    """The frozen reference policy: the actor's initial weights. With LoRA it is the actor with its
    adapters disabled, on the actor's workers."""

    workers: list[int] = option(
        [0], "Indices of the model workers that hold the reference.", at_least=0
    )


@dataclass
class TeacherConfig:
    """The teacher for on-policy distillation (ppo.distill_weight): a frozen model that scores the
    policy's tokens, so its tokenizer must be the actor's. It is either a role of the graph or an
    external server."""

    path: str = option("", "Folder or hub id of a teacher that runs as a role of the graph.")
    workers: list[int] = option(
        [0],
        "Indices of the model workers that hold the teacher of teacher.path.",
        at_least=0,
        on_resume="free",
    )
    dtype: str = option(
        "float32",
        "Data type of the weights of teacher.path.",
        choices=("float32", "bfloat16"),
        on_resume="free",
    )
    url: str = option(
        "",
        "URL of a served teacher: an OpenAI-compatible /v1/completions endpoint that returns "
        "prompt "
        "log-probabilities, such as vLLM's.",
        on_resume="free",
    )
    model: str = option(
        "",
        "Name of the teacher on the server of teacher.url; by default the first model that it "
        "lists.",
    )
    token_file: str | None = option(
        None, "File with the bearer token for teacher.url.", on_resume="free"
    )
    connections: int = option(
        16, "Maximum number of concurrent requests to teacher.url.", at_least=1, on_resume="free"
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield errors of invalid combinations: a teacher is either loaded from a path or served at
        a URL."""
        if self.path and self.url:
            yield (
                f"{name}.path={self.path}, {name}.url={self.url}: there is one teacher; set one of "
                f"them"
            )
        if self.path in ("builtin", "builtin_tiny", "actor"):
            yield (
                f"{name}.path={self.path}: the teacher is another model than the actor; name a "
                f"folder or a hub id"
            )
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"
        if self.url and not re.match(r"https?://[^/]", self.url):
            yield f"{name}.url={self.url}: give http://host:port"
        if self.token_file is not None and not Path(self.token_file).expanduser().is_file():
            yield f"{name}.token_file={self.token_file}: no such file"


@dataclass
class BuiltinModelConfig:
    """The small built-in policy, which needs no downloads (Qwen3 architecture)."""

    vocab_size: int = option(1536, "Vocabulary size of the tokenizer.", at_least=1)
    hidden_size: int = option(
        128, "Hidden size; must be num_heads times an even head dimension.", at_least=1
    )
    num_layers: int = option(4, "Number of transformer layers.", at_least=1)
    num_heads: int = option(4, "Number of attention heads per layer.", at_least=1)
    intermediate_size: int = option(384, "Hidden size of the feed-forward networks.", at_least=1)
    max_positions: int = option(1024, "Maximum context length in tokens.", at_least=1)


@dataclass
class WarmStartOptimizerConfig(OptimizerConfig):
    """AdamW optimizer of the warm start. Warm-up and decay span the train steps of the warm start.
    The learning rate cannot change on resume, because the warm start is already done."""

    lr: float = option(
        1e-5, "Peak learning rate, reached after the warm-up.", above=0, on_resume="refuses"
    )


@dataclass
class WarmStartConfig:
    """Supervised warm start of a policy on episodes that a scripted solver played in the
    environment.

    The demonstrations have mixed quality, like the logs of real operators: some contain a mistake
    that is not repaired, some a mistake that is. A warm start on perfect episodes only would leave
    little for reinforcement learning to improve."""

    episodes_per_task: int = option(45, "Number of demonstrations per task template.", at_least=1)
    habit_fraction: float = option(
        0.35,
        "Fraction of the demonstrations that contain a mistake and do not repair it.",
        at_least=0,
        at_most=1,
    )
    recovery_fraction: float = option(
        0.15,
        "Fraction of the demonstrations that contain a mistake and repair it.",
        at_least=0,
        at_most=1,
    )
    train_steps: int = option(400, "Number of train steps of the warm start.", at_least=1)
    batch_size: int = option(32, "Batch size of the warm start, in demonstrations.", at_least=1)
    optimizer: WarmStartOptimizerConfig = section(
        WarmStartOptimizerConfig,
        weight_decay=0.01,
        warmup_steps_proportion=0.05,
        lr_scheduler_type=LRSchedule.cosine,
    )
    shipped: bool = option(
        True,
        "Use the policy that ships with an environment if it was made from the same options, "
        "instead of making one.",
    )
    cache_dir: str | None = option(
        None,
        "Folder in which warm starts are cached; defaults to 'warm_start' below fileroot.",
        on_resume="free",
    )


_NO_FILE = "it applies to rows of a file (dataset.path), on which sft and dpo can train"


@dataclass
class DatasetConfig:
    """The batch size, the curriculum that selects training tasks, and the file whose rows are
    trained on instead of episodes."""

    train_bs_n_seqs: int = option(
        16,
        "Samples per train step: groups of rollouts of a task, supervised episodes, or rows of a "
        "file.",
        at_least=1,
    )
    path: str | None = option(
        None,
        "File with rows to train on (.jsonl, .parquet, or a datasets folder) in TRL's formats: "
        "messages, prompt and completion, or chosen and rejected.",
        unused_because="only sft and dpo train on a file",
    )
    train_on: str = option(
        "assistant",
        "Tokens of a row that are trained: the assistant's messages (without those of a prompt), "
        "everything after the prompt (completion), or all.",
        choices=("assistant", "completion", "all"),
        unused_because=_NO_FILE,
    )
    too_long: str = option(
        "refuse",
        "What happens to rows longer than rollout.max_total_tokens: refuse ends the launch, drop "
        "leaves them out and prints their number.",
        choices=("refuse", "drop"),
        unused_because=_NO_FILE,
    )
    held_out: float = option(
        0.0,
        "Fraction of the rows held out from training, drawn by the seed without dividing the rows "
        "of a prompt, and evaluated before, after and during training (evaluation.every_steps).",
        at_least=0,
        at_most=0.9,
        unused_because=_NO_FILE,
    )
    shown: int = option(
        2,
        "Number of rows whose tokens are printed before training, with those that are trained.",
        at_least=0,
        on_resume="free",
        unused_because=_NO_FILE,
    )
    curriculum: str = option(
        "learnability",
        "Curriculum that draws the tasks.",
        choices=("learnability", "priority", "uniform"),
    )
    group_success: str = option(
        "fraction",
        "What the curriculum counts as a group's success: the fraction of its rollouts that "
        "achieved the task, or "
        "whether any did.",
        choices=("fraction", "any"),
    )
    untried_share: float = option(
        1.0,
        "Maximum share of a step's tasks that come from templates never tried before, once others "
        "succeed "
        "sometimes (curriculum learnability or uniform). With 1 untried templates always come "
        "first.",
        above=0,
        at_most=1,
    )
    priority: dict[str, Any] = option(
        {},
        "Constants of the priority curriculum that override its preset (key 'preset': standard or "
        "slow).",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for an option that the selected curriculum does not read, and for a file
        that does not exist."""
        if self.path is not None and not Path(self.path).expanduser().exists():
            yield f"{name}.path={self.path}: there is no such file"
        unused = "untried_share" if self.curriculum == "priority" else "priority"
        value = getattr(self, unused)
        default = {} if unused == "priority" else DatasetConfig.untried_share
        if value != default:
            yield f"{name}.{unused}={value}: has no effect with {name}.curriculum={self.curriculum}"


@dataclass
class MicroBatchConfig:
    """How batches are split into micro-batches. Sequences are never split.

    The default of max_tokens_per_mb is the smallest value that does not slow down training.
    Measured for 64 rollouts with a total of 10,700 tokens and a model with a million parameters on
    one core: 1.4 CPU seconds and 0.70 GB with the default, 1.4 s and 0.94 GB with 4,096, and 1.4 s
    and 1.14 GB with 16,384."""

    n_mbs: int = option(1, "Minimum number of micro-batches per batch.", at_least=1)
    max_tokens_per_mb: int | None = option(
        2048,
        "Maximum number of token positions per micro-batch, counting padding, and a shared prefix "
        "once. It should "
        "hold the longest sequence; null means 4096.",
        at_least=1,
    )


@dataclass
class GenConfig:
    """Sampling of tokens during training. Rewards and log-probabilities refer to exactly this
    distribution."""

    max_new_tokens: int = option(64, "Maximum number of tokens per turn.", at_least=1)
    min_new_tokens: int = option(
        0, "Minimum number of tokens per turn; training requires 0.", at_least=0
    )
    temperature: float = option(
        1.0, "Sampling temperature, by which the logits are divided.", above=0
    )
    top_p: float = option(
        1.0,
        "Nucleus sampling: draw from the most likely tokens with this total probability; training "
        "requires 1.",
        above=0,
        at_most=1,
    )
    top_k: int = option(
        0,
        "Draw from this many of the most likely tokens, 0 from all; training requires 0.",
        at_least=0,
    )
    stop_ids: list[int] = option(
        [],
        "Additional token ids that end a turn, besides the chat template's end of turn, the "
        "tokenizer's end of "
        "sequence and those in generation_config.json.",
        at_least=0,
    )
    new_tokens_per_chunk: int | None = option(
        None,
        "Maximum number of tokens per engine call; longer turns continue in the next call. "
        "Rollouts in lockstep then "
        "wait for a chunk instead of for the longest turn.",
        at_least=1,
        on_resume="free",
    )

    def truncating_options(self) -> list[str]:
        """Return the options that truncate the sampling distribution, as strings such as
        ``top_p=0.9``.

        Training rejects them because the trainer computes log-probabilities of the full
        distribution only. Evaluation may use them.
        """
        neutral = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [
            f"{name}={getattr(self, name)}"
            for name, value in neutral.items()
            if getattr(self, name) != value
        ]


@dataclass
class EngineConfig:
    """The inference engine that samples tokens, in training and evaluation
    (docs/asynchronous.md)."""

    name: str = option(
        "embedded",
        "Engine that generates tokens. By default vllm for a pretrained model on a machine with a "
        "GPU and vLLM, "
        "otherwise embedded.",
        choices=("embedded", "vllm"),
        on_resume="warns",
    )
    vllm_url: str | None = option(
        None,
        "URL of a running vLLM server; without one each generation worker starts its own.",
        on_resume="free",
    )
    vllm_executable: str = option("vllm", "Command that starts vLLM.", on_resume="free")
    vllm_runner: str = option(
        "auto",
        "Model runner of a started vLLM server: v1, v2, or auto for vLLM's own choice (v2 on a "
        "GPU, v1 on a CPU). The one that runs is recorded in logs/vllm-*.json of the run.",
        choices=("auto", "v1", "v2"),
        on_resume="warns",
    )
    max_model_len: int | None = option(
        None,
        "Maximum sequence length of a started vLLM server; defaults to rollout.max_total_tokens.",
        at_least=1,
        on_resume="free",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of the GPU's memory that a started vLLM server uses; defaults to vLLM's own "
        "default. On a GPU shared with a trainer the default is a size of the KV cache in bytes "
        "instead.",
        above=0,
        at_most=1,
        on_resume="free",
    )
    tensor_parallel_size: int = option(
        1, "Tensor-parallel size of a started vLLM server.", at_least=1, on_resume="free"
    )
    kv_cache_gib: float | None = option(
        None,
        "Maximum size of the embedded engine's KV cache in GiB; sequences that do not fit are "
        "generated after the "
        "others. Defaults to half of the free memory on a GPU shared with a trainer, 80 % of it on "
        "a dedicated GPU, "
        "and no limit on a CPU.",
        above=0,
        on_resume="free",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for each option that the selected engine does not read: options of other
        engines and, if ``vllm_url`` names a running vLLM server, options for starting one."""
        names = [every.name for every in fields(self)]
        own = {"embedded": {"name", "kv_cache_gib"}, "vllm": {*names} - {"kv_cache_gib"}}.get(
            self.name, {"name"}
        )
        unused = {name: "name" for name in names if name not in own}
        if self.vllm_url is not None and self.name == "vllm":
            unused |= {name: "vllm_url" for name in own - {"name", "vllm_url"}}
        for option_name, cause in unused.items():
            if getattr(self, option_name) != getattr(EngineConfig, option_name):
                yield (
                    f"{name}.{option_name}: has no effect with "
                    f"{name}.{cause}={getattr(self, cause)}"
                )


CHECK, CONSTRAIN = STRUCTURED = ("check", "constrain")
"""What happens to requests of agents that prescribe the form of the answer: the policy samples
freely and the answer is checked, or it samples under a token mask."""
ON_FAILURE = ("minimum_group", "retry", "fail_fast")
"""Ways to handle failed rollouts; see ``RolloutConfig.on_failure``."""


@dataclass
class RolloutConfig:
    """Multi-turn episodes: their limits, and the handling of failures."""

    max_turns: int = option(6, "Maximum number of turns per episode.", at_least=1)
    max_total_tokens: int = option(
        1024, "Maximum number of tokens per sequence, prompt included.", at_least=1
    )
    min_group_size: int = option(
        2,
        "Minimum number of valid rollouts in a group; a smaller group gives no gradient.",
        at_least=1,
    )
    on_failure: str = option(
        "minimum_group",
        "What to do about a failed rollout: minimum_group retries it, then drops it if "
        "rollout.min_group_size "
        "others are valid; retry requires the whole group; fail_fast ends the run.",
        choices=ON_FAILURE,
        on_resume="warns",
    )
    retries: int = option(
        2,
        "Maximum number of times that a failed rollout is retried, and that a lost session is "
        "resumed.",
        at_least=0,
        on_resume="warns",
    )
    message_timeout_s: float = option(
        0.0,
        "Timeout in seconds for each message to the environment; 0 means 60, or as long as the "
        "environment may take by the time limits of its tasks if that is more.",
        at_least=0,
        on_resume="free",
    )
    sessions: int = option(
        0,
        "Maximum number of concurrent episodes; 0 means as many as the environment allows, or 32 "
        "if it sets no limit.",
        at_least=0,
        on_resume="free",
    )
    agent: str = option(
        "",
        "Agent that plays the episodes of asynchronous experiments, as file.py:function or "
        "module:function; empty "
        "means the built-in agent.",
    )
    agent_structured: str = option(
        CHECK,
        "What to do about an agent's requests for JSON (response_format, text.format) and for "
        "calls (tool_choice): check lets the policy sample freely and counts answers that do not "
        "fit; constrain samples them under a token mask, which training corrects for "
        "(docs/black_box_agents.md). It needs the extra structured and engine.name=embedded.",
        choices=STRUCTURED,
    )
    keep_reasoning: bool = option(
        True,
        "Keep the policy's reasoning of earlier turns in its context. If false, it is dropped as "
        "the chat template "
        "does, and an episode trains as several sequences.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for each option without effect: ``fail_fast`` never retries, an agent
        manages its own conversations, and only an agent's requests prescribe answers."""
        if self.agent_structured != CHECK and not self.agent:
            yield f"{name}.agent_structured={self.agent_structured}: no effect without {name}.agent"
        if self.agent and not self.keep_reasoning:
            yield (
                f"{name}.keep_reasoning=False: no effect with {name}.agent, which sends whole "
                f"conversations itself"
            )
        if self.on_failure == "fail_fast" and self.retries != RolloutConfig.retries:
            yield f"{name}.retries={self.retries}: no effect with {name}.on_failure=fail_fast"


@dataclass
class AsyncConfig:
    """Asynchronous training: rollout workers generate while the trainer trains
    (docs/asynchronous.md)."""

    enabled: bool = option(
        False,
        "Generate rollouts while the trainer trains. If false, each step generates its own "
        "episodes first.",
        unused_because="no rollouts can run while it trains",
    )
    max_head_offpolicyness: int = option(
        1,
        "Maximum staleness (eta): the number of weight versions by which the oldest token of a "
        "sample may lag behind "
        "the weights trained on it. 0 means synchronous batches.",
        at_least=0,
        on_resume="warns",
    )
    max_concurrent_rollouts: int | None = option(
        None,
        "Maximum number of samples in flight; defaults to the capacity of the environment's "
        "sessions plus two batches.",
        on_resume="free",
    )
    n_rollout_workers: int = option(
        1, "Number of rollout worker processes.", at_least=1, on_resume="free"
    )
    n_generation_workers: int = option(
        1, "Number of generation worker processes.", at_least=1, on_resume="free"
    )
    generation_threads: int = option(
        1, "Number of compute threads per embedded engine.", at_least=1, on_resume="free"
    )
    staleness_policy: str = option(
        "wait",
        "Handling of samples at the staleness limit: wait lets the next step wait for them, drop "
        "discards those that "
        "exceed the limit.",
        choices=("wait", "drop"),
        on_resume="warns",
    )
    kv_policy: str = option(
        "recompute",
        "KV cache of running episodes after a weight update: recompute it under the new weights, "
        "or keep it.",
        choices=("recompute", "keep"),
        on_resume="warns",
    )
    weights: str = option(
        "shm",
        "Transport of weight updates to the engines: shared memory (shm), files (disk), the run's "
        "sockets (fetch), or from GPU to GPU (nccl: for vLLM servers on GPUs of their own, and not "
        "yet run on any).",
        choices=("shm", "disk", "fetch", "nccl"),
        retired={"broadcast": "fetch reaches the same hosts, encrypted with the keys of the run"},
        on_resume="free",
    )
    rollout_deadline_s: float = option(
        600.0,
        "Timeout in seconds for a sample, and for the generation of a turn; after it the sample is "
        "requeued.",
        above=0,
        on_resume="free",
    )
    pause_timeout_s: float = option(
        30.0,
        "Timeout in seconds for pausing an engine for a weight update.",
        above=0,
        on_resume="free",
    )
    recover_retries: int = option(
        1,
        "Maximum number of restarts from the last checkpoint within recover_window_s, after the "
        "master or a model "
        "worker died.",
        at_least=0,
        on_resume="free",
    )
    recover_window_s: float = option(
        3600.0,
        "Length in seconds of the window in which recover_retries counts restarts.",
        above=0,
        on_resume="free",
    )
    journal_timeout_s: float = option(
        30.0,
        "Timeout in seconds for writing a journal record to the run folder's disk.",
        above=0,
        on_resume="free",
    )
    keep_journal: bool = option(
        False,
        "Move obsolete journal segments to the folder 'archive' instead of deleting them, so that "
        "every sample can be "
        "audited.",
        on_resume="free",
    )
    niceness: int = option(
        0,
        "Niceness added to rollout, generation and environment processes, so that the trainer gets "
        "busy cores first.",
        at_least=0,
        at_most=19,
        on_resume="free",
    )
    max_attempts: int = option(
        3,
        "Maximum number of attempts for a sample whose group failed.",
        at_least=1,
        on_resume="free",
    )
    max_deaths: int = option(
        3,
        "Number of worker deaths during a sample after which it is dropped.",
        at_least=1,
        on_resume="free",
    )


_OURS = "this run starts no trajectory server"


@dataclass
class StreamConfig:
    """The trajectory server that supplies groups of rollouts: a running one (``url``), or one that
    the launcher starts with its queue in the run folder."""

    url: str | None = option(
        None,
        "URL of a running trajectory server; without one the launcher starts its own.",
        on_resume="free",
    )
    token_file: str | None = option(
        None, "File with the bearer token for the server.", on_resume="free"
    )
    ca_file: str | None = option(
        None,
        "File with CA certificates that verify an https server; defaults to the machine's trust "
        "store.",
        on_resume="free",
    )
    host: str = option(
        "127.0.0.1",
        "Address that a started server listens on.",
        unused_because=_OURS,
        on_resume="free",
    )
    port: int = option(
        8000,
        "Port that a started server listens on; 0 means any free port.",
        at_least=0,
        at_most=65535,
        unused_because=_OURS,
        on_resume="free",
    )
    max_staleness: int | None = option(
        None,
        "Maximum number of policy versions that a group may lag behind; without a number there is "
        "no limit.",
        at_least=0,
        on_resume="warns",
    )
    wait_s: float = option(
        900.0, "Timeout in seconds for a step to receive its batch.", above=0, on_resume="free"
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for an invalid URL and for each missing file."""
        if self.url is not None and not re.match(r"https?://[^/]", self.url):
            yield f"{name}.url={self.url}: give http://host:port"
        for option_name in ("token_file", "ca_file"):
            file = getattr(self, option_name)
            if file is not None and not Path(file).expanduser().is_file():
                yield f"{name}.{option_name}={file}: no such file"


@dataclass
class EvaluationConfig:
    """Evaluation on held-out tasks, before the first and after the last train step."""

    episodes_per_task: int = option(
        12, "Number of episodes per task template, sampled at the training temperature.", at_least=0
    )
    greedy_episodes_per_task: int = option(
        4, "Number of episodes per task template, decoded greedily.", at_least=0
    )
    templates: int = option(
        200,
        "Maximum number of task templates (rows of a data set) of each environment to evaluate, "
        "spread evenly.",
        at_least=1,
    )
    every_steps: int = option(
        0, "Interval between additional evaluations, in train steps; 0 disables them.", at_least=0
    )
    interim_share: float = option(
        0.25,
        "Fraction of the episodes per task template, rounded up, that evaluations before the last "
        "one play.",
        above=0,
        at_most=1,
    )


WILDCARD = "0.0.0.0"
"""Address for listening on all IPv4 interfaces. Clients cannot connect to it."""
ADDRESS_WANTED = (
    "give an IPv4 address or a host name, without scheme and port; IPv6 is not supported"
)
"""Advice in error messages about an unusable address."""


def is_invalid_address(text: str) -> bool:
    """Return whether ``text`` is not empty and cannot be an IPv4 address or a host name."""
    return bool(text) and (":" in text or "/" in text or text != text.strip())


@dataclass
class NetworkConfig:
    """Addresses that the processes of a run listen on. Without ``bind`` all of them use the
    loopback interface. With it the launcher creates keys for the run, and every socket is encrypted
    and accepts only peers that hold the keys."""

    bind: str = option(
        "",
        "IPv4 address or host name that the master listens on; each worker listens on the address "
        "from which it "
        "connects to the master. 0.0.0.0 means all interfaces for all of them, empty the loopback "
        "interface.",
    )
    advertise: str = option(
        "", "Address or host name at which workers connect to the master; defaults to network.bind."
    )
    trusted: bool = option(
        False,
        "Treat the network as private: send large tensors without encryption, and allow the "
        "workers that train a role "
        "together to be on several hosts.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield errors of unusable addresses, and of options that need another option."""
        for option_name in ("advertise", "trusted"):
            if getattr(self, option_name) and not self.bind:
                yield f"{name}.{option_name}: has no effect without {name}.bind"
            elif getattr(self, option_name) and (
                self.bind == "localhost" or self.bind.startswith("127.")
            ):
                yield (
                    f"{name}.{option_name}: has no effect while {name}.bind={self.bind} is the "
                    f"loopback"
                )
        if self.bind == WILDCARD and not self.advertise:
            yield (
                f"{name}.bind={WILDCARD}: workers cannot connect to this address; set "
                f"{name}.advertise"
            )
        if self.advertise == WILDCARD:
            yield (
                f"{name}.advertise={WILDCARD}: no process can connect there; give an address of "
                f"the master's host"
            )
        for option_name, text in (("bind", self.bind), ("advertise", self.advertise)):
            if is_invalid_address(text):
                yield f"{name}.{option_name}={text}: {ADDRESS_WANTED}"


@dataclass
class SchedulerConfig:
    """The scheduler that starts the processes of a run. The selected scheduler adds its own
    options."""

    path: str = option(
        "local", "Scheduler to use: a registered name, or FILE.py:Name for a custom one."
    )


@dataclass
class AllocationConfig:
    """Assignment of GPUs to the workers of a run."""

    gpus: list[int] = option(
        [],
        "GPUs to assign, one each, first to the model workers and then to the generation workers. "
        "They are numbered "
        "from 0 among those visible to the launcher (CUDA_VISIBLE_DEVICES). Empty means all "
        "visible ones, with "
        "separate GPUs for generation if there are enough.",
        at_least=0,
    )
    share: bool = option(
        False,
        "Place generation workers on the GPUs of the model workers, round-robin, instead of on "
        "separate ones.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for repeated GPUs, and for ``share`` without a list of GPUs."""
        if len(set(self.gpus)) < len(self.gpus):
            yield f"{name}.gpus={self.gpus}: give different GPUs"
        if self.share and not self.gpus:
            yield f"{name}.share: has no effect without {name}.gpus"


@dataclass
class CheckpointConfig:
    """Recovery checkpoints and the best policy."""

    ckpt_freq_steps: int = option(5, "Interval between checkpoints, in train steps.", at_least=1)
    keep: int = option(2, "Number of most recent checkpoints to keep on disk.", at_least=1)
    keep_best: bool = option(
        False,
        "Keep the policy with the best held-out success in best_policy, in addition to the final "
        "policy. "
        "Asynchronous runs then write the policy to disk before each evaluation.",
    )


@dataclass
class RpcConfig:
    """Timeouts of the control plane, and the transport of tensors between workers."""

    connect_timeout_s: float = option(
        120.0,
        "Timeout in seconds for a worker to start and register. The default is 600 if workers "
        "start vLLM, which compiles and captures graphs.",
        above=0,
    )
    control_timeout_s: float = option(
        30.0, "Timeout in seconds for a worker's reply to a control message.", above=0
    )
    call_timeout_s: float = option(
        1800.0, "Timeout in seconds for a call of the dataflow graph.", above=0
    )
    heartbeat_s: float = option(2.0, "Interval in seconds between a worker's heartbeats.", above=0)
    dead_after_s: float = option(
        8.0, "Seconds without a message after which a worker counts as dead.", above=0
    )
    shm: bool = option(True, "Move tensors between workers of one host through shared memory.")

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for a heartbeat interval that is not shorter than ``dead_after_s``."""
        if self.dead_after_s <= self.heartbeat_s:
            limit = f"{name}.dead_after_s={self.dead_after_s:g}"
            yield f"{name}.heartbeat_s={self.heartbeat_s:g}: must be less than {limit}"


ALL_ROLLOUTS = "all"
"""Value of ``monitor.rollouts`` that keeps every rollout."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Experiment trackers that ``monitor.trackers`` may name."""


@dataclass
class MonitorConfig:
    """Monitoring of a run: progress display, experiment trackers, transcripts and recorded
    rollouts."""

    progress: bool = option(True, "Show a live progress display in the terminal.")
    trackers: list[str] = option(
        ["tensorboard"],
        "Experiment trackers that receive metrics, evaluations and the configuration. Each but "
        "tensorboard needs the "
        "package extra of its name.",
        choices=TRACKERS,
    )
    episodes_per_step: int = option(
        2, "Number of sampled episodes per step to write as text.", at_least=0
    )
    rollouts: str = option(
        ALL_ROLLOUTS,
        "Rollouts to record in the run folder: all, 0 for none, or an approximate number per step, "
        "in whole groups.",
    )
    rollout_tokens: float = option(
        0.25,
        "Fraction of the recorded groups for which each token's log-probabilities, ratio and "
        "advantage are recorded.",
        at_least=0,
        at_most=1,
    )
    rollout_bytes: int = option(
        2 * 2**30,
        "Maximum size of the folder of recorded rollouts in bytes; recording stops there.",
        at_least=0,
    )
    episodes_every_steps: int = option(
        20,
        "Interval in steps between transcripts sent to the trackers; 0 sends only the first "
        "step's.",
        at_least=0,
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for a value of ``rollouts`` that is neither ``all`` nor a number."""
        if self.rollouts != ALL_ROLLOUTS and not (
            self.rollouts.isascii() and self.rollouts.isdigit()
        ):
            yield (
                f"{name}.rollouts={self.rollouts}: must be all, or a number of rollouts for each "
                f"step (0 for none)"
            )


class Mode(Enum):
    """What a launch does: run trains; check validates and stops; graph prints the dataflow
    graph; show prints the first rows of dataset.path as tokens."""

    run = "run"
    check = "check"
    graph = "graph"
    show = "show"


class RecoverMode(Enum):
    """Resumption of a trial: auto resumes from the last valid checkpoint if there is one; resume
    requires one; disabled starts from scratch."""

    auto = "auto"
    resume = "resume"
    disabled = "disabled"


@dataclass
class ExperimentConfig:
    """Options of every experiment. An experiment with sections of its own subclasses it and
    annotates the parameter of its ``build`` function with the subclass."""

    experiment: str = option(MISSING, "Name of the experiment to run.")
    experiment_path: str | None = option(
        None,
        "Python file of an experiment outside the package; its YAML file has the same name and "
        "folder.",
        on_resume="warns",
    )
    experiment_name: str = option(
        "${experiment}",
        "Name of the folder below fileroot that groups the trials.",
        on_resume="free",
    )
    trial_name: str = option(
        "", "Name of the run folder; defaults to the time of the launch.", on_resume="free"
    )
    fileroot: str = option("runs", "Folder for everything that runs write.", on_resume="free")
    seed: int = option(1, "Seed of all random numbers in the run.", at_least=0, at_most=MAX_SEED)
    mode: Mode = option(
        Mode.run,
        "run trains; check validates and stops; graph prints the dataflow graph; show prints the "
        "first rows of dataset.path as tokens.",
        on_resume="free",
    )
    trace: bool = option(
        False,
        "With mode=check, run a step of the run's models, without their weights, on a pretended "
        "GPU, and print its memory by what holds it. On a machine without a GPU everything is "
        "checked as for machine=8xH100.",
        on_resume="free",
    )
    machine: str | None = option(
        None,
        "With mode=check, the machine to plan for instead of this one: COUNTxMODEL such as 8xH100, "
        "cpu, or a file with what nvidia-smi printed there (docs/gpu.md).",
        on_resume="free",
    )
    recover_mode: RecoverMode = option(
        RecoverMode.auto,
        "auto resumes from the trial's last valid checkpoint, if any; resume requires one; "
        "disabled starts from "
        "scratch.",
        on_resume="free",
    )
    total_train_steps: int = option(
        60, "Number of train steps of the run.", at_least=1, on_resume="warns"
    )
    torch_threads: int = option(
        0,
        "Number of compute threads per model worker; 0 divides the cores that generation workers "
        "leave.",
        at_least=0,
        on_resume="free",
    )

    actor: ModelConfig = section(ModelConfig)
    ref: ReferenceConfig = section(
        ReferenceConfig,
        on_resume="free",
        unused_because="without a KL term (ppo.kl_ctl, ppo.kl_loss_coef) there is no reference "
        "model",
    )
    builtin: BuiltinModelConfig = section(
        BuiltinModelConfig, unused_because="it configures the model of actor.path=builtin"
    )
    warm_start: WarmStartConfig = section(
        WarmStartConfig,
        unused_because="only actor.path=builtin (in environments with a scripted solver) and "
        "actor.warm_start=true have a warm "
        "start",
    )
    dataset: DatasetConfig = section(DatasetConfig)
    gen: GenConfig = section(GenConfig)
    engine: EngineConfig = section(EngineConfig)
    mb_spec: MicroBatchConfig = section(MicroBatchConfig, on_resume="free")
    rollout: RolloutConfig = section(RolloutConfig)
    stream: StreamConfig = section(StreamConfig)
    async_rl: AsyncConfig = section(
        AsyncConfig, unused_because="it needs async_rl.enabled=true, which grpo_async sets"
    )
    evaluation: EvaluationConfig = section(EvaluationConfig, on_resume="warns")
    exp_ctrl: CheckpointConfig = section(CheckpointConfig, on_resume="free")
    scheduler: SchedulerConfig = section(SchedulerConfig, on_resume="free")
    allocation: AllocationConfig = section(AllocationConfig, on_resume="free")
    network: NetworkConfig = section(NetworkConfig, on_resume="free")
    rpc: RpcConfig = section(RpcConfig, on_resume="free")
    monitor: MonitorConfig = section(MonitorConfig, on_resume="free")


def run_folder(config: ExperimentConfig) -> Path:
    """Return <fileroot>/<experiment_name>/<trial_name> as an absolute path."""
    return Path(config.fileroot).expanduser().resolve() / config.experiment_name / config.trial_name
