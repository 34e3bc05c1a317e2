"""What a finished sample that comes in from a rollout worker must look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realhf.api.keys import KeySpec
from realhf.api.sample import SequenceSample
from realhf.transport.codec import decode_sample
from realhf.transport.errors import CodecError

_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class SampleLimits:
    """``keys``: exactly these must be there, with their dtype, trailing shape and length rule, one of them
    ``packed_input_ids``; every sample has ``min_sequences`` to ``max_sequences`` sequences of at most ``max_tokens``
    tokens, in at most ``max_bytes`` bytes."""

    keys: tuple[KeySpec, ...]
    min_sequences: int = 1
    max_sequences: int = 1024
    max_tokens: int = 1 << 20
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if "packed_input_ids" not in {spec.name for spec in self.keys}:
            raise ValueError("samples of a stream need the key packed_input_ids")

    def read(self, id: str, frames: Sequence[Any]) -> SequenceSample:
        """The sample with this id in these frames. Raises CodecError with what is wrong."""
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
        tokens = sample.lengths("packed_input_ids").values
        if not self.min_sequences <= len(tokens) <= self.max_sequences:
            raise CodecError(
                f"sample {id!r} has {len(tokens)} sequences, allowed are {self.min_sequences} to {self.max_sequences}"
            )
        if len(tokens) and not 1 <= int(tokens.min()) <= int(tokens.max()) <= self.max_tokens:
            raise CodecError(f"sample {id!r} has a sequence of no or more than {self.max_tokens} tokens")
        for spec in self.keys:
            _check_key(sample, spec, tokens)
        return sample


def _check_key(sample: SequenceSample, spec: KeySpec, tokens: np.ndarray[Any, Any]) -> None:
    where = f"sample {sample.ids[0]!r}, key {spec.name!r}"
    tensor = sample[spec.name]
    if sample.dtypes[spec.name] != spec.dtype or sample.trailing_shapes[spec.name] != spec.trailing:
        raise CodecError(f"{where}: {tensor.dtype} {tuple(tensor.shape)}, expected {spec.dtype} {spec.trailing}")
    lengths = sample.lengths(spec.name).values
    if spec.rule == "1":
        expected = np.ones_like(tokens)
    elif spec.rule == "free":
        expected = lengths
    else:
        expected = tokens - (spec.rule == "L-1")
    if not np.array_equal(lengths, expected):
        raise CodecError(f"{where}: lengths {lengths.tolist()!r:.80} do not fit {tokens.tolist()!r:.80} tokens")
    if spec.dtype in _FLOATS and not bool(tensor.isfinite().all()):
        raise CodecError(f"{where}: a value is not finite")
