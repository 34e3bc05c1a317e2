"""The torch.distributed world of a run's workers, with a process group and a device mesh for each
role.

A rank that waits in a collective of gloo cannot be interrupted, and its peers wait with it. To
abort a collective, this module closes its connections: then both ends fail at once.

The workers rendezvous at a TCP store that the first of them serves on the loopback interface, so
that it is not reachable from other machines. With workers on several hosts, of a network that the
user trusts, it is served at the address at which its host reaches the master, and each worker
connects and listens only at its own such address. Keys have a token of the run as a prefix, so that
another process cannot join by accident or insert a guessed address. The store has no
authentication: a process that reaches it can list its keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from realhf.api.parallel import CollectiveBroken, Parallel
from realhf.backends.training.micro_batches import Ranks
from realhf.base.loopback import LOOPBACK_INTERFACE

_log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
"""Loopback address."""
BUCKET_BYTES = 32 << 20
"""Approximate size in bytes of the buckets in which gradients are summed over ranks."""
_PREFIX = "socket:"
"""Prefix by which a link in /proc/self/fd is recognised as a socket."""


class Sockets:
    """Record of the sockets that this process opens in the block of ``record``.

    Sockets that other threads open at the same time are recorded too, so no other connection should
    be opened then.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of recorded sockets."""
        return len(self._descriptors)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Context manager that records the sockets opened in its block."""
        known = _open_sockets()
        yield
        self._descriptors |= {name: fd for name, fd in _open_sockets().items() if name not in known}

    def listening_addresses(self) -> set[str]:
        """Return the addresses of the listening sockets."""
        return {address for fd in self._descriptors.values() if (address := _listening_address(fd))}

    def shut_down(self) -> int:
        """Shut down every recorded connection that is still open; return their number.

        The file descriptors stay open: torch owns them.
        """
        open_sockets = _open_sockets()
        count = 0
        for name, fd in self._descriptors.items():
            # The number of a closed descriptor may have been reused for another file.
            if open_sockets.get(name) == fd:
                count += _shut_down(fd)
        return count


def _open_sockets() -> dict[str, int]:
    """Return the file descriptor of each socket of this process, keyed by the socket's kernel
    name."""
    sockets = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(_PREFIX):
                sockets[target] = int(entry)
    return sockets


def _listening_address(fd: int) -> str:
    """Return the address at which a socket listens, "" if it is not a listening socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as opened:
        if opened.family != socket.AF_UNIX and opened.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return str(opened.getsockname()[0])
    return ""


def _shut_down(fd: int) -> bool:
    """Shut down a connection in both directions; return whether it was open."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # Raises OSError for a listening socket, which has no connection.
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False


class RendezvousStore:
    """TCP store at which the workers of a world rendezvous.

    ``address`` is its host:port. The store is served as long as this object exists.
    """

    def __init__(self, size: int, timeout_s: float, host: str = LOOPBACK) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


