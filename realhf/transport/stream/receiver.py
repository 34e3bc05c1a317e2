"""Implements the receiving end of the push stream: one socket, one thread, one record per session of a producer."""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq

from realhf.transport.codec import MAX_FRAME_BYTES
from realhf.transport.envelope import HIGH_WATER_MARK
from realhf.transport.errors import AddressTaken, NetworkError, ProtocolError, TransportError
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.stream.push_stream import WINDOW, Ack, StreamFailed, StreamMessage, pack_ack, read_from_producer
from realhf.transport.waker import Waker

_log = logging.getLogger(__name__)

MAX_SESSIONS = 16_384
"""Number of producer sessions whose records are kept; each has a socket for its acks."""
OTHER_SOCKETS = 16
MAX_BATCH = 256
"""Number of messages that are read before they are delivered."""
LINGER_MS = 200
ACKS_AHEAD = 100
"""Number of acks that wait for a producer that does not read; further ones are dropped."""


@dataclass(slots=True)
class _Session:
    """Records one start of a producer. ``acked`` and ``received``: all messages up to these numbers; ``arrived`` and
    ``done``: numbers above ``acked``."""

    name: str
    socket: zmq.Socket[bytes]
    acked: int
    received: int
    arrived: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    def take(self, seq: int) -> bool:
        """Record an arrival; return False when it is a repetition."""
        if seq <= self.acked or seq in self.arrived:
            return False
        self.arrived.add(seq)
        self._advance()
        return True

    def _advance(self) -> None:
        self.received = max(self.received, self.acked)
        while self.received + 1 in self.arrived:
            self.received += 1

    def finish(self, seq: int) -> None:
        """Record that a message needs no resend any more."""
        if seq > self.acked:
            self.done.add(seq)
        while self.acked + 1 in self.done:
            self.acked += 1
            self.done.discard(self.acked)
            self.arrived.discard(self.acked)
        self._advance()


