"""An experiment that lies in ``experiments/`` and brings its own interface, source and policy loss
(its own backend and the rest come from ``toy_experiment``, which is copied beside it)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.toy_experiment import ToyNumbers, ToyTrain
from experiments.toy_experiment import build as build_toy

from realhf.algorithms.options import PolicyGradientOptions
from realhf.api.config import ExperimentConfig
from realhf.api.experiment import ExperimentSpec
from realhf.api.option import section
from realhf.registry import interfaces, policy_losses, sources


@policy_losses.register("twice")
def twice(number: float) -> float:
    return 2 * number


@sources.register("house_numbers")
class HouseNumbers(ToyNumbers):
    """Numbers of its own."""


@interfaces.register("house_train")
class HouseTrain(ToyTrain):
    """Tells the loss that the options name."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self._loss = policy_losses.get(loss)

    def train_step(self, model: Any, sample: Any, context: Any) -> dict[str, Any]:
        stats = super().train_step(model, sample, context)
        return {**stats, "loss": self._loss(stats["loss"])}


@dataclass
class Config(ExperimentConfig):
    """With the options of the policy gradient."""

    ppo: PolicyGradientOptions = section(PolicyGradientOptions)


def build(config: Config) -> ExperimentSpec:
    spec = build_toy(config)
    train = replace(spec.mfcs[0], interface="house_train", interface_args={"loss": config.ppo.loss})
    return replace(
        spec,
        name="house",
        mfcs=(train,),
        source=replace(spec.source, name="house_numbers"),
        evaluation=None,
    )
