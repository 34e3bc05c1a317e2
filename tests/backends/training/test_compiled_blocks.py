"""Compiled blocks train as others do, and a missing compiler is named before anything trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.api.config import BuiltinModelConfig, OptimizerConfig
from realhf.api.sample import MicroBatchSpec
from realhf.backends.embedded import kernels
from realhf.backends.embedded.kernels import OneDnnLinear
from realhf.backends.training import torch_engine
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.parallel import training


def engine_of(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(
        model, None, optimizer=OptimizerConfig(lr=1e-2), total_train_steps=10, **options
    )


def wide_model() -> Any:
    """The built-in policy with two of its layers: as wide, and with batches as long, as those of a
    run."""
    torch.manual_seed(0)
    given = BuiltinModelConfig()
    options = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    shape = Qwen3Config(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        num_attention_heads=given.num_heads,
        num_key_value_heads=given.num_heads,
        head_dim=given.hidden_size // given.num_heads,
        intermediate_size=given.intermediate_size,
        **options,
    )
    return AutoModelForCausalLM.from_config(shape).eval()


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are compiled (counted, so that a fall back to the plain form would show) and give
    the same losses, scores and tokens; outside of training and scoring they are plain. A pass of 32
    rows and more used to fail where layers compute with oneDNN: on processors that MKL does not
    favour."""
    torch.set_num_threads(1)
    monkeypatch.setattr(kernels, "prefers_mkl", lambda: False)
    monkeypatch.setattr(training, "SPEC", MicroBatchSpec(1, 4096))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain, compiled = (engine_of(wide_model(), compile=chosen) for chosen in (False, True))
    assert any(isinstance(module, OneDnnLinear) for module in plain.model.modules())
    expected = training.steps(plain, "sft", range(1), together=False)
    found = training.steps(compiled, "sft", range(1), together=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert training.scores(compiled) == pytest.approx(training.scores(plain), abs=1e-4)
    assert training.tokens(compiled) == training.tokens(plain)
    assert all(block._compiled_call_impl is None for block in compiled.model.model.layers)


@pytest.mark.slow
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr(config.cpp, "cxx", ("/nowhere/g++",))
    with pytest.raises(
        ValueError,
        match=r"actor\.compile=true: torch\.compile needs a C\+\+ compiler .*; install one",
    ):
        engine_of(training.tiny_model(), compile=True)
    cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.slow
def test_blocks_that_are_compiled_have_no_layers_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler ends with an assertion over them, in the first train step."""
    monkeypatch.setattr(torch_engine, "_missing_compiler", lambda device: "")
    monkeypatch.setattr(kernels, "prefers_mkl", lambda: False)
    plain, compiled = (
        engine_of(training.tiny_model(), compile=chosen).model for chosen in (False, True)
    )
    assert any(isinstance(module, OneDnnLinear) for module in plain.modules())
    assert not any(isinstance(module, OneDnnLinear) for module in compiled.modules())


@pytest.mark.slow
def test_blocks_are_not_compiled_anew_for_every_tree_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention by pieces of rows is told in lists, whose sizes a compiled form would be bound
    to."""
    monkeypatch.setattr(torch_engine, "_missing_compiler", lambda device: "")
    plain, compiled = (
        engine_of(training.tiny_model(), compile=chosen)._forward for chosen in (False, True)
    )
    assert plain.packs and not compiled.packs and compiled.shares


@pytest.mark.slow
def test_a_failure_to_compile_names_the_option_and_other_errors_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import InternalTorchDynamoError

    monkeypatch.setattr(torch_engine, "_missing_compiler", lambda device: "")
    blocks = torch_engine.CompiledBlocks(training.tiny_model(), "critic")
    said = r"critic\.compile=true: the blocks do not compile \(odd\); set false"
    with pytest.raises(RuntimeError, match=said), blocks.use():
        raise InternalTorchDynamoError("odd")
    with pytest.raises(ZeroDivisionError), blocks.use():
        raise ZeroDivisionError
    assert all(block._compiled_call_impl is None for block in blocks._blocks)
