"""Turns episodes of the rollout pools into groups for the trajectory server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from realhf.api.env import RolloutOutcome


def group_of(outcomes: Sequence[RolloutOutcome], **about: Any) -> Mapping[str, Any] | None:
    """Make a group of the valid episodes of one task; None if there are none.

    A failed episode has no reward, so it is not part of the group, which then is smaller than the others. ``about``
    goes into ``group_overrides``.
    """
    valid = [outcome for outcome in outcomes if outcome.valid]
    if not valid:
        return None
    versions = [version for outcome in valid for version in outcome.versions if version >= 0]
    rows = [_rows(outcome) for outcome in valid]
    return {
        "tokens": [tokens for tokens, _, _ in rows],
        "masks": [masks for _, masks, _ in rows],
        "inference_logprobs": [logprobs for _, _, logprobs in rows],
        "scores": [float(outcome.reward or 0.0) for outcome in valid],
        "overrides": [{"truncated": outcome.truncated, "achieved": outcome.achieved} for outcome in valid],
        "group_overrides": {"task_id": valid[0].task_id, "group": valid[0].group, "seed": valid[0].seed, **about},
        **({"policy_version": min(versions)} if versions else {}),
    }


def _rows(outcome: RolloutOutcome) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, masks (-100: not trained) and log-probabilities (1.0 there) of one episode."""
    tokens = np.array([*outcome.prompt_ids, *outcome.completion_ids], np.int32)
    trained = np.zeros(len(tokens), bool)
    trained[len(outcome.prompt_ids) :] = outcome.loss_mask
    logprobs = np.ones(len(tokens), np.float32)
    logprobs[len(outcome.prompt_ids) :] = outcome.logprobs
    return tokens, np.where(trained, tokens, -100).astype(np.int32), np.where(trained, logprobs, np.float32(1.0))
