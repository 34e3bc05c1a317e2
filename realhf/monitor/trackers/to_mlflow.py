"""Sends a run to MLflow: to ``MLFLOW_TRACKING_URI``, or else into ``mlflow/`` of the run folder."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from realhf.monitor.trackers.tracker import RunFacts, flat

_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PARAMETERS, _MOST_METRICS = 250, 500, 100, 900
NAME, _TAG = "mlflow", "realhf.id"


class MlflowTracker:
    """Is the ``Tracker`` of MLflow: an experiment for each experiment name, a run for each trial. A resumed run is the
    run it was before, and what a killed process had not sent is sent again. What it had sent of steps after the
    checkpoint is taken back in a store of the run's own; MLflow has no request for that, so a server keeps those values
    beside the new ones. Parameters are those the run began with; ``config.yaml`` is an artifact of its own."""

    def __init__(self, facts: RunFacts) -> None:
        import mlflow  # type: ignore[import-not-found]
        from mlflow.entities import Metric, Param  # type: ignore[import-not-found]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

        self._metric: Any = Metric
        self._param: Any = Param
        own = None if mlflow.is_tracking_uri_set() else _own_store(facts.run_dir / "mlflow", MlflowClient)
        self._client: Any = MlflowClient(tracking_uri=own and _address(own))
        known = facts.known(NAME) if facts.resumed else None
        self._run = known or self._begin(facts, own and f"{own.parent.absolute().as_uri()}/artifacts")
        if facts.resumed:
            if own is not None:
                _take_back(own, self._run, facts.first_step)
            self._client.update_run(self._run, status="RUNNING")
            self._send_lost(facts.past)

    def _begin(self, facts: RunFacts, artifacts: str | None) -> str:
        """Return the run with the id of the facts, made anew where there is none."""
        experiment = self._experiment(facts, artifacts)
        made = self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{facts.id}'")
        run = made[0] if made else self._client.create_run(experiment, run_name=facts.trial, tags={_TAG: facts.id})
        name = run.info.run_id
        parameters = [self._param(_name(name), value[:_LONGEST_VALUE]) for name, value in flat(facts.config).items()]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(name, params=parameters[start : start + _MOST_PARAMETERS])
        if facts.config:
            self._client.log_dict(name, dict(facts.config), "config.yaml")
        facts.remember(NAME, name)
        return name

    def _send_lost(self, past: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Send what the run had reported before and the store lacks: a killed process loses what it had not sent."""
        there: dict[str, set[int]] = {}
        for step, values in past:
            for name in values.keys() - there.keys():
                there[name] = {metric.step for metric in self._client.get_metric_history(self._run, _name(name))}
            lost = {name: value for name, value in values.items() if step not in there[name]}
            if lost:
                self.metrics(step, lost)

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


def _own_store(folder: Path, client: Callable[..., Any]) -> Path:
    """Return the store in a folder, made whole under another name where there is none: MLflow cannot open one whose
    tables it was making when it was killed."""
    store, partial = folder / "mlflow.db", folder / "mlflow.db.partial"
    folder.mkdir(exist_ok=True)
    if not store.exists():
        for left in folder.glob(f"{partial.name}*"):
            left.unlink()
        client(tracking_uri=_address(partial))
        if partial.exists():
            partial.rename(store)
    return store


_LATEST_OF_THE_REST = """
INSERT OR IGNORE INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics WHERE run_uuid = ? GROUP BY key
"""
"""A metric whose last value was taken back has the one before: MLflow shows no metric without a latest value."""


def _take_back(store: Path, run: str, first_step: int) -> None:
    """Remove the metrics of steps that a resumed run makes again. A store of another layout keeps them."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(store, timeout=30.0)) as connection, connection:
        for table in ("metrics", "latest_metrics"):
            connection.execute(f"DELETE FROM {table} WHERE run_uuid = ? AND step >= ?", (run, first_step))
        connection.execute(_LATEST_OF_THE_REST, (run,))


def _address(store: Path) -> str:
    return f"sqlite:///{store.absolute()}"


def _name(name: str) -> str:
    """Return a name that MLflow takes: it reads names as paths, which must neither leave their folder nor begin with a
    slash."""
    parts = [part for part in _NOT_ALLOWED.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_LONGEST_NAME] or "_"
