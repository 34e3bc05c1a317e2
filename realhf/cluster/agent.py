"""Host agent, which registers a host with a launcher on another machine, starts and watches
workers, and reports their exits.

The agent has one thread. Its workers end when the agent ends, when the launcher requests it, or
when the launcher has been silent for ``Welcome.silent_s`` seconds. After such a silence the agent
tries to register again for ``patience_s`` seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import zmq

from realhf.base import process_clock
from realhf.cluster.cluster_keys import HostKey
from realhf.cluster.file_transfer import KeyFiles, store_piece
from realhf.cluster.messages import (
    LINE_CHARACTERS,
    OF_LAUNCHER,
    TAIL_BYTES,
    EndWorker,
    Exited,
    FilePiece,
    FolderProbeRequest,
    HelloRefusal,
    KillWorker,
    Lines,
    Message,
    NotStarted,
    ProbeAnswer,
    StartWorker,
    Welcome,
    pack_message,
    unpack_message,
)
from realhf.cluster.own_host import describe_host, fingerprint
from realhf.cluster.placement import ClusterError
from realhf.scheduler.base import WorkerEvent, WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.local import LocalScheduler, PreparedWorkers
from realhf.scheduler.process import FATAL, find_fatal_line, read_log_end
from realhf.transport import envelope
from realhf.transport.envelope import unpack_header
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network import connect_encrypted
from realhf.transport.sockets import (
    REACHED_WITHIN_S,
    HandshakeWatch,
    collect_versions,
    describe_unreached,
    open_dealer,
)

MARK = ".realhf-host"
"""File in each agent's folder. An agent locks it for as long as it uses the folder."""
PREFIX = "realhf-agent-"
"""Prefix of the names of agents' temporary folders."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers that file systems without file locks raise."""
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def create_temporary_folder() -> Iterator[Path]:
    """Context manager that yields a temporary folder for an agent and removes it at the end.

    It first removes the folders that killed agents have left. Raises OSError.
    """
    for old_folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ClusterError):
            if old_folder.stat().st_uid == os.geteuid() and (old_folder / MARK).exists():
                with lock_folder(old_folder):
                    shutil.rmtree(old_folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks ``folder`` for this agent, after creating it if it does not exist.

    The agent removes files from the folder, so nothing else may use it. Raises ClusterError if it
    contains other files or another agent uses it, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = folder / MARK
    if not mark.exists() and any(folder.iterdir()):
        raise ClusterError(
            f"--folder {folder}: it contains files of something else; give the agent a folder of its own"
        )
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"--folder {folder}: another host agent uses it; give this one another --name or "
                f"--folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning(
                "%s cannot be locked (%s), so another agent could use it too", folder, error
            )
        folder.chmod(0o700)
        yield
    finally:
        os.close(descriptor)


GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL when the agent itself ends its workers."""
HELLO_S = 0.5
"""Seconds between two hellos."""
POLL_S = 0.2
"""Maximum seconds that the agent waits for messages or worker exits before it does its periodic
work."""
TOKEN_BYTES = 256
"""Maximum size of a probe's token in bytes."""
MAX_SILENCE_S = 60.0
"""Upper limit in seconds for the times that a launcher sets in its welcome and requests: silence,
heartbeat interval, grace period."""
PREPARED = (
    "workers.rollout_worker",
    "workers.generation_worker",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "transformers.modeling_utils",
)
"""Modules that most workers import when they start, or when they load a tokenizer or a model."""


class HostDismissed(Exception):
    """Raised when the launcher has removed this host permanently."""


