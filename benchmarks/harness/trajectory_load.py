"""Load generator for a server with the Trajectory Handler API: a small HTTP/1.1 client and groups
of rollouts to push.

All servers are measured with the same client. Request bodies are built before the clock starts, and
responses are read but not parsed while it runs, so that the client costs little.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import random
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

ID = re.compile(rb'"bench_id":\s*(\d+)')


@dataclass
class Answer:
    """Response to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as decoded JSON."""
        return json.loads(self.body)


class Http:
    """HTTP client on one keep-alive connection. It uses a plain socket and a reused buffer, so that
    a body is copied only once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._buffer = bytearray(1 << 16)
        self._filled = 0

    async def request(self, method: str, path: str, body: bytes = b"", **headers: Any) -> Answer:
        """Send one request and return the complete response with the body still compressed. Raises
        ConnectionError."""
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = socket.socket()
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        lines = [f"{method} {path} HTTP/1.1", "Host: bench"]
        if body:
            lines.append(f"Content-Length: {len(body)}")
            headers.setdefault("Content_Type", "application/json")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await loop.sock_sendall(self._socket, "\r\n".join(lines).encode() + b"\r\n\r\n")
        if body:
            await loop.sock_sendall(self._socket, body)
        return await self._answer()

    async def _answer(self) -> Answer:
        end = await self._until(b"\r\n\r\n", 0)
        head = self._buffer[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        if "content-length" in headers:
            last = end + int(headers["content-length"])
            await self._at_least(last)
            body = bytes(memoryview(self._buffer)[end:last])
        else:
            body, last = await self._chunks(end)
        assert last == self._filled, "more than the answer came"
        self._filled = 0
        return Answer(int(head[0].split()[1]), headers, body)

    async def _chunks(self, position: int) -> tuple[bytes, int]:
        """Return (chunked body that starts at ``position``, position of its end)."""
        spans = []
        while True:
            start = await self._until(b"\r\n", position)
            size = int(self._buffer[position : start - 2], 16)
            position = start + size + 2
            await self._at_least(position)
            if not size:
                view = memoryview(self._buffer)
                return b"".join([view[first:last] for first, last in spans]), position
            spans.append((start, start + size))

    async def _until(self, mark: bytes, start: int) -> int:
        """Return the position after the next ``mark`` at or after ``start``, receiving data until
        it arrives."""
        while (found := self._buffer.find(mark, start, self._filled)) < 0:
            await self._at_least(self._filled + 1)
        return found + len(mark)

    async def _at_least(self, size: int) -> None:
        assert self._socket is not None
        if size > len(self._buffer):
            self._buffer += bytes(max(size, 2 * len(self._buffer)) - len(self._buffer))
        view = memoryview(self._buffer)
        while self._filled < size:
            received = await asyncio.get_running_loop().sock_recv_into(
                self._socket, view[self._filled :]
            )
            if not received:
                raise ConnectionError("the server closed the connection")
            self._filled += received

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def group_prefix(rng: random.Random, sequences: int, tokens: int, env_id: int) -> bytes:
    """Return the JSON of a group with masks and log-probabilities, without the closing brace, so
    that an id can be added."""
    ids = [[rng.randrange(150_000) for _ in range(tokens)] for _ in range(sequences)]
    cut = tokens // 4
    value = {
        "tokens": ids,
        "masks": [[-100] * cut + row[cut:] for row in ids],
        "scores": [rng.choice((-1.0, 1.0)) for _ in range(sequences)],
        "inference_logprobs": [
            [1.0] * cut + [-rng.random() * 4 for _ in range(tokens - cut)] for _ in ids
        ],
        "generation_params": {"temperature": 1.0},
        "env_id": env_id,
    }
    return json.dumps(value, separators=(",", ":"))[:-1].encode()


def with_id(prefix: bytes, number: int) -> bytes:
    """Return the complete body of a group with this number as its id."""
    return prefix + b',"group_overrides":{"bench_id":%d}}' % number


def bodies_of(groups: Sequence[bytes], per: int) -> list[bytes]:
    """Return request bodies of ``per`` groups each: a single group, or a JSON array of several."""
    if per == 1:
        return list(groups)
    return [
        b"[" + b",".join(groups[start : start + per]) + b"]" for start in range(0, len(groups), per)
    ]


async def set_up(
    port: int,
    *,
    envs: int,
    batch_size: int,
    group_size: int,
    tokens: int,
    minimum: float | None = None,
) -> None:
    """Reset the server, register a trainer that requests a batch, and register environments."""
    http = Http(port)
    await http.request("GET", "/reset_data")
    registration = {
        "wandb_group": "b",
        "wandb_project": "b",
        "batch_size": batch_size,
        "max_token_len": tokens + 1,
        "checkpoint_dir": "b",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10**6,
    }
    await http.request("POST", "/register", json.dumps(registration).encode())
    await http.request("GET", "/batch")
    for number in range(envs):
        env = {
            "max_token_length": tokens,
            "desired_name": f"env{number}",
            "weight": 1.0,
            "group_size": group_size,
            "min_batch_allocation": minimum,
        }
        answer = await http.request("POST", "/register-env", json.dumps(env).encode())
        assert answer.json()["status"] == "success", answer
    http.close()


@dataclass
class Pushed:
    """Measurements of a push phase. ``latencies``: in seconds. ``refused``: number of 503
    responses; the request is repeated after the time that the server asks for."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    refused: int = 0


async def push(
    port: int, path: str, bodies: Sequence[bytes], clients: int, **headers: Any
) -> Pushed:
    """Push all bodies over ``clients`` connections and return the measurements."""
    waiting, pushed = deque(bodies), Pushed()

    async def client() -> None:
        http = Http(port)
        while waiting:
            body = waiting.popleft()
            asked = time.perf_counter()
            while (answer := await http.request("POST", path, body, **headers)).status == 503:
                pushed.refused += 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 0.05)))
            assert answer.status == 200, answer
            pushed.latencies.append(time.perf_counter() - asked)
        http.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    pushed.seconds = time.perf_counter() - began
    return pushed


@dataclass
class Pulled:
    """Measurements of a pull phase. ``latencies``: in seconds. ``ids``: how often each group was
    received."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wire_bytes: int = 0
    ids: Counter[bytes] = field(default_factory=Counter)


async def drain(port: int, **headers: Any) -> Pulled:
    """Pull batches until the server has returned none twice in a row. Group ids are counted after
    the clock has stopped."""
    http = Http(port)
    pulled = Pulled()
    bodies = []
    nulls = 0
    began = time.perf_counter()
    while nulls < 2:
        asked = time.perf_counter()
        answer = await http.request("GET", "/batch", **headers)
        now = time.perf_counter()
        if len(answer.body) < 64:
            nulls += 1
            continue
        pulled.latencies.append(now - asked)
        pulled.seconds = now - began
        bodies.append(answer)
    http.close()
    for answer in bodies:
        pulled.wire_bytes += len(answer.body)
        body = (
            gzip.decompress(answer.body)
            if answer.headers.get("content-encoding") == "gzip"
            else answer.body
        )
        pulled.ids.update(ID.findall(body))
    return pulled


class Prober:
    """Process that sends cheap requests all the time and records their latencies. Under ``"clock"``
    it records how late its own timer was, which is the delay that other load on the machine adds to
    every latency."""

    def __init__(self, port: int, paths: Sequence[str], every_s: float = 0.01) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_probe, args=(theirs, port, list(paths), every_s), daemon=True
        )
        self._process.start()
        assert self._ours.poll(30), "the prober does not come up"
        self._ours.recv()

    def stop(self) -> dict[str, list[float]]:
        """Stop the process and return the latencies in seconds, by path."""
        self._ours.send("stop")
        assert self._ours.poll(600), "the prober does not answer"
        found = self._ours.recv()
        self._process.join(10)
        return found


