"""Defines how every part of a run reports spans of its work: who did what when.

Times are wall-clock nanoseconds (``time.time_ns``), so that the lines of several processes fit together.

A span is named ``<kind>`` or ``<kind>/<detail>`` with one of ``KINDS``; pictures colour it by its kind. Spans of one
line lie one after the other or within each other. Work that runs concurrently on one thread gets lines of its own, of
which there should be few: name them after slots, not after ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

GENERATE, ENV, TRAIN, REF, WEIGHTS, WAIT = "generate", "env", "train", "ref", "weights", "wait"
KINDS = (GENERATE, ENV, TRAIN, REF, WEIGHTS, WAIT)
OTHER = "other"
STEP = "step"
"""Name of the instant that ends a train step; its argument ``step`` counts from 1."""


def kind_of(name: str) -> str:
    """Return the kind of a span by its name; OTHER if the name begins with none."""
    kind = name.partition("/")[0]
    return kind if kind in KINDS else OTHER


class Tracer(Protocol):
    """Records spans, instants and counters. It is cheap (a span costs microseconds), never waits, and is
    thread-safe."""

    def span(self, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Record the work inside the ``with`` block as a span on the calling thread's line."""
        ...

    def record(self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any) -> None:
        """Record a span that is over. ``line`` separates what runs concurrently within one process."""
        ...

    def instant(self, name: str, **args: Any) -> None:
        """Record something without a duration, e.g. new weights."""
        ...

    def counter(self, name: str, **values: float) -> None:
        """Record numbers that change over time, drawn as a curve."""
        ...


class NoTrace:
    """A ``Tracer`` that keeps nothing."""

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """See ``Tracer``."""
        del name, args
        yield

    def record(self, name: str, began_ns: int, ended_ns: int, *, line: str = "", **args: Any) -> None:
        """See ``Tracer``."""
        pass

    def instant(self, name: str, **args: Any) -> None:
        """See ``Tracer``."""
        pass

    def counter(self, name: str, **values: float) -> None:
        """See ``Tracer``."""
        pass