class HostAgent:
    """Agent of the host ``name`` for the launcher at ``launcher`` (tcp://HOST:PORT).

    key: key of this host. folder: folder that only this agent uses, for the files of a run. wants:
    number of workers of each kind that the host asks for. patience_s: seconds for which the agent
    tries to reach the launcher. linger_s: seconds for which it waits for the next run after a run
    has ended. prepare: whether to keep a process that has imported the workers' modules, and to
    fork workers from it.
    """

    def __init__(
        self,
        launcher: str,
        key: HostKey,
        name: str,
        folder: Path,
        *,
        wants: Mapping[str, int] = {},
        patience_s: float = 600.0,
        linger_s: float = 30.0,
        prepare: bool = True,
    ) -> None:
        self._launcher = launcher
        self._key = key
        self._name = name
        self._folder = folder
        self._wants = wants
        self._patience_s = patience_s
        self._linger_s = linger_s
        self._prepare = prepare
        self._prepared = PreparedWorkers(PREPARED)
        self._local = LocalScheduler(adopts_orphans=True, prepared=self._prepared)
        self._keys = KeyFiles(folder)
        self._waiting_starts: dict[str, StartWorker] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._session = b""
        self._last_message = self._last_ping = 0.0
        self._welcome = Welcome(1.0, 10.0)
        self._kill_times: dict[str, float] = {}
        self._log_starts: dict[str, tuple[Path, int]] = {}

    def run(self) -> None:
        """Serve one run after another until no new run begins.

        Raises NetworkError or ProtocolError if the launcher refuses this host, NetworkError if the
        launcher is not reached within ``patience_s``, and ClusterError if another agent uses the
        folder or it contains other files.
        """
        with lock_folder(self._folder):
            self._run()

    def _run(self) -> None:
        limit_s = self._patience_s
        loss_reason = ""
        try:
            if self._prepare:
                with self._local.preserve_children():
                    self._prepared.start()
            while (socket := self._register(limit_s, loss_reason)) is not None:
                try:
                    loss_reason = self._serve(socket)
                finally:
                    self._stop_all(GRACE_S)
                    socket.close(100)
                limit_s = self._patience_s if loss_reason else self._linger_s
        except HostDismissed:
            _log.info("%s was removed from the run", self._name)
        finally:
            self._stop_all(GRACE_S)
            self._prepared.stop()
            self._context.destroy(100)

    def _stop_all(self, grace_s: float) -> None:
        self._local.stop(grace_s)
        self._kill_times.clear()
        self._waiting_starts.clear()
        self._log_starts.clear()
        self._keys.remove_all()

    # ---- registering

    def _register(self, limit_s: float, loss_reason: str) -> zmq.Socket[bytes] | None:
        """Register with the launcher; return the socket, or None if a run has ended and no other
        run began.

        loss_reason: why the connection to the launcher was lost before this call; "" if it was not.
        Raises NetworkError after ``limit_s`` seconds, and ProtocolError if the launcher refuses
        this host.
        """
        began = process_clock.now()
        warned = False
        while process_clock.now() - began < limit_s:
            socket = self._connect()
            watch = HandshakeWatch(socket)
            welcomed = False
            try:
                if welcomed := self._wait_for_welcome(socket, watch, began + limit_s):
                    _log.info(
                        "%s takes part in the run of the launcher at %s", self._name, self._launcher
                    )
                    return socket
                reached = watch.reached
            finally:
                watch.close()
                if not welcomed:
                    socket.close(0)
            if not reached and not warned:
                _log.warning(
                    "the launcher at %s %s; it is tried again for %g s",
                    self._launcher,
                    describe_unreached(),
                    limit_s,
                )
                warned = True
        if not loss_reason and limit_s == self._linger_s:
            _log.info("the run is over, and no other began within %g s", limit_s)
            return None
        raise NetworkError(
            f"the launcher at {self._launcher} was not reached for {limit_s:g} s"
            + (f" ({loss_reason})" * bool(loss_reason))
        )

    def _connect(self) -> zmq.Socket[bytes]:
        socket = open_dealer(self._context)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        connect_encrypted(socket, self._launcher, self._key.server_public, self._key.own)
        self._session = os.urandom(16)
        return socket

    def _wait_for_welcome(
        self, socket: zmq.Socket[bytes], watch: HandshakeWatch, deadline: float
    ) -> bool:
        """Send hellos until the launcher welcomes this host; return False if no welcome arrives
        within ``REACHED_WITHIN_S``.

        After False, the caller opens a new connection. Raises NetworkError, ProtocolError or
        HostDismissed.
        """
        began = process_clock.now()
        last_hello = 0.0
        while process_clock.now() < min(deadline, began + REACHED_WITHIN_S):
            watch.process_events()
            if watch.refusal:
                raise NetworkError(
                    f"host {self._name}: the launcher at {self._launcher} {watch.refusal}"
                )
            if watch.handshakes and process_clock.now() - last_hello > HELLO_S:
                hello = describe_host(self._name, self._launcher, self._folder, self._wants)
                self._send(
                    socket, "hello", hello, versions=collect_versions(), node=os.uname().nodename
                )
                last_hello = process_clock.now()
            if not socket.poll(int(POLL_S * 1000)):
                continue
            kind, message = self._receive(socket)
            if isinstance(message, Welcome):
                self._welcome = message
                self._last_message = self._last_ping = process_clock.now()
                return True
            if isinstance(message, HelloRefusal):
                raise ProtocolError(
                    f"the launcher at {self._launcher} refused the host {self._name}: "
                    f"{message.reason}"
                )
            if kind == "leave":
                raise HostDismissed
        return False

    # ---- serving

    def _serve(self, socket: zmq.Socket[bytes]) -> str:
        """Execute the launcher's requests until the run ends or the launcher is lost. Return "" for
        the end of the run, else why the launcher was lost."""
        self._local.watch(socket.FD)
        try:
            while True:
                if (end := self._process_messages(socket)) is not None:
                    return end
                # Check the silence here: all messages have just been read, and the work below may
                # take long.
                if (silent := process_clock.now() - self._last_message) > min(
                    self._welcome.silent_s, MAX_SILENCE_S
                ):
                    _log.warning(
                        "nothing heard of the launcher at %s for %.1f s; its workers end",
                        self._launcher,
                        silent,
                    )
                    return f"nothing was heard of it for {silent:.1f} s"
                self._start_waiting(socket)
                self._report(socket, self._local.wait(POLL_S))
                self._ping(socket)
                now = process_clock.now()
                for name in [name for name, at in self._kill_times.items() if at <= now]:
                    del self._kill_times[name]
                    self._local.kill(name, "")
        except BaseException:
            self._report(socket, [])
            self._send(socket, "leave")
            raise
        finally:
            self._local.unwatch(socket.FD)

    def _ping(self, socket: zmq.Socket[bytes]) -> None:
        """Send a heartbeat if one is due."""
        if process_clock.now() - self._last_ping >= min(self._welcome.ping_s, MAX_SILENCE_S):
            self._send(socket, "ping")
            self._last_ping = process_clock.now()

    def _process_messages(self, socket: zmq.Socket[bytes]) -> str | None:
        """Process the messages that have arrived. Return the result of ``_serve`` if one of them
        ends it, else None."""
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            try:
                kind, message = self._receive(socket)
            except ProtocolError as error:
                _log.warning("message of the launcher dropped: %s", error)
                continue
            self._last_message = process_clock.now()
            self._ping(socket)  # file pieces may arrive without a pause, and the loop may be long
            if kind == "over":
                self._send(socket, "leave")  # the launcher waits for this message
                return ""
            if kind == "again":
                return "it had lost sight of this host"
            if kind == "leave":
                raise HostDismissed
            self._dispatch(socket, message)
        return None

    def _dispatch(self, socket: zmq.Socket[bytes], message: Message) -> None:
        if isinstance(message, StartWorker):
            self._waiting_starts[message.name] = message
            self._start_waiting(socket)
        elif isinstance(message, EndWorker):
            self._terminate(socket, message)
        elif isinstance(message, KillWorker):
            self._kill(socket, message)
        elif isinstance(message, FilePiece):
            receipt = (
                self._keys.store(message)
                if self._keys.is_key_file(message)
                else store_piece(message, self._folder)
            )
            if receipt.problem:
                _log.error("cannot keep %s: %s", message.path, receipt.problem)
            self._send(socket, "kept", receipt)
        elif isinstance(message, FolderProbeRequest):
            self._send(socket, "probed", self._answer_probe(message))

    def _start_waiting(self, socket: zmq.Socket[bytes]) -> None:
        """Start the workers that the launcher has requested, unless the prepared process is still
        importing."""
        if self._waiting_starts and not self._prepared.is_importing():
            waiting = [*self._waiting_starts.values()]
            self._waiting_starts = {}
            for request in waiting:
                self._start(socket, request)

    def _start(self, socket: zmq.Socket[bytes], request: StartWorker) -> None:
        log = Path(request.log)
        spec = WorkerSpec(
            request.name,
            request.module,
            tuple(request.argv),
            log,
            request.events,
            request.niceness,
            request.gpu,
        )
        try:
            since = log.stat().st_size if log.exists() else 0
            self._local.start(spec)
        except (OSError, ValueError) as error:
            self._send(socket, "not_started", NotStarted(request.name, str(error)[:4000]))
        else:
            self._log_starts[request.name] = log, since
            _log.info("%s runs here (log: %s)", request.name, log)

    def _terminate(self, socket: zmq.Socket[bytes], request: EndWorker) -> None:
        if request.name:
            if (not_started := self._waiting_starts.pop(request.name, None)) is not None:
                self._send(
                    socket,
                    "exited",
                    Exited(not_started.name, -signal.SIGTERM, not_started.log, 0, b""),
                )
                return
            self._local.terminate(request.name)
            self._kill_times[request.name] = process_clock.now() + request.grace_s
            return
        self._report(socket, self._local.wait(0.0))
        for name in self._log_starts:
            self._local.terminate(name)
        deadline = process_clock.now() + min(request.grace_s, MAX_SILENCE_S)
        while self._log_starts and (left := deadline - process_clock.now()) > 0:
            # Without heartbeats, the launcher would consider this host lost and not tell it that
            # the run has ended.
            self._ping(socket)
            self._report(socket, self._local.wait(min(left, POLL_S)))
            # Reading EVENTS resets the socket's descriptor. Otherwise it stays readable, and
            # ``wait`` returns at once.
            socket.getsockopt(zmq.EVENTS)
        ended = dict(self._log_starts)
        self._stop_all(0.0)
        for name, (log, since) in ended.items():
            tail = read_log_end(log, since, TAIL_BYTES)
            self._send(socket, "exited", Exited(name, -signal.SIGTERM, str(log), since, tail))
        self._send(socket, "ended")

    def _kill(self, socket: zmq.Socket[bytes], request: KillWorker) -> None:
        if (
            not request.pid
            and (not_started := self._waiting_starts.pop(request.name, None)) is not None
        ):
            self._send(
                socket,
                "exited",
                Exited(not_started.name, -signal.SIGKILL, not_started.log, 0, b"", request.cause),
            )
        self._local.kill(request.name, request.cause, pid=request.pid, started=request.started)

    @staticmethod
    def _answer_probe(probe: FolderProbeRequest) -> ProbeAnswer:
        """Read the launcher's token and write it reversed to the probe's answer path, as proof that
        the folder is shared. Return the answer message."""
        text = ""
        try:
            with Path(probe.token).open("rb") as file:
                text = file.read(TOKEN_BYTES).decode("ascii")
            Path(probe.answer).write_text(text[::-1], encoding="ascii")
        except (OSError, ValueError):
            text = ""
        return ProbeAnswer(probe.number, text, [fingerprint(Path(path)) for path in probe.paths])

    def _report(self, socket: zmq.Socket[bytes], events: Sequence[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, WorkerLine):
                self._send(socket, "lines", Lines(event.name, [event.text[:LINE_CHARACTERS]]))
            if not isinstance(event, WorkerExit):
                continue
            self._kill_times.pop(event.name, None)
            self._log_starts.pop(event.name, None)
            tail = read_log_end(event.log, event.log_from, TAIL_BYTES)
            if event.last_words and not find_fatal_line(tail):  # e.g. a full disk
                last_words = f"\n{FATAL}{event.last_words}\n".encode()
                tail = tail[len(last_words) - TAIL_BYTES :] + last_words
            _log.info("%s has ended: %s", event.name, event.reason)
            exited = Exited(
                event.name,
                event.exit_code,
                str(event.log),
                event.log_from,
                tail,
                event.cause[:4000],
            )
            self._send(socket, "exited", exited)

    # ---- the wire

    def _send(
        self, socket: zmq.Socket[bytes], kind: str, message: Message | None = None, **fields: object
    ) -> None:
        try:
            socket.send_multipart(pack_message(kind, self._session, message, **fields), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("%s was not sent: %s", kind, error)

    def _receive(self, socket: zmq.Socket[bytes]) -> tuple[str, Message]:
        frame, *payload = socket.recv_multipart()
        header = unpack_header(frame)
        if header.get("session") != self._session:
            raise ProtocolError("message for another process")
        kind = envelope.field(header, "kind", str)
        return kind, unpack_message(kind, payload, OF_LAUNCHER)
