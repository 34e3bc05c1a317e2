"""Helper process that starts host agents, and the JSON-lines protocol between it and the launcher.

The launcher sends the helper (``serve``) ``{"start": ...}`` and ``{"stop": true}``, which the
helper answers with ``{"started": true}`` and ``{"stopped": true}``. It may send ``{"problem":
TEXT}`` at any time. The helper ends when its standard input is closed, and therefore also when the
launcher ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

from realhf.base import process_clock
from realhf.cluster.placement import ClusterError

STOP_S = 20.0
"""Seconds within which a helper must end its agents after a stop message."""
HELPER_EXIT_S = 5.0
"""Seconds within which a helper process that has no agents must exit."""
POLL_S = 2.0
"""Interval in seconds at which a helper checks its agents."""
MAX_LINE_BYTES = 1 << 16


class AgentEngine(Protocol):
    """Interface of the object that starts agents in a helper process."""

    def start(self, plan: Mapping[str, Any]) -> None:
        """Start the agents of ``plan``. Raises ClusterError with the reason."""
        ...

    def problem(self) -> str:
        """Return why an agent has ended or cannot start; "" if all agents run."""
        ...

    def stop(self) -> None:
        """End all agents."""
        ...


class EngineProcess:
    """The launcher's handle of a helper process, which runs from ``start`` to ``stop``.

    The launcher's local scheduler must not kill the helper as a leftover process
    (``LocalScheduler.preserve_children``).
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._problem = ""
        self._starting = False

    def start(self, plan: Mapping[str, Any], limit_s: float, what: str) -> None:
        """Start the agents of ``plan``, and wait until the helper confirms. Raises ClusterError
        with the reason.

        what: what is being started, for the error message when ``limit_s`` seconds have passed.
        """
        self._problem = ""
        if self._process is None:
            self._start_process()
        self._starting = True
        self._send({"start": plan})
        self._starting = not self._read_until("started", limit_s) and not self._problem
        if self._starting:
            self._problem = f"{what} did not come about within {limit_s:g} s"
        if self._problem:
            raise ClusterError(self._problem)

    def problem(self) -> str:
        """Return the last problem that the helper has reported, or how the helper ended; "" if
        there was no problem."""
        self._read_until("", 0.0)
        return self._problem

    def stop(self) -> None:
        """End the agents and the helper. A helper that does not answer is killed."""
        if (process := self._process) is None:
            return
        if self._starting and process.poll() is None:
            process.terminate()  # it reads no messages while it starts agents; on SIGTERM it ends them
        elif process.poll() is None:
            self._send({"stop": True})
            self._read_until("stopped", STOP_S)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_S if self._starting else HELPER_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._process = None
        self._starting = False

    def _start_process(self) -> None:
        # ``scheduler.child`` makes the kernel kill the helper when the launcher ends, even while
        # the helper starts agents and does not read its standard input.
        command = [
            sys.executable,
            "-m",
            "realhf.scheduler.child",
            str(os.getpid()),
            "0",
            self._module,
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._partial = b""

    def _send(self, message: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._problem = "the process that starts host agents has ended"

    def _read_until(self, key: str, limit_s: float) -> bool:
        """Read the helper's messages for at most ``limit_s`` seconds, until one contains ``key``;
        return whether it was received. If ``key`` is ``started``, a problem ends the reading
        too."""
        if self._process is None:
            return False
        pipe = self._process.stdout
        deadline = process_clock.now() + limit_s
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                while b"\n" in self._partial:
                    line, _, self._partial = self._partial.partition(b"\n")
                    message = _parse_message(line)
                    self._problem = str(message.get("problem", self._problem))
                    if key and key in message:
                        return True
                    if key == "started" and self._problem:
                        return False
                if not selector.select(max(0.0, deadline - process_clock.now())):
                    return False
                data = os.read(pipe.fileno(), MAX_LINE_BYTES)
                if not data or len(self._partial) > MAX_LINE_BYTES:
                    self._problem = self._problem or "the process that starts host agents has ended"
                    return False
                self._partial += data


class HelperStarter:
    """Base class of an ``AgentStarter`` that uses a helper process, which runs ``module``."""

    def __init__(self, module: str) -> None:
        self._engine = EngineProcess(module)

    def problem(self) -> str:
        """See ``AgentStarter``."""
        return self._engine.problem()

    def stop_agents(self) -> None:
        """See ``AgentStarter``."""
        self._engine.stop()


def serve(engine: AgentEngine) -> None:
    """Run as a helper process until standard input is closed or SIGTERM arrives, and then end the
    agents.

    Standard output is reserved for messages.
    """
    reported_problem = ""
    buffer = b""
    running = False
    signal.signal(signal.SIGTERM, _on_sigterm)
    out = os.dup(1)
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(out, json.dumps(message).encode() + b"\n")

    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(engine.stop)
        selector.register(0, selectors.EVENT_READ)
        while True:
            if not selector.select(POLL_S):
                if running and (problem := engine.problem()) and problem != reported_problem:
                    reported_problem = problem
                    say({"problem": problem[:4000]})
                continue
            data = os.read(0, MAX_LINE_BYTES)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = _parse_message(line)
                if "start" in request:
                    try:
                        engine.start(request["start"])
                        running = True
                        reported_problem = ""
                        say({"started": True})
                    except (ClusterError, OSError, ValueError, RuntimeError) as error:
                        say({"problem": str(error)[:4000]})
                elif "stop" in request:
                    engine.stop()
                    running = False
                    say({"stopped": True})


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _parse_message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
