"""Asks the generation workers how busy they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from realhf.api.calls import STATUS, Nothing, StatusAnswer
from realhf.dataflow.caller import Caller, ask
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.transport.errors import RpcError


class GenerationFigures:
    """Occupancy and speed are those since the ``read`` before, so whoever reads at a pace of its own has its own
    instance. ``timeout_s`` bounds a question."""

    def __init__(self, caller: Caller, weights: WeightUpdates, timeout_s: float) -> None:
        self._caller, self._weights, self._timeout_s = caller, weights, timeout_s
        self._before: dict[str, tuple[float, float, float]] = {}

    async def read(self) -> dict[str, float]:
        """Return ``generation/...`` at this moment. Raises what is not the death or the silence of a worker."""
        names = [name for name in self._weights.versions if name in self._caller.roster]
        replies = await asyncio.gather(
            *(ask(self._caller, name, STATUS, Nothing(), timeout_s=self._timeout_s) for name in names),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, RpcError):
                raise reply
        statuses = {n: reply for n, reply in zip(names, replies, strict=True) if isinstance(reply, StatusAnswer)}
        figures = {f"generation/{name}": value for name, value in self._weights.figures.items()}
        figures["generation/running"] = sum(status.running for status in statuses.values())
        figures["generation/waiting"] = sum(status.waiting for status in statuses.values())
        return figures | self._rates(statuses)

    def _rates(self, statuses: Mapping[str, StatusAnswer]) -> dict[str, float]:
        busy, tokens = [], []
        for name, status in statuses.items():
            now = (status.at_s, status.busy_s, status.generated_tokens)
            before = self._before.get(name, now)
            elapsed = now[0] - before[0]
            if elapsed > 0 and now[2] >= before[2]:
                busy.append((now[1] - before[1]) / elapsed)
                tokens.append((now[2] - before[2]) / elapsed)
            self._before[name] = now
        if not busy:
            return {}
        return {"generation/occupancy": sum(busy) / len(busy), "generation/tokens_per_second": sum(tokens)}
