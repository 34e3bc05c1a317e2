"""A real server for tests: uvicorn in a thread of this process, on a free loopback port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from realhf.trajectory.http.cli import uvicorn_config
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.http.server import create_app

REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}


@contextmanager
def running_server(**options: Any) -> Iterator[str]:
    """URL of a server with these settings, in memory unless a store is given; stopped at the end."""
    config = TrajectoryConfig(port=0, **({"store": "memory"} | options))
    server = uvicorn.Server(uvicorn_config(config, create_app(config)))
    server.config.log_level = "warning"
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, name="trajectory-server")
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.005)
        yield f"{'https' if server.config.is_ssl else 'http'}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not stop"


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
    request = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": group_size} | changed
    return api.post("/register-env", json=request).json()["env_id"]


def store_at(folder: Path) -> str:
    return f"sqlite:{folder}"
