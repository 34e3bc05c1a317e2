"""Metrics of the GPU benchmark: floating-point operations of a model, utilisation of a device,
timings and the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder that determine its number of operations. ``head_dim``: of queries,
    keys and values alike. ``gated``: whether the feed-forward layer has three matrices instead of
    two."""

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
        """Return the shape of a transformers configuration of the Llama, Qwen 2 or Qwen 3
        family."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Shape(
            config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, dim, config.intermediate_size,
        )  # fmt: skip

    @property
    def weights(self) -> int:
        """Number of weights that every token is multiplied by. It includes the output head but not
        the embedding."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (
            self.layers * (attention + self.width * self.intermediate * (3 if self.gated else 2))
            + self.head
        )

    @property
    def head(self) -> int:
        """Number of weights in the output head, the projection to the vocabulary."""
        return self.width * self.vocabulary


def forward_operations(shape: Shape, lengths: Iterable[int], scored: int | None = None) -> float:
    """Return the floating-point operations of a forward pass over sequences of ``lengths`` tokens.

    These are two per weight and token, plus causal attention, in which token ``t`` attends to ``t +
    1`` tokens. The output head is computed for ``scored`` tokens (None: all). Norms, activations
    and positions are left out, as is usual.
    """
    sizes = list(lengths)
    tokens = sum(sizes)
    pairs = sum(n * (n + 1) // 2 for n in sizes)
    body = (
        2.0 * (shape.weights - shape.head) * tokens
        + 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
    )
    return body + 2.0 * shape.head * (tokens if scored is None else scored)


def train_operations(shape: Shape, lengths: Iterable[int], scored: int | None = None) -> float:
    """Return the floating-point operations of a train step; the backward pass has twice as many as
    the forward pass. Recomputation that saves memory is not counted, so that a method cannot look
    better by computing more."""
    return 3.0 * forward_operations(shape, lengths, scored)


@dataclass(frozen=True)
class Timing:
    """Wall seconds of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds of a run."""
        return statistics.median(self.seconds)

    def rate(self, amount: float) -> float:
        """Return ``amount``, the work done in each run, per second."""
        return amount / self.median

    @property
    def spread(self) -> str:
        """Range of the seconds, as text."""
        return f"{min(self.seconds):.3g} to {max(self.seconds):.3g} s"


def timed(
    run: Callable[[], object],
    *,
    rounds: int,
    warm_up: int = 1,
    finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Return the seconds of ``rounds`` runs, after ``warm_up`` runs that are not measured.
    ``finish`` waits for the device, before and after each run."""
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
    """A line of the table: what was measured, the value with its unit, and a remark. If there is no
    value, the remark says why."""

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
    """Return a number as text with three significant digits, or without decimals from 100 on."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
