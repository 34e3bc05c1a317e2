"""Sends a run to MLflow: to ``MLFLOW_TRACKING_URI``, or else into ``mlflow/`` of the run folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.monitor.trackers.tracker import RunFacts, flat

_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PARAMETERS, _MOST_METRICS = 250, 500, 100, 900
NAME = "mlflow"


class MlflowTracker:
    """Is the ``Tracker`` of MLflow: an experiment for each experiment name, a run for each trial. A resumed run is the
    run it was before. Parameters are those the run began with; ``config.yaml`` is an artifact of its own."""

    def __init__(self, facts: RunFacts) -> None:
        import mlflow  # type: ignore[import-not-found]
        from mlflow.entities import Metric, Param  # type: ignore[import-not-found]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

        self._metric: Any = Metric
        folder = facts.run_dir / "mlflow"
        own = None if mlflow.is_tracking_uri_set() else f"sqlite:///{folder.absolute()}/mlflow.db"
        if own is not None:
            folder.mkdir(exist_ok=True)
        self._client: Any = MlflowClient(tracking_uri=own)
        known = facts.known(NAME) if facts.resumed else None
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run = known
            return
        self._run = self._client.create_run(
            self._experiment(facts, f"{folder.absolute().as_uri()}/artifacts" if own else None),
            run_name=facts.trial,
            tags={"realhf.id": facts.id},
        ).info.run_id
        facts.remember(NAME, self._run)
        parameters = [Param(_name(name), value[:_LONGEST_VALUE]) for name, value in flat(facts.config).items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _MOST_PARAMETERS])
        if facts.config:
            self._client.log_dict(self._run, dict(facts.config), "config.yaml")

    def _experiment(self, facts: RunFacts, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(facts.experiment)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(facts.experiment, artifact_location=artifacts)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``. Characters that MLflow does not take in names become underscores."""
        now = int(time.time() * 1000)
        found = [self._metric(_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=found[start : start + _MOST_METRICS])

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Keep the transcripts as a text file among the artifacts."""
        self._client.log_text(self._run, "\n\n".join(texts), f"rollouts/step-{step:06d}.txt")

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    """Return a name that MLflow takes: it reads names as paths, which must neither leave their folder nor begin with a
    slash."""
    parts = [part for part in _NOT_ALLOWED.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME] or "_"
