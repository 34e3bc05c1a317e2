"""Interfaces through which the parts of a run report their work: spans (work with a start and an
end), and rollouts, both as played and as trained on.

Times are wall-clock nanoseconds (``time.time_ns``), so that traces of several processes can be
merged.

A span's name is ``<kind>`` or ``<kind>/<detail>``, where the kind is one of ``KINDS`` and
determines its colour in the timeline. Spans on one line of the timeline follow each other or are
nested. Concurrent work on one thread is recorded on separate lines. There should be few lines, so
name them by slots, not by ids.
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
        """Context manager that records the work within its block as a span on the calling thread's
        line."""
        return contextlib.nullcontext()

    def record(
        self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any
    ) -> None:
        """Record a span that has ended.

        line: name of the timeline's line, which separates concurrent work within one process.
        """

    def instant(self, name: str, **args: Any) -> None:
        """Record an event without a duration, such as new weights."""

    def counter(self, name: str, **values: float) -> None:
        """Record the current values of numbers that are drawn as curves over time."""


@dataclass(frozen=True)
class PlayedSample:
    """The rollouts of a sample as they were played, to pass to a recorder."""

    id: str
    """Id of the sample."""
    rollouts: Sequence[RolloutOutcome]
    """Outcomes of its rollouts."""
    step: int
    """Train step that plays the sample, counted from 1; in an asynchronous run, the step after its
    admission; in an evaluation, the number of completed steps."""
    split: str = "train"
    """``train`` or ``eval/<name>``."""
    key: str = ""
    """String from which the recorder decides whether to keep the sample; "" to use its id."""
    env: str = ""
    """Name of the environment."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Options of sampling."""
    attempt: int = 0
    """Number of times that the sample was admitted before."""
    texts: Callable[[Sequence[int]], list[str]] | None = None
    """Function that returns the text of each token id."""


@dataclass(frozen=True)
class TrainedRows:
    """Sequences of a train step as they were trained on, as NumPy arrays.

    Unless stated otherwise, arrays are packed, with one entry per predicted token: (n,).
    """

    step: int
    """Policy version u that is trained. The number of the train step is u + 1."""
    ids: Sequence[str]
    """Ids of the samples."""
    rows: Any
    """Number of sequences of each sample."""
    lengths: Any
    """Number of predicted tokens of each sequence, (n sequences,)."""
    mask: Any
    """Whether the token is trained on; bool."""
    behaviour: Any
    """Log-probability in the engine that sampled the token, without a token mask; f32."""
    before: Any
    """Log-probability in the trainer before the step's first update; NaN if it was not computed;
    f32."""
    current: Any
    """Log-probability in the trainer's last pass over the token; NaN if it was not computed;
    f32."""
    ratio: Any
    """Importance ratio; f32."""
    advantages: Any
    """Advantage; f32."""
    clipped: Any
    """Whether the loss clipped the token; bool."""
    versions: Any = None
    """Policy version that sampled each token, i32, with -1 for unknown; None if it is unknown for
    all tokens."""


class RolloutRecorder:
    """A recorder of rollouts; this one discards them.

    Recording is cheap for the caller, never blocks or raises, and is thread-safe. Arguments must
    not be modified afterwards. ``keeps`` says whether callers need to collect data for the
    recorder. It is also true on ranks whose results another rank records, because all ranks must
    compute the same.
    """

    def __init__(self, keeps: bool = False) -> None:
        self.keeps = keeps

    def record_played(self, sample: PlayedSample) -> None:
        """Record the rollouts of a sample, including failed ones, if the sample is selected."""

    def record_trained(self, rows: TrainedRows) -> None:
        """Record those sequences of a train step that belong to selected samples."""


NO_RECORDER = RolloutRecorder()
"""Recorder that discards everything."""
