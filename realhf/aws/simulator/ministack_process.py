"""One simulator: a forked, contained MiniStack with a loopback port and a private channel to its
owner.

The owner sends one end of a socket pair through a channel that only the two processes have, with a
mark of the connection's purpose. No port, path or secret that an agent could name gives access to
it: requests through the port are always the agent's. Control, set-up, grading and health checks use
the private connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from realhf.aws.cli.pinned_http import read_answer
from realhf.base import process_clock
from realhf.base.installation import IMPORT_ROOT
from realhf.env.containment.fork_server import ForkedProcess, ForkServer

OWNER = b"o"
"""Mark of a connection for the environment's calls and control paths."""
ENVIRONMENT = b"e"
"""Mark of a connection for a worker that runs command lines of tasks: AWS operations only, as on
the port."""


class OwnerChannel:
    """The owner's end of the private channel. ``theirs`` is passed to the simulator at its fork and
    then closed here."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)  # a simulator that hangs must not block its owner

    def connect(self, mark: bytes) -> socket.socket:
        """Return a new connection with one of the marks. Requests wait until the simulator serves.

        Raises OSError if the simulator is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._ours, [mark], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Close the channel. Idempotent. Existing connections stay open."""
        self._ours.close()
        self.theirs.close()


def serve_owner(
    loop: asyncio.AbstractEventLoop,
    channel: socket.socket,
    protocols: Mapping[bytes, Callable[[], asyncio.Protocol]],
) -> None:
    """Serve every connection that arrives on ``channel`` with the protocol of its mark, on a
    running loop.

    This is the simulator's end of ``OwnerChannel``.
    """
    tasks: set[asyncio.Task[object]] = set()

    def accept() -> None:
        try:
            mark, fds, _, _ = socket.recv_fds(channel, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        if not mark:
            loop.remove_reader(channel)
        for fd in fds:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
            task = loop.create_task(_serve(loop, connection, protocols[mark]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    channel.setblocking(False)
    loop.add_reader(channel, accept)


async def _serve(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        await loop.connect_accepted_socket(make_protocol, connection)


HOST = "127.0.0.1"
"""Address of the simulators' ports."""
ANSWER_S = 10.0
"""Seconds without an answer after which a simulator counts as hung. A busy machine may stall for
some."""
SIMULATOR_MEMORY_MB = 512
"""Default memory limit of a simulator in MiB."""
SIMULATOR_CPU_S = 60
"""CPU limit of a simulator process in seconds; an episode takes less than one."""
_GROWN_BYTES = 64 << 20
"""Growth since its start after which a simulator is replaced instead of reset."""
_WORN_S = SIMULATOR_CPU_S / 3
"""CPU time after which a simulator is replaced instead of reset."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds per tick of the CPU times in /proc."""
_CPU_CLOCK = 2
"""Lower bits of the clock id of a process's CPU time; the pid is above them (as clock_getcpuclockid
of the C library computes it)."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
"""Bytes per page of the memory sizes in /proc."""
_BACKLOG = 64
"""Connections that may wait to be accepted."""
_LOG_TAIL_BYTES = 2000
"""Bytes of a log that error messages show."""
_EXCERPT_BYTES = 300
"""Bytes of an answer or a log line that error messages show."""
logger = logging.getLogger(__name__)
_CREDENTIAL = (
    "AWS4-HMAC-SHA256 Credential=000000000000/20260101/us-east-1/{}/aws4_request, "
    "SignedHeaders=host, Signature=0"
)
"""Authorization header for a service; MiniStack does not check signatures."""


BARE_ENVIRONMENT = {
    "PATH": "/nonexistent",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(IMPORT_ROOT),
}
"""Base of the environment variables of every contained process: none are inherited."""


def zygote_environment(folder: Path) -> dict[str, str]:
    """Return the complete environment variables of the simulators' zygote."""
    return BARE_ENVIRONMENT | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "GATEWAY_PORT": "4566",
        "MINISTACK_HOST": "localhost",
        "MINISTACK_REGION": "us-east-1",
        "LOG_LEVEL": "ERROR",
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "MINISTACK_WORKER_THREADS": "4",
        "PERSIST_STATE": "0",
        "S3_PERSIST": "0",
        "DOCKER_HOST": "tcp://127.0.0.1:1",
        "STATE_DIR": str(folder / "state"),
    }


