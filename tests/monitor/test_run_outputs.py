"""What a run writes for people: metrics, TensorBoard, summary, display."""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import resource
import signal
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from realhf.api.config import MonitorConfig
from realhf.base.installation import git_state
from realhf.monitor import display as display_module
from realhf.monitor.display import Display, LiveDisplay, evaluation_line, make_display, step_line
from realhf.monitor.events import EventStream, parse_event
from realhf.monitor.metrics import success_by_group
from realhf.monitor.provenance import package_versions
from realhf.monitor.run_files import Evaluations
from realhf.monitor.run_log import RunLog, flatten_step, read_metrics
from realhf.monitor.summary import build_held_out_table, build_summary, time_split

ROW = {
    "step": 3,
    "time/step": 4.0,
    "throughput/tokens_per_second": 500.0,
    "time/actor_gen": 2.5,
    "time/actor_train": 1.0,
    "time/part/actor_gen/environment": 1.5,
    "time/part/actor_gen/generation": 0.9,
    "time/queue/actor_train": 2.4,
    "reward/mean": 0.6,
    "success/overall": 0.5,
    "success/warmup": 0.75,
    "mismatch/kl": 1e-6,
    "buffer/resident": 16,
}


def report(success: float) -> dict:
    entry = {"success": success, "low": success - 0.1, "high": success + 0.1, "episodes": 400}
    return {
        "sampled": {"overall": entry, "warmup": entry},
        "greedy": {"overall": {**entry, "episodes": 200}},
    }


def quiet() -> MonitorConfig:
    return MonitorConfig(trackers=[])


def test_metrics_after_the_checkpoint_are_dropped_and_written_once(tmp_path: Path):
    log = RunLog(tmp_path, quiet(), EventStream(io.StringIO()), completed_steps=0, total_steps=3)
    for step in (1, 2, 3):
        log.record_step(step, {"loss": float(step)}, [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = RunLog(tmp_path, quiet(), EventStream(io.StringIO()), completed_steps=2, total_steps=3)
    again.record_step(3, {"loss": 30.0}, [])
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_headline_figures():
    assert success_by_group(ROW) == {"warmup": 0.75}
    split = time_split(ROW)
    assert split == pytest.approx(
        {"environment": 1.5, "generation": 0.9, "actor_train": 1.0, "other": 0.6}
    )


def test_step_metrics_are_flat_numbers():
    metrics = flatten_step(
        wall_s=2.0,
        stats={"gen": {"generated_tokens": 100, "episodes": ["text"], "flag": True}},
        times={"gen": {"compute_s": 1.5, "fetch_s": 0.1, "queue_s": 0.2, "call_s": 1.6}},
        tokens={"train": 7},
        buffer={"peak_resident": 4},
        source={"p": 0.5},
        train_calls=["train"],
    )
    assert metrics == {
        "step_seconds": 2.0,
        "gen/generated_tokens": 100.0,
        "seconds/gen": 1.5,
        "fetch_seconds/gen": 0.1,
        "queue_seconds/gen": 0.2,
        "tokens": 100.0,
        "tokens_per_second": 50.0,
        "buffer/resident": 4.0,
        "source/p": 0.5,
    }


def test_summary_has_the_promised_fields_and_totals():
    rows = [{**ROW, "step": step, "throughput/tokens": 2000.0} for step in (1, 2)]
    summary = build_summary(
        rows, report(0.4), report(0.7), wall_seconds=99.0, train_calls=["actor_train"]
    )
    assert summary["heldout_success_before"] == {"overall": 0.4, "warmup": 0.4}
    assert summary["heldout_success_after_greedy"] == {"overall": 0.7}
    assert summary["heldout_episodes"] == 400
    assert (summary["steps"], summary["env_seconds"], summary["generation_seconds"]) == (
        2,
        3.0,
        1.8,
    )
    assert (summary["train_seconds"], summary["tokens_per_second"], summary["wall_seconds"]) == (
        2.0,
        500.0,
        99.0,
    )
    assert summary["mismatch_kl"] == pytest.approx(1e-6)
    assert summary["heldout_interval_after"]["overall"] == pytest.approx([0.6, 0.8])
    json.dumps(summary)


def test_the_closing_table_shows_change_and_number_of_episodes():
    before = report(0.4)
    before["sampled"]["overall"]["episodes"] = 100
    summary = build_summary([ROW], before, report(0.7), wall_seconds=1.0, train_calls=[])
    console = Console(file=io.StringIO(), width=120)
    console.print(build_held_out_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "100, 400" in text
        and "40.0 % [30, 50]" in text
        and "70.0 % [60, 80]" in text
        and "+30.0" in text
    )
    assert (
        build_held_out_table(build_summary([ROW], None, None, wall_seconds=1.0, train_calls=[]))
        is None
    )


def test_groups_that_one_evaluation_has_alone_do_not_break_the_closing_table():
    """A run that went on with other evaluation options ended in a KeyError after all its steps."""
    one = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 40}
    before, after = (
        {"sampled": {"overall": one, name: one}, "greedy": {}} for name in ("early", "late")
    )
    summary = build_summary([ROW], before, after, wall_seconds=1.0, train_calls=[])
    console = Console(file=io.StringIO(), width=120)
    console.print(build_held_out_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in text for name in ("early, sampled", "late, sampled", "+0.0", "40"))


def test_a_group_whose_episodes_all_failed_has_no_success():
    entry = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 40, "failed": 4}
    none = {"success": 0.0, "low": 0.0, "high": 1.0, "episodes": 0, "failed": 4}
    found = {"sampled": {"overall": entry, "away": none}, "greedy": {}}
    summary = build_summary([ROW], found, found, wall_seconds=1.0, train_calls=[])
    assert summary["heldout_success_after"] == {"overall": 0.5}
    line = evaluation_line({"when": "after step 3", "report": {"sampled": found["sampled"]}})
    assert line == "held-out, after step 3:  sampled overall 50.0%, away - (40 episodes, 4 failed)"


