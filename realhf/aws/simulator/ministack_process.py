"""One simulator: a forked, contained MiniStack process with a loopback port and a private channel
to its owner.

For each private connection, the owner sends one end of a socket pair through a channel that only
the two processes have, with a mark that tells the connection's purpose. An agent can name no port,
path or secret that gives access to these connections, so requests through the port are always the
agent's. Control, set-up, grading and health checks use private connections.
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
"""Mark of a connection for the environment's own API calls and the control paths."""
ENVIRONMENT = b"e"
"""Mark of a connection for the worker that runs the command lines of tasks. Like the port, it
serves AWS operations only."""


class OwnerChannel:
    """The owner's end of the private channel. ``theirs`` is the simulator's end, which is passed to
    it when it is forked and is then closed here."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)  # a simulator that hangs must not block its owner

    def connect(self, mark: bytes) -> socket.socket:
        """Return a new private connection with one of the marks. Requests on it wait until the
        simulator serves.

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
        """Close the channel; existing connections stay open. Idempotent."""
        self._ours.close()
        self.theirs.close()


def serve_owner(
    loop: asyncio.AbstractEventLoop,
    channel: socket.socket,
    protocols: Mapping[bytes, Callable[[], asyncio.Protocol]],
) -> None:
    """Serve every connection that arrives on ``channel`` on a running loop, with the protocol that
    belongs to its mark.

    This is the simulator's side of ``OwnerChannel``.
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
    with contextlib.suppress(OSError):  # the connection may be closed already
        await loop.connect_accepted_socket(make_protocol, connection)


HOST = "127.0.0.1"
"""Loopback address on which the simulators listen."""
ANSWER_S = 10.0
"""Seconds without an answer after which a simulator counts as hung. A busy machine may take several
seconds."""
SIMULATOR_MEMORY_MB = 512
"""Default memory limit of a simulator in MiB."""
SIMULATOR_CPU_S = 60
"""CPU limit of a simulator process, in seconds. An episode takes less than one second."""
_GROWN_BYTES = 64 << 20
"""Memory growth since the start above which a simulator is replaced instead of reset."""
_WORN_S = SIMULATOR_CPU_S / 3
"""CPU time above which a simulator is replaced instead of reset."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds per tick, the unit of CPU times in /proc."""
_CPU_CLOCK = 2
"""Lower bits of the id of the clock that measures a process's CPU time. The inverted pid is above
them, as in the C library's clock_getcpuclockid."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
"""Bytes per page, the unit of memory sizes in /proc."""
_BACKLOG = 64
"""Number of connections that may wait to be accepted."""
_LOG_TAIL_BYTES = 2000
"""Number of bytes of a log that error messages show."""
_EXCERPT_BYTES = 300
"""Number of bytes of an answer or a log line that error messages show."""
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
"""Environment variables that every contained process has; none are inherited."""


def zygote_environment(folder: Path) -> dict[str, str]:
    """Return all environment variables of the simulators' zygote. ``folder``: the folder of the
    simulators' files."""
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
    """Return the error message for a process that did not start: one line with the log's last line,
    then the log."""
    text = log.strip()
    last = f"; the last line of its log: {text.splitlines()[-1].strip()}\n{text}" if text else ""
    return f"{name} did not come up: {reason}{last}"


