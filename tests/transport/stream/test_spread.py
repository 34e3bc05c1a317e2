"""One producer, several receivers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from realhf.transport.errors import ProtocolError
from realhf.transport.push_stream import (
    SpreadProducer,
    StreamFailed,
    StreamMessage,
    StreamProducer,
    StreamReceiver,
    open_stream,
)


class Sink:
    """Keeps what arrives, and acks it at once unless ``holds``."""

    def __init__(self, *, credits: int = 4, holds: bool = False, bind: str = "") -> None:
        self.messages: list[StreamMessage] = []
        self.holds = holds
        self.receiver = StreamReceiver("run", self.deliver, credits=credits, bind=bind)

    def deliver(self, batch: list[StreamMessage]) -> None:
        self.messages += batch
        if not self.holds:
            self.receiver.ack(batch)

    def release(self) -> None:
        self.holds = False
        self.receiver.ack(self.messages)

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(message.id, message.attempt) for message in self.messages]


@pytest.fixture
def sinks() -> Iterator[Any]:
    made: list[Sink] = []

    def make(**options: Any) -> Sink:
        made.append(Sink(**options))
        return made[-1]

    yield make
    for sink in made:
        sink.receiver.close()


@pytest.fixture
async def spread() -> AsyncIterator[Any]:
    made: list[SpreadProducer] = []

    def make(*receivers: Sink, name: str = "w0", **options: Any) -> SpreadProducer:
        endpoints = [sink.receiver.endpoint for sink in receivers]
        made.append(SpreadProducer(endpoints, name, "run", probe_s=0.05, **options))
        return made[-1]

    yield make
    for producer in made:
        await producer.close()


async def all_give_credit(producer: SpreadProducer) -> None:
    async with asyncio.timeout(60):
        while not all(stream.credits for stream in producer._streams):
            await asyncio.sleep(0.001)


async def test_every_sample_goes_to_one_receiver_and_their_bytes_are_about_equal(sinks: Any, spread: Any) -> None:
    three, acked = [sinks() for _ in range(3)], []
    producer = spread(*three, on_ack=acked.append)
    sizes, rng = {}, random.Random(5)
    for number in range(120):
        sizes[f"s{number}"] = rng.randint(1, 20_000)
        await all_give_credit(producer)
        await producer.push(f"s{number}", number % 2, [bytes(sizes[f"s{number}"])], timeout_s=60)
    assert await producer.drain(60) and producer.unacked == 0
    names = [name for sink in three for name in sink.names]
    assert sorted(names) == sorted(acked) == sorted((f"s{n}", n % 2) for n in range(120))
    loads = [sum(sizes[name] for name, _ in sink.names) for sink in three]
    assert loads == producer.sent_bytes and max(loads) - min(loads) <= 20_000


async def test_a_receiver_without_credit_is_passed_over(sinks: Any, spread: Any) -> None:
    slow, quick = sinks(credits=2, holds=True), sinks()
    producer = spread(slow, quick)
    await all_give_credit(producer)
    for number in range(20):
        await producer.push(f"s{number}", 0, [b"1"], timeout_s=60)
    while len(quick.names) < 18:
        await asyncio.sleep(0.005)
    assert len(slow.names) == 2 and producer.unacked >= 2
    slow.release()
    assert await producer.drain(60)


async def test_who_waits_gets_the_first_credit_of_any_in_turn(sinks: Any, spread: Any) -> None:
    one, other = sinks(credits=1, holds=True), sinks(credits=1, holds=True)
    producer = spread(one, other)
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    waiting = [asyncio.ensure_future(producer.push(name, 0, [b"1"], timeout_s=60)) for name in "cde"]
    while not (one.names and other.names):
        await asyncio.sleep(0.005)
    waiting[0].cancel()
    other.release()
    await asyncio.gather(*waiting[1:])
    one.release()
    assert await producer.drain(60)
    assert other.names[1:] == [("d", 0), ("e", 0)]


async def test_without_any_credit_all_receivers_are_named(sinks: Any, spread: Any) -> None:
    two = [sinks(credits=1, holds=True) for _ in range(2)]
    producer = spread(*two)
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    with pytest.raises(TimeoutError) as caught:
        await producer.push("c", 0, [b"1"], timeout_s=0.05)
    assert all(sink.receiver.endpoint in str(caught.value) for sink in two)
    with pytest.raises(ProtocolError, match="0 frames"):
        await producer.push("d", 0, [], timeout_s=60)
    for sink in two:
        sink.release()
    assert await producer.drain(60)
    assert sorted(name for sink in two for name in sink.names) == [("a", 0), ("b", 0)]


async def test_a_push_that_waits_ends_with_the_producer(sinks: Any, spread: Any) -> None:
    producer = spread(sinks(credits=1, holds=True), sinks(credits=1, holds=True))
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    waiting = asyncio.ensure_future(producer.push("c", 0, [b"1"], timeout_s=60))
    await asyncio.sleep(0.01)
    await producer.close()
    with pytest.raises(StreamFailed, match="closed"):
        await waiting


async def test_producers_begin_with_different_receivers(sinks: Any, spread: Any) -> None:
    two = [sinks() for _ in range(2)]
    for number in range(12):
        producer = spread(*two, name=f"rollout_worker/{number}:{100 + number}")
        await all_give_credit(producer)
        await producer.push(f"s{number}", 0, [b"1"], timeout_s=60)
        assert await producer.drain(60)
    assert all(sink.names for sink in two)


async def test_one_receiver_has_a_plain_stream(sinks: Any) -> None:
    sink = sinks()
    producer = open_stream([sink.receiver.endpoint], "w0", "run")
    assert isinstance(producer, StreamProducer)
    await producer.close()
