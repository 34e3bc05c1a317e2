"""Episodes that survive lost sessions, on a fake server (on real simulators: test_aws_env)."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from realhf.rollout.client.aws_env import AwsEnv
from realhf.rollout.client.env_client import ConnectionLost, EnvError, MessageTimeout
from realhf.rollout.client.failures import failure_status
from realhf.rollout.client.resuming_env import ReplayDiverged, ResumingEnv
from tests.rollout.fake_env_server import FakeEnvServer

UNAVAILABLE = '{"type":"error","data":{"code":"UNAVAILABLE","message":"not executed","retryable":true}}'


class Script:
    """Misbehaves as told: ``tricks[(connection, how often that connection was stepped)]``."""

    def __init__(self, tricks: dict[tuple[int, int], str]) -> None:
        self.tricks = tricks
        self.steps: dict[int, int] = {}

    def __call__(self, number: int, message: dict[str, Any]) -> str | None:
        if message["type"] != "step":
            return None
        count = self.steps[number] = self.steps.get(number, 0) + 1
        return self.tricks.get((number, count))


def sent(fake: FakeEnvServer) -> list[tuple[int, str]]:
    return [
        (number, message["data"].get("command", "reset"))
        for number, message in fake.messages
        if message["type"] in ("reset", "step")
    ]


async def test_a_step_that_was_not_executed_is_sent_again() -> None:
    with FakeEnvServer(Script({(0, 1): UNAVAILABLE, (0, 2): UNAVAILABLE})) as fake:
        env = ResumingEnv(AwsEnv(fake.url), reset={"seed": 1}, retries=0)
        await env.reset()
        assert (await env.step("a")).observation.command_output == "a"
        assert env.failures == {"unavailable": 2} and env.resumed == 0
        assert sent(fake) == [(0, "reset"), (0, "a"), (0, "a"), (0, "a")]
        await env.env.close()


@pytest.mark.parametrize(
    ("trick", "kind"), [("drop", "connection_lost"), ("hang", "env_timeout"), ("error", "env_error")]
)
async def test_a_lost_session_is_resumed_by_replay(trick: str, kind: str) -> None:
    with FakeEnvServer(Script({(0, 2): trick})) as fake:
        env = ResumingEnv(AwsEnv(fake.url, message_timeout_s=0.3), reset={"seed": 1}, retries=1)
        await env.reset()
        await env.step("a")
        last = await env.step("b")
        assert last.observation.command_output == "b" and last.done and last.observation.step_count == 2
        assert env.failures == {kind: 1} and env.resumed == 1
        assert sent(fake) == [(0, "reset"), (0, "a"), (0, "b"), (1, "reset"), (1, "a"), (1, "b")]
        await env.env.close()


async def test_a_loss_during_the_replay_is_one_more_loss() -> None:
    with FakeEnvServer(Script({(0, 2): "drop", (1, 1): "drop", (2, 2): UNAVAILABLE})) as fake:
        env = ResumingEnv(AwsEnv(fake.url), reset={"seed": 1}, retries=2)
        await env.reset()
        await env.step("a")
        assert (await env.step("b")).done
        assert env.failures == {"connection_lost": 2, "unavailable": 1} and env.resumed == 1
        await env.env.close()


async def test_the_retries_are_bounded_and_the_failure_is_named() -> None:
    with FakeEnvServer(lambda number, message: "drop" if message["type"] == "step" else None) as fake:
        env = ResumingEnv(AwsEnv(fake.url), reset={"seed": 1}, retries=2)
        await env.reset()
        with pytest.raises(ConnectionLost):
            await env.step("a")
        assert env.failures == {"connection_lost": 3} and fake.connections == 3


async def test_another_answer_in_the_replay_is_a_failure_of_the_environment() -> None:
    stranger = (
        '{"type":"observation","data":{"observation":{"command_output":"another world","step_count":1},'
        '"reward":0.5,"done":false}}'
    )
    with FakeEnvServer(Script({(0, 2): "drop", (1, 1): stranger})) as fake:
        env = ResumingEnv(AwsEnv(fake.url), reset={"seed": 1}, retries=1)
        await env.reset()
        await env.step("a")
        with pytest.raises(ReplayDiverged, match=r"step 0 \(a\) was answered 'a', in the new session 'another") as end:
            await env.step("b")
        assert env.failures == {"connection_lost": 1, "diverged": 1} and failure_status(end.value) == "env_error"
        await env.env.close()


async def test_a_refused_command_is_the_policys_affair() -> None:
    refusal = '{"type":"error","data":{"code":"VALIDATION_ERROR","message":"too long"}}'
    with FakeEnvServer(Script({(0, 1): refusal})) as fake:
        env = ResumingEnv(AwsEnv(fake.url), reset={"seed": 1}, retries=5)
        await env.reset()
        with pytest.raises(EnvError, match="too long"):
            await env.step("a" * 9)
        await env.step("b")
        assert not env.failures and sent(fake)[-1] == (0, "b") and fake.connections == 1
        await env.env.close()


async def test_a_reset_is_tried_again_and_a_lost_session_is_opened_first() -> None:
    first = iter(["drop"])
    with FakeEnvServer(lambda n, message: next(first, None) if message["type"] == "reset" else None) as fake:
        inner = AwsEnv(fake.url, message_timeout_s=0.2)
        env = ResumingEnv(inner, reset={"seed": 1}, retries=1)
        await env.reset()
        assert env.failures == {"connection_lost": 1}
        inner._open().abort()
        await env.reset()
        assert (await env.step("a")).observation.step_count == 1 and fake.connections == 3
        await inner.close()


async def test_a_server_that_is_away_is_waited_for_no_longer_than_the_patience() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    env = ResumingEnv(AwsEnv(url, connect_timeout_s=0.2), reset={"seed": 1}, retries=0, patience_s=0.2)
    with pytest.raises(ConnectionError, match="cannot open a session"):
        await env.reset()


async def test_with_no_answer_before_the_reset() -> None:
    env = ResumingEnv(AwsEnv("http://127.0.0.1:1"), reset={}, retries=0)
    with pytest.raises(RuntimeError, match="reset"):
        await env.step("a")
    with FakeEnvServer(lambda number, message: "hang" if message["type"] == "step" else None) as fake:
        env = ResumingEnv(AwsEnv(fake.url, message_timeout_s=0.1), reset={}, retries=0)
        await env.reset()
        with pytest.raises(MessageTimeout):
            await env.step("a")
