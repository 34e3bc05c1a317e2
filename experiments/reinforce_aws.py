"""REINFORCE with a leave-one-out baseline on AWS tasks: the experiment ``reinforce`` with env=aws."""

from __future__ import annotations

from experiments import reinforce
from experiments.grpo_aws import Config
from realhf.api.experiment import ExperimentSpec


def build(config: Config) -> ExperimentSpec:
    """Return the experiment that ``config`` describes. Raises ConfigError or ValueError for options that contradict."""
    return reinforce.build(config)
