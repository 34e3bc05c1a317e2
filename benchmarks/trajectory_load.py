"""Load for a server that speaks the Trajectory Handler API: a small HTTP/1.1 client and groups to push.

The same client drives every server. Bodies are made before the clock starts, and responses are read but not parsed
while it runs, so the client stays cheap.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import random
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

ID = re.compile(rb'"bench_id":\s*(\d+)')


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request and its whole answer, still compressed."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        lines = [f"{method} {path} HTTP/1.1", "Host: bench"]
        if body:
            lines.append(f"Content-Length: {len(body)}")
            headers.setdefault("Content_Type", "application/json")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        if body:
            self._writer.write(body)
        await self._writer.drain()
        return await self._answer()

    async def _answer(self) -> Answer:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in pairs}
        if "content-length" in headers:
            body = await self._reader.readexactly(int(headers["content-length"]))
        else:
            parts = []
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                parts.append(await self._reader.readexactly(size))
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)
            body = b"".join(parts)
        return Answer(int(head[0].split()[1]), headers, body)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def group_prefix(rng: random.Random, sequences: int, tokens: int, env_id: int) -> bytes:
    """JSON of a group with masks and log-probabilities, open at its end for an id."""
    ids = [[rng.randrange(150_000) for _ in range(tokens)] for _ in range(sequences)]
    cut = tokens // 4
    value = {
        "tokens": ids, "masks": [[-100] * cut + row[cut:] for row in ids],
        "scores": [rng.choice((-1.0, 1.0)) for _ in range(sequences)],
        "inference_logprobs": [[1.0] * cut + [-rng.random() * 4 for _ in range(tokens - cut)] for _ in ids],
        "generation_params": {"temperature": 1.0}, "env_id": env_id,
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":"))[:-1].encode()


def with_id(prefix: bytes, number: int) -> bytes:
    return prefix + b',"group_overrides":{"bench_id":%d}}' % number


def bodies_of(groups: Sequence[bytes], per: int) -> list[bytes]:
    """One body for each group, or JSON arrays of several."""
    if per == 1:
        return list(groups)
    return [b"[" + b",".join(groups[start : start + per]) + b"]" for start in range(0, len(groups), per)]


async def set_up(port: int, *, envs: int, batch_size: int, group_size: int, tokens: int,
                 minimum: float | None = None) -> None:  # fmt: skip
    """Reset, register a trainer, let it ask once, register environments."""
    http = Http(port)
    await http.request("GET", "/reset_data")
    registration = {
        "wandb_group": "b", "wandb_project": "b", "batch_size": batch_size, "max_token_len": tokens + 1,
        "checkpoint_dir": "b", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**6,
    }  # fmt: skip
    await http.request("POST", "/register", json.dumps(registration).encode())
    await http.request("GET", "/batch")
    for number in range(envs):
        env = {"max_token_length": tokens, "desired_name": f"env{number}", "weight": 1.0, "group_size": group_size,
               "min_batch_allocation": minimum}  # fmt: skip
        answer = await http.request("POST", "/register-env", json.dumps(env).encode())
        assert answer.json()["status"] == "success", answer
    http.close()


async def push(port: int, path: str, bodies: Sequence[bytes], clients: int, **headers: str) -> float:
    """Push all bodies over so many connections; returns seconds. 503 is honoured and tried again."""
    waiting = deque(bodies)

    async def client() -> None:
        http = Http(port)
        while waiting:
            body = waiting.popleft()
            while (answer := await http.request("POST", path, body, **headers)).status == 503:
                await asyncio.sleep(float(answer.headers.get("retry-after", 0.05)))
            assert answer.status == 200, answer
        http.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - began


@dataclass
class Pulled:
    """What a drain saw. Latencies in seconds."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wire_bytes: int = 0
    ids: Counter[bytes] = field(default_factory=Counter)


async def drain(port: int, **headers: str) -> Pulled:
    """Pull until there is nothing twice in a row; ids are counted when the clock has stopped."""
    http, pulled, bodies, nulls = Http(port), Pulled(), [], 0
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
        body = gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body
        pulled.ids.update(ID.findall(body))
    return pulled


class Prober:
    """A process of its own that asks cheap questions all the time and notes how long each waits."""

    def __init__(self, port: int, paths: Sequence[str], every_s: float = 0.01) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_probe, args=(theirs, port, list(paths), every_s), daemon=True)  # fmt: skip
        self._process.start()
        assert self._ours.poll(30), "the prober does not come up"
        self._ours.recv()

    def stop(self) -> dict[str, list[float]]:
        """Latencies in seconds by path."""
        self._ours.send("stop")
        assert self._ours.poll(600), "the prober does not answer"
        found = self._ours.recv()
        self._process.join(10)
        return found


def _probe(pipe: Connection, port: int, paths: list[str], every_s: float) -> None:
    asyncio.run(_probing(pipe, port, paths, every_s))


async def _probing(pipe: Connection, port: int, paths: list[str], every_s: float) -> None:
    found: dict[str, list[float]] = {path: [] for path in paths}

    async def ask(path: str) -> None:
        http = Http(port)
        body = b'{"env_id":0}' if path == "/status-env" else b""
        while not done.is_set():
            asked = time.perf_counter()
            await http.request("GET", path, body)
            found[path].append(time.perf_counter() - asked)
            await asyncio.sleep(every_s)

    done = asyncio.Event()
    asking = [asyncio.create_task(ask(path)) for path in paths]
    pipe.send("ready")
    while not pipe.poll():
        await asyncio.sleep(0.005)
    done.set()
    await asyncio.gather(*asking)
    pipe.send(found)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed; nan of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] if ordered else float("nan")
