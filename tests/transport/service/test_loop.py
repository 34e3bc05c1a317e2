"""A service that lives on an event loop."""

from __future__ import annotations

import asyncio

import pytest

from realhf.transport.errors import PeerLost
from realhf.transport.service import LoopServiceServer, Request, ServiceClient, ServiceError

RUN = "run-1"


class Answers:
    """``echo`` is answered at once, ``later`` when ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(self, request: Request) -> None:
        if request.method == "echo":
            request.reply([request.client, request.payload])
        elif request.method == "later":
            self.tasks.append(asyncio.create_task(self._later(request)))
        else:
            raise KeyError(request.method)

    async def _later(self, request: Request) -> None:
        await self.go.wait()
        request.reply(request.payload)


async def test_requests_are_answered_in_any_order_and_from_many_clients() -> None:
    answers = Answers()
    server = LoopServiceServer("answers", RUN, answers)
    clients = [ServiceClient(server.endpoint, "answers", str(number), RUN) for number in range(3)]
    later = [asyncio.create_task(clients[0].request("later", number, timeout_s=60)) for number in range(5)]
    asked = [client.request("echo", number, timeout_s=60) for number in range(300) for client in clients]
    assert await asyncio.gather(*asked) == [[str(c), number] for number in range(300) for c in range(3)]
    assert not any(task.done() for task in later)
    answers.go.set()
    assert await asyncio.gather(*later) == list(range(5))
    for client in clients:
        client.close()
    await server.close()


async def test_what_was_answered_before_the_end_arrives_and_the_rest_is_lost() -> None:
    answers = Answers()
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
