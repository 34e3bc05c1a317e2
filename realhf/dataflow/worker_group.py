"""Calls workers for the master: one, all ranks of a group call, or all workers of a model role.

A group call is a call that several workers compute together. Each gets the whole batch; what the backend divides among
them is none of the master's business.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.calls import (
    ABORT,
    GATHER,
    INITIALIZE,
    OPEN_WORLD,
    RESTORE,
    SAVE,
    AbortRequest,
    CheckpointRequest,
    GatherRequest,
    GroupPart,
    InitializeRequest,
    OpenWorldRequest,
    SavedFile,
)
from realhf.api.experiment import ExperimentSpec, InterfaceType, MFCDef
from realhf.api.parallel import CollectiveBroken, Parallel
from realhf.base.messages import Call, Message
from realhf.transport.errors import RemoteError
from realhf.transport.rpc_master import RpcMaster

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


async def ask(
    caller: RpcMaster, worker: str, call: Call[Q, A], request: Q, *, timeout_s: float, step: int = -1, mfc: str = ""
) -> A:
    """The worker's answer. Raises what ``RpcMaster.call`` does, or MessageError for an answer of another form."""
    payload = call.pack(request)
    return call.unpack_answer(
        await caller.call(worker, call.name, payload, timeout_s=timeout_s, step=step, mfc=mfc), worker
    )


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


class GroupCallFailed(RuntimeError):
    """A worker failed, and with it what several compute together; the message names worker and cause."""

    def __init__(self, worker: str, cause: BaseException) -> None:
        super().__init__(f"{worker}: {cause}")
        self.worker, self.cause = worker, cause


async def gather_weights(
    caller: RpcMaster,
    numbers: Iterator[int],
    role: str,
    workers: Sequence[str],
    *,
    everywhere: bool,
    timeout_s: float,
    step: int = -1,
) -> None:
    """Bring the whole weights of a role together, on each of its workers or on the first, until it trains again. Raises
    GroupCallFailed."""
    number = next(numbers)
    requests = [GatherRequest(role, GroupPart(number, i, len(workers)), everywhere) for i in range(len(workers))]
    await ask_all(caller, workers, GATHER, requests, together=True, timeout_s=timeout_s, step=step)


async def ask_all(
    caller: RpcMaster,
    workers: Sequence[str],
    call: Call[Q, A],
    requests: Sequence[Q],
    *,
    together: bool,
    timeout_s: float,
    step: int = -1,
    mfc: str = "",
) -> list[Any]:
    """Send each worker its request without a pause in between, so that all see the calls of several roles in one order;
    return the payloads of their answers. Raises GroupCallFailed, which cancels the others."""
    payloads = [call.pack(request) for request in requests]
    futures = [
        caller.call(worker, call.name, payload, timeout_s=timeout_s, step=step, mfc=mfc)
        for worker, payload in zip(workers, payloads, strict=True)
    ]
    try:
        if (failed := await first_failure(caller, workers, futures, together=together)) is not None:
            raise failed
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def first_failure(
    caller: RpcMaster, workers: Sequence[str], futures: Sequence[asyncio.Future[Any]], *, together: bool
) -> GroupCallFailed | None:
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


