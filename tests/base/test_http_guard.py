"""What strangers can hold of an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import realhf
from realhf.base.http_guard import guarded_http

HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WAIT_S = 30.0
MOST, STRANGERS = 8, 30


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once, or after a second for /slow; greets on a web socket and answers what it hears."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            await send({"type": "websocket.send", "text": "here"})
        return
    await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def served(kind: str, **bounds: Any) -> Iterator[tuple[str, int]]:
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


def connected(address: tuple[str, int], said: bytes) -> socket.socket:
    found = socket.create_connection(address, timeout=WAIT_S)
    found.sendall(said)
    return found


def closed(connection: socket.socket) -> bool:
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


def test_every_http_server_of_the_project_is_guarded():
    root = Path(realhf.__file__).parents[1]
    files = [path for folder in ("realhf", "workers") for path in (root / folder).rglob("*.py")]
    made = [(path, part) for path in files for part in path.read_text().split("uvicorn.Config(\n")[1:]]
    assert len(made) >= 4
    assert not [path for path, part in made if not re.match(r"[^)]*?(\([^()]*\)[^()]*)*http=guarded_http\(", part)]
