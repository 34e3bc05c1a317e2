"""Where samples come from: the protocol of a data source, which lives in the master process.

A source yields integers and metadata, never tensors: the executor has the integers stored as i64 tensors
on a model worker (``SourceSpec.worker``) and keeps only their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class SourceItem:
    """One sample before it enters the graph. ``id`` is unique within the run (``<prompt>@<n>``);
    ``values[key]`` is one sequence of int64; ``metadata`` holds scalars and strings (msgpack-able)."""

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class SampleResult:
    """What became of one sample. ``rewards[i]``/``achieved[i]`` belong to its i-th sequence; a reward is
    None where the rollout failed for a reason that is not the policy's. Both are empty without rollouts."""

    id: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rewards: Sequence[float | None] = ()
    achieved: Sequence[bool] = ()


class ResultSink(Protocol):
    """The part of a source that hears of results."""

    def record(self, results: Sequence[SampleResult]) -> None: ...

    def stats(self) -> dict[str, float]: ...


@runtime_checkable
class DataSource(Protocol):
    """Built once per run as ``sources.get(name)(seed=..., **args)``. Called from one thread only."""

    def next_batch(self, n: int) -> list[SourceItem]:
        """The next samples, at most ``n`` and fewer only when the source is exhausted."""
        ...

    def record(self, results: Sequence[SampleResult]) -> None:
        """Feedback, once per consumed sample, in the order in which the samples were drawn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future draws, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def stats(self) -> dict[str, float]:
        """Figures for the step's log."""
        ...
