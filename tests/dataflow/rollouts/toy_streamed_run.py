"""A master with real rollout control, journal and service, whose workers are played by random
events; it is killed at random places and goes on from checkpoint and journal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from realhf.api.calls import ACCEPTED, DUPLICATE, REFUSED, Arrival, RolloutLease, payload_rank
from realhf.api.config import AsyncConfig
from realhf.api.experiment import InterfaceType, MFCDef, RolloutOptions, RolloutSpec
from realhf.api.generation import WeightsManifest
from realhf.api.sample import SequenceSample
from realhf.api.source import SampleResult, SourceItem
from realhf.base.messages import to_payload
from realhf.dataflow.journal.journal import segments
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts, RolloutPlan
from realhf.transport.codec import encode_sample
from realhf.transport.roster import WorkerInfo

TRAINER = "model_worker/0"


class CountingSource:
    """Items s0, s1, ... up to ``limit``; its state knows of every result that it was told."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.told: list[str] = []

    def next_batch(self, n: int) -> list[SourceItem]:
        items = [
            SourceItem(f"s{i}", {"task": i})
            for i in range(self.count, min(self.count + n, self.limit))
        ]
        self.count += len(items)
        return items

    def record(self, results: Sequence[SampleResult]) -> None:
        self.told += [result.id for result in results]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "told": list(self.told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.told = list(state["told"])

    def stats(self) -> dict[str, float]:
        return {}


class FakeWorkers:
    """The master's end of the calls: trainers whose payload logs are ``payloads``, rollout and
    generation workers that do as they are told. ``refs``: where payloads lie, of which ``pruned``
    were deleted; ``plays``: who was told to play; ``mute``: handlers that do not answer;
    ``version``: of the weights that were loaded last, which are kept for an evaluation beside newer
    ones where ``keeps``."""

    def __init__(
        self,
        payloads: dict[int, tuple[str, int, list[bytes]]] | None = None,
        refs: set[tuple[int, ...]] | None = None,
    ) -> None:
        self.refs = set[tuple[int, ...]]() if refs is None else refs
        self.pruned = 0
        self.roster: dict[str, WorkerInfo] = {}
        self.payloads = {} if payloads is None else payloads
        self.calls: list[tuple[str, str, Any]] = []
        self.mute: set[str] = set()
        self.unlisted: set[str] = set()
        self.dismissed: list[str] = []
        self.fails_only = ""
        self.failing: dict[str, Exception] = {}
        self.version = -1
        self.trial = 0
        self.keeps = True

    @property
    def plays(self) -> list[str]:
        return [worker for worker, handler, _ in self.calls if handler == "play"]

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
        self.calls.append((worker, handler, payload))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if handler in self.failing and worker.startswith(self.fails_only):
            future.set_exception(self.failing[handler])
        elif handler not in self.mute:
            future.set_result(
                self._stream(worker, handler, payload) or self._answer(handler, payload)
            )
        return future

    def list_services(self, worker: str, listed: bool) -> None:
        (self.unlisted.discard if listed else self.unlisted.add)(worker)

    def dismiss(self, worker: str, reason: str) -> None:
        self.dismissed.append(worker)

    def _answer(self, handler: str, payload: Any) -> Any:
        if handler == "publish_weights":
            manifest = WeightsManifest(
                payload["version"], "shm", "nowhere", 0, "", trial=payload["trial"]
            )
            return {"manifest": to_payload(manifest)}
        if handler == "update_weights":
            self.version = payload["manifest"]["version"]
            self.trial = payload["manifest"]["trial"]
            return {"weight_stage_ms": 1.0, "weight_pause_ms": 1.0}
        if handler == "probe_weights":
            return {"token_ids": [1, 2, 3], "logprobs": [-1.0 - self.trial % 2]}
        if handler == "pin_weights":
            return {"version": self.version, "kept": self.keeps}
        if handler == "status":
            return {
                "at_s": 0.0,
                "busy_s": 0.0,
                "generated_tokens": 0.0,
                "running": 0.0,
                "waiting": 0.0,
            }
        return {}

    def _stream(self, worker: str, handler: str, payload: Any) -> Any:
        if handler == "stream_open":
            assert worker == f"model_worker/{payload['rank']}"
            return {"endpoint": f"tcp://{worker}"}
        if handler == "stream_restore":
            return {"arrivals": [to_payload(self._restored(*item)) for item in payload["items"]]}
        if handler == "stream_prune":
            self._prune(int(worker[-1]), payload["alive"], payload["newest"], payload["ranks"])
        return None

    def _prune(
        self, rank: int, alive: list[list[int]], newest: list[int] | None, ranks: int
    ) -> None:
        """As if every payload had a segment of its own."""
        own = {ref[0] for ref in alive if payload_rank(ref) == rank}
        horizon = max([*own, *(newest[:1] if newest else [])], default=0)
        kept = {tuple(ref) for ref in alive}
        for ref in list(self.refs):
            gone = payload_rank(ref) == rank and ref[0] < horizon and ref[0] not in own
            if gone or (rank == 0 and payload_rank(ref) >= ranks and ref not in kept):
                self.refs.discard(ref)
                self.payloads.pop(ref[1], None)
                self.pruned += 1

    def _restored(self, id: str, attempt: int, ref: list[int]) -> Arrival:
        if ref[1] not in self.payloads:
            return Arrival(id, attempt, "", error="damaged")
        assert self.payloads[ref[1]][:2] == (id, attempt)
        return Arrival(id, attempt, "", ref, self.payloads[ref[1]][2])


def worker_info(kind: str, index: int = 0, pid: int = 100, **endpoints: str) -> WorkerInfo:
    return WorkerInfo(f"{kind}/{index}", kind, index, "here", pid, endpoints=endpoints)


def meta_of(id: str, **metadata: str) -> list[bytes]:
    """Frames of a sample's metadata."""
    sample = SequenceSample(
        [id],
        {"packed_input_ids": [[3]]},
        {"packed_input_ids": "i64"},
        {"packed_input_ids": ()},
        None,
        {"rollout": ["{}"], **{name: [value] for name, value in metadata.items()}},
    )
    return [bytes(frame) for frame in encode_sample(sample)]


def plan_of(
    folder: Path,
    *,
    batch: int,
    steps: int,
    completed: int,
    trainers: Sequence[str] = (TRAINER,),
    **options: Any,
) -> RolloutPlan:
    mfc = MFCDef(
        "gen",
        "actor",
        InterfaceType.GENERATE,
        "x",
        n_seqs=batch,
        output_keys=("packed_input_ids",),
    )
    episodes = RolloutOptions("toy", group_size=1, sessions=4, max_total_tokens=8)
    spec = RolloutSpec("actor", (mfc,), episodes, AsyncConfig(**options), sessions=4)
    return RolloutPlan(
        spec, trainers, batch, steps, completed, folder, "run", 5.0, 5.0, archive=True
    )


@dataclass
class StreamedRun:
    """``steps`` of ``batch`` samples. What outlives the master: the payload log, the
    ``checkpoints`` (completed steps and the step batches trained until then) and the journal in
    ``folder``."""

    folder: Path
    random: Random
    batch: int
    steps: int
    eta: int
    drop: bool
    limit: int = 10**6
    damage: float = 0.0
    payloads: dict[int, tuple[str, int, list[bytes]]] = field(default_factory=dict)
    refs: set[tuple[int, ...]] = field(default_factory=set)
    checkpoints: list[tuple[int, list[list[str]]]] = field(default_factory=list)
    history: dict[int, list[str]] = field(default_factory=dict)
    repeated: int = 0
    lives: int = 0
    pruned: int = 0
    logged: int = 0

    async def live(self, events: int | None) -> bool:
        """Begin or go on, for so many random events and then die; None: to the end. Whether it came
        to its end."""
        completed, trained = self.checkpoints[-1] if self.checkpoints else (0, [])
        self.trained = [list(ids) for ids in trained]
        self.source = CountingSource(self.limit)
        policy = "drop" if self.drop else "wait"
        self.trainers = [f"model_worker/{rank}" for rank in range(self.random.randint(1, 4))]
        plan = plan_of(
            self.folder,
            batch=self.batch,
            steps=self.steps,
            completed=completed,
            trainers=self.trainers,
            max_head_offpolicyness=self.eta,
            staleness_policy=policy,
            max_concurrent_rollouts=self.random.randint(1, 3 * self.batch),
            rollout_deadline_s=1e6,
            max_attempts=2,
        )
        self.workers_asked = FakeWorkers(self.payloads, self.refs)
        self.rollouts = await AsyncRollouts.open(plan, self.workers_asked, self.source)
        self.control = self.rollouts.control
        self.planned = {step: list(ids) for step, ids in self.control._replay.items()}
        assert all(self.history[step] == ids for step, ids in self.planned.items()), (
            "steps are repeated as they were"
        )
        self.leases: list[tuple[str, RolloutLease]] = []
        self.sent: list[tuple[Arrival, str]] = []
        self.waiting: list[asyncio.Task[Any]] = []
        self.workers = [self._join(), self._join()]
        self.step_batch: asyncio.Task[list[SequenceSample]] | None = None
        self.safe = 0
        over = False
        for event in range(events if events is not None else 100_000):
            over = await self._event(final=events is None)
            if over:
                break
            if event % 30 == 0:
                await self._answered()
        await self._die(over)
        return over

    def _join(self) -> str:
        self.lives += 1
        name = f"rollout_worker/{self.lives}:{self.lives}"
        self.control.worker_joined(name)
        return name

    async def _answered(self) -> None:
        """What was answered survives a crash."""
        await asyncio.gather(*self.waiting)
        self.waiting.clear()
        self.safe = self._size()

    def _size(self) -> int:
        return segments(self.folder)[-1].stat().st_size

    async def _event(self, *, final: bool) -> bool:
        kinds = ["allocate", "arrive", "train", "weights"]
        if not final:
            kinds += ["allocate", "arrive", "fail", "die", "expire", "again", "late", "malformed"]
        kind = self.random.choice(kinds)
        if kind == "allocate":
            await self._allocate()
        elif kind in ("arrive", "malformed") and self.leases:
            await self._arrive(
                error="odd" if kind == "malformed" and self.random.random() < 0.2 else ""
            )
        elif kind == "fail" and self.leases and self.random.random() < 0.5:
            worker, lease = self._take_lease()
            self.control.record_failure(worker, lease.id, lease.attempt, "env_error", "gone")
            self.control.record_failure(
                "somebody else", lease.id, lease.attempt + 1, "env_error", "gone"
            )
        elif kind == "die" and self.random.random() < 0.3:
            await self._kill(self.random.randrange(len(self.workers)))
        elif kind == "expire" and self.leases and self.random.random() < 0.3:
            _, lease = self._take_lease()
            self.control._open[lease.id].expires = 0.0
            self.control.expire()
            await self._send(lease, [REFUSED])
        elif kind == "again" and self.sent:
            arrival, holder = self.random.choice(self.sent)
            again = self.random.choice(self.trainers)
            await self._expect(
                arrival, [DUPLICATE, REFUSED] if again == holder else [REFUSED], again
            )
        elif kind == "late" and self.sent:
            arrival, holder = self.random.choice(self.sent)
            late = Arrival(arrival.id, arrival.attempt + 7, "", arrival.ref, arrival.meta)
            await self._expect(late, [REFUSED], holder)
        elif kind == "weights":
            self.control.set_version(
                self.random.randint(self.control.staleness.version, len(self.trained))
            )
        elif kind == "train":
            return await self._train()
        return False

    async def _allocate(self) -> None:
        worker = self.random.choice(self.workers)
        leases, _ = await self.control.allocate(worker, self.random.randint(1, 4), 0.0)
        assert leases is None or leases or self.control.complete
        self.leases += [(worker, lease) for lease in leases or ()]

    def _take_lease(self) -> tuple[str, RolloutLease]:
        return self.leases.pop(self.random.randrange(len(self.leases)))

    async def _kill(self, number: int) -> None:
        dead = self.workers[number]
        self.control.worker_left(dead, "killed")
        self.workers[number] = self._join()
        for _, lease in [entry for entry in self.leases if entry[0] == dead]:
            if self.random.random() < 0.5:
                await self._send(lease, [REFUSED])
        self.leases = [entry for entry in self.leases if entry[0] != dead]

    async def _arrive(self, error: str) -> None:
        _, lease = self._take_lease()
        await self._send(lease, [REFUSED if error else ACCEPTED], error=error)

    async def _send(self, lease: RolloutLease, answers: list[str], *, error: str = "") -> None:
        self.logged += 1
        number = self.logged
        meta = meta_of(lease.id)
        rank = self.random.randrange(len(self.trainers))
        ref = [number, number, 10, *([rank] if rank else [])]
        self.payloads[number] = (lease.id, lease.attempt, meta)
        self.refs.add(tuple(ref))
        arrival = Arrival(
            lease.id, lease.attempt, "w", [] if error else ref, [] if error else meta, error
        )
        if answers == [ACCEPTED]:
            self.sent.append((arrival, self.trainers[rank]))
        await self._expect(arrival, answers, self.trainers[rank])

    async def _expect(self, arrival: Arrival, answers: list[str], holder: str) -> None:
        async def arrive() -> None:
            (answer,) = await self.control.record_arrivals([arrival], holder)
            assert answer in answers, (arrival.id, arrival.attempt, answer)

        self.waiting.append(asyncio.create_task(arrive()))
        await asyncio.sleep(0)

    async def _train(self) -> bool:
        step = len(self.trained)
        if self.step_batch is None:
            self.step_batch = asyncio.create_task(self.control.step_batch(step))
        for _ in range(3):
            await asyncio.sleep(0)
        if not self.step_batch.done():
            return False
        metas = self.step_batch.result()
        self.step_batch = None
        held = self.control.locations.group_by_worker(meta.ids[0] for meta in metas)
        assert held.keys() <= {*self.trainers}, "every sample is held by a worker of this life"
        if not metas:
            return True
        ids = [sample_id for meta in metas for sample_id in meta.ids]
        assert len(ids) == self.batch or self.control._queue.is_empty
        if step in self.planned:
            assert ids == self.planned[step]
            self.repeated += 1
        self.history[step] = ids
        assert all(meta.metadata["task"] == [int(meta.ids[0][1:])] for meta in metas), (
            "the task's own metadata"
        )
        self.control.record([SampleResult(sample_id) for sample_id in ids])
        self.trained.append(ids)
        if self.random.random() < 0.3:
            await self._checkpoint()
        return len(self.trained) == self.steps

    async def _checkpoint(self) -> None:
        await self.rollouts.prepare_checkpoint()
        self.checkpoints = [
            *self.checkpoints,
            (len(self.trained), [list(ids) for ids in self.trained]),
        ][-2:]
        await self.rollouts.checkpoint_committed(len(self.trained), "ckpt")
        self.safe = self._size()

    async def _die(self, over: bool) -> None:
        await asyncio.gather(*self.waiting)
        self.pruned += self.workers_asked.pruned
        for task in [self.step_batch] if self.step_batch else []:
            task.cancel()
        if over:
            self.rollouts.record_end()
            await self.rollouts.close()
            return
        await self.rollouts.close()
        with segments(self.folder)[-1].open("r+b") as file:
            file.truncate(self.random.randint(self.safe, self._size()))
        if len(self.checkpoints) > 1 and self.random.random() < 0.2:
            self.checkpoints.pop()
        for number in [n for n in self.payloads if self.random.random() < self.damage]:
            del self.payloads[number]
