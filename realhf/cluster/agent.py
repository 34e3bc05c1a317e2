"""Runs on a host for a launcher elsewhere: registers, starts workers when asked, watches them and reports their ends.

One thread does everything. Workers end with the agent, when the launcher says so, and when it has been silent for as
long as its welcome says; then the agent registers again, as often as it takes, for ``patience_s``.
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
from realhf.cluster.file_transfer import HeldKeys, keep
from realhf.cluster.messages import (
    LINE_CHARACTERS,
    OF_LAUNCHER,
    TAIL_BYTES,
    EndWorker,
    Exited,
    FilePiece,
    KillWorker,
    Lines,
    Message,
    NotStarted,
    Probe,
    Probed,
    Refused,
    StartWorker,
    Welcome,
    packed,
    unpacked,
)
from realhf.cluster.own_host import describe, fingerprint
from realhf.cluster.placement import ClusterError
from realhf.scheduler.base import WorkerEvent, WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.local import LocalScheduler, PreparedWorkers
from realhf.scheduler.process import FATAL, fatal_line, log_end
from realhf.transport import envelope
from realhf.transport.envelope import unpack_header
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network import connect_encrypted
from realhf.transport.sockets import REACHED_WITHIN_S, HandshakeWatch, dealer, describe_unreached, own_versions

MARK = ".realhf-host"
"""A file in each agent's folder, which the agent that uses it keeps locked."""
PREFIX = "realhf-agent-"
"""How the name of a temporary folder of an agent begins."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks."""
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Make a folder for an agent among the temporary files of its host, and remove it after the block, with those of
    agents that were killed. Raises OSError."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ClusterError):
            if left.stat().st_uid == os.geteuid() and (left / MARK).exists():
                with held(left):
                    shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a private folder where there is none, and keep others from using it within the block. Keys that a run
    brings are removed from it, so it must be an agent's. Raises ClusterError naming it when it holds anything else, or
    another agent uses it, and OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = folder / MARK
    if not mark.exists() and any(folder.iterdir()):
        raise ClusterError(f"--folder {folder}: it holds files that are no host agent's; give a folder of its own")
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"--folder {folder}: another host agent uses it; give this one another --name or --folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning("%s cannot be locked (%s); nothing keeps another agent from using it", folder, error)
        folder.chmod(0o700)
        yield
    finally:
        os.close(descriptor)


GRACE_S = 3.0
"""How long workers may unwind when the agent itself has to end them."""
HELLO_S = 0.5
LOOK_S = 0.2
TOKEN_BYTES = 256
LONGEST_S = 60.0
"""No launcher may ask an agent to be this patient with silence, or to say nothing for so long."""
PREPARED = (
    "workers.rollout_worker",
    "workers.generation_worker",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "transformers.modeling_utils",
)
"""What most workers of a host import, and what they would import when they read a tokenizer or a model."""


class Dismissed(Exception):
    """Is raised inside when the launcher sends the agent away for good."""


