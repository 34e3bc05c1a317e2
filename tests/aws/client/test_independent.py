"""Independent play: nobody waits for a slow environment, failures and errors as in lockstep."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from realhf.aws.client.session_group import GroupError
from tests.rollout.fake_env_server import FakeEnvServer
from tests.rollout.scripted import ScriptedPolicy


def say(task: str, turn: int) -> str:
    return f"aws turn {turn}"


class OnceAt:
    """The trick at the first message of this kind."""

    def __init__(self, kind: str, trick: str, times: int = 1) -> None:
        self.kind, self.trick, self.times = kind, trick, times

    def __call__(self, number: int, message: dict[str, Any]) -> str | None:
        if message["type"] != self.kind or self.times == 0:
            return None
        self.times -= 1
        return self.trick


def play(fake: FakeEnvServer, policy: Any, episodes: int = 5, timeout_s: float = 2.0, **options: Any) -> Any:
    with MultiTurnEnvPool(fake.url, 2, message_timeout_s=timeout_s, **options) as pool:
        return pool.run_groups([{}], policy, group_size=episodes, seeds=[0], mode="independent")[0]


def test_a_slow_environment_holds_up_only_its_own_episode() -> None:
    with FakeEnvServer(lambda number, message: "late" if number == 0 and message["type"] == "step" else None) as fake:
        policy = ScriptedPolicy(say)
        outcomes = play(fake, policy, timeout_s=60)
    assert [outcome.status for outcome in outcomes] == ["achieved"] * 5
    assert {slot for slot in policy.freed} == {0, 1}
    steps = [number for number, message in fake.messages if message["type"] == "step"]
    assert steps.count(1) > steps.count(0), "the quick session waited for the slow one"


@pytest.mark.nightly
@pytest.mark.parametrize(("trick", "status"), [("hang", "timeout"), ("drop", "lost"), ("error", "internal")])
@pytest.mark.parametrize("kind", ["reset", "step"])
def test_a_failed_environment_is_dropped_or_played_again(trick: str, status: str, kind: str) -> None:
    with (
        FakeEnvServer(OnceAt(kind, trick)) as fake,
        MultiTurnEnvPool(fake.url, 2, message_timeout_s=2.0, on_failure="drop") as pool,
    ):
        for expected in ([status] + ["achieved"] * 4, ["achieved"] * 5):
            outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=5, mode="independent")
            assert sorted(outcome.status for outcome in outcomes) == sorted(expected)
        assert fake.connections == 3
    with FakeEnvServer(OnceAt(kind, trick)) as fake:
        outcomes = play(fake, ScriptedPolicy(say), on_failure="retry")
        assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("achieved", 1.0)] * 5


@pytest.mark.parametrize("mode", ["lockstep", "independent"])
def test_raise(mode: str) -> None:
    with FakeEnvServer(OnceAt("step", "error")) as fake, MultiTurnEnvPool(fake.url, 2, on_failure="raise") as pool:
        with pytest.raises(GroupError, match="internal") as caught:
            pool.run_group({}, ScriptedPolicy(say), mode=mode)
        assert sorted(outcome.status for outcome in caught.value.outcomes) == ["achieved", "internal"]


def test_an_error_of_the_policy_is_raised_and_the_pool_goes_on() -> None:
    def broken(task: str, turn: int) -> str:
        raise ArithmeticError("weights are gone")

    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, 2) as pool:
        with pytest.raises(ArithmeticError):
            pool.run_group({}, ScriptedPolicy(broken), mode="independent")
        assert all(outcome.achieved for outcome in pool.run_group({}, ScriptedPolicy(say), mode="independent"))
        tight = MultiTurnEnvPool(fake.url, 1, turn_tokens=9, max_total_tokens=10)
        with tight, pytest.raises(ValueError, match="max_total_tokens"):
            tight.run_group({}, ScriptedPolicy(say), mode="independent")
        with pytest.raises(ValueError, match="lockstep, independent"):
            pool.run_group({}, ScriptedPolicy(say), mode="serial")


@pytest.mark.parametrize("mode", ["lockstep", "independent"])
def test_the_last_reward_counts_where_the_server_says_level(mode: str) -> None:
    for reward_mode, expected in (("level", 0.5), ("potential", 1.0)):
        with FakeEnvServer(metadata={"reward_mode": reward_mode}) as fake, MultiTurnEnvPool(fake.url, 2) as pool:
            assert pool.reward_mode == reward_mode
            assert [outcome.reward for outcome in pool.run_group({}, ScriptedPolicy(say), mode=mode)] == [expected] * 2


def test_stepping_by_hand_and_recording_once() -> None:
    calls = []

    class Recorder:
        def record_result(self, task: Any, achieved: bool | float | None, reward: float = 0.0) -> None:
            calls.append((task, achieved, reward))

    with FakeEnvServer() as fake, MultiTurnEnvPool(fake.url, 2, Recorder()) as pool:
        assert [result.reward for result in pool.reset_group({"task_id": 1}, seed=4)] == [None, None]
        first, second = pool.run_group_step(["aws a", None])
        assert first is not None and first.reward == 0.5 and second is None
        outcomes = pool.run_group({}, ScriptedPolicy(say))
        assert calls == []
        assert pool.record_group_result("task", outcomes).mean == 1.0
        assert calls == [("task", 1.0, 1.0)]
