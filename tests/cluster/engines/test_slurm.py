"""The batch job: its script, and what a launch outside a job says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.cluster.engines import slurm
from realhf.cluster.engines.slurm import SlurmOptions, script
from realhf.scheduler.base import WorkerSpec
from tests.cluster.engines.bench_of_one import refusal
from tests.cluster.key_ring import run_folder


def test_the_script_is_short_and_has_what_was_asked_for():
    options = SlurmOptions(
        nodes=3, cpus_per_node=16, gpus_per_node=4, partition="long", account="a", time="2-00:00:00"
    )
    text = script(
        options, ["experiment=grpo_aws", "mode=check", "scheduler=slurm", "scheduler.nodes=3"]
    )
    assert len(text.splitlines()) < 60
    asked = [
        line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    assert {"nodes=3", "cpus-per-task=16", "gpus-per-node=4", "partition=long", "requeue"} <= set(
        asked
    )
    assert (
        text.count("scheduler=slurm") == 1
        and "mode=check" not in text
        and "scheduler.nodes=3" in text
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "requeued"),
    [(["USR1"], True), (["TERM"], False), (["USR1", "TERM"], False)],
    ids=["its time is over", "cancelled", "cancelled while it ends"],
)
def test_the_job_launches_with_the_arguments_given_and_only_the_end_of_its_time_queues_it_again(
    tmp_path, signals, requeued
):
    """The script runs under bash with a launcher that sends it what Slurm would. It used to be
    queued again after ``scancel`` too, which also sends TERM: no job could be cancelled at once."""
    hostile = "actor.path=/x y/$(touch hacked)';z"
    first, *later = [f"kill -{name} $PPID" for name in signals]
    ends = "; ".join(("trap : TERM", *later, "sleep 0.3; exit 143"))
    lives = f'trap "{ends}" TERM; sleep 0.5; {first}; while :; do sleep 0.1; done'
    for name, text in {
        "launcher": f'printf "%s\\n" "$@" > launched; {lives}',
        "scontrol": 'echo "$@" > requeued',
        "getent": "echo 10.1.2.3 STREAM",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = script(SlurmOptions(), [hostile]).replace(sys.executable, str(tmp_path / "launcher"))
    text = text.replace(f"cd {Path.cwd()}", f"cd {tmp_path}")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(
        ["bash"], input=text, text=True, env=environment, timeout=300, check=False
    )
    launched = (tmp_path / "launched").read_text().splitlines()
    given = [
        "-m",
        "realhf.launch",
        hostile,
        "scheduler=slurm",
        "recover_mode=auto",
        "network.bind=10.1.2.3",
    ]
    assert launched == [*given, "trial_name=job-17"], "queued again, it goes on with the same run"
    assert (tmp_path / "requeued").exists() == requeued
    assert done.returncode == 143 and not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "options", [{"partition": "a b"}, {"account": "a\n#SBATCH --x"}, {"time": "tomorrow"}]
)
def test_options_that_are_no_words_of_a_script_are_refused(options):
    (problem,) = SlurmOptions(**options).problems("scheduler")
    assert problem.startswith(f"scheduler.{next(iter(options))}=")


@pytest.mark.parametrize("where", ["no srun", "login node"])
@pytest.mark.parametrize("name", ["job/demonstrations", "master"])
def test_outside_a_job_the_launch_says_so_at_once(tmp_path, monkeypatch, name, where):
    """What comes before the run may take an hour. Where there is srun it took nodes by itself, and
    the run trained on the login node."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if where == "login node":
        (tmp_path / "srun").write_text("#!/bin/bash\ntouch taken\n")
        (tmp_path / "srun").chmod(0o755)
    assert re.search(
        r"srun cannot be run here .*mode=check prints",
        refusal(
            slurm.make_scheduler(
                SlurmOptions(address="127.0.0.1", port=0, key_file=str(tmp_path / "k"), nodes=1)
            ),
            WorkerSpec(name, "platform", (), run_folder(tmp_path, None) / "logs" / "m.log"),
        ),
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("srun: error: Unable to allocate resources: Invalid account", "Invalid account"),
        (
            "FATAL: versions differ: realhf 2 on n1\nsrun: error: n1: task 1: Exited with exit "
            "code 1",
            "realhf 2",
        ),
    ],
    ids=["srun", "agent"],
)
def test_why_srun_has_ended_is_in_the_one_line_that_a_person_sees(
    tmp_path, monkeypatch, said, shown
):
    """Also when it has ended before it was given the keys."""
    (tmp_path / "srun").write_text(f"#!/bin/bash\nexec 0<&-\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    line = refusal(
        slurm.make_scheduler(
            SlurmOptions(address="127.0.0.1", port=0, key_file=str(tmp_path / "k"), nodes=1)
        ),
        WorkerSpec("master", "platform", (), run_folder(tmp_path, None) / "logs" / "m.log"),
    )
    assert line.startswith("host node-0 did not join tcp://127.0.0.1:")
    assert "srun has ended with exit code 1: " in line and shown in line, line
