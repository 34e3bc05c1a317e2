"""The clients over a server that is killed and started again: every push counts once, every batch ends once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.base.loopback import free_port
from realhf.trajectory.client import AsyncTrajectoryClient, LeaseLost, NoBatchYet
from tests.trajectory.groups import group

pytestmark = pytest.mark.slow

GROUPS, KILLS, PRODUCERS = 48, 2, 4


class KillableServer:
    """``python -m realhf.trajectory`` over a folder, on one port."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "realhf.trajectory",
            "--port",
            str(self._port),
            "--store",
            f"sqlite:{self._folder}",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KillableServer]:
    killable = KillableServer(tmp_path / "store")
    killable.start()
    yield killable
    killable.kill()


async def drain(client: AsyncTrajectoryClient, got: list[int]) -> None:
    """Pull and acknowledge until all have come; a batch counts when its acknowledgement does."""
    while len(got) < GROUPS:
        batch = await client.pull(60)
        await asyncio.sleep(0.02)
        try:
            await client.ack(batch.lease_id)
        except LeaseLost:
            continue
        got += [item["group_overrides"]["number"] for item in batch.groups]


async def test_a_killed_server_loses_and_doubles_nothing(server: KillableServer):
    options: dict[str, Any] = {"retry_for_s": 60.0}
    numbers, got = iter(range(GROUPS)), []
    async with AsyncTrajectoryClient(server.url, **options, explicit_acks=True, trainer_id="me") as trainer:
        await trainer.register(batch_size=4, max_token_len=64, num_steps=99)
        with pytest.raises(NoBatchYet):
            await trainer.pull(0)

        async def produce(name: str) -> None:
            async with AsyncTrajectoryClient(server.url, **options) as client:
                await client.register_env(name, group_size=2, max_token_length=64, wait_s=60)
                for number in numbers:
                    await client.push(group(2, 50, seed=number) | {"group_overrides": {"number": number}})
                    await asyncio.sleep(0.05)

        work = [asyncio.create_task(produce(f"env{index}")) for index in range(PRODUCERS)]
        work.append(asyncio.create_task(drain(trainer, got)))
        for _ in range(KILLS):
            await asyncio.sleep(0.3)
            server.kill()
            server.start()
        await asyncio.wait_for(asyncio.gather(*work), 300)
        assert sorted(got) == list(range(GROUPS))
        status = await trainer.status()
        assert status == {"current_step": GROUPS // 2, "queue_size": 0} and await trainer.leases() == []
