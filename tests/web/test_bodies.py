"""All bodies together have a bound: whoever sends them, compressed or not; and what is counted is
what is held.

Source: docs/reference/trajectory.md 3.8."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import httpx
import pytest
import zstandard
from isal import igzip

from realhf.web import bodies
from realhf.web.bodies import BodyBudget, BodyShare, gunzip, read_body, unzstd
from realhf.web.refusal import Refusal
from tests.trajectory.conftest import running_server, start
from tests.trajectory.driver import refused
from tests.trajectory.groups import encoded, group

CAP = 1 << 20


@pytest.fixture
def small() -> Iterator[str]:
    with running_server(max_body_bytes=CAP, max_bodies_bytes=2 * CAP) as url:
        yield url


def half_a_body(url: str, nbytes: int) -> socket.socket:
    """A connection that announces more than it sends."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    head = f"POST /scored_data HTTP/1.1\r\nHost: {host}\r\nContent-Length: {CAP}\r\n\r\n".encode()
    connection.sendall(head + b" " * nbytes)
    return connection


def held(api: httpx.Client) -> float:
    lines = api.get("/metrics").text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("trajectory_body_bytes ")
    )


def wait_until_held(api: httpx.Client, nbytes: int) -> None:
    for _ in range(2000):
        if held(api) == nbytes:
            return
    raise AssertionError(f"{held(api)} bytes are held, not {nbytes}")


@pytest.mark.slow
def test_bodies_beyond_the_budget_are_tried_again_later(small):
    """They get 503, on which stock clients keep their data; when the others are done, there is room
    again."""
    body = encoded(group(4, 5_000))
    assert 300_000 < len(body) < CAP
    with httpx.Client(base_url=small) as api, ExitStack() as stack:
        start(api)
        for _ in range(2):
            stack.enter_context(half_a_body(small, CAP - 1000))
        wait_until_held(api, 2 * (CAP - 1000))
        refused = api.post("/scored_data", content=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        assert api.get("/status").json()["queue_size"] == 0
        stack.close()
        wait_until_held(api, 0)
        assert api.post("/scored_data", content=body).status_code == 200
        assert "trajectory_bodies_refused_total 1.0" in api.get("/metrics").text


@pytest.mark.slow
def test_what_is_announced_and_not_sent_holds_nothing(small):
    with httpx.Client(base_url=small) as api, ExitStack() as stack:
        start(api)
        for _ in range(8):
            stack.enter_context(half_a_body(small, 10))
        assert api.post("/scored_data", content=encoded(group(4, 5_000))).status_code == 200


@pytest.mark.slow
def test_what_a_body_inflates_to_counts(small):
    """Several at once, each under the cap, may not exceed the budget together."""
    bomb = gzip.compress(b" " * (CAP - 1))
    with httpx.Client(base_url=small) as api, ExitStack() as stack:
        start(api)
        stack.enter_context(half_a_body(small, 500_000))
        wait_until_held(api, 500_000)
        assert (
            api.post("/scored_data", content=bomb, headers={"Content-Encoding": "gzip"}).status_code
            == 422
        )
        stack.enter_context(half_a_body(small, 600_000))
        wait_until_held(api, 1_100_000)
        assert (
            api.post("/scored_data", content=bomb, headers={"Content-Encoding": "gzip"}).status_code
            == 503
        )
        wait_until_held(api, 1_100_000)


@pytest.mark.parametrize("inflate", [gunzip, unzstd])
def test_inflating_stops_at_the_budget_and_gives_everything_back(inflate):
    plain = bytes(8 << 20)
    body = gzip.compress(plain) if inflate is gunzip else zstandard.compress(plain)
    budget = BodyBudget(3 << 20)
    share = BodyShare(budget)
    other = BodyShare(budget)
    with refused(503):
        inflate(body, 64 << 20, share.take)  # type: ignore[operator]
    assert 0 <= budget.used_bytes <= 3 << 20
    share.release()
    other.take(3 << 20)
    with pytest.raises(Refusal):
        share.take(0)
    other.release()
    assert budget.used_bytes == 0


@pytest.mark.nightly
def test_a_body_that_stalls_gives_its_room_back(small, monkeypatch):
    """Three of them used to hold the room of all bodies for as long as they liked."""
    monkeypatch.setattr(bodies, "GRACE_S", 0.3)
    with httpx.Client(base_url=small) as api, ExitStack() as stack:
        start(api)
        stalled = [stack.enter_context(half_a_body(small, CAP - 1000)) for _ in range(2)]
        for connection in stalled:
            head = connection.recv(4096)
            assert b" 503 " in head.splitlines()[0]
            assert b"of the body came in" in head + connection.recv(4096)
        wait_until_held(api, 0)
        assert api.post("/scored_data", content=encoded(group(4, 5_000))).status_code == 200


SIZE = 8 << 20
CHUNK = 64 << 10
SLACK = 3 << 20
"""A step of inflation, the reserve of a growing buffer, and what the decoders need."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "coding", ["plain", "gzip", "gzip that does not shrink", "gzip members", "zstd"]
)
async def test_no_more_is_held_than_is_counted(coding):
    """The chunks are not held beside the body, nor the compressed chunks during inflation, nor the
    plain parts."""
    plain = random.Random(5).randbytes(SIZE) if "shrink" in coding else bytes(SIZE)
    sent = plain
    if coding == "gzip members":
        sent = igzip.compress(plain[: SIZE // 8], 0) * 8
    elif coding.startswith("gzip"):
        sent = igzip.compress(plain, 0)
    elif coding == "zstd":
        sent = zstandard.compress(plain)
    counted = 0

    def take(nbytes: int) -> None:
        nonlocal counted
        counted += nbytes

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(sent), CHUNK):
            yield sent[at : at + CHUNK]

    await asyncio.to_thread(bool)  # so that threads are there already
    tracemalloc.start()
    try:
        body = await read_body(
            chunks(), encoding=coding.split()[0], max_bytes=2 * SIZE, allow_zstd=True, take=take
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert body == plain and type(body) is bytes
    assert counted == len(plain) + (len(sent) if sent is not plain else 0)
    assert peak <= counted + SLACK, f"{peak} bytes were held, and {counted} counted"
