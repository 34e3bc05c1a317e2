"""The push stream: credits, acks, broken connections, restarts, garbage, several receivers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import zmq

from realhf.transport.envelope import pack_header
from realhf.transport.errors import ProtocolError
from realhf.transport.network import LOOPBACK, Network
from realhf.transport.push_stream import StreamFailed, StreamMessage, StreamProducer, StreamReceiver
from tests.transport.fixed_port import At

SCRIPT = str(Path(__file__).with_name("push_process.py"))


class Sink:
    """Keeps what a receiver delivers; acks at once when ``ack`` is set."""

    def __init__(self, *, credits: int = 8, ack: bool = True, network: Network = LOOPBACK) -> None:
        self.messages: list[StreamMessage] = []
        self.ack = ack
        self.receiver = StreamReceiver("run", self.deliver, credits=credits, network=network)

    def deliver(self, batch: list[StreamMessage]) -> None:
        self.messages += batch
        if self.ack:
            self.receiver.ack(batch)

    def release(self) -> None:
        self.ack = True
        self.receiver.ack(self.messages)

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


@pytest.fixture
async def producer_of():
    made: list[StreamProducer] = []

    def make(*receivers: Sink | str, name: str = "w0") -> StreamProducer:
        endpoints = [
            each if isinstance(each, str) else each.receiver.endpoint for each in receivers
        ]
        made.append(StreamProducer(endpoints, name, "run"))
        return made[-1]

    yield make
    for producer in made:
        producer.close()


async def all_give_credit(producer: StreamProducer) -> None:
    async with asyncio.timeout(60):
        while not all(link.open < link.granted for link in producer.links):
            await asyncio.sleep(0.001)


async def test_samples_arrive_in_order_with_their_frames(sinks, producer_of):
    sink = sinks()
    producer = producer_of(sink)
    for number in range(100):
        await producer.push(
            f"s{number}", number % 3, [bytes([number]), memoryview(b"x" * 100_000)], timeout_s=60
        )
    assert await producer.drain(60)
    assert producer.unacked == 0
    assert sink.names == [(f"s{number}", number % 3) for number in range(100)]
    assert all(bytes(m.frames[0]) == bytes([n]) for n, m in enumerate(sink.messages))
    assert all(bytes(m.frames[1]) == b"x" * 100_000 for m in sink.messages)
    assert {m.producer for m in sink.messages} == {"w0"}
    assert sink.receiver.dropped_messages == 0


async def test_without_a_credit_nothing_is_sent(sinks, producer_of):
    sink = sinks(credits=2, ack=False)
    producer = producer_of(sink)
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    assert producer.unacked == 2
    with pytest.raises(
        TimeoutError, match=rf"{sink.receiver.endpoint} gave 'w0' no credit .*2 samples"
    ):
        await producer.push("c", 0, [b"1"], timeout_s=0.05)
    waiting = [asyncio.ensure_future(producer.push(name, 0, [b"1"], timeout_s=60)) for name in "cd"]
    await sink.until(2)
    assert not any(push.done() for push in waiting)
    sink.receiver.ack(sink.messages[1:])
    await waiting[0]
    await sink.until(3)
    assert sink.names == [("a", 0), ("b", 0), ("c", 0)] and not waiting[1].done()
    producer.close()
    with pytest.raises(StreamFailed, match="closed"):
        await waiting[1]


async def test_a_cancelled_push_leaves_its_credit_to_the_next(sinks, producer_of):
    sink = sinks(credits=1, ack=False)
    producer = producer_of(sink)
    await producer.push("a", 0, [b"1"], timeout_s=60)
    waiting = [
        asyncio.ensure_future(producer.push(name, 0, [b"1"], timeout_s=60)) for name in "bcd"
    ]
    await sink.until(1)
    waiting[0].cancel()
    sink.release()
    await asyncio.gather(*waiting[1:])
    assert await producer.drain(60)
    assert sink.names == [("a", 0), ("c", 0), ("d", 0)]


async def test_a_receiver_that_comes_back_gets_what_was_not_acked(sinks, producer_of):
    first = sinks(ack=False)
    producer = producer_of(first)
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
    second = sinks(network=At(endpoint=first.receiver.endpoint))
    assert await producer.drain(60)
    assert second.names == [(f"s{number}", 0) for number in range(2, 6)]


async def test_an_open_sample_that_is_sent_again_is_delivered_once_and_acked_on_the_last_connection(
    sinks,
):
    sink = sinks(ack=False)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for number in range(5):
            connection = stack.enter_context(context.socket(zmq.DEALER))
            connection.connect(sink.receiver.endpoint)
            connection.send_multipart(request(b"x"))
            connection.send_multipart(request(method="credits"))
            assert len(await asyncio.to_thread(connection.recv_multipart)) == 2, (
                f"connection {number} is served"
            )
        assert sink.names == [("a", 0)], "what comes again waits nowhere"
        sink.release()
        assert (await asyncio.to_thread(connection.recv_multipart))[1] == b"\xc0"
        connection.send_multipart(request(b"x"))
        await sink.until(2)
        assert sink.names == [("a", 0)] * 2, "after its ack it counts as another one"
        assert (await asyncio.to_thread(connection.recv_multipart))[1] == b"\xc0"


async def test_a_failing_delivery_surfaces(producer_of):
    broken = StreamReceiver("run", lambda batch: {}[batch[0].id], credits=4)
    producer = producer_of(broken.endpoint)
    await producer.push("precious", 0, [b"1"], timeout_s=60)
    while broken.failure is None:
        await asyncio.sleep(0.005)
    assert isinstance(broken.failure, KeyError)
    with pytest.raises(StreamFailed, match="precious"):
        broken.check()
    assert producer.unacked == 1
    broken.close()


async def test_limits_are_checked_before_sending(sinks, producer_of):
    producer = producer_of(sinks())
    with pytest.raises(ProtocolError, match="5000 frames"):
        await producer.push("a", 0, [b""] * 5000, timeout_s=60)
    with pytest.raises(ProtocolError, match="0 frames"):
        await producer.push("a", 0, [], timeout_s=60)
    await producer.push("a", 0, [b""], timeout_s=60)
    assert await producer.drain(60)
    producer.close()
    with pytest.raises(StreamFailed, match="closed"):
        await producer.push("b", 0, [b""], timeout_s=60)


async def test_a_producer_of_another_run_is_told_so(sinks):
    producer = StreamProducer([sinks().receiver.endpoint], "w0", "other")
    with pytest.raises(StreamFailed, match="this is run 'run', the request is of run 'other'"):
        await producer.push("a", 0, [b""], timeout_s=60)
    producer.close()


def request(
    *frames: bytes, method: str = "push", client: Any = "w0", run: str = "run", **fields: Any
) -> list[bytes]:
    about = {"sample": "a", "attempt": 0, **fields}
    return [pack_header("request", run, b"", id=7, method=method, client=client, **about), *frames]


NO_MESSAGES = [
    [b""],
    [b"\xc1\xff"],
    [bytes(2 << 20)],
    [cast(bytes, msgpack.packb({"v": 99}))],
    [cast(bytes, msgpack.packb([1, 2]))],
    [pack_header("request", "run", b"", method="push", client="w0"), b"x"],
    request(b"x", client=3),
]
NO_SAMPLES = [
    request(b"x", method="feast"),
    request(b"x", run="other"),
    request(),
    request(*[b""] * 5000),
    request(b"x", client=""),
    request(b"x", client="x" * 1000),
    request(b"x", sample=3),
    request(b"x", sample="x" * 1000),
    request(b"x", attempt=-1),
    request(b"x", attempt=True),
    request(b"x", attempt=None),
]


async def test_hostile_bytes_are_counted_or_answered_and_harm_nobody(sinks, producer_of):
    sink = sinks()
    with zmq.Context() as context, context.socket(zmq.DEALER) as rogue:
        rogue.setsockopt(zmq.LINGER, 1000)
        rogue.connect(sink.receiver.endpoint)
        for frames in NO_MESSAGES + NO_SAMPLES:
            rogue.send_multipart(frames)
        answers = [await asyncio.to_thread(rogue.recv_multipart) for _ in NO_SAMPLES]
    assert all(b"ProtocolError" in payload for _, payload in answers)
    producer = producer_of(sink)
    await producer.push("a", 0, [b"1"], timeout_s=60)
    assert await producer.drain(60)
    assert sink.names == [("a", 0)]
    assert sink.receiver.dropped_messages == len(NO_MESSAGES)


async def test_every_sample_goes_to_one_receiver_and_their_bytes_are_about_equal(
    sinks, producer_of
):
    three = [sinks() for _ in range(3)]
    producer = producer_of(*three)
    sizes = {}
    rng = random.Random(5)
    for number in range(120):
        sizes[f"s{number}"] = rng.randint(1, 20_000)
        await all_give_credit(producer)
        await producer.push(f"s{number}", number % 2, [bytes(sizes[f"s{number}"])], timeout_s=60)
    assert await producer.drain(60) and producer.unacked == 0
    assert sorted(name for sink in three for name in sink.names) == sorted(
        (f"s{n}", n % 2) for n in range(120)
    )
    loads = [sum(sizes[name] for name, _ in sink.names) for sink in three]
    assert (
        loads == [link.sent_bytes for link in producer.links] and max(loads) - min(loads) <= 20_000
    )


async def test_a_receiver_without_credit_is_passed_over(sinks, producer_of):
    slow = sinks(credits=2, ack=False)
    quick = sinks()
    producer = producer_of(slow, quick)
    await all_give_credit(producer)
    for number in range(20):
        await producer.push(f"s{number}", 0, [b"1"], timeout_s=60)
    await quick.until(18)
    assert len(slow.names) == 2 and producer.unacked >= 2
    slow.release()
    assert await producer.drain(60)


async def test_who_waits_gets_the_first_credit_of_any_in_turn(sinks, producer_of):
    one = sinks(credits=1, ack=False)
    other = sinks(credits=1, ack=False)
    producer = producer_of(one, other)
    for name in "ab":
        await producer.push(name, 0, [b"1"], timeout_s=60)
    await one.until(1)
    await other.until(1)
    with pytest.raises(TimeoutError) as caught:
        await producer.push("late", 0, [b"1"], timeout_s=0.05)
    assert all(sink.receiver.endpoint in str(caught.value) for sink in (one, other))
    waiting = [
        asyncio.ensure_future(producer.push(name, 0, [b"1"], timeout_s=60)) for name in "cde"
    ]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    other.release()
    await asyncio.gather(*waiting[1:])
    one.release()
    assert await producer.drain(60)
    assert other.names[1:] == [("d", 0), ("e", 0)]


async def test_producers_begin_with_different_receivers(sinks, producer_of):
    two = [sinks() for _ in range(2)]
    for number in range(12):
        producer = producer_of(*two, name=f"rollout_worker/{number}:{100 + number}")
        await all_give_credit(producer)
        await producer.push(f"s{number}", 0, [b"1"], timeout_s=60)
        assert await producer.drain(60)
    assert all(sink.names for sink in two)


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


class FakeBreakingNet:
    """Between producers and a receiver: forwards bytes, and ends each connection after some of
    them."""

    def __init__(self, target: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.breaks = 0
        host, port = target.removeprefix("tcp://").split(":")
        self.target = (host, int(port))
        self.front = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.front.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.front.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            for pair in ((near, far), (far, near)):
                left = self.random.randint(300, 3000)
                self.threads.append(threading.Thread(target=self.forward, args=(*pair, left)))
                self.threads[-1].start()

    def forward(self, source: socket.socket, sink: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 100))):
                sink.sendall(data)
                left -= len(data)
            self.breaks += left <= 0
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.front.shutdown(socket.SHUT_RDWR)
        self.front.close()
        for thread in self.threads:
            thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_broken_connections_lose_nothing(sinks, seed):
    sink = sinks(credits=5)
    net = FakeBreakingNet(sink.receiver.endpoint, seed)
    producers = [StreamProducer([net.endpoint], f"w{n}", "run") for n in range(3)]

    async def work(number: int) -> None:
        for sample in range(25):
            await producers[number].push(f"{number}-{sample}", 0, [b"x" * 40], timeout_s=60)
        assert await producers[number].drain(60)

    try:
        await asyncio.gather(*(work(number) for number in range(3)))
        assert net.breaks > 3
        assert set(sink.names) == {(f"{n}-{sample}", 0) for n in range(3) for sample in range(25)}
    finally:
        for producer in producers:
            producer.close()
        net.close()
