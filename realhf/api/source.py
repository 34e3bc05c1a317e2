"""Interfaces of data sources, which provide the samples of a run and run in the master process.

A source yields integers and metadata, never tensors. A model worker (``SourceSpec.worker``) stores
the integers as i64 tensors; the executor keeps only their lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class SourceItem:
    """A sample as the source yields it, before it enters the graph."""

    id: str
    """Id of the sample, unique within the run (``<prompt>@<n>``)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Scalars and strings that msgpack can encode."""
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """One integer sequence (int64) per key."""

    def to_map(self) -> dict[str, Any]:
        """Return the constructor's arguments as a dict of plain data."""
        return {
            "id": self.id,
            "metadata": dict(self.metadata),
            "values": {k: list(v) for k, v in self.values.items()},
        }


@dataclass(frozen=True)
class SampleResult:
    """Rewards and outcomes of one sample's rollouts.

    ``rewards[i]`` and ``achieved[i]`` belong to the i-th sequence; both are empty for a sample
    without rollouts.
    """

    id: str
    """Id of the sample."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the sample, without the columns that the other fields contain."""
    rewards: Sequence[float | None] = ()
    """Reward of each sequence; None if the rollout failed for a reason other than the policy."""
    achieved: Sequence[bool] = ()
    """Whether each sequence achieved its goal."""
    branch_rewards: Sequence[float] = ()
    """Rewards of the valid further conversations of all rollouts, which an agent may reward
    separately."""

    @staticmethod
    def from_metadata(id: str, metadata: Mapping[str, Any]) -> SampleResult:
        """Build the result from the metadata of a sample, in which ``rewards``, ``achieved`` and
        ``branch_rewards`` are JSON."""
        own = dict(metadata)
        return SampleResult(
            id,
            own,
            *(
                json.loads(own.pop(name, "[]"))
                for name in ("rewards", "achieved", "branch_rewards")
            ),
        )


@dataclass(frozen=True)
class GroupSignal:
    """Criterion for whether the rewards of a group differ, so that comparing them gives a learning
    signal.

    At least ``least`` rollouts, and more than ``k``, must have a reward. In addition, the best
    reward must not be the same in all subsets of ``k`` rollouts or branches. Rewards are compared
    in fp32 after clipping to ``low`` and ``high``, as in training.
    """

    least: int = 2
    """Minimum number of rollouts with a reward."""
    low: float | None = None
    """Lower bound to which rewards are clipped; None for no bound."""
    high: float | None = None
    """Upper bound to which rewards are clipped; None for no bound."""
    k: int = 1
    """Size of the subsets whose best rewards are compared."""

    def has_signal(self, result: SampleResult) -> bool:
        """Return whether the group with this result gives a learning signal."""
        rewards = [reward for reward in result.rewards if reward is not None]
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        if len(rewards) < self.least or len(rewards) <= self.k:
            return False
        ordered = np.sort(
            np.clip(np.array([*rewards, *result.branch_rewards], np.float32), low, high)
        )
        return bool(ordered[self.k - 1] != ordered[-1])


class ResultSink(Protocol):
    """The part of a source's interface that receives results."""

    def record(self, results: Sequence[SampleResult]) -> None:
        """Receive the results of consumed samples, in the order in which the samples were drawn."""
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log."""
        ...


@runtime_checkable
class DataSource(Protocol):
    """A source of samples that also receives their results.

    It is built once per run as ``sources.get(name)(seed=..., **args)`` and called from one thread
    only.
    """

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw the next ``n`` samples, or fewer if the source is exhausted."""
        ...

    def record(self, results: Sequence[SampleResult]) -> None:
        """Receive the result of each consumed sample once, in the order in which the samples were
        drawn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all state that determines future draws, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the output of ``state_dict``, so that the same draws follow."""
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log."""
        ...
