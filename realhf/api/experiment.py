"""Specification of an experiment: models, model function calls, data source, rollouts and
evaluation.

An experiment is one Python file and one YAML file in ``configs/experiment/``::

    # experiments/my_algorithm.py
    def build(config: ExperimentConfig) -> ExperimentSpec: ...

An experiment with options of its own takes a subclass of ``ExperimentConfig``
(docs/extend/experiment.md).

Key names in an ``MFCDef`` are those of the graph. For an interface with other names, the remaps
translate in the direction of the data: ``{graph name: interface name}`` for inputs, ``{interface
name: graph name}`` for outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from realhf.api.config import (
    CHECK,
    AsyncConfig,
    CheckpointConfig,
    EngineConfig,
    GenConfig,
    LoraConfig,
    MonitorConfig,
    NetworkConfig,
    OptimizerConfig,
    RecoverMode,
    RpcConfig,
)
from realhf.api.environment import EnvironmentService
from realhf.api.parallel import Parallel
from realhf.api.rollout import MAX_BRANCHES
from realhf.api.sample import MicroBatchSpec
from realhf.api.source import GroupSignal
from realhf.api.tool_parser import AUTO
from realhf.base.dataclass_json import from_json_value, to_json_value


class InterfaceType(Enum):
    """Type of a model function call. The value is the name of the interface method that the call
    runs."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"

    @property
    def produces_keys(self) -> bool:
        """Whether calls of this type return a sample (generation, inference) instead of only
        statistics."""
        return self in (InterfaceType.GENERATE, InterfaceType.INFERENCE)


