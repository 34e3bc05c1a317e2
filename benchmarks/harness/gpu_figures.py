"""Works out what the GPU benchmark prints: operations of a model, its use of a device, timings and
the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PEAKS = {
    "H200": 989e12, "H100 "
                    "PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12, "A10": 125e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip
"""Dense bf16 products, in operations a second, by a part of the device's name; the first that fits
counts. From the makers' data sheets, without sparsity and, for consumer cards, with sums in
fp32."""


@dataclass(frozen=True)
class Shape:
    """Is what a decoder's operations depend on. ``head_dim`` counts for queries, keys and values
    alike; ``gated``: the feed-forward layer has three matrices, else two."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True

    @staticmethod
    def of(config: Any) -> Shape:
        """Read the shape from a configuration of transformers of the Llama, Qwen 2 or Qwen 3
        family."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Shape(
            config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, dim, config.intermediate_size,
        )  # fmt: skip

    @property
    def weights(self) -> int:
        """Number of weights that every token is multiplied with, the head's included and the
        embedding's not."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (
            self.layers * (attention + self.width * self.intermediate * (3 if self.gated else 2))
            + self.head
        )

    @property
    def head(self) -> int:
        """Number of weights of the projection to the vocabulary."""
        return self.width * self.vocabulary


def forward_operations(shape: Shape, lengths: Iterable[int], scored: int | None = None) -> float:
    """Return floating-point operations of a forward pass over sequences of ``lengths`` tokens: two
    for each weight and token, and those of causal attention, in which token ``t`` sees ``t + 1``
    tokens. The head is computed for ``scored`` tokens (None: all). Norms, activations and positions
    are left out, as is usual."""
    sizes = list(lengths)
    tokens = sum(sizes)
    pairs = sum(n * (n + 1) // 2 for n in sizes)
    body = (
        2.0 * (shape.weights - shape.head) * tokens
        + 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    )
    return body + 2.0 * shape.head * (tokens if scored is None else scored)


def train_operations(shape: Shape, lengths: Iterable[int], scored: int | None = None) -> float:
    """Return operations of a train step: the backward pass has twice those of the forward pass.
    What is computed a second time to save memory does not count, so that a method cannot look
    better by computing more."""
    return 3.0 * forward_operations(shape, lengths, scored)


def peak_of(device_name: str) -> float | None:
    """Return a device's bf16 operations a second by its data sheet; None for one that is not
    known."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


@dataclass(frozen=True)
class Timing:
    """Holds the seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.seconds)

    def rate(self, amount: float) -> float:
        """Return how much of ``amount``, which each run did, was done a second."""
        return amount / self.median

    @property
    def spread(self) -> str:
        """Return the range, as text."""
        return f"{min(self.seconds):.3g} to {max(self.seconds):.3g} s"


def timed(
    run: Callable[[], object],
    *,
    rounds: int,
    warm_up: int = 1,
    finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Run ``run`` some times and return what each took, without the first ``warm_up`` ones.
    ``finish`` waits for a device, before and after each."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(rounds):
        finish()
        began = clock()
        run()
        finish()
        seconds.append(clock() - began)
    return Timing(tuple(seconds))


@dataclass(frozen=True)
class Row:
    """Is a line of the table: what was measured, the number with its unit, and a remark. Without a
    number the remark says why there is none."""

    what: str
    number: float | None = None
    unit: str = ""
    remark: str = ""


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    cells = [("what", "number", "", "remark")]
    for row in rows:
        number = "-" if row.number is None else _digits(row.number)
        cells.append((row.what, number, row.unit, row.remark.replace("|", "/").replace("\n", " ")))
    widths = [max(len(line[i]) for line in cells) for i in range(4)]

    def line(row: Sequence[str]) -> str:
        name, number, unit, remark = row
        return (
            f"| {name:<{widths[0]}} | {number:>{widths[1]}} | {unit:<{widths[2]}} | "
            f"{remark:<{widths[3]}} |"
        )

    rule = f"|{'-' * (widths[0] + 2)}|{'-' * (widths[1] + 1)}:|{'-' * (widths[2] + 2)}|{'-' * (widths[3] + 2)}|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def _digits(number: float) -> str:
    """Return a number with three digits that count, or all of those before the point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
