"""The toy graph's definition and data source; no torch, as in a master process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.graph import DataFlowGraph, build_graph
from realhf.api.source import SampleResult, SourceItem


def toy_mfcs(n: int = 4, **n_seqs: int) -> list[MFCDef]:
    """gen, ref, rew and train, each with ``n`` samples per call unless given by name."""

    def mfc(name: str, role: str, kind: InterfaceType, inputs: str, outputs: str = "") -> MFCDef:
        return MFCDef(
            name,
            role,
            kind,
            name,
            n_seqs=n_seqs.get(name, n),
            timeout_s=60,
            input_keys=tuple(inputs.split()),
            output_keys=tuple(outputs.split()),
        )

    return [
        mfc("gen", "actor", InterfaceType.GENERATE, "packed_prompts", "ids logprobs"),
        mfc("ref", "ref", InterfaceType.INFERENCE, "ids", "ref_logprobs"),
        mfc("rew", "actor", InterfaceType.INFERENCE, "ids", "rewards"),
        mfc("train", "actor", InterfaceType.TRAIN_STEP, "ids logprobs ref_logprobs rewards"),
    ]


def toy_graph(n: int = 4, **n_seqs: int) -> DataFlowGraph:
    return build_graph(toy_mfcs(n, **n_seqs), ["packed_prompts"])


class ToySource:
    """Counts upwards; the next task depends on every result recorded so far."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.count = 0
        self.offset = 0
        self.recorded: list[SampleResult] = []

    def next_batch(self, n: int) -> list[SourceItem]:
        n = min(n, self.limit - self.count)
        items = [
            SourceItem(f"t{i}", {"task": f"task {i}"}, {"packed_prompts": [i + self.offset]})
            for i in range(self.count, self.count + n)
        ]
        self.count += n
        return items

    def record(self, results: Sequence[SampleResult]) -> None:
        self.recorded += results
        self.offset += sum(int(r.rewards[0] or 0) for r in results) % 5 if results[0].rewards else 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.offset = state["offset"]

    def stats(self) -> dict[str, float]:
        return {"drawn": float(self.count)}
