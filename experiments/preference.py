"""Shared parts of the experiments on preference pairs (``experiments/reward_model.py``,
``experiments/dpo.py``).

The policy plays groups of episodes. Two episodes of the same group form a pair if their environment
rewards differ; the one with the higher reward is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments import policy_gradient
from experiments.policy_gradient import step_call
from realhf.algorithms.options import PAIRINGS, ResolvedOptions
from realhf.algorithms.resolution import resolve
from realhf.api.config import ConfigError
from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.keys import ROLLOUT_KEY
from realhf.api.option import option, section

FIRST = "first"
CURRENT = "current"
PLAYERS = (FIRST, CURRENT)
"""Values of ``preference.player``: the policy's initial weights, or the weights in training."""
_DPO_ONLY = "it applies to a policy that learns from pairs (experiment=dpo)"
PAIR_KEYS = ("packed_input_ids", "loss_mask", "rewards", "outcome", ROLLOUT_KEY)
"""Inputs of every train call on pairs."""


@dataclass
class PreferenceOptions:
    """Preference pairs among the rollouts of a group, and their loss. All groups have equal
    weight."""

    pairing: str = option(
        "all",
        "Pairs formed in a group: all pairs of rollouts with different rewards, or the best and "
        "the worst rollout "
        "only (extremes).",
        choices=PAIRINGS,
    )
    min_gap: float = option(0.0, "Minimum reward difference within a pair, exclusive.", at_least=0)
    held_out: float = option(
        0.2,
        "Approximate fraction of the groups held out from training to measure pairwise accuracy.",
        at_least=0,
        at_most=0.9,
        unused_because="rows of a file are held out with dataset.held_out",
    )
    beta: float = option(
        0.1,
        "DPO beta; larger values keep the policy closer to the reference.",
        above=0,
        unused_because=_DPO_ONLY,
    )
    smoothing: float = option(
        0.0,
        "DPO label smoothing: the assumed fraction of pairs whose preference is reversed.",
        at_least=0,
        at_most=0.49,
        unused_because=_DPO_ONLY,
    )
    player: str | None = option(
        None,
        "DPO: weights that play the episodes, the policy's initial ones (first) or those in "
        "training (current). "
        "Defaults to first, or to current with LoRA (actor.lora.rank), whose reference cannot "
        "sample.",
        choices=PLAYERS,
        unused_because=_DPO_ONLY,
    )
    center: float = option(
        0.01,
        "Reward model: coefficient of the squared sum of a pair's two scores in the loss, which "
        "centres the scores "
        "around 0.",
        at_least=0,
        unused_because="only a reward model has scores of its own (experiment=reward_model)",
    )


@dataclass
class Config(policy_gradient.Config):
    """policy_gradient.Config plus the section ``preference``."""

    preference: PreferenceOptions = section(PreferenceOptions)

    def problems(self, name: str) -> Iterator[str]:
        """Yield a message for a ``min_gap`` that clipped rewards cannot exceed, and for groups that
        are too small for a pair."""
        yield from super().problems(name)
        if self.preference.min_gap >= 2 * self.ppo.max_reward_clip:
            yield (
                f"preference.min_gap={self.preference.min_gap}: rewards lie within "
                f"+-ppo.max_reward_clip={self.ppo.max_reward_clip}, so no pair could exceed it"
            )
        if self.ppo.group_size < 2:
            yield (
                f"ppo.group_size={self.ppo.group_size}: a pair needs two rollouts of a task; set "
                f"at least 2"
            )


def check_synchronous(config: Config) -> None:
    """Raise ConfigError for asynchronous rollouts, because pairs are formed within the complete
    groups of a step."""
    if config.async_rl.enabled:
        raise ConfigError(
            f"async_rl.enabled=true: {config.experiment} plays and trains in turns; remove it, or "
            f"use a policy-gradient experiment"
        )


def group_options(config: Config) -> ResolvedOptions:
    """Return the options of the section ``ppo`` that apply to preference pairs: the group size and
    reward shaping."""
    names = ("group_size", "reward_scaling", "reward_bias", "max_reward_clip")
    return resolve({name: getattr(config.ppo, name) for name in names})


def pairwise_train(
    config: Config, role: str, interface: str, args: Mapping[str, Any], *extra_keys: str
) -> MFCDef:
    """Return the train call of ``role`` on the preference pairs of a step. ``extra_keys``: input
    keys in addition to ``PAIR_KEYS``."""
    shared = {name: getattr(config.preference, name) for name in ("pairing", "min_gap", "held_out")}
    options = {**shared, "max_nonfinite_steps": config.ppo.max_nonfinite_steps, **args}
    inputs = (*PAIR_KEYS, *extra_keys)
    return step_call(
        config, f"{role}_train", role, InterfaceType.TRAIN_STEP, interface, options, inputs=inputs
    )
