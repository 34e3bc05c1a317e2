"""Versions of the weights on their way to generation workers that join, die and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realhf.api.generation import WeightsManifest
from realhf.base.messages import to_payload
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.weight_proof import WeightRecord, WrongWeights
from realhf.transport.errors import RemoteError, RpcError, RpcTimeout, WorkerDied
from realhf.transport.roster import WorkerInfo


class FakeCaller:
    """Records calls; the test answers them."""

    def __init__(self) -> None:
        self.roster: dict[str, WorkerInfo] = {}
        self.open: list[tuple[str, Any, asyncio.Future[Any]]] = []
        self.listed: set[str] = set()
        self.held: asyncio.Future[Any] | None = None

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
            manifest = WeightsManifest(payload["version"], "shm", "here", 0, "")
            self.answer = {"manifest": to_payload(manifest)}
            if self.held is not None:
                return self.held
            future.set_result(self.answer)
        else:
            self.open.append((worker, payload["manifest"]["version"], future))
        return future

    def list_services(self, worker: str, listed: bool) -> None:
        (self.listed.add if listed else self.listed.discard)(worker)

    def dismiss(self, worker: str, reason: str) -> None:
        raise AssertionError("whoever is told of a failure decides about it")

    async def loaded(self, worker: str, error: Exception | None = None) -> int:
        """Answer the oldest load of a worker; its version."""
        await asyncio.sleep(0)
        entry = next(entry for entry in self.open if entry[0] == worker)
        self.open.remove(entry)
        if error is None:
            entry[2].set_result({"weight_stage_ms": 3.0, "weight_pause_ms": 2.0})
        elif not entry[2].done():
            entry[2].set_exception(error)
        for _ in range(3):
            await asyncio.sleep(0)
        return entry[1]


def gone(version: int) -> RemoteError:
    return RemoteError(
        worker="generation/1",
        handler="update_weights",
        mfc="",
        step=-1,
        kind="WeightsGone",
        message=f"version {version} is gone",
        remote_traceback="",
    )


class Scene:
    def __init__(self, folder: Path, straggler_grace_s: float = 60.0) -> None:
        self.caller = FakeCaller()
        self.told = []
        self.wrong: list[WrongWeights] = []
        self.warned: list[str] = []
        self.failed: list[str] = []
        self.updates = WeightUpdates(
            self.caller,
            "model_worker/0",
            "actor",
            on_version=self.told.append,
            on_failed=lambda worker, error: self.failed.append(worker),
            on_wrong=self.wrong.append,
            record=WeightRecord(folder, self.warned.append),
            timeout_s=60,
            straggler_grace_s=straggler_grace_s,
        )

    def stale(self) -> set[str]:
        """Those that get no requests until they have the weights that admission counts."""
        return set(self.updates.versions.keys() - self.updates.current_workers)


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_the_lowest_version_of_all_workers_counts(scene: Scene) -> None:
    scene.updates.worker_joined("generation/0")
    scene.updates.worker_joined("generation/1")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    await scene.caller.loaded("generation/1")
    publishing = asyncio.create_task(scene.updates.publish(1))
    await publishing
    await scene.caller.loaded("generation/0")
    assert scene.updates.versions == {"generation/0": 1, "generation/1": 0} and scene.told[-1] == 0
    await scene.caller.loaded("generation/1")
    assert scene.told[-1] == 1 and scene.updates.metrics["weight_pause_ms"] == 2.0


async def test_one_version_at_a_time(scene: Scene) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    publishing = asyncio.create_task(scene.updates.publish(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not publishing.done() and [version for _, version, _ in scene.caller.open] == [0]
    assert await scene.caller.loaded("generation/0") == 0
    await publishing
    assert await scene.caller.loaded("generation/0") == 1
    await asyncio.wait_for(scene.updates.wait_for_current(), 60)


async def test_who_joins_late_gets_the_last_version_and_holds_nobody_up_before(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    assert (
        scene.updates.versions["generation/1"] == -1
        and await scene.caller.loaded("generation/1") == 0
    )
    assert scene.told == [0] and scene.updates.current_workers == scene.caller.listed == {
        "generation/0",
        "generation/1",
    }


async def test_who_joins_during_an_update_is_listed_when_it_has_what_admission_counts(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.caller.held = asyncio.get_running_loop().create_future()
    publishing = asyncio.create_task(scene.updates.publish(1))
    await asyncio.sleep(0)
    scene.updates.worker_joined("generation/1")
    scene.caller.held.set_result(scene.caller.answer)
    await asyncio.wait_for(publishing, 60)
    await scene.caller.loaded("generation/0")
    assert scene.told[-1] == 1
    assert await scene.caller.loaded("generation/1") == 0, (
        "the version that was the newest when it joined"
    )
    assert scene.updates.versions["generation/1"] == 0 and scene.caller.listed == {"generation/0"}
    assert await scene.caller.loaded("generation/1") == 1
    assert scene.caller.listed == {"generation/0", "generation/1"} and scene.told == [0, 1]


async def test_one_that_joins_and_hangs_holds_up_nobody(scene: Scene) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    await asyncio.wait_for(scene.updates.publish(1), 60)
    assert await scene.caller.loaded("generation/0") == 1 and scene.told == [0, 1]


async def test_who_ends_a_load_in_the_moment_of_the_next_manifest_loads_that_too(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    await asyncio.sleep(0)
    scene.caller.held = asyncio.get_running_loop().create_future()
    publishing = asyncio.create_task(scene.updates.publish(1))
    await asyncio.sleep(0)
    (_, version, load) = scene.caller.open.pop()
    assert version == 0
    load.set_result({"weight_stage_ms": 3.0, "weight_pause_ms": 2.0})
    scene.caller.held.set_result(scene.caller.answer)
    await asyncio.wait_for(publishing, 60)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(entry[:2] for entry in scene.caller.open) == [
        ("generation/0", 1),
        ("generation/1", 1),
    ]
    await scene.caller.loaded("generation/0")
    await scene.caller.loaded("generation/1")
    assert scene.told == [0, 1] and not scene.updates.busy


async def test_the_failure_of_one_that_died_is_not_held_against_its_successor(scene: Scene) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await asyncio.sleep(0)
    scene.caller.open.pop()[2].set_exception(WorkerDied("generation/0", "killed"))
    while not all(task.done() for task in scene.updates._loading.values()):
        await asyncio.sleep(0)
    assert scene.failed == []
    scene.updates.worker_left("generation/0")
    scene.updates.worker_joined("generation/0")
    assert await scene.caller.loaded("generation/0") == 0
    assert scene.failed == [] and scene.updates.current_workers == {"generation/0"}


async def test_one_that_joins_and_does_not_load_within_the_deadline_is_reported(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    await asyncio.sleep(0)
    await scene.updates.publish(1)
    await scene.caller.loaded("generation/0")
    assert await scene.caller.loaded("generation/1", RpcTimeout("too late")) == 0
    assert scene.failed == ["generation/1"], (
        "though a newer version is there: a second deadline would not help"
    )
    assert scene.caller.open == [] and not scene.updates.busy


async def test_a_version_that_was_withdrawn_while_it_was_loaded_is_no_failure(scene: Scene) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    await asyncio.sleep(0)
    await scene.updates.publish(1)
    assert await scene.caller.loaded("generation/1", gone(0)) == 0
    assert await scene.caller.loaded("generation/1") == 1 and scene.failed == []


async def test_a_worker_that_dies_while_it_loads_is_no_failure_and_frees_the_others(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    scene.updates.worker_joined("generation/1")
    await scene.updates.publish(3)
    await scene.caller.loaded("generation/0")
    assert scene.told == [3]
    loading = scene.caller.open[0][2]
    loading.set_exception(WorkerDied("generation/1", "killed"))
    scene.updates.worker_left("generation/1")
    await asyncio.wait_for(scene.updates.wait_for_current(), 60)
    assert (
        scene.failed == []
        and scene.told[-1] == 3
        and list(scene.updates.versions) == ["generation/0"]
    )
    scene.caller.open.clear()
    scene.updates.worker_joined("generation/1")
    assert await scene.caller.loaded("generation/1") == 3, (
        "its successor gets the version that it lacks"
    )


@pytest.mark.parametrize("error", [RpcTimeout("too late"), RpcError("a wrong checksum")])
async def test_a_worker_that_cannot_load_is_reported(scene: Scene, error: RpcError) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0", error)
    assert scene.failed == ["generation/0"] and scene.told == []
    await asyncio.wait_for(scene.updates.wait_for_current(), 60)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def one_publication_ahead_of_two(scene: Scene) -> None:
    """Two workers hold version 0, and version 1 is published."""
    for worker in ("generation/0", "generation/1"):
        scene.updates.worker_joined(worker)
    await scene.updates.publish(0)
    for worker in ("generation/0", "generation/1"):
        await scene.caller.loaded(worker)
    await scene.updates.publish(1)


async def test_one_that_takes_much_longer_than_another_is_stale_and_holds_up_nobody(
    tmp_path: Path,
) -> None:
    """Samples are admitted under the version that the others have, and the next one is published
    meanwhile."""
    scene = Scene(tmp_path, straggler_grace_s=0.0)
    await one_publication_ahead_of_two(scene)
    assert await scene.caller.loaded("generation/0") == 1
    await until(scene.stale)
    assert (
        scene.stale() == {"generation/1"}
        and scene.caller.listed == {"generation/0"}
        and scene.told == [0, 1]
    )
    await asyncio.wait_for(scene.updates.publish(2), 60)
    assert await scene.caller.loaded("generation/0") == 2 and scene.told == [0, 1, 2]
    assert await scene.caller.loaded("generation/1") == 1
    assert scene.stale() == {"generation/1"}, "it has a version that nobody counts on any more"
    assert await scene.caller.loaded("generation/1") == 2
    assert (
        not scene.stale()
        and scene.caller.listed == {"generation/0", "generation/1"}
        and scene.failed == []
    )


async def test_a_publication_that_waits_for_one_goes_on_when_that_one_is_stale(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, straggler_grace_s=0.05)
    await one_publication_ahead_of_two(scene)
    publishing = asyncio.create_task(scene.updates.publish(2))
    assert await scene.caller.loaded("generation/0") == 1
    await asyncio.wait_for(publishing, 60)
    assert scene.stale() == {"generation/1"} and scene.updates.published_version == 2


async def test_where_all_are_slow_nobody_is_stale(tmp_path: Path) -> None:
    scene = Scene(tmp_path, straggler_grace_s=0.0)
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await scene.caller.loaded("generation/0")
    scene.updates.worker_joined("generation/1")
    await scene.caller.loaded("generation/1")
    await scene.updates.publish(1)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not scene.stale() and scene.told == [0], (
        "the last version that all have goes on to count"
    )


async def test_an_engine_that_holds_other_weights_ends_the_run_and_is_not_just_replaced(
    scene: Scene,
) -> None:
    scene.updates.worker_joined("generation/0")
    await scene.updates.publish(0)
    await asyncio.sleep(0)
    changed = [["model.norm.weight", "d-1", "d-2"]]
    scene.caller.open.pop()[2].set_result(
        {"weight_stage_ms": 1.0, "weight_pause_ms": 1.0, "changed": changed}
    )
    await until(lambda: scene.wrong)
    assert (
        "generation/0: model.norm.weight changed" in str(scene.wrong[0])
        and scene.failed == scene.told == []
    )
