"""A server of messages behind its address: the environment is played there as it is here, and its
failures keep their kind. One test has a real server process; the others a small one that speaks the
same wire."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from realhf.api.environment import (
    HELD_OUT,
    TRAIN,
    AssistantMessage,
    DemonstrationRequest,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
)
from realhf.env.loader.load import build_environment
from realhf.env.server.process import ServerProcess
from tests.env.adapters.wire_server import Fault, WireServer, seen, serving

MESSAGES = {
    "title": "SpecAction",
    "type": "object",
    "properties": {
        "content": {"type": "string"},
        "tool_calls": {"type": "array"},
        "metadata": {"type": "object"},
    },
}
METADATA = {"messages": True, "deterministic": True, "max_concurrent_envs": 3}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


async def built(server: WireServer, **options: Any) -> EnvironmentSpec:
    return await asyncio.to_thread(build_environment, "openenv", {"url": server.url, **options})


@pytest.mark.slow
async def test_an_environment_is_played_on_a_server_process_as_it_is_here() -> None:
    sql = build_environment("sql", {})
    assert sql.demonstrate is not None
    script = next(iter(sql.demonstrate(DemonstrationRequest(1, 0))))
    with ServerProcess("--env", "sql", "--pool-size", "2") as server:
        spec = await asyncio.to_thread(build_environment, "openenv", {"url": server.url})
        assert spec.concurrency == 2 and spec.deterministic
        here = sql.make("")
        there = spec.make("")
        other = spec.make("")
        opening = await here.reset(script.task.payload, seed=script.task.seed)
        served = await there.reset({"task": script.task.payload}, seed=script.task.seed)
        assert (
            served.messages[-1] == opening.messages[-1]
            and served.messages[0]["content"] == sql.system_prompt
        )
        for text in script.turns:
            message = AssistantMessage(text, text=text)
            one = await here.step(message)
            another = await there.step(message)
            assert [*one.messages] == [*another.messages]
            assert (one.reward, one.done, dict(one.metrics)) == (
                another.reward,
                another.done,
                dict(another.metrics),
            )
        assert another.done and another.metrics["success"] == 1.0
        opened = {
            split: (
                await other.reset((task := drawn(spec, split)).payload, seed=task.seed)
            ).messages[-1]["content"]
            for split in (TRAIN, HELD_OUT)
        }
        assert opened[TRAIN] != opened[HELD_OUT]
        await there.close()
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure) as caught:
            await other.step(AssistantMessage("SELECT 1"))
        assert caught.value.kind == "lost"
        with pytest.raises(EnvironmentFailure) as caught:
            await other.reset({"split": TRAIN}, seed=3)
        assert caught.value.kind == "lost" and server.url.removeprefix("http") in str(caught.value)
        await other.close()


def drawn(spec: EnvironmentSpec, split: str) -> Any:
    """A task of the split."""
    tasks = spec.tasks(split)
    assert [*tasks.groups] == ["openenv"]
    task = tasks.instantiate("openenv", 4)
    assert (
        task.payload == {"split": split}
        and task.id != spec.tasks(TRAIN).instantiate("openenv", 5).id
    )
    return task


async def test_turns_tools_and_numbers_cross_the_wire_as_they_are() -> None:
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "reset":
            return seen(
                {
                    "messages": [{"role": "user", "content": "add"}],
                    "tools": [TOOL],
                    "info": {"level": 1},
                    "state_key": "s",
                }
            )
        told = [{"role": "tool", "name": "add", "content": "3", "tool_call_id": "c1"}]
        numbers = {
            "metrics": {"success": 1, "progress": 1.0},
            "rewards": {"right": 0.5, "short": 0.25},
        }
        return seen({"messages": told, "final": True, "state_key": 5, **numbers}, 0.75, True)

    async with serving(game, MESSAGES, metadata=METADATA) as server:
        env = (await built(server)).make("")
        opening = await env.reset({"split": "train", "id": "row 7", "group": "easy"}, seed=2)
        assert [*opening.tools] == [TOOL] and opening.info == {"level": 1}
        assert opening.state_key == "s"
        calls = (
            ToolCall("add", {"a": 1, "b": 2}, id="c1"),
            ToolCall("", text="{broken", problem="no JSON"),
        )
        turn = await env.step(AssistantMessage("I add.\ud800", calls, "1 + 2", "all of it", 9))
        assert (
            turn.final
            and turn.done
            and turn.reward == 0.75
            and dict(turn.rewards) == {"right": 0.5, "short": 0.25}
        )
        assert (
            dict(turn.metrics) == {"success": 1.0, "progress": 1.0}
            and turn.messages[0]["tool_call_id"] == "c1"
        )
        assert turn.state_key == "", "it is not text, and so says nothing"
        await env.close()
    assert server.seen[0] == ("reset", {"split": "train", "seed": 2})
    _, action = server.seen[1]
    assert (action["content"], action["reasoning"], action["token_count"]) == (
        "I add.?",
        "1 + 2",
        9,
    )
    assert action["tool_calls"] == [
        {"name": "add", "arguments": {"a": 1, "b": 2}, "id": "c1"},
        {"name": "", "arguments": "{broken"},
    ]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Fault("EXECUTION_ERROR", "it hangs", kind="timeout"), "timeout"),
        (Fault("EXECUTION_ERROR", "gone", kind="lost"), "lost"),
        (Fault("EXECUTION_ERROR", "strange", kind="strange"), "internal"),
        (Fault("UNAVAILABLE", "later", kind="unavailable", retryable=True), "unavailable"),
        (Fault("VALIDATION_ERROR", "no episode is open"), "internal"),
        (seen({"messages": "hello"}), "internal"),
        (seen({"messages": [{"role": "wizard", "content": "x"}]}), "internal"),
        (seen({"messages": [], "metrics": {"success": float("nan")}}), "internal"),
        (seen({"messages": [], "rewards": [1]}), "internal"),
    ],
)
async def test_a_failure_on_the_server_keeps_its_kind(answer: Any, kind: str) -> None:
    def game(asked: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if asked == "reset":
            return seen({"messages": [{"role": "user", "content": "add"}]})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with serving(game, MESSAGES, metadata=METADATA) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        with pytest.raises(EnvironmentFailure) as caught:
            await env.step(AssistantMessage("hello"))
        assert caught.value.kind == kind
        await env.close()


async def test_options_that_the_server_decides_have_no_effect_and_are_refused() -> None:
    async with serving(lambda *_: seen({"messages": []}), MESSAGES, metadata=METADATA) as server:
        with pytest.raises(ValueError, match=r"env.observation has no effect"):
            await built(server, observation="messages")
        assert (await built(server, sessions=7, deterministic=False)).concurrency == 7
