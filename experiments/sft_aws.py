"""Supervised training on episodes that canonical solutions really produced against MiniStack: ``sft`` with env=aws."""

from __future__ import annotations

from dataclasses import dataclass

from experiments import sft
from realhf.api.config.option import section
from realhf.api.experiment import ExperimentSpec
from realhf.aws.options import AwsOptions


@dataclass
class Config(sft.Config):
    """With the AWS environment, whose tasks are demonstrated."""

    env: AwsOptions = section(AwsOptions)


def build(config: Config) -> ExperimentSpec:
    """Return supervised training on demonstrations that are played first, unless they are there already."""
    return sft.build(config)
