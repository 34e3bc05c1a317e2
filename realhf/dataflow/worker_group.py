"""The master's calls to workers: to one worker, to all ranks of a group call, or to all workers of
a model role.

A group call is a call that several workers compute together. Each of them gets the whole batch; the
backend divides it among them, and the master does not need to know how.
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
    caller: RpcMaster,
    worker: str,
    call: Call[Q, A],
    request: Q,
    *,
    timeout_s: float,
    step: int = -1,
    mfc: str = "",
) -> A:
    """Call a worker and return its answer.

    Raises the errors of ``RpcMaster.call``, and MessageError if the answer has another form than
    expected.
    """
    payload = call.pack(request)
    return call.unpack_answer(
        await caller.call(worker, call.name, payload, timeout_s=timeout_s, step=step, mfc=mfc),
        worker,
    )


ABORT_S = 5.0
"""Seconds that the ranks of a failed call get to abort. During this time one of them may report the
actual cause."""
TOLERANCE = 1e-5
"""Allowed relative difference of a statistic between two ranks, which may add the same numbers in
different orders."""
DURATION = "_seconds"
"""Name suffix of durations, which differ between ranks."""
DEVICE = "device_"
"""Name prefix of what a rank measured of its own device, which differs between ranks."""


class RanksDiffer(ValueError):
    """Error: two ranks of a group call reported different statistics."""


def is_group_call(mfc: MFCDef, parallel: Parallel) -> bool:
    """Return whether all workers of a role compute this call together.

    Training is always a group call. Inference is one for a model that is sharded over the workers
    (FSDP), but not for data-parallel copies. Generation never is.
    """
    if parallel.size == 1 or mfc.interface_type is InterfaceType.GENERATE:
        return False
    return parallel.fsdp > 1 or not mfc.interface_type.produces_keys


class GroupCallFailed(RuntimeError):
    """Error: a worker failed in a call to several workers. The message names the worker and the
    cause."""

    def __init__(self, worker: str, cause: BaseException) -> None:
        super().__init__(f"{worker}: {cause}")
        self.worker = worker
        self.cause = cause


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
    """Gather the full weights of a sharded role on each of its workers (``everywhere``) or on the
    first one. They are kept until they have been used and another call computes, or the role
    trains. Raises GroupCallFailed."""
    number = next(numbers)
    requests = [
        GatherRequest(role, GroupPart(number, i, len(workers)), everywhere)
        for i in range(len(workers))
    ]
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
    """Send each worker its request and return the payloads of their answers.

    The requests are sent without an await in between, so that all workers see the calls of several
    roles in the same order. ``together`` means that the workers compute together. Raises
    GroupCallFailed after cancelling the other calls.
    """
    payloads = [call.pack(request) for request in requests]
    futures = [
        caller.call(worker, call.name, payload, timeout_s=timeout_s, step=step, mfc=mfc)
        for worker, payload in zip(workers, payloads, strict=True)
    ]
    try:
        if (
            failed := await wait_for_first_failure(caller, workers, futures, together=together)
        ) is not None:
            raise failed
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def wait_for_first_failure(
    caller: RpcMaster,
    workers: Sequence[str],
    futures: Sequence[asyncio.Future[Any]],
    *,
    together: bool,
) -> GroupCallFailed | None:
    """Wait for the answers of all workers; return the first failure, or None when all have
    answered.

    If they compute ``together``, the failure of one leaves the others waiting for it, so they are
    asked to abort. The failure of a rank that failed by itself is then preferred over those of
    ranks that only lost their peers. This takes at most ``ABORT_S`` seconds, even when a rank is
    stuck.
    """
    await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    if together and _find_failures(workers, futures):
        reason = "another rank failed"
        aborts = [
            caller.call(worker, ABORT.name, ABORT.pack(AbortRequest(reason)), timeout_s=ABORT_S)
            for worker, future in zip(workers, futures, strict=True)
            if not future.done()
        ]
        await asyncio.wait([*futures, *aborts], timeout=ABORT_S)
        for abort in aborts:
            abort.cancel()
    failures = _find_failures(workers, futures)
    return min(failures, key=lambda failed: is_consequence(failed.cause)) if failures else None


def _find_failures(
    workers: Sequence[str], futures: Sequence[asyncio.Future[Any]]
) -> list[GroupCallFailed]:
    return [
        GroupCallFailed(worker, error)
        for worker, future in zip(workers, futures, strict=True)
        if future.done() and not future.cancelled() and (error := future.exception()) is not None
    ]


def is_consequence(error: BaseException) -> bool:
    """Return whether a rank failed only because another rank did."""
    return isinstance(error, RemoteError) and error.kind == CollectiveBroken.__name__


def check_agreement(stats: Sequence[Mapping[str, Any]], workers: Sequence[str]) -> None:
    """Raise RanksDiffer unless all ranks report the same statistics; durations and what they
    measured of their devices may differ."""
    for worker, others in zip(workers[1:], stats[1:], strict=True):
        for name in sorted({*stats[0], *others}):
            first = stats[0].get(name)
            other = others.get(name)
            is_own = name.endswith(DURATION) or name.startswith(DEVICE)
            if not is_own and not _is_close(first, other):
                raise RanksDiffer(f"{name} is {first} on {workers[0]} and {other} on {worker}")


def _is_close(first: Any, other: Any) -> bool:
    if isinstance(first, float) and isinstance(other, float):
        both_nan = math.isnan(first) and math.isnan(other)
        return both_nan or math.isclose(first, other, rel_tol=TOLERANCE, abs_tol=1e-9)
    return bool(first == other)


class Roles:
    """Model workers of a run (``model_worker/0`` and so on), by model role.

    ``timeout_s`` limits each call. ``trusted`` means that the network is private to the run, so
    that workers on several hosts may train together over it.
    """

    def __init__(
        self, spec: ExperimentSpec, caller: RpcMaster, *, timeout_s: float, trusted: bool = False
    ) -> None:
        self._spec = spec
        self._caller = caller
        self._timeout_s = timeout_s
        self._trusted = trusted
        self.numbers = itertools.count(1)
        """Iterator over the numbers of the run's group calls, which all workers make in the same
        order."""
        self.workers = [_worker_name(index) for index in range(spec.n_model_workers)]

    @property
    def parallel(self) -> Mapping[str, Parallel]:
        """The parallel layout of each role."""
        return {role: model.parallel for role, model in self._spec.models.items()}

    def workers_of(self, role: str) -> list[str]:
        """Return the workers of a role; if they train together, in the order of ranks.

        The first one does the work that a single worker does on behalf of all, such as exports.
        """
        model = self._spec.models[role]
        return [
            _worker_name(i)
            for i in (sorted(model.workers) if model.parallel.size > 1 else model.workers)
        ]

    def by_role(self) -> dict[str, list[str]]:
        """Return the workers of every role."""
        return {role: self.workers_of(role) for role in self._spec.models}

    async def load(self) -> None:
        """Have every worker load its models.

        Workers that compute together connect to the first of them. Raises RuntimeError if they are
        on several hosts and the network is not trusted.
        """
        members = [_worker_name(index) for index in self._spec.world]
        roster = {name: self._caller.roster[name] for name in members}
        hosts = {name: info.host for name, info in roster.items()}
        several_hosts = len({(info.host, info.machine) for info in roster.values()}) > 1
        if several_hosts and not self._trusted:
            worker_hosts = ", ".join(f"{name} on {host}" for name, host in hosts.items())
            raise RuntimeError(
                f"workers that train together must be on one host (and in one network); they are "
                f"{worker_hosts}. What they send "
                "each other is neither encrypted nor authenticated: set network.trusted=true if "
                "only the run uses the network between them"
            )
        world = token = ""
        if members:
            answer = await ask(
                self._caller,
                members[0],
                OPEN_WORLD,
                OpenWorldRequest(several_hosts),
                timeout_s=self._timeout_s,
            )
            world = answer.address
            token = secrets.token_hex(16)
        await self._ask_all(INITIALIZE, [InitializeRequest(world, token)] * len(self.workers))

    async def gather_weights(self, role: str) -> None:
        """Gather the full weights of a sharded role on its first worker, which then publishes,
        evaluates or exports alone. Does nothing for a role that is not sharded."""
        if self._spec.models[role].parallel.fsdp > 1:
            await gather_weights(
                self._caller,
                self.numbers,
                role,
                self.workers_of(role),
                everywhere=False,
                timeout_s=self._timeout_s,
            )

    async def save(self, folder: Path) -> list[SavedFile]:
        """Have every worker write its state below ``folder``; return the files.

        Each worker has a separate subfolder; a role whose workers train together has one subfolder
        for all of them.
        """
        answers = await self._ask_all(
            SAVE, [self._build_request(worker, folder) for worker in self.workers]
        )
        return [file for answer in answers for file in answer.files]

    async def restore(self, folder: Path) -> None:
        """Have every worker read its state. The checkpoint may have been written with a different
        assignment of workers."""
        await self._ask_all(
            RESTORE, [self._build_request(worker, folder) for worker in self.workers]
        )

    async def _ask_all(self, call: Call[Q, A], requests: Sequence[Q]) -> list[A]:
        """Send every worker its request; return the answers.

        If workers fail, raises the failure of the one that failed by itself, not of those that
        failed because they compute together with it.
        """
        together = bool(self._spec.world)
        try:
            payloads = await ask_all(
                self._caller,
                self.workers,
                call,
                requests,
                together=together,
                timeout_s=self._timeout_s,
            )
        except GroupCallFailed as failed:
            raise failed.cause from None
        return [
            call.unpack_answer(payload, worker)
            for worker, payload in zip(self.workers, payloads, strict=True)
        ]

    def _build_request(self, worker: str, folder: Path) -> CheckpointRequest:
        own_folder = folder / worker.replace("/", "-")
        roles = {}
        for role, model in self._spec.models.items():
            if model.trainable and worker in self.workers_of(role):
                default = folder / role if model.parallel.size > 1 else own_folder / role
                roles[role] = str(
                    default if default.is_dir() else find_role_folder(folder, role) or default
                )
        return CheckpointRequest(roles, str(own_folder))


def find_role_folder(checkpoint: Path, role: str) -> Path | None:
    """Return the folder of a role in a checkpoint; None if the checkpoint has none.

    It is below the folder of the worker that trained the role or, if several workers did, directly
    in the checkpoint.
    """
    shared = checkpoint / role
    own_folders = [
        folder for folder in sorted(checkpoint.glob(f"model_worker-*/{role}")) if folder.is_dir()
    ]
    return shared if shared.is_dir() else next(iter(own_folders), None)


def _worker_name(index: int) -> str:
    return f"model_worker/{index}"
