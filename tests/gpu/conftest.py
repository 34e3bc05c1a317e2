"""Tests for machines with a GPU: ``make test-gpu`` runs them, anywhere else they are skipped with a
word.

This folder needs nothing of the other tests' conftest, so that it runs where only a part of the
project's dependencies is installed. ``--gpu-device cpu`` plays those tests that need no CUDA on the
CPU, which shows that they are sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import OptimizerConfig
from realhf.api.model import CallContext, Model
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.torch_engine import TorchEngine

HERE = Path(__file__).resolve().parent
VOCABULARY = 503
POSITIONS = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": POSITIONS, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


SPEC = MicroBatchSpec(1, 512)


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(
        model, None, optimizer=OptimizerConfig(lr=1e-3), total_train_steps=10, **options
    )


def train(engine: TorchEngine, sample: SequenceSample, steps: int = 1) -> list[float]:
    """Losses of some supervised steps."""
    losses = []
    for step in range(steps):
        context = CallContext(step, 7 + step, SPEC, Path())
        losses.append(
            SFTInterface().train_step(Model("actor", engine, None), sample, context)["loss"]
        )
        engine.version += 1
    return losses


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: a rehearsal without a GPU",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rehearsal = config.getoption("--gpu-device", default="cuda") == "cpu"
    missing = (
        f"needs a GPU: torch {torch.__version__} sees none here (make test-gpu on a machine that "
        f"has one)"
    )
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        if rehearsal and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA itself: no rehearsal on the CPU"))
        elif not rehearsal and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test computes."""
    return torch.device(
        "cuda:0" if request.config.getoption("--gpu-device", default="cuda") == "cuda" else "cpu"
    )


@pytest.fixture
def model_on() -> Callable[..., Any]:
    """model_on(device, architecture, dtype) -> the same random weights every time, sharp enough to
    have favourites."""

    def build(
        device: torch.device, architecture: str = "qwen3", dtype: torch.dtype = torch.float32
    ) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[architecture]).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3.0)
        return model.to(device=device, dtype=dtype)

    return build


@pytest.fixture
def batch() -> SequenceSample:
    """Two groups whose sequences begin alike, and one sequence alone; half of the tokens train."""
    g = torch.Generator().manual_seed(5)
    rows: list[torch.Tensor] = []
    for n in (90, 61):
        stem = torch.randint(3, VOCABULARY, (n,), generator=g)
        rows += [
            torch.cat([stem, torch.randint(3, VOCABULARY, (m,), generator=g)]) for m in (37, 12, 55)
        ]
    rows.append(torch.randint(3, VOCABULARY, (140,), generator=g))
    total = sum(map(len, rows))
    tensors = {
        "packed_input_ids": torch.cat(rows),
        "loss_mask": torch.rand(total, generator=g) < 0.5,
    }
    lengths = [[len(row) for row in rows[:3]], [len(row) for row in rows[3:6]], [len(rows[6])]]
    return SequenceSample.from_tensors(["a", "b", "c"], tensors, dict.fromkeys(tensors, lengths))


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """What a test leaves on the device is given back, so that the next one can measure."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
