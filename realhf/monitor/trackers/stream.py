"""Hands one stream of metrics to every tracker that is asked for, beside training.

A tracker has a thread of its own, so that a slow one holds up nobody, and one that fails is left out: the run goes on
and says so once.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.extras import install_command
from realhf.monitor.trackers.to_mlflow import MlflowTracker
from realhf.monitor.trackers.to_tensorboard import TensorBoardTracker
from realhf.monitor.trackers.to_trackio import TrackioTracker
from realhf.monitor.trackers.to_wandb import WandbTracker
from realhf.monitor.trackers.tracker import RunFacts, Tracker, facts_of, finite

Open = Callable[[RunFacts], Tracker]
ADAPTERS: Mapping[str, Open] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
CLOSE_S = 60.0
"""How long the end of a run waits for all trackers together, in seconds; what is left then is not sent."""
MOST_WAITING = 10_000
"""Entries that wait for a tracker; one that is further behind is given up."""


class TrackerStream:
    """Takes the metrics of a run, opened at ``completed_steps``; ``past`` are those of the steps before.

    ``warn`` is told of a tracker that fails, once for each, on the thread that calls ``poll``, ``metrics`` or
    ``close``. Raises RuntimeError where a tracker's package is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        names: Sequence[str],
        *,
        completed_steps: int,
        warn: Callable[[str], None],
        past: Sequence[tuple[int, Mapping[str, Any]]] = (),
        adapters: Mapping[str, Open] = ADAPTERS,
    ) -> None:
        names = list(dict.fromkeys(names))
        for name in names:
            if adapters is ADAPTERS and importlib.util.find_spec(name) is None:
                raise RuntimeError(f"monitor.trackers has {name}, which is not installed: {install_command(name)}")
        self._warn = warn
        kept = [(step, finite(values)) for step, values in past] if completed_steps > 0 else []
        facts = facts_of(run_dir, completed_steps, kept) if names else None
        self._lanes = [_Lane(name, adapters[name], facts) for name in names if facts is not None]

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Send numbers of a step; those that are not finite are left out."""
        found = finite(values)
        for lane in self._lanes:
            lane.put(lambda tracker: tracker.metrics(step, found))
        self.poll()

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Send transcripts of a step."""
        kept = list(texts)
        for lane in self._lanes if kept else ():
            lane.put(lambda tracker: tracker.rollouts(step, kept))
        self.poll()

    def poll(self) -> None:
        """Tell of trackers that have failed since the last call."""
        for lane in [lane for lane in self._lanes if lane.problem]:
            self._lanes.remove(lane)
            self._warn(f"monitor.trackers: {lane.name} is left out from now on: {lane.problem}")

    def close(self, *, failed: bool = False) -> None:
        """Let every tracker send what is left, for at most ``CLOSE_S`` together."""
        for lane in self._lanes:
            lane.put(None if lane.problem else lambda tracker: tracker.close(failed))
            lane.put(None)
        end = time.monotonic() + CLOSE_S
        for lane in self._lanes:
            lane.join(max(0.0, end - time.monotonic()))
        self.poll()
        self._lanes.clear()


class _Lane:
    """The thread of one tracker and what waits for it."""

    def __init__(self, name: str, open_tracker: Open, facts: RunFacts) -> None:
        self.name, self.problem = name, ""
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker, facts), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def put(self, entry: Callable[[Tracker], None] | None) -> None:
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self.problem = self.problem or f"it is {MOST_WAITING} entries behind"

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive() and not self.problem:
            self.problem = f"it was not done {CLOSE_S:.0f} s after the end of the run"

    def _work(self, open_tracker: Open, facts: RunFacts) -> None:
        try:
            tracker = open_tracker(facts)
            while not self.problem and (entry := self._waiting.get()) is not None:
                entry(tracker)
        except BaseException as error:  # whatever a foreign package raises, SystemExit included, concerns it alone
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
