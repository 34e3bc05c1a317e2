"""Any OpenEnv server by its address: actions by their schema, observations as text, every failure
with its kind."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from realhf.api.environment import (
    HELD_OUT,
    SPLITS,
    TRAIN,
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
)
from realhf.env.adapters.openenv import parse_urls
from realhf.env.loader.load import build_environment
from tests.env.adapters.wire_server import Fault, HangUp, Raw, Silence, WireServer, seen, serving

MOVE = {
    "title": "MoveAction",
    "description": "Move the robot.",
    "type": "object",
    "properties": {
        "direction": {"type": "string", "enum": ["left", "right"]},
        "steps": {"type": "integer"},
        "metadata": {"type": "object"},
    },
    "required": ["direction", "steps"],
}
SAY = {
    "title": "SayAction",
    "type": "object",
    "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["message"],
}
ANY_TOOL = {"title": "CallToolAction", "type": "object", "properties": {}}


def robot(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
    """Reach the place 3; a step of 0 is refused as a stock server refuses a field."""
    if kind == "reset":
        session["place"] = 0
        return seen({"view": "you stand at 0", "energy": 9})
    if data["steps"] == 0:
        errors = [{"loc": ["steps"], "msg": "must not be 0", "input": 0}]
        raise Fault("VALIDATION_ERROR", "Invalid message", errors=errors)
    session["place"] += data["steps"] if data["direction"] == "right" else -data["steps"]
    there = session["place"] == 3
    return seen(
        {"view": f"you stand at {session['place']}", "energy": 8}, 1.0 if there else -0.25, there
    )


def echo(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
    """Say it back; never over."""
    return seen(
        {"echo": "ready" if kind == "reset" else data["message"]}, 0.0 if kind == "reset" else 0.5
    )


def said(content: str = "", *calls: ToolCall) -> AssistantMessage:
    return AssistantMessage(content, calls)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id=f"call of {name}")


async def built(server: WireServer | str, **options: Any) -> EnvironmentSpec:
    """The environment, built beside the loop that serves it."""
    url = server if isinstance(server, str) else server.url
    return await asyncio.to_thread(
        build_environment, "openenv", {"url": url, "connect_timeout_s": 30, **options}
    )


@contextmanager
def failing(kind: str) -> Iterator[pytest.ExceptionInfo[EnvironmentFailure]]:
    with pytest.raises(EnvironmentFailure) as caught:
        yield caught
    assert caught.value.kind == kind, caught.value


async def test_the_fields_of_an_action_are_the_arguments_of_a_tool() -> None:
    async with serving(robot, MOVE) as server:
        env = (await built(server, observation="view")).make("")
        opening = await env.reset({}, seed=7)
        assert [dict(message) for message in opening.messages] == [
            {"role": "user", "content": "you stand at 0"}
        ]
        function = opening.tools[0]["function"]
        assert function["description"] == "Move the robot." and function["parameters"][
            "required"
        ] == [*MOVE["required"]]
        assert [*function["parameters"]["properties"]] == ["direction", "steps"]
        turn = await env.step(said("", call("act", direction="right", steps=1)))
        assert (turn.reward, turn.done, turn.metrics["success"]) == (-0.25, False, 0.0)
        turn = await env.step(
            said(
                "", call("act", direction="left", steps=1), call("act", direction="right", steps=3)
            )
        )
        assert [message["content"] for message in turn.messages] == [
            "you stand at 0",
            "you stand at 3",
        ]
        assert {message["role"] for message in turn.messages} == {"tool"}
        assert (turn.reward, turn.done) == (0.75, True)
        assert turn.metrics["success"] == 0.0, "0.5 in all is less than 1"
        await env.close()
    assert server.seen[0] == ("reset", {"seed": 7})
    assert server.seen[1] == ("step", {"direction": "right", "steps": 1})


async def test_what_the_policy_does_wrong_it_reads_and_the_server_does_not_see() -> None:
    async with serving(robot, MOVE) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        wrong = (
            call("act", direction="right"),
            call("act", direction="right", steps=1, speed=2),
            call("walk", direction="right"),
            call("act", direction="right", steps=math.inf),
            ToolCall("", text="<tool_call>{", problem="the call is not JSON"),
        )
        turn = await env.step(said("", *wrong))
        texts = [message["content"] for message in turn.messages]
        for text, reason in zip(
            texts, ("'steps'", "'speed'", "walk not found", "inf", "not JSON"), strict=True
        ):
            assert text.startswith("error: ") and reason in text
        assert turn.reward is None and not turn.done
        assert [kind for kind, _ in server.seen] == ["reset"]
        turn = await env.step(said("", call("act", direction="left", steps=0)))
        assert "steps: must not be 0" in turn.messages[0]["content"] and turn.reward is None
        turn = await env.step(said("I will think about it."))
        assert "call" in turn.messages[0]["content"] and not turn.done
        await env.close()


async def test_the_text_of_a_policy_fills_the_only_text_field() -> None:
    async with serving(echo, SAY) as server:
        env = (await built(server, observation_chars=5, success_reward=0.5)).make("")
        opening = await env.reset({}, seed=1)
        assert not opening.tools and opening.messages[0]["content"].startswith('{"ech...')
        turn = await env.step(said("hello \ud800"))
        assert turn.messages[0]["role"] == "user" and turn.reward == 0.5 and not turn.done
        assert turn.metrics["success"] == 0.0, "an episode that goes on is no success"
        assert server.seen[-1] == ("step", {"message": "hello ?"})
        await env.close()


async def test_a_server_that_lists_its_tools_is_called_by_their_names() -> None:
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "reset":
            return seen({"text": "add"})
        if data["type"] == "list_tools":
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            return seen(
                {"tools": [{"name": "double", "description": "Double it.", "input_schema": schema}]}
            )
        if data["arguments"]["a"] > 9:
            return seen({"tool_name": "double", "result": None, "error": {"message": "too large"}})
        content = [{"type": "text", "text": str(2 * data["arguments"]["a"])}]
        return seen({"tool_name": "double", "result": {"content": content}}, 1, True)

    async with serving(game, ANY_TOOL) as server:
        env = (await built(server)).make("")
        opening = await env.reset({}, seed=1)
        assert [tool["function"]["name"] for tool in opening.tools] == ["double"]
        turn = await env.step(
            said("", call("double"), call("double", a=10), call("double", a=4), call("double", a=5))
        )
        texts = [message["content"] for message in turn.messages]
        assert (
            "needs the argument 'a'" in texts[0]
            and texts[1:3] == ["error: too large", "8"]
            and "over" in texts[3]
        )
        assert turn.done and turn.reward == 1.0 and turn.metrics["success"] == 1.0
        await env.close()
    assert [kind for kind, _ in server.seen] == ["step", "reset", "step", "step"]


async def test_a_reward_that_is_a_level_replaces_the_sum() -> None:
    async with serving(robot, MOVE, metadata={"reward_mode": "level", "name": "robot"}) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        turn = await env.step(
            said(
                "", call("act", direction="right", steps=1), call("act", direction="right", steps=2)
            )
        )
        assert turn.final and turn.reward == 1.0 and turn.metrics["success"] == 1.0
        assert not (await built(server, reward="sum")).make("")._rules.level  # type: ignore[attr-defined]
        await env.close()


async def test_tasks_are_seeds_that_the_splits_do_not_share_or_rows(tmp_path: Path) -> None:
    rows = tmp_path / "levels.jsonl"
    rows.write_text("".join(json.dumps({"id": f"l{n}", "level": n}) + "\n" for n in range(20)))
    async with serving(echo, SAY) as server:
        spec = await built(server)
        drawn = {
            split: {spec.tasks(split).instantiate("openenv", seed).seed for seed in range(50)}
            for split in SPLITS
        }
        assert len(drawn[TRAIN]) == 50 and not drawn[TRAIN] & drawn[HELD_OUT]
        spec = await built(server, data=str(rows))
        task = spec.tasks(TRAIN).instantiate(next(iter(spec.tasks(TRAIN).group_of)), 5)
        env = spec.make("")
        await env.reset(task.payload, seed=task.seed)
        assert server.seen[-1] == ("reset", {"level": task.payload["level"], "seed": 5})
        await env.close()


@pytest.mark.parametrize(
    ("options", "action", "named"),
    [
        ({"action": "text"}, MOVE, "env.action_field"),
        ({"action_field": "direction"}, MOVE, "needs steps"),
        ({"action_field": "speed"}, MOVE, "no such field"),
        ({"action_field": "message", "action": "tool"}, SAY, "no effect"),
        ({}, {"type": "array"} | {"properties": 3}, "no JSON schema"),
        ({}, {"properties": {"a": {"description": "x" * 70_000}}}, "64 KiB"),
        ({"heldout_fraction": 0.5}, SAY, "env.heldout_fraction"),
        ({"token_file": "/nowhere/token"}, SAY, "env.token_file"),
    ],
)
async def test_an_option_that_does_not_fit_is_named(
    options: dict[str, Any], action: Any, named: str
) -> None:
    async with serving(robot, action) as server:
        with pytest.raises(ValueError, match=named):
            await built(server, **options)


@pytest.mark.parametrize("url", ["", [], "ftp://x", "http://", ["http://a:1", "http://a:1"], 5])
async def test_an_address_that_is_none_is_refused_before_anything_is_asked(url: Any) -> None:
    with pytest.raises(ValueError, match=r"env\.url"):
        build_environment("openenv", {"url": url})


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1", ["http://a:1"]),
        ("http://[::1]:8000", ["http://[::1]:8000"]),
        ("https://[::1]", ["https://[::1]"]),
        ("http://a:1, ws://b", ["http://a:1", "ws://b"]),
        ('["http://a:1","http://b:1"]', ["http://a:1", "http://b:1"]),
        (["http://a:1", "http://b:1"], ["http://a:1", "http://b:1"]),
    ],
)
def test_addresses_are_a_text_or_a_list(given: Any, urls: list[str]) -> None:
    assert parse_urls(given) == urls


@pytest.mark.slow
async def test_a_server_that_is_not_there_is_named_at_the_start() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=rf"env.url={url}: no OpenEnv server .* env.connect_timeout_s=0.3 s"
        ):
            await built(url, connect_timeout_s=0.3)


@pytest.mark.parametrize("page", ["not JSON", '{"observation": {}}', "[" * 100_000])
async def test_a_server_of_another_kind_is_named_at_the_start(page: str) -> None:
    async with serving(echo, SAY, page=page) as server:
        with pytest.raises(ValueError, match=r"this is no OpenEnv server"):
            await built(server)


async def test_servers_are_used_in_turn_and_a_full_one_is_passed_over() -> None:
    async with serving(echo, SAY, capacity=1) as one, serving(echo, SAY, capacity=1) as other:
        spec = await built("", url=[one.url, other.url])
        assert spec.concurrency == 2
        envs = [spec.make("") for _ in range(3)]
        for env in envs[:2]:
            await env.reset({}, seed=1)
        assert len(one.seen) == len(other.seen) == 1
        with failing("capacity") as caught:
            await envs[2].reset({}, seed=1)
        assert "env.sessions" in str(caught.value)
        await envs[1].close()
        async with asyncio.timeout(60):
            while other.open:
                await asyncio.sleep(0.01)
        await envs[2].reset({}, seed=1)
        assert len(one.seen) == 1 and len(other.seen) == 2
        for env in envs:
            await env.close()
        async with serving(robot, MOVE) as third:
            with pytest.raises(ValueError, match="different environments"):
                await built("", url=f"{one.url},{third.url}")


async def test_a_server_that_goes_away_is_lost_and_one_that_left_between_episodes_is_called_again() -> (
    None
):
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "step" and data["message"] == "leave":
            raise HangUp
        return echo(kind, data, session)

    async with serving(game, SAY) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        with failing("lost"):
            await env.step(said("leave"))
        with failing("lost"):
            await env.step(said("still there?"))
        await env.reset({}, seed=2)
        for connection in [*server.open]:
            connection.transport.abort()
        await env.reset({}, seed=3)
        assert (await env.step(said("hello"))).reward == 0.5
    with failing("lost"):
        await env.step(said("hello"))
    with failing("lost"):
        await env.reset({}, seed=4)
    await env.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (seen({}, float("nan")), "internal"),
        (seen({}, "much"), "internal"),
        (seen({}, 1.0, "yes"), "internal"),
        (seen(["a list"]), "internal"),
        (seen({"echo": float("inf")}), "internal"),
        (Raw('{"type": "state", "data": {}}'), "lost"),
        (Raw('{"type": "observation", "data": ' + "[" * 100_000), "lost"),
        (Raw("no JSON"), "lost"),
        (Fault("EXECUTION_ERROR", "the world broke"), "internal"),
        (Fault("VALIDATION_ERROR", "busy", retryable=True), "unavailable"),
    ],
)
async def test_an_answer_that_cannot_be_is_a_failure_of_the_environment(
    answer: Any, kind: str
) -> None:
    def game(asked: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if asked == "reset":
            return seen({"echo": "ready"})
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with serving(game, SAY) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        with failing(kind):
            await env.step(said("hello"))
        await env.close()


async def test_an_error_of_a_step_may_be_told_to_the_policy() -> None:
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "step":
            raise Fault("EXECUTION_ERROR", "no such word")
        return echo(kind, data, session)

    async with serving(game, SAY) as server:
        env = (await built(server, error="tell")).make("")
        await env.reset({}, seed=1)
        assert "no such word" in (await env.step(said("xyzzy"))).messages[0]["content"]
        await env.close()


async def test_a_call_that_was_not_executed_is_made_again_without_those_before_it() -> None:
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "step" and data["steps"] == 2 and not session.setdefault("refused", False):
            session["refused"] = True
            raise Fault("EXECUTION_ERROR", "busy", retryable=True)
        return robot(kind, data, session)

    async with serving(game, MOVE) as server:
        env = (await built(server)).make("")
        await env.reset({}, seed=1)
        message = said(
            "", call("act", direction="right", steps=1), call("act", direction="right", steps=2)
        )
        with failing("unavailable"):
            await env.step(message)
        turn = await env.step(message)
        assert turn.done and turn.reward == 0.75 and len(turn.messages) == 2
        await env.close()


@pytest.mark.slow
async def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    def game(kind: str, data: dict[str, Any], session: dict[str, Any]) -> Any:
        if kind == "step":
            raise Silence
        return echo(kind, data, session)

    async with serving(game, SAY) as server:
        env = (await built(server, timeout_s=2.0)).make("")
        await env.reset({}, seed=1)
        with failing("timeout") as caught:
            await env.step(said("hello"))
        assert "env.timeout_s" in str(caught.value)
        await env.reset({}, seed=2)
        await env.close()
