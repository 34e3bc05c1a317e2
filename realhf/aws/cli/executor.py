"""Execution of an agent's command: check it against the policy, run it in the slot's CLI worker,
and record the requests that it sent.

Worker replies are untrusted, so their size and the type of every field are checked, and they must
arrive in time.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.aws.cli.policy import MAX_COMMAND_BYTES, check_command, refusal_text
from realhf.env.containment.fork_server import ForkedProcess
from realhf.env.containment.frames import (
    BadFrame,
    encode_frame,
    has_unsolicited_data,
    receive_frame,
)


@dataclass(frozen=True)
class SentRequest:
    """One request that was sent to the simulator."""

    service: str
    """botocore's name of the service (``logs``, ``s3``)."""
    operation: str
    """Name of the API operation (``CreateBucket``)."""
    params: dict[str, Any]
    """Parameters of the operation."""
    status: int
    """HTTP status; 0 if no answer came."""
    error_code: str
    """AWS error code; "" if there was no error."""

    @property
    def ok(self) -> bool:
        """Whether the simulator accepted the request with a 2xx status."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    exit_code: int
    """Exit status of the AWS CLI; 252 for a refused command, 124 after a timeout."""
    stdout: str
    """Standard output, cut to the limit."""
    stderr: str
    """Standard error, cut to the limit."""
    refusal: str | None = None
    """Policy rule that refused the command; None if it was not refused."""
    timed_out: bool = False
    """Whether the command exceeded its time limit."""
    requests: tuple[SentRequest, ...] = ()
    """Requests that the command sent."""
    stopped: bool = False
    """Whether the worker was lost while the command ran, so that the command's effects are
    unknown."""
    truncated: bool = False
    """Whether the standard output was cut."""

    @property
    def success(self) -> bool:
        """Whether the command ran, ended in time and exited with 0."""
        return self.exit_code == 0 and self.refusal is None and not self.timed_out

    @property
    def lost(self) -> bool:
        """Whether the command's effects are unknown, because the worker was lost or the command
        timed out: any request may have been sent."""
        return self.stopped or self.timed_out


@dataclass(frozen=True)
class OutputLimits:
    """Limits of one command: time, output and length."""

    timeout_s: float = 10.0
    """Maximum duration, in seconds."""
    stdout_bytes: int = 16384
    """Maximum bytes kept of standard output."""
    stderr_bytes: int = 4096
    """Maximum bytes kept of standard error."""
    command_bytes: int = MAX_COMMAND_BYTES
    """Maximum length of the command line, in bytes."""


_MAX_REQUESTS = 10_000
"""Maximum number of requests in a reply."""
_NOTE_CHARS = 64
"""Maximum length of the note that a stream was cut. The note comes on top of the kept bytes."""
_FIELDS: Mapping[str, type] = {
    "exit_code": int,
    "stdout": str,
    "stderr": str,
    "requests": list,
    "last": bool,
    "truncated": bool,
}
_REQUEST_FIELDS: Mapping[str, type] = {
    "service": str,
    "operation": str,
    "params": dict,
    "status": int,
    "error_code": str,
}


@dataclass(frozen=True)
class WorkerReply:
    """A validated reply of a worker."""

    result: CommandResult
    """Result of the command."""
    refusal: tuple[str, str] | None
    """(rule, message) if the worker refused the command, otherwise None."""
    last: bool
    """Whether the worker ends after this reply."""


def parse_reply(data: Any, limits: OutputLimits) -> WorkerReply:
    """Validate a worker's reply and return it. Raises BadFrame if it is malformed or exceeds
    ``limits``."""
    if not isinstance(data, dict):
        raise BadFrame("not an object")
    _check_types(data, _FIELDS)
    for stream, limit in (("stdout", limits.stdout_bytes), ("stderr", limits.stderr_bytes)):
        if len(data[stream]) > limit + _NOTE_CHARS:
            raise BadFrame(f"more {stream} than was asked for")
    refusal = data.get("refusal")
    if refusal is not None:
        if not isinstance(refusal, list) or [type(part) for part in refusal] != [str, str]:
            raise BadFrame("a malformed refusal")
        refusal = (refusal[0], refusal[1])
    if len(data["requests"]) > _MAX_REQUESTS:
        raise BadFrame("more requests than a command can send")
    result = CommandResult(
        data["exit_code"],
        data["stdout"],
        data["stderr"],
        truncated=data["truncated"],
        requests=tuple(_parse_request(entry) for entry in data["requests"]),
    )
    return WorkerReply(result, refusal, data["last"])


def _parse_request(entry: Any) -> SentRequest:
    if not isinstance(entry, dict) or set(entry) != set(_REQUEST_FIELDS):
        raise BadFrame("a malformed request")
    _check_types(entry, _REQUEST_FIELDS)
    return SentRequest(**entry)


def _check_types(data: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if type(data.get(name)) is not kind:
            raise BadFrame(f"{name} is not of type {kind.__name__}")


TIMED_OUT = "command timed out"
STOPPED = "command stopped: it used too much"
MAX_COMMANDS_PER_WORKER = 500
"""Number of commands after which a worker is replaced."""


class SimulatorLost(RuntimeError):
    """The slot has no working simulator or worker; a reset of the session is needed.
    ``by_command``: whether the command broke it."""

    def __init__(self, message: str, *, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command


@dataclass
class _Worker:
    """A running worker process."""

    process: ForkedProcess
    """The forked process."""
    channel: socket.socket
    """Socket of requests and replies."""
    commands: int = 0
    """Number of commands that it has run."""

    def close(self) -> None:
        """Kill the worker and close its channel."""
        self.channel.close()
        self.process.kill()


@dataclass
class ExecutorCounters:
    """Counters for /metrics."""

    commands: int = 0
    """Commands so far."""
    seconds: float = 0.0
    """Seconds spent in commands."""
    timeouts: int = 0
    """Commands that timed out."""
    worker_starts: int = 0
    """Workers started."""
    worker_kills: int = 0
    """Workers killed because their reply was invalid or late, or the connection was lost."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Number of refused commands for each rule."""


