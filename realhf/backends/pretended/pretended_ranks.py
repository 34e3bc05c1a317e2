"""The first of several ranks on a pretended GPU, whose peers do not exist: their collectives end at
once, and what torch's FSDP2 allocates for them is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from realhf.api.parallel import Parallel
from realhf.backends.parallel.process_groups import GroupRanks
from realhf.backends.pretended.device import PretendedDevice
from realhf.backends.pretended.tensor import CUDA


class PretendedRanks(GroupRanks):
    """Rank 0 of a role with several workers. The others have what it has, and are never late."""

    def __init__(self, parallel: Parallel) -> None:
        self.number = 0
        self.rank = 0
        self.size = parallel.size
        ranks = torch.arange(parallel.size)
        names: tuple[str, ...] = ("fsdp",)
        if parallel.dp > 1:
            ranks = ranks.view(parallel.dp, parallel.fsdp)
            names = ("dp", "fsdp")
        self.mesh = DeviceMesh("cuda", ranks, mesh_dim_names=names)

    @property
    def passes_are_collective(self) -> bool:
        """True: the model is sharded."""
        return True

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context manager that does nothing: the ranks always compute together."""
        yield

    def abort(self, reason: str = "") -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def sum_(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: the backward pass sums those of a sharded model."""

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return this rank's values for every rank."""
        return [dict(values) for _ in range(self.size)]


class _Stream:
    """Stream of CUDA whose work is done at once, and event of it."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def record_event(self, *_: Any) -> _Stream:
        """Return an event that has happened."""
        return self

    wait_stream = wait_event = wait = synchronize = record


@contextlib.contextmanager
def pretend_ranks(device: PretendedDevice, size: int) -> Iterator[None]:
    """Context manager in which this process is rank 0 of ``size`` processes. Use it inside
    ``pretend_gpu``. Raises RuntimeError if the process has ranks already."""
    if dist.is_initialized():
        raise RuntimeError("this process has joined a process group already")
    resize = torch.UntypedStorage.resize_
    stream = _Stream()

    def resize_and_count(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        device.count_resized(storage)
        return result

    local: Callable[[str], Any] = lambda name: property(
        lambda tensor: getattr(tensor._local_tensor, name)
    )
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        (torch.cuda, "current_device", lambda: CUDA.index),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.UntypedStorage, "resize_", resize_and_count),
        # What torch takes for meta tensors is on the pretended device.
        (FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
        *((DTensor, name, local(name)) for name in ("device", "is_cuda", "is_cpu", "is_meta")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, replacement)
        # It marks the result of a collective, so that it is awaited when it is used.
        device.pass_through(torch.ops._c10d_functional._wrap_tensor_autograd.default)
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        yield
