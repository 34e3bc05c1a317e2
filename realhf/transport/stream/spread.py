"""Implements a producer's streams to several receivers, over which it spreads its samples."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence

from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.stream.producer import Buffer, StreamProducer
from realhf.transport.stream.push_stream import StreamFailed, check_frames


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
