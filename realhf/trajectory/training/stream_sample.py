"""Conversion of the groups of a batch to the packed keys of a ``SequenceSample``
(docs/reference/dataflow.md 2).

The server accepts groups of any shape (docs/reference/trajectory.md 2.6: no cross-checks), so
shapes are checked here. A sequence that cannot be trained on is replaced by one token without loss,
and is counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.api.keys import ROLLOUT_KEY
from realhf.api.sample import SequenceSample

if TYPE_CHECKING:
    from torch import Tensor

NOT_TRAINED = -100
"""Mask value of a token that is not trained."""
MAX_SCORE = 1e18
"""Largest score whose square is finite in fp32, in which advantages are computed."""
VALID = 0
FILTERED = 2
"""Values of the key ``outcome`` in a sample."""

Rescore = Callable[[SequenceSample], "Tensor"]
"""Function that returns log-probabilities f32 (sum of L-1,) of a sample under the current weights.
"""


@dataclass(frozen=True)
class SequenceRow:
    """One sequence of L tokens."""

    tokens: np.ndarray
    """Token ids, i64 [L]."""
    trained: np.ndarray
    """Whether each token contributes to the loss, bool [L]."""
    logprobs: np.ndarray | None
    """Log-probabilities that the producer sent, f32 [L]; None if it sent none."""
    score: float
    """Reward of the sequence."""
    truncated: bool
    """Whether the producer marked the sequence as truncated."""
    version: int
    """Policy version with which the sequence was sampled."""
    outcome: int = VALID
    """VALID or FILTERED."""
    rollout: int = 0
    """Index of the sequence's rollout within the group."""


@dataclass(frozen=True)
class RowLimits:
    """Limits that the model and the algorithm set for sequences and groups."""

    vocab_size: int
    """Size of the vocabulary; token ids must be smaller."""
    max_tokens: int
    """Maximum length of a sequence, in tokens."""
    min_group_size: int
    """Number of valid rollouts that a group needs to get a gradient."""


class RowProblem(ValueError):
    """Raised for a sequence that cannot be trained on; the message is the name of the statistic
    that counts it."""


@dataclass(frozen=True)
class Converted:
    """Result of converting a batch."""

    sample: SequenceSample
    """The packed sequences of all groups."""
    problems: Mapping[str, int]
    """Number of sequences left out, by reason."""
    rescored: int
    """Number of sequences whose log-probabilities were computed with the current weights."""


def groups_to_sample(
    ids: Sequence[str],
    groups: Sequence[Mapping[str, Any]],
    limits: RowLimits,
    *,
    version: int,
    rescore: Rescore,
) -> Converted:
    """Convert groups to one sample each; ids beyond the groups become samples without sequences.

    ``version`` is used for groups without one. Groups smaller than the minimum are left out; raises
    ValueError when more than ``ids`` remain.

    Keys, one inner sequence for each sequence of L tokens: ``packed_input_ids`` i64 [L],
    ``prompt_mask`` and ``loss_mask`` bool [L], ``packed_logprobs`` f32 [L-1], ``packed_versions``
    i32 [L-1], ``env_rewards`` f32 [1], ``seq_no_eos_mask`` bool [1], ``outcome`` u8 [1],
    ``rollout_index`` i32 [1]. Sequences of a group whose ``overrides`` have the same ``rollout``
    belong to one rollout; each other sequence is a rollout by itself. Metadata ``rewards`` and
    ``achieved`` are JSON lists; ``achieved`` is empty because it is unknown here.
    """
    problems: Counter[str] = Counter()
    rows = [
        _build_rows(group, limits, version, problems)
        for group in groups
        if len(group["tokens"]) >= limits.min_group_size
    ]
    if len(rows) < len(groups):
        problems["small_groups"] = len(groups) - len(rows)
    if len(rows) > len(ids):
        raise ValueError(f"{len(rows)} groups for {len(ids)} places")
    rows += [[]] * (len(ids) - len(rows))
    flat = [row for group in rows for row in group]
    sample = _pack_sample(tuple(ids), rows, flat, rescore)
    return Converted(
        sample, dict(problems), sum(row.logprobs is None and row.outcome == VALID for row in flat)
    )


def _build_rows(
    group: Mapping[str, Any], limits: RowLimits, version: int, problems: Counter[str]
) -> list[SequenceRow]:
    rows: list[SequenceRow] = []
    numbers = _number_rollouts(group)
    for index in range(len(group["tokens"])):
        try:
            rows.append(_build_row(group, index, limits, version))
        except RowProblem as problem:
            problems[str(problem)] += 1
            rows.append(_empty_row(version))
    if (
        len({number for row, number in zip(rows, numbers, strict=True) if row.outcome == VALID})
        < limits.min_group_size
    ):
        rows = [_empty_row(version) for _ in rows]
    return [replace(row, rollout=number) for row, number in zip(rows, numbers, strict=True)]


