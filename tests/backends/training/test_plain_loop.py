"""Loss and gradients of a whole pass against a plain loop of transformers over the same sequences,
one at a time.

The models here are those that broke what computes them faster: OLMo clamps its projections in
place, Gemma 3n scales one in place and has no gradient at an embedding of zeros, and layers of
Gemma 4 have heads of different widths. A pass has more positions than ``MIN_ROWS``, from which on
oneDNN computes the products, and rows of several lengths.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from realhf.api.config import LoraConfig, OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded import kernels
from realhf.backends.embedded.kernels import MIN_ROWS, OneDnnLinear
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.architectures import configs

VOCABULARY = 97
POSITIONS = 64
OPENING = 2
DEADLINE_S = 240.0
NAMES = ("gemma3n", "gemma4", "llama", "olmo, clipped")
slow = partial(pytest.param, marks=pytest.mark.slow)
ONE_PASS = MicroBatchSpec()
ONEDNN = {"oneDNN": True, "without oneDNN": False}


def model_of(name: str) -> Any:
    """The same weights every time, sharp enough to have favourites, and zeros for padding as in
    trained models."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        configs(VOCABULARY, POSITIONS, window=16)[name], dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
        model.get_input_embeddings().weight[0] = 0.0
    return model.eval()


def sequences(n: int) -> list[Tensor]:
    """Four of them have 32 tokens in common, which are computed once where that is possible, under
    a mask; others have nothing in common with them and are shorter or longer. No token is the one
    for padding."""
    draw = torch.Generator().manual_seed(1)
    stem = torch.randint(3, VOCABULARY, (32,), generator=draw)
    tails = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in (8, 3, 5, 12)]
    others = [torch.randint(3, VOCABULARY, (size,), generator=draw) for size in (12, 50, 7)]
    return [*(torch.cat([stem, tail]) for tail in tails), *others][:n]


def batch_of(rows: list[Tensor]) -> SequenceSample:
    tensors = {
        "packed_input_ids": torch.cat(rows),
        "loss_mask": torch.cat([torch.arange(len(row)) >= OPENING for row in rows]),
    }
    lengths = [[len(row)] for row in rows]
    return SequenceSample.from_tensors(
        [str(n) for n in range(len(rows))], tensors, dict.fromkeys(tensors, lengths)
    )


