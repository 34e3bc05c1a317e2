"""What the master does about asynchronous rollouts: who is told to play, when, and what a death or
a failure means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.calls import Arrival
from realhf.api.source import SampleResult
from realhf.dataflow.journal.audit import audit_folder
from realhf.dataflow.journal.journal import JournalDamaged, segments
from realhf.dataflow.rollouts import async_rollouts
from realhf.dataflow.rollouts.async_rollouts import AsyncRollouts
from realhf.dataflow.rollouts.control import RolloutsFailed
from realhf.transport.errors import RpcTimeout, WorkerDied
from realhf.transport.service import ServiceClient
from tests.dataflow.rollouts.toy_streamed_run import (
    TRAINER,
    CountingSource,
    FakeWorkers,
    meta_of,
    plan_of,
    worker_info,
)


class Scene:
    """A run of 4 steps of 2 samples with two rollout workers, an environment and a generation
    worker."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workers = folder, FakeWorkers()
        self.source = CountingSource(10**6)
        self.warned: list[str] = []

    async def open(
        self, completed: int = 0, checkpoint: Path | None = None, **options: Any
    ) -> AsyncRollouts:
        plan = plan_of(self.folder, batch=2, steps=4, completed=completed, **options)
        plan = replace(plan, checkpoint=checkpoint)
        self.rollouts = await AsyncRollouts.open(
            plan, self.workers, self.source, self.warned.append
        )
        for info in (
            worker_info("rollout_worker", 0),
            worker_info("rollout_worker", 1),
            worker_info("generation"),
            worker_info("env", env="http://here"),
        ):
            self.join(info)
        return self.rollouts

    def join(self, info: Any) -> None:
        self.workers.roster[info.name] = info
        self.rollouts.worker_joined(info)

    def leave(self, name: str) -> None:
        del self.workers.roster[name]
        self.rollouts.worker_left(name, "killed")

    async def play(self, worker: str, *, finish: bool = True) -> None:
        """One sample from its lease to the journal."""
        (lease,) = (await self.rollouts.control.allocate(worker, 1, 0.0))[0] or []
        if finish:
            ref = [1, len(self.workers.payloads), 9]
            self.workers.payloads[ref[1]] = (lease.id, lease.attempt, meta_of(lease.id))
            arrival = Arrival(lease.id, lease.attempt, "w", ref, meta_of(lease.id))
            assert await self.rollouts.control.record_arrivals([arrival], TRAINER) == ["accepted"]

    async def train(self, step: int) -> list[str]:
        ids = [meta.ids[0] for meta in await self.rollouts.control.step_batch(step)]
        self.rollouts.control.record([SampleResult(sample_id) for sample_id in ids])
        return ids


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    await made.rollouts.close()
    assert audit_folder(tmp_path).is_balanced


async def breathe() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


W0 = "rollout_worker/0:100"
W1 = "rollout_worker/1:100"


async def test_every_process_is_told_to_play_once(scene: Scene) -> None:
    rollouts = await scene.open()
    scene.workers.mute.add("publish_weights")
    starting = asyncio.create_task(rollouts.start())
    await breathe()
    scene.leave("rollout_worker/1")
    scene.join(worker_info("rollout_worker", 1, pid=101))
    scene.join(worker_info("rollout_worker", 2))
    await breathe()
    assert scene.workers.plays == [] and not starting.done(), "there are no weights to play with"
    scene.workers.mute.clear()
    starting.cancel()
    await rollouts.start()
    for _ in range(2):
        scene.join(worker_info("rollout_worker", 3))
    await breathe()
    assert scene.workers.plays == [f"rollout_worker/{i}" for i in range(4)]
    assert "rollout_worker/1:101" in rollouts.control.workers and W1 not in rollouts.control.workers
    assert ("generation/0", "update_weights") in [call[:2] for call in scene.workers.calls]


async def test_a_successor_plays_what_the_dead_one_had_and_knows_the_environment_that_is_away(
    scene: Scene,
) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    await scene.play(W0, finish=False)
    scene.leave("env/0")
    scene.leave("rollout_worker/0")
    assert rollouts.control.counters()["waiting"] == 1
    scene.join(worker_info("rollout_worker", 0, pid=200))
    await breathe()
    worker, handler, fields = scene.workers.calls[-1]
    assert (worker, handler, fields["env"]) == ("rollout_worker/0", "play", ["http://here"])
    await scene.play("rollout_worker/0:200")
    assert rollouts.control.counters()["lost_attempts"] == 1


