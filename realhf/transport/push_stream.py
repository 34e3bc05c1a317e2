"""Pushes finished samples from many producers to the receivers of a run: the wire, the producer and the receiver.

A producer pushes *sample* messages, numbered from 1 per session (one start of a producer), to the receiver, which sends
*acks* back on the connection on which a session was heard of last. An ack says which messages are done (``up_to``: all
up to this number), which have arrived (``received``), and how many may be on their way at once (``credits``). A *probe*
asks for an ack and says how much has been sent, so a loss on the way shows without sending anything twice; ``base``
(the lowest number not acked) lets a new receiver take up the count. *bye* ends a session. All headers are those of
``realhf.transport.envelope``.

Source: docs/reference/dataflow.md 9, StreamDataset.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as receiver_field
from typing import Any

import zmq

from realhf.api.sample import MAX_ID_BYTES
from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.envelope import MAX_HEADER_BYTES, field, pack_header
from realhf.transport.errors import AddressTaken, ProtocolError, TransportError
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.sockets import Listener, LoopDealer

MAX_NUMBER = 1 << 53
"""Largest number of a message."""
WINDOW = 1 << 16
"""Number of messages of one session that may wait for their ack, whatever the credits were when they were sent."""


class StreamFailed(TransportError):
    """Is raised when this end of a stream no longer works, or is closed."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """Holds one sample as it arrived. ``frames`` are buffers that stay valid while they are referred to."""

    producer: str
    session: bytes
    seq: int
    id: str
    attempt: int
    frames: list[Any]


@dataclass(frozen=True, slots=True)
class Ack:
    """Reports arrivals to a producer. ``to``: session of the producer; ``sent``: echo of a probe, 0 when this answers
    none."""

    to: bytes
    receiver: bytes
    up_to: int
    received: int
    sent: int
    credits: int


def pack_sample(run: str, session: bytes, name: str, *, base: int, seq: int, sample: tuple[str, int]) -> bytes:
    """Encode the header of a sample message; ``sample`` is its (id, attempt)."""
    return pack_header("sample", run, session, name=name, base=base, seq=seq, id=sample[0], attempt=sample[1])


def pack_probe(run: str, session: bytes, name: str, *, base: int, sent: int) -> bytes:
    """Encode a probe, which asks for an ack of the messages up to ``sent``."""
    return pack_header("probe", run, session, name=name, base=base, sent=sent)


def pack_ack(run: str, ack: Ack) -> bytes:
    """Encode an ack."""
    return pack_header(
        "ack", run, ack.receiver, to=ack.to, up_to=ack.up_to, received=ack.received, sent=ack.sent, credits=ack.credits
    )


def check_from_producer(header: dict[str, Any], payload: Sequence[Any], run: str) -> None:
    """Raise ProtocolError for what is no sample, probe or bye message of this run."""
    _check_run(header, run)
    kind = header.get("kind")
    name = field(header, "name", str)
    if not name or len(name.encode(errors="replace")) > MAX_ID_BYTES:
        raise ProtocolError(f"bad producer name {name!r:.60}")
    if kind == "bye":
        return
    base = _number(header, "base", 1)
    if kind == "probe":
        _number(header, "sent", base - 1)
    elif kind == "sample":
        if _number(header, "seq", base) - base >= WINDOW:
            raise ProtocolError(f"message {header['seq']} is too far ahead of {base}")
        if len(field(header, "id", str).encode(errors="replace")) > MAX_ID_BYTES:
            raise ProtocolError(f"id {header['id']!r:.60} is longer than {MAX_ID_BYTES} bytes")
        _number(header, "attempt", 0)
        check_frames(payload)
    else:
        raise ProtocolError(f"kind {kind!r:.60} is none of a producer")


def read_ack(header: dict[str, Any], payload: Sequence[Any], run: str) -> Ack:
    """Return the checked ack in a message of this run. Raises ProtocolError."""
    _check_run(header, run)
    if header.get("kind") != "ack" or payload:
        raise ProtocolError(f"kind {header.get('kind')!r:.60} with {len(payload)} frames, expected a bare ack")
    up_to = _number(header, "up_to", 0)
    return Ack(
        field(header, "to", bytes),
        header["session"],
        up_to,
        _number(header, "received", up_to),
        _number(header, "sent", 0),
        _number(header, "credits", 0),
    )


def check_frames(frames: Sequence[Any]) -> int:
    """Count the bytes of a sample's frames. Raises ProtocolError when they are too many or too large."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if max(sizes) > MAX_FRAME_BYTES or sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frames of up to {max(sizes)} bytes, {sum(sizes)} in all, exceed the limits")
    return sum(sizes)


def _check_run(header: dict[str, Any], run: str) -> None:
    if header.get("run") != run:
        raise ProtocolError(f"message of run {header.get('run')!r:.60}, this is {run!r}")
    if len(field(header, "session", bytes)) != 16:
        raise ProtocolError("a session is 16 bytes")


