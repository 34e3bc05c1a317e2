"""The master's side of rollouts, step by step, with a real journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from realhf.api.calls import (
    ACCEPTED,
    ARRIVED,
    DUPLICATE,
    REFUSED,
    Arrival,
    ArrivedRequest,
    RolloutLease,
)
from realhf.api.source import SampleResult
from realhf.dataflow.journal.audit import audit_folder
from realhf.dataflow.journal.journal import JournalError
from realhf.dataflow.journal.ledger import RolloutLedger
from realhf.dataflow.rollouts.control import (
    MAX_CONSECUTIVE_FAILURES,
    RolloutControl,
    RolloutRules,
    RolloutService,
    RolloutsFailed,
)
from realhf.dataflow.rollouts.sample_queue import QueuedTask, SampleQueue
from realhf.dataflow.rollouts.staleness import StalenessManager, StragglerGate
from realhf.transport.service import ServiceClient, ServiceError
from tests.dataflow.rollouts.toy_streamed_run import TRAINER, CountingSource, meta_of

W0 = "rollout_worker/0:11"
W1 = "rollout_worker/1:12"
STOP = ([], [])
AGAIN = (None, [])


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Any]:
    ledgers: list[RolloutLedger] = []

    def control(
        *,
        batch: int = 2,
        eta: int = 1,
        concurrent: int = 8,
        total: int = 8,
        limit: int = 10**6,
        **rules: Any,
    ) -> RolloutControl:
        ledger, _ = RolloutLedger.open(tmp_path, completed_steps=0)
        ledgers.append(ledger)
        staleness = StalenessManager(
            batch_size=batch, max_head_offpolicyness=eta, max_concurrent=concurrent
        )
        drop = rules.get("drop", False)
        made = RolloutControl(
            SampleQueue(CountingSource(limit), batch),
            ledger,
            staleness,
            StragglerGate(batch, eta, wait=not drop),
            RolloutRules(total, 600.0, 2, **rules),
            discard=discarded.extend,
            warn=warned.append,
        )
        made.warned = warned  # pyright: ignore[reportAttributeAccessIssue]
        made.worker_joined(W0)
        made.worker_joined(W1)
        return made

    discarded: list[str] = []
    warned: list[str] = []
    control.discarded = discarded  # pyright: ignore[reportFunctionMemberAccess]
    yield control
    for ledger in ledgers:
        ledger.close()
    tally = audit_folder(tmp_path)
    assert tally.is_balanced


async def lease(control: RolloutControl, count: int = 1, worker: str = W0) -> list[RolloutLease]:
    leases, parts = await control.allocate(worker, count, 0.0)
    assert leases and not parts
    return leases


def arrival(given: RolloutLease, error: str = "", **metadata: str) -> Arrival:
    meta = [] if error else meta_of(given.id, **metadata)
    return Arrival(given.id, given.attempt, "w", [] if error else [1, 0, 9], meta, error)


async def test_capacity_bounds_what_is_given_and_new_weights_open_it(make: Any) -> None:
    control = make(batch=2, eta=1, concurrent=3, total=100)
    assert len(await lease(control, 10)) == 3
    assert await control.allocate(W1, 1, 0.0) == AGAIN
    waiting = asyncio.create_task(control.allocate(W1, 5, 60.0))
    await asyncio.sleep(0)
    for given in list(control._open):
        entry = control._open[given]
        await control.record_arrivals(
            [arrival(RolloutLease(given, entry.task.attempt, 0, 0, 1.0))], TRAINER
        )
    (first,) = (await asyncio.wait_for(waiting, 60))[0]
    assert first.order == 3 and control.capacity == 0, (
        "four samples are allowed at version 0 and staleness 1"
    )
    control.set_version(1)
    assert control.capacity == 2 and len(await lease(control, 10, W1)) == 2
    control.set_version(0)
    assert control.staleness.version == 1, "an old version changes nothing"


async def test_a_sample_carries_its_task_whatever_the_rollout_worker_says(make: Any) -> None:
    control = make(batch=1)
    (given,) = await lease(control)
    assert (given.metadata, given.version, given.attempt, given.order) == ({"task": 0}, 0, 0, 0)
    assert await control.record_arrivals([arrival(given)], TRAINER) == [ACCEPTED]
    (meta,) = await control.step_batch(0)
    assert meta.metadata == {"rollout": ["{}"], "task": [0]}


async def test_only_the_worker_and_the_attempt_that_hold_a_sample_can_end_it(make: Any) -> None:
    control = make()
    (given,) = await lease(control)
    control.record_failure(W1, given.id, given.attempt, "env_error", "not mine")
    control.record_failure(W0, given.id, given.attempt + 1, "env_error", "not this one")
    control.record_failure(W0, "nobody", 0, "env_error", "unknown")
    assert control.staleness.running == 1
    control.record_failure(W0, given.id, given.attempt, "env_error", "gone")
    assert control.staleness.running == 0
    (again,) = await lease(control, worker=W1)
    assert (again.id, again.attempt, again.order) == (given.id, 1, given.order)
    assert await control.record_arrivals([arrival(given)], TRAINER) == [REFUSED], (
        "the first attempt comes too late"
    )
    assert await control.record_arrivals([arrival(again), arrival(again)], TRAINER) == [
        ACCEPTED,
        DUPLICATE,
    ]
    assert control.refused == 1


async def test_an_attempt_counts_once_whichever_receivers_it_came_to(make: Any) -> None:
    control = make(batch=1)
    (given,) = await lease(control)
    assert await control.record_arrivals([arrival(given)], "model_worker/1") == [ACCEPTED]
    assert await control.record_arrivals([arrival(given)], TRAINER) == [REFUSED], (
        "its tensors are with the other one"
    )
    assert await control.record_arrivals([arrival(given)], "model_worker/1") == [DUPLICATE]
    assert control.locations.group_by_worker([given.id]) == {"model_worker/1": [given.id]}
    await control.step_batch(0)
    control.record([SampleResult(given.id)])
    assert await control.record_arrivals([arrival(given)], TRAINER) == [REFUSED], (
        "also after it was trained"
    )
    assert (control.staleness.accepted, control.refused) == (1, 2)


async def test_deaths_are_no_failures_but_failures_are_counted(make: Any) -> None:
    control = make(max_deaths=9)
    (given,) = await lease(control)
    for attempt in range(5):
        control.worker_left(W0, "killed")
        control.worker_joined(W0)
        (given,) = await lease(control)
        assert given.attempt == attempt + 1
    control.record_failure(W0, given.id, given.attempt, "env_error", "once")
    (given,) = await lease(control)
    control._open[given.id].expires = 0.0
    control.expire()
    assert control.given_up == 1 and control.lost_attempts == 5 and control.staleness.running == 0
    (other,) = await lease(control)
    assert other.id != given.id


async def test_a_sample_that_kills_whoever_plays_it_is_given_up_aloud_and_those_beside_it_are_not(
    make: Any,
) -> None:
    control = make(batch=4, eta=1, concurrent=8, total=8)
    deaths = 0
    played = set()
    while len(played) < 8:
        for worker in (W0, W1):
            leases = (await control.allocate(worker, 3, 0.0))[0] or []
            if any(given.id == "s0" for given in leases):
                deaths += 1
                control.worker_left(worker, "killed by SIGSEGV")
                control.worker_joined(worker)
                continue
            for given in leases:
                assert await control.record_arrivals([arrival(given)], TRAINER) == [ACCEPTED]
                played.add(given.id)
    assert deaths == 3 and control.given_up == 1 and played == {f"s{i}" for i in range(1, 9)}
    (text,) = control.warned
    assert "sample s0 is given up" in text and "3 deaths" in text and ": killed by SIGSEGV" in text


async def test_samples_that_the_next_death_would_end_are_not_played_together(make: Any) -> None:
    control = make(batch=4, eta=1, concurrent=8)
    for _ in range(2):
        lost = [given.id for given in await lease(control, 3)]
        assert lost == ["s0", "s1", "s2"]
        control.worker_left(W0, "killed")
        control.worker_joined(W0)
    assert [given.id for given in await lease(control, 3, W1)] == ["s0", "s3", "s4"]
    assert [given.id for given in await lease(control, 2)] == ["s1", "s5"]
    assert [given.id for given in await lease(control, 2, W1)] == ["s6", "s7"], (
        "not s2, as it has s0"
    )
    control.record_failure(W1, "s0", 2, "env_error", "gone")
    assert [given.id for given in await lease(control, 2, W1)] == ["s0", "s8"], (
        "a failure is no death"
    )


async def test_a_worker_that_stops_holds_nothing_back(make: Any) -> None:
    control = make()
    (given,) = await lease(control)
    control.worker_left(W0, "it stopped")
    assert control.workers == {W1} and await control.allocate(W0, 1, 60.0) == STOP
    assert [entry.id for entry in await lease(control, worker=W1)] == [given.id]


async def test_what_comes_back_is_played_in_the_order_of_admission(make: Any) -> None:
    control = make(batch=4, concurrent=8)
    mine = await lease(control, 3)
    other = await lease(control, 1, W1)
    control.worker_left(W1, "killed")
    control.worker_left(W0, "killed")
    control.worker_joined(W1)
    assert [entry.order for entry in await lease(control, 8, W1)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(mine) == 3 and len(other) == 1


async def test_waiters_end_when_the_run_holds_or_fails(make: Any) -> None:
    control = make(batch=1, total=1, concurrent=1)
    (given,) = await lease(control)
    for change in (control.pause, partial(control.worker_left, W1, "killed")):
        control.paused = False
        waiting = asyncio.create_task(control.allocate(W1, 1, 60.0))
        await asyncio.sleep(0)
        change()
        assert await asyncio.wait_for(waiting, 60) == STOP
    control.paused = False
    control.worker_joined(W1)
    await control.record_arrivals([arrival(given)], TRAINER)
    assert control.complete
    assert await control.allocate(W1, 1, 0.0) == AGAIN, "an evaluation may follow"
    stopping = asyncio.create_task(control.wait_until_stopped())
    assert len(await control.step_batch(0)) == 1
    assert await asyncio.wait_for(control.step_batch(1), 60) == []
    control.worker_left(W0, "it stopped")
    await asyncio.sleep(0)
    assert not stopping.done()
    control.fail(RolloutsFailed("first"))
    control.fail(RolloutsFailed("second"))
    with pytest.raises(RolloutsFailed, match="first"):
        await asyncio.wait_for(stopping, 60)


async def test_a_source_that_ends_gives_a_last_step_batch_and_everything_before_it(
    make: Any,
) -> None:
    control = make(batch=4, total=100, limit=5, concurrent=4)
    for given in await lease(control, 4):
        await control.record_arrivals([arrival(given)], TRAINER)
    (last,) = await lease(control, 4)
    assert len(await control.step_batch(0)) == 4
    rest = asyncio.create_task(control.step_batch(1))
    await asyncio.sleep(0)
    control.worker_left(W0, "killed")
    await asyncio.sleep(0)
    assert not rest.done(), "one is still to be played"
    (last,) = await lease(control, 4, W1)
    await control.record_arrivals([arrival(last)], TRAINER)
    assert [meta.ids[0] for meta in await asyncio.wait_for(rest, 60)] == [last.id]
    assert await asyncio.wait_for(control.step_batch(2), 60) == []


async def test_the_end_of_the_source_is_told_to_who_waits_for_samples(make: Any) -> None:
    control = make(batch=2, total=100, limit=2)
    for given in await lease(control, 2):
        await control.record_arrivals([arrival(given)], TRAINER)
    assert len(await control.step_batch(0)) == 2
    rest = asyncio.create_task(control.step_batch(1))
    await asyncio.sleep(0)
    asking = [asyncio.create_task(control.allocate(worker, 1, 60.0)) for worker in (W0, W1)]
    assert await asyncio.wait_for(rest, 60) == []
    assert not any(task.done() for task in asking)
    control.fail(RolloutsFailed("over"))
    assert await asyncio.wait_for(asyncio.gather(*asking), 60) == [STOP, STOP]


async def test_drawn_items_that_wait_for_capacity_are_not_the_end(make: Any) -> None:
    control = make(batch=3, eta=0, total=100, limit=5, concurrent=3)
    for given in await lease(control, 3):
        await control.record_arrivals([arrival(given)], TRAINER)
    assert len(await control.step_batch(0)) == 3
    control.set_version(1)
    (given,) = await lease(control, 1)
    await control.record_arrivals([arrival(given)], TRAINER)
    rest = asyncio.create_task(control.step_batch(1))
    await asyncio.sleep(0)
    assert not rest.done(), "the other drawn item has not been played"
    (given,) = await lease(control, 1)
    await control.record_arrivals([arrival(given)], TRAINER)
    assert len(await asyncio.wait_for(rest, 60)) == 2


async def test_stale_samples_are_dropped_and_their_room_is_given_away_at_once(make: Any) -> None:
    control = make(batch=2, eta=0, total=100, drop=True)
    slow, fast = await lease(control, 2)
    await control.record_arrivals([arrival(fast)], TRAINER)
    control.set_version(1)
    (third,) = await lease(control, 1)
    await control.record_arrivals([arrival(third)], TRAINER)
    assert len(await control.step_batch(0)) == 2
    control.record([SampleResult(fast.id), SampleResult(third.id)])
    await control.record_arrivals([arrival(slow)], TRAINER)
    more = await lease(control, 8)
    waiting = asyncio.create_task(control.allocate(W1, 8, 60.0))
    await asyncio.sleep(0)
    training = asyncio.create_task(control.step_batch(1))
    given, _ = await asyncio.wait_for(waiting, 60)
    assert make.discarded == [slow.id] and control.staleness.dropped == 1 and len(given or []) == 1
    assert not {entry.id for entry in [*more, *(given or [])]} & {slow.id}
    training.cancel()


async def test_samples_without_signal_give_way_up_to_a_bound(make: Any) -> None:
    """What gave way has told the source its result once, is in no step, and its room is free;
    beyond the bound, which counts anew after every step, such a sample trains."""
    control = make(batch=2, eta=0, total=4, max_flat=2)

    async def play(count: int, *rewards: str) -> list[str]:
        """Ids of those that the trainer keeps."""
        given = await lease(control, count)
        answers = [
            (await control.record_arrivals([arrival(g, rewards=r)], TRAINER))[0]
            for g, r in zip(given, rewards, strict=True)
        ]
        assert {*answers} <= {ACCEPTED, REFUSED}
        return [one.id for one, answer in zip(given, answers, strict=True) if answer == ACCEPTED]

    source = control._queue.source
    assert await play(2, "[1.0, 1.0]", "[1.0, 0.0]") == ["s1"]
    assert source.told == ["s0"] and control.staleness.accepted == 1 and control.refused == 0
    assert await play(1, "[null, 0.5]") == []
    again = RolloutLease("s2", 0, 0, 0, 1.0)
    assert await control.record_arrivals([arrival(again, rewards="[null, 0.5]")], TRAINER) == [
        REFUSED
    ]
    assert await play(1, "[0.0, 0.0]") == ["s3"], "the bound is reached"
    assert [meta.ids[0] for meta in await control.step_batch(0)] == ["s1", "s3"]
    control.record([SampleResult("s1", rewards=[1.0, 0.0]), SampleResult("s3", rewards=[0.0, 0.0])])
    assert source.told == ["s0", "s2", "s1", "s3"] and control.flat_trained == 1
    assert [(one.id, one.metadata["task"], one.rewards) for one in control.flat_of_step] == [
        ("s0", 0, [1.0, 1.0]),
        ("s2", 2, [None, 0.5]),
    ]
    control.set_version(1)
    assert await play(2, "[0.0, 0.0]", "[0.0, 1.0]") == ["s5"]
    assert not control.complete and await play(1, "[2.0, 1.0]") == ["s6"]
    assert control.complete and [meta.ids[0] for meta in await control.step_batch(1)] == [
        "s5",
        "s6",
    ]
    control.record([SampleResult("s5", rewards=[0.0, 1.0]), SampleResult("s6", rewards=[2.0, 1.0])])
    assert control.flat_trained == 0 and [one.id for one in control.flat_of_step] == ["s4"]
    draw = control._ledger.state.draw
    assert draw is not None and draw["source"]["told"] == source.told, (
        "a restart tells the source nothing twice"
    )
    assert control._ledger.state.totals()["dropped"] == 3


async def test_the_bound_on_what_gives_way_outlives_the_process(make: Any) -> None:
    """A run that was killed used to begin the count anew, and with it the play that a step may
    cost."""
    control = make(batch=2, eta=0, total=4, max_flat=1)
    (given,) = await lease(control)
    assert await control.record_arrivals([arrival(given, rewards="[1.0, 1.0]")], TRAINER) == [
        REFUSED
    ]
    control._ledger.close()
    again = make(batch=2, eta=0, total=4, max_flat=1)
    again._queue.load_state(again._ledger.state.draw, [])
    again.restore([], {}, {}, 1)
    (given,) = await lease(again)
    assert await again.record_arrivals([arrival(given, rewards="[1.0, 1.0]")], TRAINER) == [
        ACCEPTED
    ]


async def test_the_first_failure_ends_a_run_that_wants_it_so_and_too_many_end_any(
    make: Any,
) -> None:
    control = make(fail_fast=True)
    (given,) = await lease(control)
    control.record_failure(W0, given.id, 0, "env_error", "no server")
    with pytest.raises(RolloutsFailed, match=f"sample {given.id}: env_error: no server"):
        await control.step_batch(0)
    assert await control.allocate(W0, 1, 60.0) == STOP


async def test_a_run_in_which_nothing_works_ends(make: Any) -> None:
    control = make(total=1000)
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        (given,) = await lease(control)
        control.record_failure(W0, given.id, given.attempt, "env_error", "no server")
    with pytest.raises(RolloutsFailed, match="no server"):
        await control.step_batch(0)


async def test_a_journal_that_cannot_be_written_is_not_ignored(make: Any) -> None:
    control = make()
    (given,) = await lease(control)
    control._ledger._journal._failure = OSError("disk full")
    with pytest.raises(JournalError):
        await control.record_arrivals([arrival(given)], TRAINER)
    control._ledger._journal._failure = None


async def test_the_service_refuses_nonsense_and_fails_the_run_for_errors_of_its_own(
    make: Any,
) -> None:
    control = make()
    service = RolloutService(control, "run")
    client = ServiceClient(service.endpoint, "the master", W0, "run")
    given = await client.request("allocate", {"count": 2, "hold_s": 0.0}, timeout_s=60)
    assert [entry["id"] for entry in given["leases"]] == ["s0", "s1"]
    nonsense = [
        ("allocate", {"count": "many", "hold_s": 0}),
        ("allocate", {}),
        ("rejected", {"id": "s0"}),
        ("arrived", {"arrivals": [{"odd": 1}]}),
        ("arrived", None),
        ("no_such", {}),
    ]
    for method, fields in nonsense:
        with pytest.raises(ServiceError, match=rf"ValueError|MessageError: message {method} \("):
            await client.request(method, fields, timeout_s=60)
    fields = {"id": "s1", "attempt": 0, "outcome": "env_error", "message": "gone"}
    assert await client.request("rejected", fields, timeout_s=60) == {}
    assert control.staleness.running == 1 and control._failure is None
    malformed = Arrival("s0", 0, "w", [1, 0, 9], [b"\xff"])
    with pytest.raises(ServiceError):
        await client.ask(ARRIVED, ArrivedRequest([malformed]), timeout_s=60)
    with pytest.raises(Exception, match="malformed sample"):
        await control.step_batch(0)
    assert await client.request("stopped", {}, timeout_s=60) == {} and control.workers == {W1}
    client.close()
    await service.close()


def test_results_reach_the_source_once() -> None:
    source = CountingSource(10)
    supply = SampleQueue(source, 2, recorded={"s0"})
    supply.record([SampleResult("s0"), SampleResult("s1")])
    supply.record([SampleResult("s0")])
    assert source.told == ["s1", "s0"]


def test_a_supply_survives_a_restart_without_what_was_admitted() -> None:
    supply = SampleQueue(CountingSource(5), 3, recorded={"old"})
    first = supply.take()
    assert first is not None and first.item.id == "s0" and supply.draws == 1
    again = SampleQueue(CountingSource(5), 3)
    again.load_state(supply.state(), ["s0", "s2"])
    assert again.recorded == {"old"}
    again.give_back(QueuedTask(first.item, 1, order=7))
    again.give_back(QueuedTask(first.item, 1, order=2))
    taken = [again.take() for _ in range(5)]
    assert [(task.item.id, task.order) for task in taken if task] == [
        ("s0", 2),
        ("s0", 7),
        ("s1", None),
        ("s3", None),
        ("s4", None),
    ]
    assert again.is_empty and again.take() is None
