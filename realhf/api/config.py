"""Defines the configuration that Hydra reads: the sections that every experiment has, as dataclasses whose unknown
options are errors.

Defaults here are the library's; ``configs/experiment/*.yaml`` holds what an experiment changes. The sections of an
algorithm or an environment lie beside it (``realhf/algorithms/options.py``,
``realhf/environments/sql/definition.py``), and the experiments that use it add them. No torch.
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
    """A mistake in the configuration; each line of the message names an option."""


_NO_ADAPTERS = "there are no adapters with rank 0"


class LRSchedule(Enum):
    """What the learning rate does after its warm-up: it stays, or decays to 0 at the last train step."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    """AdamW. Warm-up and decay are over the train steps of the run."""

    lr: float = option(1e-6, "Peak learning rate, reached after the warm-up.", above=0, on_resume="warns")
    weight_decay: float = option(0.05, "AdamW weight decay (decoupled).", at_least=0)
    beta1: float = option(0.9, "AdamW beta1, the decay rate of the first moment.", at_least=0, at_most=1)
    beta2: float = option(0.95, "AdamW beta2, the decay rate of the second moment.", at_least=0, at_most=1)
    eps: float = option(1e-5, "AdamW epsilon, added to the denominator for numerical stability.", at_least=0)
    warmup_steps_proportion: float = option(
        0.001,
        "Fraction of the train steps over which the learning rate warms up linearly from 0.",
        at_least=0,
        at_most=1,
    )
    lr_scheduler_type: LRSchedule = option(
        LRSchedule.constant, "Learning rate schedule after the warm-up: constant, or linear or cosine decay to 0."
    )
    gradient_clipping: float = option(
        1.0, "Maximum gradient norm; larger gradients are rescaled to it. 0 disables clipping.", at_least=0
    )
    offload: bool = option(
        False,
        "Offload the AdamW moments to host memory between steps (GPUs only, backends torch and ddp).",
        on_resume="free",
    )


@dataclass
class ParallelConfig:
    """How several workers of a role share its training; the product is the number of its workers."""

    dp: int = option(0, "Data-parallel size; 0 infers it from the number of workers.", at_least=0)
    fsdp: int = option(
        0,
        "Number of workers that each replica is sharded over; 0 means all of them with backend fsdp2, otherwise 1.",
        at_least=0,
    )
    tp: int = option(1, "Tensor-parallel size; no backend supports a value above 1 yet.", at_least=1)


@dataclass
class LoraConfig:
    """Low-rank adapters on linear layers, which train in place of the weights that they stand beside."""

    rank: int = option(
        0,
        "Rank of the LoRA adapters, which train while all other weights are frozen; 0 trains the full weights.",
        at_least=0,
    )
    alpha: float = option(
        32.0,
        "LoRA alpha: an adapter's output is scaled by alpha / rank.",
        above=0,
        idle=_NO_ADAPTERS,
    )
    targets: list[str] = option(
        [],
        "Linear layers that get adapters, by name or suffix, e.g. [q_proj, v_proj]; empty means all linear layers "
        "of the blocks.",
        idle=_NO_ADAPTERS,
    )
    dropout: float = option(
        0.0,
        "Dropout on the inputs of the adapters during training; supervised training only.",
        at_least=0,
        at_most=0.9,
        idle=_NO_ADAPTERS,
    )

    def chosen(self) -> LoraConfig | None:
        """The same options as plain values; None, and only ``rank`` is read, where there are no adapters."""
        return LoraConfig(self.rank, self.alpha, list(self.targets), self.dropout) if self.rank else None


@dataclass
class ModelConfig:
    """A model role: where its weights come from, who holds them, and how they train."""

    path: str = option("builtin", "Model to load: 'builtin' (the small built-in policy), a folder, or a hub id.")
    warm_start: bool = option(
        False,
        "Fine-tune the model of actor.path on demonstrations first, as configured in warm_start; the built-in "
        "policy always is.",
        idle="it is about a model of one's own, in an experiment that does not itself train on demonstrations",
    )
    workers: list[int] = option([0], "Indices of the model workers that hold the model.", at_least=0, on_resume="free")
    backend: str = option(
        "torch",
        "Training backend: torch on one worker, ddp with a replica on each of several, fsdp2 with the model "
        "sharded over several.",
        registry="backends",
        on_resume="free",
    )
    parallel: ParallelConfig = section(ParallelConfig, on_resume="free")
    dtype: str = option(
        "float32",
        "Data type of the weights. float16 is not supported, since no backend scales the loss.",
        choices=("float32", "bfloat16"),
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute activations in the backward pass, which trades time for memory.",
        on_resume="free",
    )
    compile: bool = option(
        False,
        "Compile the transformer blocks with torch.compile for training and scoring. The first steps take minutes, "
        "and a compiler is required (g++ on the CPU, triton on GPUs).",
        on_resume="free",
    )
    experts: bool = option(
        False,
        "Allow training a mixture of experts, without the router's auxiliary loss and with the trainer's own "
        "routing, which can differ from the generator's in bfloat16.",
        idle="the model is that of the actor, and actor.experts is about it",
    )
    chat_template_kwargs: dict[str, Any] = option(
        {}, "Variables passed to the chat template whenever text is rendered, e.g. {enable_thinking: false}."
    )
    tool_parser: str = option(
        AUTO,
        "Syntax in which the policy's tool calls are parsed; auto detects it from the chat template, plain parses "
        "none.",
        choices=(AUTO, *FAMILIES),
        idle="the model plays no episodes, and actor.tool_parser is about the one that does",
    )
    optimizer: OptimizerConfig = section(OptimizerConfig)
    lora: LoraConfig = section(LoraConfig)


@dataclass
class ReferenceConfig:
    """The frozen reference policy: the actor's first weights. With adapters it is the actor with its adapters off, on
    the workers that hold the actor."""

    workers: list[int] = option([0], "Indices of the model workers that hold the reference.", at_least=0)


@dataclass
class TeacherConfig:
    """The teacher of on-policy distillation (ppo.distill_weight): a frozen model that says how likely the policy's
    tokens are to it, so that its tokenizer must be the actor's. It is a role of the graph, or is served elsewhere."""

    path: str = option("", "Folder or hub id of a teacher that runs as a role of the graph.")
    workers: list[int] = option(
        [0], "Indices of the model workers that hold the teacher of teacher.path.", at_least=0, on_resume="free"
    )
    dtype: str = option(
        "float32", "Data type of the weights of teacher.path.", choices=("float32", "bfloat16"), on_resume="free"
    )
    url: str = option(
        "",
        "URL of a served teacher: an OpenAI-compatible /v1/completions endpoint that returns prompt "
        "log-probabilities, such as vLLM's.",
        on_resume="free",
    )
    model: str = option(
        "", "Name of the teacher on the server of teacher.url; by default the first model that it lists."
    )
    token_file: str | None = option(None, "File with the bearer token for teacher.url.", on_resume="free")
    connections: int = option(16, "Maximum number of concurrent requests to teacher.url.", at_least=1, on_resume="free")

    def problems(self, name: str) -> Iterator[str]:
        """There is one teacher, and what belongs to the other kind does nothing."""
        if self.path and self.url:
            yield f"{name}.path={self.path}, {name}.url={self.url}: there is one teacher; set one of them"
        if self.path in ("builtin", "builtin_tiny", "actor"):
            yield f"{name}.path={self.path}: the teacher is another model than the actor; name a folder or a hub id"
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"
        if self.url and not re.match(r"https?://[^/]", self.url):
            yield f"{name}.url={self.url}: give http://host:port"
        if self.token_file is not None and not Path(self.token_file).expanduser().is_file():
            yield f"{name}.token_file={self.token_file}: no such file"


