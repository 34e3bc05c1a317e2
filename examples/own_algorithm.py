"""An algorithm of your own with a hyper-parameter of its own: GRPO that learns less from failures than from successes.

    python -m realhf.launch +experiment_path=examples/own_algorithm.py algorithm.failure_weight=0.25

This file and `own_algorithm.yaml` beside it are all there is. The option is checked, and listed by `--help`, like every
other one. docs/extend/experiment.md explains what a file like this may bring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments import policy_gradient
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import ADVANTAGES
from realhf.algorithms.train_step import replace_keys
from realhf.api.experiment import ExperimentSpec
from realhf.api.option import option, section
from realhf.api.sample import SequenceSample
from realhf.base.dataclass_json import to_json_value
from realhf.env.loader.load import with_environment
from realhf.registry import interfaces


@dataclass
class LenientOptions:
    """What the algorithm adds to GRPO."""

    failure_weight: float = option(
        0.5, "A negative advantage is multiplied by it; 1 is GRPO, 0 ignores failures.", at_least=0, at_most=1
    )


@dataclass
class Config(policy_gradient.Config):
    """All options of policy-gradient training, and the section ``algorithm``."""

    algorithm: LenientOptions = section(LenientOptions)


@interfaces.register("lenient_policy_gradient")
class LenientInterface(PolicyGradientInterface):
    """The train step with other advantages. Options arrive as plain values."""

    def __init__(self, algorithm: dict[str, Any], **policy_gradient: Any) -> None:
        super().__init__(**policy_gradient)
        self._weight = LenientOptions(**algorithm).failure_weight

    def prepare(self, sample: SequenceSample) -> tuple[SequenceSample, dict[str, float]]:
        """The batch with weakened negative advantages f32 (L-1), and how many tokens have one."""
        prepared, stats = super().prepare(sample)
        advantages, failed = prepared[ADVANTAGES], prepared[ADVANTAGES] < 0
        lenient = torch.where(failed, self._weight * advantages, advantages)
        return replace_keys(prepared, shifted={ADVANTAGES: lenient}), stats | {"n_failed": float(failed.sum())}


def config_class(environment: str) -> type[Config]:
    """The configuration of this experiment on the environment that was chosen, here by the YAML."""
    return with_environment(Config, environment)


def build(config: Config) -> ExperimentSpec:
    """GRPO's graph of calls, with this train step in it."""
    spec = policy_gradient.build(config)
    own = {"algorithm": to_json_value(config.algorithm)}
    calls = [
        replace(call, interface="lenient_policy_gradient", interface_args={**call.interface_args, **own})
        if call.name == "actor_train"
        else call
        for call in spec.mfcs
    ]
    return replace(spec, name="own_algorithm", mfcs=tuple(calls))
