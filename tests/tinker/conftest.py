"""A server in a process of its own, with the built-in policy, and clients of it. Without the
package ``tinker`` only what needs no client is collected: ``make test-tinker`` installs it beside
the project."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from realhf.api.config import BuiltinModelConfig
from realhf.tinker.options import ServerOptions
from realhf.tinker.service import TrainingService
from tests.tinker.compute_stand_in import Compute

KEY = "tml-a-key-of-these-tests-only"
_FREE = ("test_service.py", "test_losses.py", "test_options.py")
_NEED_IT = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _FREE]
collect_ignore = [] if find_spec("tinker") else _NEED_IT
START_S = 240.0
LIMITS = ("--max-sequence", "256", "--max-adapters-per-key", "3")


class Server:
    """Runs ``train-api`` on a folder; ``url`` is where it listens."""

    def __init__(self, model: Path, root: Path, *options: str, port: int = 0) -> None:
        self._command = [
            sys.executable,
            "-m",
            "realhf.tinker",
            "--model",
            str(model),
            "--root",
            str(root),
            *options,
        ]
        self.root = root
        self.url = ""
        self._port = port
        self.start()

    def start(self) -> None:
        """Start, on the same port if it was running before."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.log = self.root / "log.txt"
        port = self.url.rpartition(":")[2] or str(self._port)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, "--port", port, "--threads", "1"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        deadline = threading.Timer(START_S, self.process.kill)
        deadline.start()
        line = self.process.stdout.readline()
        deadline.cancel()
        assert line.startswith("train-api: http"), self.log.read_text()[-3000:]
        self.url = line.split()[1]

    def kill(self) -> None:
        """Kill the server and what it started, as a power cut does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def compute_pid(self) -> int:
        """The process that computes."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return int(children[-1])

    def stop(self) -> int:
        """End it as a person does."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    """A model of two layers, whose tokens are bytes."""
    from realhf.backends.builtin_policy import build_builtin_policy

    out = tmp_path_factory.mktemp("policy") / "model"
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    build_builtin_policy(None, out, BuiltinModelConfig(**sizes), seed=1)
    return out


@pytest.fixture(scope="session")
def server(policy, tmp_path_factory):
    """One server for all tests that do it no harm."""
    running = Server(
        policy, tmp_path_factory.mktemp("served") / "root", "--max-body-mib", "4", *LIMITS
    )
    yield running
    if running.process.poll() is None:
        assert running.stop() == 0, running.log.read_text()[-3000:]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens services in this process, one after another, on the same folder; a stand-in
    computes."""
    monkeypatch.setattr("realhf.tinker.service.ComputeProcess", Compute)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    now: list[TrainingService] = []
    with asyncio.Runner() as runner:

        async def begin(options) -> TrainingService:
            if now:
                await now.pop().close()
            service = TrainingService(
                ServerOptions(model=str(tmp_path / "model"), root=str(tmp_path / "root"), **options)
            )
            await service.open()
            now.append(service)
            return service

        yield lambda **options: runner.run(begin(options))
        for service in now:
            runner.run(service.close())


def wait_for(condition, what: str, within_s: float = 60.0) -> None:
    """Wait until ``condition()``."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)
