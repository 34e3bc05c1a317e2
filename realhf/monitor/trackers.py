"""Adapters that send a run's metrics to experiment trackers: TensorBoard, W&B, MLflow and Trackio.

Each tracker has its own thread, so that a slow tracker does not delay the run. A tracker that fails
is dropped with a single warning, and the run continues.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from realhf.base import process_clock
from realhf.base.files import set_aside, write_atomic
from realhf.base.installation import install_command
from realhf.monitor.provenance import read_config

IDENTITY_FILE = "trackers.json"


class RunTracker(Protocol):
    """Interface of an experiment tracker. All methods are called on one thread, in order. After an
    exception the tracker is dropped."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step, which are finite numbers.

        Steps may not be in order: an evaluation may be late, and a resumed run repeats the steps
        after its checkpoint.
        """
        ...

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Record transcripts of a step. The default implementation ignores them."""
        del step, texts

    def close(self, failed: bool) -> None:
        """Send the remaining data and mark the run as finished. failed: whether the run ended
        early."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for trackers."""

    run_dir: Path
    experiment: str
    trial: str
    id: str
    """Id of the run. A resumption keeps it; a fresh start creates a new one."""
    first_step: int
    """First step that this process will run."""
    config: Mapping[str, Any]
    """Options of the run as nested mappings."""
    past: Sequence[tuple[int, Mapping[str, float]]] = ()
    """(step, metrics) pairs that a resumed run has reported for earlier steps."""

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.first_step > 1

    def stored_name(self, tracker: str) -> str | None:
        """Return the name that was stored for this run in a tracker; None if none was."""
        return _read_identity(self.run_dir).get(tracker)

    def store_name(self, tracker: str, name: str) -> None:
        """Store the name that this run has in a tracker, for later resumptions."""
        _write_identity(self.run_dir, {**_read_identity(self.run_dir), tracker: name})


def run_info(
    run_dir: Path,
    completed_steps: int,
    past: Sequence[tuple[int, Mapping[str, float]]] = (),
    warn: Callable[[str], None] = lambda text: None,
) -> RunInfo:
    """Return the description of the run in a folder. A resumed run keeps its id.

    warn: called with a message if the id of a resumed run is lost. Raises OSError.
    """
    names = _read_identity(run_dir) if completed_steps > 0 else {}
    if "id" not in names:
        if completed_steps > 0:
            new_path = set_aside(run_dir / IDENTITY_FILE)
            fate = (
                f"cannot be parsed and was renamed to {new_path.name}" if new_path else "is missing"
            )
            warn(f"{run_dir / IDENTITY_FILE} {fate}: for its trackers the run is a new one")
        names = {"id": uuid.uuid4().hex}
        _write_identity(run_dir, names)
    name = run_dir.parent.name, run_dir.name
    return RunInfo(run_dir, *name, names["id"], completed_steps + 1, read_config(run_dir), past)


def finite_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def flatten_config(config: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Flatten a nested configuration to {dotted name: value as a string}."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            texts |= flatten_config(value, f"{start}{name}.")
        else:
            texts[f"{start}{name}"] = (
                value if isinstance(value, str) else json.dumps(value, default=str)
            )
    return texts


def _read_identity(run_dir: Path) -> dict[str, str]:
    try:
        content = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(name): str(value) for name, value in content.items()}
        if isinstance(content, dict)
        else {}
    )


def _write_identity(run_dir: Path, names: Mapping[str, str]) -> None:
    write_atomic(run_dir / IDENTITY_FILE, json.dumps(dict(names)))


