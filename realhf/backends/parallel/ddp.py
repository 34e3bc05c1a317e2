"""Trains copies of a model, one on each rank, whose gradients are added up: the backend ``ddp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from realhf.api.experiment import ModelSpec
from realhf.backends.parallel.copies import check_copies
from realhf.backends.parallel.group_ranks import GroupRanks
from realhf.backends.parallel.world import World
from realhf.backends.training.sharded_files import is_sharded
from realhf.backends.training.sharded_state import load_state, save_state
from realhf.backends.training.torch_backend import TorchBackend
from realhf.backends.training.torch_engine import TorchEngine


class DdpEngine(TorchEngine):
    """Is a ``TorchEngine`` with equal copies on all ranks. A call outside a group call is computed by the own copy."""

    def __init__(self, model: Any, tokenizer: Any, *, ranks: GroupRanks, role: str, **options: Any) -> None:
        super().__init__(model, tokenizer, ranks=ranks, **options)
        self._group, self._role = ranks, role
        with ranks.together(f"the weights of {role}"):
            check_copies(model, ranks, role)

    def save_checkpoint(self, folder: Path) -> list[Path]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write the state into ``folder``, which all ranks share; return the files that this rank wrote."""
        assert self._optimizer is not None, "a role that trains on several workers has an optimizer"
        group = self._group
        with group.together(f"saving {self._role}"):
            return save_state(folder, self.model, self._optimizer, self._version, group=group.group, rank=group.number)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what any number of ranks wrote, and check that all copies are equal. Raises FileNotFoundError or
        ValueError naming the folder, or CopiesDiffer."""
        with self._group.together(f"loading {self._role}"):
            if is_sharded(folder) and self._optimizer is not None:
                self.version = load_state(folder, self.model, self._optimizer, group=self._group.group)
            else:
                super().load_checkpoint(folder)
            check_copies(self.model, self._group, self._role)


class DdpBackend(TorchBackend):
    """Builds engines with a copy of the model on each of several workers, which met in ``world``. Without one, and for
    a role on one worker, it builds what the backend ``torch`` does."""

    def __init__(self, device: str = "auto", world: World | None = None) -> None:
        super().__init__(device)
        self._world = world

    def _engine(self, spec: ModelSpec, model: Any, tokenizer: Any, **options: Any) -> TorchEngine:
        if spec.parallel.size == 1:
            return super()._engine(spec, model, tokenizer, **options)
        if self._world is None:
            raise RuntimeError(f"{spec.role}: {spec.parallel.size} workers train together, but they have not met")
        ranks = GroupRanks(self._world, spec.workers, sharded=False, device=torch.device(self._device))
        return DdpEngine(model, tokenizer, ranks=ranks, role=spec.role, **options)
