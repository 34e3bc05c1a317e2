"""The four HTTP servers of the project, each on a port of the loopback, with what a test needs to
know of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from realhf.tinker.__main__ import uvicorn_config as training_config
from realhf.tinker.access import guard_rules
from realhf.tinker.options import ServerOptions
from realhf.tinker.service import TrainingService
from realhf.view.__main__ import uvicorn_config as view_config
from realhf.view.run import RunList
from realhf.view.server import create_app
from realhf.web.guard import RequestGuard
from tests.env.server.fake_stage import Stage
from tests.tinker.compute_stand_in import Compute
from tests.trajectory.conftest import running_server, serving
from tests.view.runs import write_run

TOKEN = "tml-a-token-of-these-tests-only"


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    write: tuple[str, str, Any]
    """Method, path and JSON body of a request that changes something, or shows what is private."""
    token_header: tuple[str, str] | None
    """Header with the token of the server; None for a server that knows none."""
    max_body_bytes: int | None
    """Largest body of that request; None for a server that reads no body."""
    takes_chunks: bool
    """Whether a body may come without its length."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", int(self.url.rpartition(":")[2])


@contextmanager
def environment_server(folder: Path, token: str) -> Iterator[Served]:
    """The environment server over slots that are fakes, without the playground."""
    stage = Stage(2, token=token)
    try:
        header = ("Authorization", f"Bearer {token}")
        yield Served(stage.server.url, ("POST", "/reset", {}), header, 1 << 20, takes_chunks=False)
    finally:
        stage.server.stop()


@contextmanager
def playground_server(folder: Path, token: str) -> Iterator[Served]:
    """The same server with the playground. Its browsers log in, so no header has the token."""
    stage = Stage(1, token=token)
    try:
        yield Served(
            stage.server.url, ("POST", "/web/leave", {}), None, 1 << 16, takes_chunks=False
        )
    finally:
        stage.server.stop()


@contextmanager
def trajectory_server(folder: Path, token: str) -> Iterator[Served]:
    """The trajectory server, with its state in memory."""
    with running_server(token=token, max_body_bytes=1 << 16) as url:
        write = ("POST", "/disconnect-env", {"env_id": 0})
        yield Served(url, write, ("Authorization", f"Bearer {token}"), 1 << 16, takes_chunks=True)


@contextmanager
def view_server(folder: Path, token: str) -> Iterator[Served]:
    """The page over runs. It changes nothing, and what it shows is private."""
    runs = RunList([write_run(folder / "run")])
    runs.refresh()
    with serving(view_config(create_app(runs, follow=False))) as port:
        yield Served(
            f"http://127.0.0.1:{port}", ("GET", "/api/runs", None), None, None, takes_chunks=True
        )


@contextmanager
def training_server(folder: Path, token: str) -> Iterator[Served]:
    """The training API. A stand-in computes; without the package ``tinker``, whose types the routes
    are made of, one route behind the same guard stands for all."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    keys = folder / "keys"
    keys.write_text(f"{TOKEN}\n")
    keys.chmod(0o600)
    options = ServerOptions(
        model=str(folder / "model"),
        root=str(folder / "root"),
        token_file=str(keys) if token else "",
        max_body_mib=1,
    )
    write = ("POST", "/api/v1/client/config", {})
    with _training_on_a_thread(options) as url:
        max_body_bytes = 1 << 20 if find_spec("tinker") else None
        yield Served(
            url, write, ("X-API-Key", token or "tml-any"), max_body_bytes, takes_chunks=True
        )


@contextmanager
def _training_on_a_thread(options: ServerOptions) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        service = None
        if find_spec("tinker"):
            from realhf.tinker.routes import build_app

            service = TrainingService(options)
            service._process = Compute(options, service._on_reply, service._on_exit)  # pyright: ignore[reportAttributeAccessIssue]
            await service.open()
            app = build_app(service)
        else:
            app = Starlette(
                routes=[Route("/api/v1/{path:path}", _answer, methods=["GET", "POST"])],
                middleware=[Middleware(RequestGuard, rules=guard_rules(options))],
            )
        servers.append(uvicorn.Server(training_config(app, options)))
        serving_task = asyncio.create_task(servers[0].serve(sockets=[listener]))
        while not servers[0].started:
            await asyncio.sleep(0.01)
        started.set()
        await serving_task
        if service is not None:
            await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


async def _answer(request: Request) -> Response:
    return PlainTextResponse("ok")


SERVERS: Mapping[str, Callable[[Path, str], Any]] = {
    "environment": environment_server,
    "playground": playground_server,
    "trajectory": trajectory_server,
    "view": view_server,
    "training": training_server,
}


class ServerPool:
    """Starts each server once, with and without a token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._running: dict[tuple[str, str], Served] = {}

    def get(self, name: str, token: str = "") -> Served:
        """Return a running server."""
        if (name, token) not in self._running:
            folder = self._folder / f"{name}{len(self._running)}"
            self._running[name, token] = self._stack.enter_context(SERVERS[name](folder, token))
        return self._running[name, token]

    def close(self) -> None:
        """Stop all servers."""
        self._stack.close()


def send(served: Served, head: str, body: bytes = b"", *, wait_s: float = 60.0) -> bytes:
    """Send a request as it is and return everything that the server answers until it ends the
    connection."""
    with socket.create_connection(served.address, timeout=wait_s) as connection:
        connection.sendall(head.encode("latin-1") + body)
        answer = b""
        try:
            while part := connection.recv(1 << 16):
                answer += part
        except ConnectionError:
            pass
        return answer


def status_of(answer: bytes) -> int:
    """Return the HTTP status of an answer; 0 for none."""
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) == 3 and answer.startswith(b"HTTP/1.1 ") else 0


def head_of(served: Served, headers: Mapping[str, str], *, length: int | None = None) -> str:
    """Return the head of the protected request of a server. ``headers`` replace its own; an empty
    one is left out."""
    method, path, body = served.write
    own = {"Host": f"127.0.0.1:{served.address[1]}", "Connection": "close"}
    if body is not None:
        own |= {"Content-Type": "application/json"}
        own["Content-Length"] = str(len(json.dumps(body)) if length is None else length)
    lines = [f"{name}: {value}" for name, value in (own | dict(headers)).items() if value]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])


def ask(served: Served, headers: Mapping[str, str]) -> int:
    """Send the protected request of a server with these headers; return the status."""
    body = b"" if served.write[2] is None else json.dumps(served.write[2]).encode()
    return status_of(send(served, head_of(served, headers), body))