class TorchWorld:
    """This worker's membership in the torch.distributed world of a run.

    Args:
        address: host:port of the rendezvous store (``RendezvousStore``).
        worker: Index of this worker.
        workers: Indices of all workers of the world.
        join_s: Timeout for joining the world and each group, seconds.
        timeout_s: Timeout of a collective, seconds.
        token: Prefix of all keys; only workers with the same token rendezvous.
        own: Address at which the other workers reach this one.
        interface: Network interface with the address ``own``.
    """

    def __init__(
        self,
        address: str,
        worker: int,
        workers: Sequence[int],
        *,
        join_s: float,
        timeout_s: float,
        token: str = "",
        own: str = LOOPBACK,
        interface: str = LOOPBACK_INTERFACE,
    ) -> None:
        """Join the world. Raises CollectiveBroken if not all workers join in time, or if torch
        listens at an address other than ``own``."""
        host, _, port = address.rpartition(":")
        self._workers = tuple(workers)
        size = len(workers)
        self._worker = worker
        self._join_s = join_s
        self._timeout = timedelta(seconds=timeout_s)
        self._own_address = own
        self._interface = interface
        self._sockets = Sockets()
        self._groups: list[Any] = []
        self._n_created = 0
        # Groups of this worker that were created but not requested yet, by the places of their
        # members.
        self._unclaimed: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        self._abort_reason = ""
        self.cuda = torch.cuda.is_available()
        # Without an interface, gloo resolves the host name, which may give any address, and NCCL
        # prefers an interface to other machines.
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
        try:
            joining = timedelta(seconds=join_s)
            server = TCPStore(
                host, int(port), size, is_master=False, timeout=joining, wait_for_workers=False
            )
            self._store = PrefixStore(token, server) if token else server
            self._compare_devices(joining)
            with self._sockets.record():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if self.cuda else "gloo",
                    store=self._store,
                    rank=self._workers.index(worker),
                    world_size=size,
                    timeout=joining,
                )
        except CollectiveBroken:
            raise
        except (RuntimeError, ValueError) as error:
            raise CollectiveBroken(
                f"the workers {list(workers)} did not all join within {join_s:g} s "
                f"(rpc.connect_timeout_s): {error}"
            ) from None

        self._check_listeners()

    def _compare_devices(self, joining: timedelta) -> None:
        """Raise CollectiveBroken if only some workers have a GPU, and RuntimeError if not all
        workers join.

        Torch's own error for mixed devices comes late and is hard to understand.
        """
        self._store.set(f"device/{self._worker}", "GPU" if self.cuda else "CPU")
        keys = {worker: f"device/{worker}" for worker in self._workers}
        self._store.wait([*keys.values()], joining)
        without_gpu = [worker for worker, key in keys.items() if self._store.get(key) != b"GPU"]
        if 0 < len(without_gpu) < len(keys):
            raise CollectiveBroken(
                f"of the workers {list(keys)} that train together {without_gpu} see no GPU, and "
                "the "
                f"others do: place them "
                "on hosts with GPUs (scheduler.placement), or hide those (CUDA_VISIBLE_DEVICES=)"
            )

    def _check_listeners(self) -> None:
        """Raise CollectiveBroken if torch listens at an address other than ``own``.

        Gloo uses the first address of an interface, which may have several.
        """
        if unexpected := sorted(self._sockets.listening_addresses() - {self._own_address}):
            self.close()
            raise CollectiveBroken(
                f"torch.distributed listens at {', '.join(unexpected)} of the interface "
                f"{self._interface}, and not at "
                f"{self._own_address}, from where this host reaches the master: make that the "
                "first "
                f"address of the interface"
            )

    def create_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Create the process groups that ``group`` returns, one for each list of workers.

        All workers of the world have to call this with the same groups in the same order, whether
        they are members or not, because torch numbers groups in the order of their creation. Raises
        CollectiveBroken.
        """
        for workers in groups:
            world_ranks = self.world_ranks(workers)
            number = self._n_created
            self._n_created += 1
            try:
                with self._sockets.record():
                    group = dist.new_group(world_ranks, timeout=self._timeout)
            except (RuntimeError, ValueError) as error:
                raise CollectiveBroken(
                    f"no group of the workers {sorted(workers)}: {error}"
                ) from None
            self._check_listeners()
            if self._worker in workers:
                self._groups.append(group)
                self._unclaimed.setdefault(tuple(world_ranks), []).append((number, group))

    def group(self, workers: Sequence[int]) -> Any:
        """Return the first created process group of exactly these workers that has not been
        returned yet.

        Ranks in the group are in ascending order of workers. All members have to call this; each
        waits up to ``join_s`` for the others. Raises CollectiveBroken naming the missing workers,
        or RuntimeError if no such group is left.
        """
        created = self._unclaimed.get(tuple(self.world_ranks(workers)))
        if not created:
            raise RuntimeError(
                f"no group of the workers {sorted(workers)} was created for worker {self._worker}"
            )
        number, group = created.pop(0)
        self._wait_for_members(number, sorted(workers))
        return group

    def _wait_for_members(self, number: int, workers: Sequence[int]) -> None:
        """Wait until all members of a group have called ``group``. Raises CollectiveBroken after
        ``join_s``."""
        keys = {worker: f"group/{number}/{worker}" for worker in workers}
        missing: Sequence[int] = workers
        try:
            self._store.set(keys[self._worker], "here")
            try:
                self._store.wait([*keys.values()], timedelta(seconds=self._join_s))
            except RuntimeError:
                missing = [worker for worker in workers if not self._store.check([keys[worker]])]
                raise
        except RuntimeError as error:
            raise CollectiveBroken(
                f"worker {self._worker} waited {self._join_s:g} s (rpc.connect_timeout_s) for the "
                f"workers "
                f"{list(missing)} to load what they train with {workers}: {error}"
            ) from None

    def world_ranks(self, workers: Sequence[int]) -> list[int]:
        """Return the ranks of these workers in the world, ascending."""
        return sorted(self._workers.index(worker) for worker in workers)

    @property
    def abort_reason(self) -> str:
        """Reason for which the collectives were aborted; empty if they were not."""
        return self._abort_reason

    def abort(self, reason: str) -> None:
        """Abort every collective of this worker, permanently. Thread-safe; a second call does
        nothing."""
        if self._abort_reason:
            return
        self._abort_reason = reason or "aborted"
        count = self._sockets.shut_down()
        for group in self._groups if self.cuda else ():
            try:
                group.abort()
            except RuntimeError as error:  # The other groups have to be aborted nevertheless.
                _log.warning("an NCCL group could not be aborted: %s", error)
        _log.warning(
            "collectives are aborted (%s); %d connections closed", self._abort_reason, count
        )

    def close(self) -> None:
        """Leave the world. Collectives that are still running fail, so that they do not delay the
        process's exit."""
        self._sockets.shut_down()
        self._groups.clear()
        self._unclaimed.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


