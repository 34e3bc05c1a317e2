"""Reads what trackers kept of a run with the packages themselves, and prints it as JSON: python -m
tests.monitor.trackers.read_back FOLDER NAME. ``loss`` and ``evaluation`` are [step, value] in the
order of arrival."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
LOSS = "policy/loss"
EVALUATION = "eval/heldout/sampled/success/overall"


def of_wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    found: dict[str, Any] = {"runs": [], "loss": [], "evaluation": [], "config": {}, "rollouts": 0}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                found["runs"].append(record.run.run_id)
                found["config"] |= {
                    entry.key: json.loads(entry.value_json) for entry in record.run.config.update
                }
            if record.HasField("history"):
                row = {
                    entry.key or "/".join(entry.nested_key): entry.value_json
                    for entry in record.history.item
                }
                step = json.loads(row["step"]) if "step" in row else None
                for name, key in (("loss", LOSS), ("evaluation", EVALUATION)):
                    found[name] += [[step, json.loads(row[key])]] if key in row else []
                found["rollouts"] += any(name.startswith("rollouts") for name in row)
    return found


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a log in blocks of 32 KiB behind 7 bytes: each piece has a checksum (4
    bytes), its length (2) and its kind (1: whole, 2: first, 3: middle, 4: last). What a killed
    process left of a record ends it."""
    at = 7
    held = b""
    while at + 7 <= len(log):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        size = int.from_bytes(log[at + 4 : at + 6], "little")
        kind = log[at + 6]
        if not 1 <= kind <= 4 or at + 7 + size > len(log):
            return
        held = (b"" if kind in (1, 2) else held) + log[at + 7 : at + 7 + size]
        if kind in (1, 4):
            yield held
        at += 7 + size


def of_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.absolute()}/mlflow/mlflow.db")
    experiments = [client.get_experiment_by_name(folder.parent.name).experiment_id]
    runs = client.search_runs(experiments)
    run = runs[0].info.run_id

    def history(name: str) -> list[list[float]]:
        return [[metric.step, metric.value] for metric in client.get_metric_history(run, name)]

    return {
        "runs": [each.info.run_id for each in runs],
        "status": runs[0].info.status,
        "loss": history(LOSS),
        "evaluation": history(EVALUATION),
        "rare": runs[0].data.metrics.get("rare"),
        "config": runs[0].data.params,
        "rollouts": len(client.list_artifacts(run, "rollouts")),
    }


def of_trackio(folder: Path) -> dict[str, Any]:
    """Its own programming interface lists runs and no histories; its store is a SQLite file for
    each project."""
    import trackio  # type: ignore[import-not-found]

    with contextlib.closing(
        sqlite3.connect(folder / "trackio" / f"{folder.parent.name}.db")
    ) as store:
        rows = [
            (step, json.loads(text))
            for step, text in store.execute("SELECT step, metrics FROM metrics ORDER BY id")
        ]
        configs = [json.loads(text) for (text,) in store.execute("SELECT config FROM configs")]
    return {
        "runs": [run.name for run in trackio.Api().runs(folder.parent.name)],
        "loss": [[step, row[LOSS]] for step, row in rows if LOSS in row],
        "evaluation": [[step, row[EVALUATION]] for step, row in rows if EVALUATION in row],
        "config": configs[0],
    }


if __name__ == "__main__":
    read = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}[sys.argv[2]]
    print(json.dumps(read(Path(sys.argv[1]))))
