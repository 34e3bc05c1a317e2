"""Implements the sending end of the push stream, on an event loop."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from realhf.transport.envelope import HIGH_WATER_MARK, MAX_HEADER_BYTES, pack_header
from realhf.transport.errors import ProtocolError
from realhf.transport.network.handshake import REACHED_WITHIN_S, HandshakeWatch, unreached
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.stream.push_stream import Ack, StreamFailed, check_frames, pack_probe, pack_sample, read_ack

_log = logging.getLogger(__name__)

PROBE_BACKOFF = 10
"""Longest interval between two probes, in multiples of ``probe_s``."""
LINGER_MS = 500
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
        self._context = network.context()
        try:
            self._connect(network)
        except BaseException:
            self._context.destroy(0)
            raise
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
        self.dropped_messages = 0
        self.resent_messages = 0
        self._loop.add_reader(self._back.fileno(), self._read_acks)
        self._limit: asyncio.TimerHandle | None = None
        if self._watch is not None:
            self._loop.add_reader(self._watch.monitor.FD, self._look)
            self._loop.call_soon(self._look)
            self._limit = self._loop.call_later(REACHED_WITHIN_S, self._too_late)
        self._probe()
        self._read_acks()

    def _connect(self, network: Network) -> None:
        self._back = self._context.socket(zmq.PULL)
        self._back.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._back.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER_BYTES)
        self.ack_endpoint = network.listen(self._back)
        self._out = self._context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._out.setsockopt(zmq.RECONNECT_IVL, 20)
        self._out.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._watch = HandshakeWatch(self._out) if network.protected else None
        network.connect(self._out, self._endpoint)

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
        self._send([header, *spooled.frames])
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
        self._loop.remove_reader(self._back.fileno())
        if self._watch is not None and self._limit is not None:
            self._limit.cancel()
            self._loop.remove_reader(self._watch.monitor.FD)
            self._watch.close()
        if not self._spool:
            self._send([pack_header("bye", self._run_id, self._session, name=self._name)])
        self._back.close(0)
        self._out.close(LINGER_MS)
        await asyncio.to_thread(self._context.term)

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

    # ---- the connection, where there are keys

    def _look(self) -> None:
        if self._watch is not None:
            self._watch.look()
            if self._watch.refused:
                self._fail(self._watch.refused)

    def _too_late(self) -> None:
        if self._watch is None or self._heard:
            return
        self._look()
        if self._failure:
            return
        if not self._watch.reached:
            self._fail(unreached())
            return
        _log.error(
            "the stream receiver at %s was reached, but no answer of it came to %s in %g s: a firewall lies between, "
            "or it is busy",
            self._endpoint,
            self.ack_endpoint,
            REACHED_WITHIN_S,
        )

    def _fail(self, why: str) -> None:
        self._failure = f"the stream receiver at {self._endpoint} {why}"
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(StreamFailed(self._failure))
        self._on_change()

    # ---- sending

    def _send(self, frames: Sequence[Buffer]) -> None:
        try:
            self._out.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            _log.debug("a message to %s waits for the next probe", self._endpoint)

    def _sample_header(self, seq: int, spooled: _Spooled) -> bytes:
        return pack_sample(
            self._run_id,
            self._session,
            self._name,
            self.ack_endpoint,
            base=self._up_to + 1,
            seq=seq,
            sample=(spooled.id, spooled.attempt),
        )

    def _probe(self) -> None:
        base, back = self._up_to + 1, self.ack_endpoint
        self._send([pack_probe(self._run_id, self._session, self._name, back, base=base, sent=self._seq)])
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

    def _read_acks(self) -> None:
        """Read all acks that have arrived: the descriptor reports a change once, not every message."""
        while not self._closed:
            try:
                frames = self._back.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                ack = read_ack(frames, self._run_id)
                if ack.to != self._session:
                    raise ProtocolError("an ack for an earlier start of this producer")
                if ack.up_to > self._seq:
                    raise ProtocolError(f"an ack of message {ack.up_to}, {self._seq} were sent")
            except (ProtocolError, ValueError) as error:
                self.dropped_messages += 1
                _log.warning("message that is no ack dropped: %s", error)
                continue
            self._take(ack)

    def _take(self, ack: Ack) -> None:
        self._heard = time.monotonic()
        self._granted = ack.credits
        done = range(self._up_to + 1, ack.up_to + 1)
        self._up_to = max(self._up_to, ack.up_to)
        safe = [self._spool.pop(seq) for seq in done]
        missing = [seq for seq in range(max(ack.received, self._up_to) + 1, min(ack.sent, self._seq) + 1)]
        for seq in missing:
            self._send([self._sample_header(seq, self._spool[seq]), *self._spool[seq].frames])
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