def test_a_group_drives_no_terminal():
    """Whoever wrote the environment names its groups: the panel, the table and the line show what
    stands there."""
    entry = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 40}
    found = {"sampled": {"overall": entry, "[/b]\x1b[2J": entry}, "greedy": {}}
    summary = build_summary([ROW], found, found, wall_seconds=1.0, train_calls=[])
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    console.print(build_held_out_table(summary))
    display = LiveDisplay(console, "grpo/x")
    display.show(
        {"kind": "step", "step": 3, "total": 60, "metrics": {**ROW, "success/[/c]\x1b[2J": 0.5}}
    )
    display.show({"kind": "activity", "calls": ["d\x1b[2J"], "resident": 4, "capacity": 16})
    display._live.refresh()
    display.show({"kind": "phase", "text": "e\x1b[2J"})
    display._live.refresh()
    display.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in shown
    assert [part for part in ("[/b]␛[2J", "[/c]␛[2J", "d␛[2J", "e␛[2J") if part not in shown] == []


@pytest.mark.slow
def test_a_run_log_remembers_where_it_began(tmp_path: Path):
    stream = io.StringIO()
    log = RunLog(tmp_path, quiet(), EventStream(stream), completed_steps=0, total_steps=3)
    log.record_evaluation(0, report(0.4))
    for step in (1, 2, 3):
        log.record_step(step, {**ROW, "step": step}, ["a transcript"])
    log.record_skipped(2, "actor_train", ["a", "b"], {"loss": float("nan")})
    log.record_evaluation(3, report(0.6))
    log.finish(wall_seconds=5.0, train_calls=["actor_train"])
    kinds = [parse_event(line)["kind"] for line in stream.getvalue().splitlines()]  # type: ignore[index]
    assert kinds == ["evaluation", "step", "step", "step", "warning", "evaluation"]
    assert "step 3, episode 1" in (tmp_path / "episodes.txt").read_text()
    assert json.loads((tmp_path / "nonfinite.jsonl").read_text())["ids"] == ["a", "b"]

    resumed = RunLog(tmp_path, quiet(), EventStream(stream), completed_steps=2, total_steps=5)
    assert (
        resumed.evaluations.report_at(0) == report(0.4) and resumed.evaluations.report_at(3) is None
    )
    RunLog(tmp_path, quiet(), EventStream(stream), completed_steps=0, total_steps=5)
    assert Evaluations(tmp_path).report_at(0) is None and not (tmp_path / "episodes.txt").exists()


