"""Clients of other people, unmodified, play whole episodes and are trained on: the tokens that are
trained are those that the engine sampled. ``make test-agents`` installs the clients."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realhf.monitor.rollouts.reader import RolloutRow, RolloutStore
from tests.agents.recorded import FILE

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STEPS = 3
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
"""Variables without which clients talk to hosts of their makers."""
LIMIT_S = 500
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
]


@dataclass(frozen=True)
class Client:
    """A client that is tried."""

    name: str
    """File of its agent in this folder, without the ending."""
    world: str = "Text"
    """Class of ``boxes.py`` whose demonstrations the policy has learned from."""
    venv: str = ".venv-agents"
    """Environment that it is installed in."""
    stops: bool = False
    """Whether its requests have stop strings, after which an engine may have sampled more."""
    rewrites: bool = False
    """Whether it changes the policy's turns before it sends them back, so that its requests begin
    conversations of their own."""


CLIENTS = (
    Client("openai_chat"),
    Client("openai_responses"),
    Client("anthropic_runner"),
    Client("openai_agents"),
    Client("pydantic_ai_output", "PydanticAi"),
    Client("langgraph_structured", "LangGraph"),
    Client("litellm_chat"),
    Client("mcp_client"),
    Client("smolagents_tools", "Smolagents", stops=True, rewrites=True),
    Client("smolagents_code", "Code", stops=True, rewrites=True),
    Client("crewai_crew", "CrewAi", ".venv-crewai"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For all runs, which share the policies of the same demonstrations."""
    return tmp_path_factory.mktemp("runs")


def train(root: Path, client: Client) -> list[dict[str, Any]]:
    """Play with a client and train. Returns the metrics of the steps."""
    done = subprocess.run(
        [
            ROOT / client.venv / "bin" / "python",
            "-m",
            "realhf.launch",
            "experiment=grpo_async",
            "model=builtin_tiny",
            f"env.path={HERE}/boxes.py:{client.world}",
            f"rollout.agent={HERE}/recorded.py:{client.name}",
            "warm_start.episodes_per_task=64",
            "warm_start.train_steps=400",
            "warm_start.batch_size=16",
            f"total_train_steps={STEPS}",
            "dataset.train_bs_n_seqs=2",
            "ppo.group_size=4",
            "rollout.sessions=4",
            "rollout.max_turns=6",
            "rollout.max_total_tokens=1800",
            "rollout.retries=0",
            "builtin.max_positions=2048",
            "gen.max_new_tokens=48",
            "monitor.rollout_tokens=1",
            "monitor.trackers=[]",
            "evaluation.episodes_per_task=0",
            "evaluation.greedy_episodes_per_task=0",
            "recover_mode=disabled",
            "torch_threads=1",
            f"fileroot={root}",
            f"experiment_name={client.name}",
            "trial_name=default",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **QUIET,
            "PYTHONPATH": str(ROOT),
            FILE: str(root / f"{client.name}.jsonl"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    lines = (root / client.name / "default" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


Turn = tuple[list[int], list[int]]
"""The ids before a turn and those of the turn."""


def trained_turns(tokens: dict[str, Any]) -> Iterator[Turn]:
    """Yield the policy's turns of a row with the ids that are trained."""
    ids = tokens["prompt_ids"] + tokens["ids"]
    first = len(tokens["prompt_ids"])
    starts = [first + start for start in tokens["turn_starts"]]
    masked = [first + place for place, trained in enumerate(tokens["mask"]) if trained]
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        own = [place for place in masked if start <= place < end]
        assert own == list(range(start, start + len(own))), "a turn is trained without gaps"
        yield ids[:start], ids[start : start + len(own)]
    assert all(place >= starts[0] for place in masked)


def take_log(logs: list[dict[str, Any]], turns: list[Turn], *, stops: bool) -> dict[str, Any]:
    """Remove the log of an episode and return it: the one whose turns, as the engine returned them,
    are the trained ones. With ``stops`` the engine may have sampled more after each."""
    for log in logs:
        left = [turn for turn in log["turns"] if turn[1]]
        for before, ids in turns:
            found = [
                turn
                for turn in left
                if turn[0] == before and ids == (turn[1][: len(ids)] if stops else turn[1])
            ]
            if not found:
                break
            left.remove(found[0])
        else:
            if not left:
                logs.remove(log)
                return log
    raise AssertionError("an episode is trained on turns that the engine did not sample for it")


def episodes(rows: list[RolloutRow]) -> Iterator[list[RolloutRow]]:
    """Yield the rows of each episode, whose main row comes first."""
    mains = [row for row in rows if row.play.branch is None]
    for main in mains:
        sample, _, number = main.play.id.rpartition("/")
        yield [main] + [
            row
            for row in rows
            if row.play.id.rpartition("/")[0] == sample and row.play.branch == int(number)
        ]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_is_trained_is_what_the_engine_sampled(root: Path, client: Client) -> None:
    if not (ROOT / client.venv / "bin" / "python").exists():
        pytest.skip(f"make test-agents makes {client.venv}")
    metrics = train(root, client)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert not any(name.startswith("failures/") for row in metrics for name in row)
    store = RolloutStore(root / client.name / "default")
    store.refresh()
    assert store.problems == []
    rows = [row for row in store.rows() if row.train]
    assert {row.step for row in rows} == set(range(1, STEPS + 1))
    played = list(episodes(rows))
    assert len(played) >= 20 and sum(map(len, played)) == len(rows)

    lines = (root / f"{client.name}.jsonl").read_text().splitlines()
    waiting = [json.loads(line) for line in lines]
    logs = []
    n_trained = 0
    for episode in played:
        assert len({row.play.reward for row in episode}) == 1, "rows share the episode's reward"
        turns = [
            turn for row in episode for turn in trained_turns(store.record(row.play)["tokens"])
        ]
        logs.append(take_log(waiting, turns, stops=client.stops))
        n_trained += sum(len(ids) for _, ids in turns)
    n_sampled = sum(len(ids) for log in logs for _, ids in log["turns"])
    assert n_trained == sum(row["rollouts/tokens"] for row in metrics)
    assert n_trained == sum(row["batch/tokens"] for row in metrics)
    assert n_trained == sum(row.train.n_tokens for row in rows if row.train)
    assert n_trained == n_sampled or client.stops
    assert (len(rows) > len(played)) == client.rewrites

    print(
        f"\n| {client.name} | {len(played)} | {sum(log['steps'] for log in logs)} "
        f"| {sum(log['answers'] for log in logs)} | {len(rows)} "
        f"| {sum(log['broken'] for log in logs)} of {sum(log['checked'] for log in logs)} "
        f"| {n_sampled} | {n_trained} | {[round(row['reward/mean'], 2) for row in metrics]} "
        f"| {Counter(log['problem'][:90] for log in logs if log['problem'])} |"
    )
