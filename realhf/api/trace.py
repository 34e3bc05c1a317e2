"""Defines how every part of a run reports its work: spans, who did what when; and rollouts, as
played and as trained.

Times are wall-clock nanoseconds (``time.time_ns``), so that the lines of several processes fit
together.

A span is named ``<kind>`` or ``<kind>/<detail>`` with one of ``KINDS``; the timeline colours it by
its kind. Spans of one line lie one after the other or within each other. Work that runs
concurrently on one thread gets lines of its own, of which there should be few: name them after
slots, not after ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realhf.api.rollout import RolloutOutcome

GENERATE = "generate"
ENV = "env"
TRAIN = "train"
REF = "ref"
WEIGHTS = "weights"
WAIT = "wait"
KINDS = (GENERATE, ENV, TRAIN, REF, WEIGHTS, WAIT)
STEP = "step"
"""Name of the instant that ends a train step; its argument ``step`` counts from 1."""


class Tracer:
    """Records spans, instants and counters; this one keeps nothing. It is cheap (a span costs
    microseconds), never waits, and is thread-safe."""

    def span(self, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Record the work inside the ``with`` block as a span on the calling thread's line."""
        return contextlib.nullcontext()

    def record(
        self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any
    ) -> None:
        """Record a span that is over. ``line`` separates what runs concurrently within one
        process."""

    def instant(self, name: str, **args: Any) -> None:
        """Record something without a duration, e.g. new weights."""

    def counter(self, name: str, **values: float) -> None:
        """Record numbers that change over time, drawn as a curve."""


@dataclass(frozen=True)
class PlayedSample:
    """Holds the rollouts of a sample as they were played, for who keeps them.

    ``step`` is the train step that plays it, counted from 1, in an asynchronous run the one that
    follows its admission, and for an evaluation the number of complete steps. ``split`` is
    ``train`` or ``eval/<name>``. ``key`` decides whether the sample is kept ("": its id). ``env``
    names the environment, ``sampling`` holds the options of sampling, ``attempt`` counts how often
    the sample was admitted before. ``texts`` turns token ids into the text of each.
    """

    id: str
    rollouts: Sequence[RolloutOutcome]
    step: int
    split: str = "train"
    key: str = ""
    env: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    texts: Callable[[Sequence[int]], list[str]] | None = None


@dataclass(frozen=True)
class TrainedRows:
    """Holds what a train step saw of its rows, one array entry for each predicted token (n,) of
    numpy, packed.

    ``step`` is u, the version of the weights that train: the train step is number u + 1. ``ids``
    are the samples and ``rows`` how many rows each has; ``lengths`` (rows,) are predicted tokens of
    each row. ``mask`` bool: what trains; ``behaviour`` f32: log-probability at the engine;
    ``before`` and ``current`` f32: at the trainer before any update of the step, and in the last
    pass, NaN where there was none; ``ratio`` and ``advantages`` f32; ``clipped`` bool; ``versions``
    i32, that sampled each token (-1: unknown; None: of none).
    """

    step: int
    ids: Sequence[str]
    rows: Any
    lengths: Any
    mask: Any
    behaviour: Any
    before: Any
    current: Any
    ratio: Any
    advantages: Any
    clipped: Any
    versions: Any = None


class RolloutRecorder:
    """Keeps rollouts; this one does not. It is cheap for the caller, never waits, never raises, and
    is thread-safe; what it is given must not change afterwards. ``keeps``: whether anything is kept
    at all, so that somebody has to collect it; also on a rank that computes what another one keeps:
    ranks compute the same."""

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps

    def played(self, sample: PlayedSample) -> None:
        """Keep the rollouts of a sample, failed ones included, if it is among those chosen."""

    def trained(self, rows: TrainedRows) -> None:
        """Keep what a train step saw of the samples that are chosen."""


NO_RECORDER = RolloutRecorder()
