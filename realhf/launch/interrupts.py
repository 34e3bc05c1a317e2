"""Handling of SIGINT and SIGTERM in the launcher, which either save a checkpoint and stop the run,
or raise an exception."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LaunchInterrupted(Exception):
    """Raised when SIGINT or SIGTERM stops a launch. ``outcome`` describes what the run has
    saved."""

    def __init__(self, signum: int, outcome: str = "") -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name}" + (f"; {outcome}" if outcome else "")
        )
        self.exit_code = 128 + signum


class StopSignals:
    """Signal handlers of a launch.

    While the run can save its progress (``deferred``), the first signal only sets ``requested``,
    which the launcher's loop checks. Otherwise, and from the second signal on, a signal raises
    ``LaunchInterrupted`` in the main thread. Signals after that are ignored, so that they do not disturb
    the clean-up.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        """Number of the signal that requested that the run save and stop; None if there was
        none."""
        self.deferred = False
        """Whether the first signal lets the run save a checkpoint instead of raising
        ``LaunchInterrupted``."""
        self._has_raised = False

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Context manager that installs the handlers and restores the previous ones at the end."""
        previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._has_raised:
            return
        if self.deferred and self.requested is None:
            self.requested = signum
            return
        self._has_raised = True
        raise LaunchInterrupted(
            signum, "no checkpoint was waited for" if self.requested is not None else ""
        )


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager that defers SIGINT and SIGTERM to its end, if used in the main thread. An
    interrupted clean-up would leave processes behind."""
    received: list[int] = []
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
