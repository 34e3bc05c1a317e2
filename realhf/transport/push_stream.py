"""Pushes finished samples from many producers to the receivers of a run, as requests of ``realhf.transport.service``.

A receiver says first how many samples of a producer may be open (``credits``). A sample is a request (``push``), whose
answer says that it is safe and may be forgotten. What is not answered when a connection ends is sent again on the next
one: a sample may arrive twice, and whoever takes it knows it by (id, attempt).

Source: docs/reference/dataflow.md 9, StreamDataset.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from realhf.api.sample import MAX_ID_BYTES
from realhf.transport.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from realhf.transport.envelope import field
from realhf.transport.errors import PeerLost, ProtocolError, TransportError
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.service import Request, Requests, ServiceClient
from realhf.transport.sockets import Frame, Listener

CREDITS, PUSH = "credits", "push"
MAX_CREDITS = 1 << 16


class StreamFailed(TransportError):
    """Is raised when this end of a stream no longer works, or is closed."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """Holds one sample as it arrived. ``frames`` are buffers that stay valid while they are referred to."""

    producer: str
    id: str
    attempt: int
    frames: list[Any]


def check_frames(frames: Sequence[Any]) -> int:
    """Count the bytes of a sample's frames. Raises ProtocolError when they are too many or too large."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if max(sizes) > MAX_FRAME_BYTES or sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"frames of up to {max(sizes)} bytes, {sum(sizes)} in all, exceed the limits")
    return sum(sizes)


def read_sample(request: Request) -> StreamMessage:
    """Return the sample in a request. Raises ProtocolError for what is none."""
    id, attempt = field(request.header, "sample", str), field(request.header, "attempt", int)
    if not 1 <= len(request.client.encode(errors="replace")) <= MAX_ID_BYTES:
        raise ProtocolError(f"bad producer name {request.client!r:.60}")
    if len(id.encode(errors="replace")) > MAX_ID_BYTES or attempt < 0:
        raise ProtocolError(
            f"attempt {attempt} at {id!r:.60}: an id has at most {MAX_ID_BYTES} bytes, attempts start at 0"
        )
    check_frames(request.payload)
    return StreamMessage(request.client, id, attempt, request.payload)


def _name(message: StreamMessage) -> tuple[str, str, int]:
    return message.producer, message.id, message.attempt


@dataclass(eq=False)
class _Way:
    """The way to one receiver. ``granted``: samples that may be open at once; 0 until the receiver has said so."""

    client: ServiceClient
    granted: int = 0
    open: int = 0
    sent_bytes: int = 0
    heard: float = 0.0


class StreamProducer:
    """Pushes each sample to one of several receivers: of those that give credit to the one that it has sent the fewest
    bytes. A sample stays with the receiver that it was given to, and is kept until that one says that it is safe.

    Belongs to the event loop that runs when it is made; no method may be called from another thread.
    """

    def __init__(self, endpoints: Sequence[str], name: str, run_id: str, *, network: Network = LOOPBACK) -> None:
        self._name = name
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._failure = ""
        self.ways = [
            _Way(ServiceClient(endpoint, "the stream receiver", name, run_id, network, lasting=True))
            for endpoint in endpoints
        ]
        for way in self.ways:
            self._ask(way, CREDITS)
        # Producers begin with different receivers: each may have one sample to send.
        first = zlib.crc32(name.encode()) % len(endpoints)
        self._order = [*self.ways[first:], *self.ways[:first]]

    @property
    def unacked(self) -> int:
        """Number of samples pushed that are not known to be safe."""
        return sum(way.open for way in self.ways)

    async def push(self, id: str, attempt: int, frames: Sequence[Frame], *, timeout_s: float) -> None:
        """Wait for a receiver that gives credit, send it the sample and keep it. Callers take turns. The buffers must
        not change until the sample is safe.

        Raises TimeoutError (naming all receivers) when none gives credit, ProtocolError when the frames exceed the
        limits of the wire, StreamFailed when the producer is closed, or any receiver refuses its keys or is not
        reached.
        """
        nbytes = check_frames(frames)
        if not self._turn.locked() and (way := self._with_credit()) is not None:
            self._give(way, id, attempt, frames, nbytes)  # without a deadline and a turn, which cost as much again
            return
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while (way := self._with_credit()) is None:
                    self._changed.clear()
                    await self._changed.wait()
                self._give(way, id, attempt, frames, nbytes)
        except TimeoutError:
            raise TimeoutError("; ".join(self._silence(way, timeout_s) for way in self.ways)) from None

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every sample is safe; return False when some are not after ``timeout_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unacked and not self._failure:
                    self._changed.clear()
                    await self._changed.wait()
        return not self.unacked

    def close(self) -> None:
        """Release the sockets. What is not known to be safe is not sent again."""
        self._failure = f"the producer {self._name!r} is closed"
        self._changed.set()
        for way in self.ways:
            way.client.close()

    def _with_credit(self) -> _Way | None:
        if self._failure:
            raise StreamFailed(self._failure)
        ready = [way for way in self._order if way.open < way.granted]
        return min(ready, key=lambda way: way.sent_bytes) if ready else None

    def _give(self, way: _Way, id: str, attempt: int, frames: Sequence[Frame], nbytes: int) -> None:
        try:
            self._ask(way, PUSH, *frames, sample=id, attempt=attempt)
        except PeerLost as error:
            raise StreamFailed(str(error)) from None
        way.open += 1
        way.sent_bytes += nbytes

    def _ask(self, way: _Way, method: str, *frames: Frame, **fields: Any) -> None:
        way.client.begin(method, *frames, **fields).add_done_callback(partial(self._answered, way, method))

    def _answered(self, way: _Way, method: str, answer: asyncio.Future[Any]) -> None:
        if error := answer.exception():
            self._failure = self._failure or str(error)
        else:
            way.heard = time.monotonic()
            if method == CREDITS:
                way.granted = answer.result()
            else:
                way.open -= 1
        self._changed.set()

    def _silence(self, way: _Way, timeout_s: float) -> str:
        heard = f"heard of {time.monotonic() - way.heard:.1f} s ago" if way.heard else "never heard of"
        return (
            f"the stream receiver at {way.client.endpoint} gave {self._name!r} no credit within {timeout_s:g} s"
            f" ({way.open} samples are not acknowledged, {heard})"
        )


