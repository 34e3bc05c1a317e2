"""Writes scalars for TensorBoard into ``tensorboard/`` of the run folder, without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from realhf.monitor.trackers.tracker import RunFacts


class TensorBoardTracker:
    """Is the ``Tracker`` of TensorBoard. TensorBoard drops later points of an earlier, interrupted run when it reads
    the file. Transcripts are not written."""

    def __init__(self, facts: RunFacts) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(facts.run_dir / "tensorboard"))
        self._writer.add_event(
            Event(wall_time=time.time(), step=facts.first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``; the file is flushed."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Do nothing: ``episodes.txt`` has them."""
        del step, texts

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        del failed
        self._writer.close()
