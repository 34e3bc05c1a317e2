"""What ranks do in tests, each in a process of its own."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from realhf.backends.parallel.process_groups import GroupRanks, TorchWorld
from realhf.backends.training import checkpoint

CPU = torch.device("cpu")


def ranks_of(world: TorchWorld, size: int, sharded: bool = False) -> GroupRanks:
    world.create_groups([range(size)])
    return GroupRanks(world, range(size), sharded=sharded, device=CPU)


def overlapping(world: TorchWorld, rank: int, size: int) -> dict[str, list[float]]:
    """Sum in groups that share members without being equal, one after the other."""
    groups = ([0, 1], [1, 2], [0, 1, 2], [0, 2], [0, 1])
    found = {}
    world.create_groups(groups)
    for number, workers in enumerate(groups):
        if rank in workers:
            ranks = GroupRanks(world, workers, sharded=False, device=CPU)
            total = torch.tensor([10.0**rank])
            with ranks.together(f"group {number}"):
                ranks.sum_(total)
            found[f"{number}"] = total.tolist()
    return found


def one_never_loads(world: TorchWorld, rank: int, size: int) -> None:
    """The last worker founds the group with the others, and does not come for it."""
    world.create_groups([range(size)])
    if rank < size - 1:
        world._join_s = 0.2
        world.group(range(size))


def one_sees_a_gpu(world: TorchWorld, rank: int, size: int) -> None:
    """Meet once more, the last one as on a host with a GPU."""
    world._store = PrefixStore("again", world._store)
    world.cuda = rank == size - 1
    world._compare_devices(timedelta(seconds=30))


def sums(world: TorchWorld, rank: int, size: int) -> dict[str, Any]:
    ranks = ranks_of(world, size)
    alone = (ranks.rank, ranks.size, ranks.select_rows([1, 1, 1]))
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    parameters.append(nn.Parameter(torch.ones(1)))  # has a gradient nowhere
    if rank == 0:
        parameters[0].grad = torch.tensor([1.0, 2.0, 3.0])
    parameters[1].grad = torch.full((2,), 1.0 + rank, dtype=torch.bfloat16)
    with ranks.together("the test"):
        total = torch.arange(4.0) * (rank + 1)
        ranks.sum_(total)
        ranks.sum_gradients(parameters)
        found = {
            "rank": ranks.rank,
            "size": ranks.size,
            "sum": total.tolist(),
            "gradients": [None if p.grad is None else p.grad.tolist() for p in parameters],
            "gathered": ranks.gather(
                {f"of_{rank}": float("nan") if rank == 1 else 0.1 + rank, "all": 1.0}
            ),
            "own": [
                ranks.select_rows(costs)
                for costs in ([5, 5, 5, 1, 2, 3, 9], [7], [0, 0, 0, 0], [1, 0, 1, 0, 1])
            ],
        }
    return {**found, "alone": alone, "after": ranks.size}


def a_write_fails(world: TorchWorld, rank: int, size: int, folder: Path) -> None:
    """The last rank has no room for its shards."""
    ranks = ranks_of(world, size)
    if rank == size - 1:

        class Full(checkpoint.FileSystemWriter):
            def write_data(self, plan: Any, planner: Any) -> Any:
                raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint.FileSystemWriter = Full
    with ranks.together("saving"):
        checkpoint.save_shards(folder, {"weights/x": torch.ones(3)}, ranks.group, ranks.number)


def another_call(world: TorchWorld, rank: int, size: int) -> None:
    with ranks_of(world, size).together(f"call {min(rank, 1)}"):
        pass


class Unbreakable:
    """Is a group whose communicator cannot be told to stop."""

    def abort(self) -> None:
        raise RuntimeError("NCCL does not know this communicator")


def one_fails(world: TorchWorld, rank: int, size: int, how: str) -> float:
    """The last rank raises, or is killed, while the others wait in a sum; or all but it are told to
    break off."""
    ranks = ranks_of(world, size)
    if how == "stuck beside NCCL":
        world.cuda, world._groups = True, [Unbreakable(), *world._groups]
    began = time.monotonic()
    with ranks.together("the step"):
        if rank == size - 1:
            if how == "raises":
                raise MemoryError("no room for the batch")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2)  # Stuck, and late: the others are told by somebody else.
        if how.startswith("stuck"):
            threading.Timer(0.2, lambda: ranks.abort("rank 2 is stuck")).start()
        ranks.sum_(torch.zeros(4))
    return time.monotonic() - began
