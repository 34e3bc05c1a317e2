"""The clients over a server that is killed and started again: every push counts once, every batch ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.trajectory.client import AsyncTrajectoryClient, LeaseLost, NoBatchYet
from tests.trajectory.crash_ledger import ServerProcess
from tests.trajectory.groups import group

pytestmark = pytest.mark.slow

GROUPS, KILLS, PRODUCERS = 48, 2, 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(f"sqlite:{tmp_path / 'store'}", tmp_path / "log")
    yield process
    process.stop()


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


async def test_a_killed_server_loses_and_doubles_nothing(server: ServerProcess):
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
            await asyncio.to_thread(server.kill_and_start)
        await asyncio.wait_for(asyncio.gather(*work), 300)
        assert sorted(got) == list(range(GROUPS))
        status = await trainer.status()
        assert status == {"current_step": GROUPS // 2, "queue_size": 0} and await trainer.leases() == []
