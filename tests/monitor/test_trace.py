"""The trace of a run: cheap to record, whole after a kill, one file that Perfetto opens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.monitor import trace
from realhf.monitor.run_files import PLACEMENTS_FILE, HostLanes, Placement, record_placement
from realhf.monitor.trace import (
    Lanes,
    TraceWriter,
    line_number,
    merge_traces,
    process_number,
    trace_path,
)

MS = 1_000_000


def merged(run_dir: Path) -> list[dict[str, Any]]:
    path = merge_traces(run_dir)
    assert path is not None
    return json.loads(path.read_text())["traceEvents"]


def names(events: list[dict[str, Any]], kind: str) -> dict[int, str]:
    """{number: name} of processes or lines."""
    number = "pid" if kind == "process_name" else "tid"
    return {event[number]: event["args"]["name"] for event in events if event["name"] == kind}


def writer(run_dir: Path, process: str, **options: Any) -> TraceWriter:
    return TraceWriter(trace_path(run_dir, process), process, **options)


def test_two_processes_become_one_file(tmp_path: Path):
    with writer(tmp_path, "master") as master, writer(tmp_path, "rollout_worker/0") as rollout:
        with master.span("train", step=1), master.span("train/inner"):
            pass
        rollout.record("env/step", 5 * MS, 7 * MS, line="slot 3", id="a")
        rollout.instant("weights", version=2)
        rollout.counter("episodes", running=4.0, broken=float("nan"))
    events = merged(tmp_path)
    assert sorted(names(events, "process_name").values()) == ["master", "rollout_worker/0"]
    assert {"MainThread", "slot 3"} <= set(names(events, "thread_name").values())
    by_name = {event["name"]: event for event in events}
    step = by_name["env/step"]
    assert (step["ph"], step["ts"], step["dur"], step["args"]) == ("X", 5000, 2000, {"id": "a"})
    assert (step["pid"], step["tid"]) == (4000, line_number("rollout_worker/0", "slot 3"))
    assert by_name["weights"]["ph"] == "i" and by_name["weights"]["args"] == {"version": 2}
    assert by_name["episodes"]["ph"] == "C" and by_name["episodes"]["args"] == {"running": 4.0}
    outer = by_name["train"]
    inner = by_name["train/inner"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert by_name["train"]["args"] == {"step": 1} and "args" not in by_name["train/inner"]


def test_no_two_processes_have_one_number():
    processes = [
        f"{kind}/{index}"
        for kind in ("model_worker", "rollout_worker", "generation", "env", "mine")
        for index in range(50)
    ] + ["launch", "master", "mine/x", "env/x"]
    numbers = [process_number(name) for name in processes]
    assert len(set(numbers)) == len(numbers) and all(0 < number < 2**31 for number in numbers)
    assert line_number("env/0", "MainThread") != line_number("env/1", "MainThread")


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30).map(
    lambda drawn: sorted(
        ((began, began + length) for began, length in drawn), key=lambda span: span[1]
    )
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(SPANS)
def test_spans_of_one_lane_are_nested_or_apart(spans: list[tuple[int, int]]):
    lanes = Lanes()
    placed = {}
    for span in spans:
        placed.setdefault(lanes.assign("main", *span), []).append(span)
    for lane in placed.values():
        for began, ended in lane:
            assert all(
                last <= began
                or ended <= first
                or (first <= began and ended <= last)
                or (began <= first and last <= ended)
                for first, last in lane
            )


def test_spans_of_coroutines_take_lanes_of_their_own(tmp_path: Path):
    async def work(tracer: TraceWriter, number: int) -> None:
        for _ in range(3):
            with tracer.span("env/step", number=number):
                await asyncio.sleep(0.002)

    async def everything(tracer: TraceWriter) -> None:
        with tracer.span("train"):
            await asyncio.gather(*(work(tracer, number) for number in range(3)))

    with writer(tmp_path, "rollout_worker/0") as tracer:
        asyncio.run(everything(tracer))
    events = merged(tmp_path)
    assert set(names(events, "thread_name").values()) >= {
        "MainThread",
        "MainThread (2)",
        "MainThread (3)",
    }
    assert len([event for event in events if event["name"] == "env/step"]) == 9


def test_a_span_that_fails_is_recorded_and_raises(tmp_path: Path):
    with (
        writer(tmp_path, "master") as tracer,
        pytest.raises(KeyError),
        tracer.span("train", step=1),
    ):
        raise KeyError("x")
    assert [event["args"] for event in merged(tmp_path) if event["name"] == "train"] == [
        {"step": 1, "error": "KeyError"}
    ]


@pytest.mark.slow
def test_every_thread_has_its_line_and_loses_nothing(tmp_path: Path):
    with writer(tmp_path, "generation/0") as tracer:

        def work() -> None:
            for number in range(2000):
                with tracer.span("generate", number=number):
                    pass

        threads = [threading.Thread(target=work, name=f"engine {index}") for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = merged(tmp_path)
    lines = names(events, "thread_name")
    for index in range(4):
        mine = [
            event["args"]["number"]
            for event in events
            if event["name"] == "generate" and lines[event["tid"]] == f"engine {index}"
        ]
        assert mine == list(range(2000))


KILLED = """
import sys, time
from pathlib import Path
from realhf.monitor.trace import TraceWriter
tracer = TraceWriter(Path(sys.argv[1]), "rollout_worker/0")
number = 0
while True:
    tracer.instant("beat", number=number)
    number += 1
    if number == 2000:
        print("going", flush=True)
    if number > 2000:
        time.sleep(0.0005)
