"""Runs on two workers: both train the model, or the model is cut over them and one is killed, which
is named at once, and one worker goes on."""

import json
import subprocess
import sys
import time

import pytest

from tests.process_family import family, gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
OPTIONS = (
    "experiment=sft",
    "env=countdown",
    "model=builtin_tiny",
    "total_train_steps=60",
    "dataset.train_bs_n_seqs=8",
    "warm_start.episodes_per_task=1",
    "exp_ctrl.ckpt_freq_steps=5",
    "torch_threads=1",
    "monitor.progress=false",
    "monitor.trackers=[]",
)
CUT = ("actor.workers=[0,1]", "actor.backend=fsdp2")


def launched(root, *options):
    command = [
        sys.executable,
        "-m",
        "realhf.launch",
        *OPTIONS,
        f"fileroot={root}",
        "trial_name=default",
        *options,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows(root):
    path = root / "sft" / "default" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def rank(launcher, index):
    marks = {"workers.model_worker", str(index)}
    return next(process for process, line in family(launcher).items() if marks <= {*line})


def test_a_run_trains_on_two_ranks(tmp_path):
    run = launched(tmp_path, "actor.workers=[0,1]", "actor.backend=ddp", "total_train_steps=2")
    try:
        output, _ = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
    assert run.returncode == 0, output
    first, last = rows(tmp_path)
    assert last["policy/loss"] < first["policy/loss"]
    assert last["device/actor_train/tokens_per_second"] > 0


@pytest.mark.nightly
def test_a_killed_rank_is_named_and_one_worker_goes_on(tmp_path):
    run = launched(tmp_path, *CUT)
    try:
        end = time.monotonic() + PATIENCE_S
        while len(rows(tmp_path)) < 7:
            assert run.poll() is None and time.monotonic() < end, run.stdout and run.stdout.read()
            time.sleep(0.02)
        processes = [*family(run.pid)]
        rank(run.pid, 1).kill()
        output, _ = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
    assert run.returncode == 1
    assert "error: model_worker/1 ended before the run did: killed by SIGKILL" in output
    assert gone(processes, PATIENCE_S)
    before = rows(tmp_path)
    alone = launched(tmp_path, "actor.workers=[0]", "recover_mode=resume")
    try:
        output, _ = alone.communicate(timeout=PATIENCE_S)
    finally:
        alone.kill()
    assert alone.returncode == 0, output
    after = rows(tmp_path)
    assert "resumed after step" in output and len(after) == 60
    for cut, whole in zip(before, after, strict=False):
        assert whole["policy/loss"] == pytest.approx(cut["policy/loss"], rel=1e-4)
    assert after[-1]["policy/loss"] < after[0]["policy/loss"] - 1
