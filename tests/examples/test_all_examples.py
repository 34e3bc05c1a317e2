"""The examples do what they say, and the one of an algorithm of its own reaches the advantages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import ADVANTAGES
from realhf.api.environment import Task
from realhf.api.sample import SequenceSample
from realhf.aws.environment import AwsEnvironment
from realhf.aws.server.program import EnvServerProcess
from realhf.base.plugin import load_plugin
from realhf.launch.__main__ import main
from realhf.registry import interfaces
from realhf.rollout.black_box_agent import BlackBoxAgent, load_agent
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from tests.rollout.black_box import FakeTokens, chat
from tests.rollout.fake_env_server import FakeEnvServer
from tests.test_end_to_end import SMALL, TINY

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
LONGEST = 90


def run(*command, cwd=ROOT, timeout_s=300, **environment):
    """What a command that must succeed printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def scripts():
    """The examples that are one file each; tasks in folders have a page of their own."""
    return sorted(path for path in EXAMPLES.glob("*") if path.suffix in (".py", ".sh"))


def test_each_example_is_short_and_has_its_line_on_the_page():
    """An example is read in one sitting: under 90 lines. The page names each, and nothing that is
    not there."""
    page = (EXAMPLES / "README.md").read_text()
    assert len(scripts()) >= 7
    assert {
        path.name: lines for path in scripts() if (lines := path.read_text().count("\n")) >= LONGEST
    } == {}
    named = {
        (EXAMPLES / link).resolve() for link in re.findall(r"\]\(([\w./-]+\.(?:py|sh))\)", page)
    }
    assert named >= set(scripts()) and all(path.exists() for path in named)


