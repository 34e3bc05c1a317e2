"""Measures a train step on several workers beside one worker with as many threads.

    python benchmarks/parallel.py [--workers 2] [--rounds 9] [--sequences 32] [--tokens 96] [--model FOLDER]

One worker with N threads and N workers with one thread each (copies, ddp) train the same batch in
turns, a round each. It prints seconds of a step (median, and the range of rounds) and the ratio of
the two in each round. Without --model the model has the shape of the built-in policy (a million
parameters) and random weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.compute_threads import threads
from realhf.backends.parallel.ddp import DdpEngine
from realhf.backends.parallel.process_groups import GroupRanks, RendezvousStore, TorchWorld
from realhf.backends.training.torch_engine import TorchEngine

JOIN_S = 120.0
STEP_S = 600.0
STEPS = 3
"""Number of steps in a round; the median is measured."""


def load(folder: str) -> Any:
    """Return the model to train."""
    torch.manual_seed(0)
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = {
        "vocab_size": 1536,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 384,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    return AutoModelForCausalLM.from_config(Qwen3Config(**shape, **heads)).eval()


def batch_of(sequences: int, tokens: int, vocabulary: int) -> SequenceSample:
    """Return random sequences of ``tokens / 2`` to ``tokens`` tokens, of which half are trained."""
    g = torch.Generator().manual_seed(1)
    lengths = [[int(n)] for n in torch.randint(tokens // 2, tokens + 1, (sequences,), generator=g)]
    total = sum(n for (n,) in lengths)
    tensors = {
        "packed_input_ids": torch.randint(3, vocabulary, (total,), generator=g),
        "loss_mask": torch.rand(total, generator=g) < 0.5,
    }
    return SequenceSample.from_tensors(
        [f"s{i}" for i in range(sequences)], tensors, dict.fromkeys(tensors, lengths)
    )


def serve(
    pipe: Connection,
    rank: int,
    size: int,
    n_threads: int,
    address: str,
    options: argparse.Namespace,
) -> None:
    """Run one worker. It trains a round whenever it is told to, and answers with the median seconds
    of a step."""
    torch.set_num_threads(n_threads)
    model = load(options.model)
    settings: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-4), "total_train_steps": 1000}
    if size > 1:
        world = TorchWorld(address, rank, range(size), join_s=JOIN_S, timeout_s=STEP_S)
        world.create_groups([range(size)])
        ranks = GroupRanks(world, range(size), sharded=False, device=torch.device("cpu"))
        engine: TorchEngine = DdpEngine(model, None, ranks=ranks, role="actor", **settings)
    else:
        engine = TorchEngine(model, None, **settings)
    engine.use_threads(threads(n_threads))
    interface = SFTInterface()
    role = Model("actor", engine, None)
    batch = batch_of(options.sequences, options.tokens, model.config.vocab_size)
    context = CallContext(0, 1, MicroBatchSpec(1, options.budget), Path())
    pipe.send("ready")
    while pipe.recv():
        taken = []
        for _ in range(STEPS):
            began = time.perf_counter()
            if size > 1:
                with engine.ranks.together("a step"):  # pyright: ignore[reportAttributeAccessIssue]
                    interface.train_step(role, batch, context)
            else:
                interface.train_step(role, batch, context)
            taken.append(time.perf_counter() - began)
        pipe.send(statistics.median(taken))


class Crew:
    """``size`` workers with ``n_threads`` threads each."""

    def __init__(self, size: int, n_threads: int, options: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._meeting = RendezvousStore(size, JOIN_S) if size > 1 else None
        address = self._meeting.address if self._meeting else ""
        self._pipes = []
        for rank in range(size):
            here, there = spawn.Pipe()
            spawn.Process(
                target=serve, args=(there, rank, size, n_threads, address, options), daemon=True
            ).start()
            self._pipes.append(here)
        for pipe in self._pipes:
            pipe.recv()

    def step(self) -> float:
        """Let all workers train a round; return the seconds of a step of the slowest worker."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self._pipes)

    def end(self) -> None:
        """Stop the workers."""
        for pipe in self._pipes:
            pipe.send(False)


def line(name: str, values: Sequence[float], unit: str) -> str:
    """Return a line with the median and range of the values."""
    return (
        f"{name:<34} {statistics.median(values):8.3f} {unit}  [{min(values):.3f}, "
        f"{max(values):.3f}]"
    )


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="longest sequence")
    parser.add_argument("--budget", type=int, default=4224, help="tokens of a micro-batch")
    parser.add_argument("--model", default="", help="folder of a model")
    options = parser.parse_args()
    one = Crew(1, options.workers, options)
    several = Crew(options.workers, 1, options)
    _ = one.step(), several.step()  # The first steps create the optimizer's state.
    rounds = [(one.step(), several.step()) for _ in range(options.rounds)]
    one.end()
    several.end()
    print(line(f"1 worker, {options.workers} threads", [a for a, _ in rounds], "s a step"))
    print(line(f"{options.workers} workers, 1 thread each", [b for _, b in rounds], "s a step"))
    print(line("ratio", [b / a for a, b in rounds], ""))


if __name__ == "__main__":
    main()
