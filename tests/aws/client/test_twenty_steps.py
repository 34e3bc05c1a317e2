"""Twenty steps of the whole loop without a model: curriculum, group of episodes, result; oracle and random policy."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import psutil
import pytest

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import TrainingTasks
from realhf.aws.tasks.task import Task
from realhf.env.curriculum import Curriculum, make_curriculum
from tests.rollout.word_chat import ScriptedPolicy

pytestmark = pytest.mark.sim
SESSIONS, STEPS = 3, 20
WORDS = ("aws s3api list-buckets", "aws sqs list-queues", "aws iam list-users", "let me think")


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServerProcess]:
    with EnvServerProcess(SESSIONS) as process:
        yield process


def play(server: EnvServerProcess, curriculum: Curriculum, oracle: bool) -> list[float]:
    rng, means = random.Random(0), []
    with MultiTurnEnvPool(server.url, SESSIONS, curriculum, turn_tokens=200, retry_capacity_s=5) as pool:
        for _ in range(STEPS):
            task: Task = curriculum.next_task()
            solution = task.solution
            policy = ScriptedPolicy(lambda text, turn, own=solution: own[turn] if oracle else rng.choice(WORDS))
            outcomes = pool.run_group(task, policy)
            means.append(pool.record_group_result(task, outcomes).mean)
    return means


@pytest.mark.nightly
def test_the_oracle_earns_one_and_chance_earns_little(server: EnvServerProcess) -> None:
    threads = set(threading.enumerate())
    children = len(psutil.Process(server.process.pid).children(recursive=True))
    tiers = ["warmup", "beginner", "intermediate"]
    good = make_curriculum("priority", 1, TrainingTasks(tiers, ["starter"]))
    assert play(server, good, oracle=True) == pytest.approx([1.0] * STEPS)
    figures = good.get_stats()
    assert figures["episode_count"] == STEPS and figures["promotions"][0] == (3, "beginner")
    assert not figures["weak_spots"] and figures["avg_reward_last_10"] == pytest.approx(1.0)
    poor = make_curriculum("priority", 1, TrainingTasks(tiers, ["starter"]))
    rewards = play(server, poor, oracle=False)
    assert sum(rewards) / STEPS < 0.2
    assert poor.get_stats()["group"] == "warmup" and poor.get_stats()["promotions"] == []
    assert set(threading.enumerate()) <= threads
    with MultiTurnEnvPool(server.url, SESSIONS, retry_capacity_s=5) as pool:
        assert len(pool.reset_group({"task_id": 1}, seed=3)) == SESSIONS, "a slot leaked"
        assert len(psutil.Process(server.process.pid).children(recursive=True)) <= children + 2, (
            "a process leaked"
        )  # the bench and its worker start with the first target
