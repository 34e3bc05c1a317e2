"""What a resumed run reads of W&B's offline logs; with W&B's own records in ``test_real_trackers.py``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.monitor.trackers import logs_of, taken_back

BLOCK = 32768


def piece(data: bytes, kind: int) -> bytes:
    return b"sums" + len(data).to_bytes(2, "little") + bytes([kind]) + data


def log_of(*rows: dict[str, Any]) -> bytes:
    """A log whose records are JSON, cut into pieces at the ends of blocks."""
    log = b":W&B\0\0\0"
    for row in rows:
        data, first = json.dumps(row).encode(), True
        while data or first:
            room = BLOCK - len(log) % BLOCK
            if room < 7:
                log += bytes(room)
                continue
            part, data = data[: room - 7], data[room - 7 :]
            log += piece(part, (1 if first else 4) if not data else (2 if first else 3))
            first = False
    return log


def parse(data: bytes) -> Any:
    row = json.loads(data)
    items = [SimpleNamespace(key="", nested_key=[name], value_json=json.dumps(value)) for name, value in row.items()]
    return SimpleNamespace(HasField=lambda name: name == "history", history=SimpleNamespace(item=items))


def write(run: Path, log: bytes, at: str = "20260101_000000") -> Path:
    folder = run / "wandb" / f"offline-run-{at}-abc"
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(log)
    return folder / "run-abc.wandb"


ROWS = [{"step": step, "loss": 0.5, "text": "x" * 15_000} for step in range(1, 8)]


def test_steps_that_are_made_again_are_cut_off_and_those_before_are_known(tmp_path: Path) -> None:
    log = write(tmp_path, log_of(*ROWS) + b"torn")
    later = write(tmp_path, log_of({"config": 1}, {"step": 3, "late": 1.0}), at="20260102_000000")
    assert logs_of(tmp_path, "abc") == [log, later] and logs_of(tmp_path, "ab") == []
    kept = taken_back([log, later], 5, parse)
    assert kept["loss"] == {1, 2, 3, 4} and kept["late"] == {3}
    assert log.read_bytes() == log_of(*ROWS[:4])
    assert taken_back([log, later], 5, parse) == kept


@pytest.mark.parametrize("fault", ["sent", "nonsense", "gone"])
def test_a_log_that_is_not_ours_to_cut_stays(tmp_path: Path, fault: str) -> None:
    content = log_of(*ROWS) if fault != "nonsense" else b"\1" * 70_000
    log = write(tmp_path, content)
    if fault == "sent":
        log.with_name("run-abc.wandb.synced").touch()
    if fault == "gone":
        log.unlink()
    assert set(taken_back([log], 5, parse)) == ({"step", "loss", "text"} if fault == "sent" else set())
    assert fault == "gone" or log.read_bytes() == content
