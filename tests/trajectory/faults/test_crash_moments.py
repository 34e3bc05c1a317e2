"""A server killed around the single moments of a batch and of a push of several groups.

Source: docs/reference/trajectory.md 5.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from realhf.trajectory.client import AsyncTrajectoryClient, LeaseLost, NoBatchYet
from tests.trajectory.conftest import REGISTRATION
from tests.trajectory.crash_ledger import ServerProcess
from tests.trajectory.groups import group

pytestmark = pytest.mark.slow

KILLS = 5
LIST = 3
BATCH = 8
HEADERS = {"X-Trainer-Id": "me"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(f"sqlite:{tmp_path / 'data'}", tmp_path / "log")
    httpx.post(process.url + "/register", json=REGISTRATION | {"batch_size": BATCH})
    assert httpx.get(process.url + "/batch", headers=HEADERS).json() == {"batch": None}
    yield process
    process.stop()


def pushed(server: ServerProcess, first: int, count: int, tokens: int = 16) -> None:
    items = [
        group(4, tokens, seed=number, group_overrides={"id": number})
        for number in range(first, first + count)
    ]
    answer = httpx.post(server.url + "/scored_data_list", json=items, timeout=300)
    assert answer.json() == {"status": "received", "groups_processed": count}


def pull(server: ServerProcess, trainer: str = "me") -> tuple[int, list[int]]:
    """Step and ids of a batch; no ids where there is none."""
    answer = httpx.get(server.url + "/batch", headers={"X-Trainer-Id": trainer}, timeout=300)
    batch = answer.json()["batch"]
    if batch is None:
        return -1, []
    return int(answer.headers["x-batch-step"]), [item["group_overrides"]["id"] for item in batch]


def kill_and_start(server: ServerProcess) -> None:
    server.kill()
    server.start()


@pytest.mark.nightly
def test_killed_in_the_middle_of_a_response(server):
    pushed(server, 0, 2, tokens=150_000)
    pushed(server, 2, 2)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"GET /batch HTTP/1.1\r\nHost: x\r\nX-Trainer-Id: me\r\nAccept-Encoding: "
            b"identity\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(0.3)
        kill_and_start(server)
    assert pull(server) == (0, [0, 1]), "the same batch, and the same step"
    assert pull(server) == (1, [2, 3])
    assert pull(server) == (-1, [])


@pytest.mark.nightly
def test_killed_when_it_knows_that_a_batch_was_sent(server):
    pushed(server, 0, 4)
    assert pull(server) == (0, [0, 1])
    deadline = time.monotonic() + 60
    while [lease["state"] for lease in httpx.get(server.url + "/leases").json()["leases"]] != [
        "sent"
    ]:
        assert time.monotonic() < deadline, "it never learns that the batch was sent"
    kill_and_start(server)
    assert pull(server, "another") == (1, [2, 3]), "the first one stays with its trainer"
    assert pull(server) == (-1, [])


@dataclass
class Asked:
    """What came of requests that run into a kill."""

    batch: httpx.Response | None = None
    push: httpx.Response | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def add(self, name: str, **request: Any) -> None:
        client = httpx.Client(timeout=300, verify=False)
        self.threads.append(threading.Thread(target=self._ask, args=(name, client, request)))

    def go(self) -> None:
        for thread in self.threads:
            thread.start()

    def _ask(self, name: str, client: httpx.Client, request: dict[str, Any]) -> None:
        with client, suppress(httpx.TransportError):
            setattr(self, name, client.request(**request))


@pytest.mark.nightly
def test_killed_around_a_batch_and_a_push(server):
    """A batch that arrived is never given to another trainer and never again after the next pull;
    one that did not arrive comes again; a list of groups is there whole or not at all."""
    rng = random.Random(3)
    lists = {n: [n * LIST + i for i in range(LIST)] for n in range(KILLS + 1)}
    bodies = {
        n: json.dumps([group(4, 64, seed=i, group_overrides={"id": i}) for i in ids])
        for n, ids in lists.items()
    }
    certain = {0}
    assert httpx.post(server.url + "/scored_data_list", content=bodies[0]).status_code == 200
    received: dict[int, list[int]] = {}
    for round_ in range(1, KILLS + 1):
        asked = Asked()
        asked.add(
            "push", method="POST", url=server.url + "/scored_data_list", content=bodies[round_]
        )
        asked.add("batch", method="GET", url=server.url + "/batch", headers=HEADERS)
        asked.go()
        time.sleep(rng.uniform(0, 0.012))
        kill_and_start(server)
        for thread in asked.threads:
            thread.join(60)
        if asked.push is not None:
            assert asked.push.status_code == 200
            certain.add(round_)
        if asked.batch is not None and asked.batch.json()["batch"]:
            _receive(
                received,
                int(asked.batch.headers["x-batch-step"]),
                [item["group_overrides"]["id"] for item in asked.batch.json()["batch"]],
            )
    while (batch := pull(server)) != (-1, []):
        _receive(received, *batch)
    pushed(server, 10_000, 1)  # an odd group may be left: with one more it fills a batch
    while (batch := pull(server)) != (-1, []):
        _receive(received, *batch)
    seen = [number for ids in received.values() for number in ids if number < 10_000]
    assert len(seen) == len(set(seen)), "no group belongs to two batches"
    assert sorted(received) == list(range(len(received))), "steps have no gap"
    for number, ids in lists.items():
        there = set(ids) & set(seen)
        assert there in (set(), set(ids)), f"list {number} is there in part"
        assert there or number not in certain, f"list {number} was acknowledged and is lost"


def _receive(received: dict[int, list[int]], step: int, ids: list[int]) -> None:
    assert received.setdefault(step, ids) == ids, f"step {step} has two contents"


@pytest.mark.nightly
def test_killed_during_an_acknowledgement(server):
    rng = random.Random(4)
    pushed(server, 0, 8)
    for step in range(4):
        answer = httpx.get(server.url + "/batch", headers=HEADERS | {"X-Ack-Mode": "explicit"})
        assert int(answer.headers["x-batch-step"]) == step
        body = json.dumps({"lease_id": answer.headers["x-lease-id"]}).encode()
        asked = Asked()
        asked.add("push", method="POST", url=server.url + "/batch/ack", content=body)
        asked.go()
        time.sleep(rng.uniform(0, 0.006))
        kill_and_start(server)
        asked.threads[0].join(60)
        leases = {lease["lease_id"] for lease in httpx.get(server.url + "/leases").json()["leases"]}
        if asked.push is not None:
            assert asked.push.status_code == 200
            assert answer.headers["x-lease-id"] not in leases, "what was acknowledged is gone"
        assert httpx.post(server.url + "/batch/ack", content=body).status_code == 200, (
            "once more does no harm"
        )
    assert pull(server) == (-1, [])
    assert httpx.get(server.url + "/status").json() == {"current_step": 4, "queue_size": 0}


CLIENT_GROUPS = 48


async def drain(client: AsyncTrajectoryClient, got: list[int]) -> None:
    """Pull and acknowledge until all have come; a batch counts when its acknowledgement does."""
    while len(got) < CLIENT_GROUPS:
        batch = await client.pull(60)
        await asyncio.sleep(0.02)
        try:
            await client.ack(batch.lease_id)
        except LeaseLost:
            continue
        got += [item["group_overrides"]["number"] for item in batch.groups]


@pytest.mark.nightly
async def test_our_clients_lose_and_double_nothing(server):
    """Every push counts once, every batch ends once."""
    options: dict[str, Any] = {"retry_for_s": 60.0}
    numbers = iter(range(CLIENT_GROUPS))
    got = []
    async with AsyncTrajectoryClient(
        server.url, **options, explicit_acks=True, trainer_id="me"
    ) as trainer:
        await trainer.register(batch_size=4, max_token_len=64, num_steps=99)
        with pytest.raises(NoBatchYet):
            await trainer.pull(0)

        async def produce(name: str) -> None:
            async with AsyncTrajectoryClient(server.url, **options) as client:
                await client.register_env(name, group_size=2, max_token_length=64, wait_s=60)
                for number in numbers:
                    await client.push(
                        group(2, 50, seed=number) | {"group_overrides": {"number": number}}
                    )
                    await asyncio.sleep(0.05)

        work = [asyncio.create_task(produce(f"env{index}")) for index in range(4)]
        work.append(asyncio.create_task(drain(trainer, got)))
        for _ in range(2):
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.kill_and_start)
        await asyncio.wait_for(asyncio.gather(*work), 300)
        assert sorted(got) == list(range(CLIENT_GROUPS))
        status = await trainer.status()
        assert (
            status == {"current_step": CLIENT_GROUPS // 2, "queue_size": 0}
            and await trainer.leases() == []
        )
