"""Brings the workers of a run into one world, and makes a process group and a device mesh for each role.

A rank that waits in a collective of gloo cannot be told to stop, and its peers wait with it. When one of its
connections closes, both ends fail at once.

They meet at a store that the first of them serves on the loopback, as all sockets of a run do: nothing outside this
machine reaches it. Where they are on several hosts, of a network that the user trusts, it is served at the address at
which this host reaches the master, and each connects and listens at its own such address alone. Their keys begin with a
token of the run, so that another process does not meet them by chance or plant an address that it guessed. The store
itself asks nobody who he is: a process that reaches it can list its keys.
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

_PREFIX = "socket:"


class Sockets:
    """Collects the connections that are opened inside ``recording``. Those that other threads open meanwhile are
    collected too, so nothing else should begin at that time."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """How many sockets were collected."""
        return len(self._held)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Collect what is opened inside."""
        before = _open_sockets()
        yield
        self._held |= {name: fd for name, fd in _open_sockets().items() if name not in before}

    def listening(self) -> set[str]:
        """Return the addresses at which those of them listen that do."""
        return {address for fd in self._held.values() if (address := _listens_at(fd))}

    def shut(self) -> int:
        """End every connection that is still open, in both directions; return how many there were. The descriptors stay
        with their owner."""
        now, count = _open_sockets(), 0
        for name, fd in self._held.items():
            # A descriptor that was closed since may be another file by now.
            if now.get(name) == fd:
                count += _shut(fd)
        return count


