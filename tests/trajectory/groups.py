"""Groups as environments push them, for tests."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import numpy as np


def group(sequences: int = 2, tokens: int = 4, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A plain group with masks and log-probabilities."""
    rng = random.Random(seed)
    ids = [[rng.randrange(150_000) for _ in range(tokens)] for _ in range(sequences)]
    return {
        "tokens": ids,
        "masks": [[-100, *row[1:]] for row in ids],
        "scores": [float(i % 2) for i in range(sequences)],
        "inference_logprobs": [[1.0, *(-rng.random() for _ in row[1:])] for row in ids],
    } | more


def tensor(rows: list[list[float]], dtype: str) -> dict[str, Any]:
    """Rows as the tensor map of the binary wire."""
    flat = [number for row in rows for number in row]
    return {
        "__t__": 1,
        "dtype": dtype,
        "lens": np.array([len(row) for row in rows], "<u4").tobytes(),
        "data": np.array(flat, f"<{dtype}").tobytes(),
    }


def binary(plain: dict[str, Any], integers: str = "i4", floats: str = "f4") -> bytes:
    """A group as MessagePack with tensors."""
    packed = dict(plain)
    for name in ("tokens", "masks"):
        packed[name] = tensor(plain[name], integers)
    for name in ("advantages", "ref_logprobs", "inference_logprobs"):
        if plain.get(name) is not None:
            packed[name] = tensor(plain[name], floats)
    return msgspec.msgpack.encode(packed)


def encoded(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


EVERYTHING: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4], []], "masks": [[-100, 2, 3], [4], [2**62]], "scores": [0.1, -1e-300, 3],
    "advantages": [[1.5], [], [2]], "ref_logprobs": [[-0.25, 1e10]],
    "messages": [[{"role": "user", "content": "a \"quoted\" \u00fc\u4e2d\U0001f600", "extra": {"tokens": [1]}},
                  {"role": 7, "content": None}], []],
    "generation_params": {"temperature": 0.7000000000000001, "stop": ["</s>", "\n"], "n": {"deep": [None, True]}},
    "inference_logprobs": [[1.0, -0.1], [1.0]], "overrides": [{"a": 1}, {}],
    "group_overrides": {"big": 12345678901234567890, "group_size": 3}, "images": [None, "aGk=", {"url": "x"}],
    "env_id": 3, "distill_token_ids": [[[1, 2], []], []], "distill_logprobs": [[[0.5, -1.5]]],
}  # fmt: skip
"""A group with every stock field set to something awkward."""