def _number_rollouts(group: Mapping[str, Any]) -> list[int]:
    """Return, for each sequence, the index of its rollout within the group."""
    named = [
        (_entry(group, "overrides", index) or {}).get("rollout")
        for index in range(len(group["tokens"]))
    ]
    owners = [index if name is None else f"{name!r}" for index, name in enumerate(named)]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    return [numbers[owner] for owner in owners]


def _empty_row(version: int) -> SequenceRow:
    return SequenceRow(
        np.zeros(1, np.int64),
        np.zeros(1, bool),
        np.zeros(1, np.float32),
        0.0,
        False,
        version,
        FILTERED,
    )


def _build_row(
    group: Mapping[str, Any], index: int, limits: RowLimits, version: int
) -> SequenceRow:
    try:
        tokens = np.asarray(group["tokens"][index], np.int64)
    except OverflowError:
        raise RowProblem("unknown_tokens") from None
    masks = _entry(group, "masks", index)
    logprobs = _entry(group, "inference_logprobs", index)
    overrides = _entry(group, "overrides", index) or {}
    if not len(tokens) or len(tokens) > limits.max_tokens:
        raise RowProblem("too_long" if len(tokens) else "no_tokens")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        raise RowProblem("unknown_tokens")
    if masks is None or len(masks) != len(tokens):
        raise RowProblem("wrong_masks")
    if logprobs is not None and len(logprobs) != len(tokens):
        raise RowProblem("wrong_logprobs")
    if index >= len(group["scores"]):
        raise RowProblem("no_score")
    if not abs(group["scores"][index]) <= MAX_SCORE:
        raise RowProblem("wrong_score")
    trained = np.asarray(masks) != NOT_TRAINED
    if overrides.get("set_advantage_to_zero"):
        trained = np.zeros(len(tokens), bool)
    if logprobs is not None:
        with np.errstate(over="ignore"):
            logprobs = np.where(trained, np.asarray(logprobs).astype(np.float32), np.float32(0.0))
        if not np.isfinite(logprobs).all():
            raise RowProblem("wrong_logprobs")
    own = group.get("policy_version")
    return SequenceRow(
        tokens,
        trained,
        logprobs,
        float(group["scores"][index]),
        bool(overrides.get("truncated")),
        min(version if own is None else int(own), np.iinfo(np.int32).max),
    )


def _entry(group: Mapping[str, Any], name: str, index: int) -> Any:
    """Return the entry of an optional per-sequence field, or None."""
    values = group.get(name)
    return values[index] if values is not None and index < len(values) else None


def _pack_sample(
    ids: tuple[str, ...],
    groups: Sequence[Sequence[SequenceRow]],
    flat: Sequence[SequenceRow],
    rescore: Rescore,
) -> SequenceSample:
    import torch

    lengths = [[len(row.tokens) for row in group] for group in groups]
    shifted = [[length - 1 for length in inner] for inner in lengths]
    ones = [[1] * len(group) for group in groups]
    tokens = _concatenate([row.tokens for row in flat], np.int64)
    trained = _concatenate([row.trained for row in flat], np.bool_)
    tensors = {
        "packed_input_ids": tokens,
        "prompt_mask": _concatenate(
            [~np.logical_or.accumulate(row.trained) for row in flat], np.bool_
        ),
        "loss_mask": trained,
        "packed_logprobs": _concatenate([_logprobs_or_zeros(row)[1:] for row in flat], np.float32),
        "packed_versions": _concatenate(
            [np.where(row.trained, row.version, -1)[1:] for row in flat], np.int32
        ),
        "env_rewards": torch.tensor([row.score for row in flat], dtype=torch.float32),
        "seq_no_eos_mask": torch.tensor([row.truncated for row in flat], dtype=torch.bool),
        "outcome": torch.tensor([row.outcome for row in flat], dtype=torch.uint8),
        ROLLOUT_KEY: torch.tensor([row.rollout for row in flat], dtype=torch.int32),
    }
    if any(row.logprobs is None for row in flat):
        own = {"packed_input_ids": tokens, "loss_mask": trained}
        own = SequenceSample.from_tensors(ids, own, dict.fromkeys(own, lengths))
        missing = _concatenate(
            [np.full(len(row.tokens) - 1, row.logprobs is None) for row in flat], np.bool_
        )
        tensors["packed_logprobs"] = torch.where(
            missing, rescore(own).cpu().float(), tensors["packed_logprobs"]
        )
    seqlens = {
        name: shifted
        if name in ("packed_logprobs", "packed_versions")
        else ones
        if name in ("env_rewards", "seq_no_eos_mask", "outcome", ROLLOUT_KEY)
        else lengths
        for name in tensors
    }
    rewards = [
        json.dumps([row.score if row.outcome == VALID else None for row in group])
        for group in groups
    ]
    return SequenceSample.from_tensors(
        ids, tensors, seqlens, {"rewards": rewards, "achieved": ["[]"] * len(ids)}
    )


def _logprobs_or_zeros(row: SequenceRow) -> np.ndarray:
    return np.zeros(len(row.tokens), np.float32) if row.logprobs is None else row.logprobs


def _concatenate(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    import torch

    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
