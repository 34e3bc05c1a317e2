"""Backend ``ddp``, with a copy of the model on each rank, and the code that it shares with
``fsdp2``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from realhf.api.experiment import ModelSpec
from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld
from realhf.backends.training.checkpoint import save_state
from realhf.backends.training.packed_forward import PackedForward
from realhf.backends.training.torch_backend import TorchBackend
from realhf.backends.training.torch_engine import TorchEngine
from realhf.base.tensor_digest import digest_tensors


class GroupEngine(TorchEngine):
    """``TorchEngine`` of one rank of several that write checkpoints together."""

    def __init__(
        self, model: Any, tokenizer: Any, *, ranks: GroupRanks, role: str, **options: Any
    ) -> None:
        self._group = ranks
        self._role = role
        super().__init__(model, tokenizer, ranks=ranks, role=role, **options)

    def _check_layouts(self, forward: PackedForward) -> None:
        """Raise RuntimeError unless all ranks use the same row layout. Each rank lays out the whole
        batch and computes its share of the rows, so with different layouts some sequences would be
        computed by no rank or by two. Call this inside ``together``."""
        own_layout = {
            "packs": forward.packs,
            "shares": forward.shares,
            "row_tokens": forward.row_tokens,
        }
        for rank, other in enumerate(self._group.gather(own_layout)):
            if other != own_layout:
                raise RuntimeError(
                    f"{self._role}: rank {self._group.number} and rank {rank} lay rows out "
                    f"differently ({own_layout} and "
                    f"{other}), so they cannot compute together; their logs say why prefixes are "
                    f"not shared"
                )

    def save_checkpoint(self, folder: Path) -> list[Path]:
        """Write the state into ``folder``, which all ranks share; return the files that this rank
        wrote. Adapters are small and equal on all ranks, so only the first rank writes them, in the
        same format as a single worker."""
        group = self._group
        with group.together(f"saving {self._role}"):
            if self.adapters is not None:
                if group.number == 0:
                    super().save_checkpoint(folder)
                return (
                    sorted(path for path in folder.rglob("*") if path.is_file())
                    if group.number == 0
                    else []
                )
            return save_state(
                folder,
                self.model,
                self._optimizer,
                self._version,
                group=group.group,
                rank=group.number,
            )

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint, whatever the number of ranks that wrote it. Raises FileNotFoundError
        or ValueError naming the folder."""
        with self._group.together(f"loading {self._role}"):
            self._load(folder, self._group.group)


class GroupBackend(TorchBackend):
    """Builder of engines for the workers in ``world``. Without a world, or for a role with a single
    worker, it builds the same engine as the backend ``torch``."""

    def __init__(self, device: str = "auto", world: TorchWorld | None = None) -> None:
        super().__init__(device)
        self._world = world

    def _build_engine(
        self, spec: ModelSpec, model: Any, tokenizer: Any, **options: Any
    ) -> TorchEngine:
        if spec.parallel.size == 1:
            return super()._build_engine(spec, model, tokenizer, **options)
        if self._world is None:
            raise RuntimeError(
                f"{spec.role}: {spec.parallel.size} workers train together, but this one has "
                "joined no process group"
            )
        return self._build_group_engine(spec, self._world, model, tokenizer, **options)

    def _build_group_engine(
        self, spec: ModelSpec, world: TorchWorld, model: Any, tokenizer: Any, **options: Any
    ) -> GroupEngine:
        raise NotImplementedError


class CopiesDiffer(RuntimeError):
    """Error: the weights on two ranks differ."""


def check_copies(model: nn.Module, ranks: GroupRanks, role: str) -> None:
    """Raise CopiesDiffer, naming a tensor and a rank, unless all ranks have bitwise equal weights.
    Call this inside ``together``."""
    own_digests = digest_tensors(model.state_dict())
    for rank, other in enumerate(ranks.gather(own_digests)):
        if other != own_digests:
            name = next(
                (name for name in own_digests if other.get(name) != own_digests[name]),
                "the number of tensors",
            )
            raise CopiesDiffer(f"{role}: {name} differs between rank {ranks.rank} and rank {rank}")


class DdpEngine(GroupEngine):
    """``TorchEngine`` with an equal copy of the model on every rank. A call outside ``together``
    uses only this rank's copy."""

    def __init__(
        self, model: Any, tokenizer: Any, *, ranks: GroupRanks, role: str, **options: Any
    ) -> None:
        super().__init__(model, tokenizer, ranks=ranks, role=role, **options)
        with ranks.together(f"the weights of {role}"):
            self._check_layouts(self._forward)
            check_copies(model, ranks, role)

    def _load(self, folder: Path, group: Any = None) -> None:
        super()._load(folder, group)
        check_copies(self.model, self._group, self._role)


class DdpBackend(GroupBackend):
    """Builder of engines with a copy of the model on each worker."""

    def _build_group_engine(
        self, spec: ModelSpec, world: TorchWorld, model: Any, tokenizer: Any, **options: Any
    ) -> DdpEngine:
        ranks = GroupRanks(world, spec.workers, sharded=False, device=self._device)
        return DdpEngine(model, tokenizer, ranks=ranks, role=spec.role, **options)