class HostAgent:
    """Serves the launcher at ``launcher`` (tcp://HOST:PORT) as the host ``name``, whose key it has.

    ``folder`` is private to the agent and holds what a run brings; ``wants`` says how many workers of each kind the
    host is to get beside what the launcher decides. ``linger_s`` is how long the agent waits for another run after one.
    With ``prepare`` it keeps a process that has imported what workers need.
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
        self._launcher, self._key, self._name, self._folder, self._wants = launcher, key, name, folder, wants
        self._patience_s, self._linger_s, self._prepare = patience_s, linger_s, prepare
        self._prepared = PreparedWorkers(PREPARED)
        self._local = LocalScheduler(orphans_are_ours=True, prepared=self._prepared)
        self._keys = HeldKeys(folder)
        self._waiting: dict[str, StartWorker] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._session = b""
        self._heard = self._pinged = 0.0
        self._welcome = Welcome(1.0, 10.0)
        self._doomed: dict[str, float] = {}
        self._logs: dict[str, tuple[Path, int]] = {}

    def run(self) -> None:
        """Serve runs until there is none. Raises NetworkError or ProtocolError when the launcher does not take this
        host, NetworkError when it was not there for ``patience_s``, and ClusterError for a folder that is not the
        agent's."""
        with held(self._folder):
            self._run()

    def _run(self) -> None:
        limit_s, why = self._patience_s, ""
        try:
            if self._prepare:
                with self._local.preserve_children():
                    self._prepared.begin()
            while (socket := self._registered(limit_s, why)) is not None:
                try:
                    why = self._served(socket)
                finally:
                    self._end_all(GRACE_S)
                    socket.close(100)
                limit_s = self._patience_s if why else self._linger_s
        except Dismissed:
            _log.info("%s was removed from the run", self._name)
        finally:
            self._end_all(GRACE_S)
            self._prepared.end()
            self._context.destroy(100)

    def _end_all(self, grace_s: float) -> None:
        self._local.stop(grace_s)
        self._doomed.clear()
        self._waiting.clear()
        self._logs.clear()
        self._keys.forget()

    # ---- registering

    def _registered(self, limit_s: float, lost: str) -> zmq.Socket[bytes] | None:
        """Return a socket that the launcher has welcomed; None when a run was over and no other began. Raises
        NetworkError after ``limit_s``, and ProtocolError when it refuses."""
        began = process_clock.now()
        told = False
        while process_clock.now() - began < limit_s:
            socket = self._connected()
            watch, welcomed = HandshakeWatch(socket), False
            try:
                if welcomed := self._welcomed(socket, watch, began + limit_s):
                    _log.info("%s takes part in the run of the launcher at %s", self._name, self._launcher)
                    return socket
                reached = watch.reached
            finally:
                watch.close()
                if not welcomed:
                    socket.close(0)
            if not reached and not told:
                _log.warning(
                    "the launcher at %s %s; it is tried again for %g s", self._launcher, describe_unreached(), limit_s
                )
                told = True
        if not lost and limit_s == self._linger_s:
            _log.info("the run is over, and no other began within %g s", limit_s)
            return None
        raise NetworkError(
            f"the launcher at {self._launcher} was not there for {limit_s:g} s" + (f" ({lost})" * bool(lost))
        )

    def _connected(self) -> zmq.Socket[bytes]:
        socket = dealer(self._context)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        connect_encrypted(socket, self._launcher, self._key.server_public, self._key.own)
        self._session = os.urandom(16)
        return socket

    def _welcomed(self, socket: zmq.Socket[bytes], watch: HandshakeWatch, deadline: float) -> bool:
        """Say hello until there is a welcome; False after a while without, so that a new connection is tried."""
        began, said = process_clock.now(), 0.0
        while process_clock.now() < min(deadline, began + REACHED_WITHIN_S):
            watch.look()
            if watch.refused:
                raise NetworkError(f"host {self._name}: the launcher at {self._launcher} {watch.refused}")
            if watch.handshakes and process_clock.now() - said > HELLO_S:
                hello = describe(self._name, self._launcher, self._folder, self._wants)
                self._send(socket, "hello", hello, versions=own_versions(), node=os.uname().nodename)
                said = process_clock.now()
            if not socket.poll(int(LOOK_S * 1000)):
                continue
            kind, message = self._received(socket)
            if isinstance(message, Welcome):
                self._welcome = message
                self._heard = self._pinged = process_clock.now()
                return True
            if isinstance(message, Refused):
                raise ProtocolError(f"the launcher at {self._launcher} refused the host {self._name}: {message.reason}")
            if kind == "leave":
                raise Dismissed
        return False

    # ---- serving

    def _served(self, socket: zmq.Socket[bytes]) -> str:
        """Do what the launcher asks. Returns "" when the run is over, else why the launcher is lost."""
        self._local.watch(socket.FD)
        try:
            while True:
                if (end := self._taken(socket)) is not None:
                    return end
                # Now, since all that has arrived is read; what follows may take long.
                if (silent := process_clock.now() - self._heard) > min(self._welcome.silent_s, LONGEST_S):
                    _log.warning(
                        "nothing heard of the launcher at %s for %.1f s; its workers end", self._launcher, silent
                    )
                    return f"nothing was heard of it for {silent:.1f} s"
                self._start_waiting(socket)
                self._report(socket, self._local.wait(LOOK_S))
                self._ping(socket)
                now = process_clock.now()
                for name in [name for name, at in self._doomed.items() if at <= now]:
                    del self._doomed[name]
                    self._local.kill(name, "")
        except BaseException:
            self._report(socket, [])
            self._send(socket, "leave")
            raise
        finally:
            self._local.unwatch(socket.FD)

    def _ping(self, socket: zmq.Socket[bytes]) -> None:
        """Give a sign of life when one is due."""
        if process_clock.now() - self._pinged >= min(self._welcome.ping_s, LONGEST_S):
            self._send(socket, "ping")
            self._pinged = process_clock.now()

    def _taken(self, socket: zmq.Socket[bytes]) -> str | None:
        """Do what has arrived; return how serving ends, None if it goes on."""
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            try:
                kind, message = self._received(socket)
            except ProtocolError as error:
                _log.warning("message of the launcher dropped: %s", error)
                continue
            self._heard = process_clock.now()
            self._ping(socket)  # many files may come, one after the other
            if kind == "over":
                self._send(socket, "leave")  # the launcher waits for it
                return ""
            if kind == "again":
                return "it had lost sight of this host"
            if kind == "leave":
                raise Dismissed
            self._do(socket, message)
        return None

    def _do(self, socket: zmq.Socket[bytes], message: Message) -> None:
        if isinstance(message, StartWorker):
            self._waiting[message.name] = message
            self._start_waiting(socket)
        elif isinstance(message, EndWorker):
            self._end(socket, message)
        elif isinstance(message, KillWorker):
            self._kill(socket, message)
        elif isinstance(message, FilePiece):
            kept = self._keys.keep(message) if self._keys.takes(message) else keep(message, self._folder)
            if kept.problem:
                _log.error("cannot keep %s: %s", message.path, kept.problem)
            self._send(socket, "kept", kept)
        elif isinstance(message, Probe):
            self._send(socket, "probed", self._probed(message))

    def _start_waiting(self, socket: zmq.Socket[bytes]) -> None:
        """Start what the launcher has asked for, unless what it needs is being imported just now."""
        if self._waiting and not self._prepared.is_importing():
            waiting, self._waiting = [*self._waiting.values()], {}
            for asked in waiting:
                self._start(socket, asked)

    def _start(self, socket: zmq.Socket[bytes], asked: StartWorker) -> None:
        log = Path(asked.log)
        spec = WorkerSpec(asked.name, asked.module, tuple(asked.argv), log, asked.events, asked.niceness, asked.gpu)
        try:
            since = log.stat().st_size if log.exists() else 0
            self._local.start(spec)
        except (OSError, ValueError) as error:
            self._send(socket, "not_started", NotStarted(asked.name, str(error)[:4000]))
        else:
            self._logs[asked.name] = log, since
            _log.info("%s runs here (log: %s)", asked.name, log)

    def _end(self, socket: zmq.Socket[bytes], asked: EndWorker) -> None:
        if asked.name:
            if (never := self._waiting.pop(asked.name, None)) is not None:
                self._send(socket, "exited", Exited(never.name, -signal.SIGTERM, never.log, 0, b""))
                return
            self._local.end(asked.name)
            self._doomed[asked.name] = process_clock.now() + asked.grace_s
            return
        self._report(socket, self._local.wait(0.0))
        for name in self._logs:
            self._local.end(name)
        deadline = process_clock.now() + min(asked.grace_s, LONGEST_S)
        while self._logs and (left := deadline - process_clock.now()) > 0:
            self._ping(socket)  # who says nothing for so long would be lost, and not be told that the run is over
            self._report(socket, self._local.wait(min(left, LOOK_S)))
            socket.getsockopt(zmq.EVENTS)  # else its descriptor stays readable, and nothing waits
        ended = dict(self._logs)
        self._end_all(0.0)
        for name, (log, since) in ended.items():
            tail = log_end(log, since, TAIL_BYTES)
            self._send(socket, "exited", Exited(name, -signal.SIGTERM, str(log), since, tail))
        self._send(socket, "ended")

    def _kill(self, socket: zmq.Socket[bytes], asked: KillWorker) -> None:
        if not asked.pid and (never := self._waiting.pop(asked.name, None)) is not None:
            self._send(socket, "exited", Exited(never.name, -signal.SIGKILL, never.log, 0, b"", asked.cause))
        self._local.kill(asked.name, asked.cause, pid=asked.pid, started=asked.started)

    @staticmethod
    def _probed(asked: Probe) -> Probed:
        """Look for a file that only the launcher can have written, and write its answer beside it."""
        text = ""
        try:
            with Path(asked.token).open("rb") as file:
                text = file.read(TOKEN_BYTES).decode("ascii")
            Path(asked.answer).write_text(text[::-1], encoding="ascii")
        except (OSError, ValueError):
            text = ""
        return Probed(asked.number, text, [fingerprint(Path(path)) for path in asked.paths])

    def _report(self, socket: zmq.Socket[bytes], events: Sequence[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, WorkerLine):
                self._send(socket, "lines", Lines(event.name, [event.text[:LINE_CHARACTERS]]))
            if not isinstance(event, WorkerExit):
                continue
            self._doomed.pop(event.name, None)
            self._logs.pop(event.name, None)
            tail = log_end(event.log, event.log_from, TAIL_BYTES)
            if event.words and not fatal_line(tail):  # the disk of the log is full
                words = f"\n{FATAL}{event.words}\n".encode()
                tail = tail[len(words) - TAIL_BYTES :] + words
            _log.info("%s has ended: %s", event.name, event.reason)
            ended = Exited(event.name, event.exit_code, str(event.log), event.log_from, tail, event.cause[:4000])
            self._send(socket, "exited", ended)

    # ---- the wire

    def _send(self, socket: zmq.Socket[bytes], kind: str, message: Message | None = None, **fields: object) -> None:
        try:
            socket.send_multipart(packed(kind, self._session, message, **fields), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.debug("%s was not sent: %s", kind, error)

    def _received(self, socket: zmq.Socket[bytes]) -> tuple[str, Message]:
        frame, *payload = socket.recv_multipart()
        header = unpack_header(frame)
        if header.get("session") != self._session:
            raise ProtocolError("message for another process")
        kind = envelope.field(header, "kind", str)
        return kind, unpacked(kind, payload, OF_LAUNCHER)
