"""One session: connect means probe, and a request without an answer poisons the connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from realhf.env.openenv_client import (
    CapacityError,
    ConnectError,
    ConnectionLost,
    ConnectionPoisoned,
    EnvError,
    MessageTimeout,
    OpenEnvClient,
    websocket_url,
)
from tests.rollout.fake_env_server import FakeEnvServer


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://h:1", "ws://h:1/ws"),
        ("https://h/", "wss://h/ws"),
        ("ws://h:1/ws", "ws://h:1/ws"),
        ("http://[::1]:8", "ws://[::1]:8/ws"),
    ],
)
def test_addresses(address: str, url: str) -> None:
    assert websocket_url(address) == url


@pytest.mark.parametrize("address", ["h:1", "ftp://h", "http://", ""])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        websocket_url(address)


def on(kind: str, trick: str, *, connection: int = 0, command: str | None = None) -> Any:
    def misbehave(number: int, message: dict[str, Any]) -> str | None:
        same = command is None or message.get("data", {}).get("command") == command
        return trick if number == connection and message["type"] == kind and same else None

    return misbehave


async def test_an_episode() -> None:
    with FakeEnvServer() as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        await client.connect()
        assert (await client.reset(seed=1)).reward is None
        assert (await client.step("a")).observation["command_output"] == "a"
        last = await client.step("b")
        assert last.done and last.reward == 0.5
        await client.close()
        await client.close()
        with pytest.raises(ConnectionPoisoned):
            await client.step("c")
        assert server.connections == 1 and server.open == 0


@pytest.mark.slow
async def test_a_late_reply_is_never_read() -> None:
    with FakeEnvServer(on("step", "late", command="slow")) as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        await client.reset()
        client._message_timeout = 0.2
        with pytest.raises(MessageTimeout):
            await client.step("slow")
        assert not client.usable
        await asyncio.sleep(0.5)
        with pytest.raises(ConnectionPoisoned):
            await client.step("next")


async def test_cancellation_poisons() -> None:
    with FakeEnvServer(on("step", "hang")) as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        task = asyncio.ensure_future(client.step("a"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ConnectionPoisoned):
            await client.reset()


async def test_a_dropped_connection_is_lost() -> None:
    with FakeEnvServer(on("step", "drop")) as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        with pytest.raises(ConnectionLost):
            await client.step("a")
        assert not client.usable
        await client.close()


async def test_an_error_frame_keeps_the_session() -> None:
    with FakeEnvServer(on("step", "error", command="bad")) as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        with pytest.raises(EnvError, match="EXECUTION_ERROR"):
            await client.step("bad")
        assert (await client.step("good")).observation["command_output"] == "good"
        await client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["hello", "[]", '{"type":"state","data":{}}', '{"type":"observation","data":{}}']
)
async def test_a_server_that_speaks_something_else_is_given_up(words: str) -> None:
    with FakeEnvServer(on("reset", words)) as server:
        client = OpenEnvClient(server.url)
        await client.connect()
        with pytest.raises(ConnectionLost, match="wire"):
            await client.reset()
        assert not client.usable
        await client.close()


@pytest.mark.slow
async def test_the_probe_decides_about_the_connection() -> None:
    full = json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "2/2"}})
    with FakeEnvServer(on("state", full)) as server, pytest.raises(CapacityError, match="2/2"):
        await OpenEnvClient(server.url).connect()
    with (
        FakeEnvServer(on("state", "hang")) as server,
        pytest.raises(ConnectError, match=r"within 1 s"),
    ):
        await OpenEnvClient(server.url, connect_timeout_s=1).connect()
    with FakeEnvServer(on("state", "drop")) as server, pytest.raises(ConnectError):
        await OpenEnvClient(server.url).connect()
    with pytest.raises(ConnectError, match="cannot open"):
        await OpenEnvClient("http://127.0.0.1:1", connect_timeout_s=60).connect()
