"""The prefix after which engines are probed: long enough for a block of a prefix cache, and never too long."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.dataflow.weight_proof import LONG, NEW_TOKENS, SHORT, probe_ids


class Letters:
    """A tokenizer of single letters; ``knows`` none of them where it is empty."""

    def __init__(self, knows: bool = True) -> None:
        self.knows = knows

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text] if self.knows else []


@pytest.mark.parametrize(
    ("engine", "policy", "limit", "length"),
    [
        ("vllm", "recompute", None, LONG),
        ("vllm", "recompute", 100, 100 - NEW_TOKENS),
        ("vllm", "keep", 4096, SHORT),
        ("embedded", "recompute", None, SHORT),
        ("embedded", "recompute", 3, 1),
    ],
)
def test_it_has_the_length_that_the_engine_needs_and_takes(
    engine: str, policy: str, limit: int | None, length: int
) -> None:
    for tokenizer in (Letters(), Letters(knows=False)):
        assert len(probe_ids(tokenizer, engine, policy, limit)) == length
