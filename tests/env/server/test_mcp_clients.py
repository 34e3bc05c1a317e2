"""The official MCP client plays on the environment server (``make test-mcp`` installs it)."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from realhf.env.server.mcp import INVALID_REQUEST, SERVER_ERROR
from realhf.env.server.mcp_endpoint import SESSION_HEADER
from realhf.env.server.server import EnvServer, listen
from realhf.env.server.spec.program import SpecServerConfig, prepare
from tests.env.loader.counter import COUNTER
from tests.env.server.fake_stage import FakeBlockingPlayer, Stage
from tests.env.server.test_mcp_requests import ACCEPT, INITIALIZE
from tests.process_family import until

pytest.importorskip("mcp", reason="the SDK is not installed; `make test-mcp` installs it")

from mcp.client import Client  # pyright: ignore[reportMissingImports]
from mcp.shared.exceptions import MCPError  # pyright: ignore[reportMissingImports]

TASKS = """
def tasks(split):
    goals = (3, 5) if split == "train" else (8,)
    return [{"id": f"to-{goal}", "goal": goal} for goal in goals]
"""


class Served:
    """A server of ``Counter`` in this process."""

    def __init__(self, file: Path, **settings: Any) -> None:
        config = SpecServerConfig(port=0, processes=0, **{"pool_size": 2, **settings})
        self.served, config = prepare(argparse.Namespace(env=str(file), option=[]), config)
        self.server = EnvServer(self.served, config, listen("127.0.0.1", 0))
        self.server.start()
        self.url = f"{self.server.url}/mcp"

    @property
    def free(self) -> int:
        return self.served.pool.free_count

    def stop(self) -> None:
        self.server.stop()
        self.served.pool.stop()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mcp") / "counter.py"
    file.write_text(COUNTER + TASKS)
    return file


@pytest.fixture(scope="module")
def counter(file: Path) -> Iterator[Served]:
    served = Served(file)
    yield served
    served.stop()


@asynccontextmanager
async def connected(url: str, **more: Any) -> AsyncIterator[Any]:
    async with asyncio.timeout(60), Client(url, **more) as client:
        yield client


async def refused(url: str) -> str:
    """What a client reads that does not get a session; the SDK groups its errors."""
    with pytest.raises(ExceptionGroup) as raised:
        async with connected(url):
            pass
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        [error] = error.exceptions
    assert isinstance(error, MCPError)
    return str(error)


def text(result: Any) -> str:
    [content] = result.content
    return content.text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_plays_an_episode(counter: Served, mode: str) -> None:
    async with connected(f"{counter.url}?task_id=to-5&seed=1", mode=mode) as client:
        assert counter.free == 1
        assert client.instructions == "Reach 5."
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {*tools} == {"add", "stop"}
        assert tools["add"].input_schema["properties"]["amount"]["type"] == "integer"
        added = await client.call_tool("add", {"amount": 2, "twice": True})
        assert (text(added), added.is_error, added.structured_content) == ("4", False, None)
        assert added.meta == {"realhf-agents/reward": 0.0, "realhf-agents/done": False}
        added = await client.call_tool("add", {"amount": 1})
        assert added.meta == {"realhf-agents/reward": 1.0, "realhf-agents/done": False}
        stopped = await client.call_tool("stop", {})
        assert stopped.meta == {"realhf-agents/reward": 1.0, "realhf-agents/done": True}
        over = await client.call_tool("add", {"amount": 1})
        assert over.is_error and "the episode is over" in text(over)
    assert until(lambda: counter.free == 2)


async def test_mistakes_of_the_model_are_results(counter: Served) -> None:
    async with connected(f"{counter.url}?task_id=to-3") as client:
        for name, arguments, told in (
            ("add", {"amount": -1}, "amounts are positive"),
            ("add", {"amount": "many"}, "argument 'amount'"),
            ("add", {}, "needs the argument 'amount'"),
            ("multiply", {}, "not found"),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error and told in text(result), result
        assert text(await client.call_tool("add", {"amount": 3})) == "3"


async def test_sessions_are_apart_and_as_many_as_slots(counter: Served) -> None:
    async with connected(f"{counter.url}?task_id=to-3") as first:
        async with connected(f"{counter.url}?task_id=to-8&split=heldout") as second:
            assert (first.instructions, second.instructions) == ("Reach 3.", "Reach 8.")
            sums = await asyncio.gather(
                *(client.call_tool("add", {"amount": 1}) for client in (first, second) * 5)
            )
            assert sorted(map(text, sums)) == sorted([*"12345", *"12345"])
            answer = httpx.post(counter.url, headers=ACCEPT, json=INITIALIZE)
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
            error = answer.json()["error"]
            assert error["data"]["max_sessions"] == 2 and answer.json()["id"] == 5
            assert "2/2 sessions" in await refused(counter.url)
        assert until(lambda: counter.free == 1)
        async with connected(counter.url) as third:
            assert third.instructions.startswith("Reach")


async def test_tasks_that_do_not_exist_are_errors_and_take_no_slot(counter: Served) -> None:
    assert "no task 'to-4'" in await refused(f"{counter.url}?task_id=to-4")
    assert until(lambda: counter.free == 2)


def begin(url: str) -> dict[str, str]:
    """Begin a session by hand; return the headers of its requests."""
    answer = httpx.post(url, headers=ACCEPT, json=INITIALIZE)
    assert answer.status_code == 200, answer.text
    return ACCEPT | {SESSION_HEADER: answer.headers[SESSION_HEADER]}


def test_delete_ends_a_session(counter: Served) -> None:
    headers = begin(counter.url)
    assert counter.free == 1
    assert httpx.delete(counter.url, headers=headers).status_code == 200
    assert until(lambda: counter.free == 2)
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    assert httpx.post(counter.url, headers=headers, json=listing).status_code == 404


def test_what_is_not_served_is_an_error_of_the_protocol(counter: Served) -> None:
    headers = begin(counter.url)
    try:
        for message in (
            {"jsonrpc": "2.0", "id": 2, "method": "resources/list"},
            {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": 7}},
        ):
            answer = httpx.post(counter.url, headers=headers, json=message).json()
            assert answer["id"] == message["id"] and answer["error"]["code"] in (-32601, -32602)
    finally:
        httpx.delete(counter.url, headers=headers)


@pytest.mark.parametrize(
    ("setting", "speaks"), [("idle_timeout_s", True), ("first_message_timeout_s", False)]
)
def test_a_silent_session_gives_its_slot_back(file: Path, setting: str, speaks: bool) -> None:
    served = Served(file, **{setting: 0.3})
    try:
        headers = begin(served.url)
        if speaks:
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert httpx.post(served.url, headers=headers, json=ready).status_code == 202
        assert served.free == 1
        assert until(lambda: served.free == 2, 30)
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        assert httpx.post(served.url, headers=headers, json=listing).status_code == 404
        page = httpx.get(f"{served.server.url}/metrics").text
        counted = "reaped" if speaks else "unused"
        assert f"realhf_env_sessions_{counted}_total 1.0" in page
    finally:
        served.stop()


async def test_a_cancelled_call_is_killed() -> None:
    stage = Stage(first_message_timeout_s=0)
    try:
        async with connected(f"{stage.server.url}/mcp") as client:
            call = asyncio.create_task(client.call_tool("aws", {"command": "aws s3 ls"}))
            assert await asyncio.to_thread(lambda: stage.players[0].started.wait(60))
            call.cancel()
            assert await asyncio.to_thread(lambda: stage.players[0].ended.wait(60))
            assert stage.players[0].kills >= 2
            over = await client.call_tool("aws", {"command": "quick"})
            assert over.is_error and "the episode is over" in text(over)
        assert until(lambda: stage.pool.free_count == 1)
    finally:
        stage.server.stop()


def call_by_hand(request_id: int | str, command: str) -> dict[str, Any]:
    params = {"name": "aws", "arguments": {"command": command}}
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}


def test_an_id_under_way_is_refused_and_the_session_still_becomes_idle() -> None:
    stage = Stage(idle_timeout_s=0.3)
    url = f"{stage.server.url}/mcp"
    try:
        headers = begin(url)
        with ThreadPoolExecutor(1) as threads:
            call = call_by_hand(7, "aws s3 ls")
            first = threads.submit(httpx.post, url, headers=headers, json=call, timeout=20)
            assert stage.players[0].started.wait(20)
            try:
                for same in (7, "7"):
                    call = call_by_hand(same, "quick")
                    answer = httpx.post(url, headers=headers, json=call, timeout=2)
                    assert answer.status_code == 400 and answer.json()["id"] == same
                    assert answer.json()["error"]["code"] == INVALID_REQUEST
            finally:
                stage.players[0].finish.set()
            assert first.result().json()["id"] == 7
        assert until(lambda: stage.pool.free_count == 1, 20)
    finally:
        stage.server.stop()


def test_a_request_without_an_answer_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    from realhf.env.server import mcp_session

    stage = Stage()
    url = f"{stage.server.url}/mcp"
    try:
        headers = begin(url)
        monkeypatch.setattr(mcp_session, "ANSWER_S", 0.3)
        answer = httpx.post(url, headers=headers, json=call_by_hand(7, "aws s3 ls"), timeout=20)
        assert answer.status_code == 504 and answer.json()["id"] == 7
        assert until(lambda: stage.pool.free_count == 1, 20)
    finally:
        stage.server.stop()


@pytest.mark.parametrize(
    ("change", "accept", "status"),
    [
        ({"jsonrpc": "1.0"}, "*/*", 400),
        ({"id": None}, "*/*", 400),
        ({"id": True}, "*/*", 400),
        ({"params": {}}, "*/*", 400),
        ({"params": {"protocolVersion": "2025-11-25"}}, "*/*", 400),
        ({}, "image/png", 406),
    ],
)
def test_an_invalid_initialize_takes_no_slot(
    counter: Served, change: dict[str, Any], accept: str, status: int
) -> None:
    headers = {"Accept": f"{accept}, text/event-stream"}
    answer = httpx.post(counter.url, headers=headers, json=INITIALIZE | change)
    assert counter.free == 2
    assert answer.status_code == status, answer.text


def test_a_session_that_starts_while_the_server_stops_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from realhf.env.server.mcp_session import McpSession

    stage = Stage()
    start = McpSession.start

    async def start_then_stop(session: McpSession, is_over: bool) -> None:
        await start(session, is_over)
        await stage.server._mcp_endpoint.stop()

    monkeypatch.setattr(McpSession, "start", start_then_stop)
    try:
        answer = httpx.post(f"{stage.server.url}/mcp", headers=ACCEPT, json=INITIALIZE)
        assert answer.status_code == 500 and "stops" in answer.json()["error"]["message"]
        assert until(lambda: stage.pool.free_count == 1)
    finally:
        stage.server.stop()


class LastStep(FakeBlockingPlayer):
    """A step ends the episode."""

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        observation, reward, _ = super().step(action)
        return observation, reward, True


async def test_a_cancelled_call_that_ends_the_episode_in_time_ends_it() -> None:
    stage = Stage(make=LastStep)
    try:
        async with connected(f"{stage.server.url}/mcp") as client:
            call = asyncio.create_task(client.call_tool("aws", {"command": "aws s3 ls"}))
            assert await asyncio.to_thread(lambda: stage.players[0].started.wait(60))
            call.cancel()
            await asyncio.sleep(0.3)
            stage.players[0].finish.set()
            over = await client.call_tool("aws", {"command": "quick"})
            assert not stage.players[0].kills
            assert over.is_error and "the episode is over" in text(over)
    finally:
        await asyncio.to_thread(stage.server.stop)


async def test_a_stopped_server_ends_its_sessions(file: Path) -> None:
    served = Served(file)
    headers = await asyncio.to_thread(begin, served.url)
    await asyncio.to_thread(served.stop)
    assert served.free == 2
    with pytest.raises(httpx.TransportError):
        httpx.post(served.url, headers=headers, json=INITIALIZE)


async def test_a_failure_of_the_environment_is_an_error_with_its_kind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        COUNTER.replace(
            "return 1.0 if", "if self.count > 3: raise OSError('no disk')\n        return 1.0 if"
        )
        + TASKS
    )
    served = Served(broken)
    try:
        async with connected(served.url) as client:
            with pytest.raises(MCPError, match="no disk") as failed:
                await client.call_tool("add", {"amount": 4})
            assert failed.value.code == SERVER_ERROR
            assert failed.value.data == {"code": "EXECUTION_ERROR", "kind": "internal"}
            assert (await client.call_tool("add", {"amount": 1})).is_error
    finally:
        await asyncio.to_thread(served.stop)


def test_openenvs_requests_are_answered_as_before(counter: Served) -> None:
    """They name no session and accept no event stream."""
    headers = {"Accept": "application/json"}
    assert (
        httpx.post(counter.url, headers=headers, json=INITIALIZE).json()["error"]["code"] == -32601
    )
    call = {"name": "add", "arguments": {"amount": 1}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    result = httpx.post(counter.url, headers=headers, json=message).json()["result"]
    assert json.loads(result["content"][0]["text"]) == 1
    assert result["structuredContent"]["reward"] == 0.0
    assert httpx.get(counter.url).status_code == 405
