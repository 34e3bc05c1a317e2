"""An asynchronous run whose master is on another host than its workers: it trains, and none of its
sockets takes anybody who has not the keys of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts
from tests.transport.network.listeners import listeners, takes_a_stranger

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent
RUN_S = 300.0
STEPS = 2
LOOK_S = 0.5
OPTIONS = (
    "experiment=grpo_async",
    "env=sql",
    f"total_train_steps={STEPS}",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "gen.max_new_tokens=8",
    "rollout.sessions=4",
    "rollout.max_turns=1",
    "rollout.max_total_tokens=640",
    "evaluation.episodes_per_task=0",
    "evaluation.greedy_episodes_per_task=0",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
)


def test_a_run_over_two_hosts_trains_and_takes_no_strangers(tmp_path, tiny_policy):
    try:
        with two_hosts() as (first, second):
            seen = run(tmp_path, tiny_policy, first, second)
    except NoNamespaces as error:
        pytest.skip(str(error))
    folder = tmp_path / "grpo_async" / "default"
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    assert not [
        path
        for path in folder.rglob("*")
        if path.is_file() and b"server_secret" in path.read_bytes()
    ]
    on_first = {address for host, address, _ in seen if host == first}
    on_second = {address for host, address, _ in seen if host == second}
    assert (on_first, on_second) == ({first.address}, {second.address})
    assert len(seen) >= 6, (
        "master, its heartbeat and its control; tensors, stream, tokens, acknowledgements"
    )


def run(folder, policy, first, second):
    """Run the experiment to its end; return every listener that was there, after it has refused a
    stranger."""
    places = (
        f"scheduler.path={ROOT / 'tests' / 'network_scheduler.py'}:ON_HOSTS",
        f"scheduler.first={first.name}",
    )
    network = (
        f"scheduler.second={second.name}",
        f"network.bind={first.address}",
        "async_rl.weights=shm",
    )
    command = [sys.executable, "-m", "realhf.launch", *OPTIONS, *places, *network]
    command += [f"fileroot={folder}", "trial_name=default", f"actor.path={policy}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / "launcher.log"
    seen: set[tuple[Host, str, int]] = set()
    with (
        log.open("w") as file,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file) as process,
    ):
        try:
            looks = int(RUN_S / LOOK_S)
            while looks and process.poll() is None:
                looks -= 1
                for host in (first, second):
                    with host.entered():
                        look(host, seen)
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()[-3000:]
    return seen


def look(host, seen):
    """Try every listener of this thread's network that is new."""
    for port, address in listeners("thread-self").items():
        if (host, address, port) in seen:
            continue
        try:
            assert not takes_a_stranger(address, port), f"{address}:{port} takes everybody"
        except TimeoutError:
            assert port not in listeners("thread-self"), f"{address}:{port} says nothing"
        seen.add((host, address, port))
