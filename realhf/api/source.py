"""Data sources, which provide the samples of a run and live in the master process.

A source yields integers and metadata, never tensors: the executor has the integers stored as i64
tensors on a model worker (``SourceSpec.worker``) and keeps only their lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class SourceItem:
    """One sample before it enters the graph."""

    id: str
    """Unique within the run (``<prompt>@<n>``)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Scalars and strings that msgpack can encode."""
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """One sequence of int64 per key."""

    def to_map(self) -> dict[str, Any]:
        """Return the item as a dict of the constructor's arguments, in plain data."""
        return {
            "id": self.id,
            "metadata": dict(self.metadata),
            "values": {k: list(v) for k, v in self.values.items()},
        }


@dataclass(frozen=True)
class SampleResult:
    """Result of one sample.

    ``rewards[i]`` and ``achieved[i]`` belong to its i-th sequence; both are empty without rollouts.
    """

    id: str
    """Id of the sample."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the sample, without the columns of the other fields."""
    rewards: Sequence[float | None] = ()
    """Reward of each sequence; None if the rollout failed for a reason other than the policy."""
    achieved: Sequence[bool] = ()
    """Whether each sequence achieved its goal."""
    branch_rewards: Sequence[float] = ()
    """Rewards of the valid branches of all rollouts, which an agent may assess separately."""

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
    """Criterion for groups that give a learning signal by comparison.

    At least ``least`` rollouts, and more than ``k``, must have a reward. Also the best reward of
    every ``k`` rollouts or branches must not always be the same. Rewards are compared in fp32 after
    clipping to ``low`` and ``high``, as in training.
    """

    least: int = 2
    """Minimum number of rollouts with a reward."""
    low: float | None = None
    """Lower bound of rewards; None: no bound."""
    high: float | None = None
    """Upper bound of rewards; None: no bound."""
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
    """The part of a source that receives results."""

    def record(self, results: Sequence[SampleResult]) -> None:
        """Receive the results of consumed samples, in the order in which the samples were drawn."""
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log."""
        ...


@runtime_checkable
class DataSource(Protocol):
    """A source of samples that also receives their results.

    Built once per run as ``sources.get(name)(seed=..., **args)``, and called from one thread only.
    """

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw the next ``n`` samples, or fewer if the source is exhausted."""
        ...

    def record(self, results: Sequence[SampleResult]) -> None:
        """Receive results, once per consumed sample, in the order in which the samples were
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