class StreamReceiver(Listener):
    """Listens in ``network`` and hands over every sample of this run; again when it is sent again after its ``ack``.

    ``deliver`` is called on the receiver's thread with all that has arrived; what it raises ends the receiver. A sample
    counts as open for its producer until ``ack``; a producer may have ``credits`` open ones. One that is sent again
    while it is open takes no more memory, however often that is. Samples without an ack stay with their producers when
    it is closed.
    """

    def __init__(
        self,
        run_id: str,
        deliver: Callable[[list[StreamMessage]], None],
        *,
        credits: int,
        network: Network = LOOPBACK,
    ) -> None:
        if not 1 <= credits <= MAX_CREDITS:
            raise ValueError(f"credits must be 1 to {MAX_CREDITS}, got {credits}")
        self._deliver, self._credits = deliver, credits
        self._batch: list[StreamMessage] = []
        self._open: dict[tuple[str, str, int], Request] = {}
        self._acked: collections.deque[StreamMessage] = collections.deque()
        super().__init__(
            "the stream receiver",
            network.context(),
            network.listen,
            Requests(run_id, self._handle, self.send, unpack=list).take,
            after=self._hand_over,
            most_bytes=MAX_FRAME_BYTES,
            ahead=0,  # no more answers than requests wait for a producer that does not read
            copy=False,
        )
        self.start()

    def ack(self, messages: Iterable[StreamMessage]) -> None:
        """Tell their producers that these samples are safe. May be called from any thread. Raises StreamFailed when the
        receiver has ended."""
        self.check()
        self._acked.extend(messages)
        self.wake()  # once: answers from this thread would wake the receiver's for each

    def check(self) -> None:
        """Raise StreamFailed when the receiver's thread has failed or ended."""
        if self.failure is not None:
            raise StreamFailed(f"the stream receiver at {self.endpoint} failed: {self.failure!r}") from self.failure
        if self.closing:
            raise StreamFailed(f"the stream receiver at {self.endpoint} is closed")

    def _handle(self, request: Request) -> None:
        if request.method == CREDITS:
            request.reply(self._credits)
        elif request.method == PUSH:
            sample = read_sample(request)
            request.payload = None  # what waits for its answer holds no frames
            name = _name(sample)
            if name not in self._open:
                self._batch.append(sample)
            self._open[name] = request  # the last connection is the one that lives
        else:
            raise ProtocolError(f"{request.method!r:.60} is none of a producer")

    def _hand_over(self) -> None:
        while self._acked:
            if (request := self._open.pop(_name(self._acked.popleft()), None)) is not None:
                request.reply(None)
        self.flush()  # the delivery may take long
        batch, self._batch = self._batch, []
        if batch:
            self._deliver(batch)
