"""Validation of a sample's keys against their registration (docs/reference/dataflow.md 2). Does not
import torch."""

from __future__ import annotations

import numpy as np

from realhf.api.keys import STANDARD_KEYS, KeySpec
from realhf.api.sample import IntArray, Lengths, SequenceSample

TOKENS = "packed_input_ids"
"""Key of the token ids, which determines the lengths of the sequences."""


def check_standard_keys(sample: SequenceSample) -> None:
    """Check the registered keys of a sample against ``STANDARD_KEYS``. Raise ValueError, which
    names key and sample, for a wrong dtype, shape or number of entries.

    Numbers of sequences and lengths are compared with those of the token ids. If the sample has no
    token ids, all keys must have the same number of sequences, and keys with the rule ``1`` one
    entry per sequence. Unregistered keys and the lengths of ``free`` keys are not checked.
    """
    present = [spec for spec in STANDARD_KEYS if spec.name in sample.keys]
    dtypes = sample.dtypes
    shapes = sample.trailing_shapes
    for spec in present:
        if (actual := (dtypes[spec.name], shapes[spec.name])) != (spec.dtype, spec.trailing):
            raise ValueError(
                f"{spec.name} of sample {sample.ids[0]!r} is {_describe_type(*actual)}, not "
                f"{_describe_type(spec.dtype, spec.trailing)}"
            )
    with_rule = [spec for spec in present if spec.rule != "free"]
    if not with_rule:
        return
    with_tokens = TOKENS in sample.keys
    leader = TOKENS if with_tokens else with_rule[0].name
    reference = sample.lengths(leader)
    for spec in with_rule:
        expected = (
            _expected_lengths(spec, reference.values) if with_tokens or spec.rule == "1" else None
        )
        _check_lengths(sample, spec, leader, reference, expected)


def _describe_type(dtype: str, trailing: tuple[int, ...]) -> str:
    return f"{dtype} of shape {list(trailing)}" if trailing else dtype


def _expected_lengths(spec: KeySpec, tokens: IntArray) -> IntArray:
    """Return the number of entries that a key must have for each sequence, given the sequences'
    numbers of tokens."""
    if spec.rule == "1":
        return np.ones_like(tokens)
    return tokens if spec.rule == "L" else np.maximum(tokens - 1, 0)


def _check_lengths(
    sample: SequenceSample,
    spec: KeySpec,
    leader: str,
    reference: Lengths,
    expected: IntArray | None,
) -> None:
    """Raise ValueError if a key does not have as many sequences per sample as the key ``leader``,
    or not the expected number of entries per sequence."""
    own = sample.lengths(spec.name)
    if not np.array_equal(own.offsets, reference.offsets):
        counts = np.diff(own.offsets)
        others = np.diff(reference.offsets)
        at = int(np.flatnonzero(counts != others)[0])
        raise ValueError(
            f"{spec.name} of sample {sample.ids[at]!r} has {counts[at]} sequences, {leader} has "
            f"{others[at]}"
        )
    if expected is None or np.array_equal(own.values, expected):
        return
    row = int(np.flatnonzero(own.values != expected)[0])
    at = int(np.searchsorted(own.offsets, row, side="right")) - 1
    length = f" of {reference.values[row]} tokens" if leader == TOKENS else ""
    raise ValueError(
        f"{spec.name} of sample {sample.ids[at]!r} has {own.values[row]} entries for a "
        f"sequence{length}, "
        f"not {expected[row]}"
    )
