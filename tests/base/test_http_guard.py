"""What strangers can hold of an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn

import realhf
from realhf.base.http_guard import guarded_http

HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WAIT_S = 30.0
MOST, STRANGERS = 8, 30
LARGE = 24 << 20


async def app(scope, receive, send):
    """Answers at once, after a second for /slow, with ``LARGE`` bytes for /large; greets on a web socket and answers
    what it hears."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            await send({"type": "websocket.send", "text": "here"})
        return
    await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
    body = b"x" * LARGE if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def served(kind, **bounds):
    """A server on the loopback; its address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    config = uvicorn.Config(
        app, http=guarded_http(kind, **bounds), ws="websockets-sansio", lifespan="off", log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()


def connected(address, said):
    found = socket.create_connection(address, timeout=WAIT_S)
    found.sendall(said)
    return found


def closed(connection):
    """Whether the server ends a connection, without another word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_a_head_that_does_not_come_ends_its_connection(kind: str):
    """Also that of a second request, after which the clock of an idle connection runs no longer. What is at work goes
    on, however long it takes."""
    with served(kind, head_s=0.4) as address, contextlib.ExitStack() as stack:
        silent, half, again, slow = (
            stack.enter_context(connected(address, said))
            for said in (b"", HALF, HALF + b"\r\n", HALF.replace(b"/ ", b"/slow ") + b"\r\n")
        )
        assert again.recv(99).startswith(b"HTTP/1.1 200")
        again.sendall(HALF)
        assert closed(silent) and closed(half)
        assert b"ok" in again.recv(9) or closed(again)
        assert slow.recv(99).startswith(b"HTTP/1.1 200"), "it took longer than a head may take"


@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_strangers_take_no_more_connections_than_there_may_be(kind: str):
    """300 half requests used to hold all descriptors of an environment server, and its sessions ended. The oldest of
    them goes; a session on a web socket, and a request at work, stay."""
    from websockets.sync.client import connect

    with served(kind, most=MOST) as address, contextlib.ExitStack() as stack:
        url = f"{address[0]}:{address[1]}"
        session = stack.enter_context(connect(f"ws://{url}/", open_timeout=WAIT_S))
        slow = stack.enter_context(connected(address, HALF.replace(b"/ ", b"/slow ") + b"\r\n"))
        strangers = [stack.enter_context(connected(address, HALF)) for _ in range(STRANGERS)]
        assert httpx.get(f"http://{url}/", timeout=WAIT_S).text == "ok"
        session.send("there?")
        assert session.recv(WAIT_S) == "here"
        assert slow.recv(99).startswith(b"HTTP/1.1 200")
        assert all(closed(stranger) for stranger in strangers[: STRANGERS - MOST])
        strangers[-1].sendall(b"\r\n")
        assert strangers[-1].recv(99).startswith(b"HTTP/1.1 200"), "the last one was no stranger"


@pytest.mark.parametrize("kind", ["h11", "httptools"])
def test_answers_that_nobody_reads_keep_nobody_out(kind: str):
    """One that is read, however slowly, is sent to its end: it counted as idle once its last byte was handed over, and
    was the first to go when strangers came."""
    asked = HALF.replace(b"/ ", b"/large ") + b"\r\n"

    def read(reader):
        size = 0
        while size < LARGE and (more := reader.recv(1 << 17)):
            size += len(more)
            time.sleep(0.005)
        return size

    with served(kind, most=MOST, head_s=0.8) as address, contextlib.ExitStack() as stack:
        reader = stack.enter_context(socket.socket())
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)  # else it holds more than is read in a while
        reader.settimeout(WAIT_S)
        reader.connect(address)
        reader.sendall(asked)
        done = stack.enter_context(ThreadPoolExecutor(1)).submit(read, reader)
        for _ in range(MOST):
            stack.enter_context(connected(address, asked))
        answer, deadline = "", time.monotonic() + WAIT_S
        while answer != "ok" and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"http://{address[0]}:{address[1]}/", timeout=WAIT_S).text
        assert answer == "ok" and done.result(WAIT_S) >= LARGE


def test_every_http_server_of_the_project_is_guarded():
    root = Path(realhf.__file__).parents[1]
    files = [path for folder in ("realhf", "workers") for path in (root / folder).rglob("*.py")]
    made = [(path, part) for path in files for part in path.read_text().split("uvicorn.Config(\n")[1:]]
    assert len(made) >= 4
    assert not [path for path, part in made if not re.match(r"[^)]*?(\([^()]*\)[^()]*)*http=guarded_http\(", part)]