async def test_nobody_plays_before_there_is_an_environment(scene: Scene) -> None:
    rollouts = await scene.open()
    rollouts._env.clear()  # it died during the start and is on its way
    await rollouts.start()
    await breathe()
    assert scene.workers.plays == []
    scene.join(worker_info("env", env="http://there"))
    await breathe()
    assert scene.workers.plays == ["rollout_worker/0", "rollout_worker/1"]
    assert scene.workers.calls[-1][2]["env"] == ["http://there"]


async def test_at_the_end_what_is_in_play_is_finished_and_nobody_begins(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    await scene.play(W0)
    holding = asyncio.create_task(rollouts.drain())
    await breathe()
    assert not holding.done() and await rollouts.control.allocate(W0, 1, 60.0) == ([], [])
    rollouts.control.worker_left(W0, "it stopped")
    scene.leave("rollout_worker/1")
    await asyncio.wait_for(holding, 60)
    before = len(scene.workers.plays)
    scene.join(worker_info("rollout_worker", 1, pid=300))
    await breathe()
    assert len(scene.workers.plays) == before


async def test_a_worker_that_does_not_stop_is_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_rollouts, "STOP_TIMEOUT_S", 0.0)
    rollouts = await scene.open(rollout_deadline_s=0.05)
    await rollouts.start()
    rollouts.control.worker_left(W0, "it stopped")
    with pytest.raises(RolloutsFailed, match=f"{W1} did not stop"):
        await rollouts.drain()


@pytest.mark.parametrize("handler", ["update_weights", "play"])
async def test_what_goes_wrong_in_the_background_ends_the_run(scene: Scene, handler: str) -> None:
    rollouts = await scene.open()
    if handler == "play":
        await rollouts.start()
    scene.workers.failing[handler] = RpcTimeout(f"{handler} took too long")
    with pytest.raises(Exception, match=f"{handler} took too long"):
        if handler == "play":
            scene.join(worker_info("rollout_worker", 5))
        else:
            await rollouts.start()
        await asyncio.wait_for(rollouts.control.step_batch(0), 60)


async def test_one_generation_worker_that_cannot_load_is_sent_away_and_the_last_one_ends_the_run(
    scene: Scene,
) -> None:
    rollouts = await scene.open()
    scene.join(worker_info("generation", 1))
    await rollouts.start()
    await breathe()
    assert scene.workers.unlisted == set()
    scene.workers.failing["update_weights"] = RpcTimeout("a wrong checksum")
    scene.workers.fails_only = "generation/1"
    await rollouts.publish(1)
    await breathe()
    assert scene.workers.dismissed == ["generation/1"] and rollouts.control._failure is None
    assert rollouts.control.staleness.version == 0, "until it is known to be gone"
    scene.leave("generation/1")
    assert rollouts.control.staleness.version == 1
    scene.workers.failing.clear()
    scene.join(worker_info("generation", 1, pid=101))
    assert scene.workers.unlisted == {"generation/1"}
    await breathe()
    assert scene.workers.unlisted == set(), "its successor has the newest weights"
    scene.leave("generation/1")
    scene.workers.failing["update_weights"] = RpcTimeout("a wrong checksum")
    scene.workers.fails_only = "generation/0"
    await rollouts.publish(2)
    with pytest.raises(
        RolloutsFailed, match="generation/0 did not load the weights: a wrong checksum"
    ):
        await asyncio.wait_for(rollouts.control.step_batch(0), 60)


async def test_a_worker_that_dies_when_it_is_told_to_play_is_no_failure(scene: Scene) -> None:
    rollouts = await scene.open()
    scene.workers.failing["play"] = WorkerDied("rollout_worker/0", "killed")
    await rollouts.start()
    scene.leave("rollout_worker/0")
    scene.leave("rollout_worker/1")
    await breathe()
    assert not rollouts.control.workers and rollouts.control._failure is None