def _failed(workers: Sequence[str], futures: Sequence[asyncio.Future[Any]]) -> list[GroupCallFailed]:
    return [
        GroupCallFailed(worker, error)
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


class Roles:
    """The model workers of a run, ``model_worker/0`` and so on. ``timeout_s`` bounds what one is asked for;
    ``trusted``: nobody else is on the network, so that workers may train together over it. ``numbers`` count the group
    calls of the run."""

    def __init__(self, spec: ExperimentSpec, caller: RpcMaster, *, timeout_s: float, trusted: bool = False) -> None:
        self._spec, self._caller, self._timeout_s, self._trusted = spec, caller, timeout_s, trusted
        self.numbers = itertools.count(1)
        self.workers = [_name(index) for index in range(spec.n_model_workers)]

    @property
    def parallel(self) -> Mapping[str, Parallel]:
        """How the workers of each role train together."""
        return {role: model.parallel for role, model in self._spec.models.items()}

    def of(self, role: str) -> list[str]:
        """The workers of a role; of one that trains on several, in the order of ranks. What one worker does for all,
        the first does."""
        model = self._spec.models[role]
        return [_name(i) for i in (sorted(model.workers) if model.parallel.size > 1 else model.workers)]

    def by_role(self) -> dict[str, list[str]]:
        """The workers of every role."""
        return {role: self.of(role) for role in self._spec.models}

    async def load(self) -> None:
        """Have every worker load its models. Those that compute together meet at the first of them. Raises RuntimeError
        when they are on several hosts, unless the network is trusted."""
        members = [_name(index) for index in self._spec.world]
        roster = {name: self._caller.roster[name] for name in members}
        hosts = {name: info.host for name, info in roster.items()}
        several_hosts = len({(info.host, info.machine) for info in roster.values()}) > 1
        if several_hosts and not self._trusted:
            on = ", ".join(f"{name} on {host}" for name, host in hosts.items())
            raise RuntimeError(
                f"workers that train together must be on one host (and in one network); they are {on}. What they send "
                "each other is neither encrypted nor authenticated: say network.trusted=true where nobody but the run "
                "is on the network between them"
            )
        world = token = ""
        if members:
            answer = await ask(
                self._caller, members[0], OPEN_WORLD, OpenWorldRequest(several_hosts), timeout_s=self._timeout_s
            )
            world, token = answer.address, secrets.token_hex(16)
        await self._of_all(INITIALIZE, [InitializeRequest(world, token)] * len(self.workers))

    async def gather_weights(self, role: str) -> None:
        """Bring the whole weights together on the first worker of a role whose model is cut over workers: it acts alone
        next."""
        if self._spec.models[role].parallel.fsdp > 1:
            await gather_weights(
                self._caller, self.numbers, role, self.of(role), everywhere=False, timeout_s=self._timeout_s
            )

    async def save(self, folder: Path) -> list[SavedFile]:
        """Have every worker write its state below ``folder``; return what they wrote. Each has a folder of its own
        there, and a role whose workers train together has one for all of them."""
        answers = await self._of_all(SAVE, [self._request(worker, folder) for worker in self.workers])
        return [file for answer in answers for file in answer.files]

    async def restore(self, folder: Path) -> None:
        """Have every worker read its state, from where it lies: a checkpoint may have been made by other workers."""
        await self._of_all(RESTORE, [self._request(worker, folder) for worker in self.workers])

    async def _of_all(self, call: Call[Q, A], requests: Sequence[Q]) -> list[A]:
        """Send its request to every worker; return the answers. Raises the failure of the worker that failed by itself:
        those that compute together with it fail as well."""
        together = bool(self._spec.world)
        try:
            found = await ask_all(
                self._caller, self.workers, call, requests, together=together, timeout_s=self._timeout_s
            )
        except GroupCallFailed as failed:
            raise failed.cause from None
        return [call.unpack_answer(payload, worker) for worker, payload in zip(self.workers, found, strict=True)]

    def _request(self, worker: str, folder: Path) -> CheckpointRequest:
        own = folder / worker.replace("/", "-")
        roles = {}
        for role, model in self._spec.models.items():
            if model.trainable and worker in self.of(role):
                usual = folder / role if model.parallel.size > 1 else own / role
                roles[role] = str(usual if usual.is_dir() else role_folder(folder, role) or usual)
        return CheckpointRequest(roles, str(own))


def role_folder(checkpoint: Path, role: str) -> Path | None:
    """Where a checkpoint holds a role: below the folder of the one worker that trained it, or, where several did, in a
    folder of its own. None if it does not hold it."""
    together = checkpoint / role
    found: Sequence[Path] = [folder for folder in sorted(checkpoint.glob(f"model_worker-*/{role}")) if folder.is_dir()]
    return together if together.is_dir() else next(iter(found), None)


def _name(index: int) -> str:
    return f"model_worker/{index}"
