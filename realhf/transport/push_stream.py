"""Push stream of finished samples from producers to the receivers of a run, over
``realhf.transport.service``.

A receiver first grants each producer a number of unacknowledged samples (``credits``). A sample is
a request (``push``); its answer acknowledges that the sample is stored, and the producer drops it.
Requests without an answer when a connection ends are sent again on the next one. A sample may
therefore arrive twice; the consumer recognises it by (id, attempt).

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
from realhf.transport.service import Requests, ServiceClient, ServiceRequest
from realhf.transport.sockets import Frame, Listener

CREDITS = "credits"
PUSH = "push"
MAX_CREDITS = 1 << 16


class StreamFailed(TransportError):
    """Error: this end of a stream has failed or is closed."""


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One received sample."""

    producer: str
    id: str
    attempt: int
    """Number of the attempt at this sample, from 0."""
    frames: list[Any]
    """Encoded sample, as buffers that stay valid as long as they are referenced."""


def check_frames(frames: Sequence[Any]) -> int:
    """Return the total bytes of a sample's frames. Raises ProtocolError if they exceed the
    limits."""
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, allowed 1 to {MAX_FRAMES}")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if max(sizes) > MAX_FRAME_BYTES or sum(sizes) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"frames of up to {max(sizes)} bytes, {sum(sizes)} in all, exceed the limits"
        )
    return sum(sizes)


def read_sample(request: ServiceRequest) -> StreamMessage:
    """Parse the sample in a push request. Raises ProtocolError for an invalid name, id, attempt or
    size."""
    id = field(request.header, "sample", str)
    attempt = field(request.header, "attempt", int)
    if not 1 <= len(request.client.encode(errors="replace")) <= MAX_ID_BYTES:
        raise ProtocolError(f"bad producer name {request.client!r:.60}")
    if len(id.encode(errors="replace")) > MAX_ID_BYTES or attempt < 0:
        raise ProtocolError(
            f"attempt {attempt} at {id!r:.60}: an id has at most {MAX_ID_BYTES} bytes, attempts "
            f"start at 0"
        )
    check_frames(request.payload)
    return StreamMessage(request.client, id, attempt, request.payload)


def _sample_key(message: StreamMessage) -> tuple[str, str, int]:
    return message.producer, message.id, message.attempt


@dataclass(eq=False)
class _ReceiverLink:
    """A producer's connection to one receiver."""

    client: ServiceClient
    granted: int = 0
    """Number of samples that may be unacknowledged; 0 until the receiver has answered."""
    open: int = 0
    """Number of unacknowledged samples."""
    sent_bytes: int = 0
    heard: float = 0.0
    """Time of the last answer (``time.monotonic``); 0 before the first."""