async def test_without_the_trainer_nothing_goes_on(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    rollouts.worker_left(TRAINER, "killed by SIGKILL")
    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        await rollouts.control.step_batch(0)
    with pytest.raises(WorkerDied):
        await rollouts.drain()


async def test_a_stream_that_failed_is_noticed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_rollouts, "WATCH_S", 0.01)
    rollouts = await scene.open()
    scene.workers.failing["stream_check"] = RpcTimeout("the stream of samples failed")
    await rollouts.start()
    with pytest.raises(RpcTimeout, match="the stream"):
        await asyncio.wait_for(rollouts.control.step_batch(0), 60)


async def test_a_run_begins_again_from_its_checkpoint_with_everything_that_had_arrived(
    scene: Scene,
) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    for _ in range(2):
        await scene.play(W0)
    first = await scene.train(0)
    await rollouts.prepare_checkpoint()
    await rollouts.checkpoint_committed(1, "ckpt-1")
    rollouts.control.set_version(1)
    for _ in range(3):
        await scene.play(W1)
    second = await scene.train(1)
    await scene.play(W0, finish=False)
    await rollouts.close()

    scene.source = CountingSource(10**6)
    rollouts = await scene.open(completed=1)
    counters = rollouts.control.counters()
    assert (
        counters["consumed"],
        counters["accepted"],
        counters["waiting"],
        counters["staged"],
    ) == (2, 5, 1, 3)
    assert await scene.train(1) == second and scene.source.told == [*first, *second], "told once"
    rollouts.control.worker_joined(W0)
    rollouts.control.set_version(2)
    await scene.play(W0)
    assert await scene.train(2) == ["s4", "s5"]


@pytest.mark.parametrize("published", [True, False])
async def test_a_checkpoint_of_weights_that_were_not_published_says_so(
    tmp_path: Path, published: bool
) -> None:
    """Ctrl-C in a training call leaves its weights unpublished, and the run that went on warned
    that something was missing."""
    scene = Scene(tmp_path / "journal")
    folder = tmp_path / "ckpt-1"
    folder.mkdir()
    rollouts = await scene.open()
    await rollouts.start()
    for _ in range(2):
        await scene.play(W0)
    await scene.train(0)
    if published:
        await rollouts.publish(1)
    await rollouts.prepare_checkpoint()
    await rollouts.save(1, folder)
    await rollouts.checkpoint_committed(1, folder.name)
    await rollouts.close()
    rollouts = await scene.open(completed=1, checkpoint=folder)
    await rollouts.close()
    events = [
        json.loads(line)["event"] for line in (tmp_path / "weights.jsonl").read_text().splitlines()
    ]
    assert ("unpublished" in events) is not published
    assert not [text for text in scene.warned if "does not say which weights" in text]


async def test_deaths_of_a_sample_count_over_recoveries(scene: Scene) -> None:
    """Each recovery forgot them: a sample that kills or hangs whoever plays it had all its attempts
    again."""
    rollouts = await scene.open()
    await rollouts.start()
    for _ in range(2):
        await scene.play(W1)
    await scene.train(0)
    rollouts.control.set_version(1)
    for compacted in (True, False, False):
        assert rollouts.control.given_up == 0
        (lease,) = (await rollouts.control.allocate(W0, 1, 0.0))[0] or []
        assert lease.id == "s2"
        rollouts.control.worker_left(W0, "killed: no heartbeat for 8.1 s")
        if compacted:
            await rollouts.prepare_checkpoint()
            await rollouts.checkpoint_committed(1, "ckpt-1")
        elif rollouts.control.given_up:
            break
        await rollouts.close()
        scene.source = CountingSource(10**6)
        rollouts = await scene.open(completed=1)
        rollouts.control.set_version(1)
        rollouts.control.worker_joined(W0)
    assert rollouts.control.given_up == 1


