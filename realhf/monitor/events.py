"""Events from the master to the launcher, written as one JSON object per line to the master's
standard output.

Kinds: ``endpoint`` {address, run_id}, ``phase`` {text}, ``activity`` {calls, resident, capacity},
``step`` {step, total, metrics}, ``evaluation`` {when, report}, ``progress`` {call, over, wanted} of
a call that plays episodes, ``warning`` {text}, ``done`` {summary}, ``stopped`` {text} of a run that
was asked to end early and has saved what it could; for the launcher's supervision ``joined`` {name}
and ``lost`` {name, pid, started, reason, left}; between the steps of an asynchronous run
``rollouts`` {admission, generation, rollout}: see ``realhf.monitor.summary``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class EventStream:
    """Writer of events to a stream. Writing raises BrokenPipeError if the reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @staticmethod
    def on_stdout() -> EventStream:
        """Return a writer to standard output. From now on, all other output to standard output is
        redirected to standard error."""
        stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return EventStream(stream)

    def emit(self, kind: str, **values: Any) -> None:
        """Write one event and flush it, so that the reader gets it immediately."""
        self._stream.write(json.dumps({"kind": kind, **values}) + "\n")
        self._stream.flush()


def parse_event(line: str) -> dict[str, Any] | None:
    """Parse a line into an event; return None if the line is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
