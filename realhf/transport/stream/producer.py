"""Implements the sending end of the push stream, on an event loop: to one receiver, or spread over several."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from realhf.transport.envelope import MAX_HEADER_BYTES, pack_header
from realhf.transport.errors import ProtocolError
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.network.sockets import LoopDealer
from realhf.transport.stream.push_stream import Ack, StreamFailed, check_frames, pack_probe, pack_sample, read_ack

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
