"""Arranges the ranks of a role for a model that is cut over them: one row for each copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from realhf.api.parallel import Parallel
from realhf.backends.parallel.group_ranks import GroupRanks
from realhf.backends.parallel.world import World


def groups_of(workers: Sequence[int], parallel: Parallel, *, cut: bool) -> list[list[int]]:
    """Return the groups of workers that a role founds, in their order: all of them, and for a model that is ``cut`` and
    copied the workers of each copy, then those that hold the same part."""
    ordered = sorted(workers)
    if not cut or parallel.dp == 1:
        return [ordered]
    rows = [ordered[start : start + parallel.fsdp] for start in range(0, len(ordered), parallel.fsdp)]
    return [ordered, *rows, *(ordered[part :: parallel.fsdp] for part in range(parallel.fsdp))]


def mesh_of(
    world: World, workers: Sequence[int], parallel: Parallel, ranks: GroupRanks, device_type: str
) -> DeviceMesh:
    """Return the mesh of a role, (fsdp,) or (dp, fsdp). All its workers call this, when the world has
    founded its ``groups_of``. Raises CollectiveBroken."""
    if parallel.dp == 1:
        return DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("fsdp",))
    ordered = sorted(workers)
    copy, part = divmod(ranks.number, parallel.fsdp)
    row = world.group(ordered[copy * parallel.fsdp : (copy + 1) * parallel.fsdp])
    column = world.group(ordered[part :: parallel.fsdp])
    places = torch.tensor(world.places(workers)).reshape(parallel.dp, parallel.fsdp)
    return DeviceMesh.from_group([column, row], device_type, mesh=places, mesh_dim_names=("dp", "fsdp"))
