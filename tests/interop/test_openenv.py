"""The real OpenEnv packages and ours, each as client and as server (``make test-openenv`` installs
them)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.aws.client.aws_env import AwsEnv
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.tasks.loader import instantiate
from realhf.base.loopback import free_port
from realhf.env.openenv_client import CapacityError, ConnectError, OpenEnvClient

pytestmark = pytest.mark.sim

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PEERS = {
    "openenv 0.10.0": ROOT / ".venv-openenv",
    "openenv-core 0.3.0": ROOT / ".venv-openenv-core",
}


@pytest.fixture(params=list(PEERS))
def python(request: pytest.FixtureRequest) -> Path:
    found = PEERS[request.param] / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{request.param} is not installed; `make test-openenv` installs and runs it")
    return found


@pytest.fixture
def echo_url(python: Path) -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen([python, HERE / "echo_server.py", str(port)], cwd=HERE)
    try:
        _wait_for(server, port, 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def _wait_for(server: subprocess.Popen, port: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert server.poll() is None, "the echo server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the echo server does not listen within {limit_s:g} s")


def test_their_client_plays_an_episode_on_our_server(python: Path) -> None:
    task = instantiate(201, 3)
    with EnvServerProcess(1, "--web", "off") as server:
        command = [
            python,
            HERE / "stock_client.py",
            server.url,
            json.dumps({"task": task.to_json()}),
            *task.solution,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=HERE, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    first, *steps, last = json.loads(done.stdout.splitlines()[-1])
    assert (
        first["done"] is False and first["observation"]["task"]["description"] == task.description
    )
    assert sum(step["reward"] for step in steps) == pytest.approx(1.0)
    assert steps[-1]["done"] is True and steps[-1]["observation"]["task_achieved"] is True
    assert last["state"]["step_count"] == len(task.solution)


async def test_our_client_plays_an_episode_on_their_server(echo_url: str) -> None:
    client = AwsEnv(echo_url)
    await client.connect()
    first = await client.reset(seed=5)
    assert first.observation.command_output == "seed 5" and first.done is False
    rewards = []
    for word in ("one", "two"):
        result = await client.step(word)
        assert result.observation.command_output == word
        rewards.append(result.reward)
    assert result.done is True and rewards == [0.5, 0.5]
    assert (await client.state()).step_count == 2
    await client.close()


async def test_a_full_stock_server_is_a_capacity_error(echo_url: str) -> None:
    clients = [OpenEnvClient(echo_url) for _ in range(3)]
    for client in clients[:2]:
        await client.connect()
    with pytest.raises(ConnectError) as refused:
        await clients[2].connect()
    assert isinstance(refused.value, CapacityError)
    for client in clients:
        await client.close()
