"""A four-call graph, metadata and the invariants for buffer tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.graph import DataFlowGraph, build_graph
from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer import AsyncIOSequenceBuffer, BatchLease, CallState


def buffer_graph(gen: int = 4, ref: int = 4, rew: int = 4, train: int = 4) -> DataFlowGraph:
    kind = InterfaceType

    def mfc(name: str, method: InterfaceType, n: int, inputs: str, outputs: str = "") -> MFCDef:
        given = tuple(inputs.split())
        made = tuple(outputs.split())
        return MFCDef(name, "actor", method, "none", n_seqs=n, input_keys=given, output_keys=made)

    mfcs = [
        mfc("gen", kind.GENERATE, gen, "prompt", "ids logprobs"),
        mfc("ref", kind.INFERENCE, ref, "ids", "ref_logprobs"),
        mfc("rew", kind.INFERENCE, rew, "ids prompt", "rewards"),
        mfc("train", kind.TRAIN_STEP, train, "ids logprobs ref_logprobs rewards"),
    ]
    return build_graph(mfcs, ["prompt"])


def meta_of(
    ids: Sequence[str], keys: Sequence[str] = ("prompt",), **metadata: Any
) -> SequenceSample:
    """Metadata whose lengths tell the sample and the key apart."""
    seqlens = {key: [[sum(map(ord, i + key)) % 97, 1] for i in ids] for key in keys}
    columns = {name: [value] * len(ids) for name, value in metadata.items()}
    return SequenceSample(
        ids, seqlens, dict.fromkeys(keys, "f32"), dict.fromkeys(keys, ()), None, columns
    )


def outputs_of(graph: DataFlowGraph, lease: BatchLease) -> SequenceSample | None:
    keys = graph[lease.mfc].output_keys
    return meta_of(lease.ids, keys) if keys else None


def check_invariants(buffer: AsyncIOSequenceBuffer) -> None:
    """Check invariants 1, 2, 3, 6, 8, 9 and 11 of docs/reference/dataflow.md 4; the others need a
    history."""
    assert buffer.put_total == len(buffer) + buffer.evicted_total, "1: put = resident + evicted"
    assert len(buffer) <= buffer.max_size, "8: resident exceeds max_size"
    assert all(sample.id == sample_id for sample_id, sample in buffer.samples.items()), (
        "11: index of ids"
    )
    for sample in buffer.samples.values():
        assert (
            sample.calls_left == len(buffer.calls) - [*sample.state.values()].count("done") > 0
        ), "6: it is done and stays"
    for call in buffer.calls.values():
        _check_call(buffer, call)


def _check_call(buffer: AsyncIOSequenceBuffer, call: CallState) -> None:
    samples = buffer.samples.values()
    name = call.name
    for sample in samples:
        assert (name in sample.state) == all(key in sample.keys for key in call.inputs), (
            2,
            name,
            sample.id,
        )
    leased = sorted(sample.id for sample in samples if sample.state.get(name) == "leased")
    assert leased == sorted(i for lease in buffer.leases if lease.mfc == name for i in lease.ids), (
        11,
        name,
    )
    assert call.leased == len(leased), (11, name)
    for step_batch in {*call.queues, *call.not_issued, *(sample.step_batch for sample in samples)}:
        free = [
            s
            for s in samples
            if s.step_batch == step_batch and s.state.get(name, "ready") == "ready"
        ]
        ready = sorted((s.birth, s.id) for s in free if name in s.state)
        assert [(s.birth, s.id) for s in call.queues[step_batch]] == ready, (11, name, step_batch)
        assert call.not_issued[step_batch] == len(free), (11, name, step_batch)
    for step_batch, future in call.waiters:
        assert future.done() or len(call.queues[step_batch]) < call.n_seqs, (9, name)
