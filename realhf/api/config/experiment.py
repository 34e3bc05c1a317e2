"""The sections that every experiment has, and the folder of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from omegaconf import MISSING

from realhf.api.config.asynchronous import AsyncConfig
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.evaluation import EvaluationConfig
from realhf.api.config.generation import EngineConfig, GenConfig
from realhf.api.config.micro_batches import MicroBatchConfig
from realhf.api.config.model import BuiltinModelConfig, ModelConfig, ReferenceConfig
from realhf.api.config.network import NetworkConfig
from realhf.api.config.option import option, section
from realhf.api.config.rollout import RolloutConfig
from realhf.api.config.services import AllocationConfig, CheckpointConfig, MonitorConfig, RpcConfig, SchedulerConfig
from realhf.api.config.stream import StreamConfig
from realhf.api.config.warm_start import WarmStartConfig


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
    seed: int = option(1, "Everything random in the run is drawn from this seed.")
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
        WarmStartConfig, idle="a warm start belongs to actor.path=builtin, or to actor.warm_start=true"
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
