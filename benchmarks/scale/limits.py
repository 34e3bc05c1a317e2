"""What limits a run of a given size: one line per number of GPUs and size of model, from the
assumptions below.

    python -m benchmarks.scale.limits [--json FILE]

Half of the GPUs train, half generate. Every figure is arithmetic on ``Assumptions``, of which those
named in ``MEASURED`` were measured in this repository and the others are data sheets and
experience; docs/scaling.md explains them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

MEASURED = ("master_us", "master_idle", "digest_bytes_s", "shared")


@dataclass(frozen=True)
class Model:
    """Size of a model. ``kv_bytes``: size of one token's keys and values over all layers, in 16-bit
    precision."""

    name: str
    parameters: float
    kv_bytes: int


MODELS = (Model("0.6B", 0.6e9, 114_688), Model("8B", 8e9, 147_456), Model("70B", 70e9, 327_680))
GPUS = (8, 64, 1024)


@dataclass(frozen=True)
class Assumptions:
    """Assumed properties of hardware and workload, in bytes, seconds and operations. A GPU is an
    H100 with 80 GB."""

    per_host: int = 8
    memory: float = 80e9
    memory_used: float = 0.8
    train_bytes: float = 16.0
    """Bytes per parameter for training: weights and gradients in 16 bits, weights and two moments
    in 32 bits."""
    operations: float = 989e12
    operations_used: float = 0.4
    bandwidth: float = 3.35e12
    bandwidth_used: float = 0.5
    in_play: int = 64
    """Number of episodes that a GPU generates concurrently."""
    sampled: int = 2000
    tokens: int = 4000
    """Tokens per episode: ``sampled`` are generated, ``tokens`` include the prompt and the
    environment's answers. On average half of them are in the cache."""
    token_bytes: int = 18
    """Bytes per token in the stream of samples: id, log-probability, version, two masks."""
    operations_per_token: float = 8.0
    """Operations per parameter and token: a train step, and the reference's forward pass."""
    batch: int = 1024
    batch_per_gpu: int = 8
    """Episodes per train step: ``batch``, or ``batch_per_gpu`` times the number of GPUs if that is
    more."""
    link: float = 25e9
    """Bytes per second between two hosts, in each direction."""
    shared: float = 5e9
    """Bytes per second through memory shared by two processes of a host."""
    weights: float = 2e9
    """Bytes per second of weights that one process sends to other hosts, encrypted. Measured with a
    record layer above TLS that has since been removed; ``benchmarks.network.data_plane`` measures
    TLS alone. Each engine fetches the weights by itself."""
    socket: float = 1e9
    """Bytes per second that one process receives through encrypted sockets."""
    digest_bytes_s: float = 1.6e9
    """Bytes per second of digests on one thread. Each engine makes two passes per update."""
    master_us: float = 230.0
    master_idle: float = 0.3
    trainer_us: float = 90.0
    """CPU microseconds of the model worker per streamed episode."""


@dataclass(frozen=True)
class Line:
    """Result for one number of GPUs and model. Rates are in episodes per second, times in seconds;
    ``master``, ``stream`` and ``stream_cpu`` are fractions of the available capacity. ``why``: what
    limits the rate."""

    gpus: int
    model: str
    train_gpus: int
    engine_gpus: int
    generation: float
    training: float
    rate: float
    step_s: float
    update_s: float
    tree_s: float
    digest_s: float
    master: float
    stream: float
    stream_cpu: float
    why: str


def line(gpus: int, model: Model, given: Assumptions) -> Line:
    """Return the result for one number of GPUs and model."""
    usable = given.memory * given.memory_used
    train_gpus = ceil(model.parameters * given.train_bytes / usable)
    engine_gpus = _power(ceil(2 * model.parameters / (usable / 2)))
    half = gpus / 2
    fits = train_gpus <= half and engine_gpus <= half
    context = given.in_play * engine_gpus * given.tokens / 2 * model.kv_bytes
    pass_s = (2 * model.parameters + context) / (
        engine_gpus * given.bandwidth * given.bandwidth_used
    )
    generation = half * given.in_play / pass_s / given.sampled
    operations = given.operations_per_token * model.parameters * given.tokens
    training = half * given.operations * given.operations_used / operations
    rate = min(generation, training)
    hosts = max(1, ceil(half / given.per_host)) if gpus > given.per_host else 0
    weights = 2 * model.parameters
    sent = min(given.weights, given.link)
    update_s = half / engine_gpus * weights / sent if hosts else weights / given.shared
    tree_s = weights / sent * max(1, hosts).bit_length() if hosts else update_s
    step_s = max(given.batch, given.batch_per_gpu * gpus) / rate
    found = {
        "the trainer does not fit": not fits,
        "the trainer needs several hosts": train_gpus > given.per_host or half > given.per_host,
        "weights to one engine after the other": update_s > step_s,
        "the stream into one process": rate * given.tokens * given.token_bytes > given.socket,
        "the master": rate * given.master_us / 1e6 > 1 - given.master_idle,
    }
    slower = "generation" if generation < training else "training"
    return Line(
        gpus,
        model.name,
        train_gpus,
        engine_gpus,
        generation,
        training,
        rate if fits else 0.0,
        step_s,
        update_s,
        tree_s,
        2 * weights / engine_gpus / given.digest_bytes_s,
        rate * given.master_us / 1e6 / (1 - given.master_idle),
        rate * given.tokens * given.token_bytes / given.socket,
        rate * given.trainer_us / 1e6,
        "; ".join([why for why, true in found.items() if true] or [slower]),
    )


def _power(count: int) -> int:
    """Return the smallest power of two that is at least ``count``: a model is split into that many
    parts."""
    return 1 << (count - 1).bit_length()


def lines(given: Assumptions | None = None) -> list[Line]:
    """Return the results for all numbers of GPUs and models."""
    return [line(gpus, model, given or Assumptions()) for gpus in GPUS for model in MODELS]


def table(found: Sequence[Line]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| GPUs | model | GPUs to hold trainer / engine | episodes/s: generation / training | step "
        "s | weights s: one "
        "by one / tree | digests s | master | stream: bytes / CPU | limit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        rows.append(
            f"| {one.gpus} | {one.model} | {one.train_gpus} / {one.engine_gpus} | "
            f"{one.generation:,.2f} / "
            f"{one.training:,.2f} | {one.step_s:,.1f} | {one.update_s:.2f} / {one.tree_s:.2f} | "
            f"{one.digest_s:.1f} | "
            f"{one.master:.2%} | {one.stream:.2%} / {one.stream_cpu:.2%} | {one.why} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = lines()
    print(table(found))
    if args.json:
        report = {"assumptions": asdict(Assumptions()), "lines": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
