"""The launcher with real master and model worker processes, on an experiment from outside the
package.

What follows when a worker or the launcher itself is killed is shown by runs with everything real:
``tests/test_stream_end_to_end.py`` and ``tests/faults/test_kills.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from realhf.launch.run import find_unknown_files
from realhf.monitor.provenance import read_launches
from tests.process_family import family, gone

pytestmark = pytest.mark.slow

TOY = Path(__file__).with_name("toy_experiment.py")
SUMMARY_FIELDS = {
    "heldout_success_before",
    "heldout_success_after",
    "heldout_success_before_greedy",
    "heldout_success_after_greedy",
    "heldout_episodes",
    "steps",
    "wall_seconds",
    "tokens_per_second",
    "env_seconds",
    "generation_seconds",
    "train_seconds",
    "mismatch_kl",
}


class Ended(NamedTuple):
    done: subprocess.CompletedProcess[str]
    root: Path


def command(root, *options):
    return [
        sys.executable,
        "-m",
        "realhf.launch",
        f"+experiment_path={TOY}",
        "trial_name=t",
        f"fileroot={root}",
        *options,
    ]


def launch(root, *options):
    return subprocess.run(
        command(root, *options), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs that end by themselves, by a name of their own; two are made at a time."""
    options = {
        "fails": ("experiment_name=fails",),
        "broken": ("experiment_name=toy", "actor.path=hub/broken"),
        "stops": ("experiment_name=stops",),
        "ends": (
            "experiment_name=ends",
            "total_train_steps=10",
            "evaluation.every_steps=1",
            "rpc.control_timeout_s=6",
        ),
    }

    def end(name):
        root = tmp_path_factory.mktemp(name)
        return Ended(launch(root, *options[name]), root)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(options, pool.map(end, options), strict=True))


def losses(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(0 < row[f"host/{os.uname().nodename}/memory"] < 1 for row in rows), (
        "of the host, with every step"
    )
    return {row["step"]: row["policy/loss"] for row in rows}


def expected_losses(steps):
    """Two numbers a step, counted from seed 1; the weight is their sum so far."""
    return {step: float(sum(range(1, 2 * step + 1))) for step in range(1, steps + 1)}


class Slow(NamedTuple):
    """A launcher whose second train step hangs, and its workers by module."""

    process: subprocess.Popen[str]
    workers: dict[str, psutil.Process]
    root: Path


def start_slow(root):
    process = subprocess.Popen(
        command(root, "experiment_name=slow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = root / "slow" / "t" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, (
            "the run did not reach its first step"
        )
        time.sleep(0.1)
    time.sleep(0.5)
    workers = {}
    for child, line in family(process.pid).items():
        workers |= {part: child for part in line if part.startswith("workers.")}
    assert set(workers) == {"workers.master_worker", "workers.model_worker"}
    return Slow(process, workers, root)


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory):
    """One for each test that ends one; two are started at a time."""
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(start_slow, [tmp_path_factory.mktemp("slow") for _ in range(2)]))
    yield runs
    for run in runs:
        run.process.kill()


@pytest.fixture
def slow(slow_runs):
    return slow_runs.pop()


@pytest.mark.nightly
def test_a_run_saves_everything_and_goes_on_where_it_ended(tmp_path):
    """Its second step is skipped: that is said and counted, and the samples are written out."""
    done = launch(tmp_path, "experiment_name=skips")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "skips" / "t"
    skipped = [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]
    assert [(row["step"], row["ids"]) for row in skipped] == [(2, ["n3", "n4"])]
    assert "warning: step 2: actor_train skipped its update" in done.stdout
    assert losses(run) == expected_losses(3)
    for name in (
        "config.yaml",
        "provenance.json",
        "graph.md",
        "graph.dot",
        "report.html",
        "episodes.txt",
        "summary.json",
        "policy/weight.json",
    ):
        assert (run / name).stat().st_size > 0, name
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) >= SUMMARY_FIELDS
    assert (summary["steps"], summary["heldout_episodes"], summary["mismatch_kl"]) == (3, 400, 0.5)
    assert summary["heldout_success_before"] == {"overall": 0.0, "easy": 0.0}
    assert summary["heldout_success_after"] == {"overall": 0.21, "easy": 0.21}
    assert "0.0 %" in done.stdout and "21.0 %" in done.stdout and "400" in done.stdout

    again = launch(tmp_path, "experiment_name=skips", "total_train_steps=5")
    assert again.returncode == 0, again.stderr
    assert (
        "resumed after step 3" in again.stdout
        and "step 4/5" in again.stdout
        and "step 3/5" not in again.stdout
    )
    assert losses(run) == expected_losses(5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_success_before"]["overall"] == 0.0 and summary["steps"] == 5
    assert json.loads((run / "policy" / "weight.json").read_text()) == expected_losses(5)[5]
    assert "from step 4 on the run has other options: total_train_steps=3 -> 5" in again.stdout
    assert [(entry["completed_steps"], entry["changed"]) for entry in read_launches(run)] == [
        (0, {}),
        (3, {"total_train_steps": [3, 5]}),
    ]
    assert (
        "total_train_steps: 5" in (run / "config.yaml").read_text()
        and find_unknown_files(run) == []
    )

    afresh = launch(
        tmp_path, "experiment_name=skips", "total_train_steps=1", "recover_mode=disabled"
    )
    assert afresh.returncode == 0, afresh.stderr
    assert losses(run) == expected_losses(1) and len(read_launches(run)) == 1


@pytest.mark.nightly
def test_a_second_signal_to_the_launcher_stops_everything(slow):
    process, workers, _ = slow
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "step 2 is being trained; its checkpoint follows")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert (
        "stopped by SIGTERM; no checkpoint was waited for" in errors and "Traceback" not in errors
    )
    assert gone(workers.values(), 10)