"""


@pytest.mark.slow
def test_what_was_written_outlives_a_kill_and_the_next_process_goes_on(tmp_path: Path):
    path = trace_path(tmp_path, "rollout_worker/0")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"going\n"
        deadline = time.monotonic() + 60
        while b'"number":1999}' not in path.read_bytes():
            assert time.monotonic() < deadline, "the events were never written"
            time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        child.stdout.close()  # type: ignore[union-attr]
    with path.open("ab") as file:
        file.write(b'{"name":"cut","ph":"i","ts":1,"pi')
    with writer(tmp_path, "rollout_worker/0") as tracer:
        tracer.instant("again")
    events = merged(tmp_path)
    numbers = [event["args"]["number"] for event in events if event["name"] == "beat"]
    assert numbers == list(range(len(numbers))) and len(numbers) >= 2000
    assert [event["name"] for event in events][-1] == "again" and "cut" not in {
        event["name"] for event in events
    }
    assert len(names(events, "process_name")) == 1


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written but by the test."""
    monkeypatch.setattr(trace, "FLUSH_INTERVAL_S", 60.0)


@pytest.mark.usefixtures("by_hand")
def test_the_newest_part_is_kept_and_bounded(tmp_path: Path):
    with writer(tmp_path, "master", limit_bytes=100_000) as tracer:
        for number in range(10):
            for _ in range(200):
                tracer.instant("beat", number=number)
            tracer._write_pending()
    sizes = [path.stat().st_size for path in (tmp_path / "trace").iterdir()]
    assert len(sizes) == 2 and max(sizes) < 55_000
    events = merged(tmp_path)
    kept = [event["args"]["number"] for event in events if event["name"] == "beat"]
    assert kept == sorted(kept) and kept[-1] == 9 and len(kept) >= 400
    assert "MainThread" in names(events, "thread_name").values()


@pytest.mark.usefixtures("by_hand")
def test_too_many_events_are_counted_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trace, "MAX_PENDING", 100)
    with writer(tmp_path, "master") as tracer:
        for _ in range(150):
            tracer.instant("beat")
    events = merged(tmp_path)
    assert len([event for event in events if event["name"] == "beat"]) == 100
    assert [event["args"] for event in events if event["name"] == "events left out"] == [
        {"count": 50}
    ]


def test_odd_arguments_do_no_harm(tmp_path: Path):
    with writer(tmp_path, "master") as tracer:
        tracer.instant("path", value=tmp_path)
        tracer.instant("half", value="\udc80")
        tracer.instant("big", value=2**80)
        tracer.instant("after")
        tracer.record("back in time", 5 * MS, 4 * MS)
    by_name = {event["name"]: event for event in merged(tmp_path)}
    assert by_name["path"]["args"] == {"value": str(tmp_path)} and "after" in by_name
    assert len(by_name) == 5 + len({"process_name", "process_sort_index", "thread_name"})
    assert by_name["back in time"]["dur"] == 0


@pytest.mark.usefixtures("by_hand")
def test_a_file_that_cannot_be_written_costs_only_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tracer = writer(tmp_path, "master")
    tracer._file.close()
    for _ in range(3):
        tracer.instant("beat")
        tracer._write_pending()
    tracer.close()
    tracer.instant("late")
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def test_the_command_says_where_to_open_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["trace", str(tmp_path)])
    assert trace.main() == 1 and "no trace" in capsys.readouterr().err
    writer(tmp_path, "master").close()
    assert trace.main() == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "trace.json") in out and "perfetto" in out


def test_a_process_that_moves_is_on_each_host_in_its_time(tmp_path: Path):
    """The launcher's machine comes first. A line that a kill cut off is no obstacle."""
    with writer(tmp_path, "rollout_worker/0") as rollout:
        rollout.instant("beat")
    rows = [
        (0.5, "b", "rollout_worker/0", ""),
        (3.0, "b", "", "cut <off>"),
        (5.0, "a", "rollout_worker/0", ""),
    ]
    text = b"".join(
        msgspec.json.encode(Placement(1000 + at, host, process, lost)) + b"\n"
        for at, host, process, lost in rows
    )
    (tmp_path / PLACEMENTS_FILE).write_bytes(text + b'{"at": 1, "ho')
    record_placement(tmp_path, "launcher", "master")
    assert HostLanes(tmp_path).hosts == ["a", "b"], "the cut line has swallowed the one after it"
    record_placement(tmp_path, "launcher", "master")
    hosts = HostLanes(tmp_path)
    assert hosts.hosts == ["launcher", "a", "b"]
    assert [hosts.host_at("rollout_worker/0", round(1e6 * at)) for at in (1000.6, 1004, 1006)] == [
        "b",
        "b",
        "a",
    ]
    assert hosts.lost == [(1_003_000_000, "b", "cut <off>")]
    labels = [
        event["args"]["labels"] for event in merged(tmp_path) if event["name"] == "process_labels"
    ]
    assert labels == ["host launcher", "host a, b"]
