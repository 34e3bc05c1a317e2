"""A real server for tests: uvicorn in a thread of this process, on a free loopback port."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from realhf.trajectory.http.cli import uvicorn_config
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.server import create_app

REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 64, "checkpoint_dir": "c",
    "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 100,
}  # fmt: skip
STOCK = REGISTRATION | {
    "wandb_group": "",
    "wandb_project": "",
    "checkpoint_dir": "trained",
    "num_steps": 5,
}
"""What the original's example trainer registers, from whatever step it goes on."""
ENV = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": 4}


def wait_until(condition: Callable[[], object], what: str = "it does not happen") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextmanager
def running_server(**options: Any) -> Iterator[str]:
    """URL of a server with these settings, in memory unless a store is given; stopped at the
    end."""
    config = TrajectoryConfig(port=0, **({"store": "memory"} | options))
    running = uvicorn_config(config, create_app(config))
    running.timeout_graceful_shutdown = 1
    with serving(running) as port:
        yield f"{'https' if running.is_ssl else 'http'}://127.0.0.1:{port}"


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[int]:
    """Port of a uvicorn in a thread."""
    config.log_level = "warning"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="trajectory-server")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server does not come up")
        assert thread.is_alive(), "the server ended"
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), f"the server does not stop:\n{stack_of(thread)}"


def stack_of(thread: threading.Thread) -> str:
    """Where a thread is, as a traceback prints it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture
def api(url: str) -> Iterator[httpx.Client]:
    """A client of a server that was just reset."""
    with httpx.Client(base_url=url, timeout=300) as client:
        client.get("/reset_data")
        yield client


def start(api: httpx.Client, **changed: Any) -> None:
    """A registered trainer that has asked once."""
    assert api.post("/register", json=REGISTRATION | changed).status_code == 200
    assert api.get("/batch").json() == {"batch": None}


def register_env(api: httpx.Client, group_size: int = 4, **changed: Any) -> int:
    return api.post("/register-env", json=ENV | {"group_size": group_size} | changed).json()[
        "env_id"
    ]
