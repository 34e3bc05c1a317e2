"""Checks finished samples that come in from a rollout worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.api.keys import KeySpec
from realhf.api.sample import SequenceSample
from realhf.transport.codec import decode_sample
from realhf.transport.errors import CodecError

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class SampleLimits:
    """Says what a finished sample must look like. Exactly the keys in ``keys`` must be there, with their dtype,
    trailing shape and length rule, one of them ``packed_input_ids``; every sample has ``min_sequences`` to
    ``max_sequences`` sequences of at most ``max_tokens`` tokens, in at most ``max_bytes`` bytes."""

    keys: tuple[KeySpec, ...]
    min_sequences: int = 1
    max_sequences: int = 1024
    max_tokens: int = 1 << 20
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if "packed_input_ids" not in {spec.name for spec in self.keys}:
            raise ValueError("samples of a stream need the key packed_input_ids")

    def read(self, id: str, frames: Sequence[Any]) -> SequenceSample:
        """Decode the sample with this id from these frames. Raises CodecError that says what is wrong."""
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        if nbytes > self.max_bytes:
            raise CodecError(f"sample {id!r} has {nbytes} bytes, allowed are {self.max_bytes}")
        sample = decode_sample(frames)
        if sample.ids != (id,):
            raise CodecError(f"sample {id!r} came with the ids {sample.ids!r:.100}")
        if sample.data is None:
            raise CodecError(f"sample {id!r} came without data")
        odd = sorted(sample.keys ^ {spec.name for spec in self.keys})
        if odd:
            raise CodecError(f"sample {id!r}: keys {odd} are missing or not expected")
        tokens: list[int] = sample.lengths("packed_input_ids").values.tolist()
        if not self.min_sequences <= len(tokens) <= self.max_sequences:
            raise CodecError(
                f"sample {id!r} has {len(tokens)} sequences, allowed are {self.min_sequences} to {self.max_sequences}"
            )
        if tokens and not 1 <= min(tokens) <= max(tokens) <= self.max_tokens:
            raise CodecError(f"sample {id!r} has a sequence of no or more than {self.max_tokens} tokens")
        expected = {"L": tokens, "L-1": [n - 1 for n in tokens], "1": [1] * len(tokens)}
        dtypes = sample.dtypes
        lengths = _length_lists(sample)
        for spec in self.keys:
            _check_key(sample, spec, dtypes[spec.name], lengths[spec.name], expected)
        return sample


def _check_key(
    sample: SequenceSample, spec: KeySpec, dtype: str, lengths: list[int], expected: dict[str, list[int]]
) -> None:
    """Raise CodecError unless the key is as its specification says. ``lengths`` are those of the key's sequences,
    ``expected`` what the length rule gives."""
    tensor = sample[spec.name]
    shape = tuple(tensor.shape[1:])
    if dtype != spec.dtype or shape != spec.trailing:
        raise CodecError(f"{_where(sample, spec)}: {dtype} {shape}, expected {spec.dtype} {spec.trailing}")
    if spec.rule != "free" and lengths != expected[spec.rule]:
        raise CodecError(f"{_where(sample, spec)}: lengths {lengths!r:.80} do not fit {expected['L']!r:.80} tokens")
    if spec.dtype in _FLOATS and not _finite(tensor) and not _finite(_without_failures(sample, spec)):
        raise CodecError(f"{_where(sample, spec)}: a value is not finite")


def _finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, in one pass: their sum is finite exactly when all of them are, short of an
    overflow."""
    total = tensor.sum() if tensor.element_size() >= 4 else tensor.double().sum()
    return math.isfinite(total.item())


def _without_failures(sample: SequenceSample, spec: KeySpec) -> Tensor:
    """Return the key's values of the rollouts that succeeded, where it has one per rollout: a failed one has no reward,
    which is written as NaN."""
    tensor = sample[spec.name]
    alike = spec.rule == "1" and "outcome" in sample.keys and sample["outcome"].shape == tensor.shape
    return tensor[sample["outcome"] == 0] if alike else tensor


def _length_lists(sample: SequenceSample) -> dict[str, list[int]]:
    """Return the lengths of the sequences by key; keys that share them share the list."""
    columns = {key: sample.lengths(key) for key in sample.keys}
    lists = {id(column): column.values.tolist() for column in columns.values()}
    return {key: lists[id(column)] for key, column in columns.items()}


def _where(sample: SequenceSample, spec: KeySpec) -> str:
    return f"sample {sample.ids[0]!r}, key {spec.name!r}"
