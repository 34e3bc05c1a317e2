"""Five steps on the echo environment that the public package itself writes (``openenv init``),
behind its server."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.base.loopback import free_port
from tests.interop.training import LIMIT_S, ROOT, STEPS, trained

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="openenv is not installed; `make test-openenv` installs it"
    ),
]


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """The address of the environment, which nobody has changed."""
    subprocess.run(
        [PYTHON.parent / "openenv", "init", "echo_env"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
    )
    port = free_port()
    command = [
        PYTHON,
        "-m",
        "uvicorn",
        "server.app:app",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    server = subprocess.Popen(command, cwd=tmp_path / "echo_env")
    try:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None and time.monotonic() < deadline, (
                "the echo server does not serve"
            )
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def test_five_steps_on_the_echo_environment_of_the_package(echo: str, tmp_path: Path) -> None:
    rows = trained(
        tmp_path / "run",
        "env.path=openenv",
        f"env.url={echo}",
        "env.observation=echoed_message",
        "rollout.max_turns=2",
        "rollout.max_total_tokens=900",
    )
    assert len(rows) == STEPS
    assert all(row["batch/tokens"] > 0 for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    assert all(0 < reward <= 2 for reward in rewards), (
        "a tenth for each character, at most 1 in each of two turns"
    )
