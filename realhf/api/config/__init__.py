"""Configuration dataclasses, read by Hydra as structured configs: an unknown or mistyped option is an error.

Defaults here are the library's; ``configs/experiment/*.yaml`` holds what an experiment changes. The sections of an
algorithm or an environment lie beside it (``realhf/algorithms/policy_gradient/options.py``,
``realhf/environments/sql/definition.py``), and the experiments that use it add them. No torch.
"""

from realhf.api.config.asynchronous import AsyncConfig
from realhf.api.config.dataset import DatasetConfig
from realhf.api.config.error import ConfigError
from realhf.api.config.evaluation import EvaluationConfig
from realhf.api.config.experiment import ExperimentConfig, Mode, RecoverMode, run_folder
from realhf.api.config.generation import EngineConfig, GenConfig
from realhf.api.config.micro_batches import MicroBatchConfig
from realhf.api.config.model import (
    BuiltinModelConfig,
    LoraConfig,
    LRSchedule,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
)
from realhf.api.config.network import NetworkConfig
from realhf.api.config.rollout import ON_FAILURE, RolloutConfig
from realhf.api.config.services import ALL_ROLLOUTS, AllocationConfig, CheckpointConfig, MonitorConfig, RpcConfig
from realhf.api.config.stream import StreamConfig
from realhf.api.config.warm_start import WarmStartConfig

__all__ = [
    "ALL_ROLLOUTS",
    "ON_FAILURE",
    "AllocationConfig",
    "AsyncConfig",
    "BuiltinModelConfig",
    "CheckpointConfig",
    "ConfigError",
    "DatasetConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "GenConfig",
    "LRSchedule",
    "LoraConfig",
    "MicroBatchConfig",
    "Mode",
    "ModelConfig",
    "MonitorConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RecoverMode",
    "ReferenceConfig",
    "RolloutConfig",
    "RpcConfig",
    "StreamConfig",
    "WarmStartConfig",
    "run_folder",
]