@dataclass
class BuiltinModelConfig:
    """The small policy for machines without downloads (a Qwen3 configuration)."""

    vocab_size: int = option(1536, "Vocabulary size of the tokenizer.", at_least=1)
    hidden_size: int = option(128, "Hidden size; must be num_heads times an even head dimension.", at_least=1)
    num_layers: int = option(4, "Number of transformer layers.", at_least=1)
    num_heads: int = option(4, "Number of attention heads per layer.", at_least=1)
    intermediate_size: int = option(384, "Hidden size of the feed-forward networks.", at_least=1)
    max_positions: int = option(1024, "Maximum context length in tokens.", at_least=1)


@dataclass
class WarmStartOptimizerConfig(OptimizerConfig):
    """AdamW over the steps of the warm start, before the run begins: with another learning rate it would have begun
    elsewhere."""

    lr: float = option(1e-5, "Peak learning rate, reached after the warm-up.", above=0, on_resume="refuses")


@dataclass
class WarmStartConfig:
    """Supervised warm start of a policy on episodes that a scripted solver really played.

    The demonstrations are of mixed quality, as logs of real operators are: some make a mistake and leave it at that,
    some make one and repair it. A warm start on perfect episodes only would leave reinforcement learning little to
    do."""

    episodes_per_task: int = option(45, "Number of demonstrations per task template.", at_least=1)
    habit_fraction: float = option(
        0.35, "Fraction of the demonstrations that contain a mistake and do not repair it.", at_least=0, at_most=1
    )
    recovery_fraction: float = option(
        0.15, "Fraction of the demonstrations that contain a mistake and repair it.", at_least=0, at_most=1
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
        "Use the policy that ships with an environment if it was made from the same options, instead of making one.",
    )
    cache_dir: str | None = option(
        None, "Folder in which warm starts are cached; defaults to 'warm_start' below fileroot.", on_resume="free"
    )