@pytest.mark.nightly
def test_a_failing_call_is_one_line_and_its_traceback_is_in_the_log(ended):
    done, root = ended["fails"]
    assert done.returncode == 1
    assert (
        "actor_train failed at step 1 on model_worker/0" in done.stderr
        and "the toy fell over" in done.stderr
    )
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert "Traceback" in (root / "fails" / "t" / "logs" / "master.log").read_text()


@pytest.mark.nightly
def test_a_model_that_does_not_load_names_the_option(ended):
    done = ended["broken"].done
    assert done.returncode == 1
    assert "actor.path=hub/broken: this model is broken" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def on_a_small_disk(root, script, *command):
    """Run a command on a file system of 2 MiB of its own, after a script of the shell."""
    mounted = f"mount -t tmpfs -o size=2m small {root}"
    private = ["unshare", "--mount"]
    if subprocess.run([*private, "sh", "-c", mounted], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: that needs root and CAP_SYS_ADMIN")
    words = [*private, "sh", "-c", f'{mounted}; {script}; exec "$@"', "sh", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.nightly
def test_a_disk_that_fills_up_is_the_last_word_on_the_terminal(tmp_path):
    """Neither the log of the master nor any other file can take the cause."""
    done = on_a_small_disk(tmp_path, ":", *command(tmp_path, "experiment_name=fills"))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "o space left on" in last and str(tmp_path / "fills" / "t") in last


@pytest.mark.nightly
def test_a_disk_without_room_for_the_files_of_the_launcher_is_one_line(tmp_path):
    """Its lock and what is tried before still fit."""
    ballast = tmp_path / "ballast"
    script = f"dd if=/dev/zero of={ballast} bs=4k 2>/dev/null; truncate -s -8K {ballast}"
    done = on_a_small_disk(tmp_path, script, *command(tmp_path, "experiment_name=toy"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: no space left on the device of {tmp_path / 'toy' / 't'}"), last


@pytest.mark.nightly
def test_a_call_that_asks_for_the_end_gets_it_after_its_samples_were_written_out(ended):
    done, root = ended["stops"]
    assert done.returncode == 1
    assert (
        "actor_train ended the run at step 2: it was skipped" in done.stderr
        and "Traceback" not in done.stderr
    )
    rows = [
        json.loads(line)
        for line in (root / "stops" / "t" / "nonfinite.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["ids"]) for row in rows] == [(2, ["n3", "n4"])]


@pytest.mark.nightly
def test_loading_waits_for_an_evaluation_that_lasts_longer_than_a_control_call_may(ended):
    done, root = ended["ends"]
    assert done.returncode == 0, done.stderr
    assert list(json.loads((root / "ends" / "t" / "evaluations.json").read_text())) == [
        "0",
        "1",
        "2",
        "3",
    ]


@pytest.mark.nightly
def test_a_finite_source_ends_with_evaluation_checkpoint_and_export(ended):
    done, root = ended["ends"]
    assert done.returncode == 0, done.stderr
    assert "the data ended after step 3, before total_train_steps=10" in done.stdout
    run = root / "ends" / "t"
    assert losses(run) == {1: 3.0, 2: 10.0, 3: 15.0}, "two, two and one of five numbers"
    assert json.loads((run / "policy" / "weight.json").read_text()) == 15.0
    assert (
        sorted(folder.name for folder in (run / "checkpoints").glob("ckpt-*"))[-1]
        == "ckpt-00000003"
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["heldout_success_after"]["overall"] == 0.15
    again = launch(root, "experiment_name=ends", "total_train_steps=10")
    assert again.returncode == 0, again.stderr
    assert "resumed after step 3" in again.stdout and losses(run) == {1: 3.0, 2: 10.0, 3: 15.0}


@pytest.mark.nightly
def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            command(tmp_path, "experiment_name=toy"),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    finally:
        os.close(writer)
    run = tmp_path / "toy" / "t"
    assert done.returncode == 0, done.stderr
    assert losses(run) and (run / "summary.json").exists()
    assert "stdout is lost: Broken pipe" in (run / "logs" / "launcher.log").read_text()


@pytest.mark.nightly
def test_two_launchers_cannot_share_a_run_folder_and_ctrl_c_ends_the_first(slow):
    process, workers, root = slow
    second = launch(root, "experiment_name=slow")
    assert second.returncode == 2
    assert "another run is using" in second.stderr
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "step 2 is being trained; its checkpoint follows")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped by SIGINT; no checkpoint was waited for" in errors and "Traceback" not in errors
    assert gone(workers.values(), 10)
    assert not (root / "slow" / "t" / "checkpoints").exists()


def wait_for_line(process, text):
    """Read the output up to a line that holds ``text``."""
    deadline = time.monotonic() + 120
    for line in iter(process.stdout.readline, ""):
        if text in line:
            return
        assert time.monotonic() < deadline
    raise AssertionError(f"the output ended without {text!r}: {process.stderr.read()}")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_saves_the_last_finished_step_and_the_same_command_goes_on(tmp_path, number):
    """All steps since the last multiple of exp_ctrl.ckpt_freq_steps were lost."""
    options = ("experiment_name=paced", "exp_ctrl.ckpt_freq_steps=1000", "monitor.progress=false")
    process = subprocess.Popen(
        command(tmp_path, *options, "total_train_steps=1000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "paced" / "t" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    run = tmp_path / "paced" / "t"
    done = len(losses(run))
    assert process.returncode == 128 + number, errors
    assert f"{number.name}: the run saves a checkpoint of its last finished step" in output
    assert f"error: stopped by {number.name}; a checkpoint of step {done} is saved" in errors
    assert [folder.name for folder in (run / "checkpoints").glob("ckpt-*")] == [f"ckpt-{done:08d}"]
    again = launch(tmp_path, *options, f"total_train_steps={done + 2}")
    assert again.returncode == 0, again.stderr
    assert f"resumed after step {done}" in again.stdout
    assert losses(run) == expected_losses(done + 2)


@pytest.mark.nightly
def test_the_best_policy_is_kept_beside_the_last_and_a_resumed_run_knows_how_good_it_is(tmp_path):
    options = ("experiment_name=peaks", "evaluation.every_steps=1", "exp_ctrl.keep_best=true")
    first = launch(tmp_path, *options, "total_train_steps=3")
    assert first.returncode == 0, first.stderr
    run = tmp_path / "peaks" / "t"

    def kept():
        figures = json.loads((run / "best_policy" / "held_out.json").read_text())
        assert figures == json.loads((run / "best_policy.json").read_text())
        return (
            json.loads((run / "best_policy" / "weight.json").read_text()),
            figures["step"],
            figures["success"],
        )

    assert kept() == (10.0, 2, 1.0), "weights 0, 3, 10, 21: the second step is the best"
    assert json.loads((run / "policy" / "weight.json").read_text()) == 21.0
    assert json.loads((run / "summary.json").read_text())["best_policy"]["step"] == 2
    assert "best held-out success 100.0 %, after step 2, is kept in" in " ".join(
        first.stdout.split()
    )
    assert not (run / ".best_policy.candidate").exists() and not find_unknown_files(run)
    again = launch(tmp_path, *options, "total_train_steps=4")
    assert again.returncode == 0, again.stderr
    assert kept() == (10.0, 2, 1.0)
    (run / "best_policy.json").write_text("{")
    refused = launch(tmp_path, *options, "total_train_steps=5")
    assert refused.returncode == 1 and "best_policy.json cannot be read" in refused.stderr
    assert (run / "best_policy.json").read_text() == "{" and len(losses(run)) == 4
