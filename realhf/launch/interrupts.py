"""Turns SIGINT and SIGTERM of a launch into a stop that first saves a checkpoint, or into an exception."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """SIGINT or SIGTERM reached the launcher. ``outcome`` says what the run saved because of it."""

    def __init__(self, signum: int, outcome: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}" + (f"; {outcome}" if outcome else ""))
        self.exit_code = 128 + signum


class StopSignals:
    """Decides what a signal does to a launch.

    As long as the run can save its progress (``deferred``), the first signal raises nothing: it stands in
    ``requested`` until the launcher's loop sees it. Otherwise, and from the second one on, a signal raises
    ``Interrupted`` in the main thread. Once that was raised, further signals are ignored, so that nothing
    disturbs the clean-up.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        """The signal that asked the run to save and stop; None as long as there was none."""
        self.deferred = False
        """Whether the first signal waits for a checkpoint."""
        self._raised = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals within the block; the handlers of before come back at its end."""
        previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._raised:
            return
        if self.deferred and self.requested is None:
            self.requested = signum
            return
        self._raised = True
        raise Interrupted(signum, "no checkpoint was waited for" if self.requested is not None else "")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is over, in the main thread: a clean-up that they interrupt leaves
    processes behind."""
    received: list[int] = []
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