class StreamProducer:
    """Sender of samples to several receivers.

    Each sample goes to the receiver that has credit and to which this producer has sent the fewest
    bytes. It stays with that receiver, and is kept here until the receiver acknowledges it.

    Belongs to the event loop that runs when it is created; no method may be called from another
    thread.
    """

    def __init__(
        self, endpoints: Sequence[str], name: str, run_id: str, *, network: Network = LOOPBACK
    ) -> None:
        self._name = name
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._failure = ""
        self.links = [
            _ReceiverLink(
                ServiceClient(endpoint, "the stream receiver", name, run_id, network, lasting=True)
            )
            for endpoint in endpoints
        ]
        for link in self.links:
            self._ask(link, CREDITS)
        # Producers begin with different receivers, since each may have only one sample to send.
        first = zlib.crc32(name.encode()) % len(endpoints)
        self._order = [*self.links[first:], *self.links[:first]]

    @property
    def unacked(self) -> int:
        """Number of samples that were pushed and not acknowledged yet."""
        return sum(link.open for link in self.links)

    async def push(
        self, id: str, attempt: int, frames: Sequence[Frame], *, timeout_s: float
    ) -> None:
        """Wait for a receiver with credit and send the sample to it. Callers are served in order.

        The buffers must not change until the sample is acknowledged. Raises TimeoutError (naming
        all receivers) if none gives credit within ``timeout_s`` seconds, ProtocolError if the
        frames exceed the limits of the wire format, and StreamFailed if the producer is closed, or
        any receiver refuses its keys or is unreachable.
        """
        nbytes = check_frames(frames)
        if not self._turn.locked() and (link := self._find_receiver()) is not None:
            # The common case needs no timeout and no lock, which would double the cost of a push.
            self._send_sample(link, id, attempt, frames, nbytes)
            return
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while (link := self._find_receiver()) is None:
                    self._changed.clear()
                    await self._changed.wait()
                self._send_sample(link, id, attempt, frames, nbytes)
        except TimeoutError:
            raise TimeoutError(
                "; ".join(self._describe_silence(link, timeout_s) for link in self.links)
            ) from None

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every sample is acknowledged; return False if ``timeout_s`` seconds pass
        first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unacked and not self._failure:
                    self._changed.clear()
                    await self._changed.wait()
        return not self.unacked

    def close(self) -> None:
        """Release the sockets. Unacknowledged samples are not sent again."""
        self._failure = f"the producer {self._name!r} is closed"
        self._changed.set()
        for link in self.links:
            link.client.close()

    def _find_receiver(self) -> _ReceiverLink | None:
        if self._failure:
            raise StreamFailed(self._failure)
        ready = [link for link in self._order if link.open < link.granted]
        return min(ready, key=lambda link: link.sent_bytes) if ready else None

    def _send_sample(
        self, link: _ReceiverLink, id: str, attempt: int, frames: Sequence[Frame], nbytes: int
    ) -> None:
        try:
            self._ask(link, PUSH, *frames, sample=id, attempt=attempt)
        except PeerLost as error:
            raise StreamFailed(str(error)) from None
        link.open += 1
        link.sent_bytes += nbytes

    def _ask(self, link: _ReceiverLink, method: str, *frames: Frame, **fields: Any) -> None:
        link.client.begin(method, *frames, **fields).add_done_callback(
            partial(self._on_answer, link, method)
        )

    def _on_answer(self, link: _ReceiverLink, method: str, answer: asyncio.Future[Any]) -> None:
        if error := answer.exception():
            self._failure = self._failure or str(error)
        else:
            link.heard = time.monotonic()
            if method == CREDITS:
                link.granted = answer.result()
            else:
                link.open -= 1
        self._changed.set()

    def _describe_silence(self, link: _ReceiverLink, timeout_s: float) -> str:
        heard = (
            f"heard of {time.monotonic() - link.heard:.1f} s ago"
            if link.heard
            else "never heard of"
        )
        return (
            f"the stream receiver at {link.client.endpoint} gave {self._name!r} no credit within "
            f"{timeout_s:g} s"
            f" ({link.open} samples are not acknowledged, {heard})"
        )


class StreamReceiver(Listener):
    """Listener that delivers every sample of this run once, or again if it is sent again after its
    ``ack``.

    ``deliver`` is called on the receiver's thread with all samples that have arrived; an exception
    in it ends the receiver. A producer may have up to ``credits`` samples without an ``ack``. A
    sample that is sent again before its ``ack`` is delivered once and takes no more memory. Samples
    without an ``ack`` when the receiver is closed stay with their producers.
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
        self._deliver = deliver
        self._credits = credits
        self._batch: list[StreamMessage] = []
        self._open: dict[tuple[str, str, int], ServiceRequest] = {}
        self._acked: collections.deque[StreamMessage] = collections.deque()
        super().__init__(
            "the stream receiver",
            network.context(),
            network.listen,
            Requests(run_id, self._handle, self.send, unpack=list).dispatch,
            after=self._deliver_batch,
            max_bytes=MAX_FRAME_BYTES,
            ahead=0,  # a producer that does not read has no more answers queued than requests
            copy=False,
        )
        self.start()

    def ack(self, messages: Iterable[StreamMessage]) -> None:
        """Acknowledge samples to their producers. Thread-safe. Raises StreamFailed if the receiver
        has ended."""
        self.check()
        self._acked.extend(messages)
        self.wake()  # once for all: answering from this thread would wake the receiver's for each sample

    def check(self) -> None:
        """Raise StreamFailed if the receiver's thread has failed or ended."""
        if self.failure is not None:
            raise StreamFailed(
                f"the stream receiver at {self.endpoint} failed: {self.failure!r}"
            ) from self.failure
        if self.closing:
            raise StreamFailed(f"the stream receiver at {self.endpoint} is closed")

    def _handle(self, request: ServiceRequest) -> None:
        if request.method == CREDITS:
            request.reply(self._credits)
        elif request.method == PUSH:
            sample = read_sample(request)
            request.payload = (
                None  # the frames are delivered; a request that waits for its answer needs none
            )
            name = _sample_key(sample)
            if name not in self._open:
                self._batch.append(sample)
            self._open[name] = request  # of several connections of a producer the last one is alive
        else:
            raise ProtocolError(f"{request.method!r:.60} is not a producer's request")

    def _deliver_batch(self) -> None:
        while self._acked:
            if (request := self._open.pop(_sample_key(self._acked.popleft()), None)) is not None:
                request.reply(None)
        self.flush()  # before the delivery, which may take long
        batch = self._batch
        self._batch = []
        if batch:
            self._deliver(batch)