def _send_request(
    connection: socket.socket,
    method: str,
    path: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send a request over a private connection and return (status, body). Raises OSError or
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
    """Handle of one simulator process: starts, checks, resets and ends it.

    ``port``: 0 lets the kernel choose. If the port is taken at a restart, the simulator gets
    another one. ``folder``: prefix of the names of its folders; each start uses a new folder.
    ``broker``: runs the code of Lambda functions; without it no such code runs.
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
        """Bind the port. Raises OSError that names the port if another process has it."""
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

    def _rebind(self) -> None:
        """Bind the port for a restart, or another one if it is taken."""
        try:
            self.bind()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken = self.port
            self.port = 0
            self.bind()
            logger.warning(
                "port %d was taken by another process; this simulator has port %d from now on",
                taken,
                self.port,
            )

    def start(self) -> None:
        """Fork the simulator, which takes over the bound port.

        Raises OSError or RuntimeError. Call ``stop`` after a failure.
        """
        if self._listener is None:
            self._rebind()
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
        """Return the folder that belongs to the latest start."""
        return f"{self._stem}-{self._starts}"

    def _start_lambda_runner(self) -> socket.socket | None:
        """Fork a Lambda runner and return the channel to it, or None if there is no broker."""
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
        """Wait until /_ministack/health answers 200. Raises RuntimeError with the end of the log if
        that takes longer than ``timeout_s`` seconds or the process ends."""
        deadline = process_clock.now() + timeout_s
        while True:
            try:
                self._request(
                    "GET", "/_ministack/health", max(0.05, deadline - process_clock.now())
                )
                # The baseline for ``is_worn_out`` is measured once, after the start.
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
        """Return whether the simulator answers. For threads that do not own the slot.

        It opens a new connection, because the owner may be using the control connection.
        """
        try:
            with self.connect_as_owner() as connection:
                return _send_request(connection, "GET", "/_ministack/health", timeout_s)[0] == 200
        except (OSError, ValueError):
            return False

    def leftovers(self, timeout_s: float = ANSWER_S) -> str:
        """Return the names of the buckets and tables that remain after a reset, or "" if there are
        none. Raises OSError."""
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
        """Empty the account and seed the simulator's random numbers. Raises OSError."""
        self._request("POST", f"/_realhf/reset?{seed}", timeout_s)

    def usage(self) -> tuple[int, float]:
        """Return (resident memory in bytes, CPU time in seconds). Raises OSError."""
        with open(f"/proc/{self.pid}/stat", "rb") as status:
            fields = status.read().rpartition(b")")[2].split()
        return int(fields[21]) * _PAGE_BYTES, (int(fields[11]) + int(fields[12])) * _TICK_S

    def cpu_time_s(self) -> float:
        """Return the process's CPU time in seconds with nanosecond resolution, or -1.0 if the
        process is gone.

        If two calls return the same value, the process did not run in between.
        """
        try:
            return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)
        except OSError:
            return -1.0

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        return self._process is not None and self._process.stopped()

    def is_worn_out(self) -> bool:
        """Return whether the simulator's memory has grown too much, or too much of its CPU budget
        is used. A reset does not undo either.

        Raises OSError.
        """
        resident, seconds = self.usage()
        return resident > self._fresh_bytes + _GROWN_BYTES or seconds > _WORN_S

    def requests(self, after: int = 0, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the simulator's report of the requests it has parsed since its start. Raises
        OSError.

        See ``ParsedRequests.report`` for the keys. ``requests`` contains the latest ones numbered
        above ``after``.
        """
        return json.loads(self._request("GET", f"/_realhf/requests?{after}", timeout_s))

    def switches(self) -> dict[str, str]:
        """Return the settings in the simulator's modules as strings, by name. Raises OSError."""
        return json.loads(self._request("GET", "/_realhf/switches", ANSWER_S))

    def account_state(self) -> list[str]:
        """Return the records of the whole account; see ``account_state.AccountState.report``.

        Raises OSError, also if the account is too large.
        """
        return self._request("GET", "/_realhf/snapshot", ANSWER_S).decode().splitlines()

    def connect_as_owner(self) -> socket.socket:
        """Return a new connection with access to the control paths. Raises OSError.

        Never pass it to a process that reads text written by an agent.
        """
        return self._connect(OWNER)

    def connect_as_environment(self) -> socket.socket:
        """Return a new connection for the worker that runs the command lines of tasks. Raises
        OSError."""
        return self._connect(ENVIRONMENT)

    def _connect(self, mark: bytes) -> socket.socket:
        """Return a new private connection with this mark. Raises OSError."""
        if self._owner is None:
            raise ConnectionRefusedError(f"MiniStack on port {self.port} was not started")
        return self._owner.connect(mark)

    def connect(self, timeout_s: float = ANSWER_S) -> socket.socket:
        """Return a new connection to the simulator's port, which the agent's worker uses. Raises
        OSError."""
        connection = socket.create_connection((HOST, self.port), timeout=timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process is not None and self._process.alive()

    @property
    def pid(self) -> int:
        """The process's pid, or -1 before ``start``."""
        return self._process.pid if self._process else -1

    def log_tail(self) -> str:
        """Return the end of the simulator's log, or "" before ``start``."""
        return "" if self._log is None else tail(self._log)

    def last_words(self) -> str:
        """Return the last line of the log, quoted because an agent may have written it, or "no word
        in its log" if the log is empty."""
        lines = self.log_tail().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return repr(last[:_EXCERPT_BYTES]) if last else "no word in its log"

    def stop(self) -> None:
        """Kill the simulator and free the port. Idempotent.

        If the process does not end, that is logged, and the next ``stop`` tries to kill it again.
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
        """Send a request over the control connection and return the body of the answer. Raises
        OSError, also for a status other than 2xx."""
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
        """Close the control connection. The next request opens a new one."""
        if self._control is not None:
            self._control.close()
            self._control = None
