"""Measures generation, training and weight updates on one GPU, and prints a table.

    python benchmarks/gpu.py [--device cuda] [--minutes 15] [--only device 1m 0.6b default] [--json FILE]
    python benchmarks/gpu.py --device cpu        # a minute: shows that the program runs, on a model of no size

Two models with random weights: the shape of the built-in policy (a million parameters, fp32) and a
Qwen3 of 0.6 billion (bf16 with fp32 master weights). Of each: tokens a second of generation,
scoring and training, the share of the device's bf16 products that training reaches (model FLOP
utilisation: operations of the model, nothing that is computed twice, over the data sheet's peak, or
over a product that was measured here where the device is not known), microseconds that the head's
log-probabilities of a token take, there and back, seconds of a weight update from publication to
proven digests, peak memory, and the seconds of a step: generate, score, train. ``default`` is the
default experiment as a whole run, environment included, on the device.

It needs no network. ``--minutes`` bounds the whole: what has not begun by then is left out, and
said, and the default experiment is ended. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.gpu_figures import Row, Shape, Timing, table, timed, train_operations
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs, GenRequest
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.training.device_use import peak_of
from realhf.backends.training.selected_logprobs import selected_logprobs
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors
from realhf.transport.weights import WeightPublisher, receive

ROOT = Path(__file__).resolve().parents[1]
RECEIVE_S = 120.0
DEFAULT_STEPS = 8
DEFAULT_SKIPPED = 2
DEFAULT_S = 600.0


@dataclass(frozen=True)
class Load:
    """A workload: ``rows`` sequences, each with a prompt of ``prompt`` tokens, shared by the
    ``group`` sequences of a group, and ``new`` generated tokens. ``budget``: maximum number of
    positions in a micro-batch."""

    name: str
    config: Qwen3Config
    dtype: torch.dtype
    rows: int
    group: int
    prompt: int
    new: int
    budget: int
    rounds: int = 3
    checkpointing: bool = False

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each sequence."""
        return [self.prompt + self.new] * self.rows


def _qwen3(**shape: Any) -> Qwen3Config:
    return Qwen3Config(
        **shape, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )


