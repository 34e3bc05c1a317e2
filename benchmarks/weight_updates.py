"""Seconds of one weight update within a host, step by step, and what its proof costs: digests and
the self-test.

    python benchmarks/weight_updates.py [--hidden 576] [--layers 30] [--vocabulary 49152] [--repeats 5]

The default is a Llama of the shape of SmolLM2-135M with random weights, fp32, 538 MB. The trainer's
side and an embedded engine run in this process, one after the other, on one thread. Seconds are CPU
seconds of the process, median and range; (wall) is what passed. ``blake2b`` is what a cryptographic
checksum of the same bytes takes.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realhf.api.calls import TRIAL_CHANGE, TRIAL_RESTORE, ProbeRequest
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.weight_proof import SHORT_PREFIX, EngineWeightDigests, WeightProbe, WeightTrial
from realhf.transport.weights import WeightPublisher, receive

Seconds = dict[str, list[float]]


def llama(hidden: int, layers: int, vocabulary: int) -> Any:
    """Return a Llama with random weights, tied embeddings, three query heads per key head and head
    dimension 64."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


class Update:
    """Both ends of a weight update in this process, the trainer and an engine. Every step of an
    update is timed."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.seconds: Seconds = {}
        self.trainer = TorchEngine(model, None)
        self.engine = ContinuousGenerator(copy.deepcopy(model), version=-1)
        self.publisher = WeightPublisher("benchmark", "trainer", folder)
        self.trial, self.held = WeightTrial(), EngineWeightDigests(self.engine)
        self.probe = WeightProbe(self.engine, list(range(5, 5 + SHORT_PREFIX)), "recompute")

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step, return its result and record its CPU seconds (all threads of the process) and
        wall seconds."""
        began = time.process_time()
        wall = time.perf_counter()
        result = step()
        self.seconds.setdefault(name, []).append(time.process_time() - began)
        self.seconds.setdefault(f"{name} (wall)", []).append(time.perf_counter() - wall)
        return result

    def load(self, version: int, trial: int = 0) -> None:
        """Transfer a weight version to the engine, as the workers do."""
        tensors = self.trainer.weights()
        changed = self.trial.names
        manifest = self.timed(
            "publish",
            lambda: self.publisher.publish(version, tensors, trial=trial, changed=changed),
        )
        received = receive(manifest, 30.0)
        if not trial:
            self.timed("engine digests before", self.held.find_changed)
        self.timed("copy", lambda: self.engine.load_weights(version, received, again=trial > 0))
        self.timed("engine digests after", lambda: self.held.digest_after_load(manifest, received))

    def self_test(self, version: int) -> None:
        """Run the self-test that a run performs at its start, after its first update."""
        self.probe.sample(ProbeRequest(False))
        probes = []
        for trial in (TRIAL_CHANGE, TRIAL_RESTORE):
            self.trial.step(trial, self.trainer, self.trainer.weights(), probes)
            self.load(version, trial)
            probes = [self.probe.sample(ProbeRequest(trial == TRIAL_RESTORE))]


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        update = Update(llama(args.hidden, args.layers, args.vocabulary), Path(folder))
        tensors = update.trainer.weights()
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        update.load(0)
        update.seconds.clear()
        for version in range(1, args.repeats + 1):
            update.load(version)
            update.timed("trainer digests, in publish", lambda: digest_tensors(tensors))
            update.timed(
                "blake2b", lambda: [hashlib.blake2b(_bytes(tensor)) for tensor in tensors.values()]
            )
        steps = update.seconds
        update.seconds = {}
        for _ in range(args.repeats):
            steps.setdefault("self-test", [])
            began = time.process_time()
            wall = time.perf_counter()
            update.self_test(args.repeats)
            steps["self-test"].append(time.process_time() - began)
            steps.setdefault("self-test (wall)", []).append(time.perf_counter() - wall)
        update.engine.close()
        update.publisher.close()
    print(f"{len(tensors)} tensors, {nbytes / 1e6:.0f} MB")
    for name, seconds in steps.items():
        median = statistics.median(seconds)
        print(
            f"{name:34} {median:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})  "
            f"{nbytes / median / 1e9:6.2f} GB/s"
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


if __name__ == "__main__":
    main()
