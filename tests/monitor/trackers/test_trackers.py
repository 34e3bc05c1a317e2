"""One stream for every tracker: none of them can hold up or end a run; what W&B keeps offline is
read back."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api.config import TRACKERS, MonitorConfig
from realhf.monitor import trackers
from realhf.monitor.events import EventStream
from realhf.monitor.run_log import RunLog
from realhf.monitor.trackers import (
    ADAPTERS,
    RunInfo,
    TrackerStream,
    _clean_name,
    find_logs,
    flatten_config,
    run_info,
    truncate_logs,
)

PATIENCE_S = 60.0


class Kept:
    """A tracker that keeps what it gets, and breaks when it gets ``bad``."""

    def __init__(self, facts: RunInfo, bad: str = "") -> None:
        self.facts = facts
        self.bad = bad
        self.got = list[Any]()
        self.closed = threading.Event()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if self.bad in values:
            raise OSError("no such host\nand more")
        self.got.append((step, dict(values)))

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        self.got.append((step, list(texts)))

    def close(self, failed: bool) -> None:
        self.got.append(failed)
        self.closed.set()


def opened(
    folder: Path, completed: int = 0, **bad: str
) -> tuple[TrackerStream, dict[str, Kept], list[str]]:
    made = dict[str, Kept]()
    warnings = list[str]()

    def adapter(name: str) -> Any:
        return lambda facts: made.setdefault(name, Kept(facts, bad[name]))

    adapters = {name: adapter(name) for name in bad}
    return (
        TrackerStream(
            folder, list(bad), completed_steps=completed, warn=warnings.append, adapters=adapters
        ),
        made,
        warnings,
    )


def test_each_gets_everything_in_order_and_numbers_only(tmp_path: Path) -> None:
    log, made, warnings = opened(tmp_path, one="never", two="never")
    log.metrics(1, {"a": 1, "nan": float("nan"), "text": "x"})
    log.rollouts(1, ["a transcript"])
    log.metrics(0, {"late": 2.0})
    log.close(failed=True)
    for tracker in (made["one"], made["two"]):
        assert tracker.got == [(1, {"a": 1.0}), (1, ["a transcript"]), (0, {"late": 2.0}), True]
    assert not warnings


def test_one_that_fails_is_left_out_and_named_once(tmp_path: Path) -> None:
    log, made, warnings = opened(tmp_path, good="never", bad="b")
    for step in range(1, 4):
        log.metrics(step, {"b": 1.0})
    log.close()
    assert (
        made["good"].got[:3] == [(step, {"b": 1.0}) for step in (1, 2, 3)]
        and made["good"].closed.is_set()
    )
    assert warnings == [
        "monitor.trackers: bad is left out from now on: OSError: no such host; it lacks what came "
        "from step 1 on"
    ]


def test_one_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    monkeypatch.setattr(trackers, "MAX_QUEUED", 5)
    release = threading.Event()
    warnings = list[str]()

    def hang(facts: RunInfo) -> Kept:
        assert release.wait(PATIENCE_S)
        return Kept(facts)

    try:
        log = TrackerStream(
            tmp_path, ["slow"], completed_steps=0, warn=warnings.append, adapters={"slow": hang}
        )
        for step in range(20):
            log.metrics(step, {"a": 1.0})
        log.close()
        assert len(warnings) == 1 and "5 entries behind" in warnings[0]
        other = TrackerStream(
            tmp_path, ["slow"], completed_steps=0, warn=warnings.append, adapters={"slow": hang}
        )
        other.close()
        assert len(warnings) == 2 and "was not done" in warnings[1]
    finally:
        release.set()


def test_a_resumed_run_has_its_id_and_a_fresh_one_another(tmp_path: Path) -> None:
    first, resumed, afresh = (run_info(tmp_path, completed) for completed in (0, 5, 0))
    assert first.id == resumed.id != afresh.id and resumed.resumed and not first.resumed
    resumed.store_name("mlflow", "abc")
    assert (
        run_info(tmp_path, 7).stored_name("mlflow") == "abc"
        and run_info(tmp_path, 0).stored_name("mlflow") is None
    )
    (tmp_path / "trackers.json").write_text("[torn")
    assert run_info(tmp_path, 7).id


def test_a_package_that_is_missing_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"monitor\.trackers has mlflow.*pip install -e '.*\[mlflow\]'"
    ):
        TrackerStream(tmp_path, ["mlflow"], completed_steps=0, warn=print)


def test_every_choice_has_an_adapter() -> None:
    assert set(TRACKERS) == set(ADAPTERS) and MonitorConfig().trackers == ["tensorboard"]


def test_a_configuration_becomes_flat_and_names_stay_in_their_folder() -> None:
    assert flatten_config({"a": {"b": 1, "c": {}}, "d": [1, "x"], "e": "t"}) == {
        "a.b": "1",
        "a.c": "{}",
        "d": '[1, "x"]',
        "e": "t",
    }
    assert (
        _clean_name("success/../../etc:x<>/a") == "success/etc_x__/a"
        and _clean_name("../..") == "_"
    )


def test_tensorboard_reads_what_a_run_logs_without_torch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "config.yaml").write_text("seed: 3\n")
    output = io.StringIO()
    log = RunLog(tmp_path, MonitorConfig(), EventStream(output), completed_steps=0, total_steps=2)
    log.record_step(1, {"policy/loss": 0.5, "broken": float("nan")}, ["a transcript"])
    log.record_evaluation(1, {"sampled": {"overall": {"success": 0.5, "episodes": 3}}})
    log.record_step(2, {"policy/loss": 0.25}, [])
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [
        (1, 0.5),
        (2, 0.25),
    ]
    assert set(events.Tags()["scalars"]) == {"policy/loss", "eval/heldout/sampled/success/overall"}
    assert "warning" not in {json.loads(line)["kind"] for line in output.getvalue().splitlines()}


BLOCK = 32768


def piece(data: bytes, kind: int) -> bytes:
    return b"sums" + len(data).to_bytes(2, "little") + bytes([kind]) + data


def log_of(*rows: dict[str, Any]) -> bytes:
    """A log whose records are JSON, cut into pieces at the ends of blocks."""
    log = b":W&B\0\0\0"
    for row in rows:
        data = json.dumps(row).encode()
        first = True
        while data or first:
            room = BLOCK - len(log) % BLOCK
            if room < 7:
                log += bytes(room)
                continue
            part = data[: room - 7]
            data = data[room - 7 :]
            log += piece(part, (1 if first else 4) if not data else (2 if first else 3))
            first = False
    return log


def parse(data: bytes) -> Any:
    row = json.loads(data)
    items = [
        SimpleNamespace(key="", nested_key=[name], value_json=json.dumps(value))
        for name, value in row.items()
    ]
    return SimpleNamespace(
        HasField=lambda name: name == "history", history=SimpleNamespace(item=items)
    )


def write(run: Path, log: bytes, at: str = "20260101_000000") -> Path:
    folder = run / "wandb" / f"offline-run-{at}-abc"
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").write_bytes(log)
    return folder / "run-abc.wandb"


ROWS = [{"step": step, "loss": 0.5, "text": "x" * 15_000} for step in range(1, 8)]


def test_steps_that_are_made_again_are_cut_off_and_those_before_are_known(tmp_path: Path) -> None:
    log = write(tmp_path, log_of(*ROWS) + b"torn")
    later = write(tmp_path, log_of({"config": 1}, {"step": 3, "late": 1.0}), at="20260102_000000")
    assert find_logs(tmp_path, "abc") == [log, later] and find_logs(tmp_path, "ab") == []
    kept = truncate_logs([log, later], 5, parse)
    assert kept["loss"] == {1, 2, 3, 4} and kept["late"] == {3}
    assert log.read_bytes() == log_of(*ROWS[:4])
    assert truncate_logs([log, later], 5, parse) == kept


@pytest.mark.parametrize("fault", ["sent", "nonsense", "gone"])
def test_a_log_that_is_not_ours_to_cut_stays(tmp_path: Path, fault: str) -> None:
    content = log_of(*ROWS) if fault != "nonsense" else b"\1" * 70_000
    log = write(tmp_path, content)
    if fault == "sent":
        log.with_name("run-abc.wandb.synced").touch()
    if fault == "gone":
        log.unlink()
    assert set(truncate_logs([log], 5, parse)) == (
        {"step", "loss", "text"} if fault == "sent" else set()
    )
    assert fault == "gone" or log.read_bytes() == content