class TensorBoardTracker(RunTracker):
    """``RunTracker`` for TensorBoard. Transcripts are not written.

    If a resumed run repeats steps of the interrupted run, TensorBoard drops the earlier points when
    it reads the file.
    """

    def __init__(self, info: RunInfo) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(info.run_dir / "tensorboard"))
        self._writer.add_event(
            Event(
                wall_time=time.time(),
                step=info.first_step,
                session_log=SessionLog(status=SessionLog.START),
            )
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics and flush the file; see ``RunTracker``."""
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=scalars))
        )
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """See ``RunTracker``."""
        del failed
        self._writer.close()


PROJECT = "realhf"
STEP = "step"


class WandbTracker(RunTracker):
    """``RunTracker`` for W&B.

    Metrics are plotted over the value ``step``, which may arrive in any order; W&B's own step
    counter would reject a late evaluation. A resumed run keeps its id. Offline, W&B buffers up to
    32 KiB, which are lost if the run is killed. Therefore a resumed run removes the records after
    its checkpoint from the logs, and writes missing values of earlier steps again.
    """

    def __init__(self, info: RunInfo) -> None:
        import wandb  # type: ignore[import-not-found]

        self._wandb: Any = wandb
        logs = find_logs(info.run_dir, info.id) if info.resumed else []
        self._run = wandb.init(
            dir=str(info.run_dir),
            project=PROJECT,
            group=info.experiment,
            name=f"{info.experiment}/{info.trial}",
            id=info.id,
            resume="allow",
            config=dict(info.config),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.offline:
            logged = truncate_logs(logs, info.first_step, _parse_record)
            for step, values in info.past:
                lost = {
                    name: value
                    for name, value in values.items()
                    if step not in logged.get(name, ())
                }
                if lost:
                    self.metrics(step, lost)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``RunTracker``."""
        self._run.log({**values, STEP: step})

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Log a table with a row for each transcript."""
        table = self._wandb.Table(
            columns=["step", "rollout"], data=[[step, text] for text in texts]
        )
        self._run.log({"rollouts": table, STEP: step})

    def close(self, failed: bool) -> None:
        """See ``RunTracker``."""
        self._run.finish(exit_code=int(failed))


def _parse_record(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    record: Any = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    return record


# Format of W&B's logs, which is LevelDB's log format; see ``_iterate_records``.
_HEADER = 7
_PIECE = 7
_BLOCK = 32768
_WHOLE = 1
_FIRST = 2
_LAST = 4
_SYNCED = ".synced"
"""Suffix of the empty file with which W&B marks a log that was sent."""
Parse = Callable[[bytes], Any]
"""Function that parses the bytes of a record into a W&B protobuf message."""


def find_logs(run_dir: Path, run: str) -> list[Path]:
    """Return the offline logs of a run, oldest first."""
    return sorted((run_dir / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))


def truncate_logs(logs: Sequence[Path], first_step: int, parse: Parse) -> dict[str, set[int]]:
    """Remove the records from ``first_step`` on, because the resumed run repeats them. Return the
    remaining steps of each metric.

    Logs that were already synced or cannot be parsed are not changed. Steps in a log that cannot be
    parsed count as missing.
    """
    remaining: dict[str, set[int]] = {}
    for log in logs:
        try:
            log_steps, end = _read_log(log.read_bytes(), first_step, parse)
            if end is not None and not log.with_name(log.name + _SYNCED).exists():
                os.truncate(log, end)
        except Exception:  # the log format belongs to another package and may change
            continue
        for name, steps in log_steps.items():
            remaining.setdefault(name, set()).update(steps)
    return remaining


def _read_log(log: bytes, first_step: int, parse: Parse) -> tuple[dict[str, set[int]], int | None]:
    """Return (steps of each metric before ``first_step``, offset of the first record from
    ``first_step`` on).

    The offset is None if there is no such record.
    """
    steps: dict[str, set[int]] = {}
    for begin, data in _iterate_records(log):
        record = parse(data)
        if not record.HasField("history"):
            continue
        row = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        if "step" not in row:
            continue
        step = json.loads(row["step"])
        if step >= first_step:
            return steps, begin
        for name in row:
            steps.setdefault(name, set()).add(step)
    return steps, None


def _iterate_records(log: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each complete record.

    A log has a header of 7 bytes, followed by records in blocks of 32 KiB. Each piece of a record
    is preceded by 7 bytes: a checksum (4 bytes), the length of the piece (2 bytes) and its kind (1
    byte; 1: whole record, 2: first, 3: middle or 4: last piece). If the process was killed, the
    last record may be incomplete.
    """
    offset = _HEADER
    begin = _HEADER
    record = b""
    while offset + _PIECE <= len(log):
        room = _BLOCK - offset % _BLOCK
        if room < _PIECE:
            offset += room
            continue
        size = int.from_bytes(log[offset + 4 : offset + 6], "little")
        kind = log[offset + 6]
        if not _WHOLE <= kind <= _LAST or offset + _PIECE + size > len(log):
            return
        if kind in (_WHOLE, _FIRST):
            begin = offset
            record = b""
        record += log[offset + _PIECE : offset + _PIECE + size]
        if kind in (_WHOLE, _LAST):
            yield begin, record
        offset += _PIECE + size


class TrackioTracker(RunTracker):
    """``RunTracker`` for Trackio, with a project for each experiment name. Transcripts are not
    sent.

    Trackio identifies a run by its name. So the name contains the run's id, and a resumed run keeps
    its name.
    """

    def __init__(self, info: RunInfo) -> None:
        import trackio  # type: ignore[import-not-found]

        self._run: Any = trackio.init(
            project=info.experiment,
            name=f"{info.trial}-{info.id[:8]}",
            config=flatten_config(info.config),
            resume="allow",
            embed=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``RunTracker``."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """See ``RunTracker``."""
        del failed
        self._run.finish()


_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)
# Limits for requests to MLflow.
_MAX_NAME_CHARS = 250
_MAX_VALUE_CHARS = 500
_MAX_PARAMETERS = 100
_MAX_METRICS = 900
NAME = "mlflow"
_TAG = "realhf.id"
"""Tag that contains the run's id, by which the run is found in MLflow."""


class MlflowTracker(RunTracker):
    """``RunTracker`` for MLflow, with an experiment for each experiment name and a run for each
    trial.

    A resumed run continues the same MLflow run, and sends the values that a killed process had not
    sent. Values of steps after the checkpoint are deleted from a local store. A server keeps them
    in addition to the new ones, because MLflow has no request to delete them. Parameters are the
    options of the first launch; ``config.yaml`` is stored as an artifact.
    """

    def __init__(self, info: RunInfo) -> None:
        import mlflow  # type: ignore[import-not-found]
        from mlflow.entities import Metric, Param  # type: ignore[import-not-found]
        from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

        self._metric: Any = Metric
        self._param: Any = Param
        own_store = (
            None
            if mlflow.is_tracking_uri_set()
            else _create_store(info.run_dir / "mlflow", MlflowClient)
        )
        self._client: Any = MlflowClient(tracking_uri=own_store and _store_uri(own_store))
        stored_name = info.stored_name(NAME) if info.resumed else None
        self._run = stored_name or self._find_or_create_run(
            info, own_store and f"{own_store.parent.absolute().as_uri()}/artifacts"
        )
        if info.resumed:
            if own_store is not None:
                _delete_steps(own_store, self._run, info.first_step)
            self._client.update_run(self._run, status="RUNNING")
            self._resend_lost(info.past)

    def _find_or_create_run(self, info: RunInfo, artifacts: str | None) -> str:
        """Return MLflow's name of the run with this id, after creating the run if it does not
        exist."""
        existing = self._client.get_experiment_by_name(info.experiment)
        experiment = existing.experiment_id if existing is not None else None
        if experiment is None:
            experiment = self._client.create_experiment(
                info.experiment, artifact_location=artifacts
            )
        existing_runs = self._client.search_runs(
            [experiment], filter_string=f"tags.`{_TAG}` = '{info.id}'"
        )
        run = (
            existing_runs[0]
            if existing_runs
            else self._client.create_run(experiment, run_name=info.trial, tags={_TAG: info.id})
        )
        name = run.info.run_id
        parameters = [
            self._param(_clean_name(name), value[:_MAX_VALUE_CHARS])
            for name, value in flatten_config(info.config).items()
        ]
        for start in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(name, params=parameters[start : start + _MAX_PARAMETERS])
        if info.config:
            self._client.log_dict(name, dict(info.config), "config.yaml")
        info.store_name(NAME, name)
        return name

    def _resend_lost(self, past: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Send earlier values that are missing in the store because a killed process had not sent
        them."""
        stored_steps: dict[str, set[int]] = {}
        for step, values in past:
            for name in values.keys() - stored_steps.keys():
                stored_steps[name] = {
                    metric.step
                    for metric in self._client.get_metric_history(self._run, _clean_name(name))
                }
            lost = {name: value for name, value in values.items() if step not in stored_steps[name]}
            if lost:
                self.metrics(step, lost)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send metrics; see ``RunTracker``. Characters that MLflow does not allow in names are
        replaced by underscores."""
        now = int(time.time() * 1000)
        metrics = [
            self._metric(_clean_name(name), value, now, step) for name, value in values.items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MAX_METRICS])

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Store the transcripts as a text artifact."""
        self._client.log_text(self._run, "\n\n".join(texts), f"rollouts/step-{step:06d}.txt")

    def close(self, failed: bool) -> None:
        """See ``RunTracker``."""
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def _create_store(folder: Path, client: Callable[..., Any]) -> Path:
    """Return the path of the store in a folder, after creating the store if it does not exist.

    The store is created under another name and then renamed, because MLflow cannot open a store
    whose creation was interrupted.
    """
    store = folder / "mlflow.db"
    partial = folder / "mlflow.db.partial"
    folder.mkdir(exist_ok=True)
    if not store.exists():
        for old_file in folder.glob(f"{partial.name}*"):
            old_file.unlink()
        client(tracking_uri=_store_uri(partial))
        if partial.exists():
            partial.rename(store)
    return store


_RESTORE_LATEST = """
INSERT OR IGNORE INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics WHERE run_uuid = ? GROUP BY key
"""
"""SQL statement that restores the latest value of metrics whose last steps were deleted. MLflow
does not show a metric without a latest value."""


def _delete_steps(store: Path, run: str, first_step: int) -> None:
    """Delete the metrics of steps that a resumed run repeats. A store with an unknown schema is not
    changed."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(store, timeout=30.0)) as connection,
        connection,
    ):
        for table in ("metrics", "latest_metrics"):
            connection.execute(
                f"DELETE FROM {table} WHERE run_uuid = ? AND step >= ?", (run, first_step)
            )
        connection.execute(_RESTORE_LATEST, (run,))


def _store_uri(store: Path) -> str:
    return f"sqlite:///{store.absolute()}"


def _clean_name(name: str) -> str:
    """Return a metric name with only the characters that MLflow allows.

    MLflow treats names as paths, which must not leave their folder or begin with a slash.
    """
    parts = [part for part in _NOT_ALLOWED.sub("_", name).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_MAX_NAME_CHARS] or "_"


OpenTracker = Callable[[RunInfo], RunTracker]
ADAPTERS: Mapping[str, OpenTracker] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}
CLOSE_S = 60.0
"""Seconds that the end of a run waits for all trackers together. Data that is not sent by then is
lost."""
MAX_QUEUED = 10_000
"""Maximum number of queued entries of a tracker. A tracker that is further behind is dropped."""


