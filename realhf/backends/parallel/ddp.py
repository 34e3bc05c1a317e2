"""Trains copies of a model, one on each rank, whose gradients are added up: the backend ``ddp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realhf.api.experiment import ModelSpec
from realhf.backends.parallel.copies import check_copies
from realhf.backends.parallel.group_ranks import GroupRanks
from realhf.backends.parallel.joined import JoinedBackend, JoinedEngine
from realhf.backends.parallel.world import World
from realhf.backends.training.sharded_files import is_sharded
from realhf.backends.training.sharded_state import load_state
from realhf.backends.training.torch_engine import of_this_model


class DdpEngine(JoinedEngine):
    """Is a ``TorchEngine`` with equal copies on all ranks. A call outside a group call is computed by the own copy."""

    def __init__(self, model: Any, tokenizer: Any, *, ranks: GroupRanks, role: str, **options: Any) -> None:
        super().__init__(model, tokenizer, ranks=ranks, role=role, **options)
        with ranks.together(f"the weights of {role}"):
            self._check_layouts(self._forward)
            check_copies(model, ranks, role)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what any number of ranks wrote, and check that all copies are equal. Raises FileNotFoundError or
        ValueError naming the folder, or CopiesDiffer."""
        with self._group.together(f"loading {self._role}"):
            self._check_adapters(folder)
            if is_sharded(folder) and self._optimizer is not None:
                with of_this_model(folder):
                    self.version = load_state(folder, self.model, self._optimizer, group=self._group.group)
            else:
                super().load_checkpoint(folder)
            check_copies(self.model, self._group, self._role)


class DdpBackend(JoinedBackend):
    """Builds engines with a copy of the model on each worker."""

    def _joined(self, spec: ModelSpec, world: World, model: Any, tokenizer: Any, **options: Any) -> DdpEngine:
        ranks = GroupRanks(world, spec.workers, sharded=False, device=self._device)
        return DdpEngine(model, tokenizer, ranks=ranks, role=spec.role, **options)