class GroupRanks(Ranks):
    """``Ranks`` of a role with several workers.

    Outside ``together`` an engine acts alone: ``rank`` is 0 and ``size`` is 1. ``number`` is always
    the worker's rank in the group.

    Args:
        world: The world of the run.
        workers: Indices of the workers, ascending.
        sharded: Whether the model is sharded over the ranks, or over groups of them. Forward and
            backward passes are then collectives, and the backward pass itself sums the gradients.
        device: Device of the engine.
    """

    def __init__(
        self, world: TorchWorld, workers: Sequence[int], *, sharded: bool, device: torch.device
    ) -> None:
        self._world = world
        self._device = device
        self.group = world.group(workers)
        self.number = dist.get_rank(self.group)
        self._n_workers = len(workers)
        self._sharded = sharded
        self._active = False

    @property
    def passes_are_collective(self) -> bool:
        """Whether forward and backward passes involve the other ranks (sharded model).

        Raises RuntimeError for a sharded model outside ``together``, where a pass would wait for
        the other ranks forever.
        """
        if self._sharded and not self._active:
            raise RuntimeError(
                "a model that is sharded over workers computes only in group calls, on all of "
                "them together"
            )
        return self._sharded

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """See ``realhf.api.parallel.Group``."""
        self._active = True
        self.rank = self.number
        self.size = self._n_workers
        try:
            for rank, other in enumerate(self.gather({"about": what})):
                if other["about"] != what:
                    raise CollectiveBroken(
                        f"rank {self.number} is about {what}, rank {rank} about {other['about']}"
                    )
            yield
            self.settle()
        except BaseException as error:
            abort_reason = self._world.abort_reason
            self.abort(f"{what}: {type(error).__name__}")
            if abort_reason or _is_collective_error(error):
                raise CollectiveBroken(
                    f"rank {self.number} of {self.size} aborted {what}: {error}"
                ) from error
            raise
        finally:
            self._active = False
            self.rank = 0
            self.size = 1

    def abort(self, reason: str = "") -> None:
        """See ``realhf.api.parallel.Group``."""
        self._world.abort(reason)

    def settle(self) -> None:
        """See ``Ranks``. Raises CollectiveBroken inside ``together`` if the world was aborted."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._active:
            self._check_not_aborted()

    def select_rows(self, costs: Sequence[int]) -> list[int]:
        """Return the rows that this rank computes: a contiguous range that costs about as much as
        those of the other ranks.

        Adjacent sequences of a batch often share a prefix, which a rank computes only once.
        """
        total = sum(map(int, costs))
        before = 0
        owner = []
        for index, cost in enumerate(map(int, costs)):
            # The rank is that of the row's midpoint. Integer arithmetic gives the same result on
            # all ranks.
            middle = (2 * before + cost, 2 * total) if total else (2 * index + 1, 2 * len(costs))
            owner.append(min(self.size - 1, middle[0] * self.size // middle[1]))
            before += cost
        return [index for index, rank in enumerate(owner) if rank == self.rank]

    def sum_(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""
        if self.size > 1:
            self._collective(lambda: dist.all_reduce(tensor, group=self.group))

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the values of every rank, in the order of ranks."""
        if self.size == 1:
            return [dict(values)]
        data = torch.frombuffer(bytearray(json.dumps(dict(values)).encode()), dtype=torch.uint8)
        sizes = [
            int(size) for size in self._all_gather(torch.tensor([len(data)], dtype=torch.int64))
        ]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._all_gather(padded)
        return [
            json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)
        ]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the ranks, in fp32. Does nothing for sharded models, whose
        backward pass already did.

        A gradient that is None counts as 0. It stays None if no rank has a gradient, because the
        optimizer must not update that parameter.
        """
        if self.size == 1 or self._sharded:
            return
        for bucket in _split_buckets(parameters):
            # The number of ranks with a gradient is summed in the same collective.
            has_grad = torch.tensor(
                [float(p.grad is not None) for p in bucket], device=bucket[0].device
            )
            zeros = lambda p: torch.zeros(p.numel(), device=p.device)
            grads = (zeros(p) if p.grad is None else p.grad.reshape(-1).float() for p in bucket)
            flat = torch.cat([*grads, has_grad])
            self.sum_(flat)
            *sums, counts = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, summed, count in zip(bucket, sums, counts.tolist(), strict=True):
                parameter.grad = summed.view_as(parameter).to(parameter.dtype) if count else None

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have the same shape, on the CPU."""
        own = tensor.to(self._device)
        rows = [torch.empty_like(own) for _ in range(self._n_workers)]
        self._collective(lambda: dist.all_gather(rows, own, group=self.group))
        return [row.cpu() for row in rows]

    def _check_not_aborted(self) -> None:
        """Raise CollectiveBroken if the world was aborted."""
        if self._world.abort_reason:
            raise CollectiveBroken(
                f"rank {self.number}: collectives were aborted: {self._world.abort_reason}"
            )

    def _collective(self, run: Callable[[], Any]) -> None:
        """Run a collective. Raises CollectiveBroken if it fails."""
        self._check_not_aborted()
        try:
            run()
        except RuntimeError as error:
            raise CollectiveBroken(
                f"rank {self.number} of {self._n_workers} lost its peers: {error}"
            ) from error