def _open_sockets() -> dict[str, int]:
    """Return the sockets of this process, kernel's name to descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(_PREFIX):
                found[target] = int(entry)
    return found


def _listens_at(fd: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if found.family != socket.AF_UNIX and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return str(found.getsockname()[0])
    return ""


def _shut(fd: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.getpeername()  # Raises OSError on a socket that listens: there is nothing to end.
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False


_log = logging.getLogger(__name__)
LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


class Meeting:
    """Serves the store at which the workers of a world meet, at an own address; ``address`` is host:port. It lives as
    long as the object."""

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


class World:
    """This worker's membership in a world. ``workers`` are the indices of all its workers, ``worker`` is the own one.
    ``join_s`` bounds how long they may take to come together, in the world and in each group, ``timeout_s`` how long a
    rank waits for another in a collective. Only workers with the same ``token`` meet. The others reach this one at its
    address ``own``, which ``interface`` has."""

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
        """Raises CollectiveBroken when the workers do not come together, or torch listens at another address."""
        host, _, port = address.rpartition(":")
        self._workers = tuple(workers)
        size = len(workers)
        self._worker, self._join_s = worker, join_s
        self._timeout = timedelta(seconds=timeout_s)
        self._own, self._interface = own, interface
        self._sockets = Sockets()
        self._groups: list[Any] = []
        self._founded = 0
        self._waiting: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        self._aborted = ""
        self.cuda = torch.cuda.is_available()
        # Gloo looks up the name of the machine unless it is told an interface, and names may lead anywhere; NCCL takes
        # an interface that leads out of the machine.
        os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = interface, f"={interface}"
        try:
            joining = timedelta(seconds=join_s)
            server = TCPStore(host, int(port), size, is_master=False, timeout=joining, wait_for_workers=False)
            self._store = PrefixStore(token, server) if token else server
            self._compare_devices(joining)
            with self._sockets.recording():
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
                f"the workers {list(workers)} did not come together in {join_s:g} s (rpc.connect_timeout_s): {error}"
            ) from None

        self._check_listeners()

    def _compare_devices(self, joining: timedelta) -> None:
        """Those without a GPU cannot take part in what the others compute on theirs, which torch says late and badly.
        Raises CollectiveBroken, and RuntimeError when not all come."""
        self._store.set(f"device/{self._worker}", "GPU" if self.cuda else "CPU")
        keys = {worker: f"device/{worker}" for worker in self._workers}
        self._store.wait([*keys.values()], joining)
        without = [worker for worker, key in keys.items() if self._store.get(key) != b"GPU"]
        if 0 < len(without) < len(keys):
            raise CollectiveBroken(
                f"of the workers {list(keys)} that train together {without} see no GPU, and the others do: place them "
                "on hosts with GPUs (scheduler.placement), or hide those (CUDA_VISIBLE_DEVICES=)"
            )

    def _check_listeners(self) -> None:
        """An interface may have several addresses, of which gloo takes the first."""
        if strays := sorted(self._sockets.listening() - {self._own}):
            self.close()
            raise CollectiveBroken(
                f"torch.distributed listens at {', '.join(strays)} of the interface {self._interface}, and not at "
                f"{self._own}, from where this host reaches the master: make that the first address of the interface"
            )

    def found(self, groups: Sequence[Sequence[int]]) -> None:
        """Make process groups of these workers each, for ``group``. All workers of the world call this with the same
        groups in the same order, members or not: torch names a group by how many there were before. Raises
        CollectiveBroken."""
        for workers in groups:
            places = self.places(workers)
            number, self._founded = self._founded, self._founded + 1
            try:
                with self._sockets.recording():
                    group = dist.new_group(places, timeout=self._timeout)
            except (RuntimeError, ValueError) as error:
                raise CollectiveBroken(f"no group of the workers {sorted(workers)}: {error}") from None
            self._check_listeners()
            if self._worker in workers:
                self._groups.append(group)
                self._waiting.setdefault(tuple(places), []).append((number, group))

    def group(self, workers: Sequence[int]) -> Any:
        """Return the process group of these workers, ranks in ascending order, the first that was founded and not yet
        asked for. All of them call this; each waits ``join_s`` for the others. Raises CollectiveBroken naming those
        that did not come, or RuntimeError where no such group is left."""
        found = self._waiting.get(tuple(self.places(workers)))
        if not found:
            raise RuntimeError(f"no group of the workers {sorted(workers)} was founded for worker {self._worker}")
        number, group = found.pop(0)
        self._await(number, sorted(workers))
        return group

    def _await(self, number: int, workers: Sequence[int]) -> None:
        """Wait until all members of a group have asked for it."""
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
                f"worker {self._worker} waited {self._join_s:g} s (rpc.connect_timeout_s) for the workers "
                f"{list(missing)} to load what they train with {workers}: {error}"
            ) from None

    def places(self, workers: Sequence[int]) -> list[int]:
        """Return the numbers of these workers in the world, ascending."""
        return sorted(self._workers.index(worker) for worker in workers)

    @property
    def aborted(self) -> str:
        """Why the world was broken off; empty while it stands."""
        return self._aborted

    def abort(self, reason: str) -> None:
        """Break off every collective of this worker, for good. From any thread; a second call does nothing."""
        if self._aborted:
            return
        self._aborted = reason or "broken off"
        count = self._sockets.shut()
        for group in self._groups if self.cuda else ():
            try:
                group.abort()
            except RuntimeError as error:  # The others have to hear of it all the same.
                _log.warning("a group of NCCL does not break off: %s", error)
        _log.warning("collectives are broken off (%s); %d connections closed", self._aborted, count)

    def close(self) -> None:
        """Leave the world. What a thread still computes with others fails: it would hold up the end."""
        self._sockets.shut()
        self._groups.clear()
        self._waiting.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


BUCKET_BYTES = 32 << 20
"""Gradients travel in pieces of about this size, whatever the number of parameters."""


class GroupRanks(Ranks):
    """Joins the engines of a role on several ``workers``, indices of members of ``world``, in ascending order.
    Outside ``together`` a rank is alone. ``number`` is the own rank in any case.

    ``sharded``: the model is cut over the ranks (or over groups of them), so that passes are collectives and the
    backward pass itself sums gradients.
    """

    def __init__(self, world: World, workers: Sequence[int], *, sharded: bool, device: torch.device) -> None:
        self._world, self._device = world, device
        self.group = world.group(workers)
        self.number, self._together, self._sharded = dist.get_rank(self.group), len(workers), sharded
        self._active = False

    @property
    def in_step(self) -> bool:
        """Whether passes are collectives. Raises RuntimeError outside ``together`` where the model is cut over ranks: a
        pass would wait for others for ever."""
        if self._sharded and not self._active:
            raise RuntimeError("a model that is cut over workers computes on all of them together only")
        return self._sharded

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """See ``realhf.api.parallel.Group``."""
        self._active, self.rank, self.size = True, self.number, self._together
        try:
            for rank, other in enumerate(self.gather({"about": what})):
                if other["about"] != what:
                    raise CollectiveBroken(f"rank {self.number} is about {what}, rank {rank} about {other['about']}")
            yield
            self.settle()
        except BaseException as error:
            aborted = self._world.aborted
            self.abort(f"{what}: {type(error).__name__}")
            if aborted or _lost_peer(error):
                raise CollectiveBroken(f"rank {self.number} of {self.size} broke off {what}: {error}") from error
            raise
        finally:
            self._active, self.rank, self.size = False, 0, 1

    def abort(self, reason: str = "") -> None:
        """See ``realhf.api.parallel.Group``."""
        self._world.abort(reason)

    def settle(self) -> None:
        """See ``Ranks``. Raises CollectiveBroken inside ``together``."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._active:
            self._check_whole()

    def own(self, costs: Sequence[int]) -> list[int]:
        """Return the sequences of this rank. Each rank gets neighbours, about as many tokens as the others: sequences
        that begin alike stand beside each other in a batch, and what they share is computed once on a rank."""
        total, before, owner = sum(map(int, costs)), 0, []
        for index, cost in enumerate(map(int, costs)):
            # Its middle decides, in whole numbers: all ranks must come to the same answer.
            middle = (2 * before + cost, 2 * total) if total else (2 * index + 1, 2 * len(costs))
            owner.append(min(self.size - 1, middle[0] * self.size // middle[1]))
            before += cost
        return [index for index, rank in enumerate(owner) if rank == self.rank]

    def sum_(self, tensor: Tensor) -> None:
        """Add ``tensor`` up over the ranks, in place."""
        if self.size > 1:
            self._collective(lambda: dist.all_reduce(tensor, group=self.group))

    def gather(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank tells, by rank."""
        if self.size == 1:
            return [dict(told)]
        data = torch.frombuffer(bytearray(json.dumps(dict(told)).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered(torch.tensor([len(data)], dtype=torch.int64))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._gathered(padded)
        return [json.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients over the ranks, in fp32; None counts as 0, and stays None where no rank has a
        gradient: an optimizer leaves such a parameter alone. Nothing where the backward pass did."""
        if self.size == 1 or self._sharded:
            return
        for bucket in _buckets(parameters):
            has = torch.tensor([float(p.grad is not None) for p in bucket], device=bucket[0].device)
            none = lambda p: torch.zeros(p.numel(), device=p.device)
            flat = torch.cat([*(none(p) if p.grad is None else p.grad.reshape(-1).float() for p in bucket), has])
            self.sum_(flat)
            *sums, counts = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, summed, count in zip(bucket, sums, counts.tolist(), strict=True):
                parameter.grad = summed.view_as(parameter).to(parameter.dtype) if count else None

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        mine = tensor.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self._together)]
        self._collective(lambda: dist.all_gather(rows, mine, group=self.group))
        return [row.cpu() for row in rows]

    def _check_whole(self) -> None:
        if self._world.aborted:
            raise CollectiveBroken(f"rank {self.number}: collectives were broken off: {self._world.aborted}")

    def _collective(self, run: Callable[[], Any]) -> None:
        self._check_whole()
        try:
            run()
        except RuntimeError as error:
            raise CollectiveBroken(f"rank {self.number} of {self._together} lost its peers: {error}") from error


def _lost_peer(error: BaseException) -> bool:
    """Whether an error comes from below a collective, which torch raises as plain RuntimeErrors."""
    if isinstance(error, (CollectiveBroken, dist.DistError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo/", "NCCL", "ProcessGroup"))


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group parameters into buckets of about ``BUCKET_BYTES``; a larger one is a bucket of its own."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        nbytes = 4 * parameter.numel()
        if bucket and held + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += nbytes
    if bucket:
        yield bucket


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
