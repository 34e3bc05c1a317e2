"""The pool against the real server: oracle and idle policies, determinism, budget, capacity, twenty
steps of a loop."""

import asyncio
import os
import random
import signal
import threading

import psutil
import pytest

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool, PoolClosed
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import TrainingTasks, instantiate
from realhf.aws.tasks.task import Task
from realhf.env.curriculum import Curriculum, make_curriculum
from realhf.env.openenv_client import CapacityError, ConnectError
from tests.rollout.word_chat import END, LossyChat, ScriptedPolicy

pytestmark = pytest.mark.sim
SESSIONS = 3
TASKS = [
    instantiate(task_id, seed) for task_id, seed in ((101, 1), (205, 2), (206, 3), (1, 4), (201, 5))
]
SOLUTIONS = {task.description: task.solution for task in TASKS}
RESETS = [{"task": task.to_json()} for task in TASKS]
SEEDS = [task.seed for task in TASKS]


def oracle(task: str, turn: int) -> str:
    return SOLUTIONS[task][turn]


@pytest.fixture(scope="module")
def server():
    with EnvServerProcess(SESSIONS) as process:
        yield process


@pytest.fixture(scope="module")
def pool(server: EnvServerProcess):
    with MultiTurnEnvPool(server.url, SESSIONS, turn_tokens=200) as connected:
        yield connected


@pytest.mark.nightly
def test_the_oracle_solves_every_episode_and_keeps_every_token(pool: MultiTurnEnvPool) -> None:
    policy = ScriptedPolicy(oracle)
    groups = pool.run_groups(RESETS, policy, group_size=2, seeds=SEEDS)
    assert [len(group) for group in groups] == [2] * len(TASKS)
    seen = {ids for batch in policy.batches for _, ids in batch}
    for task, group in zip(TASKS, groups, strict=True):
        for outcome in group:
            assert outcome.status == "achieved" and outcome.valid and outcome.achieved
            assert outcome.reward == pytest.approx(1.0) and outcome.progress == 1.0
            assert (outcome.task_id, outcome.group, outcome.seed) == (
                str(task.task_id),
                task.tier,
                task.seed,
            )
            assert [turn.text for turn in outcome.turns] == [*task.solution]
            check_tokens(outcome, seen, len(task.solution))


def check_tokens(outcome, seen: set[tuple[int, ...]], n_turns: int) -> None:
    chat = LossyChat()
    assert outcome.prompt_ids == chat.first(outcome.task_text)
    expected: list[int] = []
    generated = 0
    for index, turn in enumerate(outcome.turns):
        assert tuple(outcome.prompt_ids + expected) in seen, "the engine saw another prefix"
        ids = [ord(c) + 1000 for c in turn.text] + [END]
        generated += len(ids)
        expected += ids
        if index < n_turns - 1:
            expected += chat.following(turn.output, ended=True)
    assert outcome.completion_ids == expected
    assert len(outcome.logprobs) == len(outcome.versions) == len(outcome.loss_mask) == len(expected)
    assert sum(outcome.loss_mask) == generated and outcome.loss_mask[-1]
    for mask, logprob, version in zip(
        outcome.loss_mask, outcome.logprobs, outcome.versions, strict=True
    ):
        assert (logprob, version >= 0) == ((-0.25, True) if mask else (0.0, False))


def test_turns_without_a_command_cost_no_environment_step(pool: MultiTurnEnvPool) -> None:
    before = dict(pool.timings)
    policy = ScriptedPolicy(lambda task, turn: "i do not know", finish="length")
    (group,) = pool.run_groups(RESETS[:1], policy, group_size=2, seeds=[1])
    for outcome in group:
        assert outcome.status == "max_turns" and outcome.reward == 0.0 and outcome.valid
        assert len(outcome.turns) == 6 and all(
            "no command" in turn.output for turn in outcome.turns
        )
        assert outcome.completion_ids[len("i do not know")] == END
        assert not outcome.loss_mask[len("i do not know")]
    assert pool.timings["env_steps"] == before["env_steps"]
    assert pool.timings["episodes"] == before["episodes"] + 2
    assert sorted(set(policy.freed)) == [0, 1, 2]


def test_a_command_the_wire_refuses_is_a_failed_turn(pool: MultiTurnEnvPool) -> None:
    with borrowed(pool, turn_tokens=9000, max_total_tokens=20_000, max_turns=1) as wide:
        policy = ScriptedPolicy(lambda task, turn: "aws " + "x" * 8500)
        (outcome,) = wide.run_group(RESETS[0], policy, group_size=1)
    assert (
        outcome.status == "max_turns"
        and outcome.valid
        and "at most 8192" in outcome.turns[0].output
    )


