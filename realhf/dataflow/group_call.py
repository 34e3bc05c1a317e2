"""What the ranks of a group call have in common: one failure for all, one answer of all.

A group call is a call that several workers compute together. Each gets the whole batch; what the backend divides among
them is none of the master's business.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from realhf.api.calls import ABORT, GATHER, AbortRequest, GatherRequest, GroupPart
from realhf.api.mfc import InterfaceType, MFCDef
from realhf.api.parallel import CollectiveBroken, Parallel
from realhf.dataflow.caller import Caller
from realhf.transport.errors import RemoteError

ABORT_S = 5.0
"""How long the ranks of a call that failed may take to break off. Until then one of them may name the cause."""
TOLERANCE = 1e-5
"""Relative difference that the same statistic may have on two ranks: they add the same numbers."""
DURATION = "_seconds"
"""What the name of a statistic ends in that takes another value on each rank."""


class RanksDiffer(ValueError):
    """Two ranks of a group call answered differently."""


def is_group_call(mfc: MFCDef, parallel: Parallel) -> bool:
    """Whether all workers of a role make this call together. Copies of a model play and score apart; a model that is
    cut over workers scores on all of them."""
    if parallel.size == 1 or mfc.interface_type is InterfaceType.GENERATE:
        return False
    return parallel.fsdp > 1 or not mfc.interface_type.produces_keys


def group_parts(no: int, size: int) -> list[GroupPart]:
    """One part for each rank."""
    return [GroupPart(no, rank, size) for rank in range(size)]


class GroupFailed(RuntimeError):
    """A worker failed, and with it what several compute together; the message names worker and cause."""

    def __init__(self, worker: str, cause: BaseException) -> None:
        super().__init__(f"{worker}: {cause}")
        self.worker, self.cause = worker, cause


class GroupNumbers:
    """Counts the group calls of a run, from 1."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Return the number of a new group call."""
        self._last += 1
        return self._last


async def gather_weights(
    caller: Caller,
    numbers: GroupNumbers,
    role: str,
    workers: Sequence[str],
    *,
    everywhere: bool,
    timeout_s: float,
    step: int = -1,
) -> None:
    """Bring the whole weights of a role together, on each of its workers or on the first, until it trains again. Raises
    GroupFailed."""
    requests = [GatherRequest(role, part, everywhere) for part in group_parts(numbers.next(), len(workers))]
    futures = [
        caller.call(worker, GATHER.name, GATHER.pack(request), timeout_s=timeout_s, step=step)
        for worker, request in zip(workers, requests, strict=True)
    ]
    try:
        failed = await first_failure(caller, workers, futures, together=True)
        if failed is not None:
            raise failed
    finally:
        for future in futures:
            future.cancel()


async def first_failure(
    caller: Caller, workers: Sequence[str], futures: Sequence[asyncio.Future[Any]], *, together: bool
) -> GroupFailed | None:
    """Wait for the answers of all workers; return the first failure, or None when all have answered.

    Where they compute ``together``, a failure of one leaves the others waiting for it: they are told to break off, and
    a rank that only lost its peers is not to blame where another failed by itself. That takes at most ``ABORT_S``
    seconds, also when a rank is stuck.
    """
    await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    if together and _failed(workers, futures):
        reason = "another rank failed"
        aborts = [
            caller.call(worker, ABORT.name, ABORT.pack(AbortRequest(reason)), timeout_s=ABORT_S)
            for worker, future in zip(workers, futures, strict=True)
            if not future.done()
        ]
        await asyncio.wait([*futures, *aborts], timeout=ABORT_S)
        for each in aborts:
            each.cancel()
    found = _failed(workers, futures)
    return min(found, key=lambda failed: is_consequence(failed.cause)) if found else None


def _failed(workers: Sequence[str], futures: Sequence[asyncio.Future[Any]]) -> list[GroupFailed]:
    return [
        GroupFailed(worker, error)
        for worker, future in zip(workers, futures, strict=True)
        if future.done() and not future.cancelled() and (error := future.exception()) is not None
    ]


def is_consequence(error: BaseException) -> bool:
    """Whether a rank failed because another did."""
    return isinstance(error, RemoteError) and error.kind == CollectiveBroken.__name__


def check_agreement(stats: Sequence[Mapping[str, Any]], workers: Sequence[str]) -> None:
    """Raise RanksDiffer unless all ranks report the same statistics; seconds may differ."""
    for worker, others in zip(workers[1:], stats[1:], strict=True):
        for name in sorted({*stats[0], *others}):
            first, other = stats[0].get(name), others.get(name)
            if not name.endswith(DURATION) and not _same(first, other):
                raise RanksDiffer(f"{name} is {first} on {workers[0]} and {other} on {worker}")


def _same(first: Any, other: Any) -> bool:
    if isinstance(first, float) and isinstance(other, float):
        both_nan = math.isnan(first) and math.isnan(other)
        return both_nan or math.isclose(first, other, rel_tol=TOLERANCE, abs_tol=1e-9)
    return bool(first == other)