async def test_a_payload_that_is_lost_is_given_up_for_good(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    for _ in range(2):
        await scene.play(W0)
    await rollouts.close()
    scene.workers.payloads.clear()
    scene.warned.clear()
    for _ in range(2):
        scene.source = CountingSource(10**6)
        rollouts = await scene.open()
        await rollouts.close()
    (told,) = scene.warned
    assert told.startswith("2 of the 2 samples that had arrived are lost") and "s0, s1" in told
    rollouts = await scene.open()
    rollouts.control.worker_joined(W0)
    for _ in range(2):
        await scene.play(W0)
    assert await scene.train(0) == ["s2", "s3"]
    assert rollouts._ledger.state.totals()["dropped"] == 2


async def test_the_display_is_told_of_admission_and_generation(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    await breathe()
    status = {
        "at_s": 10.0,
        "busy_s": 1.0,
        "generated_tokens": 100.0,
        "running": 2.0,
        "waiting": 1.0,
    }
    scene.workers._answer = lambda handler, payload: dict(status) if handler == "status" else {}
    await rollouts.collect_live_metrics()
    status |= {"at_s": 12.0, "busy_s": 2.0, "generated_tokens": 300.0}
    sections = await rollouts.collect_live_metrics()
    assert (
        sections["generation"]["occupancy"] == 0.5
        and sections["generation"]["tokens_per_second"] == 100.0
    )
    assert sections["generation"]["running"] == 2.0 and sections["admission"]["capacity"] == 4.0
    scene.workers.failing["status"] = WorkerDied("generation/0", "killed")
    assert "occupancy" not in (await rollouts.collect_live_metrics())["generation"]


async def test_requests_reach_the_control_through_the_service_of_the_run(scene: Scene) -> None:
    rollouts = await scene.open()
    await rollouts.start()
    endpoint = next(
        fields["control"] for _, handler, fields in scene.workers.calls if handler == "play"
    )
    client = ServiceClient(endpoint, "the master", W0, "run")
    waiting = asyncio.create_task(
        client.request("allocate", {"count": 8, "hold_s": 60}, timeout_s=60)
    )
    assert len((await waiting)["leases"]) == 4, "two batches at version 0 and staleness 1"
    client.close()


async def test_samples_that_are_too_old_for_a_lower_bound_are_trained_and_counted_aloud(
    scene: Scene,
) -> None:
    """They used to stop the run for ever."""
    rollouts = await scene.open(max_head_offpolicyness=2)
    await rollouts.start()
    for _ in range(6):
        await scene.play(W0)
    trained = await scene.train(0)
    await rollouts.prepare_checkpoint()
    await rollouts.checkpoint_committed(1, "ckpt")
    await rollouts.close()
    scene.warned.clear()
    rollouts = await scene.open(1, max_head_offpolicyness=0)
    (told,) = scene.warned
    assert told.startswith(
        "4 of the 4 samples that had arrived will be older than async_rl.max_head_offpolicyness=0"
    )
    assert rollouts.control.capacity == 0, "nothing new is played before they are trained"
    trained += await scene.train(1) + await scene.train(2)
    assert len(set(trained)) == 6
    rollouts.control.set_version(3)
    assert rollouts.control.capacity == 2


async def test_a_journal_that_is_gone_is_made_again_from_the_checkpoint_or_the_run_is_refused(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The tasks used to be drawn as at the beginning of the run, so that they were trained
    twice."""
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    rollouts = await scene.open(0)
    await rollouts.start()
    for _ in range(4):
        await scene.play(W0)
    trained = await scene.train(0)
    await rollouts.prepare_checkpoint()
    await rollouts.save(1, checkpoint)
    await rollouts.checkpoint_committed(1, "ckpt")
    await rollouts.close()
    for path in segments(scene.folder):
        path.unlink()
    scene.warned.clear()
    with pytest.raises(
        JournalDamaged,
        match=r"has no journal, but the run has trained 1 steps.*recover_mode=disab",
    ):
        await scene.open(1)
    for _ in range(2):  # the second time from the journal that was made the first time
        rollouts = await scene.open(1, checkpoint=checkpoint)
        told = scene.warned[:]
        scene.warned.clear()
        await rollouts.close()
        assert rollouts._queue.source.state_dict()["count"] >= len(trained), (
            "they are not drawn again"
        )
        assert not rollouts._ledger.state.accepted.keys() & set(trained)
        assert not rollouts._ledger.state.outstanding.keys() & set(trained)
    assert not any("has no journal" in text for text in told)
