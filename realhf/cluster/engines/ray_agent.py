"""Ray actor that runs a host agent as an ordinary child process, which ends with the actor."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.local import LocalScheduler
from realhf.scheduler.process import find_failure_cause
from realhf.transport.network import keep_in_memory

GRACE_S = 6.0
"""Seconds between SIGTERM and SIGKILL for the agent."""


class RayAgent:
    """Class of the Ray actor, whose methods all run on one thread. It does not import Ray
    itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = Path(tempfile.mkdtemp(prefix="realhf-agent-"))
        self._local = LocalScheduler()
        self._end = ""

    def start(self, endpoint: str, keys: str) -> str:
        """Start the agent, which joins the launcher at ``endpoint``; return the name of this
        machine."""
        argv = (
            "--join",
            endpoint,
            "--key-file",
            str(keep_in_memory(keys)),
            "--host-agent",
            "--temporary",
        )
        name = ("--name", self._name)
        self._local.start(
            WorkerSpec(self._name, "realhf.worker", argv + name, self._folder / "agent.log")
        )
        return os.uname().nodename

    def problem(self) -> str:
        """Return how the agent has ended; "" while it runs."""
        for event in self._local.wait(0.0):
            if isinstance(event, WorkerExit):
                cause = (
                    find_failure_cause(event.log, event.log_from, event.last_words)
                    if event.exit_code > 0
                    else None
                )
                self._end = (
                    f"host agent {self._name} on {os.uname().nodename} failed: "
                    f"{cause or event.reason}"
                )
        return self._end

    def stop(self) -> None:
        """End the agent with its child processes, and remove its folder."""
        self._local.stop(GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)
