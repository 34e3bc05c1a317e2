"""Requests to a service: out of order, from threads, refused, lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from realhf.transport.errors import PeerLost, RpcTimeout
from realhf.transport.service import Request, ServiceClient, ServiceError, ServiceServer

RUN = "run-1"


class Answers:
    """Answers ``echo`` at once, ``later`` from another thread after its seconds, ``never`` not at all."""

    def __call__(self, request: Request) -> None:
        if request.method == "echo":
            request.reply([request.client, request.payload])
        elif request.method == "later":
            threading.Timer(request.payload, request.reply, [request.payload]).start()
        elif request.method == "unsendable":
            request.reply(object())
        elif request.method != "never":
            raise KeyError(request.method)


@pytest.fixture
def server() -> Iterator[ServiceServer]:
    server = ServiceServer("answers", RUN, Answers())
    yield server
    server.close()


async def test_answers_come_in_any_order(server: ServiceServer) -> None:
    client = ServiceClient(server.endpoint, "answers", "me", RUN)
    slow = asyncio.create_task(client.request("later", 2.0, timeout_s=60))
    assert await client.request("echo", {"a": [1, b"x"]}, timeout_s=60) == ["me", {"a": [1, b"x"]}]
    assert not slow.done() and await slow == 2.0
    many = await asyncio.gather(*(client.request("echo", i, timeout_s=60) for i in range(2000)))
    assert [value for _, value in many] == list(range(2000))
    client.close()


async def test_errors_reach_the_one_who_asked(server: ServiceServer) -> None:
    client = ServiceClient(server.endpoint, "answers", "me", RUN)
    with pytest.raises(ServiceError, match="KeyError: 'no_such'"):
        await client.request("no_such", None, timeout_s=60)
    with pytest.raises(ServiceError, match="ProtocolError"):
        await client.request("unsendable", None, timeout_s=60)
    with pytest.raises(RpcTimeout, match=r"answers did not answer never within 0\.05 s"):
        await client.request("never", None, timeout_s=0.05)
    stranger = ServiceClient(server.endpoint, "answers", "me", "run-2")
    with pytest.raises(ServiceError, match="run-2"):
        await stranger.request("echo", 1, timeout_s=60)
    stranger.close()
    client.close()


async def test_a_server_that_ends_fails_its_requests_at_once(server: ServiceServer) -> None:
    client = ServiceClient(server.endpoint, "answers", "me", RUN)
    waiting = asyncio.create_task(client.request("never", None, timeout_s=60))
    await client.request("echo", 1, timeout_s=60)
    await asyncio.to_thread(server.close)
    with pytest.raises(PeerLost, match="answers"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(PeerLost):
        await client.request("echo", 1, timeout_s=60)
    client.close()
    nobody = ServiceClient(server.endpoint, "answers", "me", RUN)
    with pytest.raises(PeerLost):
        await asyncio.wait_for(nobody.request("echo", 1, timeout_s=60), 60)
    nobody.close()


async def test_hostile_frames_are_dropped_and_counted(server: ServiceServer) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.endpoint)
    for frames in ([b"\xff\xff"], [b""], [b"\x80"], [b"\x81\xa1v\x01", b"\xc1"], [b"x"] * 20):
        socket.send_multipart(frames)
    client = ServiceClient(server.endpoint, "answers", "me", RUN)
    deadline = time.monotonic() + 60
    while server.dropped_messages < 5 and time.monotonic() < deadline:
        assert (await client.request("echo", 1, timeout_s=60))[1] == 1
    assert server.dropped_messages == 5 and server.failure is None
    client.close()
    context.destroy(0)
