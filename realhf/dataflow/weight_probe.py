"""Samples after a fixed prefix: what an engine says before and after an update shows whether it computes with it."""

from __future__ import annotations

import threading
from typing import Any

from realhf.api.calls import Probe, ProbeRequest
from realhf.api.config import GenConfig
from realhf.api.generation import StreamingGenerator
from realhf.api.model import GenOutput, GenRequest

TEXT = "The quick brown fox jumps over the lazy dog, and 0123456789 are the digits; list every bucket, then stop. "
NEW_TOKENS = 4
SHORT, LONG = 12, 144
"""Prefix tokens. vLLM caches blocks of 128 tokens on the CPU and of 16 elsewhere: the long prefix holds such a block,
so that keys and values of earlier weights would be found, and the short one none, where keeping them is asked for."""
SLOT = -1
"""The probe's slot; those of clients start at 0."""
WAIT_S = 300.0
"""Longest time for one probe, with which a server may compile."""


def probe_ids(tokenizer: Any, engine: str, kv_policy: str, limit: int | None) -> list[int]:
    """Return the prefix for an engine of this name, which takes sequences of ``limit`` tokens."""
    ids = [int(token) for token in tokenizer.encode(TEXT, add_special_tokens=False)] or [0]
    count = LONG if engine == "vllm" and kv_policy == "recompute" else SHORT
    room = count if limit is None else max(1, min(count, limit - NEW_TOKENS))
    return (ids * (room // len(ids) + 1))[:room]


class WeightProbe:
    """Probes one engine. One that recomputes under new weights (``kv_policy``) may keep the prefix cached between two
    probes, on purpose: it must not use what it computed under other weights."""

    def __init__(self, engine: StreamingGenerator, token_ids: list[int], kv_policy: str) -> None:
        self._engine, self._token_ids = engine, token_ids
        self._forgets = kv_policy != "recompute"

    def sample(self, request: ProbeRequest) -> Probe:
        """Return the prefix with what the engine samples after it. Raises what the engine raises, or TimeoutError."""
        over, outcomes = threading.Event(), list[GenOutput | Exception]()

        def done(outcome: GenOutput | Exception) -> None:
            outcomes.append(outcome)
            over.set()

        config = GenConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
        self._engine.submit(GenRequest(SLOT, self._token_ids, seed=1), config, (), done)
        if not over.wait(WAIT_S):
            self._engine.abort([SLOT])
            raise TimeoutError(f"the engine did not answer the probe of its weights within {WAIT_S:g} s")
        if request.last or self._forgets:
            self._engine.free([SLOT])
        outcome = outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Probe([*self._token_ids, *outcome.token_ids], list(outcome.logprobs))
