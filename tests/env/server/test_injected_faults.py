"""Simulated trouble: what a client sees of it, and that it is refused where it has no place."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage
from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.environment import AwsEnvironment
from realhf.aws.server_config import AwsServerConfig
from realhf.env.openenv_client import ConnectionLost, EnvError, MessageTimeout
from realhf.env.server.injected_faults import InjectedFaults, parse_kinds
from realhf.rollout.player import SlotEnvironment
from realhf.web.settings import SettingError
from tests.env.server.fake_stage import FakeBlockingPlayer, Stage


class FakeQuickPlayer(FakeBlockingPlayer):
    """Keeps the steps that are really executed."""

    def __init__(self, executed: list[str]) -> None:
        super().__init__()
        self._executed = executed

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        command = action["command"]
        self._executed.append(command)
        seen = {
            "command_output": command,
            "command_success": True,
            "task_achieved": False,
            "partial_progress": 0.0,
        }
        return seen, 0.0, False


@contextmanager
def served(executed: list[str], **settings: Any) -> Iterator[str]:
    stage = Stage(4, make=lambda: FakeQuickPlayer(executed), **settings)
    try:
        yield stage.server.url
    finally:
        stage.server.stop()


async def play(url: str, steps: int, message_timeout_s: float = 60.0) -> Counter[str]:
    """What became of each step; a lost session is opened and reset again."""
    seen: Counter[str] = Counter()
    env = AwsEnv(url, message_timeout_s=message_timeout_s)
    for number in range(steps):
        if not env.usable:
            await env.connect()
            await env.reset()
        try:
            await env.step(f"aws {number}")
            seen["ok"] += 1
        except EnvError as error:
            assert error.retryable and error.code == "UNAVAILABLE"
            seen["unavailable"] += 1
        except ConnectionLost:
            seen["disconnect"] += 1
        except MessageTimeout:
            seen["hang"] += 1
    await env.close()
    return seen


@pytest.mark.slow
async def test_faults_of_every_kind_at_the_asked_rate_and_none_of_them_executed() -> None:
    executed: list[str] = []
    with served(executed, fault_rate=0.2, fault_kinds="unavailable=8,disconnect=2") as url:
        first = await play(url, 150)
        page = urllib.request.urlopen(f"{url}/metrics").read().decode()
        told = json.loads(urllib.request.urlopen(f"{url}/metadata").read())["simulated"]
    assert len(executed) == first["ok"]
    assert 15 <= first["unavailable"] + first["disconnect"] <= 45, first
    assert first["unavailable"] > first["disconnect"] > 0
    assert (
        f'realhf_env_injected_faults_total{{kind="unavailable"}} {first["unavailable"]}.0' in page
    )
    assert told["fault_rate"] == 0.2
    with served([], fault_rate=0.2, fault_kinds="unavailable=8,disconnect=2") as url:
        assert await play(url, 150) == first, "the same seed and the same play meet the same faults"
    with served([], fault_rate=0.2, fault_kinds="unavailable=8,disconnect=2", fault_seed=1) as url:
        assert await play(url, 150) != first


@pytest.mark.slow
async def test_an_episode_that_resumes_does_not_notice() -> None:
    with served([], fault_rate=0.5, fault_kinds="unavailable=3,disconnect") as url:
        env = SlotEnvironment(
            "aws",
            lambda: AwsEnvironment(url),
            message_timeout_s=60,
            patience_s=60,
        )
        env.prepare(30)
        await env.reset({}, seed=1)
        said = [AssistantMessage(f"aws {n}", text=f"aws {n}") for n in range(8)]
        answers = [(await env.step(message)).messages[0]["content"] for message in said]
        assert answers == [message.text for message in said]
        assert env.resumed > 0 and set(env.failures) == {"unavailable", "lost"}
        await env.close()


@pytest.mark.nightly
async def test_a_hang_lasts_until_the_client_gives_up() -> None:
    with served([], fault_rate=1.0, fault_kinds="hang") as url:
        assert await play(url, 2, message_timeout_s=2.0) == {"hang": 2}


@pytest.mark.slow
async def test_latency_is_added_to_every_step_and_holds_up_nobody_else() -> None:
    executed: list[str] = []
    with served(executed, step_latency_ms=150.0) as url:
        async with AwsEnv(url) as slow, AwsEnv(url) as other:
            await slow.reset()
            await other.reset()
            began = time.monotonic()
            await slow.step("aws a")
            assert time.monotonic() - began >= 0.15
            assert executed == ["aws a"]
            assert (await other.state()).step_count == 0


@pytest.mark.slow
async def test_nothing_is_injected_unless_asked_for() -> None:
    executed: list[str] = []
    with served(executed) as url:
        assert await play(url, 50) == {"ok": 50}
        assert json.loads(urllib.request.urlopen(f"{url}/metadata").read())["simulated"] is None


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--fault-rate", "1.5"], "FAULT_RATE"),
        (["--step-latency-ms", "-1"], "STEP_LATENCY_MS"),
        (["--fault-kinds", "fire"], "FAULT_KINDS.*unknown kind 'fire'"),
        (["--fault-kinds", "hang=x"], "FAULT_KINDS.*not a number"),
        (["--fault-kinds", "hang=0"], "FAULT_KINDS.*above 0"),
        (["--fault-kinds", "hang,hang"], "FAULT_KINDS.*twice"),
        (
            [
                "--backend-type",
                "aws",
                "--token",
                "t",
                "--allow-real-aws",
                "1",
                "--fault-rate",
                "0.1",
            ],
            "FAULT.*aws",
        ),
        (
            [
                "--backend-type",
                "aws",
                "--token",
                "t",
                "--allow-real-aws",
                "1",
                "--step-latency-ms",
                "1",
            ],
            "LATENCY.*aws",
        ),
    ],
)
def test_a_bad_setting_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        AwsServerConfig.parse(argv, {})


def test_weights_and_rate_are_what_was_asked_for() -> None:
    assert parse_kinds("unavailable, hang=3") == {"unavailable": 1.0, "hang": 3.0}
    drawn = Counter(
        InjectedFaults(rate=1.0, kinds="unavailable,hang=3").session().draw() for _ in range(1)
    )
    assert None not in drawn
    dice = InjectedFaults(rate=1.0, kinds="unavailable,hang=3").session()
    many = Counter(dice.draw() for _ in range(4000))
    assert 2800 < many["hang"] < 3200 and many["hang"] + many["unavailable"] == 4000
    assert InjectedFaults(rate=0.0).session().draw() is None
