"""Memory that the calls of a sharded engine have in use on each rank, by the storages of tensors
that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from realhf.algorithms.sft import SFTInterface
from realhf.api.model import CallContext, Model
from realhf.api.parallel import Parallel
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.parallel.process_groups import TorchWorld
from realhf.backends.training.torch_backend import ValueModel
from tests.backends.parallel.training import engine_on

SHAPE: Mapping[str, Any] = {
    "vocab_size": 6000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 768, "max_position_embeddings": 512,
}  # fmt: skip
TOKENS = 32
"""Tokens of a sequence, and of a micro-batch."""
SPEC = MicroBatchSpec(1, TOKENS)
_ROWS = 4


class LiveBytes(TorchDispatchMode):
    """Mode that notes the bytes of all storages that its operations have met and that are alive.

    ``peak`` is their maximum since it was last set. A storage that FSDP has emptied has none. What
    gloo copies to sum it is left out, since NCCL has no such copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._copies: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come here
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((result, args)):
            if type(value) in (torch.Tensor, nn.Parameter) and value.device.type != "meta":
                storage = value.untyped_storage()
                key = storage._cdata
                if not any(_is_alive(table.get(key)) for table in (self._storages, self._copies)):
                    # The copy is made out of sight, and met when its parts are taken.
                    is_copy = func is torch.ops.aten.split.Tensor
                    (self._copies if is_copy else self._storages)[key] = weakref.ref(storage)
        self.note()
        return result

    def note(self) -> None:
        """Compare what is alive now with the peak."""
        alive = [storage for each in self._storages.values() if (storage := each()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))


def _is_alive(reference: weakref.ref[Any] | None) -> bool:
    return reference is not None and reference() is not None


def rows() -> SequenceSample:
    """A batch of two micro-batches for each of two ranks."""
    g = torch.Generator().manual_seed(0)
    lengths = [[TOKENS] for _ in range(_ROWS)]
    tensors = {
        "packed_input_ids": torch.randint(0, SHAPE["vocab_size"], (_ROWS * TOKENS,), generator=g),
        "prompt_mask": torch.arange(_ROWS * TOKENS) % TOKENS < TOKENS // 2,
    }
    return SequenceSample.from_tensors(
        [str(row) for row in range(_ROWS)], tensors, dict.fromkeys(tensors, lengths)
    )


def peaks_on_ranks(
    world: TorchWorld, rank: int, size: int, dtype: torch.dtype, tied: bool
) -> dict[str, int]:
    """Bytes in use at the peak of a steady train step of two micro-batches, of scoring, of
    gathering weights on rank 0 and of scoring once they were published, and between calls."""
    live = LiveBytes()
    found: dict[str, int] = {}

    def measure(name: str) -> None:
        found[name] = live.peak
        live.peak = 0

    with live:
        torch.manual_seed(0)
        config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        engine = engine_on(world, size, Parallel(fsdp=size), model)
        del model
        sample = rows()
        for step in range(2):
            live.peak = 0
            with engine.ranks.together(f"step {step}"):
                context = CallContext(step, 1, SPEC, Path())
                SFTInterface().train_step(Model("actor", engine, None), sample, context)
            engine.version += 1
        measure("step")
        live.note()
        measure("between")
        with engine.ranks.together("scores"):
            engine.logprobs(sample, temperature=1.0, mb_spec=SPEC)
        measure("scoring")
        with engine.ranks.together("whole weights"):
            engine.gather(here=rank == 0)
        measure("whole weights")
        if rank == 0:
            engine.weights()
        engine.release_generation()
        live.peak = 0
        with engine.ranks.together("scores again"):
            engine.logprobs(sample, temperature=1.0, mb_spec=SPEC)
        measure("scoring after publication")
    return found


def value_peaks_on_ranks(
    world: TorchWorld, rank: int, size: int, dtype: torch.dtype, tied: bool
) -> int:
    """Bytes by which scoring by a sharded value model raises what is in use."""
    live = LiveBytes()
    with live:
        torch.manual_seed(0)
        config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
        decoder = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        engine = engine_on(world, size, Parallel(fsdp=size), ValueModel(decoder).eval())
        del decoder
        live.peak = 0
        live.note()
        before = live.peak
        with engine.ranks.together("scores"):
            engine.forward(rows(), lambda outputs, _: outputs.values(), mb_spec=SPEC)
    return live.peak - before
