"""A pool against a fake server that misbehaves on purpose, and the variables that configure a pool."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool, pool_arguments, pool_from_environment
from realhf.aws.client.session_group import GroupError
from tests.rollout.fake_env_server import FakeEnvServer
from tests.rollout.word_chat import ScriptedPolicy

MODES = ["lockstep", "independent"]


def say(task: str, turn: int) -> str:
    return f"aws turn {turn}"


class OnceAt:
    """The trick at the first ``times`` messages of the kind."""

    def __init__(self, trick: str, kind: str, times: int = 1) -> None:
        self.kind, self.trick, self.times = kind, trick, times

    def __call__(self, number: int, message: dict[str, Any]) -> str | None:
        if message["type"] != self.kind or self.times == 0:
            return None
        self.times -= 1
        return self.trick


@pytest.mark.nightly
@pytest.mark.parametrize(("trick", "status"), [("hang", "timeout"), ("drop", "lost"), ("error", "internal")])
@pytest.mark.parametrize("kind", ["reset", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_environment_is_dropped_or_played_again(mode: str, kind: str, trick: str, status: str):
    for on_failure, expected in (("drop", [status] + ["achieved"] * 4), ("retry", ["achieved"] * 5)):
        with (
            FakeEnvServer(OnceAt(trick, kind)) as fake,
            MultiTurnEnvPool(fake.url, 2, on_failure=on_failure, message_timeout_s=2.0) as pool,
        ):
            outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=5, mode=mode)
            again = pool.run_group({}, ScriptedPolicy(say), group_size=5, mode=mode)
            assert fake.connections == 3
        statuses = [outcome.status for outcome in outcomes]
        assert statuses == expected if mode == "lockstep" else sorted(statuses) == sorted(expected)
        for outcome in outcomes:
            if outcome.status == "achieved":
                assert outcome.reward == 1.0 and [turn.text for turn in outcome.turns] == ["aws turn 0", "aws turn 1"]
            else:
                assert outcome.reward is None and not outcome.valid and outcome.message
        assert all(outcome.status == "achieved" for outcome in again), "the next run starts whole"


def test_retry_is_done_once_only():
    with FakeEnvServer(OnceAt("error", "step", times=2)) as fake, MultiTurnEnvPool(fake.url, 1) as pool:
        outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=2)
        assert [outcome.status for outcome in outcomes] == ["internal", "achieved"]


@pytest.mark.parametrize("mode", MODES)
def test_raise(mode: str):
    with FakeEnvServer(OnceAt("error", "step")) as fake, MultiTurnEnvPool(fake.url, 2, on_failure="raise") as pool:
        with pytest.raises(GroupError, match="internal") as caught:
            pool.run_group({}, ScriptedPolicy(say), mode=mode)
        assert sorted(outcome.status for outcome in caught.value.outcomes) == ["achieved", "internal"]


def test_partial_connect_closes_what_was_opened():
    with FakeEnvServer(OnceAt("drop", "state")) as server:
        pool = MultiTurnEnvPool(server.url, 4)
        with pytest.raises(ConnectionError):
            pool.connect()
        assert server.connections == 4
        pool.connect()
        assert all(outcome.valid for outcome in pool.run_group({}, ScriptedPolicy(say)))
        assert server.open == 4
        pool.close()
        assert server.open == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_last_reward_counts_where_the_server_says_level(mode: str):
    for reward_mode, expected in (("level", 0.5), ("potential", 1.0)):
        with FakeEnvServer(metadata={"reward_mode": reward_mode}) as fake, MultiTurnEnvPool(fake.url, 2) as pool:
            assert pool.reward_mode == reward_mode
            assert [outcome.reward for outcome in pool.run_group({}, ScriptedPolicy(say), mode=mode)] == [expected] * 2


def test_stepping_by_hand_and_recording_once():
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
        with pytest.raises(ValueError, match="lockstep, independent"):
            pool.run_group({}, ScriptedPolicy(say), mode="serial")


def test_a_pool_is_configured_by_variables_and_arguments(monkeypatch: pytest.MonkeyPatch):
    numbers = {"size": 8, "max_turns": 6, "max_total_tokens": 4096}
    assert pool_arguments({}) == {"base_url": "http://127.0.0.1:8100", "token": None, **numbers}
    for name, text in {"NUM_GENERATIONS": "4", "MAX_TURNS": "3", "AWS_RL_ENV_TOKEN": "t"}.items():
        monkeypatch.setenv(name, text)
    assert pool_arguments({"NUM_GENERATIONS": "4", "AWS_RL_ENV_URL": "http://a:1"})["base_url"] == "http://a:1"
    assert pool_from_environment().size == 4
    assert pool_from_environment(size=2).size == 2


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_a_bad_number_is_named(text: str):
    with pytest.raises(ValueError, match="MAX_TURNS"):
        pool_arguments({"MAX_TURNS": text})
