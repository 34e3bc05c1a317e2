"""Defines what an experiment file returns: models, model function calls, a data source, how rollouts are played and
how to evaluate.

Key names in an ``MFCDef`` are the names of the graph. An interface that uses other names says so with the remaps, which
read ``{graph name: interface name}`` for inputs and ``{interface name: graph name}`` for outputs: each reads in the
direction the data flows.

They travel as the ``interface_args`` of the call ``env_rollout`` and in ``RolloutSpec``.

# experiments/my_algorithm.py
    def build(config: ExperimentConfig) -> ExperimentSpec: ...

plus one YAML in ``configs/experiment/``. Nothing else needs an edit. An experiment with options of its own takes a
subclass of ``ExperimentConfig`` that adds them (docs/extend/experiment.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from realhf.api.config import (
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
    """Says which method of the interface a call runs. The value is the method's name."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"

    @property
    def produces_keys(self) -> bool:
        """Whether a call of this type answers with a sample (generation, inference) or with statistics only."""
        return self in (InterfaceType.GENERATE, InterfaceType.INFERENCE)


@dataclass(frozen=True)
class MFCDef:
    """One model function call.

    ``interface`` is a registered name, ``interface_args`` its keyword arguments. ``n_seqs`` is the number of
    *samples* (task groups) one call takes; it must divide the largest ``n_seqs`` of the graph.
    ``optional_input_keys`` bind only if somebody produces them. ``balance`` decides how a call is split over
    several workers: equal ``tokens`` or equal ``count``. ``timeout_s`` bounds one call, in seconds. ``resample``: of a
    call that generates groups, those without ``signal`` give way to others, which are played, at most so many times the
    samples of a step.

    Raises ValueError on a value that cannot be right by itself; what concerns several MFCs is checked by
    ``build_graph``.
    """

    name: str
    model_role: str
    interface_type: InterfaceType
    interface: str
    interface_args: Mapping[str, Any] = field(default_factory=dict)
    n_seqs: int = 1
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    optional_input_keys: tuple[str, ...] = ()
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    balance: str = "tokens"
    timeout_s: float = 1800.0
    resample: float = 0.0
    signal: GroupSignal = field(default_factory=GroupSignal)

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
            (not self.name or self.name.startswith("__"), "the name must not be empty or start with '__'"),
            (not self.model_role, "model_role is empty"),
            (
                self.resample < 0 or (self.resample > 0 and self.interface_type is not InterfaceType.GENERATE),
                f"resample={self.resample:g} is at least 0, and of a call that generates",
            ),
            (self.n_seqs < 1, f"n_seqs is {self.n_seqs}, must be at least 1"),
            (self.timeout_s <= 0, f"timeout_s is {self.timeout_s}, must be positive"),
            (self.balance not in ("tokens", "count"), f"balance {self.balance!r} is not tokens or count"),
            (bool(twice), f"input keys declared twice: {', '.join(twice)}"),
            (bool(twice_out), f"output keys declared twice: {', '.join(twice_out)}"),
            (bool(stray_in), f"input_key_remap names keys it does not take: {', '.join(stray_in)}"),
            (bool(stray_out), f"output_key_remap yields keys it does not output: {', '.join(stray_out)}"),
            (_not_injective(self.input_key_remap), "input_key_remap maps two keys to one name"),
            (_not_injective(self.output_key_remap), "output_key_remap maps two keys to one name"),
        ]


def _not_injective(remap: Mapping[str, str]) -> bool:
    return len(set(remap.values())) != len(remap)


