"""Figures about the rollouts of a training step, from what travelled with its samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from realhf.api.source import SampleResult


def rollout_figures(results: Sequence[SampleResult]) -> dict[str, float]:
    """Names without the prefix ``rollout/``: means over valid rollouts of ``reward``, ``success`` (also by group) and
    ``turns``; ``rollouts`` and ``failed_rollouts`` in number; ``tokens`` sampled; seconds of an episode
    (``episode_s_p50``, ``episode_s_p99``). ``failures/<kind>`` and ``retries/<kind>`` say what went wrong on the way,
    also where a retry mended it."""
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
