"""A real redis-server for tests, which can be stopped, started again, and made to forget."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import redis

from realhf.base.loopback import free_port


class RedisServer:
    """A redis-server of its own. ``persistent``: with an append-only file, so that it comes back
    with its data; without one it comes back empty."""

    def __init__(self, folder: Path, *, persistent: bool = True) -> None:
        self.port = free_port()
        self._command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
            "--appendonly", "yes" if persistent else "no", "--appendfsync", "everysec",
        ]  # fmt: skip
        self.restarts = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with redis.Redis(port=self.port) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not come up"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.process.kill()
        self.process.wait(60)
        self.start()
        self.restarts += 1

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"
