"""Implements the receiving end of the push stream: one listener, one record per session of a producer."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from realhf.transport.codec import MAX_FRAME_BYTES
from realhf.transport.errors import AddressTaken, ProtocolError
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.network.sockets import Listener
from realhf.transport.stream.push_stream import WINDOW, Ack, StreamFailed, StreamMessage, check_from_producer, pack_ack

MAX_SESSIONS = 16_384
"""Number of producer sessions whose records are kept."""
ACKS_AHEAD = 100
"""Number of acks that wait for a producer that does not read; further ones are dropped."""


@dataclass(slots=True)
class _Session:
    """Records one start of a producer. ``connection``: on which it was heard of last; ``acked`` and ``received``: all
    messages up to these numbers; ``arrived`` and ``done``: numbers above ``acked``."""

    name: str
    connection: bytes
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


class StreamReceiver(Listener):
    """Listens in ``network`` and hands over every message of this run once per session.

    ``deliver`` is called on the receiver's thread with all that has arrived; what it raises ends the receiver. A
    message counts as open for its producer until ``ack``; a producer may have ``credits`` open messages. Bytes that are
    not a message are counted in ``dropped_messages`` and logged. Messages without an ack stay with their producers when
    it is closed. Raises NetworkError for a ``bind`` other than loopback where ``network`` has no keys, StreamFailed
    when it is taken.
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
        self._batch: list[StreamMessage] = []
        self.repeated_messages = 0
        try:
            super().__init__(
                "the stream receiver",
                network.context(),
                lambda socket: network.listen(socket, bind),
                self._read_message,
                after=self._answer_and_deliver,
                most_bytes=MAX_FRAME_BYTES,
                ahead=ACKS_AHEAD,
                copy=False,
            )
        except AddressTaken as error:
            raise StreamFailed(f"cannot receive samples: {error}") from None
        self.start()

    def ack(self, messages: Iterable[StreamMessage]) -> None:
        """Confirm that these messages need no resend. May be called from any thread. Raises StreamFailed when the
        receiver has ended."""
        self.check()
        self._acks.extend((message.session, message.seq) for message in messages)
        self.wake()

    def check(self) -> None:
        """Raise StreamFailed when the receiver's thread has failed or ended."""
        if self.failure is not None:
            raise StreamFailed(f"the stream receiver at {self.endpoint} failed: {self.failure!r}") from self.failure
        if self.closing:
            raise StreamFailed(f"the stream receiver at {self.endpoint} is closed")

    # ---- on the receiver's thread

    def _read_message(self, connection: bytes, header: dict[str, Any], payload: list[Any]) -> None:
        check_from_producer(header, payload, self._run_id)
        key: bytes = header["session"]
        if header["kind"] == "bye":
            self._forget(key)
            return
        session = self._sessions.get(key) or self._open(header, connection)
        session.connection = connection
        if header["kind"] == "probe":
            self._answers[key] = header["sent"]
            return
        seq: int = header["seq"]
        if seq - session.acked > WINDOW:
            raise ProtocolError(f"message {seq} of {session.name!r} is too far ahead of {session.acked}")
        if session.take(seq):
            self._batch.append(StreamMessage(session.name, key, seq, header["id"], header["attempt"], payload))
        else:
            self.repeated_messages += 1
            self._answers.setdefault(key, 0)

    def _open(self, header: dict[str, Any], connection: bytes) -> _Session:
        """Begin the record of an unknown session. An earlier session of the same producer is over, because a producer's
        name belongs to one process at a time."""
        name = header["name"]
        if name in self._session_of:
            self._forget(self._session_of[name])
        if len(self._sessions) >= MAX_SESSIONS:
            self._forget(next(iter(self._sessions)))
        session = _Session(name, connection, header["base"] - 1, header["base"] - 1)
        self._sessions[header["session"]], self._session_of[name] = session, header["session"]
        return session

    def _forget(self, key: bytes) -> None:
        session = self._sessions.pop(key, None)
        self._answers.pop(key, None)
        if session is not None:
            del self._session_of[session.name]

    def _answer_and_deliver(self) -> None:
        while self._acks:
            key, seq = self._acks.popleft()
            session = self._sessions.get(key)
            if session is not None:
                session.finish(seq)
                self._answers.setdefault(key, 0)
        answers, self._answers = self._answers, {}
        for key, sent in answers.items():
            # An ack that does not leave is asked for again, if its producer lives.
            session = self._sessions[key]
            ack = Ack(key, self._me, session.acked, session.received, sent, self._credits)
            self.send(session.connection, pack_ack(self._run_id, ack))
        self.flush()  # the delivery may take long
        batch, self._batch = self._batch, []
        if batch:
            self._deliver(batch)
