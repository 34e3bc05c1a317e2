"""A taskset in the form of the package ``verifiers``: double a number with a tool; two named
rewards."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from doubling_tools import DoublingTools  # pyright: ignore[reportMissingImports]
from verifiers.v1.mcp import SharedToolsetConfig  # pyright: ignore[reportMissingImports]

__all__ = ["DoublingTaskset"]


class DoublingData(vf.TaskData):
    answer: str


class DoublingTask(vf.Task[DoublingData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        if "break" in trace.last_reply:
            raise RuntimeError("the verifier broke")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DoublingConfig(vf.TasksetConfig):
    lowest: int = 1


class DoublingTaskset(vf.Taskset[DoublingTask, DoublingConfig]):
    @classmethod
    def toolsets(cls, config: DoublingConfig) -> list[vf.Toolset]:
        return [DoublingTools(SharedToolsetConfig())]

    def load(self) -> Iterator[DoublingTask]:
        for number in range(self.config.lowest, self.config.lowest + 30):
            data = DoublingData(
                prompt=f"Double {number}.", answer=str(2 * number), system_prompt="Use the tool."
            )
            yield DoublingTask(data, self.config.task)
