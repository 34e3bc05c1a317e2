"""What the timeline shows of a trace."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.trace import STEP
from realhf.monitor.host_lanes import PLACEMENTS_FILE, HostLanes, Placement, note_placement
from realhf.monitor.report import write_report
from realhf.monitor.timeline import Window, innermost, last_steps, plot_timeline, work_of
from realhf.monitor.trace import TraceWriter, open_trace
from realhf.monitor.trace_files import merge_traces
from realhf.monitor.trace_format import INSTANT

T0_US = 1_800_000_000_000_000


def record(tracer: TraceWriter, name: str, began_s: float, ended_s: float, line: str = "main") -> None:
    tracer.record(name, T0_US * 1000 + round(began_s * 1e9), T0_US * 1000 + round(ended_s * 1e9), line=line)


def end_of_step(tracer: TraceWriter, step: int, at_s: float) -> None:
    at_ns = T0_US * 1000 + round(at_s * 1e9)
    tracer._add((INSTANT, STEP, at_ns, at_ns, "main", {"step": step}))


def window(began_s: float, ended_s: float) -> Window:
    return Window(T0_US + round(began_s * 1e6), T0_US + round(ended_s * 1e6))


def test_the_last_steps_bound_the_window(tmp_path: Path):
    assert last_steps(tmp_path, 2) is None and not plot_timeline(tmp_path, tmp_path / "t.png")
    with open_trace(tmp_path, "model_worker/0") as worker:
        record(worker, "train", 1.0, 2.0)
        record(worker, "train", 90.0, 100.0)
    assert last_steps(tmp_path, 2) == window(40.0, 100.0)
    with open_trace(tmp_path, "master") as master:
        for step, at_s in ((7, 20.0), (8, 30.0), (9, 45.0)):
            end_of_step(master, step, at_s)
    found = last_steps(tmp_path, 2)
    assert found == Window(T0_US + 20_000_000, T0_US + 45_000_000, [(T0_US + 30_000_000, 8), (T0_US + 45_000_000, 9)])
    everything = last_steps(tmp_path, 10)
    assert everything is not None and everything.began == T0_US + 1_000_000 and len(everything.steps) == 3


def test_bins_hold_the_busy_lines_of_every_kind(tmp_path: Path):
    with open_trace(tmp_path, "rollout_worker/0") as rollout:
        record(rollout, "generate", 0.0, 5.0, "slot 0")
        record(rollout, "env/step", 5.0, 10.0, "slot 0")
        record(rollout, "generate", 0.0, 2.5, "slot 1")
        record(rollout, "surprise", 9.0, 99.0, "slot 1")
        record(rollout, "generate", 50.0, 60.0, "slot 2")
    with open_trace(tmp_path, "master"):
        pass
    work = work_of(tmp_path, window(0.0, 10.0), n_bins=4)
    assert list(work) == [("", "master"), ("", "rollout_worker/0")]
    assert not work["", "master"].busy and work["", "master"].most == 0
    busy = work["", "rollout_worker/0"].busy
    assert set(busy) == {"generate", "env", "other"}
    np.testing.assert_allclose(busy["generate"], [2, 1, 0, 0])
    np.testing.assert_allclose(busy["env"], [0, 0, 1, 1])
    np.testing.assert_allclose(busy["other"], [0, 0, 0, 0.4])
    assert work["", "rollout_worker/0"].most == 2


def test_waiting_within_work_is_no_work(tmp_path: Path):
    with open_trace(tmp_path, "model_worker/0") as worker:
        record(worker, "train", 0.0, 10.0)
        record(worker, "wait", 2.0, 8.0)
        record(worker, "weights", 8.0, 9.0)
    busy = work_of(tmp_path, window(0.0, 10.0), n_bins=10)["", "model_worker/0"].busy
    np.testing.assert_allclose(busy["train"], [1, 1, 0, 0, 0, 0, 0, 0, 0, 1], atol=1e-9)
    np.testing.assert_allclose(busy["wait"].sum(), 6)
    np.testing.assert_allclose(busy["weights"].sum(), 1)


SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from("abc")).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    ),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(SPANS)
def test_the_innermost_spans_cover_the_same_time_once(spans: list[tuple[int, int, str]]):
    parts = list(innermost(spans))
    covered = [moment for began, ended, _ in parts for moment in range(began, ended)]
    assert sorted(covered) == sorted({moment for began, ended, _ in spans for moment in range(began, ended)})
    for began, ended, kind in parts:
        assert all(
            any(first <= moment < last and kind == name for first, last, name in spans)
            for moment in range(began, ended)
        )


def test_the_innermost_span_wins():
    assert list(innermost([(0, 10, "out"), (2, 6, "in"), (3, 4, "deep"), (12, 13, "late")])) == [
        (0, 2, "out"),
        (2, 3, "in"),
        (3, 4, "deep"),
        (4, 6, "in"),
        (6, 10, "out"),
        (12, 13, "late"),
    ]


@pytest.mark.parametrize("with_steps", [True, False])
def test_the_picture_is_drawn(tmp_path: Path, with_steps: bool):
    with open_trace(tmp_path, "master") as master, open_trace(tmp_path, "rollout_worker/0") as rollout:
        for slot in range(3):
            record(rollout, "env/step", 0.0, 3.0, f"slot {slot}")
        if with_steps:
            end_of_step(master, 1, 2.0)
    assert plot_timeline(tmp_path, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_process_that_moves_has_a_row_on_each_host(tmp_path: Path):
    """The launcher's machine comes first. A line that a kill cut off is no obstacle."""
    with open_trace(tmp_path, "rollout_worker/0") as rollout:
        record(rollout, "generate", 1.0, 2.0)
        record(rollout, "generate", 6.0, 10.0)
    with open_trace(tmp_path, "master") as master:
        record(master, "train", 0.0, 1.0)
        end_of_step(master, 1, 10.0)
    rows = [(0.5, "b", "rollout_worker/0", ""), (3.0, "b", "", "cut <off>"), (5.0, "a", "rollout_worker/0", "")]
    text = b"".join(
        msgspec.json.encode(Placement(T0_US / 1e6 + at, host, process, lost)) + b"\n"
        for at, host, process, lost in rows
    )
    (tmp_path / PLACEMENTS_FILE).write_bytes(text + b'{"at": 1, "ho')
    note_placement(tmp_path, "launcher", "master")
    lanes = HostLanes(tmp_path)
    assert lanes.hosts == ["a", "b"], "the cut line has swallowed the one after it"
    note_placement(tmp_path, "launcher", "master")
    work = work_of(tmp_path, window(0.0, 10.0), n_bins=10)
    assert [*work] == [("launcher", "master"), ("a", "rollout_worker/0"), ("b", "rollout_worker/0")]
    np.testing.assert_allclose(work["b", "rollout_worker/0"].busy["generate"].sum(), 1.0)
    np.testing.assert_allclose(work["a", "rollout_worker/0"].busy["generate"].sum(), 4.0)
    assert plot_timeline(tmp_path, tmp_path / "t.png")
    page = write_report(tmp_path).read_text()
    assert "<td>b</td><td>rollout_worker/0</td><td>08:00:03 UTC, cut &lt;off&gt;</td>" in page
    trace = merge_traces(tmp_path)
    assert trace is not None
    labels = [
        event["args"]["labels"] for event in json.loads(trace.read_text())["traceEvents"] if "labels" in str(event)
    ]
    assert labels == ["host launcher", "host a, b"]
