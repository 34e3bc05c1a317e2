"""Runs an agent's command: policy, then the slot's CLI worker, then an honest account of what was sent."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.env.cli_frames import frame, read_frame
from realhf.env.fork_server import ForkedProcess
from realhf.env.policy import check_command, refusal_text

TIMED_OUT = "command timed out"
MAX_COMMANDS_PER_WORKER = 500


@dataclass(frozen=True)
class SentRequest:
    """One request that really left for the simulator. ``service`` is botocore's name (``logs``, ``s3``),
    ``operation`` the API's (``CreateBucket``), ``status`` the HTTP status, 0 when no answer came."""

    service: str
    operation: str
    params: dict[str, Any]
    status: int
    error_code: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True)
class CommandResult:
    """What a command did. ``refusal`` is the rule that stopped it, ``None`` when it ran."""

    exit_code: int
    stdout: str
    stderr: str
    refusal: str | None = None
    timed_out: bool = False
    requests: tuple[SentRequest, ...] = ()

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and self.refusal is None and not self.timed_out


class SimulatorLost(RuntimeError):
    """The slot has no usable simulator or worker; the session needs a reset."""


@dataclass(frozen=True)
class OutputLimits:
    """Bytes kept of each stream, seconds a command may take."""

    timeout_s: float = 10.0
    stdout_bytes: int = 16384
    stderr_bytes: int = 4096


@dataclass
class _Worker:
    process: ForkedProcess
    channel: socket.socket
    stream: Any
    commands: int = 0

    def close(self) -> None:
        self.stream.close()
        self.channel.close()
        self.process.kill()


@dataclass
class ExecutorCounters:
    """For /metrics. ``refusals`` by rule."""

    commands: int = 0
    seconds: float = 0.0
    timeouts: int = 0
    worker_starts: int = 0
    worker_kills: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


class CliExecutor:
    """The agent's shell of one slot. ``run`` blocks and serves one command at a time.

    ``spawn()`` forks a fresh worker whose connection leads to the slot's simulator; ``simulator_healthy()`` is
    asked when a worker or its connection was lost."""

    def __init__(
        self,
        spawn: Callable[[], tuple[ForkedProcess, socket.socket]],
        simulator_healthy: Callable[[], bool],
        limits: OutputLimits,
    ) -> None:
        self._spawn = spawn
        self._simulator_healthy = simulator_healthy
        self._limits = limits
        self._worker: _Worker | None = None
        self.counters = ExecutorCounters()

    def start(self) -> None:
        """Have a living worker ready."""
        if self._worker is not None and not self._worker.process.alive():
            self.stop()
        if self._worker is None:
            process, channel = self._spawn()
            self._worker = _Worker(process, channel, channel.makefile("rb"))
            self.counters.worker_starts += 1

    @property
    def worker_pid(self) -> int:
        """-1 when no worker is there."""
        worker = self._worker
        return -1 if worker is None else worker.process.pid

    def responsive(self, timeout_s: float) -> bool:
        """True when the worker answers an empty frame in time."""
        worker = self._worker
        if worker is None:
            return False
        try:
            worker.channel.sendall(frame({}))
            return bool(select.select([worker.channel], [], [], timeout_s)[0]) and read_frame(worker.stream) == {}
        except OSError:
            return False

    def run(self, command: str) -> CommandResult:
        """Execute ``aws ...``. A refused or failing command is a result; raises SimulatorLost otherwise."""
        self.counters.commands += 1
        verdict = check_command(command)
        if verdict.rule is not None:
            return self._refused(verdict.rule, verdict.message)
        if verdict.answer is not None:
            return CommandResult(exit_code=0, stdout=verdict.answer, stderr="")
        started = time.perf_counter()
        try:
            return self._execute(verdict.argv)
        finally:
            self.counters.seconds += time.perf_counter() - started

    def restart(self) -> None:
        """Replace the worker by a fresh one."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Kill the worker. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _refused(self, rule: str, message: str) -> CommandResult:
        self.counters.refusals[rule] = self.counters.refusals.get(rule, 0) + 1
        return CommandResult(exit_code=252, stdout="", stderr=message, refusal=rule)

    def _execute(self, argv: tuple[str, ...]) -> CommandResult:
        self.start()
        worker = self._worker
        assert worker is not None
        reply = self._exchange(worker, argv)
        worker.commands += 1
        if reply is None or reply["last"] or worker.commands >= MAX_COMMANDS_PER_WORKER:
            self.stop()
            if not self._simulator_healthy():
                raise SimulatorLost("simulator lost")
        if reply is None:
            self.counters.worker_kills += 1
            return CommandResult(exit_code=255, stdout="", stderr="command stopped: it used too much")
        if reply.get("timed_out"):
            self.counters.timeouts += 1
            self.counters.worker_kills += 1
            return CommandResult(exit_code=124, stdout="", stderr=TIMED_OUT, timed_out=True)
        return self._result(reply)

    def _exchange(self, worker: _Worker, argv: tuple[str, ...]) -> dict[str, Any] | None:
        """The worker's reply; None when it died over the command."""
        limits = self._limits
        message = {"argv": argv, "stdout_cap": limits.stdout_bytes, "stderr_cap": limits.stderr_bytes}
        try:
            worker.channel.sendall(frame(message))
            if not select.select([worker.channel], [], [], limits.timeout_s)[0]:
                return {"timed_out": True, "last": True}
            return read_frame(worker.stream)
        except (OSError, json.JSONDecodeError):
            return None

    def _result(self, reply: Mapping[str, Any]) -> CommandResult:
        if reply["refusal"] is not None:
            rule, text = reply["refusal"]
            return self._refused(rule, refusal_text(rule, text))
        return CommandResult(
            exit_code=reply["exit_code"],
            stdout=reply["stdout"],
            stderr=reply["stderr"],
            requests=tuple(SentRequest(**entry) for entry in reply["requests"]),
        )
