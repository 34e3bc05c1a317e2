"""The push stream: credits, acks, losses, restarts, garbage."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import zmq

from realhf.transport.envelope import pack_header, unpack_header
from realhf.transport.errors import ProtocolError
from realhf.transport.push_stream import (
    Ack,
    StreamFailed,
    StreamMessage,
    StreamProducer,
    StreamReceiver,
    pack_ack,
    pack_probe,
    pack_sample,
)

SCRIPT = str(Path(__file__).with_name("push_process.py"))
SESSION = b"s" * 16


def packed(value: Any) -> bytes:
    return cast(bytes, msgpack.packb(value))


class Sink:
    """What a receiver delivers; acks at once when ``ack`` is set."""

    def __init__(self, *, credits: int = 8, ack: bool = True, bind: str = "tcp://127.0.0.1:0") -> None:
        self.messages: list[StreamMessage] = []
        self.ack = ack
        self.arrived = threading.Event()
        self.receiver = StreamReceiver("run", self.deliver, credits=credits, bind=bind)

    def deliver(self, batch: list[StreamMessage]) -> None:
        self.messages += batch
        self.arrived.set()
        if self.ack:
            self.receiver.ack(batch)

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(message.id, message.attempt) for message in self.messages]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def sinks():
    made: list[Sink] = []

    def make(**options) -> Sink:
        made.append(Sink(**options))
        return made[-1]

    yield make
    for sink in made:
        sink.receiver.close()


async def test_samples_arrive_in_order_with_their_frames(sinks):
    sink, acked = sinks(), []
    producer = StreamProducer(sink.receiver.endpoint, "w0", "run", on_ack=acked.append)
    for number in range(100):
        await producer.push(f"s{number}", number % 3, [bytes([number]), memoryview(b"x" * 100_000)], timeout_s=60)
    assert await producer.drain(60)
    assert producer.unacked == 0
    await producer.close()
    assert sink.names == acked == [(f"s{number}", number % 3) for number in range(100)]
    assert [message.seq for message in sink.messages] == list(range(1, 101))
    assert all(bytes(m.frames[0]) == bytes([n]) for n, m in enumerate(sink.messages))
    assert all(bytes(m.frames[1]) == b"x" * 100_000 for m in sink.messages)
    assert sink.receiver.dropped_messages == 0


async def test_without_a_credit_nothing_is_sent(sinks):
    sink = sinks(credits=2, ack=False)
    producer = StreamProducer(sink.receiver.endpoint, "w0", "run")
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    assert (producer.credits, producer.unacked) == (0, 2)
    with pytest.raises(TimeoutError, match=rf"{sink.receiver.endpoint} gave 'w0' no credit .*2 messages"):
        await producer.push("c", 0, [b"1"], timeout_s=0.05)
    third = asyncio.ensure_future(producer.push("c", 0, [b"1"], timeout_s=60))
    await sink.until(2)
    assert not third.done()
    sink.receiver.ack(sink.messages[1:])
    await asyncio.sleep(0.05)
    assert not third.done(), "message 1 is open, and acks are contiguous"
    sink.receiver.ack(sink.messages[:1])
    await third
    await sink.until(3)
    assert sink.names == [("a", 0), ("b", 0), ("c", 0)]
    await producer.close()


async def test_a_cancelled_push_leaves_its_credit_to_the_next(sinks):
    sink = sinks(credits=1, ack=False)
    producer = StreamProducer(sink.receiver.endpoint, "w0", "run")
    await producer.push("a", 0, [b"1"], timeout_s=60)
    waiting = [asyncio.ensure_future(producer.push(name, 0, [b"1"], timeout_s=60)) for name in "bcd"]
    await sink.until(1)
    waiting[0].cancel()
    sink.ack = True
    sink.receiver.ack(sink.messages)
    await asyncio.gather(*waiting[1:])
    assert await producer.drain(60)
    assert sink.names == [("a", 0), ("c", 0), ("d", 0)]
    await producer.close()


async def test_a_receiver_that_comes_back_gets_what_was_not_acked(sinks):
    first = sinks(ack=False)
    producer = StreamProducer(first.receiver.endpoint, "w0", "run", probe_s=0.05)
    for number in range(5):
        await producer.push(f"s{number}", 0, [b"1"], timeout_s=60)
    await first.until(5)
    first.receiver.ack(first.messages[:2])
    while producer.unacked > 3:
        await asyncio.sleep(0.005)
    first.receiver.close()
    with pytest.raises(StreamFailed, match="closed"):
        first.receiver.ack(first.messages[2:])
    await producer.push("s5", 0, [b"1"], timeout_s=60)
    second = sinks(bind=first.receiver.endpoint)
    assert await producer.drain(60)
    assert sorted(second.names) == [(f"s{number}", 0) for number in range(2, 6)]
    await producer.close()


async def test_a_failing_delivery_surfaces():
    broken = StreamReceiver("run", lambda batch: {}[batch[0].id], credits=4)
    producer = StreamProducer(broken.endpoint, "w0", "run")
    await producer.push("precious", 0, [b"1"], timeout_s=60)
    while broken.failure is None:
        await asyncio.sleep(0.005)
    assert isinstance(broken.failure, KeyError)
    with pytest.raises(StreamFailed, match="precious"):
        broken.check()
    assert producer.unacked == 1
    broken.close()
    await producer.close()


async def test_limits_are_checked_before_sending(sinks):
    producer = StreamProducer(sinks().receiver.endpoint, "w0", "run")
    with pytest.raises(ProtocolError, match="5000 frames"):
        await producer.push("a", 0, [b""] * 5000, timeout_s=60)
    with pytest.raises(ProtocolError, match="0 frames"):
        await producer.push("a", 0, [], timeout_s=60)
    await producer.push("a", 0, [b""], timeout_s=60)
    assert await producer.drain(60)
    await producer.close()
    with pytest.raises(StreamFailed, match="closed"):
        await producer.push("b", 0, [b""], timeout_s=60)


def hostile() -> list[list[bytes]]:
    good: dict[str, Any] = {"name": "w0", "base": 1, "seq": 1, "id": "a", "attempt": 0}

    def sample(**changes: Any) -> list[bytes]:
        return [pack_header("sample", "run", SESSION, **{**good, **changes}), b"x"]

    return [
        [b""],
        [b"\xc1\xff"],
        [bytes(2 << 20)],
        [packed({"v": 99})],
        [packed([1, 2])],
        [pack_header("feast", "run", SESSION, name="w0", base=1)],
        [pack_header("sample", "other", SESSION, **good), b"x"],
        [pack_header("sample", "run", b"short", **good), b"x"],
        [sample()[0]],
        [sample()[0], *[b""] * 5000],
        sample(name=""),
        sample(name="x" * 1000),
        sample(id=3),
        sample(id="x" * 1000),
        sample(attempt=-1),
        sample(attempt=True),
        sample(seq=0),
        sample(seq=1 << 60),
        sample(seq=1 << 40),
        sample(base=0),
        sample(base=2),
        sample(seq=None),
        [pack_header("bye", "run", SESSION)],
        [pack_probe("run", SESSION, "w0", base=5, sent=1)],
        [pack_ack("run", Ack(SESSION, SESSION, 0, 0, 0, 1))],
    ]


async def test_hostile_bytes_are_counted_and_harm_nobody(sinks):
    sink = sinks()
    messages = hostile()
    with zmq.Context() as context, context.socket(zmq.DEALER) as rogue:
        rogue.setsockopt(zmq.LINGER, 1000)
        rogue.connect(sink.receiver.endpoint)
        for frames in messages:
            rogue.send_multipart(frames)
        async with asyncio.timeout(60):
            while sink.receiver.dropped_messages < len(messages):
                await asyncio.sleep(0.005)
    producer = StreamProducer(sink.receiver.endpoint, "w0", "run")
    await producer.push("a", 0, [b"1"], timeout_s=60)
    assert await producer.drain(60)
    assert sink.names == [("a", 0)]
    assert sink.receiver.dropped_messages == len(messages)
    await producer.close()


async def test_hostile_acks_are_counted_and_a_receiver_gets_again_what_it_says_is_missing():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rogue:
        rogue.bind("tcp://127.0.0.1:0")
        producer = StreamProducer(rogue.getsockopt_string(zmq.LAST_ENDPOINT), "w0", "run")
        connection, probe = await asyncio.to_thread(rogue.recv_multipart)
        session = unpack_header(probe)["session"]

        def say(*frames: bytes) -> None:
            rogue.send_multipart([connection, *frames])

        say(pack_ack("run", Ack(session, SESSION, 0, 0, 0, 1)))
        await producer.push("a", 0, [b"1"], timeout_s=60)
        bad = [
            [b"\xc1"],
            [pack_ack("run", Ack(b"t" * 16, SESSION, 0, 0, 0, 1))],
            [pack_ack("other", Ack(session, SESSION, 0, 0, 0, 1))],
            [pack_ack("run", Ack(session, SESSION, 7, 7, 0, 1))],
            [pack_ack("run", Ack(session, SESSION, 0, 0, 0, 1)), b"more"],
            [pack_sample("run", SESSION, "w0", base=1, seq=1, sample=("a", 0))],
        ]
        for frames in bad:
            say(*frames)
        say(pack_ack("run", Ack(session, SESSION, 0, 0, 1 << 50, 1)))
        async with asyncio.timeout(60):
            while producer.dropped_messages < len(bad) or not producer.resent_messages:
                await asyncio.sleep(0.005)
        assert producer.dropped_messages == len(bad)
        assert producer.unacked == 1
        say(pack_ack("run", Ack(session, SESSION, 1, 1, 0, 1)))
        assert await producer.drain(60)
        await producer.close()


def launch(endpoint: str, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, endpoint, str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
async def test_a_killed_producer_loses_only_what_it_had_not_sent_and_may_return(sinks):
    sink = sinks(credits=4)
    killed = launch(sink.receiver.endpoint, 0, 100_000)
    try:
        await sink.until(20)
    finally:
        killed.kill()
    pushed = [int(line) for line in killed.communicate(timeout=300)[0].splitlines()]
    before = len(sink.messages)
    again = launch(sink.receiver.endpoint, 200_000, 30)
    lines = again.stdout
    assert lines is not None
    try:
        await sink.until(before + 30)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(lines.readline) != "done\n":
                pass
    finally:
        again.kill()
        again.communicate(timeout=300)
    old = [number for number, _ in sink.names if int(number[1:]) < 200_000]
    assert old == [f"s{number}" for number in range(len(old))], "each once, in order, none left out"
    assert len(pushed) - 4 <= len(old) <= len(pushed) + 1
    assert sink.names[-30:] == [(f"s{number}", 0) for number in range(200_000, 200_030)]
    assert len({message.session for message in sink.messages}) == 2


class FakeLossyNet:
    """Between producers and a receiver: forwards messages and acks, and loses some of both."""

    def __init__(self, target: str, *, loss: float, seed: int) -> None:
        self.random, self.loss, self.target = random.Random(seed), loss, target
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.bind("tcp://127.0.0.1:0")
        self.front_address = self.front.getsockopt_string(zmq.LAST_ENDPOINT)
        self.poller = zmq.Poller()
        self.poller.register(self.front, zmq.POLLIN)
        self.outs: dict[bytes, zmq.Socket[bytes]] = {}
        self.producers: dict[zmq.Socket[bytes], bytes] = {}
        self.stop = threading.Event()
        self.lost = 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def out(self, producer: bytes) -> zmq.Socket[bytes]:
        """The connection to the receiver that stands for this producer."""
        if producer not in self.outs:
            out = self.outs[producer] = self.context.socket(zmq.DEALER)
            out.connect(self.target)
            self.producers[out] = producer
            self.poller.register(out, zmq.POLLIN)
        return self.outs[producer]

    def run(self) -> None:
        while not self.stop.is_set():
            for socket, _ in self.poller.poll(20):
                frames = socket.recv_multipart()
                if socket is self.front:
                    to, frames = self.out(frames[0]), frames[1:]
                else:
                    to, frames = self.front, [self.producers[socket], *frames]
                if self.random.random() < self.loss:
                    self.lost += 1
                else:
                    to.send_multipart(frames)
        self.context.destroy(0)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)


@pytest.mark.parametrize("seed", range(3))
async def test_lost_messages_and_acks_lose_nothing_and_repeat_nothing(sinks, seed):
    sink = sinks(credits=5)
    net = FakeLossyNet(sink.receiver.endpoint, loss=0.1 + 0.1 * seed, seed=seed)
    try:
        producers = [StreamProducer(net.front_address, f"w{n}", "run", probe_s=0.01) for n in range(3)]

        async def work(number: int) -> None:
            for sample in range(25):
                await producers[number].push(f"{number}-{sample}", 0, [b"x"], timeout_s=60)
            assert await producers[number].drain(20)

        await asyncio.gather(*(work(number) for number in range(3)))
        assert net.lost
        assert sorted(sink.names) == sorted((f"{n}-{sample}", 0) for n in range(3) for sample in range(25))
        for producer in producers:
            await producer.close()
    finally:
        net.close()
