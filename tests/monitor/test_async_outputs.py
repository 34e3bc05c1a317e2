"""What an asynchronous run shows: display, summary, trace."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realhf.api.config import MonitorConfig
from realhf.monitor import display as display_module
from realhf.monitor.display import Display, LiveDisplay, step_line
from realhf.monitor.events import EventStream, parse_event
from realhf.monitor.provenance import read_config
from realhf.monitor.run_log import RunLog
from realhf.monitor.summary import (
    build_summary,
    counter_increase,
    flatten_rollouts,
    is_asynchronous,
    rollout_labels,
    rollout_summary,
)
from realhf.monitor.trace import open_trace

pytestmark = pytest.mark.slow

EVENT = {
    "kind": "rollouts",
    "admission": {"running": 48, "accepted": 320, "rejected": 2, "capacity": 16, "dropped": 0},
    "generation": {"occupancy": 0.914, "weight_pause_ms": 12.5},
    "time": {"episode": {"p50": 2.04, "p99": 9.5}},
    "length": {"turns": 5.5},
    "failures_total": {"timeout": 3},
    "retries_total/env_error": 7,
}


def row(step: int, **more: float) -> dict[str, Any]:
    return {
        "step": step,
        "time/step": 2.0,
        "time/actor_train": 1.0,
        "reward/mean": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": float(step % 2),
        "training/occupancy": 0.6,
        "admission/accepted": 16.0 * step,
        "length/turns": 4.0,
        "rollouts/tokens": 180.0,
        "retries/env_error": 2.0 * step,
        **flatten_rollouts({"generation": EVENT["generation"]}),
        **more,
    }


def run_folder(tmp_path: Path, eta: int = 2) -> Path:
    folder = tmp_path / "grpo_aws_async" / "x<y"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"async_rl:\n  max_head_offpolicyness: {eta}\nnote: <script>\n"
    )
    begun = {"at": "a", "completed_steps": 0, "changed": {}}
    again = {
        "at": "b",
        "completed_steps": 2,
        "changed": {"async_rl.max_head_offpolicyness": [4, eta]},
    }
    content = {"arguments": ["experiment=grpo_aws_async", "seed=3"], "launches": [begun, again]}
    (folder / "provenance.json").write_text(json.dumps(content))
    return folder


def test_an_event_has_the_names_of_the_metrics():
    flat = flatten_rollouts(EVENT)
    assert (
        flat["admission/running"] == 48
        and flat["failures_total/timeout"] == 3
        and "kind" not in flat
    )
    assert dict(rollout_labels(flat)) == {
        "generation": "91%",
        "in play": "48",
        "capacity": "16",
        "accepted": "320",
        "rejected": "2",
        "episode": "2.0 s p99 9.5 s",
        "turns": "5.5",
        "new weights stop": "12.5 ms",
        "failed": "timeout 3",
        "retried": "env_error 7",
    }
    assert dict(rollout_labels(row(1)))["staleness"] == "0.5 max 1"
    assert rollout_labels({"reward/mean": 1.0, "success/warmup": 0.5}) == []


def test_a_step_line_ends_with_the_rollouts():
    line = step_line({"kind": "step", "step": 3, "total": 9, "metrics": row(3)})
    for part in (
        "step 3/9",
        "staleness 0.5 max 1",
        "generation 91%",
        "training 60%",
        "accepted 48",
        "retried env_error 6",
    ):
        assert part in line


def test_the_panel_shows_rollouts_before_the_first_step_and_between_steps():
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    display = LiveDisplay(console, "async")

    def shown() -> str:
        target = Console(file=io.StringIO(), width=140)
        target.print(display._render())
        return target.file.getvalue()  # type: ignore[attr-defined]

    try:
        display.show({"kind": "phase", "text": "training"})
        assert "in play" not in shown()
        display.show(EVENT)
        assert "in play 48" in shown() and "failed timeout 3" in shown()
        display.show(
            {
                "kind": "step",
                "step": 1,
                "total": 9,
                "metrics": row(1, **{"admission/running": 31.0}),
            }
        )
        assert (
            "in play 31" in shown()
            and "staleness 0.5 max 1" in shown()
            and "capacity 16" in shown()
        )
        display.show({"kind": "rollouts", "admission": {"running": 30}})
        assert "in play 30" in shown() and "step 1/9" in shown()
        display.show({"kind": "phase", "text": "held-out evaluation after step 1"})
        display.show({"kind": "progress", "call": "held-out evaluation", "over": 3, "wanted": 9})
        assert "3 of 9 episodes" in shown() and "step 1/9" in shown()
        entry = {"overall": {"success": 0.5, "episodes": 9, "failed": 0}}
        display.show({"kind": "evaluation", "when": "after step 1", "report": {"sampled": entry}})
        assert "episodes" not in shown() and "step 1/9" in shown()
    finally:
        display.close()


def test_a_log_without_steps_says_now_and_then_what_the_rollouts_do(
    monkeypatch: pytest.MonkeyPatch,
):
    console = Console(file=io.StringIO(), width=300)
    display = Display(console)
    display.show(EVENT)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    monkeypatch.setattr(display_module, "_BETWEEN_LINE_S", 0.0)
    display.show(EVENT)
    display.show({"kind": "progress", "call": "held-out evaluation", "over": 48, "wanted": 266})
    monkeypatch.setattr(display_module, "_BETWEEN_LINE_S", 30.0)
    display.show(EVENT)
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "rollouts:  generation 91%  in play 48" in first
    assert second.endswith("held-out evaluation: 48 of 266 episodes")


def test_counters_go_on_over_a_resumption():
    rows = [{"n": 3.0}, {"n": 5.0}, {}, {"n": 1.0}, {"n": 2.0}]
    assert counter_increase(rows, "n") == 7
    assert counter_increase(rows, "absent") == 0


def test_the_summary_of_an_asynchronous_run():
    rows = [
        row(step, **{"admission/rejected": float(step), "failures/timeout": 1.0})
        for step in (1, 2, 3)
    ]
    summary = build_summary(rows, None, None, wall_seconds=9.0, train_calls=["actor_train"])[
        "asynchronous"
    ]
    assert summary == rollout_summary(rows)
    assert (summary["staleness_head_max"], summary["accepted"], summary["rejected"]) == (
        1.0,
        48.0,
        3.0,
    )
    assert summary["failed"] == {"timeout": 3.0} and summary["retried"] == {"env_error": 12.0}
    assert summary["generation_occupancy"] == pytest.approx(0.914)
    assert not is_asynchronous([{"step": 1, "staleness/max": 0.0}])
    assert "asynchronous" not in build_summary(
        [{"step": 1}], None, None, wall_seconds=1.0, train_calls=[]
    )


def test_the_bound_comes_from_the_configuration(tmp_path: Path):
    assert read_config(run_folder(tmp_path, eta=4))["async_rl"]["max_head_offpolicyness"] == 4
    assert read_config(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("- 1")
    assert read_config(tmp_path) == {}


def test_a_run_ends_with_a_trace_and_its_advisories(tmp_path: Path):
    folder = run_folder(tmp_path)
    stream = io.StringIO()
    with open_trace(folder, "master") as tracer:
        log = RunLog(
            folder,
            MonitorConfig(trackers=[]),
            EventStream(stream),
            completed_steps=0,
            total_steps=3,
            tracer=tracer,
        )
        for step in (1, 2, 3):
            with tracer.span("train"):
                log.record_step(step, row(step, **{"policy/loss": float("nan")}), [])
    summary = log.finish(wall_seconds=6.0, train_calls=["actor_train"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["step"] for event in events if event["name"] == "step"] == [1, 2, 3]
    assert summary["asynchronous"]["accepted"] == 48
    (advisory,) = summary["advisories"]
    assert advisory["id"] == "policy_not_finite" and advisory["since"] == 1
    kinds = [parse_event(line)["kind"] for line in stream.getvalue().splitlines()]  # type: ignore[index]
    assert "warning" not in kinds


def test_a_trace_that_cannot_be_joined_does_not_fail_the_run(tmp_path: Path):
    with open_trace(tmp_path, "master") as tracer:
        tracer.instant("beat")
    (tmp_path / "trace.json").mkdir()
    stream = io.StringIO()
    log = RunLog(
        tmp_path, MonitorConfig(trackers=[]), EventStream(stream), completed_steps=0, total_steps=1
    )
    log.record_step(1, {"time/step": 1.0}, [])
    assert log.finish(wall_seconds=1.0, train_calls=[])["steps"] == 1
    assert "no trace" in stream.getvalue()