class _Arguments:
    def to_args(self) -> dict[str, Any]:
        """Return the arguments of an interface (``env_rollout``) or its evaluation, as JSON can hold them."""
        return to_json_value(self)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Rebuild the options from ``to_args``. Raises TypeError for an unknown or a missing option."""
        return from_json_value(cls, args)


@dataclass(frozen=True)
class RolloutOptions(_Arguments):
    """Says how the rollouts of a run are played.

    ``environment`` is a registered name or ``file.py:Name``, ``environment_options`` are its own options as plain
    values. ``group_size`` rollouts G play one task; ``sessions`` episodes are played at once. ``max_turns``,
    ``max_total_tokens``, ``min_group_size``, ``message_timeout_s`` (seconds), ``on_failure``, ``retries`` and
    ``keep_reasoning``: see ``RolloutConfig``. ``turn_rewards``: samples have the keys ``TURN_KEYS``. ``feedback``: they
    have the key ``feedback_prompt_ids``, by this one of ``FEEDBACKS`` ("": they have not), in ``feedback_tokens`` at
    most. ``transcripts``: how many episodes of a step are returned as text. ``seed`` is the run's; with a sample's id
    it decides the random numbers of its rollouts.
    """

    environment: str
    group_size: int
    sessions: int
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    gen: GenConfig = field(default_factory=GenConfig)
    max_turns: int = 6
    max_total_tokens: int = 1024
    min_group_size: int = 2
    message_timeout_s: float = 60.0
    on_failure: str = "minimum_group"
    retries: int = 2
    transcripts: int = 2
    seed: int = 0
    turn_rewards: bool = False
    keep_reasoning: bool = True
    feedback: str = ""
    feedback_tokens: int = 0


@dataclass(frozen=True)
class HeldOutOptions(_Arguments):
    """Says what an evaluation plays: instances of ``split``, of at most ``templates`` templates, each template
    ``episodes_per_task`` times at the training temperature and ``greedy_episodes_per_task`` times greedily."""

    split: str
    episodes_per_task: int
    greedy_episodes_per_task: int
    templates: int


PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class ModelSpec:
    """Describes one model role: where its weights come from and which model workers hold it. ``chat_template_kwargs``
    are variables of its tokenizer's chat template; ``tool_parser`` names the syntax of its calls of tools ("auto": that
    of the template); ``experts`` accepts a mixture of experts (None: any, for a role that
    never trains); ``head`` is what stands on the decoder: ``lm`` (logits of the next token) or ``value`` (one number
    for each position). ``parallel`` says how several workers train it together, ``engine`` what samples its tokens,
    ``compile`` whether its blocks are compiled for training, ``lora`` which adapters train in place of all weights.
    ``base_of`` names another role: a frozen one is that role's model with its adapters off, on workers that hold both.
    ``tokens_of`` is the path of another model whose tokens it reads: a tokenizer that gives them other ids is refused.
    """

    role: str
    path: str
    workers: tuple[int, ...] = (0,)
    trainable: bool = False
    backend: str = "torch"
    backend_args: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    head: str = "lm"
    experts: bool | None = False
    gradient_checkpointing: bool = False
    compile: bool = False
    optimizer: OptimizerConfig | None = None
    lora: LoraConfig | None = None
    base_of: str = ""
    tokens_of: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = AUTO
    parallel: Parallel = field(default_factory=Parallel)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class SourceSpec:
    """Names a registered data source and its arguments. ``worker`` is the model worker that stores its tensors.
    ``dataset_args``: the worker also reads the dataset registered under this name (None: there is none)."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    worker: int = 0
    dataset_args: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EvaluationSpec:
    """Asks for held-out evaluation: ``evaluate(model, args, context)`` of an interface runs before the first and after
    the last step (and every ``every_steps`` if positive), outside the training buffer. It answers {"sampled":
    {"overall" or group: {"success", "low", "high", "episodes", ...}}, "greedy": {...}}. ``interim_args`` stand in place
    of ``args`` in all evaluations but the last (None: they are the same)."""

    role: str
    interface: str
    interface_args: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    interim_args: Mapping[str, Any] | None = None
    every_steps: int = 0


def is_made(artifact: Path) -> bool:
    """Return whether an artifact is there to be used: a file, or a folder with something in it."""
    return next(artifact.iterdir(), None) is not None if artifact.is_dir() else artifact.exists()


