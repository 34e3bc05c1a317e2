"""A four-call graph and metadata for buffer tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.graph import DataFlowGraph, build_graph
from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer import BatchLease


def buffer_graph(gen: int = 4, ref: int = 4, rew: int = 4, train: int = 4) -> DataFlowGraph:
    kind = InterfaceType

    def mfc(name: str, method: InterfaceType, n: int, inputs: str, outputs: str = "") -> MFCDef:
        given, made = tuple(inputs.split()), tuple(outputs.split())
        return MFCDef(name, "actor", method, "none", n_seqs=n, input_keys=given, output_keys=made)

    mfcs = [
        mfc("gen", kind.GENERATE, gen, "prompt", "ids logprobs"),
        mfc("ref", kind.INFERENCE, ref, "ids", "ref_logprobs"),
        mfc("rew", kind.INFERENCE, rew, "ids prompt", "rewards"),
        mfc("train", kind.TRAIN_STEP, train, "ids logprobs ref_logprobs rewards"),
    ]
    return build_graph(mfcs, ["prompt"])


def meta_of(ids: Sequence[str], keys: Sequence[str] = ("prompt",), **metadata: Any) -> SequenceSample:
    """Metadata whose lengths tell the sample and the key apart."""
    seqlens = {key: [[sum(map(ord, i + key)) % 97, 1] for i in ids] for key in keys}
    columns = {name: [value] * len(ids) for name, value in metadata.items()}
    return SequenceSample(ids, seqlens, dict.fromkeys(keys, "f32"), dict.fromkeys(keys, ()), None, columns)


def outputs_of(graph: DataFlowGraph, lease: BatchLease) -> SequenceSample | None:
    keys = graph[lease.mfc].output_keys
    return meta_of(lease.ids, keys) if keys else None
