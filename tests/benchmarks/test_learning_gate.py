"""What the learning gate works out of recorded and new runs, and what it refuses."""

from __future__ import annotations

import importlib
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = {"processor": "some", "cores": 2}
RUNS = [
    {
        "seed": 1,
        "sampled": 77.8,
        "greedy": 89.5,
        "first_step_s": 25.0,
        "risen_s": 60.0,
        "end_s": 330.0,
    },
    {
        "seed": 2,
        "sampled": 76.3,
        "greedy": 91.9,
        "first_step_s": 26.0,
        "risen_s": 62.0,
        "end_s": 350.0,
    },
    {
        "seed": 3,
        "sampled": 75.0,
        "greedy": 92.7,
        "first_step_s": 24.0,
        "risen_s": 58.0,
        "end_s": 340.0,
    },
]
RECORD = {"options": [], "code": "abc", "machine": HERE, "runs": RUNS}


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("learning_gate")


def shifted(**by):
    return [{**run, **{name: run[name] + delta for name, delta in by.items()}} for run in RUNS]


@pytest.mark.slow
def test_the_interval_holds_new_means_as_often_as_it_says(gate):
    """Of means drawn from the distribution of the recorded ones, 95 % lie inside."""
    rng = random.Random(5)
    inside = 0
    tries = 4000
    for _ in range(tries):
        low, high = gate.prediction_interval([rng.gauss(77, 2) for _ in range(3)], 2)
        inside += low <= statistics.mean(rng.gauss(77, 2) for _ in range(2)) <= high
    assert inside / tries == pytest.approx(0.95, abs=0.012)


@pytest.mark.slow
def test_success_may_rise_and_time_may_fall(gate):
    for found in (RUNS, shifted(sampled=15), shifted(end_s=-200, first_step_s=-20)):
        rows, worse = gate.compare(RECORD, found, HERE)
        assert (
            not worse
            and len(rows) == 2 + len(gate.FIGURES)
            and not any("WORSE" in row for row in rows)
        )


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("sampled", -15.0),
        ("greedy", -15.0),
        ("first_step_s", 10.0),
        ("risen_s", 20.0),
        ("end_s", 100.0),
    ],
)
def test_each_figure_alone_is_found_worse(gate, name, by):
    rows, worse = gate.compare(RECORD, shifted(**{name: by}), HERE)
    assert worse and ["WORSE" in row for row in rows[2:]] == [each == name for each in gate.FIGURES]


def test_times_of_another_machine_are_not_compared_and_success_is(gate):
    other = {"processor": "another", "cores": 2}
    rows, worse = gate.compare(RECORD, shifted(end_s=1000.0), other)
    assert not worse and sum("another machine" in row for row in rows) == 3
    assert gate.compare(RECORD, shifted(sampled=-15.0), other)[1]


def test_a_figure_that_no_run_tells_is_said_and_not_compared(gate):
    rows, worse = gate.compare(RECORD, [{**run, "greedy": None} for run in RUNS], HERE)
    assert not worse and "not compared: too few runs tell it" in rows[3]


def finished(folder, log, asked, launches=1, greedy=None):
    """A run folder as the launcher leaves it, as far as it is read."""
    folder.mkdir(parents=True)
    success = {
        "heldout_success_after": {"overall": 0.75},
        "heldout_success_after_greedy": greedy or {},
    }
    (folder / "summary.json").write_text(json.dumps({"wall_seconds": 300.0, **success}))
    (folder / "provenance.json").write_text(
        json.dumps({"launches": [{"arguments": asked}] * launches})
    )
    log.write_text(
        "    3.1 s  held-out evaluation before training\n"
        "    9.1 s  held-out, before training:  sampled overall 60.0%, warmup 90.0% (9 episodes)  "
        "greedy overall 95%\n"
        "   24.5 s  step 1/55   reward 0.5\n   31.0 s  step 10/55   reward\n"
        "   34.0 s  held-out, after step 10:  sampled overall 69.9%, beginner 70.0% (10 episodes)\n"
        "   54.0 s  held-out, after step 20:  sampled overall 70.0%, beginner 70.0% (10 episodes)\n"
    )