@dataclass(frozen=True)
class JobSpec:
    """Describes a process that must finish before the workers start, e.g. collecting demonstrations.

    It runs as ``python -m module *argv`` and is skipped when ``artifact`` exists. ``{artifact}`` in ``argv`` becomes a
    temporary path that is renamed to ``artifact`` when the job succeeds.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    artifact: Path
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class ServiceSpec:
    """Describes a further worker of a run, e.g. a trajectory server: ``python -m module --name name --master ...
    --run-id ... *argv``. It registers with the master, which waits for it, and its address reaches every call
    (``CallContext.endpoints``). ``name`` is ``<kind>/<number>``."""

    name: str
    module: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutSpec:
    """Says what rollout workers do in place of the graph (docs/reference/dataflow.md 9). ``calls`` are the calls that
    left it, the generating one first; ``role`` is the model role whose weights generate; ``episodes`` says how they are
    played; ``sessions`` counts the environment sessions of each rollout worker; ``agent`` is the agent that plays (""
    is the built-in one, else ``module:function``), which is called with ``agent_args``, its own options as plain
    values."""

    role: str
    calls: tuple[MFCDef, ...]
    episodes: RolloutOptions
    options: AsyncConfig
    sessions: int
    agent: str = ""
    agent_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the samples that rollout workers stream."""
        return tuple(key for call in self.calls for key in call.output_keys)

    @property
    def rows_per_episode(self) -> int:
        """At most this many sequences of a sample come from one episode: an agent may hold several conversations, and
        one whose old reasoning is dropped has several rows."""
        if self.agent:
            return MAX_BRANCHES
        return 1 if self.episodes.keep_reasoning else self.episodes.max_turns

    @property
    def workers(self) -> list[str]:
        """Names of the processes beside master and model workers."""
        options = self.options
        return [
            *(f"generation/{i}" for i in range(options.n_generation_workers)),
            *(f"rollout_worker/{i}" for i in range(options.n_rollout_workers)),
        ]


@dataclass(frozen=True)
class ExperimentSpec:
    """Holds the resolved experiment. ``environment`` is the server that episodes are played on (None: there is none);
    ``before`` holds whole experiments that run first, each skipped when its ``artifact`` exists; ``jobs`` are single
    processes that run first; with ``rollout`` set, rollout workers stream the samples, asynchronously. ``advice`` is
    what the person who launches it is told first, a line each."""

    name: str
    models: Mapping[str, ModelSpec]
    mfcs: tuple[MFCDef, ...]
    source: SourceSpec
    n_seqs: int
    total_train_steps: int
    seed: int
    run_dir: Path
    evaluation: EvaluationSpec | None = None
    environment: EnvironmentService | None = None
    services: tuple[ServiceSpec, ...] = ()
    rollout: RolloutSpec | None = None
    jobs: tuple[JobSpec, ...] = ()
    before: tuple[ExperimentSpec, ...] = ()
    export_role: str | None = None
    artifact: Path | None = None
    log_keys: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def needs_env(self) -> bool:
        """Whether the run has an environment server."""
        return self.environment is not None

    @property
    def n_model_workers(self) -> int:
        """How many model workers run: as many as the highest index asks for. They are numbered from 0."""
        return 1 + max(index for model in self.models.values() for index in model.workers)

    @property
    def world(self) -> tuple[int, ...]:
        """Model workers that compute together with others, ascending: those of all roles that train on several."""
        groups = [model.workers for model in self.models.values() if model.parallel.size > 1]
        return tuple(sorted({index for workers in groups for index in workers}))


@dataclass(frozen=True)
class Launch:
    """What a person asked for, and with what: the text of ``config.yaml``, every option under its dotted name, the
    options that a run which goes on had with other values ({name: [before, now]}), and its origin (commit, versions,
    command line). ``at`` is the time of the launch, as ISO 8601; "" where nothing is to be recorded."""

    at: str = ""
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunPlan:
    """What the launcher hands to every worker of a run (``plan.json`` in the run folder). ``plugins`` is the
    experiment's module or file, which every worker imports for what it registers; ``started_at`` is the wall-clock time
    (s since the epoch) at which the person pressed return; ``gpus`` are those of a worker, by its name: a worker that
    is not in it sees what the launcher sees."""

    spec: ExperimentSpec
    rpc: RpcConfig
    monitor: MonitorConfig
    exp_ctrl: CheckpointConfig
    recover_mode: RecoverMode
    torch_threads: int
    started_at: float
    plugins: tuple[str, ...] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    launch: Launch = field(default_factory=Launch)

    def write(self) -> None:
        """Write the plan into the run folder, which must exist."""
        text = json.dumps(to_json_value(self), indent=1)
        (self.spec.run_dir / PLAN_FILE).write_text(text, encoding="utf-8")

    @staticmethod
    def read(run_dir: Path) -> RunPlan:
        """Read the plan of a run folder. Raises FileNotFoundError if the launcher wrote none there."""
        return from_json_value(RunPlan, json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8")))
