"""GRPO on AWS tasks, asynchronously: ``grpo_async`` with env=aws."""

from __future__ import annotations

from experiments import grpo_async
from experiments.grpo_aws import Config
from realhf.api.experiment import ExperimentSpec


def build(config: Config) -> ExperimentSpec:
    """Return ``grpo_aws`` with its rollouts streamed. Raises ConfigError for options that contradict."""
    return grpo_async.build(config)