def tail(log: IO[bytes]) -> str:
    """Return the end of a log file."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES)).decode(
        "utf-8", "replace"
    )


def start_failure(name: str, reason: object, log: str) -> str:
    """Return the error message for a process that did not start: one line with its last log line,
    then the log."""
    text = log.strip()
    last = f"; its last words: {text.splitlines()[-1].strip()}\n{text}" if text else ""
    return f"{name} did not come up: {reason}{last}"


def _send_request(
    connection: socket.socket,
    method: str,
    path: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send a request over a connection of the owner; return status and body. Raises OSError,
    ValueError."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost:4566",
        f"Content-Length: {len(body or b'')}",
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    connection.settimeout(timeout_s)
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii") + (body or b""))
    status, _, content = read_answer(connection, method)
    return status, content


class MiniStackProcess:
    """Starts, checks, resets and ends one simulator.

    ``port`` 0 lets the kernel choose; if the port is taken at a later start, the simulator gets
    another one. ``folder`` is the stem of its folders: the process makes a new one at every start.
    ``broker`` runs Lambda code; without it no code runs.
    """

    def __init__(
        self, port: int, zygote: ForkServer, folder: Path, broker: ForkServer | None = None
    ) -> None:
        self.port = port
        self._zygote = zygote
        self._broker = broker
        self._runner: ForkedProcess | None = None
        self._stem = folder
        self._starts = 0
        self._unended: list[ForkedProcess] = []
        self._fresh_bytes = 0
        self._listener: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._process: ForkedProcess | None = None
        self._owner: OwnerChannel | None = None
        self._control: socket.socket | None = None

    def bind(self) -> None:
        """Bind the port. Raises OSError naming the port if another process has it."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, self.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(
                error.errno, f"port {self.port} for MiniStack is taken: {error.strerror}"
            ) from error
        self.port = listener.getsockname()[1]
        self._listener = listener

    def _bind_again(self) -> None:
        """Bind the port for a restart; choose another one if it is taken."""
        try:
            self.bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken = self.port
            self.port = 0
            self.bind()
            logger.warning(
                "port %d is taken meanwhile; this simulator has port %d from now on",
                taken,
                self.port,
            )

    def start(self) -> None:
        """Fork the simulator, which takes over the bound port.

        Raises OSError or RuntimeError; call ``stop`` after a failure.
        """
        if self._listener is None:
            self._bind_again()
        assert self._listener is not None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._owner = OwnerChannel()
        fds = [self._listener.fileno(), self._log.fileno(), self._owner.theirs.fileno()]
        channel = self._start_lambda_runner()
        if channel is not None:
            fds.append(channel.fileno())
        before = self._folder()
        self._starts = self._starts + 1
        self._fresh_bytes = 0
        request = {"folder": self._folder(), "before": before}
        try:
            self._process = self._zygote.fork(request, fds, f"MiniStack on port {self.port}")
        finally:
            self._owner.theirs.close()
            if channel is not None:
                channel.close()
        self._listener.close()
        self._listener = None

    def _folder(self) -> str:
        """Return the folder of the present start."""
        return f"{self._stem}-{self._starts}"

    def _start_lambda_runner(self) -> socket.socket | None:
        """Fork a Lambda runner and return the channel to it, None without a broker."""
        if self._broker is None:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._runner = self._broker.fork(
                    {}, [theirs.fileno()], f"Lambda runner of port {self.port}"
                )
            except BaseException:
                ours.close()
                raise
        return ours

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until /_ministack/health answers 200. Raises RuntimeError with the end of the
        log."""
        deadline = process_clock.now() + timeout_s
        while True:
            try:
                self._request(
                    "GET", "/_ministack/health", max(0.05, deadline - process_clock.now())
                )
                # only after the start: it grows later
                self._fresh_bytes = self._fresh_bytes or self.usage()[0]
                return
            except OSError as error:
                reason = str(error)
            alive = self.alive()
            if not alive or process_clock.now() > deadline:
                reason = f"{reason}, for {timeout_s:g} s" if alive else "its process ended"
                raise RuntimeError(
                    start_failure(f"MiniStack on port {self.port}", reason, self.log_tail())
                )
            time.sleep(0.01)

    def healthy(self, timeout_s: float = ANSWER_S) -> bool:
        """Return whether the simulator answers now."""
        if self.is_stopped():
            return False
        try:
            self._request("GET", "/_ministack/health", timeout_s)
        except OSError:
            return False
        return True

    def answers(self, timeout_s: float) -> bool:
        """Return whether the simulator answers, for a thread that does not own the slot.

        It uses a connection of its own, because the owner may be using the control connection.
        """
        try:
            with self.connect_as_owner() as connection:
                return _send_request(connection, "GET", "/_ministack/health", timeout_s)[0] == 200
        except (OSError, ValueError):
            return False

    def leftovers(self, timeout_s: float = ANSWER_S) -> str:
        """Return the bucket and table names that remain after a reset, "" for none. Raises
        OSError."""
        buckets = self.ask("GET", "/", "s3", timeout_s)
        target = {
            "X-Amz-Target": "DynamoDB_20120810.ListTables",
            "Content-Type": "application/x-amz-json-1.0",
        }
        tables = self.ask("POST", "/", "dynamodb", timeout_s, target, b"{}")
        names = re.findall(rb"<Bucket>.*?<Name>(.*?)</Name>", buckets, re.DOTALL)
        names += [name.encode() for name in json.loads(tables)["TableNames"]]
        return b", ".join(names).decode()

    def ask(
        self,
        method: str,
        path: str,
        service: str,
        timeout_s: float = ANSWER_S,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> bytes:
        """Send a request signed for ``service`` and return the body of the answer.

        Raises OSError, also for a status other than 2xx.
        """
        return self._request(
            method,
            path,
            timeout_s,
            {"Authorization": _CREDENTIAL.format(service), **(headers or {})},
            body,
        )

    def reset(self, seed: int, timeout_s: float = ANSWER_S) -> None:
        """Empty the simulator and seed its random numbers. Raises OSError."""
        self._request("POST", f"/_realhf/reset?{seed}", timeout_s)

    def usage(self) -> tuple[int, float]:
        """Return the resident memory in bytes and the CPU time in seconds. Raises OSError."""
        with open(f"/proc/{self.pid}/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()
        return int(fields[21]) * _PAGE_BYTES, (int(fields[11]) + int(fields[12])) * _TICK_S

    def cpu_time_s(self) -> float:
        """Return the CPU time in seconds with nanosecond resolution; -1.0 if the process is gone.

        While the value does not change, the process does not run.
        """
        try:
            return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)
        except OSError:
            return -1.0

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
        return self._process is not None and self._process.stopped()

    def is_worn_out(self) -> bool:
        """Return whether the simulator has grown or used much of its CPU budget, which a reset does
        not undo.

        Raises OSError.
        """
        resident, seconds = self.usage()
        return resident > self._fresh_bytes + _GROWN_BYTES or seconds > _WORN_S

    def requests(self, after: int = 0, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the requests that the simulator parsed since its start. Raises OSError.

        The keys are ``count``, ``refused`` (by reason) and ``requests``, the latest ones with a
        number above ``after`` (see ``ParsedRequests``).
        """
        return json.loads(self._request("GET", f"/_realhf/requests?{after}", timeout_s))

    def switches(self) -> dict[str, str]:
        """Return the settings in the simulator's modules, as text by name. Raises OSError."""
        return json.loads(self._request("GET", "/_realhf/switches", ANSWER_S))

    def account_state(self) -> list[str]:
        """Return the records of the whole account, see ``account_state.AccountState.report``.

        Raises OSError, also if the account is too large.
        """
        return self._request("GET", "/_realhf/snapshot", ANSWER_S).decode().splitlines()

    def connect_as_owner(self) -> socket.socket:
        """Return a new connection with access to the control paths. Raises OSError.

        Never pass it to a process that reads text of an agent.
        """
        return self._connect(OWNER)

    def connect_as_environment(self) -> socket.socket:
        """Return a new connection for the worker that runs command lines of tasks. Raises
        OSError."""
        return self._connect(ENVIRONMENT)

    def _connect(self, mark: bytes) -> socket.socket:
        """Return a new private connection with a mark. Raises OSError."""
        if self._owner is None:
            raise ConnectionRefusedError(f"MiniStack on port {self.port} was not started")
        return self._owner.connect(mark)

    def connect(self, timeout_s: float = ANSWER_S) -> socket.socket:
        """Return a new connection to the simulator's port, as the agent uses it."""
        connection = socket.create_connection((HOST, self.port), timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.alive()

    @property
    def pid(self) -> int:
        """Pid of the process, -1 before ``start``."""
        return self._process.pid if self._process else -1

    def log_tail(self) -> str:
        """Return the end of the simulator's log, "" before ``start``."""
        return "" if self._log is None else tail(self._log)

    def last_words(self) -> str:
        """Return the last line of the log, quoted because an agent may have written it.

        "no word in its log" if it is empty.
        """
        lines = self.log_tail().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return repr(last[:_EXCERPT_BYTES]) if last else "no word in its log"

    def stop(self) -> None:
        """Kill the simulator and free the port. Idempotent.

        A process that does not end is logged, and killed again by the next ``stop``.
        """
        self._close_control()
        ending = [
            process
            for process in (self._process, self._runner, *self._unended)
            if process is not None
        ]
        self._process = self._runner = None
        self._unended = []
        for process in ending:
            try:
                process.kill()
            except TimeoutError as error:
                logger.error("a process is left: %s", error)
                self._unended.append(process)
        for resource in (self._owner, self._listener, self._log):
            if resource is not None:
                resource.close()
        self._owner = self._listener = self._log = None

    def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> bytes:
        """Send a request over the control connection; return the body. Raises OSError, also for
        other than 2xx."""
        try:
            if self._control is None:
                self._control = self.connect_as_owner()
            status, body = _send_request(self._control, method, path, timeout_s, headers, data)
        except (OSError, ValueError) as error:
            self._close_control()
            raise OSError(f"{method} {path} on port {self.port}: {error}") from error
        if not 200 <= status < 300:
            excerpt = body[:_EXCERPT_BYTES].decode("utf-8", "replace")
            raise OSError(f"{method} {path} on port {self.port}: status {status} {excerpt!r}")
        return body

    def _close_control(self) -> None:
        """Close the control connection; the next request opens a new one."""
        if self._control is not None:
            self._control.close()
            self._control = None