def _is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from a collective. Torch raises such errors as plain
    RuntimeErrors."""
    if isinstance(error, (CollectiveBroken, dist.DistError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo/", "NCCL", "ProcessGroup")
    )


def _split_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Split parameters into buckets of at most ``BUCKET_BYTES``; a larger parameter gets its own
    bucket."""
    bucket: list[nn.Parameter] = []
    bucket_bytes = 0
    for parameter in parameters:
        nbytes = 4 * parameter.numel()
        if bucket and bucket_bytes + nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(parameter)
        bucket_bytes += nbytes
    if bucket:
        yield bucket


def list_groups(workers: Sequence[int], parallel: Parallel, *, cut: bool) -> list[list[int]]:
    """Return the process groups that a role needs, as lists of workers, in the order of their
    creation.

    The first list has all workers. For a model that is sharded (``cut``) and also replicated, it is
    followed by one list for each replica, then one for each shard with the workers that hold it.
    """
    ordered = sorted(workers)
    if not cut or parallel.dp == 1:
        return [ordered]
    rows = [
        ordered[start : start + parallel.fsdp] for start in range(0, len(ordered), parallel.fsdp)
    ]
    return [ordered, *rows, *(ordered[part :: parallel.fsdp] for part in range(parallel.fsdp))]


def build_mesh(
    world: TorchWorld,
    workers: Sequence[int],
    parallel: Parallel,
    ranks: GroupRanks,
    device_type: str,
) -> DeviceMesh:
    """Return the device mesh of a role, with the dimensions (fsdp,) or (dp, fsdp).

    All workers of the role have to call this, after the world has created the groups of
    ``list_groups``. Raises CollectiveBroken.
    """
    if parallel.dp == 1:
        return DeviceMesh.from_group(ranks.group, device_type, mesh_dim_names=("fsdp",))
    ordered = sorted(workers)
    replica, shard = divmod(ranks.number, parallel.fsdp)
    row = world.group(ordered[replica * parallel.fsdp : (replica + 1) * parallel.fsdp])
    column = world.group(ordered[shard :: parallel.fsdp])
    world_ranks = torch.tensor(world.world_ranks(workers)).reshape(parallel.dp, parallel.fsdp)
    return DeviceMesh.from_group(
        [column, row], device_type, mesh=world_ranks, mesh_dim_names=("dp", "fsdp")
    )
