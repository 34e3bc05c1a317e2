"""Runs an agent's command: policy, then the slot's CLI worker, then an honest account of what was sent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from realhf.aws.cli.command_result import CommandResult, OutputLimits, SentRequest
from realhf.aws.cli.policy import check_command, refusal_text
from realhf.aws.cli.worker_reply import WorkerReply, parse_reply
from realhf.env.containment.fork_server import ForkedProcess
from realhf.env.containment.frames import BadFrame, frame, receive_frame, spoke_unasked

__all__ = ["CliExecutor", "CommandResult", "ExecutorCounters", "OutputLimits", "SentRequest", "SimulatorLost"]

TIMED_OUT = "command timed out"
STOPPED = "command stopped: it used too much"
MAX_COMMANDS_PER_WORKER = 500


class SimulatorLost(RuntimeError):
    """The slot has no usable simulator or worker; the session needs a reset. ``by_command``: it was lost over the
    command, which is whose doing it is."""

    def __init__(self, message: str, *, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command


@dataclass
class _Worker:
    process: ForkedProcess
    channel: socket.socket
    commands: int = 0

    def close(self) -> None:
        """Kill the worker and close its channel."""
        self.channel.close()
        self.process.kill()


@dataclass
class ExecutorCounters:
    """Counts commands for /metrics; ``refusals`` by rule."""

    commands: int = 0
    seconds: float = 0.0
    timeouts: int = 0
    worker_starts: int = 0
    worker_kills: int = 0
    refusals: dict[str, int] = field(default_factory=dict)


class CliExecutor:
    """Is the agent's shell of one slot. ``run`` blocks and serves one command at a time.

    ``spawn()`` forks a fresh worker whose connection leads to the slot's simulator. ``simulator_runs()`` is asked
    before a command, ``simulator_healthy()`` when a worker or its connection was lost.
    """

    def __init__(
        self,
        spawn: Callable[[], tuple[ForkedProcess, socket.socket]],
        simulator_runs: Callable[[], bool],
        simulator_healthy: Callable[[], bool],
        limits: OutputLimits,
    ) -> None:
        self._spawn = spawn
        self._simulator_runs = simulator_runs
        self._simulator_healthy = simulator_healthy
        self._limits = limits
        self._worker: _Worker | None = None
        self.counters = ExecutorCounters()

    def start(self) -> None:
        """Make sure that a living worker is ready."""
        if self._worker is not None and not self._worker.process.alive():
            self.stop()
        if self._worker is None:
            process, channel = self._spawn()
            self._worker = _Worker(process, channel)
            self.counters.worker_starts += 1

    @property
    def worker_pid(self) -> int:
        """Pid of the worker; -1 when there is none."""
        worker = self._worker
        return -1 if worker is None else worker.process.pid

    def responsive(self, timeout_s: float) -> bool:
        """Return whether the worker answers an empty frame in time."""
        worker = self._worker
        if worker is None:
            return False
        try:
            worker.channel.sendall(frame({}))
            return receive_frame(worker.channel, timeout_s) == {}
        except (OSError, BadFrame):
            return False

    def run(self, command: str) -> CommandResult:
        """Execute ``aws ...``. A refused or failing command is a result. Raises SimulatorLost when simulator or worker
        is lost."""
        self.counters.commands += 1
        verdict = check_command(command, self._limits.command_bytes)
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

    def _refused(self, rule: str, message: str, requests: tuple[SentRequest, ...] = ()) -> CommandResult:
        """Count a refusal and return it as a result. ``requests``: what had left before one was refused."""
        self.counters.refusals[rule] = self.counters.refusals.get(rule, 0) + 1
        return CommandResult(exit_code=252, stdout="", stderr=message, refusal=rule, requests=requests)

    def _execute(self, argv: tuple[str, ...]) -> CommandResult:
        if not self._simulator_runs():
            raise SimulatorLost("simulator lost")
        self.start()
        worker = self._worker
        assert worker is not None
        timed_out = False
        try:
            reply = self._exchange(worker, argv)
        except TimeoutError:
            reply, timed_out = None, True
        except (OSError, BadFrame):
            reply = None
        worker.commands += 1
        if reply is None or reply.last or worker.commands >= MAX_COMMANDS_PER_WORKER:
            self.stop()
            if not self._simulator_healthy():
                raise SimulatorLost("simulator lost", by_command=True)
        if reply is None:
            self.counters.worker_kills += 1
            if not timed_out:
                return CommandResult(exit_code=255, stdout="", stderr=STOPPED, stopped=True)
            self.counters.timeouts += 1
            return CommandResult(exit_code=124, stdout="", stderr=TIMED_OUT, timed_out=True)
        if reply.refusal is not None:
            rule, text = reply.refusal
            return self._refused(rule, refusal_text(rule, text), reply.result.requests)
        return reply.result

    def _exchange(self, worker: _Worker, argv: tuple[str, ...]) -> WorkerReply:
        """Return the worker's answer. Raises TimeoutError, OSError or BadFrame when it is late, lost or not to be
        believed."""
        limits = self._limits
        if spoke_unasked(worker.channel):  # or this answer would be taken for the next one's
            raise BadFrame("a frame that nobody asked for")
        message = {"argv": argv, "stdout_cap": limits.stdout_bytes, "stderr_cap": limits.stderr_bytes}
        worker.channel.settimeout(limits.timeout_s)
        worker.channel.sendall(frame(message))
        return parse_reply(receive_frame(worker.channel, limits.timeout_s), limits)
