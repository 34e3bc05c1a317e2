"""Runs an agent's command: policy, then the slot's CLI worker, then an honest account of what was sent.

Nothing of a reply is believed before its size, its time and the type of every field are checked.
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
from realhf.env.containment.frames import BadFrame, frame, receive_frame, spoke_unasked


@dataclass(frozen=True)
class SentRequest:
    """One request that really left for the simulator. ``service`` is botocore's name (``logs``, ``s3``), ``operation``
    the API's (``CreateBucket``), ``status`` the HTTP status, 0 when no answer came."""

    service: str
    operation: str
    params: dict[str, Any]
    status: int
    error_code: str

    @property
    def ok(self) -> bool:
        """Whether the simulator accepted the request with a 2xx answer."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class CommandResult:
    """What a command did. ``refusal`` is the rule that stopped it, None when it ran; ``stopped``: its worker was lost
    over it, so that nothing is known of what it did; ``truncated``: its output is not all here."""

    exit_code: int
    stdout: str
    stderr: str
    refusal: str | None = None
    timed_out: bool = False
    requests: tuple[SentRequest, ...] = ()
    stopped: bool = False
    truncated: bool = False

    @property
    def success(self) -> bool:
        """Whether the command ran, ended in time and exited with 0."""
        return self.exit_code == 0 and self.refusal is None and not self.timed_out

    @property
    def lost(self) -> bool:
        """Whether nothing is known of what the command did: it may have sent anything."""
        return self.stopped or self.timed_out


@dataclass(frozen=True)
class OutputLimits:
    """Limits a command: seconds it may take, bytes kept of each stream, bytes of the command line itself."""

    timeout_s: float = 10.0
    stdout_bytes: int = 16384
    stderr_bytes: int = 4096
    command_bytes: int = MAX_COMMAND_BYTES


_MAX_REQUESTS = 10_000
_NOTE_CHARS = 64
"""Longest remark that a stream was cut; it comes on top of what is kept."""
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
    """Holds a checked reply. ``refusal``: rule and text; ``last``: the worker ends by itself now."""

    result: CommandResult
    refusal: tuple[str, str] | None
    last: bool


def parse_reply(data: Any, limits: OutputLimits) -> WorkerReply:
    """Check a reply. Raises BadFrame for anything but a well-formed answer to a command that ran under ``limits``."""
    if not isinstance(data, dict):
        raise BadFrame("not an object")
    _check_types(data, _FIELDS)
    for stream, most in (("stdout", limits.stdout_bytes), ("stderr", limits.stderr_bytes)):
        if len(data[stream]) > most + _NOTE_CHARS:
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
        requests=tuple(_sent(entry) for entry in data["requests"]),
    )
    return WorkerReply(result, refusal, data["last"])


def _sent(entry: Any) -> SentRequest:
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
    refusals: Counter[str] = field(default_factory=Counter)


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
            return self._execute((*verdict.argv, *verdict.own.words))
        finally:
            self.counters.seconds += time.perf_counter() - started

    def stop(self) -> None:
        """Kill the worker. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _refused(self, rule: str, message: str, requests: tuple[SentRequest, ...] = ()) -> CommandResult:
        """Count a refusal and return it as a result. ``requests``: what had left before one was refused."""
        self.counters.refusals[rule] += 1
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
