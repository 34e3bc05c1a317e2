"""The sequence buffer, case by case; random histories are in test_buffer_stateful."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from realhf.api.sample import DuplicateKeyError, SequenceSample
from realhf.dataflow.buffer import (
    AsyncIOSequenceBuffer,
    BatchLease,
    BatchTooLarge,
    BufferClosed,
    BufferedSample,
    DuplicateSampleError,
    EndOfData,
)
from tests.dataflow.toy_buffer import buffer_graph, check_invariants, meta_of, outputs_of


def ids(first: int, last: int) -> list[str]:
    return [f"s{i}" for i in range(first, last)]


def make(max_size: int = 16, **more: Any) -> AsyncIOSequenceBuffer:
    n_seqs = more.pop("n_seqs", {})
    return AsyncIOSequenceBuffer(buffer_graph(**n_seqs), max_size=max_size, **more)


async def through(buffer: AsyncIOSequenceBuffer, mfc: str, step_batch: int = 0) -> BatchLease:
    lease = await asyncio.wait_for(buffer.get_batch_for_rpc(mfc, step_batch), 60)
    buffer.amend_batch(lease, outputs_of(buffer.graph, lease))
    check_invariants(buffer)
    return lease


async def tick() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_sample_leaves_when_its_last_call_has_completed_not_when_it_was_fetched() -> None:
    gone: list[Sequence[BufferedSample]] = []
    buffer = make(on_retire=gone.append)
    await buffer.put_batch(meta_of(ids(0, 4), task="bucket"), step_batch=3)
    for mfc in ("gen", "ref", "rew"):
        await through(buffer, mfc, 3)
    lease = await buffer.get_batch_for_rpc("train", 3)
    assert len(buffer) == 4 and not gone
    buffer.amend_batch(lease)
    assert len(buffer) == 0
    assert [(sample.id, sample.step_batch) for sample in gone[0]] == [(i, 3) for i in ids(0, 4)]
    assert all(sample.metadata == {"task": "bucket"} for sample in gone[0])


async def test_a_lease_shows_exactly_its_inputs_in_the_order_of_birth() -> None:
    buffer = make(n_seqs={"gen": 2, "rew": 6, "ref": 2, "train": 6})
    await buffer.put_batch(meta_of(["d", "c", "b", "a"]))
    await buffer.put_batch(meta_of(["f", "e"]))
    leases = [await buffer.get_batch_for_rpc("gen") for _ in range(3)]
    assert [lease.ids for lease in leases] == [("d", "c"), ("b", "a"), ("f", "e")]
    for lease in reversed(leases):
        buffer.amend_batch(lease, outputs_of(buffer.graph, lease))
    lease = await buffer.get_batch_for_rpc("rew")
    assert lease.ids == ("d", "c", "b", "a", "f", "e")
    assert lease.meta.keys == {"ids", "prompt"} and lease.meta.data is None
    assert lease.meta.seqlens == meta_of(lease.ids, ("ids", "prompt")).seqlens


async def test_a_released_batch_keeps_its_place() -> None:
    buffer = make(n_seqs={"gen": 2})
    await buffer.put_batch(meta_of(ids(0, 6)))
    first = await buffer.get_batch_for_rpc("gen")
    second = await buffer.get_batch_for_rpc("gen")
    buffer.release(second, "failed")
    buffer.release(first, "failed")
    check_invariants(buffer)
    assert (await buffer.get_batch_for_rpc("gen")).ids == ("s0", "s1")
    assert buffer.stats()["released"] == {"failed": 4}
    with pytest.raises(ValueError, match="not active"):
        buffer.amend_batch(first)


async def test_each_call_sees_a_sample_once_and_a_lease_completes_once() -> None:
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 4)))
    lease = await through(buffer, "gen")
    with pytest.raises(ValueError, match="not active"):
        buffer.amend_batch(lease)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.get_batch_for_rpc("gen"), 0.02)
    check_invariants(buffer)


async def test_back_pressure_is_first_come_first_served_and_cancellable() -> None:
    buffer = make(max_size=8)
    await buffer.put_batch(meta_of(ids(0, 4)))
    await buffer.put_batch(meta_of(ids(4, 8)))
    with pytest.raises(BatchTooLarge):
        await buffer.put_batch(meta_of(ids(100, 109)))
    big, cancelled, small = [
        asyncio.create_task(buffer.put_batch(meta_of(ids(a, b))))
        for a, b in ((10, 14), (20, 23), (30, 32))
    ]
    await tick()
    assert not small.done() and buffer.stats()["putters_waiting"] == 3
    for mfc in ("gen", "ref", "rew", "train"):
        await through(buffer, mfc)
    cancelled.cancel()
    await tick()
    assert big.done() and cancelled.cancelled() and not small.done()
    assert "s10" in buffer and "s20" not in buffer
    for mfc in ("gen", "ref", "rew", "train"):
        await through(buffer, mfc)
    await tick()
    assert small.done() and len(buffer) == 6
    check_invariants(buffer)


async def test_a_getter_cancelled_as_its_batch_arrives_gives_it_back() -> None:
    buffer = make()
    getter = asyncio.create_task(buffer.get_batch_for_rpc("gen"))
    await tick()
    await buffer.put_batch(meta_of(ids(0, 4)))
    getter.cancel()
    await asyncio.gather(getter, return_exceptions=True)
    assert getter.cancelled() and buffer.stats()["calls"]["gen"] == {
        "ready": 4,
        "leased": 0,
        "waiting": 0,
    }
    check_invariants(buffer)
    assert (await through(buffer, "gen")).ids == tuple(ids(0, 4))


async def test_a_lease_block_left_by_an_error_or_cancellation_returns_the_batch() -> None:
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 4)))
    with pytest.raises(RuntimeError, match="oops"):
        async with buffer.lease("gen"):
            raise RuntimeError("oops")
    assert buffer.stats()["calls"]["gen"]["ready"] == 4

    async def hold() -> None:
        async with buffer.lease("gen"):
            await asyncio.sleep(60)

    holder = asyncio.create_task(hold())
    await tick()
    assert buffer.stats()["calls"]["gen"]["leased"] == 4
    holder.cancel()
    await asyncio.gather(holder, return_exceptions=True)
    assert buffer.stats()["calls"]["gen"] == {"ready": 4, "leased": 0, "waiting": 0}


async def test_step_batches_do_not_mix() -> None:
    buffer = make(n_seqs={"gen": 2, "train": 4})
    await buffer.put_batch(meta_of(ids(0, 1)), step_batch=0)
    await buffer.put_batch(meta_of(ids(1, 4)), step_batch=1)
    waiting = asyncio.create_task(buffer.get_batch_for_rpc("gen", 0))
    assert (await through(buffer, "gen", 1)).ids == ("s1", "s2")
    assert not waiting.done()
    await buffer.put_batch(meta_of(ids(4, 5)), step_batch=0)
    assert (await waiting).ids == ("s0", "s4")


async def test_the_tail_is_served_and_then_it_ends() -> None:
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 6)))
    waiting = asyncio.create_task(buffer.get_batch_for_rpc("train"))
    buffer.close_input("no more rows")
    with pytest.raises(BufferClosed, match="no more rows"):
        await buffer.put_batch(meta_of(["x"]))
    await through(buffer, "gen")
    assert (await through(buffer, "gen")).ids == ("s4", "s5")
    with pytest.raises(EndOfData, match="no more rows"):
        await asyncio.wait_for(buffer.get_batch_for_rpc("gen"), 60)
    for mfc in ("ref", "rew"):
        for _ in range(2):
            await through(buffer, mfc)
    buffer.amend_batch(await asyncio.wait_for(waiting, 60))
    assert (await through(buffer, "train")).ids == ("s4", "s5")
    stats = buffer.stats()
    assert (stats["resident"], stats["evicted"]) == (0, 6)


async def test_abort_reaches_present_and_future_waiters() -> None:
    buffer = make(max_size=4)
    await buffer.put_batch(meta_of(ids(0, 4)))
    tasks = [
        asyncio.create_task(buffer.get_batch_for_rpc("train")),
        asyncio.create_task(buffer.put_batch(meta_of(ids(4, 8)))),
    ]
    await tick()
    buffer.abort(OSError("the network is gone"))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, OSError)
    with pytest.raises(OSError, match="network"):
        await buffer.get_batch_for_rpc("gen")
    with pytest.raises(OSError, match="network"):
        await buffer.put_batch(meta_of(["x"]))


async def test_what_must_not_be_put_or_added() -> None:
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 4)))
    with pytest.raises(DuplicateSampleError, match="s3"):
        await buffer.put_batch(meta_of(["s9", "s3"]))
    assert "s9" not in buffer
    with pytest.raises(ValueError, match=r"lack dataset keys \['prompt'\]"):
        await buffer.put_batch(meta_of(["x"], ("other",)))
    data = SequenceSample.from_tensors(["x"], {"prompt": torch.zeros(2)}, {"prompt": [[2]]})
    with pytest.raises(ValueError, match="metadata only"):
        await buffer.put_batch(data)
    lease = await buffer.get_batch_for_rpc("gen")
    with pytest.raises(DuplicateKeyError, match="prompt"):
        buffer.amend_batch(lease, meta_of(list(lease.ids), ("ids", "prompt")))
    with pytest.raises(ValueError, match="another order"):
        buffer.amend_batch(lease, meta_of(list(lease.ids[::-1]), ("ids",)))
    check_invariants(buffer)
    buffer.amend_batch(lease, outputs_of(buffer.graph, lease))
    with pytest.raises(ValueError, match="cannot hold"):
        make(max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [24, None])
async def test_ids_of_samples_that_left_are_known_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, bound
) -> None:
    if bound:
        monkeypatch.setattr("realhf.dataflow.buffer.REMEMBERED", bound)
    buffer = make(max_size=4)
    for first in range(0, 400, 4):
        await buffer.put_batch(meta_of(ids(first, first + 4)))
        for mfc in ("gen", "ref", "rew", "train"):
            await through(buffer, mfc)
        assert len(buffer._departed) <= (bound or 400)
    for known in ("s399", "s380", *(() if bound else ("s0",))):
        with pytest.raises(DuplicateSampleError):
            await buffer.put_batch(meta_of([known]))


async def test_samples_of_a_lease_give_way_to_others() -> None:
    """Those behind them have their place; other calls see the new ones alone, and what cannot be
    changes nothing."""
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 4)), step_batch=2)
    lease = await buffer.get_batch_for_rpc("gen", 2)
    wrong = [
        (DuplicateSampleError, ["s1"], meta_of(["s3"])),
        (ValueError, ["s1", "s2"], meta_of(["s4"])),
        (ValueError, ["s9"], meta_of(["s4"])),
    ]
    for error, gone, fresh in wrong:
        with pytest.raises(error):
            buffer.exchange(lease, gone, fresh)
        check_invariants(buffer)
    left = buffer.exchange(lease, ["s2", "s0"], meta_of(["s4", "s5"], task="new"))
    assert [sample.id for sample in left] == ["s0", "s2"]
    check_invariants(buffer)
    assert lease.ids == lease.meta.ids == ("s1", "s3", "s4", "s5") and lease.metadata == {}
    with pytest.raises(DuplicateSampleError):
        buffer.exchange(lease, ["s1"], meta_of(["s0"]))
    buffer.release(lease, "to try")
    lease = await through(buffer, "gen", 2)
    assert lease.ids == ("s1", "s3", "s4", "s5")
    for mfc in ("ref", "rew", "train"):
        assert (await through(buffer, mfc, 2)).ids == lease.ids
    assert len(buffer) == 0


async def test_the_wait_is_explained() -> None:
    buffer = make()
    await buffer.put_batch(meta_of(ids(0, 3)), step_batch=5)
    text = buffer.explain_wait("train", 5)
    assert text.startswith("train takes 4 samples of step 5: 0 ready, 3 not yet taken")
    assert "3 lack 'rewards' (from rew)" in text and "3 lack 'ids' (from gen)" in text
    assert text.endswith("the source owes 1")