class TrackerStream:
    """Distributor of a run's metrics to its trackers.

    completed_steps: number of completed steps; 0 for a fresh start. past: (step, metrics) pairs of
    the completed steps. warn: called with a message once for each tracker that fails, on the thread
    that calls ``poll``, ``metrics`` or ``close``. Raises RuntimeError if a tracker's package is not
    installed.
    """

    def __init__(
        self,
        run_dir: Path,
        names: Sequence[str],
        *,
        completed_steps: int,
        warn: Callable[[str], None],
        past: Sequence[tuple[int, Mapping[str, Any]]] = (),
        adapters: Mapping[str, OpenTracker] = ADAPTERS,
    ) -> None:
        names = list(dict.fromkeys(names))
        for name in names:
            if adapters is ADAPTERS and importlib.util.find_spec(name) is None:
                raise RuntimeError(
                    f"monitor.trackers has {name}, which is not installed: {install_command(name)}"
                )
        self._warn = warn
        past_metrics = (
            [(step, finite_values(values)) for step, values in past] if completed_steps > 0 else []
        )
        info = run_info(run_dir, completed_steps, past_metrics, warn) if names else None
        self._lanes = [
            _TrackerThread(name, adapters[name], info) for name in names if info is not None
        ]

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Send those metrics of a step that are finite numbers."""
        numbers = finite_values(values)
        for lane in self._lanes:
            lane.put(lambda tracker: tracker.metrics(step, numbers), step)
        self.poll()

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Send transcripts of a step."""
        transcripts = list(texts)
        for lane in self._lanes if transcripts else ():
            lane.put(lambda tracker: tracker.rollouts(step, transcripts), step)
        self.poll()

    def poll(self) -> None:
        """Warn about trackers that have failed since the last call, and drop them."""
        for lane in [lane for lane in self._lanes if lane.problem]:
            self._lanes.remove(lane)
            lost = "" if lane.step is None else f"; it lacks what came from step {lane.step} on"
            self._warn(
                f"monitor.trackers: {lane.name} is left out from now on: {lane.problem}{lost}"
            )

    def close(self, *, failed: bool = False) -> None:
        """Wait until the trackers have sent their remaining data, for at most ``CLOSE_S`` seconds
        in total."""
        for lane in self._lanes:
            lane.put(None if lane.problem else lambda tracker: tracker.close(failed))
            lane.put(None)
        end = process_clock.now() + CLOSE_S
        for lane in self._lanes:
            lane.join(max(0.0, end - process_clock.now()))
        self.poll()
        self._lanes.clear()


