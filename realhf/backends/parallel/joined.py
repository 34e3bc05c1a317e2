"""Holds what the engines and backends of a role on several workers have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realhf.api.experiment import ModelSpec
from realhf.backends.parallel.group_ranks import GroupRanks
from realhf.backends.parallel.world import World
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.sharded_state import save_state
from realhf.backends.training.torch_backend import TorchBackend
from realhf.backends.training.torch_engine import TorchEngine


class JoinedEngine(TorchEngine):
    """Is the ``TorchEngine`` of one of several ranks, which write a checkpoint together."""

    def __init__(self, model: Any, tokenizer: Any, *, ranks: GroupRanks, role: str, **options: Any) -> None:
        self._group, self._role = ranks, role
        super().__init__(model, tokenizer, ranks=ranks, role=role, **options)

    def _check_layouts(self, forward: PackedForward) -> None:
        """Raise RuntimeError unless all ranks lay rows out alike: of the rows that each makes of a batch it computes
        its share, and of different rows some sequences would be nobody's, or two ranks'. To be called inside
        ``together``."""
        found = {"packs": forward.packs, "shares": forward.shares, "row_tokens": forward.row_tokens}
        own = {name: float(value) for name, value in found.items()}
        for rank, other in enumerate(self._group.gather(own)):
            if other != own:
                raise RuntimeError(
                    f"{self._role}: rank {self._group.number} and rank {rank} lay rows out differently ({own} and "
                    f"{other}), so they cannot compute together; their logs say why prefixes are not shared"
                )

    def save_checkpoint(self, folder: Path) -> list[Path]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write the state into ``folder``, which all ranks share; return the files that this rank wrote. Adapters are
        few, and equal on all ranks: the first one writes what one worker would."""
        assert self._optimizer is not None, "a role that trains on several workers has an optimizer"
        group = self._group
        with group.together(f"saving {self._role}"):
            if self.adapters is not None:
                if group.number == 0:
                    super().save_checkpoint(folder)
                return sorted(path for path in folder.rglob("*") if path.is_file()) if group.number == 0 else []
            return save_state(folder, self.model, self._optimizer, self._version, group=group.group, rank=group.number)


class JoinedBackend(TorchBackend):
    """Builds engines of several workers, which met in ``world``. Without one, and for a role on one worker, it builds
    what the backend ``torch`` does."""

    def __init__(self, device: str = "auto", world: World | None = None) -> None:
        super().__init__(device)
        self._world = world

    def _engine(self, spec: ModelSpec, model: Any, tokenizer: Any, **options: Any) -> TorchEngine:
        if spec.parallel.size == 1:
            return super()._engine(spec, model, tokenizer, **options)
        if self._world is None:
            raise RuntimeError(f"{spec.role}: {spec.parallel.size} workers train together, but they have not met")
        return self._joined(spec, self._world, model, tokenizer, **options)

    def _joined(self, spec: ModelSpec, world: World, model: Any, tokenizer: Any, **options: Any) -> JoinedEngine:
        raise NotImplementedError