def nll(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
    logprobs, _ = outputs.logprobs()
    return -logprobs.sum() / 100, {}


def in_a_plain_loop(model: Any, rows: list[Tensor]) -> float:
    """Go forward and backward through each sequence by itself; return the loss."""
    total = 0.0
    for row in rows:
        logprobs = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        loss = -logprobs.gather(1, row[1:, None])[OPENING - 1 :].sum() / 100
        loss.backward()
        total += float(loss.detach())
    return total


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Each gradient is that of the plain loop, up to rounding of the largest number in it. These
    models are sharp: a plain loop in fp32 is 4e-4 off from one in fp64."""
    assert found.keys() == expected.keys() and expected
    for name, wanted in expected.items():
        largest = float(wanted.abs().max())
        off = float((found[name] - wanted).abs().max())
        assert off <= 3e-3 * largest + 1e-6, f"{name}: {off:.1e} off, of {largest:.1e}"


def gradients(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}


def adapters_in(model: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if ".lora_" in name}


def engine_of(name: str, lora: LoraConfig | None = None) -> TorchEngine:
    return TorchEngine(
        model_of(name), None, optimizer=OptimizerConfig(), total_train_steps=5, lora=lora
    )


@contextmanager
def onednn(on: bool) -> Iterator[None]:
    """Processors that MKL favours would not use oneDNN; here they do."""
    with pytest.MonkeyPatch.context() as patch, torch.backends.mkldnn.flags(enabled=on):
        patch.setattr(kernels, "prefers_mkl", lambda: False)
        yield


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("on", ONEDNN.values(), ids=ONEDNN)
@pytest.mark.parametrize("name", [slow(NAMES[0]), *NAMES[1:]])
def test_all_weights_get_the_gradients_of_a_plain_loop(name: str, on: bool) -> None:
    """A step of OLMo and Gemma 3n raised that a view is modified in place; one of Gemma 3n with
    rows under a mask had no gradient; Gemma 4 was not loaded."""
    rows = sequences(7)
    assert sum(map(len, rows)) > 4 * MIN_ROWS
    with onednn(on):
        engine = engine_of(name)
        plain = model_of(name)
        kinds = [isinstance(module, OneDnnLinear) for module in engine.model.modules()]
        assert any(kinds) is on
        result = engine.accumulate(batch_of(rows), nll, mb_spec=ONE_PASS)
    assert not result.skipped
    assert result.stats["loss"] == pytest.approx(in_a_plain_loop(plain, rows), rel=1e-5)
    compare(
        gradients(dict(engine.model.named_parameters())), gradients(dict(plain.named_parameters()))
    )


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("on", ONEDNN.values(), ids=ONEDNN)
@pytest.mark.parametrize("name", [*map(slow, NAMES[:2]), *NAMES[2:]])
def test_adapters_get_the_gradients_of_a_plain_loop(name: str, on: bool) -> None:
    """The plain loop has the adapters of peft itself, with the same values, none of them 0."""
    rows = sequences(7)
    options = LoraConfig(rank=4)
    draw = torch.Generator().manual_seed(2)
    with onednn(on):
        engine = engine_of(name, options)
        assert engine.adapters is not None
        own = adapters_in(engine.model)
        with torch.no_grad():
            for tensor in own.values():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draw))
        result = engine.accumulate(batch_of(rows), nll, mb_spec=ONE_PASS)
    chosen = engine.adapters._options
    theirs = peft.LoraConfig(
        r=chosen.r, lora_alpha=chosen.lora_alpha, target_modules=chosen.target_modules
    )
    plain = peft.get_peft_model(model_of(name), theirs)
    expected = adapters_in(plain.base_model.model)
    assert expected.keys() == own.keys()
    with torch.no_grad():
        for key, tensor in expected.items():
            tensor.copy_(own[key])
    assert not result.skipped
    assert result.stats["loss"] == pytest.approx(in_a_plain_loop(plain, rows), rel=1e-5)
    compare(gradients(own), gradients(expected))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 4])
def test_a_pass_of_few_rows_is_that_of_a_plain_loop(name: str, n: int) -> None:
    """One sequence below and above the least number of rows for oneDNN, and several without any
    padding."""
    for cut in (MIN_ROWS - 4, MIN_ROWS, 64):
        rows = [row[:cut] for row in sequences(n)]
        with onednn(True):
            engine = engine_of(name)
            plain = model_of(name)
            result = engine.accumulate(batch_of(rows), nll, mb_spec=ONE_PASS)
        assert result.stats["loss"] == pytest.approx(in_a_plain_loop(plain, rows), rel=1e-5)
        compare(
            gradients(dict(engine.model.named_parameters())),
            gradients(dict(plain.named_parameters())),
        )


@pytest.mark.slow
def test_a_pass_of_nothing_has_gradients_of_nothing() -> None:
    """A worker that has no passes left takes part in those of others with one token, which must not
    be padding."""
    for name in ("gemma3n", "llama"):
        engine = engine_of(name)
        engine._forward.run_zero_pass().backward()
        found = gradients(dict(engine.model.named_parameters()))
        assert found and all(float(grad.abs().max()) == 0.0 for grad in found.values())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_older_processors_compute_the_same(isa: str) -> None:
    """oneDNN chooses its kernels, and how it lays out what it returns, by the instructions of the
    processor."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", __file__]
    command += ["--run-nightly", "-k", "gradients_of_a_plain"]
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        command, env=limited, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"cpu,isa:Intel {'SSE4.1' if isa == 'SSE41' else isa}" in done.stdout
    assert "primitive,exec,cpu,inner_product" in done.stdout
