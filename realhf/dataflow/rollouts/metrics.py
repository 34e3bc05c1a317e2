"""Computes the figures of a training step's rollouts and of the generation workers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.calls import STATUS, Nothing, StatusAnswer
from realhf.api.source import SampleResult
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RpcError
from realhf.transport.rpc_master import RpcMaster


def rollout_figures(results: Sequence[SampleResult]) -> dict[str, float]:
    """Names without the prefix ``rollout/``: means over valid rollouts of ``reward``, ``success`` (also by group),
    ``turns`` and ``out_of_turns``; ``rollouts`` and ``failed_rollouts`` in number; ``tokens`` sampled; seconds of an
    episode (``episode_s_p50``, ``episode_s_p99``). ``failures/<kind>`` and ``retries/<kind>`` say what went wrong on
    the way, also where a retry mended it."""
    rewards = [reward for result in results for reward in result.rewards if reward is not None]
    success: dict[str, list[bool]] = {}
    for result in results:
        group = str(result.metadata.get("group", ""))
        success.setdefault(group, []).extend(bool(a) for a in result.achieved if a is not None)
    everything = [value for values in success.values() for value in values]
    notes = [json.loads(result.metadata["rollout"]) for result in results if result.metadata.get("rollout")]
    seconds = sorted(value for note in notes for value in note["episode_s"])
    figures: dict[str, float] = {
        "reward": _mean(rewards),
        "success": _mean(everything),
        "turns": _mean([value for note in notes for value in note["turns"]]),
        # A sample that was played before a resumption by an earlier version does not say it.
        "out_of_turns": _mean([value for note in notes for value in note.get("out_of_turns", ())]),
        "rollouts": float(sum(len(result.rewards) for result in results)),
        "failed_rollouts": float(sum(reward is None for result in results for reward in result.rewards)),
        "tokens": float(sum(note["tokens"] for note in notes)),
        "episode_s_p50": _quantile(seconds, 0.5),
        "episode_s_p99": _quantile(seconds, 0.99),
    }
    figures |= {f"success/{group}": _mean(values) for group, values in sorted(success.items()) if group and values}
    return figures | _counted(notes, "failed", "failures") | _counted(notes, "retried", "retries")


def episode_texts(results: Sequence[SampleResult]) -> list[str]:
    """The transcripts that travelled with the samples."""
    return [str(text) for result in results if (text := result.metadata.get("episode"))]


def _counted(notes: Sequence[dict[str, Any]], name: str, section: str) -> dict[str, float]:
    total: Counter[str] = Counter()
    for note in notes:
        total.update(note[name])
    return {f"{section}/{kind}": float(count) for kind, count in sorted(total.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class GenerationFigures:
    """Occupancy and speed are those since the ``read`` before, so whoever reads at a pace of its own has its own
    instance. ``timeout_s`` bounds a question."""

    def __init__(self, caller: RpcMaster, weights: WeightUpdates, timeout_s: float) -> None:
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