def _number(header: dict[str, Any], name: str, lowest: int) -> int:
    value = field(header, name, int)
    if not lowest <= value <= MAX_NUMBER:
        raise ProtocolError(f"{name} is {value}, expected {lowest} to {MAX_NUMBER}")
    return value


_log = logging.getLogger(__name__)
PROBE_BACKOFF = 10
"""Longest interval between two probes, in multiples of ``probe_s``."""
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Spooled:
    id: str
    attempt: int
    frames: tuple[Buffer, ...]


class StreamProducer:
    """Pushes samples to one receiver and keeps each until the receiver reports that it is safe there.

    Belongs to the event loop that runs when it is made; no method may be called from another thread. A receiver that
    does not answer is asked again after ``probe_s`` seconds, then less often (after ten times that at most).
    ``on_ack((id, attempt))`` is called for every message that is safe, ``on_change()`` whenever ``credits`` or
    ``failure`` may have changed.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        run_id: str,
        *,
        network: Network = LOOPBACK,
        on_ack: Callable[[tuple[str, int]], None] | None = None,
        on_change: Callable[[], object] = lambda: None,
        probe_s: float = 0.5,
    ) -> None:
        self._endpoint, self._name, self._run_id = endpoint, name, run_id
        self._on_ack, self._on_change, self._probe_s = on_ack, on_change, probe_s
        self._session = os.urandom(16)
        self._loop = asyncio.get_running_loop()
        self._failure = ""
        self._spool: dict[int, _Spooled] = {}
        self._seq = self._up_to = 0
        self._granted = self._reserved = 0
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._drained = asyncio.Event()
        self._drained.set()
        self._heard = 0.0
        self._probe_after = probe_s
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.resent_messages = 0
        self._dealer = LoopDealer(
            endpoint, network, self._read_ack, self._fail, lasting=True, most_bytes=MAX_HEADER_BYTES, ahead=0
        )
        self._probe()

    @property
    def dropped_messages(self) -> int:
        """Number of messages that came and were no acks."""
        return self._dealer.dropped_messages

    @property
    def unacked(self) -> int:
        """Number of messages pushed that are not known to be safe at the receiver."""
        return len(self._spool)

    @property
    def credits(self) -> int:
        """Number of messages that can be pushed now without waiting; 0 until the receiver has answered once."""
        return max(0, self._up_to + self._granted - self._seq - self._reserved)

    @property
    def failure(self) -> str:
        """Why nothing can be pushed any more; empty as long as it can."""
        return f"the producer {self._name!r} is closed" if self._closed else self._failure

    async def push(self, id: str, attempt: int, frames: Sequence[Buffer], *, timeout_s: float) -> None:
        """Wait for a credit, then send the message and keep it. The buffers must not change until the message is acked.

        Raises TimeoutError (naming the receiver) when there is no credit, ProtocolError when the frames exceed the
        limits of the wire, StreamFailed when the producer is closed, the receiver refuses its keys or is not reached.
        """
        check_frames(frames)
        await self._reserve(timeout_s)
        self._reserved -= 1
        seq = self._seq + 1
        spooled = _Spooled(id, attempt, tuple(frames))
        header = self._sample_header(seq, spooled)
        self._seq = seq
        self._spool[seq] = spooled
        self._drained.clear()
        self._send(header, *spooled.frames)
        self._arm()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every message is acked; return False when some are not after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return not self._spool

    async def close(self) -> None:
        """Release the sockets. Messages that are not acked have half a second to leave, and are not sent again."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(StreamFailed(self.failure))
        self._on_change()
        self._drained.set()
        if not self._spool:
            self._send(pack_header("bye", self._run_id, self._session, name=self._name))
        await self._dealer.finish()

    # ---- credits

    async def _reserve(self, timeout_s: float) -> None:
        if self.failure:
            raise StreamFailed(self.failure)
        if self.credits and not self._waiters:
            self._reserved += 1
            return
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._arm()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._reserved -= 1
                self._grant()
            if isinstance(error, TimeoutError):
                raise TimeoutError(self.silence(timeout_s)) from None
            raise

    def _grant(self) -> None:
        while self._waiters and self.credits:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._reserved += 1
                waiter.set_result(None)

    def silence(self, timeout_s: float) -> str:
        """Say that there was no credit for so long, and since when nothing was heard."""
        heard = f"heard of {time.monotonic() - self._heard:.1f} s ago" if self._heard else "never heard of"
        return (
            f"the stream receiver at {self._endpoint} gave {self._name!r} no credit within {timeout_s:g} s"
            f" ({self.unacked} messages are not acked, {heard})"
        )

    def _fail(self, why: str) -> None:
        self._failure = f"the stream receiver at {self._endpoint} {why}"
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(StreamFailed(self._failure))
        self._on_change()

    # ---- sending

    def _send(self, *frames: Buffer) -> None:
        try:
            self._dealer.send(*frames, copy=False)
        except zmq.Again:
            _log.debug("a message to %s waits for the next probe", self._endpoint)

    def _sample_header(self, seq: int, spooled: _Spooled) -> bytes:
        return pack_sample(
            self._run_id,
            self._session,
            self._name,
            base=self._up_to + 1,
            seq=seq,
            sample=(spooled.id, spooled.attempt),
        )

    def _probe(self) -> None:
        self._send(pack_probe(self._run_id, self._session, self._name, base=self._up_to + 1, sent=self._seq))
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._probe_after, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._spool or self._waiters or not self._heard:
            self._probe_after = min(2 * self._probe_after, PROBE_BACKOFF * self._probe_s)
            self._probe()

    # ---- hearing

    def _read_ack(self, header: dict[str, Any], payload: list[bytes]) -> None:
        ack = read_ack(header, payload, self._run_id)
        if ack.to != self._session:
            raise ProtocolError("an ack for an earlier start of this producer")
        if ack.up_to > self._seq:
            raise ProtocolError(f"an ack of message {ack.up_to}, {self._seq} were sent")
        self._take(ack)

    def _take(self, ack: Ack) -> None:
        self._heard = time.monotonic()
        self._granted = ack.credits
        done = range(self._up_to + 1, ack.up_to + 1)
        self._up_to = max(self._up_to, ack.up_to)
        safe = [self._spool.pop(seq) for seq in done]
        missing = [seq for seq in range(max(ack.received, self._up_to) + 1, min(ack.sent, self._seq) + 1)]
        for seq in missing:
            self._send(self._sample_header(seq, self._spool[seq]), *self._spool[seq].frames)
        self.resent_messages += len(missing)
        if safe or missing:
            self._restart_timer()
        if not self._spool:
            self._drained.set()
        self._grant()
        self._on_change()
        if self._on_ack is not None:
            for spooled in safe:
                self._on_ack((spooled.id, spooled.attempt))

    def _restart_timer(self) -> None:
        """Restart the timer after an event: the next probe is due a full interval from now."""
        self._probe_after = self._probe_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._spool or self._waiters:
            self._arm()


