"""How a batch is split for a forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from realhf.api.config.option import option


@dataclass
class MicroBatchConfig:
    """Micro-batches; sequences are never cut.

    The default of max_tokens_per_mb is the smallest that costs no time at a million parameters on one core: 64 rollouts
    of 10,700 tokens train in 1.4 CPU seconds and 0.70 GB, with 4,096 in 1.4 and 0.94, with 16,384 in 1.4 and 1.14."""

    n_mbs: int = option(1, "A batch is split into at least this many micro-batches.", at_least=1)
    max_tokens_per_mb: int | None = option(
        2048,
        "A micro-batch has at most this many positions, padding included and a common prefix once; it should hold the "
        "longest sequence, and without a number it is 4096.",
        at_least=1,
    )
