"""Server processes for the trajectory benchmark: the original server in its own Python environment,
and ours with each kind of store."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from harness.process_tree import footprint

ROOT = Path(__file__).resolve().parents[2]
PEER_PYTHON = ROOT / ".venv-atropos" / "bin" / "python"
PEER = [
    str(PEER_PYTHON),
    "-m",
    "uvicorn",
    "atroposlib.api.server:app",
    "--loop",
    "uvloop",
    "--http",
    "httptools",
    "--no-access-log",
    "--log-level",
    "warning",
]
OURS = [sys.executable, "-m", "realhf.trajectory"]
_UP_S = 120.0


class Server:
    """A server process and its children. ``kind``: original, sqlite or memory. It runs on the same
    cores as the process that starts it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start the server and wait for its first response."""
        store = "memory" if self.kind == "memory" else f"sqlite:{self._folder / 'data'}"
        command = PEER if self.kind == "original" else [*OURS, "--store", store]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=log, stderr=log, cwd=ROOT
            )
        deadline = time.monotonic() + _UP_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/status", timeout=60)
                return
            except httpx.TransportError:
                assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, f"{self.kind} does not come up"
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._process.kill()
        self._process.wait(10)

    @property
    def memory_mb(self) -> float:
        """Proportional set size of the server's process tree, in MiB."""
        return footprint(self._process.pid).pss_mb

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the server's process tree has used."""
        root = psutil.Process(self._process.pid)
        total = 0.0
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


@contextmanager
def running(kind: str) -> Iterator[Server]:
    """Context manager that runs a server of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(kind, Path(folder))
        try:
            yield server
        finally:
            server.kill()


def peer_versions() -> str:
    """Return text with the package versions in the original server's environment."""
    code = (
        "import sys, importlib.metadata as m; print(', '.join(f'{name} {m.version(name)}' for name "
        "in sys.argv[1:]))"
    )
    command = [str(PEER_PYTHON), "-c", code, "atroposlib", "fastapi", "pydantic", "uvicorn"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