@pytest.mark.slow
def test_groups_are_pushed_and_pulled_with_curl(tmp_path):
    """The group that the shell pushed, twice under one key, is pulled once, and the server counts
    the step."""
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    printed = run(
        "sh",
        str(EXAMPLES / "push_groups.sh"),
        cwd=tmp_path,
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    answers = [
        json.loads(line) for line in re.findall(r"^\{.*?\}$", printed, re.MULTILINE | re.DOTALL)
    ]
    [batch] = [answer["batch"] for answer in answers if answer.get("batch")]
    assert [group["tokens"] for group in batch] == [[[5, 6, 7], [5, 6, 8, 9]]]
    assert answers[-1] == {"current_step": 1, "queue_size": 0}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_trainer_of_ones_own_learns_from_the_server():
    """A score of 1/16 is chance; fifteen steps on pulled batches bring it far above."""
    printed = run(sys.executable, str(EXAMPLES / "own_trainer.py"), "15", OMP_NUM_THREADS="1")
    means = [float(mean) for mean in re.findall(r"32 sequences, mean score ([\d.]+)", printed)]
    assert len(means) == 15 and means[0] < 0.13 and means[-1] > 0.2, means


@pytest.mark.slow
async def test_the_black_box_agent_plays_an_episode_and_corrects_itself():
    """It asks again when no command was said, shows the model what a command printed, and ends with
    the environment."""

    def speak(prompt):
        return ("hm", "aws s3 ls", "aws s3api list-buckets")[min(2, prompt.count("<|user|>") - 1)]

    limits = EpisodeLimits(max_turns=5, max_total_tokens=600, turn_tokens=40)
    agent = BlackBoxAgent(
        load_agent("examples/black_box_agent.py:rollout"), chat(), limits, timeout_s=60
    )
    with FakeEnvServer() as server:
        env = AwsEnvironment(server.url)
        try:
            outcome = await agent.play(
                env, EpisodeRequest(0, Task("1"), sampling_seed=5), FakeTokens(speak), 2
            )
        finally:
            await agent.close()
            await env.close()
    assert [turn.text for turn in outcome.turns] == ["hm", "aws s3 ls", "aws s3api list-buckets"]
    assert outcome.status == "achieved" and outcome.reward == 1.0


@pytest.mark.slow
async def test_the_black_box_agent_stops_at_a_limit():
    """An episode that ran out of turns is valid data; the refusal of a third turn is not a fault of
    the agent."""
    limits = EpisodeLimits(max_turns=2, max_total_tokens=600, turn_tokens=40)
    agent = BlackBoxAgent(
        load_agent("examples/black_box_agent.py:rollout"), chat(), limits, timeout_s=60
    )
    with FakeEnvServer() as server:
        env = AwsEnvironment(server.url)
        try:
            outcome = await agent.play(
                env,
                EpisodeRequest(0, Task("1"), sampling_seed=5),
                FakeTokens(lambda prompt: "hm"),
                2,
            )
        finally:
            await agent.close()
            await env.close()
    assert outcome.status == "max_turns" and outcome.valid and len(outcome.turns) == 2


@pytest.mark.nightly
@pytest.mark.sim
def test_an_episode_is_played_over_the_wire():
    """The scripted agent of the example finds the bucket and solves its task on a real
    simulator."""
    printed = run(sys.executable, str(EXAMPLES / "environment_over_the_wire.py"))
    assert printed.count("$ aws s3api ") == 2 and printed.endswith("return 1.0\n")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """What the first run printed at toy size, and its folder."""
    root = tmp_path_factory.mktemp("first")
    printed = run(
        sys.executable,
        str(EXAMPLES / "first_run.py"),
        f"fileroot={root / 'runs'}",
        "total_train_steps=2",
        *TINY,
        cwd=root,
    )
    yield printed, root / "runs" / "grpo_aws" / "first_run"


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.slow
def test_the_first_run_says_what_it_learned(first_run):
    """It trains, evaluates before and after, and prints both numbers of the summary."""
    printed, folder = first_run
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    for when in ("before", "after"):
        assert f"{summary[f'heldout_success_{when}']['overall']:.0%} {when}" in printed
    assert re.search(
        r"reward of a training episode: -?[\d.]+ in step 1, -?[\d.]+ in step 2", printed
    )
    assert (folder / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("example", "given", "said"),
    [
        ("first_run", "--help", "options are name=value"),
        pytest.param(
            "own_trainer", "twenty", "give the number of steps", marks=pytest.mark.slow
        ),  # it imports torch
        ("environment_over_the_wire", "twenty", "twenty: no server plays there"),
        ("trl_grpo", "policy", "run this with a Python that has TRL"),
    ],
)
def test_an_example_that_cannot_run_so_says_why_in_a_line(
    example: str, given: str, said: str
) -> None:
    """They used to end in tracebacks."""
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.sim
@pytest.mark.slow
def test_an_algorithm_of_ones_own_trains_the_policy_of_the_first_run(first_run):
    """The launcher takes the file from where it lies, and the train step in the worker is the
    example's."""
    folder = first_run[1]
    toy = [option for option in SMALL if not option.startswith("evaluation.")]
    options = [
        f"fileroot={folder.parents[1]}",
        "trial_name=default",
        f"actor.path={folder / 'policy'}",
        "total_train_steps=1",
        *toy,
    ]
    command = (
        sys.executable,
        "-m",
        "realhf.launch",
        f"+experiment_path={EXAMPLES / 'own_algorithm.py'}",
    )
    run(
        *command,
        "evaluation.episodes_per_task=0",
        "evaluation.greedy_episodes_per_task=0",
        *options,
    )
    metrics = folder.parents[1] / "own_algorithm" / "default" / "metrics.jsonl"
    [step] = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert step["policy/updates"] == 1 and "actor_train/n_failed" in step


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.skipif(
    not TRL_PYTHON.exists(),
    reason="no TRL beside us; `make test-trl` makes .venv-trl and runs this",
)
def test_trl_trains_the_policy_of_the_first_run(first_run):
    """TRL takes two steps on episodes that the environment played."""
    policy = str(first_run[1] / "policy")
    toy = ("--group-size", "2", "--steps", "2", "--tasks", "1", "3")
    with EnvServerProcess(2) as server:
        command = (
            str(TRL_PYTHON),
            str(EXAMPLES / "trl_grpo.py"),
            policy,
            "--url",
            server.url,
            *toy,
        )
        printed = run(*command, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    assert re.findall(r"step (\d): reward -?[\d.]+, loss -?[\d.]+", printed) == ["1", "2"]


FILE = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py"
ARGUMENTS = [f"+experiment_path={FILE}", "mode=check"]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The module, as the launcher and the workers import it."""
    yield load_plugin(FILE)


def two_groups() -> SequenceSample:
    """Two groups of two sequences of four tokens, of which all but the first are trained; each has
    one failure."""
    tensors = {
        "packed_input_ids": torch.arange(16),
        "loss_mask": torch.tensor([False, True, True, True] * 4),
        "packed_logprobs": -torch.ones(12),
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.75]),
        "outcome": torch.zeros(4, dtype=torch.uint8),
    }
    shapes = {"packed_logprobs": 3, "rewards": 1, "outcome": 1}
    return SequenceSample.from_tensors(
        ["a", "b"], tensors, {key: [[shapes.get(key, 4)] * 2] * 2 for key in tensors}
    )


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_failures_count_as_much_as_the_option_says(example: ModuleType, weight: float) -> None:
    """Positive advantages stay those of GRPO, negative ones are multiplied by the weight; 1 is GRPO
    itself."""
    plain = PolicyGradientInterface({"algo": "grpo"}).prepare(two_groups())[0][ADVANTAGES]
    own = interfaces.get("lenient_policy_gradient")(
        {"failure_weight": weight}, ppo={"algo": "grpo"}
    )
    prepared, stats = own.prepare(two_groups())
    assert (plain < 0).sum() == stats["n_failed"] == 6 and (plain > 0).sum() == 6
    assert torch.equal(prepared[ADVANTAGES], torch.where(plain < 0, weight * plain, plain))


@pytest.mark.slow
def test_its_graph_is_that_of_grpo_with_its_own_train_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher takes the file and its option, and counts GRPO's four calls."""
    assert main([*ARGUMENTS, "algorithm.failure_weight=0.25"]) == 0
    assert "own_algorithm: 4 calls" in capsys.readouterr().out
