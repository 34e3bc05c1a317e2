"""Export of a run's rollouts for other programs: JSON lines, a Parquet table, or logs for Inspect.

Writing the logs does not require the Inspect package; ``make test-inspect`` checks that Inspect can
read them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

import realhf
from realhf.base.files import atomic_file
from realhf.base.installation import install_command
from realhf.monitor.rollouts.format import TRAIN, encode_record, repair_text, shorten_text, to_plain
from realhf.monitor.rollouts.reader import NoRecord, RolloutRow, RolloutStore

_LOCATION_FIELDS = ("shard", "offset", "bytes", "line", "writer", "has_tokens")
_TRAIN_FIELDS = (
    "version",
    "advantage",
    "ratio_max",
    "clip_fraction",
    "mismatch",
    "n_tokens",
    "staleness",
)


@dataclass
class ExportCounts:
    """Number of exported rollouts."""

    rollouts: int = 0
    without_record: int = 0
    """Number of rollouts without a readable record."""


def sort_rows(store: RolloutStore) -> list[RolloutRow]:
    """Return the valid rollouts in the order of their records on disk."""
    return sorted(
        store.rows(),
        key=lambda row: (row.play.writer, row.play.shard, row.play.offset, row.play.line),
    )


def flatten_row(row: RolloutRow) -> dict[str, Any]:
    """Return the index fields of a rollout as a flat dict: the fields of ``play``, and the fields
    of ``train`` under ``train_<name>``.

    The latter are None if the rollout was not trained on.
    """
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(row.play).items()
        if name not in _LOCATION_FIELDS
    }
    fields["step_trained"] = None if row.train is None else row.train.step
    for name in _TRAIN_FIELDS:
        fields[f"train_{name}"] = None if row.train is None else getattr(row.train, name)
    return fields


def iterate_records(
    store: RolloutStore, rows: list[RolloutRow], counts: ExportCounts
) -> Iterator[tuple[RolloutRow, dict[str, Any]]]:
    """Yield (row, record) for each row and update ``counts``. The record is {} if it cannot be
    read."""
    for row in rows:
        counts.rollouts += 1
        try:
            yield row, store.record(row.play)
        except NoRecord:
            counts.without_record += 1
            yield row, {}


_ROWS_PER_BATCH = 1000
_TYPES = (
    ("string", "id task group env split failure"),
    (
        "int64",
        "step version length turns attempt branch step_trained train_version train_n_tokens "
        "train_staleness",
    ),
    (
        "float64",
        "time reward seconds train_advantage train_ratio_max train_clip_fraction train_mismatch",
    ),
    ("bool_", "success truncated"),
    ("string", "status message messages record"),
)


def write_parquet(store: RolloutStore, out: Path) -> ExportCounts:
    """Write a Parquet table with a row for each rollout.

    Its columns are the index fields (``flatten_row``), ``status``, ``message``, and two JSON
    strings: the conversation (``messages``) and the whole ``record``. Raises ImportError if pyarrow
    is not installed.
    """
    try:
        import pyarrow as arrow  # type: ignore[import-not-found]
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(f"pyarrow is not installed: {install_command('parquet')}") from None
    schema = arrow.schema(
        [(name, getattr(arrow, kind)()) for kind, names in _TYPES for name in names.split()]
    )
    counts = ExportCounts()
    records = iterate_records(store, sort_rows(store), counts)
    with (
        atomic_file(out) as partial,
        parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
    ):
        while batch := list(islice(records, _ROWS_PER_BATCH)):
            table = [
                flatten_row(row)
                | {name: _text(record.get(name)) for name in ("status", "message")}
                | {
                    "messages": encode_record(record.get("messages")).decode(),
                    "record": encode_record(record).decode(),
                }
                for row, record in batch
            ]
            writer.write_table(arrow.Table.from_pylist(table, schema))
    return counts


def _text(value: object) -> str | None:
    return repair_text(value) if isinstance(value, str) else None


_MODEL = "realhf/policy"
_ROLES = ("system", "user", "assistant", "tool")


def write_inspect(store: RolloutStore, out: Path) -> ExportCounts:
    """Write logs for Inspect into the folder ``out``: ``train.eval`` for training, and
    ``eval-<name>-step<k>.eval`` for each evaluation.

    A sample in a log is a task instance, and each of its epochs is a rollout. Scores are ``reward``
    and ``success``. A failed rollout has an error and no score.
    """
    counts = ExportCounts()
    out.mkdir(parents=True, exist_ok=True)
    logs: dict[str, list[RolloutRow]] = {}
    for row in sort_rows(store):
        play = row.play
        name = TRAIN if play.split == TRAIN else f"{play.split.replace('/', '-')}-step{play.step}"
        logs.setdefault(shorten_text(name.replace("/", "-")), []).append(row)
    for name, rows in sorted(logs.items()):
        _write_log(store, out / f"{name}.eval", name, rows, counts)
    return counts


def _write_log(
    store: RolloutStore, path: Path, name: str, rows: list[RolloutRow], counts: ExportCounts
) -> None:
    began = min(row.play.time for row in rows)
    ended = max(row.play.time for row in rows)
    header = _build_header(store, name, rows, _format_time(began), _format_time(ended))
    summaries: list[dict[str, Any]] = []
    with (
        atomic_file(path) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
    ):
        _add_json(
            file, "_journal/start.json", {key: header[key] for key in ("version", "eval", "plan")}
        )
        epochs: dict[str, int] = {}
        for row, record in iterate_records(store, rows, counts):
            sample = _safe_sample_name(row.play.sample)
            epochs[sample] = epochs.get(sample, 0) + 1
            entry = _build_sample(row, record, sample, epochs[sample])
            _add_json(file, f"samples/{sample}_epoch_{epochs[sample]}.json", entry)
            summaries.append(_sample_summary(entry))
        _add_json(file, "summaries.json", summaries)
        _add_json(file, "header.json", header)


def _build_header(
    store: RolloutStore, name: str, rows: list[RolloutRow], began: str, ended: str
) -> dict[str, Any]:
    samples = list(dict.fromkeys(_safe_sample_name(row.play.sample) for row in rows))
    valid = [row.play for row in rows if row.play.failure is None]
    environments = dict.fromkeys(shorten_text(row.play.env) for row in rows if row.play.env)
    run = hashlib.blake2b(f"{store.folder}/{name}".encode(), digest_size=12).hexdigest()
    scores = [
        _build_score(
            score, [float(getattr(play, score) or 0.0) for play in valid], len(rows) - len(valid)
        )
        for score in ("reward", "success")
    ]
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": run,
            "run_id": run,
            "created": began,
            "task": f"{'+'.join(environments) or 'rollouts'}/{name}",
            "task_id": run,
            "task_version": 0,
            "dataset": {"name": name, "samples": len(samples), "sample_ids": samples},
            "model": _MODEL,
            "model_args": {},
            "task_args": {},
            "config": {"epochs": max(1, len(rows) // max(1, len(samples)))},
            "metadata": {"run": str(store.folder.parent)},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {"total_samples": len(rows), "completed_samples": len(valid), "scores": scores},
        "stats": {"started_at": began, "completed_at": ended, "model_usage": {}},
    }


def _build_score(name: str, values: list[float], failed: int) -> dict[str, Any]:
    mean = sum(values) / len(values) if values else 0.0
    return {
        "name": name,
        "scorer": name,
        "scored_samples": len(values),
        "unscored_samples": failed,
        "params": {},
        "metrics": {"mean": {"name": "mean", "value": mean, "params": {}}},
    }


def _build_sample(
    row: RolloutRow, record: Mapping[str, Any], sample: str, epoch: int
) -> dict[str, Any]:
    play = row.play
    messages = list(_iterate_messages(record.get("messages") or [], play.id))
    first = next(
        (number for number, each in enumerate(messages) if each["role"] == "assistant"),
        len(messages),
    )
    last_turn = next((each for each in reversed(messages) if each["role"] == "assistant"), None)
    choices = (
        [{"message": last_turn, "stop_reason": "max_tokens" if play.truncated else "stop"}]
        if last_turn
        else []
    )
    entry: dict[str, Any] = {
        "id": sample,
        "epoch": epoch,
        "input": messages[:first] or str(play.task),
        "target": "",
        "messages": messages,
        "output": {"model": _MODEL, "choices": choices},
        "scores": {}
        if play.failure
        else {"reward": {"value": play.reward}, "success": {"value": int(play.success)}},
        "metadata": flatten_row(row)
        | {"turn_rewards": [turn.get("reward") for turn in record.get("turns") or []]},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
        "total_time": play.seconds,
    }
    if play.failure:
        text = f"{play.failure}: {record.get('message') or ''}"
        entry["error"] = {"message": text, "traceback": "", "traceback_ansi": ""}
    return entry


def _iterate_messages(messages: list[Any], id: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a conversation in Inspect's format."""
    for number, message in enumerate(messages):
        role = message.get("role") if message.get("role") in _ROLES else "user"
        content = message.get("content")
        entry: dict[str, Any] = {
            "id": f"{id}/{number}",
            "role": role,
            "content": content if isinstance(content, str) else json.dumps(content),
        }
        if role == "assistant":
            entry |= {"source": "generate", "model": _MODEL}
            if message.get("reasoning"):
                parts = [{"type": "reasoning", "reasoning": message["reasoning"]}]
                entry["content"] = [*parts, {"type": "text", "text": entry["content"]}]
            if message.get("tool_calls"):
                entry["tool_calls"] = [
                    {
                        "id": call.get("id") or f"{id}/{number}/{place}",
                        "function": call.get("name") or "",
                        "arguments": call["arguments"]
                        if isinstance(call.get("arguments"), dict)
                        else {},
                        "parse_error": call.get("problem"),
                        "type": "function",
                    }
                    for place, call in enumerate(message["tool_calls"])
                    if isinstance(call, dict)
                ]
        elif role == "tool":
            entry |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
        yield entry


