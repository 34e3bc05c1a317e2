"""Converts groups of a batch to the packed keys of a ``SequenceSample`` (docs/reference/dataflow.md 2).

The server takes groups of any shape (docs/reference/trajectory.md 2.6: no cross-checks), so the shapes are checked
here: a sequence that cannot be trained on keeps its place with one token and without a loss, and is counted by its
reason.
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
"""Mask of a token that is not trained."""
LARGEST_SCORE = 1e18
"""Size up to which the square of a score is a number in fp32, in which advantages are computed."""
VALID, FILTERED = 0, 2
"""Codes of the key ``outcome``."""

Rescore = Callable[[SequenceSample], "Tensor"]
"""Function that returns log-probabilities f32 (sum of L-1,) of a sample's own tokens, by the current weights."""


@dataclass(frozen=True)
class Row:
    """Holds one sequence of L tokens: ``tokens`` i64, ``trained`` bool, ``logprobs`` f32 (None: the producer sent
    none)."""

    tokens: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray | None
    score: float
    truncated: bool
    version: int
    outcome: int = VALID
    rollout: int = 0


@dataclass(frozen=True)
class RowLimits:
    """Says what the model can take: ids below ``vocab_size``, at most ``max_tokens`` a sequence; and how many valid
    rollouts a group needs to teach anything."""

    vocab_size: int
    max_tokens: int
    min_group_size: int


class RowProblem(ValueError):
    """Is raised when a sequence cannot be trained on; the text is the name of its statistic."""


@dataclass(frozen=True)
class Converted:
    """Holds the sample of a batch. ``problems``: sequences left out, by reason; ``rescored``: sequences scored by the
    current weights."""

    sample: SequenceSample
    problems: Mapping[str, int]
    rescored: int


def groups_to_sample(
    ids: Sequence[str], groups: Sequence[Mapping[str, Any]], limits: RowLimits, *, version: int, rescore: Rescore
) -> Converted:
    """Convert groups to one sample each; ids beyond the groups become samples without sequences.

    ``version`` is given to groups that name none. Groups below the least size are left out; raises ValueError when more
    than ``ids`` remain.

    Keys, one inner sequence for each of L tokens: ``packed_input_ids`` i64 [L], ``prompt_mask`` and ``loss_mask`` bool
    [L], ``packed_logprobs`` f32 [L-1], ``packed_versions`` i32 [L-1], ``env_rewards`` f32 [1], ``seq_no_eos_mask`` bool
    [1], ``outcome`` u8 [1], ``rollout_index`` i32 [1]. Sequences of a group whose ``overrides`` name the
    same ``rollout`` are rows of one rollout; each other one is a rollout by itself. Metadata ``rewards`` and
    ``achieved`` are JSON lists; what was achieved is not known here.
    """
    problems: Counter[str] = Counter()
    rows = [
        _rows(group, limits, version, problems) for group in groups if len(group["tokens"]) >= limits.min_group_size
    ]
    if len(rows) < len(groups):
        problems["small_groups"] = len(groups) - len(rows)
    if len(rows) > len(ids):
        raise ValueError(f"{len(rows)} groups for {len(ids)} places")
    rows += [[]] * (len(ids) - len(rows))
    flat = [row for group in rows for row in group]
    sample = _packed(tuple(ids), rows, flat, rescore)
    return Converted(sample, dict(problems), sum(row.logprobs is None and row.outcome == VALID for row in flat))


def _rows(group: Mapping[str, Any], limits: RowLimits, version: int, problems: Counter[str]) -> list[Row]:
    rows: list[Row] = []
    numbers = _rollouts(group)
    for index in range(len(group["tokens"])):
        try:
            rows.append(_row(group, index, limits, version))
        except RowProblem as problem:
            problems[str(problem)] += 1
            rows.append(_nothing(version))
    if len({number for row, number in zip(rows, numbers, strict=True) if row.outcome == VALID}) < limits.min_group_size:
        rows = [_nothing(version) for _ in rows]
    return [replace(row, rollout=number) for row, number in zip(rows, numbers, strict=True)]


