"""Defines the options of rollouts, which an experiment builds once and which all who play or evaluate read.

They travel as the ``interface_args`` of the call ``env_rollout`` and in ``RolloutSpec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.api.config import GenConfig
from realhf.base.dataclass_json import from_json_value, to_json_value


@dataclass(frozen=True)
class RolloutOptions:
    """Says how the rollouts of a run are played.

    ``environment`` is a registered name or ``file.py:Name``, ``environment_options`` are its own options as plain
    values. ``group_size`` rollouts G play one task; ``sessions`` episodes are played at once. ``max_turns``,
    ``max_total_tokens``, ``min_group_size``, ``message_timeout_s`` (seconds), ``on_failure``, ``retries`` and
    ``keep_reasoning``: see ``RolloutConfig``. ``turn_rewards``: samples have the keys ``TURN_KEYS``. ``transcripts``:
    how many episodes of a step are returned as text. ``seed`` is the run's; with a sample's id it decides the random
    numbers of its rollouts.
    """

    environment: str
    group_size: int
    sessions: int
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    gen: GenConfig = field(default_factory=GenConfig)
    max_turns: int = 6
    max_total_tokens: int = 1024
    min_group_size: int = 2
    message_timeout_s: float = 60.0
    on_failure: str = "minimum_group"
    retries: int = 2
    transcripts: int = 2
    seed: int = 0
    turn_rewards: bool = False
    keep_reasoning: bool = True

    def to_args(self) -> dict[str, Any]:
        """Return the keyword arguments of the interface ``env_rollout``, as JSON can hold them."""
        return to_json_value(self)

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> RolloutOptions:
        """Rebuild the options from ``to_args``. Raises TypeError for an unknown or a missing option."""
        return from_json_value(RolloutOptions, args)


@dataclass(frozen=True)
class HeldOutOptions:
    """Says what an evaluation plays: instances of ``split``, of at most ``templates`` templates, each template
    ``episodes_per_task`` times at the training temperature and ``greedy_episodes_per_task`` times greedily."""

    split: str
    episodes_per_task: int
    greedy_episodes_per_task: int
    templates: int

    def to_args(self) -> dict[str, Any]:
        """Return ``EvaluationSpec.args``, as JSON can hold them."""
        return to_json_value(self)

    @staticmethod
    def from_args(args: Mapping[str, Any]) -> HeldOutOptions:
        """Rebuild the options from ``to_args``. Raises TypeError for an unknown or a missing option."""
        return from_json_value(HeldOutOptions, args)
