"""The command itself, with everything real and tiny: simulators, a policy made here, master,
workers, training."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.monitor.test_metrics import metric_of
from tests.process_family import family

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.timeout(900)]

WARM_START = (
    "model=builtin_tiny",
    "builtin.vocab_size=400",
    "warm_start.episodes_per_task=1",
    "warm_start.train_steps=3",
)
SMALL = (
    "env.pool_size=2",
    "env.tiers=[warmup]",
    "dataset.train_bs_n_seqs=2",
    "ppo.group_size=2",
    "gen.max_new_tokens=12",
    "rollout.max_turns=2",
    "rollout.max_total_tokens=640",
    "evaluation.episodes_per_task=1",
    "evaluation.greedy_episodes_per_task=0",
    "evaluation.templates=4",
    "torch_threads=1",
    "monitor.trackers=[]",
    "monitor.progress=false",
)
TINY = (*WARM_START, *SMALL)
MOVING = ("ppo.entropy_coef=0.05", "actor.optimizer.lr=0.01")
"""A policy that is as good as random earns nothing; the entropy makes it move all the same."""
CLOCKED = ("time/", "host/", "device/", "throughput/tokens_per_second")

Launch = Callable[..., subprocess.CompletedProcess[str]]
Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def command(root, trial, *options, policy, experiment="grpo_aws"):
    return [
        sys.executable,
        "-m",
        "realhf.launch",
        f"experiment={experiment}",
        "seed=3",
        f"trial_name={trial}",
        f"fileroot={root}",
        f"actor.path={policy}",
        *SMALL,
        *options,
    ]


def launch(root, trial, *options, **more):
    return subprocess.run(
        command(root, trial, *options, **more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def leftovers(root):
    """Command lines of processes that belong to a run below ``root``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(root) in part for part in process.cmdline()):
                found.append(process.cmdline())
    return found


def trained(root, policy, trial, steps):
    """The metrics of a run that must succeed."""
    done = launch(root, trial, f"total_train_steps={steps}", *MOVING, policy=policy)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    folder = root / "grpo_aws" / trial
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return rows


def figures(row):
    """What a seed determines: everything but the clock."""
    return {name: value for name, value in row.items() if not name.startswith(CLOCKED)}


def undescribed(rows):
    """Names that docs/metrics.md does not list, or only as any number that a call returns."""
    names = {name for row in rows for name in row} - {"step"}
    return {
        name
        for name in names
        if (found := metric_of(name)) is None or found.name == "<call>/<name>"
    }


@pytest.fixture(scope="module")
def first(root, tiny_policy):
    """Three steps without a break, on one model worker. What comes before a run without a policy is
    seen by the example of a first run, and in ``tests/test_any_environment.py``."""
    rows = trained(root, tiny_policy, "first", 3)
    assert not leftovers(root)
    return rows


@pytest.fixture(scope="module")
def others(root, tiny_policy):
    """A run to compare with the first: one that ended and went on."""
    rows = {
        "two steps": trained(root, tiny_policy, "again", 2),
        "three steps": trained(root, tiny_policy, "again", 3),
    }
    assert not leftovers(root)
    return rows


def test_a_run_trains_and_leaves_what_it_promised(root, first):
    losses = [row["policy/loss"] for row in first]
    assert len(set(losses)) == 3 and all(row["policy/grad_norm"] > 0 for row in first)
    assert first[0]["policy/kl_ref"] == 0 < min(row["policy/kl_ref"] for row in first[1:])
    assert all(row["mismatch/abs_mean"] < 1e-3 for row in first)
    assert not undescribed(first) and len(first[-1]) > 60
    assert all(0 < row["policy/entropy"] < 6 for row in first), "at most log 400"
    of_the_device = {name for name in first[-1] if name.startswith("device/")}
    assert of_the_device == {
        "device/actor_train/tokens_per_second",
        "device/actor_train/peak_bytes",
    }
    assert all(row["device/actor_train/tokens_per_second"] > 0 for row in first)
    assert "throughput/tokens_per_second_per_gpu" not in first[-1], "without a GPU"
    run = root / "grpo_aws" / "first"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_episodes"] == 4 and set(summary["heldout_success_after"]) == {
        "overall",
        "warmup",
    }
    episodes = (run / "episodes.txt").read_text()
    assert episodes.count("===== step 3, episode ") == 2 == episodes.count("\n=== step 3, sample ")
    assert "step 0" not in episodes, "steps count from 1, as on the terminal"
    model, tokenizer = (
        kind.from_pretrained(run / "policy") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.config.vocab_size == 400 and tokenizer.chat_template


@pytest.mark.nightly
def test_the_same_seed_is_bit_identical_even_across_a_restart(first, others):
    two = others["two steps"]
    three = others["three steps"]
    assert [figures(row) for row in two] == [figures(row) for row in first[:2]]
    assert three[:2] == two, "steps that were done are not done again"
    assert figures(three[2]) == figures(first[2])


def failed(done):
    """The message of a run that failed: one clear line."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, (
        done.stderr
    )
    return done.stderr


@pytest.mark.nightly
def test_a_taken_port_is_named(root, tiny_policy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("total_train_steps=1", f"env.ministack_base_port={port}")
        message = failed(launch(root, "taken", *options, policy=tiny_policy))
    assert "env/0" in message and f"port {port} for MiniStack is taken" in message
    assert not leftovers(root)


@pytest.fixture
def without_simulators(root, tiny_policy):
    """A launch whose simulators are killed as soon as they appear."""

    def run(*options):
        line = command(root, "no_simulator", *options, policy=tiny_policy)
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            for child, line in family(process.pid).items():
                if "realhf.aws.simulator.ministack_server" in " ".join(line):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, 9)
            time.sleep(0.05)
        out, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    yield run
    assert not leftovers(root)


@pytest.mark.nightly
def test_simulators_that_do_not_come_up_are_named(without_simulators):
    message = failed(without_simulators("total_train_steps=1"))
    assert "env/0" in message and "MiniStack did not come up" in message