@dataclass
class DatasetConfig:
    """Samples and where they come from."""

    train_bs_n_seqs: int = option(
        16, "Samples per train step: groups of rollouts of a task, or supervised episodes.", at_least=1
    )
    curriculum: str = option(
        "learnability", "Curriculum that draws the tasks.", choices=("learnability", "priority", "uniform")
    )
    group_success: str = option(
        "fraction",
        "What the curriculum counts as a group's success: the fraction of its rollouts that achieved the task, or "
        "whether any did.",
        choices=("fraction", "any"),
    )
    untried_share: float = option(
        1.0,
        "Maximum share of a step's tasks that come from templates never tried before, once others succeed "
        "sometimes (curriculum learnability or uniform). With 1 untried templates always come first.",
        above=0,
        at_most=1,
    )
    priority: dict[str, Any] = option(
        {},
        "Constants of the priority curriculum that override its preset (key 'preset': standard or slow).",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Each curriculum has options of its own."""
        unused = "untried_share" if self.curriculum == "priority" else "priority"
        value, default = getattr(self, unused), {} if unused == "priority" else DatasetConfig.untried_share
        if value != default:
            yield f"{name}.{unused}={value}: has no effect with {name}.curriculum={self.curriculum}"


@dataclass
class MicroBatchConfig:
    """Micro-batches; sequences are never cut.

    The default of max_tokens_per_mb is the smallest that costs no time at a million parameters on one core: 64 rollouts
    of 10,700 tokens train in 1.4 CPU seconds and 0.70 GB, with 4,096 in 1.4 and 0.94, with 16,384 in 1.4 and 1.14."""

    n_mbs: int = option(1, "Minimum number of micro-batches per batch.", at_least=1)
    max_tokens_per_mb: int | None = option(
        2048,
        "Maximum number of token positions per micro-batch, counting padding, and a shared prefix once. It should "
        "hold the longest sequence; null means 4096.",
        at_least=1,
    )


@dataclass
class GenConfig:
    """Sampling. Rewards and log-probabilities are those of exactly this distribution."""

    max_new_tokens: int = option(64, "Maximum number of tokens per turn.", at_least=1)
    min_new_tokens: int = option(0, "Minimum number of tokens per turn; training requires 0.", at_least=0)
    temperature: float = option(1.0, "Sampling temperature, by which the logits are divided.", above=0)
    top_p: float = option(
        1.0,
        "Nucleus sampling: draw from the most likely tokens with this total probability; training requires 1.",
        above=0,
        at_most=1,
    )
    top_k: int = option(
        0, "Draw from this many of the most likely tokens, 0 from all; training requires 0.", at_least=0
    )
    stop_ids: list[int] = option(
        [],
        "Additional token ids that end a turn, beside the end of turn of the chat template, the tokenizer's end of "
        "sequence and those of generation_config.json.",
        at_least=0,
    )
    new_tokens_per_chunk: int | None = option(
        None,
        "Maximum number of tokens per engine call. A longer turn continues in the next call, so that lockstep "
        "rollouts wait for a chunk rather than for the longest turn.",
        at_least=1,
        on_resume="free",
    )

    def truncations(self) -> list[str]:
        """The options, as ``top_p=0.9``, that draw tokens from a cut distribution. Training refuses them: the trainer
        knows the log-probabilities of the whole distribution only. Evaluation may use them."""
        whole = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value]


@dataclass
class EngineConfig:
    """What samples tokens, in training and in evaluations (docs/asynchronous.md)."""

    name: str = option(
        "embedded",
        "Engine that generates tokens. By default vllm for a pretrained model on a machine with a GPU and vLLM, "
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
    max_model_len: int | None = option(
        None,
        "Maximum sequence length of a started vLLM server; defaults to rollout.max_total_tokens.",
        at_least=1,
        on_resume="free",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of the GPU's memory that a started vLLM server uses; defaults to vLLM's own default.",
        above=0,
        at_most=1,
        on_resume="free",
    )
    tensor_parallel_size: int = option(
        1, "Tensor-parallel size of a started vLLM server.", at_least=1, on_resume="free"
    )
    kv_cache_gib: float | None = option(
        None,
        "The embedded engine keeps keys and values in at most this many GiB, and plays what does not fit after the "
        "rest; without a number, in half of what is free on a GPU that it shares with a trainer, in four fifths on one "
        "of its own, and on a CPU in what it needs.",
        above=0,
        on_resume="free",
    )

    def problems(self, name: str) -> Iterator[str]:
        """An option of vLLM does nothing for another engine, nor one of a server that is started for another server."""
        names = [every.name for every in fields(self)]
        own = {"embedded": {"name", "kv_cache_gib"}, "vllm": {*names} - {"kv_cache_gib"}}.get(self.name, {"name"})
        unused = {name: "name" for name in names if name not in own}
        if self.vllm_url is not None and self.name == "vllm":
            unused |= {name: "vllm_url" for name in own - {"name", "vllm_url"}}
        for option_name, cause in unused.items():
            if getattr(self, option_name) != getattr(EngineConfig, option_name):
                yield f"{name}.{option_name}: has no effect with {name}.{cause}={getattr(self, cause)}"


ON_FAILURE = ("minimum_group", "retry", "fail_fast")
"""What a failed rollout means for its group, see ``RolloutConfig.on_failure``."""


@dataclass
class RolloutConfig:
    """Multi-turn episodes."""

    max_turns: int = option(6, "Maximum number of turns per episode.", at_least=1)
    max_total_tokens: int = option(1024, "Maximum number of tokens per sequence, prompt included.", at_least=1)
    min_group_size: int = option(
        2,
        "Minimum number of valid rollouts in a group; a smaller group gives no gradient.",
        at_least=1,
    )
    on_failure: str = option(
        "minimum_group",
        "What to do about a failed rollout: minimum_group retries it, then drops it if rollout.min_group_size "
        "others are valid; retry requires the whole group; fail_fast ends the run.",
        choices=ON_FAILURE,
        on_resume="warns",
    )
    retries: int = option(
        2,
        "How often a failed rollout is retried and a lost session resumed.",
        at_least=0,
        on_resume="warns",
    )
    message_timeout_s: float = option(
        60.0, "Timeout in seconds for each message to the environment.", above=0, on_resume="free"
    )
    sessions: int = option(
        0,
        "Maximum number of concurrent episodes; 0 means as many as the environment allows, or 32 if it sets no limit.",
        at_least=0,
        on_resume="free",
    )
    agent: str = option(
        "",
        "Agent that plays the episodes of asynchronous experiments, as file.py:function or module:function; empty "
        "means the built-in agent.",
    )

    keep_reasoning: bool = option(
        True,
        "The policy reads all that it said; if false, its old reasoning is dropped as its chat template does, and an "
        "episode trains as several sequences.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Nothing is played again by the policy that fails fast, and an agent keeps its conversations itself."""
        if self.agent and not self.keep_reasoning:
            yield f"{name}.keep_reasoning=False: no effect with {name}.agent, which sends whole conversations itself"
        if self.on_failure == "fail_fast" and self.retries != RolloutConfig.retries:
            yield f"{name}.retries={self.retries}: no effect with {name}.on_failure=fail_fast"


@dataclass
class AsyncConfig:
    """Asynchronous training: rollout workers play while the trainer trains (docs/asynchronous.md)."""

    enabled: bool = option(
        False,
        "Let rollout workers play while the trainer trains; otherwise each step waits for its own episodes.",
        idle="no episodes are played for it while it trains",
    )
    max_head_offpolicyness: int = option(
        1,
        "Maximum staleness (eta): how many weight versions the oldest token of a sample may lag behind the weights "
        "that train on it. 0 means synchronous batches.",
        at_least=0,
        on_resume="warns",
    )
    max_concurrent_rollouts: int | None = option(
        None,
        "Maximum number of samples in flight; defaults to what the environment's sessions hold plus two batches.",
        on_resume="free",
    )
    n_rollout_workers: int = option(1, "Number of rollout worker processes.", at_least=1, on_resume="free")
    n_generation_workers: int = option(1, "Number of generation worker processes.", at_least=1, on_resume="free")
    generation_threads: int = option(1, "Number of compute threads per embedded engine.", at_least=1, on_resume="free")
    staleness_policy: str = option(
        "wait",
        "Whether a step waits for stragglers or drops samples that are too old.",
        choices=("wait", "drop"),
        on_resume="warns",
    )
    kv_policy: str = option(
        "recompute",
        "Under new weights, running episodes recompute their keys and values or keep them.",
        choices=("recompute", "keep"),
        on_resume="warns",
    )
    weights: str = option(
        "shm",
        "New weights travel through shared memory, files, or the sockets of the run (fetch).",
        choices=("shm", "disk", "fetch"),
        retired={"broadcast": "fetch reaches the same hosts, encrypted with the keys of the run"},
        on_resume="free",
    )
    rollout_deadline_s: float = option(
        600.0,
        "A sample, or the generation of a turn, that takes longer than these seconds is given back.",
        above=0,
        on_resume="free",
    )
    pause_timeout_s: float = option(
        30.0, "An engine stops for new weights within these seconds.", above=0, on_resume="free"
    )
    recover_retries: int = option(
        1,
        "After the death of its master or a model worker, the run begins again from its last checkpoint this many "
        "times within recover_window_s.",
        at_least=0,
        on_resume="free",
    )
    recover_window_s: float = option(
        3600.0, "Deaths longer ago than these seconds do not count towards recover_retries.", above=0, on_resume="free"
    )
    journal_timeout_s: float = option(
        30.0,
        "The disk of the run folder takes a record of the journal within these seconds.",
        above=0,
        on_resume="free",
    )
    keep_journal: bool = option(
        False,
        "What the journal needs no more is kept in its folder 'archive', so that every sample can be audited.",
        on_resume="free",
    )
    niceness: int = option(
        0,
        "Rollouts, generation and environment step back this far behind the trainer, for cores that are always busy.",
        at_least=0,
        at_most=19,
        on_resume="free",
    )
    max_attempts: int = option(
        3, "A sample whose group did not come about is admitted this many times in all.", at_least=1, on_resume="free"
    )
    max_deaths: int = option(
        3, "A sample is given up when the worker that played it has died this many times.", at_least=1, on_resume="free"
    )


_OURS = "this run starts no trajectory server"


@dataclass
class StreamConfig:
    """The trajectory server that groups come from: one that runs already (``url``), or one that the launcher starts,
    whose queue lies in the run folder."""

    url: str | None = option(
        None, "Groups come from the server at this URL; without one the launcher starts a server.", on_resume="free"
    )
    token_file: str | None = option(None, "This file holds the bearer token of the server.", on_resume="free")
    ca_file: str | None = option(
        None,
        "An https server is checked by the certificates in this file; without it as this machine does.",
        on_resume="free",
    )
    host: str = option("127.0.0.1", "A server of this run listens on this address.", idle=_OURS, on_resume="free")
    port: int = option(
        8000,
        "A server of this run listens on this port; 0 is any free one.",
        at_least=0,
        at_most=65535,
        idle=_OURS,
        on_resume="free",
    )
    max_staleness: int | None = option(
        None,
        "A group lies at most this many policy versions behind; without a number, any.",
        at_least=0,
        on_resume="warns",
    )
    wait_s: float = option(900.0, "A step waits these seconds for its batch.", above=0, on_resume="free")

    def problems(self, name: str) -> Iterator[str]:
        """A URL that is none, and a file that is not there."""
        if self.url is not None and not re.match(r"https?://[^/]", self.url):
            yield f"{name}.url={self.url}: give http://host:port"
        for option_name in ("token_file", "ca_file"):
            file = getattr(self, option_name)
            if file is not None and not Path(file).expanduser().is_file():
                yield f"{name}.{option_name}={file}: no such file"


@dataclass
class EvaluationConfig:
    """Held-out evaluation, before the first and after the last train step."""

    episodes_per_task: int = option(
        12, "Every task template is played this many times at the training temperature.", at_least=0
    )
    greedy_episodes_per_task: int = option(12, "Every task template is played this many times greedily.", at_least=0)
    templates: int = option(
        200, "At most this many task templates (rows of a data set) are evaluated, spread evenly.", at_least=1
    )
    every_steps: int = option(
        0, "The policy is evaluated every so many steps too; 0 leaves these evaluations out.", at_least=0
    )
    interim_share: float = option(
        0.25,
        "Evaluations before the last one play this share of the episodes of each task template, rounded up.",
        above=0,
        at_most=1,
    )


WILDCARD = "0.0.0.0"
ADDRESS_WANTED = "give an IPv4 address or a host name, without scheme and port; IPv6 is not supported"


def no_address(text: str) -> bool:
    """Return whether a text, which may be empty, cannot be an IPv4 address or a host name."""
    return bool(text) and (":" in text or "/" in text or text != text.strip())


@dataclass
class NetworkConfig:
    """Where the processes of a run listen. Without ``bind`` nothing listens but on the loopback. With it the launcher
    makes keys for the run: every socket of it is then encrypted and takes nobody without them."""

    bind: str = option(
        "",
        "The master listens on this IPv4 address or name of its host, and every worker on the address from which it "
        "reaches the master; 0.0.0.0: all of them on all addresses; empty: all of them on the loopback.",
    )
    advertise: str = option("", "Workers reach the master at this address or name; empty: at the one it listens on.")
    trusted: bool = option(
        False,
        "Nobody but the run can read or write on its network: large tensors go over it without encryption, and "
        "workers that train one role together may be on several hosts.",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Options that need another one, and addresses that cannot be used."""
        for option_name in ("advertise", "trusted"):
            if getattr(self, option_name) and not self.bind:
                yield f"{name}.{option_name}: has no effect without {name}.bind"
            elif getattr(self, option_name) and (self.bind == "localhost" or self.bind.startswith("127.")):
                yield f"{name}.{option_name}: has no effect while {name}.bind={self.bind} is the loopback"
        if self.bind == WILDCARD and not self.advertise:
            yield f"{name}.bind={WILDCARD}: workers cannot be told to connect there; set {name}.advertise"
        if self.advertise == WILDCARD:
            yield f"{name}.advertise={WILDCARD}: nobody can connect there; give an address of the master's host"
        for option_name, text in (("bind", self.bind), ("advertise", self.advertise)):
            if no_address(text):
                yield f"{name}.{option_name}={text}: {ADDRESS_WANTED}"


@dataclass
class SchedulerConfig:
    """How the processes of a run are started. The scheduler that is chosen brings options of its own."""

    path: str = option("local", "The scheduler: a registered name, or FILE.py:Name for one of your own.")


@dataclass
class AllocationConfig:
    """Which GPUs the workers of a run get."""

    gpus: list[int] = option(
        [],
        "Model workers, then generation workers, get one of these GPUs each, numbered from 0 among those that the "
        "launcher sees (CUDA_VISIBLE_DEVICES, where it is set); with none named, all of those are dealt out, and "
        "generation gets others than training where there are enough.",
        at_least=0,
    )
    share: bool = option(
        False, "Generation workers get the GPUs of the model workers, in turn, instead of further ones."
    )

    def problems(self, name: str) -> Iterator[str]:
        """A GPU is named once, and sharing is about named ones."""
        if len(set(self.gpus)) < len(self.gpus):
            yield f"{name}.gpus={self.gpus}: give different GPUs"
        if self.share and not self.gpus:
            yield f"{name}.share: has no effect without {name}.gpus"


@dataclass
class CheckpointConfig:
    """Recovery checkpoints."""

    ckpt_freq_steps: int = option(5, "A checkpoint is written every so many steps.", at_least=1)
    keep: int = option(2, "This many checkpoints stay on the disk.", at_least=1)
    keep_best: bool = option(
        False,
        "The policy with the best held-out success is kept in best_policy, beside the policy of the last step. Each "
        "evaluation of an asynchronous run then writes the policy first.",
    )


@dataclass
class RpcConfig:
    """Deadlines of the control plane."""

    connect_timeout_s: float = option(120.0, "A worker comes up within these seconds.", above=0)
    control_timeout_s: float = option(30.0, "A worker answers a control message within these seconds.", above=0)
    call_timeout_s: float = option(1800.0, "A call of the graph ends within these seconds.", above=0)
    heartbeat_s: float = option(2.0, "A worker shows that it lives every so many seconds.", above=0)
    dead_after_s: float = option(8.0, "A worker that was silent for these seconds counts as dead.", above=0)
    shm: bool = option(True, "Tensors move between workers of a host through shared memory.")

    def problems(self, name: str) -> Iterator[str]:
        """A worker must get the chance to send a heartbeat."""
        if self.dead_after_s <= self.heartbeat_s:
            limit = f"{name}.dead_after_s={self.dead_after_s:g}"
            yield f"{name}.heartbeat_s={self.heartbeat_s:g}: must be less than {limit}"


ALL_ROLLOUTS = "all"
"""The value of ``monitor.rollouts`` that keeps every rollout."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass
class MonitorConfig:
    """What a person sees of a run."""

    progress: bool = option(True, "A live display shows the run.")
    trackers: list[str] = option(
        ["tensorboard"],
        "Metrics, evaluations and configuration go to these as well; each but tensorboard is an extra of the package.",
        choices=TRACKERS,
    )
    episodes_per_step: int = option(2, "This many sampled episodes of a step are written as text.", at_least=0)
    rollouts: str = option(
        ALL_ROLLOUTS,
        "Rollouts are kept in the run folder: all, 0 for none, or about so many of a step, in whole groups.",
    )
    rollout_tokens: float = option(
        0.25,
        "Of the groups whose rollouts are kept, this share keeps every token's log-probabilities, ratio and advantage.",
        at_least=0,
        at_most=1,
    )
    rollout_bytes: int = option(
        2 * 2**30, "Recording of rollouts stops when their folder holds so many bytes.", at_least=0
    )
    episodes_every_steps: int = option(
        20, "The trackers get transcripts of every so many steps; 0 of the first step only.", at_least=0
    )

    def problems(self, name: str) -> Iterator[str]:
        """Rollouts are counted, or all of them are kept."""
        if self.rollouts != ALL_ROLLOUTS and not (self.rollouts.isascii() and self.rollouts.isdigit()):
            yield f"{name}.rollouts={self.rollouts}: must be all, or a number of rollouts for each step (0 for none)"


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


@dataclass
class ExperimentConfig:
    """What every experiment can be told. An experiment with sections of its own subclasses it and says so where
    ``build`` takes its configuration."""

    experiment: str = option(MISSING, "The run is this experiment.")
    experiment_path: str | None = option(
        None, "The experiment lies in this Python file outside the package, with its YAML beside it.", on_resume="warns"
    )
    experiment_name: str = option("${experiment}", "The run folder lies in a folder of this name.", on_resume="free")
    trial_name: str = option(
        "",
        "The run folder has this name; without one a new run is named after the time of its launch.",
        on_resume="free",
    )
    fileroot: str = option("runs", "Everything that a run writes lies in this folder.", on_resume="free")
    seed: int = option(1, "Everything random in the run is drawn from this seed.", at_least=0, at_most=MAX_SEED)
    mode: Mode = option(
        Mode.run, "run trains; check validates and stops; graph prints the dataflow graph.", on_resume="free"
    )
    recover_mode: RecoverMode = option(
        RecoverMode.auto,
        "auto goes on after the trial's last valid checkpoint, if any; resume demands one; disabled starts afresh.",
        on_resume="free",
    )
    total_train_steps: int = option(60, "The run ends after this many train steps.", at_least=1, on_resume="warns")
    torch_threads: int = option(
        0,
        "A model worker computes on this many threads; 0 shares all cores but those of generation workers.",
        at_least=0,
        on_resume="free",
    )

    actor: ModelConfig = section(ModelConfig)
    ref: ReferenceConfig = section(
        ReferenceConfig,
        on_resume="free",
        idle="without a KL term (ppo.kl_ctl, ppo.kl_loss_coef) there is no reference model",
    )
    builtin: BuiltinModelConfig = section(BuiltinModelConfig, idle="it describes the model of actor.path=builtin")
    warm_start: WarmStartConfig = section(
        WarmStartConfig,
        idle="a warm start belongs to actor.path=builtin, for environments with a scripted solver, or to "
        "actor.warm_start=true",
    )
    dataset: DatasetConfig = section(DatasetConfig)
    gen: GenConfig = section(GenConfig)
    engine: EngineConfig = section(EngineConfig)
    mb_spec: MicroBatchConfig = section(MicroBatchConfig, on_resume="free")
    rollout: RolloutConfig = section(RolloutConfig)
    stream: StreamConfig = section(StreamConfig)
    async_rl: AsyncConfig = section(AsyncConfig, idle="it belongs to async_rl.enabled=true, as grpo_async sets it")
    evaluation: EvaluationConfig = section(EvaluationConfig, on_resume="warns")
    exp_ctrl: CheckpointConfig = section(CheckpointConfig, on_resume="free")
    scheduler: SchedulerConfig = section(SchedulerConfig, on_resume="free")
    allocation: AllocationConfig = section(AllocationConfig, on_resume="free")
    network: NetworkConfig = section(NetworkConfig, on_resume="free")
    rpc: RpcConfig = section(RpcConfig, on_resume="free")
    monitor: MonitorConfig = section(MonitorConfig, on_resume="free")


def run_folder(config: ExperimentConfig) -> Path:
    """<fileroot>/<experiment_name>/<trial_name>, absolute."""
    return Path(config.fileroot).expanduser().resolve() / config.experiment_name / config.trial_name
