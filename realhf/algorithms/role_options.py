"""Options of the sections ``critic`` and ``reward_model``: roles whose model has a value head.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from realhf.api.config import LoraConfig, ModelConfig, OptimizerConfig
from realhf.api.option import option, section

ACTOR = "actor"
"""Path of a critic that is initialised from the actor's initial weights."""
BUILTIN_RATE = 1e-3
"""Default learning rate of the critic of the built-in policy."""


@dataclass
class CriticOptions:
    """Options of the critic's training on returns (docs/reference/ppo.md 3)."""

    value_norm: bool = option(
        True,
        "Normalise the critic's targets by the running mean and standard deviation of the returns.",
    )
    value_norm_decay: float = option(
        0.99,
        "Decay per train step of the running mean and standard deviation of the returns.",
        at_least=0,
        at_most=0.99999,
    )
    value_clip: float | None = option(
        0.2,
        "Clip range of a value prediction around its value before the train step, in running "
        "standard deviations with "
        "critic.value_norm. null disables clipping.",
        above=0,
        unused_because="predictions are clipped only from the second update of a step on, "
        "and the critic makes one (critic.n_minibatches times critic.sample_reuse is 1)",
    )
    n_minibatches: int | None = option(
        None,
        "Number of minibatches (updates) per pass of the critic, by default ppo.ppo_n_minibatches.",
        at_least=1,
    )
    sample_reuse: int | None = option(
        None,
        "Number of passes of the critic over a batch, by default ppo.sample_reuse.",
        at_least=1,
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    """AdamW, with a default learning rate that depends on the model."""

    lr: float | None = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        None,
        f"Peak learning rate, reached after the warm-up; by default {BUILTIN_RATE:g} for the "
        f"critic of the built-in "
        "policy, and actor.optimizer.lr for every other one.",
        above=0,
        on_resume="warns",
    )

    def with_default_lr(self, rate: float) -> OptimizerConfig:
        """Return the same optimizer options with ``rate`` as the default learning rate."""
        values = {item.name: getattr(self, item.name) for item in fields(OptimizerConfig)}
        return OptimizerConfig(**{**values, "lr": rate if values["lr"] is None else values["lr"]})


@dataclass
class RewardModelConfig(ModelConfig):
    """A reward model: a model with a value head that scores episodes.

    ``experiment=reward_model`` trains one; policy-gradient experiments add one of a folder to the
    rewards.
    """

    path: str = option(
        "",
        "Folder of a reward model (exported by experiment=reward_model) that contributes to the "
        "rewards; empty for "
        "none. In experiment=reward_model: initial weights, empty for the actor's initial weights.",
    )
    weight: float = option(
        0.5,
        "Weight w of the reward model: a reward is (1 - w) times the verifier's plus w times the "
        "probability that the "
        "rollout is preferred to one of score 0.",
        above=0,
        at_most=1,
    )
    optimizer: CriticOptimizerConfig = section(
        CriticOptimizerConfig,
        unused_because="a reward model that is loaded from a folder is not trained",
    )

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error if there are no workers or an index is repeated."""
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"


@dataclass
class CriticConfig(CriticOptions, ModelConfig):
    """The critic: a model role with a value head, and its training."""

    path: str = option(
        ACTOR,
        "Initial weights of the critic: 'actor' (the actor's initial weights), a folder, or a hub "
        "id. A value head "
        "that they lack is initialised to 0.",
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig)
    lora: LoraConfig = section(
        LoraConfig, unused_because="a critic trains all its weights, including its value head"
    )
    warmup_steps: int = option(
        0,
        "Number of train steps at the start in which only the critic is trained, not the actor.",
        at_least=0,
    )

    def to_critic_options(self, n_minibatches: int, sample_reuse: int) -> dict[str, Any]:
        """Return the options of ``CriticOptions`` as plain values.

        ``n_minibatches`` and ``sample_reuse`` are those of the actor. With one update per step
        ``value_clip`` has no effect and is None.
        """
        has_one_update = (self.n_minibatches or n_minibatches) * (
            self.sample_reuse or sample_reuse
        ) == 1
        unused = ("value_clip",) if has_one_update else ()
        active = {
            item.name: getattr(self, item.name)
            for item in fields(CriticOptions)
            if item.name not in unused
        }
        return {**dict.fromkeys(unused), **active}

    def problems(self, name: str) -> Iterator[str]:
        """Yield an error for each option without effect, for an unsupported path and for repeated
        workers."""
        if not self.value_norm and self.value_norm_decay != CriticOptions.value_norm_decay:
            yield (
                f"{name}.value_norm_decay={self.value_norm_decay}: has no effect without "
                f"{name}.value_norm"
            )
        if self.path in ("builtin", "builtin_tiny"):
            yield (
                f"{name}.path={self.path}: the built-in policy is made for the actor; "
                f"{name}.path={ACTOR} takes it"
            )
        if not self.workers or len(set(self.workers)) < len(self.workers):
            yield f"{name}.workers={self.workers}: give different indices of model workers, from 0"