class SpreadProducer:
    """Pushes each sample to one of several receivers: of those that give credit to the one that it has sent the fewest
    bytes. A sample stays with the stream that it was given to. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        run_id: str,
        *,
        network: Network = LOOPBACK,
        on_ack: Callable[[tuple[str, int]], None] | None = None,
        probe_s: float = 0.5,
    ) -> None:
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._streams = [
            StreamProducer(
                endpoint, name, run_id, network=network, on_ack=on_ack, on_change=self._changed.set, probe_s=probe_s
            )
            for endpoint in endpoints
        ]
        self.sent_bytes = [0] * len(endpoints)
        # Producers begin with different receivers: each may have one sample to send.
        first = zlib.crc32(name.encode()) % len(endpoints)
        self._order = [*range(first, len(endpoints)), *range(first)]

    @property
    def unacked(self) -> int:
        """Number of samples pushed that are not known to be safe."""
        return sum(stream.unacked for stream in self._streams)

    async def push(self, id: str, attempt: int, frames: Sequence[Buffer], *, timeout_s: float) -> None:
        """Wait for a receiver that gives credit and send it the sample, as ``StreamProducer.push`` does. Callers take
        turns. Raises TimeoutError (naming all receivers) when none gives credit, ProtocolError when the frames exceed
        the limits of the wire, StreamFailed when the producer is closed or any receiver cannot be reached."""
        nbytes = check_frames(frames)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                number = await self._open()
                self.sent_bytes[number] += nbytes
                await self._streams[number].push(id, attempt, frames, timeout_s=timeout_s)
        except TimeoutError:
            raise TimeoutError("; ".join(stream.silence(timeout_s) for stream in self._streams)) from None

    async def _open(self) -> int:
        """Wait for credit of any receiver; return the number of the stream to take."""
        while True:
            self._changed.clear()
            for stream in self._streams:
                if stream.failure:
                    raise StreamFailed(stream.failure)
            ready = [number for number in self._order if self._streams[number].credits]
            if ready:
                return min(ready, key=self.sent_bytes.__getitem__)
            await self._changed.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every sample is acked; return False when some are not after ``timeout_s`` seconds."""
        return all(await asyncio.gather(*(stream.drain(timeout_s) for stream in self._streams)))

    async def close(self) -> None:
        """Close every stream."""
        await asyncio.gather(*(stream.close() for stream in self._streams))


def open_stream(
    endpoints: Sequence[str], name: str, run_id: str, network: Network = LOOPBACK
) -> StreamProducer | SpreadProducer:
    """Return the stream of a producer to the receivers that there are."""
    if len(endpoints) == 1:
        return StreamProducer(endpoints[0], name, run_id, network=network)
    return SpreadProducer(endpoints, name, run_id, network=network)


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
    arrived: set[int] = receiver_field(default_factory=set)
    done: set[int] = receiver_field(default_factory=set)

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
