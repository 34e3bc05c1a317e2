"""Requests to a service from code that blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from realhf.transport.errors import PeerLost, RpcTimeout
from realhf.transport.service import BlockingServiceClient, Request, ServiceError, ServiceServer

RUN = "run-1"


class Answers:
    """``never`` is not answered; ``asked`` is set when it has arrived."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, request: Request) -> None:
        if request.method == "never":
            self.asked.set()
        elif request.method == "echo":
            request.reply(request.payload)
        else:
            raise ValueError(request.method)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(answers: Answers) -> Iterator[ServiceServer]:
    server = ServiceServer("answers", RUN, answers)
    yield server
    server.close()


def test_answers_and_errors_come_through(server: ServiceServer) -> None:
    client = BlockingServiceClient(server.endpoint, "answers", "me", RUN)
    assert client.request("echo", [1, {"a": b"x"}], timeout_s=60) == [1, {"a": b"x"}]
    with pytest.raises(ServiceError, match="odd"):
        client.request("odd", None, timeout_s=60)
    with pytest.raises(RpcTimeout, match=r"answers did not answer never within 0\.05 s"):
        client.request("never", None, timeout_s=0.05)
    client.close()


def test_closing_ends_a_request_in_flight_at_once_and_refuses_later_ones(
    server: ServiceServer, answers: Answers
) -> None:
    client = BlockingServiceClient(server.endpoint, "answers", "me", RUN)
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


def test_a_server_that_ends_is_seen_at_once(server: ServiceServer) -> None:
    client = BlockingServiceClient(server.endpoint, "answers", "me", RUN)
    assert client.request("echo", 1, timeout_s=60) == 1
    server.close()
    with pytest.raises(PeerLost, match="answers"):
        client.request("echo", 1, timeout_s=600)
    client.close()
