"""Defines the sections critic and reward_model: models with a value head, beside the actor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from realhf.api.config import LoraConfig, ModelConfig, OptimizerConfig
from realhf.api.option import option, section

ACTOR = "actor"
"""The path of a critic that starts from the actor's first weights."""
BUILTIN_RATE = 1e-3
"""The learning rate of the built-in policy's critic, unless ``critic.optimizer.lr`` sets one."""


@dataclass
class CriticOptions:
    """How a critic learns to predict the return of every state that the policy samples in (docs/reference/ppo.md 3)."""

    value_norm: bool = option(True, "The critic predicts returns in units of their running mean and deviation.")
    value_norm_decay: float = option(
        0.99,
        "The running mean and deviation of returns keep this much of themselves in every train step.",
        at_least=0,
        at_most=0.99999,
    )
    value_clip: float | None = option(
        0.2,
        "A prediction moves at most this far in a train step before its loss stops to fall; in units of the running "
        "deviation with critic.value_norm. null never clips.",
        above=0,
        idle="a prediction has not moved yet in the first update of a step, and the critic makes no second one "
        "(critic.n_minibatches times critic.sample_reuse is 1)",
    )
    n_minibatches: int | None = option(
        None, "A pass of the critic makes this many updates, by default ppo.ppo_n_minibatches.", at_least=1
    )
    sample_reuse: int | None = option(
        None, "The critic makes this many passes over a batch, by default ppo.sample_reuse.", at_least=1
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW, with a learning rate that follows from the model unless it is set."""

    lr: float | None = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        None,
        f"The learning rate after the warm-up; by default {BUILTIN_RATE:g} for the critic of the built-in policy, and "
        "actor.optimizer.lr for every other one.",
        above=0,
        on_resume="warns",
    )

    def at(self, rate: float) -> OptimizerConfig:
        """The same optimizer with the learning rate ``rate``, unless it has one of its own."""
        given = {every.name: getattr(self, every.name) for every in fields(OptimizerConfig)}
        return OptimizerConfig(**{**given, "lr": rate if given["lr"] is None else given["lr"]})


@dataclass
class RewardModelConfig(ModelConfig):
    """A model with a value head that scores episodes: what ``experiment=reward_model`` trains, and a part of the
    rewards where an experiment of the policy gradient names its folder."""

    path: str = option(
        "",
        "A reward model in this folder (one that experiment=reward_model exported) has a part in the rewards; empty, "
        "there is none. Where one is trained, it starts from these weights, empty: from the actor's first ones.",
    )
    weight: float = option(
        0.5,
        "The part of the reward model: rewards are 1 minus this times the verifier's, plus this times the probability "
        "that the rollout is preferred to one of score 0.",
        above=0,
        at_most=1,
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig, idle="a reward model in a folder trains no more")

    def problems(self, name: str) -> Iterator[str]:
        """Workers must be different ones, and the folder one of a reward model."""
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"


@dataclass
class CriticConfig(CriticOptions, ModelConfig):
    """The critic: a model role of its own with a value head, and how it learns."""

    path: str = option(
        ACTOR,
        "The critic starts from these weights: 'actor' (the actor's first ones), a folder, or a hub id. A value head "
        "that is not in them starts at 0.",
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig)
    lora: LoraConfig = section(LoraConfig, idle="a critic trains all its weights, its value head with them")
    warmup_steps: int = option(0, "In this many first train steps the critic trains and the actor waits.", at_least=0)

    def learning(self, n_minibatches: int, sample_reuse: int) -> dict[str, Any]:
        """The options of ``CriticOptions`` as plain values, where the actor has ``n_minibatches`` and ``sample_reuse``.
        With one update a step there is no clip, and ``value_clip`` is not read."""
        once = (self.n_minibatches or n_minibatches) * (self.sample_reuse or sample_reuse) == 1
        idle = ("value_clip",) if once else ()
        read = {every.name: getattr(self, every.name) for every in fields(CriticOptions) if every.name not in idle}
        return {**dict.fromkeys(idle), **read}

    def problems(self, name: str) -> Iterator[str]:
        """Workers must be different ones, weights such as there are, and every option does something."""
        if not self.value_norm and self.value_norm_decay != CriticOptions.value_norm_decay:
            yield f"{name}.value_norm_decay={self.value_norm_decay}: has no effect without {name}.value_norm"
        if self.path in ("builtin", "builtin_tiny"):
            yield f"{name}.path={self.path}: the built-in policy is made for the actor; {name}.path={ACTOR} takes it"
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"
