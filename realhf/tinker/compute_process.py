"""Starts the process that computes, and tells what it says and when it dies."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from realhf.tinker.channel import Channel, ComputeOptions, Job, Told

STOPS_WITHIN_S = 10.0


class ComputeProcess:
    """Belongs to the running event loop, on which ``told`` gets its messages and their bodies, and ``lost`` its exit
    code where nobody stopped it. It ends with this process."""

    def __init__(
        self, options: ComputeOptions, told: Callable[[Told, bytes], None], lost: Callable[[int], None]
    ) -> None:
        self._options, self._tell, self._lose = msgspec.json.encode(options).decode(), told, lost
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        """Start it, or a new one in place of one that has died."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(os.getpid()), "0", "realhf.tinker.compute", str(theirs.fileno()), self._options]
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "realhf.scheduler.child", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

        def told(message: Told, body: bytes) -> None:
            self._loop.call_soon_threadsafe(self._tell, message, body)

        def ended() -> None:
            self._loop.call_soon_threadsafe(self._lost, process)

        self._channel = Channel(ours, Told, told, ended)
        self._channel.start()

    def send(self, job: Job, body: bytes = b"") -> None:
        """Send a job; it never waits."""
        assert self._channel is not None, "it is started first"
        self._channel.send(job, body)

    async def stop(self) -> None:
        """End it; harmless before its start."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _lost(self, process: subprocess.Popen[bytes]) -> None:
        if process is self._process:
            process.kill()  # it may have closed its end only
            self._lose(process.wait())
