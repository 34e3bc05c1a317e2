"""TensorBoard scalars without torch: the event file writer of the tensorboard package and its messages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardWriter:
    """Scalars of a run in ``folder``. ``first_step``: later points of an earlier, interrupted run are purged
    by TensorBoard when it reads the file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        self._writer.add_event(Event(
            wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START)
        ))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
