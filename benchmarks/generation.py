"""Decoding speed of the embedded engine against transformers ``generate``, in one process session.

    python benchmarks/generation.py [--rows 96] [--prompt 64] [--steps 64] [--repeats 5] [--threads 2]

Both sides sample the same number of tokens from the same random model. Printed per side: the median and
spread over repeats of milliseconds per decode step, prefill subtracted by a run of one token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.api.config import GenConfig
from realhf.api.model import GenRequest
from realhf.backends.embedded_generation import EmbeddedGenerator


def build_model() -> Any:
    """The built-in policy's shape: 0.98 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def embedded_call(engine: EmbeddedGenerator, prompts: torch.Tensor, steps: int) -> None:
    engine.free()
    requests = [GenRequest(i, row.tolist()) for i, row in enumerate(prompts)]
    config = GenConfig(max_new_tokens=steps)
    outputs = engine.generate(requests, config, stop_ids=(), seed=1)
    assert all(len(o.token_ids) == steps for o in outputs)


def peer_call(model: Any, prompts: torch.Tensor, steps: int) -> None:
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=steps,
            min_new_tokens=steps,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert out.sequences.shape[1] == prompts.shape[1] + steps


def per_step_ms(call: Callable[[int], object], steps: int, repeats: int) -> list[float]:
    call(4)
    return [
        1e3 * (seconds(lambda: call(steps)) - seconds(lambda: call(1))) / (steps - 1) for _ in range(repeats)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 96), ("prompt", 64), ("steps", 64), ("repeats", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_model()
    engine = EmbeddedGenerator(model)
    prompts = torch.randint(3, 1024, (args.rows, args.prompt))
    ours = per_step_ms(lambda n: embedded_call(engine, prompts, n), args.steps, args.repeats)
    peer = per_step_ms(lambda n: peer_call(model, prompts, n), args.steps, args.repeats)
    result = {
        "rows": args.rows,
        "prompt": args.prompt,
        "steps": args.steps,
        "threads": args.threads,
        "embedded_ms_per_step": {"median": statistics.median(ours), "min": min(ours), "max": max(ours)},
        "transformers_ms_per_step": {"median": statistics.median(peer), "min": min(peer), "max": max(peer)},
        "ratio": statistics.median(peer) / statistics.median(ours),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
