"""Generation workers that join, die, fail to load and are sent away at random moments, under the
master's real rollout control: admission, journal, weight updates. Every delivery, of weights,
answers and rosters, is an event of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from realhf.api.calls import ACCEPTED, Arrival, RolloutLease
from realhf.api.generation import WeightsManifest
from realhf.api.source import SampleResult
from realhf.base.messages import to_payload
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts
from realhf.transport.errors import RpcTimeout, WorkerDied
from realhf.transport.roster import WorkerInfo
from tests.dataflow.rollouts.toy_streamed_run import (
    TRAINER,
    CountingSource,
    meta_of,
    plan_of,
    worker_info,
)
from workers.generation_worker import VersionGate

PLAYER = "rollout_worker/0:1"


@dataclass(eq=False)
class Engine:
    """The process of a generation worker. ``lane``: updates that it has not begun; ``acks``:
    answers on their way."""

    name: str
    version: int = -1
    alive: bool = True
    lane: list[tuple[int, asyncio.Future[Any]]] = field(default_factory=list)
    acks: list[tuple[int, asyncio.Future[Any]]] = field(default_factory=list)


class FakeFleet:
    """The master's end of the calls; ``snapshots`` are rosters that the rollout workers have not
    seen yet."""

    def __init__(self, left: Callable[[str], None]) -> None:
        self.roster: dict[str, WorkerInfo] = {}
        self.engines: dict[str, Engine] = {}
        self.unlisted: set[str] = set()
        self.snapshots: list[list[Engine]] = []
        self.publishing: list[tuple[int, asyncio.Future[Any]]] = []
        self._left = left

    def call(
        self,
        worker: str,
        handler: str,
        payload: Any = None,
        *,
        timeout_s: float,
        step: int = -1,
        mfc: str = "",
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if handler == "publish_weights":
            self.publishing.append((payload["version"], future))
        elif handler != "update_weights":
            future.set_result({"endpoint": "tcp://nowhere"} if handler == "stream_open" else {})
        elif worker in self.engines:
            self.engines[worker].lane.append((payload["manifest"]["version"], future))
        else:
            future.set_exception(WorkerDied(worker, "not registered"))
        return future

    def list_services(self, worker: str, listed: bool) -> None:
        (self.unlisted.discard if listed else self.unlisted.add)(worker)
        self.publish()

    def dismiss(self, worker: str, reason: str) -> None:
        self.remove(worker)

    def add(self, info: WorkerInfo) -> None:
        self.roster[info.name] = info
        self.engines[info.name] = Engine(info.name)

    def remove(self, worker: str) -> None:
        """Its calls fail first, then everybody hears of it, as with ``RpcMaster``."""
        engine = self.engines.pop(worker)
        del self.roster[worker]
        self.unlisted.discard(worker)
        for _, future in [*engine.lane, *engine.acks]:
            if not future.done():
                future.set_exception(WorkerDied(worker, "killed"))
        self.publish()
        self._left(worker)

    def publish(self) -> None:
        self.snapshots.append(
            [engine for name, engine in self.engines.items() if name not in self.unlisted]
        )


@dataclass
class Sample:
    lease: RolloutLease
    tokens_left: int
    versions: list[int] = field(default_factory=list)


class FleetRun:
    """One schedule. ``gated``: engines hold requests for newer weights than they have, so that even
    one which the master has sent away, or takes for dead, does harm to nobody; else no such engine
    answers any more."""

    def __init__(self, folder: Path, random: Random, *, gated: bool) -> None:
        self.random = random
        self.gated = gated
        self.folder = folder
        self.batch, self.eta, self.steps = (
            random.randint(1, 3),
            random.randint(0, 3),
            random.randint(3, 5),
        )
        self.fleet = FakeFleet(lambda name: self.rollouts.worker_left(name, "killed"))
        self.view: list[Engine] = []
        self.playing: list[Sample] = []
        self.finished: dict[str, list[int]] = {}
        self.step = 0
        self.born = 0
        self.spread = 0
        self.wasted = 0
        self.after: asyncio.Task[None] | None = None

    async def run(self) -> None:
        plan = plan_of(
            self.folder,
            batch=self.batch,
            steps=self.steps,
            completed=0,
            max_head_offpolicyness=self.eta,
            rollout_deadline_s=1e6,
        )
        self.rollouts: Any = await AsyncRollouts.open(plan, self.fleet, CountingSource(10**6))
        self.control = self.rollouts.control
        self._join()
        self.control.worker_joined(PLAYER)
        self.after = asyncio.create_task(self.rollouts.publish(0))
        self.step_batch = asyncio.create_task(self.control.step_batch(0))
        try:
            await self._play()
        finally:
            for task in (self.after, self.step_batch):
                if task is not None:
                    task.cancel()
            await self.rollouts.close()

    async def _play(self) -> None:
        events = [
            self._join,
            self._leave,
            self._publish,
            self._load,
            self._ack,
            self._see_roster,
            self._allocate,
            self._token,
            self._finish,
            self._train,
        ]
        pace = [self.random.choice([1, 2, 6]) for _ in events]
        for _ in range(20_000):
            event = self.random.choices(events, pace)[0]()
            if event is not None:
                await event
            for _ in range(self.random.randint(0, 3)):
                await asyncio.sleep(0)
            if self.step == self.steps:
                break
        assert self.step == self.steps, (
            f"it stands still at step {self.step}: {self.control.counters()}"
        )

    def _join(self) -> None:
        if len(self.fleet.engines) < 4 and (self.random.random() < 0.5 or not self.fleet.engines):
            self.born += 1
            taken = {name for name in self.fleet.engines}
            index = next(i for i in range(4) if f"generation/{i}" not in taken)
            info = worker_info("generation", index, pid=self.born, generation=f"tcp://{self.born}")
            self.fleet.add(info)
            self.rollouts.worker_joined(info)
            self.fleet.publish()

    def _leave(self) -> None:
        if len(self.fleet.engines) > 1 and self.random.random() < 0.3:
            engine = self.fleet.engines[self.random.choice(sorted(self.fleet.engines))]
            engine.alive = self.gated and self.random.random() < 0.5
            self.fleet.remove(engine.name)

    def _publish(self) -> None:
        if self.fleet.publishing:
            version, future = self.fleet.publishing.pop(0)
            if not future.done():
                future.set_result(
                    {"manifest": to_payload(WeightsManifest(version, "shm", "nowhere", 8, ""))}
                )

    def _any(self, wanted: Callable[[Engine], Any]) -> Engine | None:
        found = [engine for _, engine in sorted(self.fleet.engines.items()) if wanted(engine)]
        return self.random.choice(found) if found else None

    def _load(self) -> None:
        engine = self._any(lambda engine: engine.lane)
        if engine is not None:
            version, future = engine.lane.pop(0)
            if (
                self.gated
                and len(self.fleet.engines) > 2
                and self.random.random() < 0.05
                and not future.done()
            ):
                future.set_exception(RpcTimeout("it did not load"))
                return
            engine.version = max(engine.version, version)
            engine.acks.append((version, future))

    def _ack(self) -> None:
        engine = self._any(lambda engine: engine.acks)
        if engine is not None:
            _, future = engine.acks.pop(0)
            if not future.done():
                future.set_result({"weight_stage_ms": 1.0, "weight_pause_ms": 1.0})

    def _see_roster(self) -> None:
        if self.fleet.snapshots:
            seen = self.random.randint(1, len(self.fleet.snapshots))
            self.view = self.fleet.snapshots[seen - 1]
            del self.fleet.snapshots[:seen]

    async def _allocate(self) -> None:
        leases, _ = await self.control.allocate(PLAYER, self.random.randint(1, 3), 0.0)
        self.playing += [Sample(lease, self.random.randint(1, 4)) for lease in leases or ()]

    def _token(self) -> None:
        open_ = [sample for sample in self.playing if sample.tokens_left]
        servers = [engine for engine in self.view if engine.alive and engine.version >= 0]
        if not open_ or not servers:
            return
        sample, engine = self.random.choice(open_), self.random.choice(servers)
        gone: list[int] = []
        gate = VersionGate(lambda: engine.version)
        gate.submit(
            0,
            sample.lease.version if self.gated else -1,
            lambda: gone.append(engine.version),
            lambda: None,
        )
        for version in gone:
            assert version >= sample.lease.version, (
                f"{sample.lease} got a token of version {version}"
            )
            sample.versions.append(version)
            sample.tokens_left -= 1
        self.wasted += not gone

    async def _finish(self) -> None:
        done = [sample for sample in self.playing if not sample.tokens_left]
        if done:
            sample = self.random.choice(done)
            self.playing.remove(sample)
            self.finished[sample.lease.id] = sample.versions
            arrival = Arrival(
                sample.lease.id, sample.lease.attempt, TRAINER, [1, 0, 9], meta_of(sample.lease.id)
            )
            assert await self.control.record_arrivals([arrival], TRAINER) == [ACCEPTED]

    async def _train(self) -> None:
        if self.after is not None and self.after.done():
            self.after.result()
            self.after = None
        if self.after is not None or not self.step_batch.done():
            return
        ids = [meta.ids[0] for meta in self.step_batch.result()]
        for sample_id in ids:
            staleness = self.step - min(self.finished[sample_id])
            assert staleness <= self.eta, (
                f"{sample_id} is {staleness} versions old at step {self.step}"
            )
            self.spread = max(self.spread, staleness)
        self.control.record([SampleResult(sample_id) for sample_id in ids])
        self.step += 1
        self.after = asyncio.create_task(self.rollouts.publish(self.step))
        self.step_batch = asyncio.create_task(self.control.step_batch(self.step))