def borrowed(pool: MultiTurnEnvPool, **options) -> MultiTurnEnvPool:
    """Another pool on the same server, of one session that the shared pool gives up until its next
    run."""
    assert pool._thread is not None
    pool._thread.call(pool._group.clients[-1].close(), 5)
    return MultiTurnEnvPool(pool._group.clients[-1].url, 1, retry_capacity_s=3, **options)


def test_connecting_is_all_or_nothing(pool: MultiTurnEnvPool, server: EnvServerProcess) -> None:
    pool.reset_group(RESETS[0])  # opens what another test has borrowed
    greedy = MultiTurnEnvPool(server.url, 1)
    threads = set(threading.enumerate())
    with pytest.raises(CapacityError, match=f"{SESSIONS}/{SESSIONS} sessions"):
        greedy.connect()
    assert set(threading.enumerate()) <= threads
    greedy.close()
    with pytest.raises(ConnectError):
        MultiTurnEnvPool("http://127.0.0.1:1", 2, connect_timeout_s=2).connect()


def test_misuse_is_an_error(pool: MultiTurnEnvPool, server: EnvServerProcess) -> None:
    pool.connect()
    with pytest.raises(ValueError, match="seeds"):
        pool.run_groups(RESETS[:2], ScriptedPolicy(oracle), group_size=1, seeds=[1])
    with pytest.raises(PoolClosed, match="connect"):
        MultiTurnEnvPool(server.url, 1).run_group(RESETS[0], ScriptedPolicy(oracle))

    async def inside() -> None:
        pool.run_group(RESETS[0], ScriptedPolicy(oracle))

    with pytest.raises(RuntimeError, match="blocks"):
        asyncio.run(inside())

    def nested(task: str, turn: int) -> str:
        pool.run_group(RESETS[0], ScriptedPolicy(oracle))
        return ""

    with pytest.raises(RuntimeError, match="playing already"):
        pool.run_group(RESETS[0], ScriptedPolicy(nested))


@pytest.mark.nightly
def test_the_server_dies_in_mid_run() -> None:
    with EnvServerProcess(2) as server:
        pool = MultiTurnEnvPool(server.url, 2, turn_tokens=200)
        pool.connect()
        turns: list[int] = []

        def murderous(task: str, turn: int) -> str:
            turns.append(turn)
            if turn == 1 and turns.count(1) == 1:
                os.kill(server.process.pid, signal.SIGKILL)
                server.process.wait()
            return oracle(task, turn)

        groups = pool.run_groups(
            RESETS[1:3], ScriptedPolicy(murderous), group_size=2, seeds=SEEDS[1:3]
        )
        for outcome in [outcome for group in groups for outcome in group]:
            assert outcome.status == "lost" and not outcome.valid and outcome.reward is None
            assert outcome.message
        with pytest.raises(ConnectError):
            pool.run_group(RESETS[0], ScriptedPolicy(oracle))
        pool.close()
        pool.close()
        with pytest.raises(PoolClosed):
            pool.run_group(RESETS[0], ScriptedPolicy(oracle))


@pytest.mark.nightly
def test_a_server_in_level_mode_that_wants_a_token() -> None:
    with EnvServerProcess(2, "--reward-mode", "level", "--token", "sesame") as server:
        with pytest.raises(ConnectError, match="401"):
            MultiTurnEnvPool(server.url, 2).connect()
        with MultiTurnEnvPool(server.url, 2, turn_tokens=200, token="sesame") as guarded:
            for mode in ("lockstep", "independent"):
                for outcome in guarded.run_group(TASKS[4], ScriptedPolicy(oracle), mode=mode):
                    assert [turn.reward for turn in outcome.turns] == pytest.approx([0.5, 1.0])
                    assert outcome.reward == pytest.approx(1.0), "the sum would be 1.5"


STEPS = 20
WORDS = ("aws s3api list-buckets", "aws sqs list-queues", "aws iam list-users", "let me think")


def play(server: EnvServerProcess, curriculum: Curriculum, oracle: bool) -> list[float]:
    rng = random.Random(0)
    means = []
    with MultiTurnEnvPool(
        server.url, SESSIONS, curriculum, turn_tokens=200, retry_capacity_s=5
    ) as pool:
        for _ in range(STEPS):
            task: Task = curriculum.next_task()
            solution = task.solution
            policy = ScriptedPolicy(
                lambda text, turn, own=solution: own[turn] if oracle else rng.choice(WORDS)
            )
            outcomes = pool.run_group(task, policy)
            means.append(pool.record_group_result(task, outcomes).mean)
    return means


@pytest.fixture
def own_server():
    with EnvServerProcess(SESSIONS) as process:
        yield process


@pytest.mark.nightly
def test_the_oracle_earns_one_and_chance_earns_little(own_server: EnvServerProcess) -> None:
    server = own_server
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
        # the bench and its worker start with the first target
        assert len(psutil.Process(server.process.pid).children(recursive=True)) <= children + 2, (
            "a process leaked"
        )
