"""Keeps a helper process that starts host agents, and talks with it in lines of JSON.

The helper (``serve``) is told ``{"start": ...}`` and ``{"stop": true}``. It answers ``{"started": true}``,
``{"problem": TEXT}`` at any time, and ``{"stopped": true}``. It ends when its standard input does, thus with the
scheduler or the launcher.
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
"""How long a helper may take to end its agents."""
END_S = 5.0
"""How long a helper without agents may take to end itself."""
LOOK_S = 2.0
"""How often a helper looks whether its agents run."""
MOST_LINE_BYTES = 1 << 16


class Engine(Protocol):
    """Starts agents in a helper process."""

    def start(self, plan: Mapping[str, Any]) -> None:
        """Begin to run agents. Raises ClusterError that says why it cannot."""
        ...

    def problem(self) -> str:
        """Return why an agent has ended or cannot start; "" if none has."""
        ...

    def stop(self) -> None:
        """End all agents."""
        ...


class EngineProcess:
    """Is the launcher's end. The helper lives from ``start`` to ``stop``. Whoever ends what the launcher has started
    leaves it alone, see ``LocalScheduler.beside``."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._problem = ""
        self._starting = False

    def start(self, plan: Mapping[str, Any], limit_s: float, what: str) -> None:
        """Start agents, and wait until they are on their way. Raises ClusterError with the reason, also when ``what``
        did not come about within ``limit_s``."""
        self._problem = ""
        if self._process is None:
            self._begin()
        self._starting = True
        self._say({"start": plan})
        self._starting = not self._heard("started", limit_s) and not self._problem
        if self._starting:
            self._problem = f"{what} did not come about within {limit_s:g} s"
        if self._problem:
            raise ClusterError(self._problem)

    def problem(self) -> str:
        """Return what the helper has reported last, or how it ended; "" if all is well."""
        self._heard("", 0.0)
        return self._problem

    def stop(self) -> None:
        """End the agents, and the helper. Kills one that does not answer."""
        if (process := self._process) is None:
            return
        if self._starting and process.poll() is None:
            process.terminate()  # it listens when it has started the agents; now it ends what there is of them
        elif process.poll() is None:
            self._say({"stop": True})
            self._heard("stopped", STOP_S)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(STOP_S if self._starting else END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._process, self._starting = None, False

    def _begin(self) -> None:
        # It is told by the kernel when the launcher has ended, also while it starts agents and does not listen.
        command = [sys.executable, "-m", "realhf.scheduler.child", str(os.getpid()), "0", self._module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._partial = b""

    def _say(self, message: Mapping[str, Any]) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._problem = "the process that starts host agents has ended"

    def _heard(self, key: str, limit_s: float) -> bool:
        """Read what the helper says until it says ``key`` or a problem; return whether it said ``key``."""
        if self._process is None:
            return False
        pipe, deadline = self._process.stdout, process_clock.now() + limit_s
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                while b"\n" in self._partial:
                    line, _, self._partial = self._partial.partition(b"\n")
                    said = _message(line)
                    self._problem = str(said.get("problem", self._problem))
                    if key and key in said:
                        return True
                    if key == "started" and self._problem:
                        return False
                if not selector.select(max(0.0, deadline - process_clock.now())):
                    return False
                data = os.read(pipe.fileno(), MOST_LINE_BYTES)
                if not data or len(self._partial) > MOST_LINE_BYTES:
                    self._problem = self._problem or "the process that starts host agents has ended"
                    return False
                self._partial += data


class HelperStarter:
    """Has what the ``AgentStarter``s of all engines share, whose helper process runs ``module``."""

    def __init__(self, module: str) -> None:
        self._engine = EngineProcess(module)

    def problem(self) -> str:
        """See ``AgentStarter``."""
        return self._engine.problem()

    def stop_agents(self) -> None:
        """See ``AgentStarter``."""
        self._engine.stop()


def serve(engine: Engine) -> None:
    """Run a helper process until its standard input ends or SIGTERM arrives; agents end with it. Nothing else may
    write to its standard output."""
    told, buffer, running = "", b"", False
    signal.signal(signal.SIGTERM, _stop)
    out = os.dup(1)
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(out, json.dumps(message).encode() + b"\n")

    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(engine.stop)
        selector.register(0, selectors.EVENT_READ)
        while True:
            if not selector.select(LOOK_S):
                if running and (problem := engine.problem()) and problem != told:
                    told = problem
                    say({"problem": problem[:4000]})
                continue
            data = os.read(0, MOST_LINE_BYTES)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                asked = _message(line)
                if "start" in asked:
                    try:
                        engine.start(asked["start"])
                        running, told = True, ""
                        say({"started": True})
                    except (ClusterError, OSError, ValueError, RuntimeError) as error:
                        say({"problem": str(error)[:4000]})
                elif "stop" in asked:
                    engine.stop()
                    running = False
                    say({"stopped": True})


def _stop(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
