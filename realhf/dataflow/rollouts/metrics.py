"""Metrics of a training step's rollouts and of the generation workers."""

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


def rollout_metrics(results: Sequence[SampleResult]) -> dict[str, float]:
    """Return the metrics of the rollouts of some samples, by name without the prefix ``rollout/``.

    - ``reward``, ``success``, ``success/<group>``, ``turns``, ``out_of_turns``: means over valid
      rollouts;
    - ``broken_rules``: mean over the valid rollouts that have it, left out if none has;
    - ``success/<environment>``, ``reward_of/<environment>``, ``turns_of/<environment>``: the same
      for one environment of a mixture; ``n_rollouts_of/<environment>``: its number of rollouts;
    - ``rollouts``, ``failed_rollouts``: counts;
    - ``tokens``: number of sampled tokens;
    - ``episode_s_p50``, ``episode_s_p99``: quantiles of the duration of an episode, in seconds;
    - ``failures/<kind>``: episodes that failed; ``retries/<kind>``: failures that were retried.
    """
    rewards = [reward for result in results for reward in result.rewards if reward is not None]
    success: dict[str, list[bool]] = {}
    for result in results:
        group = str(result.metadata.get("group", ""))
        success.setdefault(group, []).extend(bool(a) for a in result.achieved if a is not None)
    all_success = [value for values in success.values() for value in values]
    notes = _read_notes(results)
    seconds = sorted(value for note in notes for value in note["episode_s"])
    metrics: dict[str, float] = {
        "reward": _mean(rewards),
        "success": _mean(all_success),
        "turns": _mean([value for note in notes for value in note["turns"]]),
        # A sample in the journal of an earlier version may lack this key.
        "out_of_turns": _mean([value for note in notes for value in note.get("out_of_turns", ())]),
        "rollouts": float(sum(len(result.rewards) for result in results)),
        "failed_rollouts": float(
            sum(reward is None for result in results for reward in result.rewards)
        ),
        "tokens": float(sum(note["tokens"] for note in notes)),
        "episode_s_p50": _quantile(seconds, 0.5),
        "episode_s_p99": _quantile(seconds, 0.99),
    }
    if broken := [value for note in notes for value in note.get("broken_rules", ())]:
        metrics["broken_rules"] = _mean(broken)
    metrics |= {
        f"success/{group}": _mean(values)
        for group, values in sorted(success.items())
        if group and values
    }
    return (
        metrics
        | _environment_metrics(results)
        | _count_kinds(notes, "failed", "failures")
        | _count_kinds(notes, "retried", "retries")
    )


def _environment_metrics(results: Sequence[SampleResult]) -> dict[str, float]:
    """Return the metrics of each environment of a mixture; {} in a run with one environment."""
    metrics: dict[str, float] = {}
    environments = {str(result.metadata.get("environment", "")) for result in results} - {""}
    for name in sorted(environments):
        own = [result for result in results if result.metadata.get("environment") == name]
        rewards = [reward for result in own for reward in result.rewards if reward is not None]
        metrics[f"n_rollouts_of/{name}"] = float(sum(len(result.rewards) for result in own))
        if rewards:
            turns = [turns for note in _read_notes(own) for turns in note["turns"]]
            metrics[f"reward_of/{name}"] = _mean(rewards)
            metrics[f"turns_of/{name}"] = _mean(turns)
            metrics[f"success/{name}"] = _mean(
                [bool(a) for result in own for a in result.achieved if a is not None]
            )
    return metrics


def _read_notes(results: Sequence[SampleResult]) -> list[dict[str, Any]]:
    """Return the statistics of the samples' groups (``PlayedGroup.statistics``)."""
    return [
        json.loads(result.metadata["rollout"])
        for result in results
        if result.metadata.get("rollout")
    ]


def episode_texts(results: Sequence[SampleResult]) -> list[str]:
    """Return the transcripts in the samples' metadata."""
    return [str(text) for result in results if (text := result.metadata.get("episode"))]


def _count_kinds(notes: Sequence[dict[str, Any]], name: str, section: str) -> dict[str, float]:
    """Sum the counts in the field ``name`` of all ``notes``, as {section/kind: count}."""
    total: Counter[str] = Counter()
    for note in notes:
        total.update(note[name])
    return {f"{section}/{kind}": float(count) for kind, count in sorted(total.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _quantile(sorted_values: Sequence[float], q: float) -> float:
    if not sorted_values:
        return 0.0
    return sorted_values[min(len(sorted_values) - 1, int(q * len(sorted_values)))]


class GenerationMetrics:
    """Metrics of the generation workers, which are read by calling each of them.

    Occupancy and tokens per second are measured since the previous ``read``, so readers with
    different intervals need separate instances. ``timeout_s`` limits each call.
    """

    def __init__(self, caller: RpcMaster, weights: WeightUpdates, timeout_s: float) -> None:
        self._caller = caller
        self._weights = weights
        self._timeout_s = timeout_s
        self._before: dict[str, tuple[float, float, float]] = {}
        """Time, busy seconds and number of generated tokens at the previous read, by worker."""

    async def read(self) -> dict[str, float]:
        """Return the current ``generation/...`` metrics. Workers that are dead or do not answer are
        left out."""
        names = [name for name in self._weights.versions if name in self._caller.roster]
        replies = await asyncio.gather(
            *(
                ask(self._caller, name, STATUS, Nothing(), timeout_s=self._timeout_s)
                for name in names
            ),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, RpcError):
                raise reply
        statuses = {
            n: reply
            for n, reply in zip(names, replies, strict=True)
            if isinstance(reply, StatusAnswer)
        }
        metrics = {f"generation/{name}": value for name, value in self._weights.metrics.items()}
        metrics["generation/running"] = sum(status.running for status in statuses.values())
        metrics["generation/waiting"] = sum(status.waiting for status in statuses.values())
        return metrics | self._compute_rates(statuses)

    def _compute_rates(self, statuses: Mapping[str, StatusAnswer]) -> dict[str, float]:
        """Return the mean occupancy and total tokens per second of those workers that also answered
        at the previous read."""
        busy: list[float] = []
        tokens: list[float] = []
        for name, status in statuses.items():
            now = (status.at_s, status.busy_s, status.generated_tokens)
            before = self._before.get(name, now)
            elapsed = now[0] - before[0]
            # the token count of a restarted worker begins at 0 again
            if elapsed > 0 and now[2] >= before[2]:
                busy.append((now[1] - before[1]) / elapsed)
                tokens.append((now[2] - before[2]) / elapsed)
            self._before[name] = now
        if not busy:
            return {}
        return {
            "generation/occupancy": sum(busy) / len(busy),
            "generation/tokens_per_second": sum(tokens),
        }
