"""Trains one model that is cut over ranks: the backend ``fsdp2``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from realhf.api.experiment import ModelSpec
from realhf.api.model import LossFn, PostFn, TrainResult
from realhf.api.parallel import HeldInParts
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.embedded.generation import EmbeddedGenerator
from realhf.backends.parallel.block_loading import Filling, build_without_memory
from realhf.backends.parallel.cut_model import Whole, cut, empty_like, gather_into
from realhf.backends.parallel.group_ranks import GroupRanks
from realhf.backends.parallel.joined import JoinedBackend, JoinedEngine
from realhf.backends.parallel.meshes import mesh_of
from realhf.backends.parallel.whole_state import load_whole_state
from realhf.backends.parallel.world import World
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.sharded_files import is_sharded
from realhf.backends.training.sharded_state import load_state
from realhf.backends.training.torch_engine import of_this_model
from realhf.backends.training.value_head import load_value_model


class FsdpEngine(JoinedEngine):
    """Is a ``TorchEngine`` that holds a part of the weights, and computes in group calls only. ``filling`` gives
    parameters of ``model`` that have no memory theirs, part by part, before each is cut. ``gather`` brings whole
    weights together; generation, export and publication use those, until the next train step."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        ranks: GroupRanks,
        mesh: DeviceMesh,
        role: str,
        filling: Filling | None = None,
        **options: Any,
    ) -> None:
        self._mesh, self._filling = mesh, filling
        self._whole: Whole | None = None
        self._copy: Any = None
        with ranks.together(f"the weights of {role}"):
            super().__init__(model, tokenizer, ranks=ranks, role=role, **options)
        self._generator = None  # It would generate with parts of the weights.

    def _tried_out(self, adapters: Callable[[], Any]) -> PackedForward:
        filling, mesh = self._filling, self._mesh
        if filling is None:
            forward = super()._tried_out(adapters)
            self._check_layouts(forward)
            self._whole = cut(self.model, mesh)
            return forward
        whole = self._whole = cut(self.model, mesh, filling.fill)

        def run() -> PackedForward:
            filling.prove(self.model)
            return super(FsdpEngine, self)._tried_out(adapters)

        try:
            forward = whole(run)
        finally:
            self._cut_again()
        self._check_layouts(forward)
        return forward

    def _within(self, empty: bool, run: Callable[[], Tensor]) -> Tensor:
        assert self._whole is not None
        return run() if empty else self._whole(run)

    def _without_gradient(self) -> contextlib.AbstractContextManager[Any]:
        # What is gathered in inference mode could not be used by a train step later.
        return torch.no_grad()

    def train_batch(
        self, sample: SequenceSample, loss_fn: LossFn, *, mb_spec: MicroBatchSpec, normaliser: float = 1.0
    ) -> TrainResult:
        """See ``Engine.train_batch``. Whole weights are given up: they are about to change, and their memory is
        wanted."""
        self._forget()
        result = super().train_batch(sample, loss_fn, mb_spec=mb_spec, normaliser=normaliser)
        self._cut_again()
        return result

    def forward(self, sample: SequenceSample, post_fn: PostFn, *, mb_spec: MicroBatchSpec) -> Tensor:
        """See ``Engine.forward``."""
        found = super().forward(sample, post_fn, mb_spec=mb_spec)
        self._cut_again()
        return found

    def _cut_again(self) -> None:
        """Let go of the others' parts, which only a backward pass does by itself. After passes without one the
        parameters outside of the blocks stay whole: that takes memory, and they are not those that the optimizer has
        and checkpoints are made of."""
        cast(FSDPModule, self._whole).reshard()

    # ---- whole weights

    def gather(self, here: bool = True) -> None:
        """Bring the whole weights together, on the ranks that want them ``here``, until the next train step. Every rank
        calls this in a group call."""
        if here:
            self._forget()  # Not two of them at once.
        copy = empty_like(self.model) if here else None
        with torch.no_grad():
            gather_into(copy, self.model)
        if copy is not None:
            self._copy = copy
            self._generator = self._made_generator(copy)
            self._generator.threads = self._threads

    def _forget(self) -> None:
        self._copy = self._generator = None

    def _gathered(self) -> Any:
        if self._copy is None:
            raise HeldInParts(f"{self._role}: its whole weights were not brought together on this worker")
        return self._copy

    def generator(self) -> EmbeddedGenerator:
        """Return the generation engine over the whole weights. Raises RuntimeError where they were not gathered."""
        self._gathered()
        return super().generator()

    def weights(self) -> dict[str, Tensor]:
        """See ``Engine.weights``. Raises RuntimeError where they were not gathered."""
        return self._of_copy(super().weights)

    def export_hf(self, folder: Path) -> None:
        """See ``Engine.export_hf``. Raises RuntimeError where the weights were not gathered."""
        self._of_copy(lambda: super(FsdpEngine, self).export_hf(folder))

    def _of_copy(self, run: Callable[[], Any]) -> Any:
        """Run what is about a whole model."""
        cut_model, self.model = self.model, self._gathered()
        try:
            return run()
        finally:
            self.model = cut_model

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """See ``Engine.state``: the parts of this rank."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        optimizer = self._optimizer.state_dict() if self._optimizer is not None else {}
        return {"version": self._version, "optimizer": optimizer, "weights": weights}

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what any number of ranks wrote, or one worker with the backend ``torch``. Raises FileNotFoundError or
        ValueError naming the folder."""
        assert self._optimizer is not None, "a role that trains on several workers has an optimizer"
        self._forget()
        with self._group.together(f"loading {self._role}"):
            self._check_adapters(folder)
            with of_this_model(folder):
                if is_sharded(folder):
                    self.version = load_state(folder, self.model, self._optimizer, group=self._group.group)
                else:
                    self.version = load_whole_state(folder, self.model, self._optimizer)


class FsdpBackend(JoinedBackend):
    """Builds engines with a part of the model on each worker."""

    _filling: Filling | None = None

    def _model(self, spec: ModelSpec, dtype: torch.dtype) -> Any:
        """Build the model without memory where its folder lets it be read part by part."""
        found = None
        if spec.parallel.size > 1:
            found = build_without_memory(spec.path, spec.role, dtype, with_head=spec.head == "lm")
        if found is None:
            return super()._model(spec, dtype)
        model, weights = found
        self._filling = Filling(weights, self._device, dtype, f"{spec.role}.path={spec.path}")
        return load_value_model(model, spec.path, spec.role) if spec.head == "value" else model

    def _joined(self, spec: ModelSpec, world: World, model: Any, tokenizer: Any, **options: Any) -> FsdpEngine:
        if spec.lora is not None:
            raise ValueError(f"{spec.role}.lora.rank={spec.lora.rank}: the backend fsdp2 trains all weights")
        if spec.compile:
            raise ValueError(f"{spec.role}.compile=true: the backend fsdp2 does not compile blocks")
        ranks = GroupRanks(world, spec.workers, sharded=True, device=self._device)
        mesh = mesh_of(world, spec.workers, spec.parallel, ranks, self._device.type)
        return FsdpEngine(model, tokenizer, ranks=ranks, mesh=mesh, role=spec.role, filling=self._filling, **options)