MILLION = _qwen3(
    vocab_size=1536, hidden_size=128, num_hidden_layers=4, intermediate_size=384, num_attention_heads=4,
    num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
)  # fmt: skip
BILLIONS_06 = _qwen3(
    vocab_size=151_936, hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768,
)  # fmt: skip
TINY = _qwen3(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
LOADS = {
    "1m": Load(
        "1M, fp32", MILLION, torch.float32, rows=128, group=8, prompt=512, new=64, budget=16_384
    ),
    "0.6b": Load(
        "0.6B, bf16",
        BILLIONS_06,
        torch.bfloat16,
        rows=64,
        group=8,
        prompt=512,
        new=256,
        budget=16_384,
    ),
}
REHEARSAL = Load(
    "tiny, fp32", TINY, torch.float32, rows=4, group=2, prompt=24, new=8, budget=128, rounds=2
)


class Bench:
    """Measurements of one model on a device."""

    def __init__(self, load: Load, device: torch.device, peak: float | None) -> None:
        self.load = load
        self.device = device
        self.peak = peak
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(load.config, dtype=load.dtype).eval()
        options = OptimizerConfig(lr=1e-6)
        self.engine = TorchEngine(
            model,
            None,
            optimizer=options,
            total_train_steps=1000,
            gradient_checkpointing=load.checkpointing,
        )
        self.spec = MicroBatchSpec(1, load.budget)
        self.gen = GenConfig(max_new_tokens=load.new)

    def rows(self) -> list[Row]:
        """Run all measurements and return their table rows."""
        load = self.load
        shape = Shape.of(self.load.config)
        tokens = sum(load.lengths)
        generation = self.timed(self.generate)
        apart, groups = self.batch(1), self.batch(load.group)
        scoring = self.timed(lambda: self.score(apart))
        _reset_peak(self.device)
        training = self.timed(lambda: self.train(apart))
        memory = _peak_bytes(self.device)
        shared = self.timed(lambda: self.train(groups))
        head = self.timed(self.head())
        operations = train_operations(shape, load.lengths, load.rows * load.new)
        found = [
            self.row(
                "generation",
                generation.rate(load.rows * load.new),
                "tokens/s",
                _range(generation, load),
            ),
            self.row("scoring", scoring.rate(tokens), "tokens/s", _range(scoring, load)),
            self.row(
                "training",
                training.rate(tokens),
                "tokens/s",
                f"{training.spread}, nothing in common",
            ),
            self.row(
                "training, groups",
                shared.rate(tokens),
                "tokens/s",
                f"{shared.spread}, prompts shared by groups",
            ),
            self.row(
                "the head alone",
                1e6 / head.rate(load.rows * load.new),
                "us/token",
                f"{head.spread}, both ways",
            ),
        ]
        if self.peak is not None:
            share = training.rate(operations) / self.peak
            found.append(
                self.row(
                    "model FLOP utilisation", 100 * share, "%", f"of {self.peak / 1e12:.0f} TFLOP/s"
                )
            )
        if memory:
            found.append(
                self.row(
                    "peak memory of a step",
                    memory / 2**30,
                    "GiB",
                    f"{load.budget} positions at once",
                )
            )
        found += self.update_rows()
        step = self.timed(self.step, rounds=2)
        return [
            *found,
            self.row("a step", step.median, "s", "generate, score, train; no environment"),
        ]

    def row(self, what: str, number: float, unit: str, remark: str) -> Row:
        """Return a table row for this model."""
        return Row(f"{self.load.name}: {what}", number, unit, remark)

    def timed(self, run: Callable[[], object], rounds: int = 0) -> Timing:
        """Time ``run``, with the device idle before and after each repeat."""
        return timed(run, rounds=rounds or self.load.rounds, finish=lambda: _finish(self.device))

    def generate(self) -> None:
        """Generate all sequences from their prompts, without any cache."""
        load = self.load
        generator = self.engine.generator()
        generator.free()
        stems = _draw(load.rows // load.group, load.prompt, load.config.vocab_size, seed=1).tolist()
        requests = [GenRequest(i, stems[i // load.group], seed=i) for i in range(load.rows)]
        made = generator.generate(requests, self.gen, stop_ids=(), seed=0)
        if any(len(output.token_ids) != load.new for output in made):
            raise RuntimeError("generation ended early: the rates would be wrong")

    def batch(self, group: int) -> SequenceSample:
        """Return a batch of sequences of which ``group`` consecutive ones share their prompt. The
        tokens after the prompt are trained."""
        load = self.load
        stems = _draw(
            load.rows // group, load.prompt, load.config.vocab_size, seed=2
        ).repeat_interleave(group, 0)
        ids = torch.cat([stems, _draw(load.rows, load.new, load.config.vocab_size, seed=3)], 1)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, load.prompt :] = True
        tensors = {"packed_input_ids": ids.flatten(), "loss_mask": mask.flatten()}
        names = [str(i) for i in range(load.rows)]
        return SequenceSample.from_tensors(
            names, tensors, {key: [[n] for n in load.lengths] for key in tensors}
        )

    def score(self, sample: SequenceSample) -> None:
        """Compute log-probabilities of the sample."""
        self.engine.logprobs(sample, temperature=1.0, mb_spec=self.spec)

    def train(self, sample: SequenceSample) -> None:
        """Take one train step on the sample."""
        scale = float(self.load.rows * self.load.new)

        def loss(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
            return -outputs.logprobs()[0].sum(), {}

        if self.engine.train_batch(sample, loss, mb_spec=self.spec, normaliser=scale).skipped:
            raise RuntimeError("the train step was skipped: its gradient is not finite")
        self.engine.version += 1

    def head(self) -> Callable[[], None]:
        """Return a function that computes log-probabilities and their gradients from given hidden
        states, for as many tokens as a step trains."""
        load, weight = (
            self.load,
            self.engine.model.get_output_embeddings().weight.detach().clone().requires_grad_(),
        )
        size = load.rows * load.new, load.config.hidden_size
        hidden = torch.randn(size, dtype=weight.dtype, device=self.device).requires_grad_()
        ids = _draw(load.rows, load.new, load.config.vocab_size, seed=3).flatten().to(self.device)

        def both_ways() -> None:
            hidden.grad = weight.grad = None
            selected_logprobs(hidden, weight, ids, with_entropy=False)[0].sum().backward()

        return both_ways

    def step(self) -> None:
        """Generate, score and train, as one step of GRPO does."""
        groups = self.batch(self.load.group)
        self.generate()
        self.engine.release_generation()
        self.score(groups)
        self.train(groups)

    def update_rows(self) -> list[Row]:
        """Measure updates of a streaming engine's weights on the same device, as between processes
        of one host."""
        with torch.device(self.device):
            copy = AutoModelForCausalLM.from_config(self.load.config, dtype=self.load.dtype).eval()
        stream = ContinuousGenerator(copy, version=-1)
        seconds = []
        with tempfile.TemporaryDirectory() as folder:
            publisher = WeightPublisher("benchmark", "model_worker/0", Path(folder))
            try:
                for version in range(1 + self.load.rounds):
                    began = time.perf_counter()
                    weights = self.engine.weights()
                    manifest = publisher.publish(version, weights)
                    tensors = receive(manifest, RECEIVE_S)
                    stream.load_weights(version, tensors)
                    held = stream.weight_digests([*weights])
                    seconds.append(time.perf_counter() - began)
                    if {name: tensor.digest for name, tensor in held.items()} != digest_tensors(
                        weights
                    ):
                        raise RuntimeError(
                            "the engine does not hold the weights that were published"
                        )
            finally:
                publisher.close()
                stream.close()
        taken = Timing(tuple(seconds[1:]))
        return [
            self.row(
                "weight update",
                taken.median,
                "s",
                f"{taken.spread}, through shared memory, digests included",
            )
        ]


def device_rows(device: torch.device) -> tuple[list[Row], float | None]:
    """Return (rows that describe the device, peak rate that the utilisation refers to, None on a
    CPU)."""
    if device.type != "cuda":
        return [
            Row(
                "device",
                None,
                "",
                f"{device.type}, torch {torch.__version__}: the numbers mean nothing",
            )
        ], None
    properties = torch.cuda.get_device_properties(device)
    size = 8192
    dtype = torch.bfloat16
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    product = timed(lambda: one @ other, rounds=10, warm_up=3, finish=lambda: _finish(device))
    measured = product.rate(2.0 * size**3)
    known = peak_of(properties.name)
    remark = f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    sheet = (
        "its data sheet is not known: utilisation is of this product"
        if known is None
        else f"sheet {known / 1e12:.0f}"
    )
    return [
        Row("device memory", properties.total_memory / 2**30, "GiB", remark),
        Row("a bf16 product of 8192", measured / 1e12, "TFLOP/s", sheet),
    ], known or measured


def default_rows(device: torch.device, limit_s: float = DEFAULT_S) -> list[Row]:
    """Run some steps of the default experiment, within ``limit_s`` seconds, and return a row with
    their duration."""
    what = "default experiment: a step"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = [
            "experiment=grpo_aws", f"fileroot={folder}", "trial_name=measured", f"total_train_steps={DEFAULT_STEPS}",
            "evaluation.episodes_per_task=0", "evaluation.greedy_episodes_per_task=0", "recover_mode=disabled",
            "monitor.trackers=[]", "monitor.progress=false", "seed=1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "realhf.launch", *options]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return [Row(what, None, "", f"did not end within {limit_s:.0f} s")]
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            return [Row(what, None, "", f"ended with {done.returncode}: {lines[-1][:160]}")]
        text = (Path(folder) / "grpo_aws" / "measured" / "metrics.jsonl").read_text(
            encoding="utf-8"
        )
    seconds = [row["time/step"] for row in map(json.loads, text.splitlines())][DEFAULT_SKIPPED:]
    remark = (
        f"{min(seconds):.3g} to {max(seconds):.3g} s of {len(seconds)} steps, environment and "
        f"models on {device.type}"
    )
    return [Row(what, statistics.median(seconds), "s", remark)]


def measure(
    device: torch.device, wanted: Sequence[str], minutes: float, say: Callable[[str], object]
) -> list[Row]:
    """Measure the parts ``wanted`` in order and return their rows. A part that fails, or would
    begin after ``minutes`` minutes, becomes a row that says so; the other parts are still
    measured."""
    began = time.monotonic()
    rows = list[Row]()
    found, peak = device_rows(device)
    rows += found
    loads = LOADS if device.type == "cuda" else dict.fromkeys(LOADS, REHEARSAL)
    for part in wanted:
        if time.monotonic() - began > 60 * minutes:
            rows.append(Row(part, None, "", f"left out: {minutes:g} minutes are over"))
            continue
        say(f"{part} ...")
        try:
            if part == "default":
                rows += default_rows(
                    device, min(DEFAULT_S, max(60.0, began + 60 * minutes - time.monotonic()))
                )
            else:
                rows += Bench(loads[part], device, peak).rows()
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            rows.append(Row(part, None, "", f"failed: {type(error).__name__}: {first[:200]}"))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _draw(rows: int, columns: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randint(
        3, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed)
    )


def _range(timing: Timing, load: Load) -> str:
    return f"{timing.spread}, {load.rows} rows of {load.prompt} + {load.new}"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def main() -> int:
    """Run the benchmark and print the table. Return 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument(
        "--only", nargs="+", default=[*LOADS, "default"], choices=[*LOADS, "default"]
    )
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees none here, so nothing is measured; --device "
            f"cpu is a rehearsal"
        )
        return 0
    rows = measure(
        torch.device(args.device), args.only, args.minutes, lambda text: print(text, flush=True)
    )
    print(table(rows))
    if args.json:
        args.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8"
        )
    return int(any(row.number is None and row.what in args.only for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
