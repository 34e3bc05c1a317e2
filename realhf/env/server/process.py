"""Environment server as a child process, for benchmarks, notebooks and tests."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Self

from realhf.base import process_clock

_STOP_TIMEOUT_S = 12.0


class ServerProcess:
    """Context manager that runs ``python -m workers.env_worker`` with ``arguments`` on a free port.

    ``url`` is the server's address, ``process`` the child process. Raises RuntimeError with the
    server's output if it does not start.
    """

    def __init__(self, *arguments: str, timeout_s: float = 60.0) -> None:
        command = [sys.executable, "-m", "workers.env_worker", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=_read, args=(self.process.stdout, self._lines), daemon=True
        )
        self._reader.start()
        self.url = self._address(timeout_s)

    def _address(self, timeout_s: float) -> str:
        deadline = process_clock.now() + timeout_s
        lines: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - process_clock.now()))
            except queue.Empty:
                if process_clock.now() < deadline:
                    continue
                self.stop()
                raise RuntimeError(
                    f"the environment server did not start within {timeout_s:g} s"
                ) from None
            if line is None:
                raise RuntimeError(
                    f"the environment server ended (code {self.process.wait()}): {''.join(lines)}"
                )
            lines.append(line)
            if " sessions at http" in line:
                return line.rpartition(" at ")[2].strip()

    def output(self) -> str:
        """Return what the server printed after its start; call it only after the server has
        ended."""
        lines = []
        while (line := self._lines.get(timeout=_STOP_TIMEOUT_S)) is not None:
            lines.append(line)
        return "".join(lines)

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL if the server does not end in time. Returns the exit code; may
        be called again."""
        self.process.terminate()
        try:
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
