"""Implements the ranks of a role over a process group of torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from realhf.api.parallel import CollectiveBroken
from realhf.backends.parallel.world import World

BUCKET_BYTES = 32 << 20
"""Gradients travel in pieces of about this size, whatever the number of parameters."""


class GroupRanks:
    """Is the ``Ranks`` of a role on several ``workers``, indices of members of ``world``; ranks are in ascending order.

    ``sharded``: the model is cut over the ranks (or over groups of them), so that passes are collectives and the
    backward pass itself sums gradients.
    """

    def __init__(self, world: World, workers: Sequence[int], *, sharded: bool, device: torch.device) -> None:
        self._world, self._device = world, device
        self.group = world.group(workers)
        self._rank, self._size, self._sharded = dist.get_rank(self.group), len(workers), sharded
        self._active = False

    @property
    def number(self) -> int:
        """The own rank, also outside ``together``."""
        return self._rank

    @property
    def rank(self) -> int:
        """The own rank inside ``together``, else 0."""
        return self._rank if self._active else 0

    @property
    def size(self) -> int:
        """The number of ranks inside ``together``, else 1."""
        return self._size if self._active else 1

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
        self._active = True
        try:
            self._agree(what)
            yield
            self.settle()
        except BaseException as error:
            aborted = self._world.aborted
            self.abort(f"{what}: {type(error).__name__}")
            if aborted or _lost_peer(error):
                raise CollectiveBroken(f"rank {self._rank} of {self._size} broke off {what}: {error}") from error
            raise
        finally:
            self._active = False

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

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, by rank."""
        if self.size == 1:
            return [data]
        sizes = self._gathered(torch.tensor([len(data)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        rows = self._gathered(padded)
        return [bytes(row[: int(size)].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, numbers: Mapping[str, float]) -> list[dict[str, float]]:
        """Return the numbers of every rank, by rank."""
        return [json.loads(text) for text in self.exchange(json.dumps(dict(numbers)).encode())]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients over the ranks, in fp32; None counts as 0, and stays None where no rank has a
        gradient: an optimizer leaves such a parameter alone. Nothing where the backward pass did."""
        if self.size == 1 or self._sharded:
            return
        for bucket in _buckets(parameters):
            has = torch.tensor([float(p.grad is not None) for p in bucket], device=bucket[0].device)
            flat = torch.cat([*(_flat_gradient(p) for p in bucket), has])
            self.sum_(flat)
            *sums, counts = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, summed, count in zip(bucket, sums, counts.tolist(), strict=True):
                parameter.grad = summed.view_as(parameter).to(parameter.dtype) if count else None

    def _agree(self, what: str) -> None:
        """Raise CollectiveBroken unless all ranks are about the same."""
        for rank, other in enumerate(self.exchange(what.encode())):
            if other.decode("utf-8", "replace") != what:
                raise CollectiveBroken(f"rank {self._rank} is about {what}, rank {rank} about {other.decode()}")

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        mine = tensor.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        self._collective(lambda: dist.all_gather(rows, mine, group=self.group))
        return [row.cpu() for row in rows]

    def _check_whole(self) -> None:
        if self._world.aborted:
            raise CollectiveBroken(f"rank {self._rank}: collectives were broken off: {self._world.aborted}")

    def _collective(self, run: Callable[[], Any]) -> None:
        self._check_whole()
        try:
            run()
        except RuntimeError as error:
            raise CollectiveBroken(f"rank {self._rank} of {self._size} lost its peers: {error}") from error


def _lost_peer(error: BaseException) -> bool:
    """Whether an error comes from below a collective, which torch raises as plain RuntimeErrors."""
    if isinstance(error, (CollectiveBroken, dist.DistError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo/", "NCCL", "ProcessGroup"))


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), device=parameter.device)
    return parameter.grad.reshape(-1).float()


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
