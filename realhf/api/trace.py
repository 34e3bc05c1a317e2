"""Interfaces by which all parts of a run report their work: spans (work with its start and end) and
rollouts, as played and as trained on.

Times are wall-clock nanoseconds (``time.time_ns``), so that traces of several processes can be
merged.

A span is named ``<kind>`` or ``<kind>/<detail>`` with one of ``KINDS``, which determines its colour
in the timeline. Spans of one line follow each other or are nested. Concurrent work on one thread is
recorded on separate lines, which should be few: name them by slots, not by ids.
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
"""Kinds of spans."""
STEP = "step"
"""Name of the instant that ends a train step; its argument ``step`` counts from 1."""


class Tracer:
    """A recorder of spans, instants and counters; this one discards them.

    Recording is cheap (microseconds per span), never blocks, and is thread-safe.
    """

    def span(self, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Record the work inside of the ``with`` block as a span on the calling thread's line."""
        return contextlib.nullcontext()

    def record(
        self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any
    ) -> None:
        """Record a span that has ended.

        line: separates concurrent work within one process.
        """

    def instant(self, name: str, **args: Any) -> None:
        """Record an event without a duration, such as new weights."""

    def counter(self, name: str, **values: float) -> None:
        """Record numbers that change over time, which are drawn as a curve."""


@dataclass(frozen=True)
class PlayedSample:
    """The rollouts of a sample as they were played, for recorders."""

    id: str
    """Id of the sample."""
    rollouts: Sequence[RolloutOutcome]
    """Outcomes of its rollouts."""
    step: int
    """Train step that plays it, counted from 1; in an asynchronous run, the step after its
    admission; in an evaluation, the number of completed steps."""
    split: str = "train"
    """``train`` or ``eval/<name>``."""
    key: str = ""
    """Key that decides whether the sample is kept; "": its id."""
    env: str = ""
    """Name of the environment."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Options of sampling."""
    attempt: int = 0
    """Number of earlier admissions of the sample."""
    texts: Callable[[Sequence[int]], list[str]] | None = None
    """Function from token ids to the text of each."""


@dataclass(frozen=True)
class TrainedRows:
    """Rows of a train step as trained on, as NumPy arrays.

    Arrays have one entry per predicted token, (n,), packed, unless stated otherwise.
    """

    step: int
    """u, the policy version that is trained: the train step has the number u + 1."""
    ids: Sequence[str]
    """Ids of the samples."""
    rows: Any
    """Number of rows of each sample."""
    lengths: Any
    """Predicted tokens of each row, (rows,)."""
    mask: Any
    """Whether the token is trained on; bool."""
    behaviour: Any
    """Log-probability in the engine that sampled it; f32."""
    before: Any
    """Log-probability in the trainer before any update of the step, NaN if it was not computed;
    f32."""
    current: Any
    """Log-probability in the trainer's last pass, NaN if it was not computed; f32."""
    ratio: Any
    """Importance ratio; f32."""
    advantages: Any
    """Advantage; f32."""
    clipped: Any
    """Whether the loss clipped the token; bool."""
    versions: Any = None
    """Policy version that sampled each token, i32; -1: unknown; None: unknown for all."""


class RolloutRecorder:
    """A recorder of rollouts; this one discards them.

    Recording is cheap for the caller, never blocks or raises, and is thread-safe; arguments must
    not be modified afterwards. ``keeps`` is whether anything is kept, so that callers need to
    collect it. It is also set on ranks whose results another rank keeps, because all ranks must
    compute the same.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps

    def record_played(self, sample: PlayedSample) -> None:
        """Record the rollouts of a sample, including failed ones, if the sample is selected."""

    def record_trained(self, rows: TrainedRows) -> None:
        """Record the rows of a train step that belong to selected samples."""


NO_RECORDER = RolloutRecorder()
"""Recorder that discards everything."""