def test_lines_stand_behind_the_seconds_of_the_run(monkeypatch):
    """Also where the process stood still: they counted by the clock of deadlines, which leaves that
    time out."""
    console = Console(file=io.StringIO(), width=120)
    display = Display(console)
    clock = SimpleNamespace(now=lambda: time.monotonic() - 1000.0)
    monkeypatch.setattr(display_module, "process_clock", clock)
    display.show({"kind": "phase", "text": "goes on"})
    assert 0 <= float(console.file.getvalue().split()[0]) < 1000


@pytest.mark.slow
def test_a_run_log_holds_no_rows_in_memory(tmp_path: Path):
    with Path(os.devnull).open("w") as nowhere:
        log = RunLog(tmp_path, quiet(), EventStream(nowhere), completed_steps=0, total_steps=140)
        assert bytes_of_a_step(log) < 500, "one row takes several thousand"
        assert log.finish(wall_seconds=5.0, train_calls=[])["steps"] == 140


def bytes_of_a_step(log: RunLog) -> float:
    """Return by how many bytes the memory of this process grows with a step: the least of three
    times 40 steps, since threads of earlier tests may grow as well."""
    tracemalloc.start()
    sizes = []
    try:
        for step in range(1, 141):
            log.record_step(step, {f"metric/{number}": number / step for number in range(40)}, [])
            if step % 40 == 20:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        return min(after - before for before, after in itertools.pairwise(sizes)) / 40
    finally:
        tracemalloc.stop()


def test_lost_rows_are_named_at_the_end_of_the_run(tmp_path: Path):
    stream = io.StringIO()
    log = RunLog(tmp_path, quiet(), EventStream(stream), completed_steps=0, total_steps=3)
    for step in (1, 2, 3):
        log.record_step(step, {**ROW, "step": step}, [])
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    assert log.finish(wall_seconds=5.0, train_calls=["actor_train"])["steps"] == 3
    events = [parse_event(line) or {} for line in stream.getvalue().splitlines()]
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert len(warnings) == 1 and warnings[0].startswith("the rows of 2 steps: 1, 2 are lost")


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path: Path):
    log = RunLog(tmp_path, quiet(), EventStream(io.StringIO()), completed_steps=0, total_steps=3)
    log.record_step(1, {**ROW, "step": 1}, [])
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            log.record_step(2, {**ROW, "step": 2}, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == before


def test_displays_show_the_figures():
    event = {"kind": "step", "step": 3, "total": 60, "metrics": ROW}
    line = step_line(event)
    for part in (
        "step 3/60",
        "reward 0.6",
        "warmup 75%",
        "500 tokens/s",
        "environment 1.5",
        "buffer 16",
    ):
        assert part in line
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    display = LiveDisplay(console, "grpo/x")
    display.show({"kind": "phase", "text": "loading"})
    display.show({**event, "step": 2})
    display.show(event)
    display.show({"kind": "activity", "calls": ["actor_gen"], "resident": 4, "capacity": 16})
    display.show({"kind": "evaluation", "when": "before training", "report": report(0.4)})
    display.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("grpo/x", "step 3/60", "ETA", "environment", "actor_gen", "4/16", "40.0%"):
        assert part in shown


def test_plain_lines_without_a_terminal():
    assert not isinstance(
        make_display("t", live=True, console=Console(file=io.StringIO())), LiveDisplay
    )
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert not isinstance(make_display("t", live=False, console=terminal), LiveDisplay)


def test_lines_that_are_no_events_are_told_apart():
    assert (
        parse_event("hello") is None
        and parse_event("[1]") is None
        and parse_event('{"a": 1}') is None
    )
    assert parse_event('{"kind": "phase", "text": "x"}') == {"kind": "phase", "text": "x"}


def test_provenance_without_importing_anything(tmp_path: Path):
    versions = package_versions(("numpy", "no-such-package"))
    assert versions["numpy"] and versions["no-such-package"] is None
    assert git_state(tmp_path)["commit"] is None


def test_a_log_gets_few_lines_of_quick_steps_and_the_last_one():
    console = Console(file=io.StringIO(), width=200)
    display = Display(console)
    for step in range(1, 401):
        display.show({"kind": "step", "step": step, "total": 400, "metrics": ROW})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) < 50
    assert "step 1/400" in lines[0] and "step 400/400" in lines[-1]


