"""Seats in groups that get weights by a broadcast, and what happens when one of a group fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from realhf.api.calls import (
    GroupPlaceAnswer,
    StartBroadcastAnswer,
    StopBroadcastAnswer,
    UpdateWeightsAnswer,
)
from realhf.api.generation import WeightsManifest
from realhf.base.messages import to_payload
from realhf.dataflow.rollouts.group_loads import GroupLoadError, GroupLoads, NoGroup, NotOffered
from realhf.transport.errors import RemoteError, WorkerDied

MANIFEST = WeightsManifest(3, "nccl", "", 5_000_000_000, "")
DONE = to_payload(UpdateWeightsAnswer(1.0, 2.0))


class Caller:
    """Answers as a trainer and generation workers do."""

    def __init__(self, ranks: dict[str, int]) -> None:
        self.ranks = ranks
        self.offered = True
        self.starts: list[dict[str, Any]] = []
        self.seats: dict[str, dict[str, Any]] = {}
        self.limits: dict[str, float] = {}
        self.stops = 0
        self.errors: dict[str, Exception] = {}
        self.waits: set[str] = set()
        self.silent: set[str] = set()
        self.ended: list[str] = []
        self.on_start: Callable[[], None] = lambda: None

    def call(
        self, worker: str, handler: str, payload: Any = None, *, timeout_s: float, **more: Any
    ) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._answer(worker, handler, payload, timeout_s))

    async def _answer(self, worker: str, handler: str, payload: Any, timeout_s: float) -> Any:
        if handler == "group_place":
            while worker in self.silent:
                await asyncio.sleep(0.001)
            ranks = self.ranks[worker]
            return to_payload(GroupPlaceAnswer(ranks, "" if ranks else "is small"))
        if handler == "start_broadcast":
            self.starts.append(payload)
            await asyncio.sleep(0)
            self.on_start()
            return to_payload(StartBroadcastAnswer(self.offered, b"id", 77))
        if handler == "stop_broadcast":
            self.stops += 1
            self.waits.clear()
            return to_payload(StopBroadcastAnswer("cut off"))
        assert (worker, handler) not in self.seats
        self.seats[worker] = payload["seat"]
        self.limits[worker] = timeout_s
        await asyncio.sleep(0)
        try:
            while worker in self.waits:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.ended.append(worker)
            raise
        if worker in self.errors:
            raise self.errors[worker]
        return DONE


def remote(kind: str) -> RemoteError:
    return RemoteError(
        worker="w", handler="h", mfc="", step=-1, kind=kind, message="why", remote_traceback=""
    )


async def load(
    groups: GroupLoads, *workers: str, manifest: WeightsManifest = MANIFEST
) -> list[UpdateWeightsAnswer | BaseException]:
    calls = (groups.load(worker, manifest) for worker in workers)
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)


async def test_seats_follow_one_another_whatever_servers_need() -> None:
    caller = Caller({"generation/2": 4, "generation/0": 1, "generation/1": 2})
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    answers = await load(groups, *caller.ranks)
    assert [answer.weight_pause_ms for answer in answers] == [2.0] * 3  # type: ignore[union-attr]
    (start,) = caller.starts
    assert start["members"] == ["generation/0.0", "generation/1.0", "generation/2.0"]
    assert (start["version"], start["trial"], start["world_size"]) == (3, 0, 8)
    assert [caller.seats[name]["rank_offset"] for name in sorted(caller.seats)] == [1, 2, 4]
    for seat in caller.seats.values():
        assert (seat["world_size"], seat["unique_id"], seat["pack_bytes"]) == (8, b"id", 77)
        assert seat["timeout_s"] == start["timeout_s"] == 65.0, "a minute and a second per GB"
    assert all(limit > 2 * 65.0 for limit in caller.limits.values()), "to join, then to receive"


async def test_versions_have_groups_of_their_own() -> None:
    caller = Caller({"generation/0": 1, "generation/1": 1})
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    other = WeightsManifest(4, "nccl", "", 0, "")
    await asyncio.gather(load(groups, "generation/0"), load(groups, "generation/1", manifest=other))
    assert [(start["version"], start["members"]) for start in caller.starts] == [
        (3, ["generation/0.0"]),
        (4, ["generation/1.0"]),
    ]


async def test_who_cannot_take_part_is_told_apart_from_who_was_not_reached() -> None:
    caller = Caller({"generation/0": 0, "generation/1": 1})
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    refused, answer = await load(groups, "generation/0", "generation/1")
    assert isinstance(refused, NoGroup) and isinstance(answer, UpdateWeightsAnswer)
    assert str(refused) == "generation/0 takes no weights over NCCL: its engine is small"
    caller.seats.clear()
    caller.offered = False
    (gone,) = await load(groups, "generation/1")
    assert isinstance(gone, NotOffered) and not caller.seats


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (WorkerDied("generation/1", "killed"), False),
        (remote("ValueError"), False),
        (remote("BroadcastError"), True),
    ],
    ids=["died", "its own fault", "not reached"],
)
async def test_the_trainer_ends_a_group_of_which_one_fails(error: Exception, kept: bool) -> None:
    caller = Caller({"generation/0": 1, "generation/1": 1})
    caller.errors["generation/1"] = error
    caller.waits.add("generation/0")
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    answer, failed = await load(groups, "generation/0", "generation/1")
    assert isinstance(answer, UpdateWeightsAnswer) and caller.stops == 1
    assert isinstance(failed, GroupLoadError) == kept, "only that one is tried again"
    assert kept or failed is error
    caller.seats.clear()
    caller.errors.clear()
    groups.forget("generation/1")
    await load(groups, "generation/0", "generation/1")
    assert caller.starts[-1]["members"] == ["generation/0.0", "generation/1.1"], "a successor"


async def test_one_that_leaves_while_the_trainer_starts_costs_the_others_nothing() -> None:
    """Nobody gets a seat beside a rank that never comes: its server could not be called back."""
    caller = Caller({f"generation/{index}": 1 for index in range(3)})
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    caller.on_start = lambda: groups.forget("generation/1")
    answers = await load(groups, *caller.ranks)
    assert [type(answer) for answer in answers] == [GroupLoadError] * 3
    assert str(answers[0]) == "generation/1 left before the group was formed"
    assert caller.stops == 1 and not caller.seats and groups.groups_formed == 0
    caller.on_start = lambda: None
    answers = await load(groups, "generation/0", "generation/2")
    assert all(isinstance(answer, UpdateWeightsAnswer) for answer in answers)
    assert caller.starts[-1]["members"] == ["generation/0.0", "generation/2.0"]


async def test_an_error_of_ours_ends_one_round_only(caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller({"generation/0": 1, "generation/1": 1})
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    broken = WeightsManifest(4, "nccl", "", None, "")  # type: ignore[arg-type]
    (failed,), (answer,) = await asyncio.gather(
        load(groups, "generation/0", manifest=broken), load(groups, "generation/1")
    )
    assert isinstance(failed, GroupLoadError) and "TypeError" in str(failed)
    assert isinstance(answer, UpdateWeightsAnswer) and caller.stops == 1
    assert "a broadcast of weights failed" in caplog.text


async def test_one_that_does_not_say_its_place_delays_the_others_by_a_second_at_most() -> None:
    caller = Caller({"generation/0": 1, "generation/1": 1})
    caller.silent.add("generation/1")
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    late = asyncio.create_task(load(groups, "generation/1"))
    began = time.monotonic()
    (answer,) = await load(groups, "generation/0")
    assert isinstance(answer, UpdateWeightsAnswer) and not late.done()
    assert time.monotonic() - began > 0.9, "it is waited for a little"
    caller.silent.clear()
    (answer,) = await late
    assert isinstance(answer, UpdateWeightsAnswer)
    assert [start["members"] for start in caller.starts] == [["generation/0.0"], ["generation/1.0"]]


async def test_an_end_leaves_no_call_running() -> None:
    caller = Caller({"generation/0": 1})
    caller.waits.add("generation/0")
    groups = GroupLoads(caller, "model_worker/0", timeout_s=10.0)  # type: ignore[arg-type]
    other = WeightsManifest(4, "nccl", "", 0, "")
    loads = asyncio.gather(
        load(groups, "generation/0"), load(groups, "generation/0", manifest=other)
    )
    while not caller.seats:
        await asyncio.sleep(0.001)
    await groups.close()
    (first,), (second,) = await loads
    assert isinstance(first, GroupLoadError) and isinstance(second, asyncio.CancelledError)
    await asyncio.sleep(0)
    assert caller.ended == ["generation/0"]
