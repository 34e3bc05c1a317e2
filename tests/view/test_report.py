"""The report: the page over a run in one file, which needs no server, asks nobody and gives no secret away."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.view.made_up_run import MadeUpRun
from realhf.monitor.report import main
from realhf.monitor.run_files import note_death, note_placement
from realhf.view.report import MOST_STEPS, write_report
from realhf.view.run import masked
from tests.view.runs import kept_answers, write_run

OWN = "/api/runs/0"


def test_the_report_of_a_killed_run_says_what_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "grpo" / "x<y"
    for place in (folder, Path(__file__)):
        monkeypatch.setattr(sys, "argv", ["report", str(place)])
        assert main() == 1 and f"{place} is not a run" in capsys.readouterr().err
    write_run(folder, ended=False)
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    begun = {"at": "a", "completed_steps": 0, "changed": {}}
    again = {"at": "b", "completed_steps": 2, "changed": {"ppo.lr": [0.1, 0.2], "env.token": ["one", "two"]}}
    (folder / "provenance.json").write_text(json.dumps({"arguments": ["seed=3"], "launches": [begun, again]}))
    (folder / "nonfinite.jsonl").write_text('{"step": 2, "call": "actor_train"}\n{"step')
    note_death(folder, "generation/0", "killed: no heartbeat", "it is started again")
    note_placement(folder, "a", "rollout_worker/0")
    note_placement(folder, "a", lost="its wire was cut")
    assert main() == 0 and capsys.readouterr().out.strip() == str(folder / "report.html")
    answers = kept_answers(folder / "report.html")
    about = answers[f"{OWN}/about"]
    assert [event["what"] for event in about["events"]] == [
        "the run went on with ppo.lr: 0.1 → 0.2, env.token: (not shown) → (not shown)",
        "generation/0: killed: no heartbeat; it is started again",
        "host a was lost: its wire was cut",
        "actor_train skipped its update: loss or gradient was not finite",
    ]
    assert [event["step"] for event in about["events"]] == [2, None, None, 2]
    assert about["hosts"] == {"a": ["rollout_worker/0"]}
    (run,) = answers["/api/runs"]["runs"]
    assert run["state"] == "running" and run["folder"] == "x<y", "of this machine's folders only the name"
    assert "<title>grpo/x&lt;y</title>" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("env.args.api_key=sk-123", "env.args.api_key=(not shown)"),
        ("env.args={api_key:sk-123,size:3}", "env.args={api_key:(not shown),size:3}"),
        ("env.token=Bearer sk-123, or other", "env.token=(not shown)"),
        ("env.passphrase=[all that is, in it]", "env.passphrase=(not shown)"),
        ("env.args={'password': 'two words, no', size: 3}", "env.args={'password': (not shown), size: 3}"),
        ("env.args.apiKey=sk-123", "env.args.apiKey=(not shown)"),
        ("stream.url=http://me:p@w@host:1/a", "stream.url=http://(not shown)@host:1/a"),
        ("stream.url=http://me:pw@host:1/a", "stream.url=http://(not shown)@host:1/a"),
        ("stream.token_file=/etc/token", "stream.token_file=/etc/token"),
        ("gen.max_new_tokens=256", "gen.max_new_tokens=256"),
        ("monitor.rollout_tokens=1", "monitor.rollout_tokens=1"),
    ],
)
def test_values_of_secrets_are_left_out(given: str, shown: str):
    assert masked(given) == shown


def test_no_secret_of_the_configuration_is_in_a_report(tmp_path: Path):
    env = "env:\n  url: http://me:hush1@host/\n  args:\n    api_key: hush2\n  token: [hush3]\n"
    run = write_run(tmp_path / "run", config=f"{env}fileroot: /home/hush4\n")
    (run / "provenance.json").write_text(json.dumps({"arguments": ["env.args.api_key=hush5"]}))
    answers = json.dumps(kept_answers(write_report(run)))
    assert "api_key" in answers and "(not shown)" in answers and "hush" not in answers


def test_of_a_long_run_every_so_many_steps_are_kept_and_the_last_one(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=0)
    count = 2 * MOST_STEPS + 7
    rows = [{"step": step, "reward/mean": float("nan") if step == count else 0.5} for step in range(1, count + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = kept_answers(write_report(run))
    metrics = answers[f"{OWN}/metrics"]
    assert len(metrics["steps"]) <= MOST_STEPS and metrics["steps"][-1] == count
    assert metrics["columns"]["reward/mean"][-1] == "NaN" and len(metrics["columns"]["reward/mean"]) == len(
        metrics["steps"]
    )
    assert "one of every 3 steps" in answers["/api/runs"]["runs"][0]["text"]


def test_the_last_rollouts_fill_the_room_that_there_is(tmp_path: Path):
    run = MadeUpRun(tmp_path / "run", failing=0.0)
    for _ in range(3):
        run.add_step(4)
    run.close()
    everything = kept_answers(write_report(tmp_path / "run"))[f"{OWN}/rollout"]
    assert len(everything) == 3 * 4 * 8
    size = len(json.dumps(everything))
    some = kept_answers(write_report(tmp_path / "run", size // 2))[f"{OWN}/rollout"]
    assert 20 < len(some) < 70
    assert min(one["step"] for one in some.values()) >= 2, "the newest"
    assert kept_answers(write_report(tmp_path / "run", 0))[f"{OWN}/rollout"] == {}