class StreamReceiver:
    """Listens in ``network`` and hands over every message of this run once per session.

    ``deliver`` is called on the receiver's thread with all that has arrived; what it raises ends the receiver. A
    message counts as open for its producer until ``ack``; a producer may have ``credits`` open messages. Bytes that are
    not a message are counted in ``dropped_messages`` and logged. Raises NetworkError for a ``bind`` other than loopback
    where ``network`` has no keys, StreamFailed when it is taken.
    """

    def __init__(
        self,
        run_id: str,
        deliver: Callable[[list[StreamMessage]], None],
        *,
        credits: int,
        bind: str = "",
        network: Network = LOOPBACK,
    ) -> None:
        if not 1 <= credits <= WINDOW:
            raise ValueError(f"credits must be 1 to {WINDOW}, got {credits}")
        self._run_id, self._deliver, self._credits = run_id, deliver, credits
        self._me = os.urandom(16)
        self._sessions: dict[bytes, _Session] = {}
        self._session_of: dict[str, bytes] = {}
        self._answers: dict[bytes, int] = {}
        self._acks: collections.deque[tuple[bytes, int]] = collections.deque()
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self.dropped_messages = 0
        self.repeated_messages = 0
        self._network, self._context = network, network.context(sockets=MAX_SESSIONS + OTHER_SOCKETS)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        try:
            self.endpoint = network.listen(self._socket, bind)
        except TransportError as error:
            self._context.destroy(0)
            if isinstance(error, AddressTaken):
                raise StreamFailed(f"cannot receive samples: {error}") from None
            raise
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="stream-receiver", daemon=True)
        self._thread.start()

    def ack(self, messages: Iterable[StreamMessage]) -> None:
        """Confirm that these messages need no resend. May be called from any thread. Raises StreamFailed when the
        receiver has ended."""
        self.check()
        self._acks.extend((message.session, message.seq) for message in messages)
        self._waker.wake()

    def check(self) -> None:
        """Raise StreamFailed when the receiver's thread has failed or ended."""
        if self.failure is not None:
            raise StreamFailed(f"the stream receiver at {self.endpoint} failed: {self.failure!r}") from self.failure
        if self._stopping.is_set():
            raise StreamFailed(f"the stream receiver at {self.endpoint} is closed")

    def close(self) -> None:
        """Stop receiving. Acks given before are sent; messages without an ack stay with their producers."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._waker.wake()
        self._thread.join(timeout=10)
        if self._thread.is_alive():
            _log.warning("the stream receiver at %s still delivers; it ends with its delivery", self.endpoint)

    # ---- on the receiver's thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._waker.fileno(), zmq.POLLIN)
            while not self._stopping.is_set():
                poller.poll()
                self._waker.clear()
                batch = self._receive()
                self._finish_acked()
                if batch:
                    self._deliver(batch)
            self._finish_acked()
        except BaseException as error:
            self.failure = error
            _log.exception("the stream receiver at %s failed", self.endpoint)
        finally:
            self._stopping.set()
            self._context.destroy(LINGER_MS)
            self._waker.close()

    def _receive(self) -> list[StreamMessage]:
        batch: list[StreamMessage] = []
        for _ in range(MAX_BATCH):
            try:
                frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                break
            try:
                message = self._read(frames)
            except (ProtocolError, ValueError, zmq.ZMQError) as error:
                self.dropped_messages += 1
                if self.dropped_messages & (self.dropped_messages - 1) == 0:
                    _log.warning("message %d that is none of the stream dropped: %s", self.dropped_messages, error)
                continue
            if message is not None:
                batch.append(message)
        return batch

    def _read(self, frames: list[Any]) -> StreamMessage | None:
        """Return the message to deliver from these frames, or None."""
        header = read_from_producer(frames, self._run_id)
        key: bytes = header["session"]
        if header["kind"] == "bye":
            self._forget(key)
            return None
        session = self._sessions.get(key) or self._open(header)
        if header["kind"] == "probe":
            self._answers[key] = header["sent"]
            return None
        seq: int = header["seq"]
        if seq - session.acked > WINDOW:
            raise ProtocolError(f"message {seq} of {session.name!r} is too far ahead of {session.acked}")
        if not session.take(seq):
            self.repeated_messages += 1
            self._answers.setdefault(key, 0)
            return None
        return StreamMessage(session.name, key, seq, header["id"], header["attempt"], frames[1:])

    def _open(self, header: dict[str, Any]) -> _Session:
        """Begin the record of an unknown session. An earlier session of the same producer is over, because a producer's
        name belongs to one process at a time."""
        name, back = header["name"], header["back"]
        if name in self._session_of:
            self._forget(self._session_of[name])
        if len(self._sessions) >= MAX_SESSIONS:
            self._forget(next(iter(self._sessions)))
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, ACKS_AHEAD)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            self._network.connect(socket, back)
        except (zmq.ZMQError, NetworkError):
            socket.close(0)
            raise
        session = _Session(name, socket, header["base"] - 1, header["base"] - 1)
        self._sessions[header["session"]], self._session_of[name] = session, header["session"]
        return session

    def _forget(self, key: bytes) -> None:
        session = self._sessions.pop(key, None)
        self._answers.pop(key, None)
        if session is not None:
            del self._session_of[session.name]
            session.socket.close(0)

    def _finish_acked(self) -> None:
        while self._acks:
            key, seq = self._acks.popleft()
            session = self._sessions.get(key)
            if session is not None:
                session.finish(seq)
                self._answers.setdefault(key, 0)
        answers, self._answers = self._answers, {}
        for key, sent in answers.items():
            session = self._sessions[key]
            ack = Ack(key, self._me, session.acked, session.received, sent, self._credits)
            self._send(session.socket, pack_ack(self._run_id, ack))

    def _send(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # The producer does not take acks. If it lives it will ask for them.
            _log.debug("an ack was not sent")
