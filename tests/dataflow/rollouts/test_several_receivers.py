"""Exactly once over several receivers: the real receivers, logs, service and journal, in one
process. What dies takes all of it with it, as a lost rank does, and another number of ranks goes
on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from realhf.api.calls import Arrival
from realhf.api.sample import SequenceSample
from realhf.data.stream_dataset import StreamHost
from realhf.dataflow.journal.audit import audit_folder
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts
from realhf.dataflow.rollouts.stream_loader import split_by_bytes
from realhf.transport.codec import encode_sample
from realhf.transport.push_stream import StreamFailed, StreamProducer
from realhf.transport.tensor_store import TensorStore
from tests.dataflow.rollouts.toy_streamed_run import CountingSource, plan_of

KEY = "packed_input_ids"
PLAYER = "rollout_worker/0:1"
TOTAL = 24
LIVES = 6


class Crash(Exception):
    """A model worker dies while it talks to the master."""


class Ranks:
    """Model workers that only receive; the master calls them through ``call``. One report in five
    is answered and the answer lost; at one in seven a worker dies, before or after the master hears
    of it, if it is ``mortal``."""

    def __init__(self, folder: Path, count: int, random: Random, *, mortal: bool) -> None:
        self.names = [f"model_worker/{rank}" for rank in range(count)]
        self.stores = {name: TensorStore(name) for name in self.names}
        self.hosts = {
            name: StreamHost("run", name, folder, self.stores[name]) for name in self.names
        }
        self.roster: dict[str, Any] = {}
        self._random, self._mortal, self._threads = random, mortal, ThreadPoolExecutor(count)
        for host in self.hosts.values():
            host._notify = self._troubled(host._notify)

    def call(
        self, worker: str, handler: str, payload: Any = None, **options: Any
    ) -> asyncio.Future[Any]:
        del options
        handle = self.hosts[worker].handlers()[handler]
        return asyncio.get_running_loop().run_in_executor(self._threads, handle, payload)

    def _troubled(self, notify: Any) -> Any:
        def told(arrivals: Sequence[Arrival]) -> Sequence[str]:
            fate = self._random.random()
            if fate < 0.07 and self._mortal:
                raise Crash("before the master knew")
            answers = notify(arrivals)
            if fate < 0.14 and self._mortal:
                raise Crash("after the master knew")
            if fate > 0.8:
                raise TimeoutError("the answer is lost")
            return answers

        return told

    def alive(self) -> bool:
        try:
            for host in self.hosts.values():
                host._require_dataset().check()
        except StreamFailed:
            return False
        return True

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(host.close) for host in self.hosts.values()))
        self._threads.shutdown()


def finished(id: str, attempt: int) -> SequenceSample:
    number = int(id[1:])
    tokens = torch.tensor([number, attempt] + [7] * (number % 6))
    return SequenceSample.from_tensors(
        [id], {KEY: tokens}, {KEY: [[len(tokens)]]}, {"rollout": ["{}"]}
    )


class Life:
    """The run between two deaths: each of ``TOTAL`` samples is sent to some receivers. The last
    life is not ``mortal``, and each sample is sent to all of them."""

    def __init__(self, folder: Path, random: Random, *, mortal: bool) -> None:
        self.folder = folder
        self.random = random
        self.mortal = mortal

    async def live(self) -> bool:
        """Return whether all samples have arrived; False after a death, which comes at two thirds
        at the latest."""
        count = self.random.randint(1 if self.mortal else 2, 4)
        self.ranks = Ranks(self.folder / "stream", count, self.random, mortal=self.mortal)
        plan = plan_of(
            self.folder / "journal",
            batch=TOTAL,
            steps=1,
            completed=0,
            trainers=self.ranks.names,
            max_head_offpolicyness=0,
            rollout_deadline_s=60.0,
        )
        caller: Any = self.ranks
        self.rollouts = await AsyncRollouts.open(plan, caller, CountingSource(10**6))
        self.control = self.rollouts.control
        self.control.worker_joined(PLAYER)
        producers = [StreamProducer([where], "w", "run") for where in self.rollouts._streams]
        try:
            done = await self._play(producers)
            if done:
                self._check()
            return done
        finally:
            for producer in producers:
                producer.close()
            await self.ranks.close()
            await self.rollouts.close()

    async def _play(self, producers: Sequence[StreamProducer]) -> bool:
        counts = self.control.staleness
        while not self.control.complete:
            if self.mortal and counts.accepted + counts.running > 2 * TOTAL / 3:
                return False
            leases, _ = await self.control.allocate(PLAYER, 3, 0.0)
            for lease in leases or ():
                fewest = 1 if self.mortal else len(producers)
                receivers = self.random.sample(
                    producers, self.random.randint(fewest, len(producers))
                )
                for producer in receivers:
                    frames = encode_sample(finished(lease.id, lease.attempt))
                    while self.ranks.alive():
                        with contextlib.suppress(TimeoutError):
                            await producer.push(lease.id, lease.attempt, frames, timeout_s=0.3)
                            break
            if not self.ranks.alive():
                return False
            await asyncio.sleep(0.002)
        assert all(await asyncio.gather(*(producer.drain(60) for producer in producers)))
        return True

    def _check(self) -> None:
        """Every sample is in one store, which the master knows, and can be read again."""
        ids = list(self.control._staged)
        held = self.control.locations.group_by_worker(ids)
        for name, store in self.ranks.stores.items():
            mine = held.get(name, [])
            assert sorted(sample_id for sample_id in ids if store.has(sample_id, KEY)) == sorted(
                mine
            )
            assert len(store) == len(mine)
            for sample_id in mine:
                attempt = self.rollouts._ledger.state.accepted_attempt(sample_id)
                assert attempt is not None
                assert torch.equal(
                    store.get([sample_id], [KEY])[KEY], finished(sample_id, attempt)[KEY]
                )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_a_sample_that_goes_to_several_receivers_counts_once_whoever_dies(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    for _ in range(LIVES - 1):
        assert not await Life(tmp_path, random, mortal=True).live()
    last = Life(tmp_path, random, mortal=False)
    assert await last.live()
    assert last.control.refused > 0, "what came to a second receiver was not taken there"
    tally = audit_folder(tmp_path / "journal")
    assert tally.is_balanced and (tally.accepted, tally.outstanding) == (TOTAL, 0)


def test_payloads_are_read_by_the_rank_that_logged_them_unless_these_were_fewer() -> None:
    refs = [[0, 0, 10], [0, 10, 10], [0, 0, 10, 1], [0, 10, 10, 1]]
    assert split_by_bytes(refs, 2) == [[0, 1], [2, 3]]
    assert split_by_bytes(refs, 1) == [[0, 1, 2, 3]]
    assert sorted(map(len, split_by_bytes(refs, 4))) == [1, 1, 1, 1]
    assert split_by_bytes([], 3) == [[], [], []]