def test_what_a_failed_program_wrote_does_not_drive_the_terminal():
    """The end of a worker's log stands in the warning of its failure, and what the policy ran may
    have written it."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    Display(console).show(
        {"kind": "warning", "text": "it ended:\n  | \x1b[31mred\x1b[0m \x1b[2J\x07"}
    )
    assert console.file.getvalue().endswith("warning: it ended:\n  | red ␛[2J␇\n")  # type: ignore[attr-defined]


def test_staleness_stands_at_the_top_level() -> None:
    measured = {
        "loss": 0.5,
        "staleness/head_mean": 0.5,
        "staleness/head_max": 2.0,
        "mismatch/abs_p50": 0.1,
    }
    metrics = flatten_step(
        wall_s=1.0,
        stats={"actor_train": measured},
        times={},
        tokens={"actor_train": 3},
        buffer={},
        source={},
        train_calls=["actor_train"],
    )
    assert (metrics["staleness/head_mean"], metrics["staleness/head_max"]) == (0.5, 2.0)
    assert (metrics["actor_train/loss"], metrics["actor_train/mismatch/abs_p50"]) == (0.5, 0.1)
    assert not [name for name in metrics if name.startswith("actor_train/staleness")]


def opened_log(folder: Path, completed_steps: int) -> tuple[RunLog, list[str]]:
    """A run log that goes on, and the warnings that it gave."""
    events = io.StringIO()
    log = RunLog(
        folder,
        MonitorConfig(trackers=[]),
        EventStream(events),
        completed_steps=completed_steps,
        total_steps=9,
    )
    messages = [parse_event(line) for line in events.getvalue().splitlines()]
    return log, [
        message["text"] for message in messages if message and message["kind"] == "warning"
    ]


@pytest.mark.parametrize(
    "damage", [b"\xff", b"[1]", b'{"step": "two"}', b"{", b"null", b'{"loss": 1.0}']
)
def test_a_line_of_metrics_that_is_damaged_costs_that_line(tmp_path: Path, damage: bytes) -> None:
    """Every resume used to end in a UnicodeDecodeError that named no file."""
    log, told = opened_log(tmp_path, 0)
    for step in (1, 2, 3):
        log.record_step(step, {"loss": float(step)}, [])
    log.close()
    assert not told
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = damage + b"\n"
    path.write_bytes(before := b"".join(lines))
    log, (line,) = opened_log(tmp_path, 3)
    log.close()
    assert line.startswith(f"{path} is damaged in line 2 and was renamed to metrics.jsonl.damaged")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    path.unlink()
    log, (line,) = opened_log(tmp_path, 3)
    log.close()
    assert line == f"{path} lacks 3 steps: 1, 2, 3; the run continues without them"


@pytest.mark.parametrize(
    "damage",
    [b'{"0": {"sampled": {"overall": {\xff', b"", b"[]", b'{"0": 1}', b'{"x": {}}', b"[" * 9999],
)
def test_evaluations_that_are_damaged_are_kept_and_done_without(
    tmp_path: Path, damage: bytes
) -> None:
    log, _ = opened_log(tmp_path, 0)
    for step in (1, 2, 3):
        log.record_step(step, {"loss": float(step)}, [])
    log.close()
    path = tmp_path / "evaluations.json"
    path.write_bytes(damage)
    log, (line,) = opened_log(tmp_path, 3)
    log.close()
    assert str(path) in line and "without" in line and "\n" not in line
    assert not log.evaluations.all()
    assert not damage or (tmp_path / "evaluations.json.damaged").read_bytes() == damage
    path.unlink()
    log, (line,) = opened_log(tmp_path, 3)
    log.close()
    assert line.startswith(f"{path} is missing")
