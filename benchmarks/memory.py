"""Peak memory of a train step, by the number of sequences in its batch.

    python benchmarks/memory.py [--sequences 8 32 128] [--tokens 4096] [--budget 4096] [--width 64] [--scored 0.0625]

The model is a small decoder with a head of 49,152 tokens, whose logits of one sequence would take
0.8 GB in fp32. Every number of sequences has a process of its own, which takes a warm-up step on
one sequence and the measured one; its peak is the kernel's (``VmHWM``). What a step holds at once
should depend on ``mb_spec.max_tokens_per_mb`` (``--budget``) and not on the batch: the peaks should
lie within 5 % of the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from realhf.api.config import OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_engine import TorchEngine

VOCABULARY = 49_152
TARGET = 0.05
DEADLINE_S = 3600.0


def engine(width: int, tokens: int) -> TorchEngine:
    """Return an engine with randomly initialised weights and an optimizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=max(1, width // 32),
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    return TorchEngine(
        AutoModelForCausalLM.from_config(config), None, optimizer=OptimizerConfig(lr=1e-4)
    )


def batch(sequences: int, tokens: int, scored: float) -> SequenceSample:
    """Return random sequences without common prefixes. A fraction ``scored`` of their tokens is
    trained."""
    g = torch.Generator().manual_seed(1)
    n = sequences * tokens
    data = {
        "packed_input_ids": torch.randint(0, VOCABULARY, (n,), generator=g),
        "loss_mask": torch.rand(n, generator=g) < scored,
    }
    ids = [str(i) for i in range(sequences)]
    return SequenceSample.from_tensors(ids, data, dict.fromkeys(data, [[tokens]] * sequences))


def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    """Return the negative log-likelihood with an entropy bonus, so that the entropy is computed
    too."""
    logprobs, entropy = outputs.logprobs(with_entropy=True)
    assert entropy is not None
    return -(logprobs + 0.01 * entropy).sum() / len(part), {}


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Take a train step in this process and return its time and the peak memory."""
    torch.set_num_threads(args.threads)
    trained = engine(args.width, args.tokens)
    spec = MicroBatchSpec(1, args.budget)
    trained.train_batch(batch(1, args.tokens, args.scored), loss, mb_spec=spec)
    warm = peak_bytes()
    sample = batch(args.child, args.tokens, args.scored)
    start = time.monotonic()
    trained.train_batch(sample, loss, mb_spec=spec)
    return {"warm": warm, "peak": peak_bytes(), "seconds": time.monotonic() - start}


def main() -> int:
    """Measure every number of sequences and print the results. Return 1 if a peak differs from the
    first by more than the target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--scored", type=float, default=1 / 16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return 0
    first = 0.0
    held = True
    for sequences in args.sequences:
        command = [sys.executable, __file__, "--child", str(sequences)]
        for name in ("tokens", "budget", "width", "scored", "threads"):
            command += [f"--{name}", str(getattr(args, name))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 2
        found = json.loads(done.stdout.splitlines()[-1])
        first = first or found["peak"]
        ratio = found["peak"] / first
        held = held and abs(ratio - 1) <= TARGET
        print(
            f"{sequences:4d} sequences of {args.tokens}: peak {found['peak'] / 2**20:.0f} MiB, "
            f"{ratio:.3f} of the "
            f"first, after a step on one sequence {found['warm'] / 2**20:.0f} MiB, "
            f"{found['seconds']:.0f} s",
            flush=True,
        )
    print(f"within {TARGET:.0%} of the first: {'yes' if held else 'no'}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
