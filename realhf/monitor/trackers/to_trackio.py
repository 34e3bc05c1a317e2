"""Sends a run to Trackio, which keeps it on this machine (``TRACKIO_DIR``) unless it is told of a space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.monitor.trackers.tracker import RunFacts, flat


class TrackioTracker:
    """Is the ``Tracker`` of Trackio: a project for each experiment name. A run is known by its name there, so the name
    has the run's id, and a resumed run goes on under it. Transcripts are not sent."""

    def __init__(self, facts: RunFacts) -> None:
        import trackio  # type: ignore[import-not-found]

        self._run: Any = trackio.init(
            project=facts.experiment,
            name=f"{facts.trial}-{facts.id[:8]}",
            config=flat(facts.config),
            resume="allow",
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log(dict(values), step=step)

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Do nothing: ``episodes.txt`` has them."""
        del step, texts

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        del failed
        self._run.finish()
