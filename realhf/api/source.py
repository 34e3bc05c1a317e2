"""Defines where samples come from: a data source, which lives in the master process.

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
    """One sample before it enters the graph. ``id`` is unique within the run (``<prompt>@<n>``);
    ``values[key]`` is one sequence of int64; ``metadata`` holds scalars and strings that msgpack
    can encode."""

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        """Return the item as plain data, which the constructor takes by name."""
        return {
            "id": self.id,
            "metadata": dict(self.metadata),
            "values": {k: list(v) for k, v in self.values.items()},
        }


@dataclass(frozen=True)
class SampleResult:
    """What became of one sample. ``rewards[i]``/``achieved[i]`` belong to its i-th sequence; a
    reward is None where the rollout failed for a reason that is not the policy's. Both are empty
    without rollouts. ``branch_rewards`` are those of the valid branches of all rollouts, which an
    agent may judge by themselves."""

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rewards: Sequence[float | None] = ()
    achieved: Sequence[bool] = ()
    branch_rewards: Sequence[float] = ()

    @staticmethod
    def of(id: str, metadata: Mapping[str, Any]) -> SampleResult:
        """Read it from the metadata of a sample, where ``rewards``, ``achieved`` and
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
    """Says which groups teach something by comparison: at least ``least`` rollouts, and more than
    ``k``, have a reward, and the best of every ``k`` of these and those of their branches is not
    always the same, in fp32 and within ``low`` and ``high`` (None: no bound), beyond which training
    tells no two apart."""

    least: int = 2
    low: float | None = None
    high: float | None = None
    k: int = 1

    def of(self, result: SampleResult) -> bool:
        """Return whether the group that became ``result`` does."""
        found = [reward for reward in result.rewards if reward is not None]
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        if len(found) < self.least or len(found) <= self.k:
            return False
        ordered = np.sort(
            np.clip(np.array([*found, *result.branch_rewards], np.float32), low, high)
        )
        return bool(ordered[self.k - 1] != ordered[-1])


class ResultSink(Protocol):
    """The part of a source that receives results."""

    def record(self, results: Sequence[SampleResult]) -> None:
        """Take the results of consumed samples, in the order in which the samples were drawn."""
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log."""
        ...


@runtime_checkable
class DataSource(Protocol):
    """Draws samples and takes their results. It is built once per run as
    ``sources.get(name)(seed=..., **args)`` and called from one thread only."""

    def next_batch(self, n: int) -> list[SourceItem]:
        """Draw the next samples, at most ``n`` and fewer only when the source is exhausted."""
        ...

    def record(self, results: Sequence[SampleResult]) -> None:
        """Take feedback, once per consumed sample, in the order in which the samples were drawn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides future draws, as JSON can hold it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned; the draws that follow are the same."""
        ...

    def stats(self) -> dict[str, float]:
        """Return metrics for the step's log."""
        ...
