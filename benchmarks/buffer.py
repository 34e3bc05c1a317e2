"""Cost of the sequence buffer per sample, with 1,000 to 1,000,000 samples resident.

    python benchmarks/buffer.py [--batch 128] [--json FILE] [--plot FILE]

One cycle on a graph of four calls (generate, two that score, train): put a batch, lease it four
times, read the metadata of every lease, amend it, evict it. The buffer stays filled with the given
number of samples, of which a third each wait for the first, the middle and the last calls. The
batches that a run would receive from workers are built before the clock starts. Prints the median
over repeats with its spread, the ratio to the first row, and the longest single operation, in CPU
time of the process (one thread), so that a busy machine does not blur the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realhf.api.experiment import InterfaceType, MFCDef
from realhf.api.graph import DataFlowGraph, build_graph
from realhf.api.sample import SequenceSample
from realhf.dataflow.buffer import AsyncIOSequenceBuffer

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ORDER = ("actor_gen", "ref_inf", "rew_inf", "actor_train")


def graph(batch: int) -> DataFlowGraph:
    """Return the call graph of synchronous GRPO with its real keys."""
    kinds = InterfaceType

    def mfc(name: str, kind: InterfaceType, inputs: str, outputs: str = "") -> MFCDef:
        given = tuple(inputs.split())
        made = tuple(outputs.split())
        return MFCDef(name, name, kind, "none", n_seqs=batch, input_keys=given, output_keys=made)

    generated = "packed_input_ids loss_mask packed_logprobs packed_versions env_rewards"
    return build_graph(
        [
            mfc("actor_gen", kinds.GENERATE, "packed_prompts", generated),
            mfc("ref_inf", kinds.INFERENCE, "packed_input_ids", "packed_ref_logprobs"),
            mfc("rew_inf", kinds.INFERENCE, "env_rewards", "rewards"),
            mfc(
                "actor_train",
                kinds.TRAIN_STEP,
                "packed_input_ids loss_mask packed_logprobs packed_versions packed_ref_logprobs "
                "rewards",
            ),
        ],
        ["packed_prompts"],
    )


class Cycle:
    """Buffer under test, with the batches for it and the operations of one cycle."""

    def __init__(self, resident: int, batch: int, cycles: int, read_meta: bool) -> None:
        self.graph = graph(batch)
        self.buffer = AsyncIOSequenceBuffer(self.graph, max_size=resident + batch)
        self.batch = batch
        self.read_meta = read_meta
        self.longest = 0.0
        self._next_put = 0
        self._ids = [
            tuple(f"task-{n}@{i}" for i in range(batch))
            for n in range(resident // batch + 1 + cycles)
        ]
        self._inputs = [self._meta(ids, ("packed_prompts",)) for ids in self._ids]
        self._outputs = {
            m.name: [self._meta(ids, m.output_keys) for ids in self._ids] if m.output_keys else []
            for m in self.graph.mfcs
        }
        self._taken: dict[str, int] = dict.fromkeys(ORDER, 0)

    def _meta(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        lens = {key: [[len(key)] * 8] * len(ids) for key in keys}
        return SequenceSample(
            ids, lens, dict.fromkeys(keys, "i64"), dict.fromkeys(keys, ()), None, {}
        )

    async def fill(self, resident: int) -> None:
        """Fill the buffer. A third of the samples then waits for the first call, a third for the
        middle calls and a third for the last."""
        batches = resident // self.batch
        for _ in range(batches):
            await self.put()
        for _ in range(2 * batches // 3):
            await self.call("actor_gen")
        for name in ("ref_inf", "rew_inf"):
            for _ in range(batches // 3):
                await self.call(name)

    async def put(self) -> None:
        """Put the next batch into the buffer."""
        await self._timed(self.buffer.put_batch, self._inputs[self._next_put])
        self._next_put += 1

    async def call(self, name: str) -> None:
        """Lease a batch for a call, and return it to the buffer with the call's outputs."""
        lease = await self._timed(self.buffer.get_batch_for_rpc, name)
        if self.read_meta and not lease.meta.keys:
            raise AssertionError(f"{name} got no keys")
        outputs = self._outputs[name]
        answer = outputs[self._taken[name]] if outputs else None
        self._taken[name] += 1
        began = time.process_time()
        self.buffer.amend_batch(lease, answer)
        self.longest = max(self.longest, time.process_time() - began)

    async def _timed(self, operation: Callable[..., Any], *args: Any) -> Any:
        began = time.process_time()
        result = await operation(*args)
        self.longest = max(self.longest, time.process_time() - began)
        return result

    async def run(self, cycles: int) -> float:
        """Run ``cycles`` cycles and return their CPU seconds."""
        began = time.process_time()
        for _ in range(cycles):
            await self.put()
            for name in ORDER:
                await self.call(name)
        return time.process_time() - began


async def measure(
    resident: int, batch: int, cycles: int, repeats: int, read_meta: bool
) -> dict[str, Any]:
    """Return the cost per sample, in CPU microseconds, with ``resident`` samples in the buffer."""
    bench = Cycle(resident, batch, cycles * (repeats + 1), read_meta)
    await bench.fill(resident)
    await bench.run(cycles)
    bench.longest = 0.0
    gc.collect()
    times = [await bench.run(cycles) / (cycles * batch) * 1e6 for _ in range(repeats)]
    if len(bench.buffer) != resident // batch * batch:
        raise AssertionError(f"{len(bench.buffer)} samples resident, expected {resident}")
    low, high = np.percentile(times, [25, 75]).tolist()
    median = statistics.median(times)
    return {
        "resident": resident,
        "us_per_sample": median,
        "us_quartiles": [low, high],
        "samples_per_s": 1e6 / median,
        "longest_operation_ms": bench.longest * 1e3,
    }


def machine() -> dict[str, Any]:
    """Return the properties of the machine that the results depend on."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    return {"machine": platform.machine(), "cores": os.cpu_count(), **versions}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the cost per sample over the number of resident samples, with logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.loglog([r["resident"] for r in rows], [r["us_per_sample"] for r in rows], marker="o")
    axes.set(xlabel="resident samples", ylabel="microseconds per sample", ylim=(0.1, 100))
    axes.set_title("put, four leases, amend, complete, evict")
    axes.grid(True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, help="samples per put and per call")
    parser.add_argument("--cycles", type=int, default=60, help="cycles per repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument(
        "--lazy", action="store_true", help="do not read the metadata of the leases"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows = []
    print(
        f"{'resident':>10} {'us/sample':>10} {'quartiles':>15} {'ratio':>6} {'samples/s':>10} "
        f"{'longest ms':>11}"
    )
    for size in args.sizes:
        row = asyncio.run(measure(size, args.batch, args.cycles, args.repeats, not args.lazy))
        row["ratio"] = row["us_per_sample"] / (rows[0] if rows else row)["us_per_sample"]
        rows.append(row)
        low, high = row["us_quartiles"]
        print(
            f"{size:>10,} {row['us_per_sample']:>10.2f} {low:>7.2f}-{high:<7.2f} "
            f"{row['ratio']:>6.2f}"
            f" {row['samples_per_s']:>10,.0f} {row['longest_operation_ms']:>11.2f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"batch": args.batch, **machine(), "rows": rows}, indent=1))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
