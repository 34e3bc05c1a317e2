"""What experiments on pairs of episodes have in common: groups are played, and the rewards of the environment say which
of two episodes of a task is the better one. ``experiments/reward_model.py`` and ``experiments/dpo.py`` learn from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments import policy_gradient
from experiments.policy_gradient import call
from realhf.algorithms.options import PAIRINGS, ResolvedOptions
from realhf.algorithms.resolution import resolve
from realhf.api.config import ConfigError
from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.option import option, section

FIRST, CURRENT = PLAYERS = ("first", "current")
_OF_DPO = "it is about a policy that learns from pairs (experiment=dpo)"
LABELLED = ("packed_input_ids", "loss_mask", "rewards", "outcome", ROLLOUT_KEY)


@dataclass
class PreferenceOptions:
    """Which pairs of a group's rollouts are learnt from, and how. A group counts as much as every other one."""

    pairing: str = option(
        "all",
        "A group gives a pair for every two rollouts whose rewards differ (all), or its best and its worst (extremes).",
        choices=PAIRINGS,
    )
    min_gap: float = option(0.0, "The rewards of a pair differ by more than this.", at_least=0)
    held_out: float = option(
        0.2,
        "About this share of the groups trains nothing and measures how often the better one is found.",
        at_least=0,
        at_most=0.9,
    )
    beta: float = option(
        0.1, "DPO: the larger it is, the closer to the reference the policy stays.", above=0, idle=_OF_DPO
    )
    smoothing: float = option(
        0.0,
        "DPO: this share of the pairs is taken to be the wrong way round.",
        at_least=0,
        at_most=0.49,
        idle=_OF_DPO,
    )
    player: str | None = option(
        None,
        "DPO: episodes are played with the policy's first weights, or with those that train; by default with the first "
        "ones, unless adapters train (actor.lora.rank), whose base scores and does not sample.",
        choices=PLAYERS,
        idle=_OF_DPO,
    )
    center: float = option(
        0.01,
        "A reward model: the loss contains the square of the two scores' sum times this, so that scores stay near 0.",
        at_least=0,
        idle="only a reward model has scores of its own (experiment=reward_model)",
    )


@dataclass
class Config(policy_gradient.Config):
    """The configuration of the policy gradient, whose groups, rewards and models these experiments have."""

    preference: PreferenceOptions = section(PreferenceOptions)

    def problems(self, name: str) -> Iterator[str]:
        """Some rewards must be able to differ by as much as a pair asks for."""
        yield from super().problems(name)
        if self.preference.min_gap >= 2 * self.ppo.max_reward_clip:
            yield (
                f"preference.min_gap={self.preference.min_gap}: rewards lie within +-ppo.max_reward_clip="
                f"{self.ppo.max_reward_clip}, so there would be no pair"
            )
        if self.ppo.group_size < 2:
            yield f"ppo.group_size={self.ppo.group_size}: a pair needs two rollouts of a task; set at least 2"


def synchronous(config: Config) -> None:
    """Raise ConfigError for streamed rollouts: only whole groups are compared, as the step has them."""
    if config.async_rl.enabled:
        raise ConfigError(
            f"async_rl.enabled=true: {config.experiment} plays and trains in turns; leave it out, or take an "
            "experiment of the policy gradient"
        )


def played(config: Config) -> ResolvedOptions:
    """The options of the section ppo that these experiments have: groups and their rewards."""
    names = ("group_size", "reward_scaling", "reward_bias", "max_reward_clip")
    return resolve({name: getattr(config.ppo, name) for name in names})


def pairwise(config: Config, role: str, interface: str, args: Mapping[str, Any], *more: str) -> MFCDef:
    """The train call of ``role`` on the pairs of a step; ``more`` are keys that it reads beside the rewards."""
    shared = {name: getattr(config.preference, name) for name in ("pairing", "min_gap", "held_out")}
    options = {**shared, "max_nonfinite_steps": config.ppo.max_nonfinite_steps, **args}
    inputs = (*LABELLED, *more)
    return call(config, f"{role}_train", role, InterfaceType.TRAIN_STEP, interface, options, inputs=inputs)