def _sample_summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    summary = {
        name: sample[name] for name in ("id", "epoch", "input", "target", "scores", "total_time")
    }
    metadata = {
        name: value
        for name, value in sample["metadata"].items()
        if isinstance(value, (str, int, float))
    }
    return summary | {
        "metadata": metadata,
        "completed": True,
        "error": sample["error"]["message"] if "error" in sample else None,
        "message_count": len(sample["messages"]),
    }


def _safe_sample_name(sample: str) -> str:
    """Return a file name within a log for a sample: its id or, if the id is too long or contains
    unsafe characters, a part of it and a hash."""
    safe = "".join(
        each if each.isascii() and (each.isalnum() or each in "-_@") else "_" for each in sample
    )[:80]
    if safe == sample:
        return sample
    return f"{safe}-{hashlib.blake2b(sample.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}"


def _add_json(file: zipfile.ZipFile, name: str, value: Any) -> None:
    file.writestr(name, json.dumps(to_plain(value, text=repair_text)))


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class ExportFailed(Exception):
    """Raised if rollouts cannot be exported. The message contains the reason and a remedy."""


def export(run: Path, kind: str, out: Path) -> ExportCounts:
    """Write the rollouts of the folder ``run`` as ``kind`` (one of KINDS) to ``out``.

    out: a file or, for ``inspect``, a folder. Files are written completely or not at all. Raises
    ExportFailed.
    """
    if kind not in KINDS:
        raise ExportFailed(f"--to {kind}: unknown (known: {', '.join(KINDS)})")
    store = RolloutStore(run)
    store.refresh()
    if not store.play.lines:
        raise ExportFailed("; ".join(store.problems) or f"{store.folder}: no rollout was kept")
    try:
        return KINDS[kind](store, out)
    except (OSError, ImportError) as error:
        raise ExportFailed(f"{out}: {error}") from error


