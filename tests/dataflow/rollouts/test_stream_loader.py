"""Step batches of a stream on their way into the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from realhf.api.graph import GraphError, build_graph, to_async
from realhf.api.sample import SequenceSample
from realhf.api.source import SampleResult
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, EndOfData
from realhf.dataflow.rollouts.stream_loader import StreamLoader
from realhf.dataflow.storage_map import StorageMap
from realhf.transport.codec import decode_sample
from tests.dataflow.rollouts.test_async_rollouts import W0, Scene
from tests.dataflow.rollouts.toy_streamed_run import CountingSource, meta_of
from tests.dataflow.toy_source import toy_mfcs


class FakeStepBatches:
    """Step batches of two samples for ``steps`` steps, then none; or ``error``. ``asked``: the
    steps."""

    def __init__(self, steps: int, error: Exception | None = None) -> None:
        self.steps = steps
        self.error = error
        self.asked: list[int] = []

    async def step_batch(self, step: int) -> list[SequenceSample]:
        self.asked.append(step)
        if self.error is not None:
            raise self.error
        if step >= self.steps:
            return []
        return [decode_sample(meta_of(f"s{2 * step + i}")) for i in range(2)]

    def waiting_for(self, step: int) -> str:
        return "waits for s7"


def loader_of(source: FakeStepBatches) -> tuple[StreamLoader, AsyncIOSequenceBuffer, StorageMap]:
    train = toy_mfcs(2)[-1]
    graph = build_graph(
        [
            type(train)(
                "train",
                "actor",
                train.interface_type,
                "train",
                n_seqs=2,
                input_keys=("packed_input_ids",),
            )
        ],
        ["packed_input_ids"],
    )
    buffer = AsyncIOSequenceBuffer(graph, max_size=8)
    storage = StorageMap()
    return (
        StreamLoader(source, buffer, storage, held_by=held_by, keys=["packed_input_ids"]),
        buffer,
        storage,
    )


def held_by(ids: Sequence[str]) -> dict[str, list[str]]:
    """Every other sample came to the second worker."""
    found: dict[str, list[str]] = {}
    for sample_id in ids:
        found.setdefault(f"model_worker/{int(sample_id[1:]) % 2}", []).append(sample_id)
    return found


async def breathe() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_next_step_batch_is_asked_for_when_a_step_is_finished() -> None:
    source = FakeStepBatches(7)
    loader, buffer, storage = loader_of(source)
    running = asyncio.create_task(loader.run(5))
    await breathe()
    assert (
        source.asked == [5]
        and len(buffer) == 2
        and loader.activity == "waits until a step is finished"
    )
    assert storage.ids() == ["s10", "s11"]
    owners = [storage.owners(sample_id, "packed_input_ids") for sample_id in storage.ids()]
    assert owners == [("model_worker/0",), ("model_worker/1",)]
    loader.step_finished(5)
    await breathe()
    assert source.asked == [5, 6] and storage.ids()[-2:] == ["s12", "s13"] and len(buffer) == 4
    loader.step_finished(6)
    await asyncio.wait_for(running, 60)
    assert source.asked == [5, 6, 7]


async def test_no_more_samples_end_the_input() -> None:
    loader, buffer, _ = loader_of(FakeStepBatches(0))
    await asyncio.wait_for(loader.run(0), 60)
    with pytest.raises(EndOfData, match="the run has all its samples"):
        await buffer.get_batch_for_rpc("train", 0)


async def test_a_last_step_of_fewer_samples_is_trained_at_once(tmp_path: Path) -> None:
    """It waited until the run was found to stand still: the buffer did not know that no more would
    come."""
    scene = Scene(tmp_path)
    scene.source = CountingSource(3)
    rollouts = await scene.open()
    await rollouts.start()
    for _ in range(3):
        await scene.play(W0)
    _, buffer, storage = loader_of(FakeStepBatches(0))
    loader = rollouts.loader(buffer, storage)
    running = asyncio.create_task(loader.run(0))
    async with asyncio.timeout(10):
        for step, ids in enumerate((["s0", "s1"], ["s2"])):
            async with buffer.lease("train", step) as lease:
                assert list(lease.ids) == ids
                buffer.amend_batch(lease, None)
            rollouts.control.record([SampleResult(sample_id) for sample_id in ids])
            loader.step_finished(step)
        await running
        with pytest.raises(EndOfData):
            await buffer.get_batch_for_rpc("train", 2)
    await rollouts.close()


async def test_what_the_control_raises_is_raised_and_what_it_waits_for_is_told() -> None:
    loader, _, _ = loader_of(FakeStepBatches(1, RuntimeError("the trainer died")))
    with pytest.raises(RuntimeError, match="the trainer died"):
        await loader.run(0)
    assert loader.activity == "step 0: waits for s7"


def test_the_asynchronous_graph_leaves_generation_to_the_rollout_workers() -> None:
    staying, leaving = to_async(toy_mfcs(), also=("rew",))
    assert [mfc.name for mfc in staying] == ["ref", "train"] and [mfc.name for mfc in leaving] == [
        "gen",
        "rew",
    ]
    keys = [key for mfc in leaving for key in mfc.output_keys]
    graph = build_graph(staying, keys)
    assert graph.required_dataset_keys() == ["ids", "logprobs", "rewards"]


def test_a_call_cannot_leave_without_what_it_needs() -> None:
    with pytest.raises(
        GraphError, match=r"'train' would be run by rollout workers, but its key 'ref_logprobs'"
    ):
        to_async(toy_mfcs(), also=("rew", "train"))
    with pytest.raises(GraphError, match="no call generates"):
        to_async(toy_mfcs()[1:])
