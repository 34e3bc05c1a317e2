"""Loads models that are cut over ranks, part by part and whole, and tells what a rank held
meanwhile."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from realhf.algorithms.sft import SFTInterface
from realhf.api.config import OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.api.model import CallContext, Model
from realhf.api.parallel import Parallel
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.parallel import fsdp
from realhf.backends.parallel.fsdp import FsdpBackend
from realhf.backends.parallel.process_groups import TorchWorld, list_groups
from realhf.base.tensor_digest import digest_tensors

LOADED_WHOLE = "is loaded whole on each worker"


class Watched(FsdpBackend):
    """Notes the most bytes of parameters that are real and not cut, over all moments before a part
    is cut."""

    most = 0

    def _load_model(self, spec: ModelSpec, dtype: torch.dtype) -> Any:
        model = super()._load_model(spec, dtype)
        if (unread := self._folder_weights) is not None:
            read = unread.fill

            def fill(module: Any) -> None:
                read(module)
                own = {
                    id(p): p
                    for p in model.parameters()
                    if not p.is_meta and not isinstance(p, DTensor)
                }
                self.most = max(self.most, sum(p.numel() * p.element_size() for p in own.values()))

            unread.fill = fill  # type: ignore[method-assign]
        return model


def load_all(
    world: TorchWorld, rank: int, size: int, folders: Sequence[tuple[str, str]], out: str
) -> list[dict[str, Any]]:
    """Load each folder (with its head) twice, part by part and whole; train a step; gather."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("realhf").addHandler(handler)
    found = []
    for number, (path, head) in enumerate(folders):
        told.clear()
        parts = _outcome(world, rank, size, path, head, Path(out) / f"{number}-parts")
        parts["said"] = [line for line in told if LOADED_WHOLE in line]
        build = fsdp.build_without_memory
        fsdp.build_without_memory = lambda *_, **__: None  # type: ignore[assignment]
        try:
            whole = _outcome(world, rank, size, path, head, Path(out) / f"{number}-whole")
        finally:
            fsdp.build_without_memory = build
        found.append({"parts": parts, "whole": whole})
    return found


def _outcome(
    world: TorchWorld, rank: int, size: int, path: str, head: str, out: Path
) -> dict[str, Any]:
    parallel = Parallel(fsdp=size)
    workers = tuple(range(size))
    world.create_groups(list_groups(workers, parallel, cut=True))
    spec = ModelSpec(
        "actor", path, workers, trainable=True, backend="fsdp2", head=head, optimizer=OptimizerConfig(lr=1e-2),
        parallel=parallel,
    )  # fmt: skip
    backend = Watched("cpu", world)
    engine: Any = backend.build(spec, seed=1, total_train_steps=5)
    tied = (
        head == "lm"
        and engine.model.get_output_embeddings().weight
        is engine.model.get_input_embeddings().weight
    )
    meta = [
        name
        for name, p in [*engine.model.named_parameters(), *engine.model.named_buffers()]
        if p.is_meta
    ]
    with engine.ranks.together("the whole weights"):
        engine.gather(here=True)
    before = digest_tensors(engine.weights())
    if rank == 0:
        engine.export_hf(out)
    with engine.ranks.together("a step"):
        loss = _value_step(engine) if head == "value" else _step(engine)
        engine.gather(here=True)
    after = digest_tensors(engine.weights())
    config = json.loads((out / "config.json").read_text()) if rank == 0 else None
    files = sorted(file.name for file in out.iterdir()) if rank == 0 else None
    return {
        "before": before, "after": after, "loss": loss, "tied": tied, "meta": meta, "most": backend.most,
        "config": config, "files": files,
    }  # fmt: skip


def _sample() -> SequenceSample:
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(2))
    tensors = {"packed_input_ids": ids, "loss_mask": torch.ones(40, dtype=torch.bool)}
    return SequenceSample.from_tensors(["a", "b"], tensors, {key: [[15], [25]] for key in tensors})


def _step(engine: Any) -> float:
    context = CallContext(0, 0, MicroBatchSpec(), Path())
    return SFTInterface().train_step(Model("actor", engine, None), _sample(), context)["loss"]


def _value_step(engine: Any) -> float:
    result = engine.train_batch(
        _sample(),
        lambda outputs, _: ((outputs.values() - 1).square().mean(), {}),
        mb_spec=MicroBatchSpec(),
    )
    return result.stats["loss"]