def _probe(pipe: Connection, port: int, paths: list[str], every_s: float) -> None:
    asyncio.run(_probing(pipe, port, paths, every_s))


async def _probing(pipe: Connection, port: int, paths: list[str], every_s: float) -> None:
    found: dict[str, list[float]] = {path: [] for path in (*paths, "clock")}
    done = asyncio.Event()

    async def ask(path: str) -> None:
        http = Http(port)
        body = b'{"env_id":0}' if path == "/status-env" else b""
        while not done.is_set():
            asked = time.perf_counter()
            await http.request("GET", path, body)
            found[path].append(time.perf_counter() - asked)
            await asyncio.sleep(every_s)

    async def watch_clock() -> None:
        while not done.is_set():
            asked = time.perf_counter()
            await asyncio.sleep(every_s)
            found["clock"].append(time.perf_counter() - asked - every_s)

    working = [asyncio.create_task(work) for work in (*map(ask, paths), watch_clock())]
    pipe.send("ready")
    while not pipe.poll():
        await asyncio.sleep(0.005)
    done.set()
    await asyncio.gather(*working)
    pipe.send(found)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a fraction ``share`` of the values does not exceed; NaN if there are no
    values."""
    ordered = sorted(values)
    return (
        ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
        if ordered
        else float("nan")
    )
