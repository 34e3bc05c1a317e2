"""GRPO on AWS tasks: the experiment ``grpo`` with env=aws."""

from __future__ import annotations

from dataclasses import dataclass

from experiments import grpo
from realhf.api.config.option import section
from realhf.api.experiment import ExperimentSpec
from realhf.aws.options import AwsOptions


@dataclass
class Config(grpo.Config):
    """With the AWS environment."""

    env: AwsOptions = section(AwsOptions)


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    return grpo.build(config)
