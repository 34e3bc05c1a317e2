"""Requests to a service: out of order, from threads, refused, lost. A service that lives on an
event loop. Requests to a service from code that blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from realhf.transport.errors import PeerLost, RpcTimeout
from realhf.transport.service import (
    BlockingServiceClient,
    LoopServiceServer,
    ServiceClient,
    ServiceError,
    ServiceRequest,
    ServiceServer,
)

RUN = "run-1"


class Answers:
    """Answers ``echo`` at once, ``later`` from another thread after its seconds, ``never`` not at
    all."""

    def __call__(self, request: ServiceRequest) -> None:
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


@pytest.mark.slow
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


class LoopAnswers:
    """``echo`` is answered at once, ``later`` when ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(self, request: ServiceRequest) -> None:
        if request.method == "echo":
            request.reply([request.client, request.payload])
        elif request.method == "later":
            self.tasks.append(asyncio.create_task(self._later(request)))
        else:
            raise KeyError(request.method)

    async def _later(self, request: ServiceRequest) -> None:
        await self.go.wait()
        request.reply(request.payload)


async def test_requests_are_answered_in_any_order_and_from_many_clients() -> None:
    answers = LoopAnswers()
    server = LoopServiceServer("answers", RUN, answers)
    clients = [ServiceClient(server.endpoint, "answers", str(number), RUN) for number in range(3)]
    later = [
        asyncio.create_task(clients[0].request("later", number, timeout_s=60))
        for number in range(5)
    ]
    asked = [
        client.request("echo", number, timeout_s=60) for number in range(300) for client in clients
    ]
    assert await asyncio.gather(*asked) == [
        [str(c), number] for number in range(300) for c in range(3)
    ]
    assert not any(task.done() for task in later)
    answers.go.set()
    assert await asyncio.gather(*later) == list(range(5))
    for client in clients:
        client.close()
    await server.close()


async def test_what_was_answered_before_the_end_arrives_and_the_rest_is_lost() -> None:
    answers = LoopAnswers()
    server = LoopServiceServer("answers", RUN, answers)
    client = ServiceClient(server.endpoint, "answers", "me", RUN)
    with pytest.raises(ServiceError, match="KeyError: 'no_such'"):
        await client.request("no_such", None, timeout_s=60)
    open_one = asyncio.create_task(client.request("later", 1, timeout_s=60))
    last = asyncio.create_task(client.request("echo", 2, timeout_s=60))
    assert await last == ["me", 2]
    await server.close()
    answers.go.set()
    with pytest.raises(PeerLost):
        await open_one
    await asyncio.gather(*answers.tasks)
    await server.close()
    client.close()


class QuietAnswers:
    """``never`` is not answered; ``asked`` is set when it has arrived."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, request: ServiceRequest) -> None:
        if request.method == "never":
            self.asked.set()
        elif request.method == "echo":
            request.reply(request.payload)
        else:
            raise ValueError(request.method)


@pytest.fixture
def answers() -> QuietAnswers:
    return QuietAnswers()


@pytest.fixture
def quiet_server(answers: QuietAnswers) -> Iterator[ServiceServer]:
    server = ServiceServer("answers", RUN, answers)
    yield server
    server.close()


def test_answers_and_errors_come_through(quiet_server: ServiceServer) -> None:
    client = BlockingServiceClient(quiet_server.endpoint, "answers", "me", RUN)
    assert client.request("echo", [1, {"a": b"x"}], timeout_s=60) == [1, {"a": b"x"}]
    with pytest.raises(ServiceError, match="odd"):
        client.request("odd", None, timeout_s=60)
    with pytest.raises(RpcTimeout, match=r"answers did not answer never within 0\.05 s"):
        client.request("never", None, timeout_s=0.05)
    client.close()


def test_closing_ends_a_request_in_flight_at_once_and_refuses_later_ones(
    quiet_server: ServiceServer, answers: QuietAnswers
) -> None:
    client = BlockingServiceClient(quiet_server.endpoint, "answers", "me", RUN)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.request("never", None, timeout_s=600)
        except PeerLost as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert answers.asked.wait(60)
    client.close()
    asking.join(60)
    assert not asking.is_alive() and len(errors) == 1
    with pytest.raises(PeerLost, match="the client of answers is closed"):
        client.request("echo", 1, timeout_s=600)
    client.close()


def test_a_server_that_ends_is_seen_at_once(quiet_server: ServiceServer) -> None:
    client = BlockingServiceClient(quiet_server.endpoint, "answers", "me", RUN)
    assert client.request("echo", 1, timeout_s=60) == 1
    quiet_server.close()
    with pytest.raises(PeerLost, match="answers"):
        client.request("echo", 1, timeout_s=600)
    client.close()
