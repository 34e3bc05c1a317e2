"""Sends the metrics of a run to TensorBoard, W&B, MLflow and Trackio, each on a thread of its own.

A tracker has a thread of its own, so that a slow one holds up nobody, and one that fails is left out: the run goes on
and says so once.
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
from realhf.base.files import kept_aside, write_whole
from realhf.base.installation import install_command
from realhf.monitor.provenance import read_config

IDENTITY_FILE = "trackers.json"


class Tracker(Protocol):
    """Takes what a run reports. All methods are called on one thread, in order; what one raises ends this tracker."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take finite numbers of a step. Steps need not ascend: an evaluation may come late, and a resumed run repeats
        the steps after its checkpoint."""
        ...

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Take transcripts of a step; nothing becomes of them where a tracker does not say otherwise."""
        del step, texts

    def close(self, failed: bool) -> None:
        """Send what is left and mark the run as over; ``failed``: it ended early."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """Tells a tracker about the run. ``id`` is the same after a resumption and another one after a fresh start;
    ``first_step`` is the next step to come; ``config`` what was asked for; ``past`` what a resumed run had reported of
    the steps before."""

    run_dir: Path
    experiment: str
    trial: str
    id: str
    first_step: int
    config: Mapping[str, Any]
    past: Sequence[tuple[int, Mapping[str, float]]] = ()

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.first_step > 1

    def known(self, tracker: str) -> str | None:
        """Return the name that a tracker has given to this run before, if it did."""
        return _read_identity(self.run_dir).get(tracker)

    def remember(self, tracker: str, name: str) -> None:
        """Keep the name that a tracker gives to this run, for its resumption."""
        _write_identity(self.run_dir, {**_read_identity(self.run_dir), tracker: name})


def run_info(
    run_dir: Path,
    completed_steps: int,
    past: Sequence[tuple[int, Mapping[str, float]]] = (),
    warn: Callable[[str], None] = lambda text: None,
) -> RunInfo:
    """Return the facts of the run in a folder, with the id that it had before where it is resumed; ``warn`` is told
    where that is not known any more. Raises OSError."""
    known = _read_identity(run_dir) if completed_steps > 0 else {}
    if "id" not in known:
        if completed_steps > 0:
            kept = kept_aside(run_dir / IDENTITY_FILE)
            fate = f"cannot be understood and is kept as {kept.name}" if kept else "is gone"
            warn(f"{run_dir / IDENTITY_FILE} {fate}: for its trackers the run is a new one")
        known = {"id": uuid.uuid4().hex}
        _write_identity(run_dir, known)
    name = run_dir.parent.name, run_dir.name
    return RunInfo(run_dir, *name, known["id"], completed_steps + 1, read_config(run_dir), past)


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """Return a nested configuration as {dotted name: text}."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{start}{name}.")
        else:
            found[f"{start}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def _read_identity(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _write_identity(run_dir: Path, names: Mapping[str, str]) -> None:
    write_whole(run_dir / IDENTITY_FILE, json.dumps(dict(names)))


class TensorBoardTracker(Tracker):
    """Is the ``Tracker`` of TensorBoard. TensorBoard drops later points of an earlier, interrupted run when it reads
    the file. Transcripts are not written."""

    def __init__(self, facts: RunInfo) -> None:
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

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        del failed
        self._writer.close()


PROJECT = "realhf"
STEP = "step"


class WandbTracker(Tracker):
    """Is the ``Tracker`` of W&B. Every metric is drawn over ``step``, which W&B takes in any order; its own counter of
    steps would refuse an evaluation that comes late. A resumed run has the id it had before. Offline, W&B keeps up to
    32 KiB in memory and a killed run loses them: a resumed one writes again what its logs lack of the steps before its
    checkpoint, and they forget the steps after it."""

    def __init__(self, facts: RunInfo) -> None:
        import wandb  # type: ignore[import-not-found]

        self._wandb: Any = wandb
        logs = logs_of(facts.run_dir, facts.id) if facts.resumed else []
        self._run = wandb.init(
            dir=str(facts.run_dir),
            project=PROJECT,
            group=facts.experiment,
            name=f"{facts.experiment}/{facts.trial}",
            id=facts.id,
            resume="allow",
            config=dict(facts.config),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.offline:
            kept = taken_back(logs, facts.first_step, _parsed)
            for step, values in facts.past:
                lost = {name: value for name, value in values.items() if step not in kept.get(name, ())}
                if lost:
                    self.metrics(step, lost)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log({**values, STEP: step})

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Log a table with a row for each transcript."""
        table = self._wandb.Table(columns=["step", "rollout"], data=[[step, text] for text in texts])
        self._run.log({"rollouts": table, STEP: step})

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        self._run.finish(exit_code=int(failed))


def _parsed(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    record: Any = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    return record


_HEADER, _PIECE, _BLOCK = 7, 7, 32768
_WHOLE, _FIRST, _LAST = 1, 2, 4
_SYNCED = ".synced"
"""W&B marks a log that was sent by an empty file of its name with this at the end."""
Parse = Callable[[bytes], Any]
"""Turns the bytes of a record into a message of W&B."""


def logs_of(run_dir: Path, run: str) -> list[Path]:
    """Return the offline logs of a run, oldest first."""
    return sorted((run_dir / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))


def taken_back(logs: Sequence[Path], first_step: int, parse: Parse) -> dict[str, set[int]]:
    """Return the steps of each metric that the logs hold, and cut off what they hold from ``first_step`` on, which the
    resumed run makes again. A log that was sent already is left as it is, and so is one that cannot be understood:
    its steps count as lost."""
    kept: dict[str, set[int]] = {}
    for log in logs:
        try:
            found, end = _read_log(log.read_bytes(), first_step, parse)
            if end is not None and not log.with_name(log.name + _SYNCED).exists():
                os.truncate(log, end)
        except Exception:  # the format is another package's
            continue
        for name, steps in found.items():
            kept.setdefault(name, set()).update(steps)
    return kept


def _read_log(log: bytes, first_step: int, parse: Parse) -> tuple[dict[str, set[int]], int | None]:
    """Return the steps of each metric, and where the record of the first step to be made again begins."""
    kept: dict[str, set[int]] = {}
    for begin, data in _records(log):
        record = parse(data)
        if not record.HasField("history"):
            continue
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "step" not in row:
            continue
        step = json.loads(row["step"])
        if step >= first_step:
            return kept, begin
        for name in row:
            kept.setdefault(name, set()).add(step)
    return kept, None


def _records(log: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield where each whole record begins, and its bytes.

    A log is a header of 7 bytes, then records in blocks of 32 KiB. Each piece of a record stands behind 7 bytes: a
    checksum (4), its length (2) and its kind (1: whole, 2: first, 3: middle, 4: last). A killed process leaves the
    beginning of a record at the end.
    """
    at, begin, held = _HEADER, _HEADER, b""
    while at + _PIECE <= len(log):
        left = _BLOCK - at % _BLOCK
        if left < _PIECE:
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        if not _WHOLE <= kind <= _LAST or at + _PIECE + size > len(log):
            return
        if kind in (_WHOLE, _FIRST):
            begin, held = at, b""
        held += log[at + _PIECE : at + _PIECE + size]
        if kind in (_WHOLE, _LAST):
            yield begin, held
        at += _PIECE + size


class TrackioTracker(Tracker):
    """Is the ``Tracker`` of Trackio: a project for each experiment name. A run is known by its name there, so the name
    has the run's id, and a resumed run goes on under it. Transcripts are not sent."""

    def __init__(self, facts: RunInfo) -> None:
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

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        del failed
        self._run.finish()


_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PARAMETERS, _MOST_METRICS = 250, 500, 100, 900
NAME, _TAG = "mlflow", "realhf.id"


class MlflowTracker(Tracker):
    """Is the ``Tracker`` of MLflow: an experiment for each experiment name, a run for each trial. A resumed run is the
    run it was before, and what a killed process had not sent is sent again. What it had sent of steps after the
    checkpoint is taken back in a store of the run's own; MLflow has no request for that, so a server keeps those values
    beside the new ones. Parameters are those the run began with; ``config.yaml`` is an artifact of its own."""

    def __init__(self, facts: RunInfo) -> None:
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

    def _begin(self, facts: RunInfo, artifacts: str | None) -> str:
        """Return the run with the id of the facts, made anew where there is none."""
        known = self._client.get_experiment_by_name(facts.experiment)
        experiment = known.experiment_id if known is not None else None
        if experiment is None:
            experiment = self._client.create_experiment(facts.experiment, artifact_location=artifacts)
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


Open = Callable[[RunInfo], Tracker]
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
        facts = run_info(run_dir, completed_steps, kept, warn) if names else None
        self._lanes = [_TrackerThread(name, adapters[name], facts) for name in names if facts is not None]

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Send numbers of a step; those that are not finite are left out."""
        found = finite(values)
        for lane in self._lanes:
            lane.put(lambda tracker: tracker.metrics(step, found), step)
        self.poll()

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Send transcripts of a step."""
        kept = list(texts)
        for lane in self._lanes if kept else ():
            lane.put(lambda tracker: tracker.rollouts(step, kept), step)
        self.poll()

    def poll(self) -> None:
        """Tell of trackers that have failed since the last call."""
        for lane in [lane for lane in self._lanes if lane.problem]:
            self._lanes.remove(lane)
            lost = "" if lane.step is None else f"; it lacks what came from step {lane.step} on"
            self._warn(f"monitor.trackers: {lane.name} is left out from now on: {lane.problem}{lost}")

    def close(self, *, failed: bool = False) -> None:
        """Let every tracker send what is left, for at most ``CLOSE_S`` together."""
        for lane in self._lanes:
            lane.put(None if lane.problem else lambda tracker: tracker.close(failed))
            lane.put(None)
        end = process_clock.now() + CLOSE_S
        for lane in self._lanes:
            lane.join(max(0.0, end - process_clock.now()))
        self.poll()
        self._lanes.clear()


class _TrackerThread:
    """The thread of one tracker and what waits for it."""

    def __init__(self, name: str, open_tracker: Open, facts: RunInfo) -> None:
        self.name, self.problem = name, ""
        self.step: int | None = facts.first_step
        """Step of the entry in work, which is the first one that is lost when the tracker fails; None at its end."""
        self._waiting: queue.Queue[tuple[int | None, Callable[[Tracker], None] | None]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker, facts), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def put(self, entry: Callable[[Tracker], None] | None, step: int | None = None) -> None:
        try:
            self._waiting.put_nowait((step, entry))
        except queue.Full:
            self.problem = self.problem or f"it is {MOST_WAITING} entries behind"

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        if self._thread.is_alive() and not self.problem:
            self.problem = f"it was not done {CLOSE_S:.0f} s after the end of the run"

    def _work(self, open_tracker: Open, facts: RunInfo) -> None:
        try:
            tracker = open_tracker(facts)
            while not self.problem:
                step, entry = self._waiting.get()
                self.step = step
                if entry is None:
                    return
                entry(tracker)
        except BaseException as error:  # whatever a foreign package raises, SystemExit included, concerns it alone
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