class CliExecutor:
    """Executor of agent commands for one slot. ``run`` blocks; not thread-safe.

    ``spawn()`` forks a new worker that is connected to the slot's simulator, and returns its
    process and channel. ``simulator_runs()`` is checked before each command,
    ``simulator_healthy()`` after a worker or its connection was lost.
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
        """Start a worker if none is alive."""
        if self._worker is not None and not self._worker.process.alive():
            self.stop()
        if self._worker is None:
            process, channel = self._spawn()
            self._worker = _Worker(process, channel)
            self.counters.worker_starts += 1

    @property
    def worker_pid(self) -> int:
        """Pid of the worker; -1 if there is none."""
        worker = self._worker
        return -1 if worker is None else worker.process.pid

    def responsive(self, timeout_s: float) -> bool:
        """Return whether the worker answers a liveness check within ``timeout_s`` seconds."""
        worker = self._worker
        if worker is None:
            return False
        try:
            worker.channel.sendall(encode_frame({}))
            return receive_frame(worker.channel, timeout_s) == {}
        except (OSError, BadFrame):
            return False

    def run(self, command: str) -> CommandResult:
        """Execute an ``aws ...`` command. A command that is refused or fails still has a result.
        Raises SimulatorLost if the simulator or the worker is lost."""
        self.counters.commands += 1
        verdict = check_command(command, self._limits.command_bytes)
        if verdict.rule is not None:
            return self._refuse(verdict.rule, verdict.message)
        if verdict.answer is not None:
            return CommandResult(exit_code=0, stdout=verdict.answer, stderr="")
        started = time.perf_counter()
        try:
            return self._execute((*verdict.argv, *verdict.own.words))
        finally:
            self.counters.seconds += time.perf_counter() - started

    def stop(self) -> None:
        """Kill the worker. Idempotent."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            worker.close()

    def _refuse(
        self, rule: str, message: str, requests: tuple[SentRequest, ...] = ()
    ) -> CommandResult:
        """Count a refusal and return it as the command's result. ``requests``: those that the
        command sent before one of them was refused."""
        self.counters.refusals[rule] += 1
        return CommandResult(
            exit_code=252, stdout="", stderr=message, refusal=rule, requests=requests
        )

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
            reply = None
            timed_out = True
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
            return self._refuse(rule, refusal_text(rule, text), reply.result.requests)
        return reply.result

    def _exchange(self, worker: _Worker, argv: tuple[str, ...]) -> WorkerReply:
        """Let the worker run a command and return its reply. Raises TimeoutError if the reply is
        late, OSError if the worker is lost, and BadFrame if the reply is invalid."""
        limits = self._limits
        if has_unsolicited_data(worker.channel):  # it would be read as the reply to this command
            raise BadFrame("an unsolicited frame")
        message = {
            "argv": argv,
            "stdout_cap": limits.stdout_bytes,
            "stderr_cap": limits.stderr_bytes,
        }
        worker.channel.settimeout(limits.timeout_s)
        worker.channel.sendall(encode_frame(message))
        return parse_reply(receive_frame(worker.channel, limits.timeout_s), limits)