@dataclass(frozen=True)
class MFCDef:
    """A model function call, which is a node of the dataflow graph.

    Raises ValueError for invalid values. ``build_graph`` checks whether the calls fit together.
    """

    name: str
    """Unique name in the graph."""
    model_role: str
    """Role whose model the call runs on."""
    interface_type: InterfaceType
    """Method of the interface."""
    interface: str
    """Registered name of the interface."""
    interface_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the interface."""
    n_seqs: int = 1
    """Number of samples (groups) per call; it must divide the largest ``n_seqs`` of the graph."""
    input_keys: tuple[str, ...] = ()
    """Keys that the call reads."""
    output_keys: tuple[str, ...] = ()
    """Keys that the call produces."""
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Interface name of each input whose name differs: {graph name: interface name}."""
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Graph name of each output whose name differs: {interface name: graph name}."""
    optional_input_keys: tuple[str, ...] = ()
    """Keys that the call reads if the graph produces them."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How a batch is split into micro-batches."""
    balance: str = "tokens"
    """How a call is split over several workers: equal numbers of ``tokens`` or an equal ``count``
    of samples."""
    timeout_s: float = 1800.0
    """Timeout of one call in seconds."""
    resample: float = 0.0
    """For a generating call: maximum number of additional groups that may replace groups without a
    learning signal, as a multiple of the number of samples in a step; 0 disables dynamic
    sampling."""
    signal: GroupSignal = field(default_factory=GroupSignal)
    """Criterion for whether a group has a learning signal."""

    def __post_init__(self) -> None:
        problems = [text for bad, text in self._checks() if bad]
        if problems:
            raise ValueError(f"model function call {self.name!r}: " + "; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        declared = (*self.input_keys, *self.optional_input_keys)
        twice = sorted({k for k in declared if declared.count(k) > 1})
        twice_out = sorted({k for k in self.output_keys if self.output_keys.count(k) > 1})
        stray_in = sorted(set(self.input_key_remap) - set(declared))
        stray_out = sorted(set(self.output_key_remap.values()) - set(self.output_keys))
        return [
            (
                not self.name or self.name.startswith("__"),
                "the name must not be empty or start with '__'",
            ),
            (not self.model_role, "model_role is empty"),
            (
                self.resample < 0
                or (self.resample > 0 and self.interface_type is not InterfaceType.GENERATE),
                f"resample={self.resample:g} is at least 0, and of a call that generates",
            ),
            (self.n_seqs < 1, f"n_seqs is {self.n_seqs}, must be at least 1"),
            (self.timeout_s <= 0, f"timeout_s is {self.timeout_s}, must be positive"),
            (
                self.balance not in ("tokens", "count"),
                f"balance {self.balance!r} is not tokens or count",
            ),
            (bool(twice), f"input keys declared twice: {', '.join(twice)}"),
            (bool(twice_out), f"output keys declared twice: {', '.join(twice_out)}"),
            (bool(stray_in), f"input_key_remap names keys it does not take: {', '.join(stray_in)}"),
            (
                bool(stray_out),
                f"output_key_remap yields keys it does not output: {', '.join(stray_out)}",
            ),
            (_repeats_value(self.input_key_remap), "input_key_remap maps two keys to one name"),
            (_repeats_value(self.output_key_remap), "output_key_remap maps two keys to one name"),
        ]


def _repeats_value(remap: Mapping[str, str]) -> bool:
    return len(set(remap.values())) != len(remap)


class _Arguments:
    def to_args(self) -> dict[str, Any]:
        """Return the options as JSON values, to pass as arguments to an interface (``env_rollout``)
        or its evaluation."""
        return to_json_value(self)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Rebuild the options from ``to_args``. Raises TypeError for an unknown or a missing
        option."""
        return from_json_value(cls, args)


@dataclass(frozen=True)
class RolloutOptions(_Arguments):
    """Options for playing the rollouts of a run.

    They are passed as the ``interface_args`` of ``env_rollout`` and in ``RolloutSpec``.
    """

    environment: str
    """Environment: a registered name, or ``file.py:Name``."""
    group_size: int
    """Number of rollouts G per task."""
    sessions: int
    """Maximum number of concurrent episodes."""
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    """The environment's options as JSON values."""
    gen: GenConfig = field(default_factory=GenConfig)
    """Options for sampling tokens."""
    max_turns: int = 6
    """See ``RolloutConfig``."""
    max_total_tokens: int = 1024
    """See ``RolloutConfig``."""
    min_group_size: int = 2
    """See ``RolloutConfig``."""
    message_timeout_s: float = 60.0
    """See ``RolloutConfig``."""
    on_failure: str = "minimum_group"
    """See ``RolloutConfig``."""
    retries: int = 2
    """See ``RolloutConfig``."""
    transcripts: int = 2
    """Number of episodes per step to return as text."""
    seed: int = 0
    """Seed of the run. With a sample's id it determines the random numbers of its rollouts."""
    turn_rewards: bool = False
    """Whether samples contain the keys ``TURN_KEYS``."""
    keep_reasoning: bool = True
    """See ``RolloutConfig``."""
    agent_structured: str = CHECK
    """See ``RolloutConfig``. With ``constrain``, samples contain the key ``unmasked_logprobs``."""
    feedback: str = ""
    """One of ``FEEDBACKS`` if samples contain the key ``feedback_prompt_ids``, else ""."""
    feedback_tokens: int = 0
    """Maximum number of feedback tokens."""


@dataclass(frozen=True)
class HeldOutOptions(_Arguments):
    """Selection of the episodes of a held-out evaluation."""

    split: str
    """Split of the tasks."""
    episodes_per_task: int
    """Episodes per template at the training temperature."""
    greedy_episodes_per_task: int
    """Episodes per template with greedy decoding."""
    templates: int
    """Maximum number of templates."""


PLAN_FILE = "plan.json"
"""File name of the ``RunPlan`` in the run folder."""


@dataclass(frozen=True)
class ModelSpec:
    """A model role: its initial weights, the model workers that hold it, and its training."""

    role: str
    """Name of the role."""
    path: str
    """Folder or hub id of the initial weights."""
    workers: tuple[int, ...] = (0,)
    """Indices of the model workers that hold the model."""
    trainable: bool = False
    """Whether the role is trained."""
    backend: str = "torch"
    """Registered name of the training backend."""
    backend_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the backend."""
    dtype: str = "float32"
    """Data type of the weights."""
    head: str = "lm"
    """Head of the decoder: ``lm`` (logits of the next token) or ``value`` (one number per
    position)."""
    experts: bool | None = False
    """Whether a mixture-of-experts model is accepted; None for a role that is never trained and
    accepts any model."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    compile: bool = False
    """Whether the transformer blocks are compiled for training."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of a trained role."""
    lora: LoraConfig | None = None
    """LoRA adapters to train; None trains all weights."""
    base_of: str = ""
    """For a frozen role: name of the LoRA role whose model it shares, with the adapters disabled;
    "" if it has its own model."""
    tokens_of: str = ""
    """Path of another model whose token ids the role reads, so that both tokenizers must give the
    same ids; "" if it reads only its own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    tool_parser: str = AUTO
    """Syntax of tool calls; "auto" detects it from the chat template."""
    parallel: Parallel = field(default_factory=Parallel)
    """Parallelism of the role's training."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Engine that samples tokens."""


@dataclass(frozen=True)
class SourceSpec:
    """A data source and its arguments."""

    name: str
    """Registered name of the source."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the source."""
    keys: tuple[str, ...] = ()
    """Keys of the source's samples."""
    worker: int = 0
    """Index of the model worker that stores the source's tensors."""
    dataset_args: Mapping[str, Any] | None = None
    """Arguments of the dataset that is registered under the source's name and read by that worker;
    None if there is no dataset."""


@dataclass(frozen=True)
class EvaluationSpec:
    """The held-out evaluation.

    ``evaluate(model, args, context)`` of the interface runs before the first and after the last
    step, outside the training buffer. It returns {"sampled": {"overall" or group: {"success",
    "low", "high", "episodes", ...}}, "greedy": {...}}, or {"rows": {"overall": {"loss", ...}}} for
    rows of a file."""

    role: str
    """Role that is evaluated."""
    interface: str
    """Registered name of the interface."""
    interface_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the interface."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the final evaluation; see ``HeldOutOptions``."""
    interim_args: Mapping[str, Any] | None = None
    """Arguments of all other evaluations; None to use ``args``."""
    every_steps: int = 0
    """Interval in steps between further evaluations; 0 for none."""
    generates: bool = True
    """Whether the role samples tokens in the evaluation."""
    also: tuple[EvaluationSpec, ...] = ()
    """Further evaluations at the same steps, whose reports are added to this one's."""


def artifact_exists(artifact: Path) -> bool:
    """Return whether an artifact exists, as a file or as a folder that is not empty."""
    return next(artifact.iterdir(), None) is not None if artifact.is_dir() else artifact.exists()


@dataclass(frozen=True)
class JobSpec:
    """A process that must finish before the workers start, such as the collection of
    demonstrations.

    It runs as ``python -m module *argv`` and is skipped if ``artifact`` exists.
    """

    name: str
    """Name of the job."""
    module: str
    """Module that is run."""
    argv: tuple[str, ...]
    """Arguments. ``{artifact}`` is replaced by a temporary path, which is renamed to ``artifact``
    on success."""
    artifact: Path
    """File or folder that the job creates."""
    timeout_s: float = 1800.0
    """Timeout in seconds."""
    report: str = ""
    """Name of a file in the artifact whose text is shown after the job; "" for none."""


@dataclass(frozen=True)
class ServiceSpec:
    """An additional worker of a run, such as a trajectory server.

    It runs as ``python -m module --name NAME --master ... --run-id ... *argv`` and registers with
    the master, which waits for it. All calls get its address (``CallContext.endpoints``)."""

    name: str
    """Name of the form ``<kind>/<number>``."""
    module: str
    """Module that is run."""
    argv: tuple[str, ...] = ()
    """Further arguments."""


@dataclass(frozen=True)
class RolloutSpec:
    """What the rollout workers of an asynchronous experiment run (docs/reference/dataflow.md 9)."""

    role: str
    """Role whose weights generate the tokens."""
    calls: tuple[MFCDef, ...]
    """Calls that rollout workers run instead of the graph. The generating call comes first."""
    episodes: RolloutOptions
    """Options for playing episodes."""
    options: AsyncConfig
    """The configuration section ``async_rl``."""
    sessions: int
    """Number of environment sessions per rollout worker."""
    agent: str = ""
    """Agent that plays the episodes, as ``module:function``; "" for the built-in agent."""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    """The agent's options as JSON values."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the samples that rollout workers stream."""
        return tuple(key for call in self.calls for key in call.output_keys)

    @property
    def rows_per_episode(self) -> int:
        """Maximum number of sequences per episode. An agent may hold several conversations, and an
        episode whose old reasoning is dropped has up to one sequence per turn."""
        if self.agent:
            return MAX_BRANCHES
        return 1 if self.episodes.keep_reasoning else self.episodes.max_turns

    @property
    def workers(self) -> list[str]:
        """Names of the generation workers and the rollout workers."""
        options = self.options
        return [
            *(f"generation/{i}" for i in range(options.n_generation_workers)),
            *(f"rollout_worker/{i}" for i in range(options.n_rollout_workers)),
        ]


@dataclass(frozen=True)
class ExperimentSpec:
    """A complete experiment, as returned by ``build``."""

    name: str
    """Name of the experiment."""
    models: Mapping[str, ModelSpec]
    """The model roles by name."""
    mfcs: tuple[MFCDef, ...]
    """The calls of the graph."""
    source: SourceSpec
    """The data source."""
    n_seqs: int
    """Samples per train step."""
    total_train_steps: int
    """Number of train steps."""
    seed: int
    """Seed of the run."""
    run_dir: Path
    """Run folder."""
    evaluation: EvaluationSpec | None = None
    """Held-out evaluation, if any."""
    environment: EnvironmentService | None = None
    """Server on which episodes are played; None if there is none."""
    services: tuple[ServiceSpec, ...] = ()
    """Additional workers."""
    rollout: RolloutSpec | None = None
    """What rollout workers run in an asynchronous experiment; None in a synchronous one."""
    jobs: tuple[JobSpec, ...] = ()
    """Processes that must finish before the workers start."""
    before: tuple[ExperimentSpec, ...] = ()
    """Experiments that must finish before this one starts. Each is skipped if its ``artifact``
    exists."""
    export_role: str | None = None
    """Role that is exported in Hugging Face format at the end of the run; None for no export."""
    artifact: Path | None = None
    """Folder into which ``export_role`` is exported; None for ``policy`` in the run folder."""
    log_keys: tuple[str, ...] = ()
    """Keys that need no consumer in the graph because they are only logged."""
    advice: tuple[str, ...] = ()
    """Warnings for the user, one line each."""

    @property
    def needs_env(self) -> bool:
        """Whether the run has an environment server."""
        return self.environment is not None

    @property
    def n_model_workers(self) -> int:
        """Number of model workers: the highest index plus 1."""
        return 1 + max(index for model in self.models.values() for index in model.workers)

    @property
    def world(self) -> tuple[int, ...]:
        """Indices of the model workers of all roles that train on several workers, in ascending
        order."""
        groups = [model.workers for model in self.models.values() if model.parallel.size > 1]
        return tuple(sorted({index for workers in groups for index in workers}))


@dataclass(frozen=True)
class Launch:
    """Record of a launch, kept in the run folder."""

    at: str = ""
    """Time of the launch, as ISO 8601; "" if nothing is to be recorded."""
    config: str = ""
    """Text of ``config.yaml``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All options as JSON values, by dotted name."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Options that a resumed run has changed, {name: [before, now]}."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Origin of the run: commit, versions and command line."""


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, which all its workers read from ``plan.json`` in the run folder."""

    spec: ExperimentSpec
    """The experiment."""
    rpc: RpcConfig
    """The configuration section ``rpc``."""
    monitor: MonitorConfig
    """The configuration section ``monitor``."""
    exp_ctrl: CheckpointConfig
    """The configuration section ``exp_ctrl``."""
    recover_mode: RecoverMode
    """Whether the run resumes from a checkpoint."""
    torch_threads: int
    """Value of the option ``torch_threads``: compute threads per model worker, or 0 to choose
    automatically."""
    started_at: float
    """Time of the launch in seconds since the epoch."""
    plugins: tuple[str, ...] = ()
    """Modules or files that every worker imports, because they register components."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Indices of each worker's GPUs by name; workers without an entry see the launcher's GPUs."""
    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The configuration section ``network``."""
    launch: Launch = field(default_factory=Launch)
    """The record of the launch."""

    def write(self) -> None:
        """Write the plan into the run folder, which must exist."""
        text = json.dumps(to_json_value(self), indent=1)
        (self.spec.run_dir / PLAN_FILE).write_text(text, encoding="utf-8")

    @staticmethod
    def read(run_dir: Path) -> RunPlan:
        """Read the plan in a run folder. Raises FileNotFoundError if there is none."""
        plan = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        # Plans of realhf up to November 2026 have one index per worker.
        plan["gpus"] = {
            worker: [indices] if isinstance(indices, int) else indices
            for worker, indices in plan.get("gpus", {}).items()
        }
        return from_json_value(RunPlan, plan)