def write_jsonl(store: RolloutStore, out: Path) -> ExportCounts:
    """Write a JSON line for each rollout, with the index fields (``flatten_row``) and the
    ``record``.

    If a rollout's tokens were recorded in training, the trainer's data about them is included as
    ``trained``.
    """
    counts = ExportCounts()
    with atomic_file(out) as partial, partial.open("wb") as file:
        for row, record in iterate_records(store, sort_rows(store), counts):
            line = flatten_row(row) | {"record": record}
            if row.train is not None and row.train.has_tokens:
                try:
                    line["trained"] = store.record(row.train)
                except NoRecord:
                    counts.without_record += 1
            file.write(encode_record(line) + b"\n")
    return counts


KINDS: MappingProxyType[str, Callable[[RolloutStore, Path], ExportCounts]] = MappingProxyType(
    {"jsonl": write_jsonl, "parquet": write_parquet, "inspect": write_inspect}
)


def export_command(arguments: Sequence[str]) -> int:
    """Run the command ``export`` with these ``arguments``, which exports the rollouts of a run.

    Returns the exit code: 0, or 1 after an error, which is printed as one line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view export",
        description="Write the rollouts of a run for other programs.",
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", choices=[*KINDS], required=True, help="the format")
    parser.add_argument("out", type=Path, metavar="OUT", help="a file; for inspect a folder")
    options = parser.parse_args(arguments)
    try:
        counts = export(options.run, options.to, options.out)
    except ExportFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    unreadable = (
        f"; of {counts.without_record} the record cannot be read" if counts.without_record else ""
    )
    print(f"{counts.rollouts} rollouts in {options.out}{unreadable}")
    return 0
