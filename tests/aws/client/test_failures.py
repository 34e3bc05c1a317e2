"""What becomes of an episode whose environment fails, against a fake server that misbehaves on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.aws.client.multi_turn_pool import MultiTurnEnvPool
from tests.rollout.fake_env_server import FakeEnvServer
from tests.rollout.scripted import ScriptedPolicy


def say(task: str, turn: int) -> str:
    return f"aws turn {turn}"


class OnceAt:
    """The trick at the first ``times`` messages that match; counts messages by type."""

    def __init__(self, trick: str, kind: str, command: str | None = None, times: int = 1) -> None:
        self.kind, self.trick, self.command, self.times = kind, trick, command, times

    def __call__(self, number: int, message: dict[str, Any]) -> str | None:
        matches = message["type"] == self.kind and self.command in (None, message.get("data", {}).get("command"))
        if not matches or self.times == 0:
            return None
        self.times -= 1
        return self.trick


def play(misbehave: OnceAt, *, on_failure: str, size: int = 2, episodes: int = 5) -> tuple[list[Any], int]:
    with FakeEnvServer(misbehave) as server:
        with MultiTurnEnvPool(server.url, size, on_failure=on_failure, message_timeout_s=2.0) as pool:
            outcomes = pool.run_group({}, ScriptedPolicy(say), group_size=episodes)
            again = pool.run_group({}, ScriptedPolicy(say), group_size=episodes)
            assert all(outcome.status == "achieved" for outcome in again), "the next run starts whole"
        return outcomes, server.connections


@pytest.mark.nightly
@pytest.mark.parametrize(("trick", "status"), [("hang", "timeout"), ("drop", "lost"), ("error", "internal")])
@pytest.mark.parametrize("kind", ["reset", "step"])
def test_drop_returns_a_typed_failure(trick: str, status: str, kind: str) -> None:
    outcomes, connections = play(OnceAt(trick, kind), on_failure="drop")
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == [status] + ["achieved"] * 4
    assert outcomes[0].reward is None and not outcomes[0].valid and outcomes[0].message
    assert connections == 3


@pytest.mark.nightly
@pytest.mark.parametrize("trick", ["hang", "drop", "error"])
@pytest.mark.parametrize("kind", ["reset", "step"])
def test_retry_plays_the_instance_again_on_a_new_connection(trick: str, kind: str) -> None:
    outcomes, connections = play(OnceAt(trick, kind), on_failure="retry")
    assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("achieved", 1.0)] * 5
    assert all([turn.text for turn in outcome.turns] == ["aws turn 0", "aws turn 1"] for outcome in outcomes)
    assert connections == 3


def test_retry_is_done_once_only() -> None:
    outcomes, _ = play(OnceAt("error", "step", times=2), on_failure="retry", size=1, episodes=2)
    assert [outcome.status for outcome in outcomes] == ["internal", "achieved"]


def test_partial_connect_closes_what_was_opened() -> None:
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
