"""``experiment=grpo_stream_http`` with everything real and tiny: a server of the run, a producer
with a policy and simulators of its own, master, model worker, training; and what a killed run owes
to the batches in its hands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from realhf.base.loopback import free_port
from realhf.trajectory.client import TrajectoryClient, TrajectoryError
from tests.process_family import family, gone

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3
TINY = (
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "rollout.max_total_tokens=640",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
    "ppo.entropy_coef=0.05",
    "actor.optimizer.lr=0.01",
    "stream.wait_s=60",
)
DEADLINE_S = 300.0


def until(found, what):
    """The first true value of ``found``."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {DEADLINE_S:g} s")


class Processes:
    """Programs of one test, with their output in files; all of them end with it."""

    def __init__(self, folder):
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name, module, *arguments):
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdout=log, stderr=log
            )
        self._running.append(process)
        return process

    def said(self, name):
        return (self._folder / f"{name}.log").read_text()

    def stop(self):
        for process in self._running:
            if process.poll() is None:
                process.terminate()
        for process in self._running:
            process.wait(60)


@pytest.fixture
def processes(tmp_path):
    running = Processes(tmp_path)
    yield running
    running.stop()


def rows(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def leases_of(url):
    with contextlib.suppress(TrajectoryError), TrajectoryClient(url, retry_for_s=0) as client:
        return client.leases()
    return []


def kill_model_worker(launcher):
    [worker] = [
        child for child, line in family(launcher.pid).items() if "workers.model_worker" in line
    ]
    os.kill(worker.pid, 9)


@pytest.mark.nightly
def test_groups_of_a_producer_are_trained_on_and_a_kill_loses_none(
    tmp_path, processes, tiny_policy
):
    port = free_port()
    env_port = free_port()
    runs = tmp_path / "runs"
    url = f"http://127.0.0.1:{port}"
    run = runs / "grpo_stream_http" / "default"
    launch = (
        "experiment=grpo_stream_http",
        f"fileroot={runs}",
        "trial_name=default",
        f"stream.port={port}",
        f"actor.path={tiny_policy}",
        *TINY,
    )
    env = processes.start(
        "env",
        "workers.env_worker",
        "--port",
        str(env_port),
        "--pool-size",
        "2",
        "--ministack-base-port",
        "0",
    )
    # The first run is killed while it waits for its second batch: the first one is trained on, but
    # in no checkpoint.
    first = processes.start("first", "realhf.launch", *launch, f"total_train_steps={STEPS}")
    play = (
        "--server",
        url,
        "--env-url",
        f"http://127.0.0.1:{env_port}",
        "--policy",
        str(tiny_policy),
        "--sessions",
        "2",
        "--group-size",
        "2",
        "--max-turns",
        "2",
        "--max-new-tokens",
        "12",
        "--tiers",
        "warmup",
    )
    assert env.poll() is None
    few = processes.start("few", "workers.producer_worker", *play, "--groups", "3")
    assert few.wait(DEADLINE_S) == 0, processes.said("few")
    assert "pushed 3 groups" in processes.said("few")
    until(lambda: len(rows(run)) == 1, "the first step")
    [lease] = leases_of(url)
    assert lease["groups"] == 2 and lease["step"] == 0
    workers = family(first.pid)
    kill_model_worker(first)
    assert first.wait(60) == 1
    assert "model_worker/0 ended before the run did: killed by SIGKILL" in processes.said("first")
    assert "Traceback" not in processes.said("first") and gone(workers, 60)
    # The second one finds the run and its queue again, is given the first batch again, and trains
    # to the end.
    second = processes.start("second", "realhf.launch", *launch, f"total_train_steps={STEPS}")
    more = processes.start("more", "workers.producer_worker", *play, "--seed", "2", "--groups", "3")
    assert more.wait(DEADLINE_S) == 0, processes.said("more")
    assert second.wait(DEADLINE_S) == 0, processes.said("second")
    found = rows(run)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert [row["stream_gen/redelivered"] for row in found] == [1, 0, 0]
    assert [row["stream_gen/server_step"] for row in found] == [0, 1, 2]
    for row in found:
        assert row["stream_gen/n_sequences"] == 4 and row["groups/total"] == 2
        assert row["mismatch/abs_mean"] < 0.5
    assert found[0]["mismatch/abs_mean"] < 1e-3, (
        "the producer's log-probabilities are the trainer's own"
    )
    assert len({row["policy/loss"] for row in found}) == 3 and found[1]["policy/kl_ref"] > 0
    assert "assistant" in (run / "episodes.txt").read_text()
    assert (run / "policy" / "config.json").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["heldout_success_after"] == {}
    check_queue(processes, run, port)


def check_queue(processes, run, port):
    """What the run left at its server: every group was trained on, and nothing is in anybody's
    hands."""
    processes.start(
        "server",
        "realhf.trajectory",
        "--port",
        str(port),
        "--store",
        f"sqlite:{run / 'trajectory'}",
    )
    with TrajectoryClient(f"http://127.0.0.1:{port}", retry_for_s=30) as client:
        assert client.status() == {"current_step": 3, "queue_size": 0}
        assert client.leases() == []
