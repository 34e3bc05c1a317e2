"""The trace as columns: processes and lines by name, steps, what was added, and forgetting the oldest."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realhf.monitor.run_files import note_placement
from realhf.monitor.trace import TraceWriter, file_of
from realhf.view.run_data import RunSpans

TYPES = {"u8": np.uint8, "i32": np.int32, "f64": np.float64, "f32": np.float32, "u16": np.uint16, "u32": np.uint32}


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    assert (4 + length) % 8 == 0
    arrays = {
        name: np.frombuffer(data, TYPES[place["kind"]], place["length"], 4 + length + place["offset"])
        for name, place in header["arrays"].items()
    }
    return header, arrays


def test_spans_carry_their_names_and_only_new_ones_are_sent(tmp_path: Path):
    tracer = TraceWriter(file_of(tmp_path, "model_worker/0"), "model_worker/0")
    tracer.record("train/actor_train", 10_000_000_000, 12_000_000_000)
    tracer.record("sample", 11_000_000_000, 11_500_000_000, line="player 1", id="s-7")
    tracer.instant("step", step=4)
    tracer.close()
    spans = RunSpans(tmp_path)
    header, arrays = unpacked(spans.packed(0, 0))
    assert header["processes"] == [{"pid": 3000, "name": "model_worker/0"}]
    names = [header["names"][number] for number in arrays["name"]]
    samples = [header["samples"][number] for number in arrays["sample"]]
    began = (arrays["began"] + header["base"]).round(6).tolist()
    found = sorted(zip(names, samples, began, arrays["seconds"].tolist(), strict=True))
    assert found == [("sample", "s-7", 11.0, 0.5), ("train/actor_train", "", 10.0, 2.0)]
    assert [step for _, step in header["steps"]] == [4]
    again, arrays = unpacked(spans.packed(header["epoch"], 2))
    assert (again["start"], len(arrays["began"])) == (2, 0)


def test_processes_of_several_hosts_stand_by_their_host(tmp_path: Path):
    for process in ("rollout_worker/0", "model_worker/0", "master"):
        TraceWriter(file_of(tmp_path, process), process).close()
    for host, process in (("b", "rollout_worker/0"), ("b", "model_worker/0"), ("c", "rollout_worker/0")):
        note_placement(tmp_path, host, process)
    header, _ = unpacked(RunSpans(tmp_path).packed(0, 0))
    names = [process["name"] for process in header["processes"]]
    assert names == ["launcher · master", "b · model_worker/0", "c · rollout_worker/0"]


def test_lines_without_sense_are_left_out(tmp_path: Path):
    (tmp_path / "trace").mkdir()
    text = '{"name": 3}\nnonsense\n{"name":"a","ph":"X","ts":5,"pid":1,"tid":1,"dur":-4}\n'
    (tmp_path / "trace" / "x.jsonl").write_text(text)
    _, arrays = unpacked(RunSpans(tmp_path).packed(0, 0))
    assert arrays["seconds"].tolist() == [0.0]


def test_of_too_many_spans_the_older_half_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("realhf.view.run_data.MOST_SPANS", 10)
    (tmp_path / "trace").mkdir()
    event = {"name": "a", "ph": "X", "pid": 1, "tid": 1, "dur": 1}
    (tmp_path / "trace" / "x.jsonl").write_text("".join(json.dumps(event | {"ts": ts}) + "\n" for ts in range(1, 12)))
    header, arrays = unpacked(RunSpans(tmp_path).packed(0, 0))
    assert len(arrays["began"]) == 6
    assert header["epoch"] == 1
