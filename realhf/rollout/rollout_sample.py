"""Rollout outcomes as the packed keys of a ``SequenceSample`` (dataflow specification, section 2)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from realhf.api.env import RolloutOutcome
from realhf.api.sample import SequenceSample

OUTCOME_CODES = {"env_error": 3, "policy_error": 5, "env_timeout": 6, "connection_lost": 3, "capacity": 3}
"""Code of a failed episode in the key ``outcome``; 0 is a valid one (achieved or truncated)."""
FILTERED = 2


def outcomes_to_sample(
    ids: Sequence[str], groups: Sequence[Sequence[RolloutOutcome]], *, min_group_size: int = 1
) -> SequenceSample:
    """One sample per group of rollouts. A group with fewer than ``min_group_size`` valid rollouts trains nothing.

    Keys, one inner sequence per rollout of L tokens: ``packed_input_ids`` i64 [L], ``prompt_mask`` and
    ``loss_mask`` bool [L], ``packed_logprobs`` f32 [L-1], ``packed_versions`` i32 [L-1], ``env_rewards`` f32 [1],
    ``seq_no_eos_mask`` bool [1], ``outcome`` u8 [1]. A failed rollout keeps its tokens but has no loss mask.
    Metadata ``rewards`` and ``achieved`` are JSON lists, with null where a rollout failed.
    """
    import torch

    rollouts = [outcome for group in groups for outcome in group]
    codes = [code for group in groups for code in _codes(group, min_group_size)]
    tokens = [_tokens(outcome) for outcome in rollouts]
    prompts = [min(len(outcome.prompt_ids), len(ids)) for outcome, ids in zip(rollouts, tokens, strict=True)]
    tensors = {
        "packed_input_ids": torch.tensor([i for ids in tokens for i in ids], dtype=torch.int64),
        "prompt_mask": torch.tensor(
            [t < prompt for ids, prompt in zip(tokens, prompts, strict=True) for t in range(len(ids))],
            dtype=torch.bool,
        ),
        "loss_mask": torch.tensor(
            [flag for pair in zip(rollouts, tokens, codes, strict=True) for flag in _full(*pair, "loss_mask", False)],
            dtype=torch.bool,
        ),
        "packed_logprobs": torch.tensor(_shifted(rollouts, tokens, codes, "logprobs", 0.0), dtype=torch.float32),
        "packed_versions": torch.tensor(_shifted(rollouts, tokens, codes, "versions", -1), dtype=torch.int32),
        "env_rewards": torch.tensor([outcome.reward or 0.0 for outcome in rollouts], dtype=torch.float32),
        "seq_no_eos_mask": torch.tensor(
            [outcome.status in ("max_turns", "token_budget") for outcome in rollouts], dtype=torch.bool
        ),
        "outcome": torch.tensor(codes, dtype=torch.uint8),
    }
    lengths = _grouped([len(ids) for ids in tokens], groups)
    shifted = [[length - 1 for length in inner] for inner in lengths]
    ones = [[1] * len(group) for group in groups]
    seqlens = {
        "packed_input_ids": lengths, "prompt_mask": lengths, "loss_mask": lengths,
        "packed_logprobs": shifted, "packed_versions": shifted,
        "env_rewards": ones, "seq_no_eos_mask": ones, "outcome": ones,
    }
    metadata = {
        "rewards": [json.dumps([outcome.reward for outcome in group]) for group in groups],
        "achieved": [
            json.dumps([outcome.achieved if outcome.valid else None for outcome in group]) for group in groups
        ],
    }
    return SequenceSample.from_tensors(tuple(ids), tensors, seqlens, metadata)


def _tokens(outcome: RolloutOutcome) -> list[int]:
    """At least one token, so that a rollout that failed before its first prompt keeps its place."""
    return [*outcome.prompt_ids, *outcome.completion_ids] or [0]


def _codes(group: Sequence[RolloutOutcome], min_group_size: int) -> list[int]:
    enough = sum(outcome.valid for outcome in group) >= min_group_size
    valid = 0 if enough else FILTERED
    return [valid if outcome.valid else OUTCOME_CODES[outcome.status] for outcome in group]


def _full(outcome: RolloutOutcome, ids: list[int], code: int, field: str, fill: object) -> list:
    """A per-completion-token list of one rollout, padded in front to all tokens; ``fill`` where nothing trains."""
    completion = getattr(outcome, field) if code == 0 else [fill] * len(outcome.completion_ids)
    return [fill] * (len(ids) - len(completion)) + list(completion)


def _shifted(
    rollouts: Sequence[RolloutOutcome], tokens: Sequence[list[int]], codes: Sequence[int], field: str, fill: object
) -> list:
    """``_full`` without each rollout's first token: position t describes the prediction of token t+1."""
    parts = zip(rollouts, tokens, codes, strict=True)
    return [value for outcome, ids, code in parts for value in _full(outcome, ids, code, field, fill)[1:]]


def _grouped(values: Sequence[int], groups: Sequence[Sequence[RolloutOutcome]]) -> list[list[int]]:
    rest = iter(values)
    return [[next(rest) for _ in group] for group in groups]
