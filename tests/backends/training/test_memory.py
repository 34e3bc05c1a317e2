"""What a pass leaves behind, and what is said when there is not enough memory for one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from realhf.api.config import OptimizerConfig
from realhf.api.model import ForwardOutputs
from realhf.api.sample import MicroBatchSpec
from realhf.backends.embedded import memory
from realhf.backends.embedded.memory import Heap, named_shortage
from realhf.backends.training.torch_engine import TorchEngine

GROUPS = [[20, 5], [11], [30, 8, 8]]
CPU_SHORTAGE = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), RuntimeError(CPU_SHORTAGE), MemoryError()], ids=repr
)
def test_out_of_memory_names_what_where_and_which_option(tiny_model: Any, ragged_sample: Any, error: Exception) -> None:
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)
    sample, spec = ragged_sample(GROUPS), MicroBatchSpec(1, 64)

    def starved(outputs: ForwardOutputs, part: Any) -> Any:
        raise error

    for call in (engine.train_batch, engine.forward):
        with pytest.raises(RuntimeError, match=r"micro-batch of \d+ positions in \d rows: lower mb_spec") as caught:
            call(sample, starved, mb_spec=spec)
        assert "(it is 64)" in str(caught.value) and "gradient_checkpointing" in str(caught.value)
        assert "\n" not in str(caught.value)
    result = engine.train_batch(sample, lambda outputs, _: (outputs.logprobs()[0].sum(), {}), mb_spec=spec)
    assert not result.skipped, "the engine goes on"


def test_an_update_without_memory_says_what_to_set(tiny_model: Any, ragged_sample: Any) -> None:
    """The first one makes the moments; what it said used to be torch's line alone."""
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(), total_train_steps=1)
    assert engine._optimizer is not None
    engine._optimizer._adamw.step = lambda: torch.empty(1 << 46)  # type: ignore[method-assign, return-value]
    mean = lambda outputs, _: (outputs.logprobs()[0].mean(), {})
    with pytest.raises(RuntimeError, match=r"the update of actor, whose moments take .* GiB: set actor.lora") as said:
        engine.train_batch(ragged_sample(GROUPS), mean, mb_spec=MicroBatchSpec())
    assert "actor.backend=fsdp2" in str(said.value) and "offload" not in str(said.value), "which is for a GPU"


@pytest.mark.parametrize("said", ["CUDA error: out of memory\nmore", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"])
def test_what_a_gpu_says_outside_of_the_pool_is_a_shortage(said: str) -> None:
    """The libraries of a GPU allocate by themselves, and their errors are of no type of their own."""
    with pytest.raises(RuntimeError, match=r"lower mb_spec.max_tokens_per_mb .*\(CUDA error"), named_shortage(1, 1, 9):
        raise RuntimeError(said)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), named_shortage(1, 1, None):
        raise RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="which means 4096"), named_shortage(1, 1, None):
        raise MemoryError


def test_freed_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed blocks below one that stays in use remain in the heap until they are given back."""
    heap, library = Heap(), ctypes.CDLL(None)
    if heap._use is None or heap._trim is None:
        pytest.skip("this C library does not tell what its heap holds")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(100_000) for _ in range(200)]
    pin = library.malloc(100_000)
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
        library.free(block)
    before = heap.free_bytes()
    assert before >= 15_000_000
    trimmed: list[int] = []
    monkeypatch.setattr(heap, "_trim", trimmed.append)
    heap.give_back()
    assert bool(trimmed) == (before > memory.FREE_HEAP_BYTES)
    monkeypatch.setattr(memory, "FREE_HEAP_BYTES", 1 << 20)
    heap.give_back()
    assert trimmed and not any(trimmed)
    library.free(pin)


def test_without_such_a_library_nothing_happens() -> None:
    heap = Heap()
    heap._use = None
    assert heap.free_bytes() == 0
    heap.give_back()