class _TrackerThread:
    """Thread and queue of one tracker."""

    def __init__(self, name: str, open_tracker: OpenTracker, info: RunInfo) -> None:
        self.name = name
        self.problem = ""
        self.step: int | None = info.first_step
        """Step of the entry that is being sent, which is the first one lost if the tracker fails;
        None at the end."""
        self._waiting: queue.Queue[tuple[int | None, Callable[[RunTracker], None] | None]] = (
            queue.Queue(MAX_QUEUED)
        )
        self._thread = threading.Thread(
            target=self._run_tracker,
            args=(open_tracker, info),
            name=f"tracker {name}",
            daemon=True,
        )
        self._thread.start()

    def put(self, entry: Callable[[RunTracker], None] | None, step: int | None = None) -> None:
        try:
            self._waiting.put_nowait((step, entry))
        except queue.Full:
            self.problem = self.problem or f"it is {MAX_QUEUED} entries behind"

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive() and not self.problem:
            self.problem = f"it was not done {CLOSE_S:.0f} s after the end of the run"

    def _run_tracker(self, open_tracker: OpenTracker, info: RunInfo) -> None:
        try:
            tracker = open_tracker(info)
            while not self.problem:
                step, entry = self._waiting.get()
                self.step = step
                if entry is None:
                    return
                entry(tracker)
        except (
            BaseException
        ) as error:  # an error of a foreign package, including SystemExit, must not end the run
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