def test_a_finished_run_is_read_and_an_interrupted_one_has_no_times(gate, tmp_path):
    log = tmp_path / "log"
    asked = ["seed=4", "a=b"]
    finished(tmp_path / "whole", log, asked, greedy={"overall": 0.9})
    assert gate.figures(tmp_path / "whole", log, ["a=b", "seed=4"], 4) == {
        "seed": 4, "sampled": 75.0, "greedy": 90.0, "first_step_s": 24.5, "risen_s": 54.0, "end_s": 300.0,
    }  # fmt: skip
    finished(tmp_path / "twice", log, asked, launches=2)
    found = gate.figures(tmp_path / "twice", log, asked, 4)
    assert (found["sampled"], found["first_step_s"], found["end_s"], found["greedy"]) == (
        75.0,
        None,
        None,
        None,
    )
    with pytest.raises(gate.Failed, match="choose another folder"):
        gate.figures(tmp_path / "whole", log, ["a=c", "seed=4"], 4)
    with pytest.raises(gate.Failed, match="without a summary"):
        gate.figures(tmp_path / "nowhere", log, asked, 4)


def test_a_record_of_other_options_or_none_is_refused(gate, tmp_path, capsys):
    file = tmp_path / "record.json"
    assert (
        gate.main(["--record-file", str(file)]) == 2
        and "--record makes one" in capsys.readouterr().err
    )
    gate.write_record(file, ["ppo.kl_loss_coef=0"], RUNS, "abc")
    assert gate.read_record(file, ["ppo.kl_loss_coef=0"])["runs"] == RUNS
    assert (
        gate.main(["--record-file", str(file)]) == 2
        and "recorded with the options" in capsys.readouterr().err
    )
    file.write_text('{"options": []}')
    assert (
        gate.main(["--record-file", str(file)]) == 2 and "is no record" in capsys.readouterr().err
    )
    assert gate.main(["--record", "--seeds", "1", "--record-file", str(file)]) == 2
    for wrong in (["seed=3"], ["--seeds", "1,1"], ["--seeds", "1,x"], ["fast"]):
        with pytest.raises(SystemExit):
            gate.main(wrong)


def test_the_record_of_the_project_can_be_read_where_there_is_one(gate):
    if gate.DEFAULT_RECORD.exists():
        record = gate.read_record(gate.DEFAULT_RECORD, [])
        assert len(record["runs"]) >= 2 and all(
            0 <= run["sampled"] <= 100 for run in record["runs"]
        )


@pytest.mark.slow
def test_a_run_that_does_not_end_is_ended_and_said(gate, tmp_path):
    """The deadline holds, nothing of the run stays, and the message names the option."""
    log = tmp_path / "log"
    began = time.monotonic()
    with pytest.raises(gate.Failed, match="--minutes"):
        gate.run([sys.executable, "-c", "import time; time.sleep(60)"], log, 0.003)
    with pytest.raises(gate.Failed, match=r"ended with 3(?s:.*)fell over"):
        gate.run([sys.executable, "-c", "print('fell over'); raise SystemExit(3)"], log, 1)
    assert time.monotonic() - began < 30


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.sim
def test_two_seeds_are_recorded_killed_resumed_and_compared(tmp_path):
    """The whole program, on a policy that knows nothing."""
    tiny = [
        *(
            "actor.path=builtin_tiny",
            "total_train_steps=2",
            "dataset.train_bs_n_seqs=2",
            "ppo.group_size=2",
        ),
        *(
            "gen.max_new_tokens=8",
            "env.pool_size=4",
            "monitor.progress=false",
            "exp_ctrl.ckpt_freq_steps=1",
        ),
        *(
            "evaluation.episodes_per_task=1",
            "evaluation.greedy_episodes_per_task=0",
            "evaluation.templates=2",
        ),
    ]
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "learning_gate.py"),
        "--seeds",
        "1,2",
        *tiny,
    ]
    command += ["--record-file", str(tmp_path / "record.json"), "--runs", str(tmp_path / "runs")]
    with subprocess.Popen([*command, "--record"], cwd=ROOT) as first:
        log = tmp_path / "runs" / "seed1.log"
        deadline = time.monotonic() + 120
        while (
            "step 1/" not in (log.read_text() if log.exists() else "")
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        assert first.wait(90) == 128 + signal.SIGTERM
    subprocess.run([*command, "--record"], cwd=ROOT, check=True, timeout=300)
    again = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == 2 + 2 + 5