def _rollouts(group: Mapping[str, Any]) -> list[int]:
    """Return the number of each sequence's rollout in the group."""
    named = [(_of(group, "overrides", index) or {}).get("rollout") for index in range(len(group["tokens"]))]
    owners = [index if name is None else f"{name!r}" for index, name in enumerate(named)]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    return [numbers[owner] for owner in owners]


def _nothing(version: int) -> Row:
    return Row(np.zeros(1, np.int64), np.zeros(1, bool), np.zeros(1, np.float32), 0.0, False, version, FILTERED)


def _row(group: Mapping[str, Any], index: int, limits: RowLimits, version: int) -> Row:
    try:
        tokens = np.asarray(group["tokens"][index], np.int64)
    except OverflowError:
        raise RowProblem("unknown_tokens") from None
    masks, logprobs = _of(group, "masks", index), _of(group, "inference_logprobs", index)
    overrides = _of(group, "overrides", index) or {}
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
    if not abs(group["scores"][index]) <= LARGEST_SCORE:
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
    return Row(
        tokens,
        trained,
        logprobs,
        float(group["scores"][index]),
        bool(overrides.get("truncated")),
        min(version if own is None else int(own), np.iinfo(np.int32).max),
    )


def _of(group: Mapping[str, Any], name: str, index: int) -> Any:
    """Return the entry of an optional per-sequence field, or None."""
    values = group.get(name)
    return values[index] if values is not None and index < len(values) else None


def _packed(
    ids: tuple[str, ...], groups: Sequence[Sequence[Row]], flat: Sequence[Row], rescore: Rescore
) -> SequenceSample:
    import torch

    lengths = [[len(row.tokens) for row in group] for group in groups]
    shifted = [[length - 1 for length in inner] for inner in lengths]
    ones = [[1] * len(group) for group in groups]
    tokens = _joined([row.tokens for row in flat], np.int64)
    trained = _joined([row.trained for row in flat], np.bool_)
    tensors = {
        "packed_input_ids": tokens,
        "prompt_mask": _joined([~np.logical_or.accumulate(row.trained) for row in flat], np.bool_),
        "loss_mask": trained,
        "packed_logprobs": _joined([_or_zeros(row)[1:] for row in flat], np.float32),
        "packed_versions": _joined([np.where(row.trained, row.version, -1)[1:] for row in flat], np.int32),
        "env_rewards": torch.tensor([row.score for row in flat], dtype=torch.float32),
        "seq_no_eos_mask": torch.tensor([row.truncated for row in flat], dtype=torch.bool),
        "outcome": torch.tensor([row.outcome for row in flat], dtype=torch.uint8),
        ROLLOUT_KEY: torch.tensor([row.rollout for row in flat], dtype=torch.int32),
    }
    if any(row.logprobs is None for row in flat):
        own = {"packed_input_ids": tokens, "loss_mask": trained}
        own = SequenceSample.from_tensors(ids, own, dict.fromkeys(own, lengths))
        missing = _joined([np.full(len(row.tokens) - 1, row.logprobs is None) for row in flat], np.bool_)
        tensors["packed_logprobs"] = torch.where(missing, rescore(own).cpu().float(), tensors["packed_logprobs"])
    seqlens = {
        name: shifted
        if name in ("packed_logprobs", "packed_versions")
        else ones
        if name in ("env_rewards", "seq_no_eos_mask", "outcome", ROLLOUT_KEY)
        else lengths
        for name in tensors
    }
    rewards = [json.dumps([row.score if row.outcome == VALID else None for row in group]) for group in groups]
    return SequenceSample.from_tensors(ids, tensors, seqlens, {"rewards": rewards, "achieved": ["[]"] * len(ids)})


def _or_zeros(row: Row) -> np.ndarray:
    return np.zeros(len(row.tokens), np.float32) if row.logprobs is None else row.logprobs


def _joined(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    import torch

    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))
