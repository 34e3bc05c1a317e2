"""Broadcasts of weights from the trainer's GPU to groups of generation workers.

A load of a version waits for those of the other workers that have asked for it. All of them are a
group: the master gives each a seat, and asks the trainer and them at the same time. The trainer and
the servers keep a group whose members have not changed. A worker that asks later is a group by
itself, if the trainer still has the version.

The task of a round
  produces: the answers of all members, or an error for each;
  waits for: the trainer's answer, then those of the members;
  unblocked by: those answers, the deaths of the members, and the timeout of the calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass

from realhf.api.calls import (
    GROUP_PLACE,
    START_BROADCAST,
    STOP_BROADCAST,
    UPDATE_WEIGHTS,
    Nothing,
    StartBroadcastRequest,
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.api.generation import GroupSeat, WeightsManifest
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RemoteError, RpcError
from realhf.transport.rpc_master import RpcMaster

_log = logging.getLogger(__name__)
GROUP_MEDIUM = "nccl"
"""Medium of weights that are sent by broadcast."""
JOIN_S = 60.0
"""Seconds that a group gets in addition to the time for its bytes: to be joined, and to pause."""
SLOWEST_BYTES_PER_S = 1e9
"""Bytes per second below which a broadcast counts as stuck."""
PLACE_S = 1.0
"""Seconds that a round waits for workers which have not said yet how many ranks they need."""
_POLL_S = 0.01
"""Seconds between two looks whether they have."""


class GroupLoadError(RpcError):
    """Error: a broadcast did not reach a worker, which takes the next one."""


class NoGroup(GroupLoadError):
    """Error: a worker cannot take part in broadcasts at all."""


class NotOffered(GroupLoadError):
    """Error: the trainer does not have the version any more."""


def compute_broadcast_timeout_s(nbytes: int) -> float:
    """Return the seconds after which a broadcast of this size counts as failed."""
    return JOIN_S + nbytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True)
class _Load:
    """A worker that waits for a version."""

    worker: str
    """Name of the worker."""
    manifest: WeightsManifest
    """The version."""
    done: asyncio.Future[UpdateWeightsAnswer]
    """Its answer or error."""


class GroupLoads:
    """The master's side of broadcasts. ``timeout_s`` bounds each call, in addition to the time
    that the broadcast itself gets."""

    def __init__(self, caller: RpcMaster, trainer: str, *, timeout_s: float) -> None:
        self._caller = caller
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._ranks: dict[str, int] = {}
        """Number of ranks of each worker's engine."""
        self._lives: defaultdict[str, int] = defaultdict(int)
        """Number of processes that a name belonged to before, so that a successor is no member."""
        self._waiting: list[_Load] = []
        self._placing = 0
        """Number of workers that are being asked for their places."""
        self._rounds: asyncio.Task[None] | None = None
        self.groups_formed = 0
        """Number of groups that were joined."""

    def forget(self, worker: str) -> None:
        """Forget a worker that has left. Its successor is another member."""
        self._ranks.pop(worker, None)
        self._lives[worker] += 1

    async def load(self, worker: str, manifest: WeightsManifest) -> UpdateWeightsAnswer:
        """Have a worker load a version by a broadcast. Raises GroupLoadError, and RpcError if the
        worker has died or does not answer."""
        self._placing += 1
        try:
            await self._find_place(worker)
        finally:
            self._placing -= 1
        done: asyncio.Future[UpdateWeightsAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Load(worker, manifest, done))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run_rounds(), name="broadcasts of weights")
        return await done

    async def close(self) -> None:
        """Cancel all loads, and the calls of the current round."""
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)
        for load in self._waiting:
            load.done.cancel()
        self._waiting = []

    async def _find_place(self, worker: str) -> None:
        """Learn how many ranks a worker needs. Raises NoGroup."""
        if worker in self._ranks:
            await asyncio.sleep(0)  # let the other loads of this version begin
            return
        answer = await ask(self._caller, worker, GROUP_PLACE, Nothing(), timeout_s=self._timeout_s)
        if answer.ranks < 1:
            raise NoGroup(f"{worker} takes no weights over NCCL: its engine {answer.reason}")
        self._ranks[worker] = answer.ranks

    async def _run_rounds(self) -> None:
        while self._waiting:
            await self._wait_for_places()
            first = self._waiting[0].manifest
            loads = [load for load in self._waiting if load.manifest is first]
            self._waiting = [load for load in self._waiting if load.manifest is not first]
            present = [
                load for load in loads if not load.done.done() and load.worker in self._ranks
            ]
            try:
                if present:
                    await self._run_round(sorted(present, key=lambda load: load.worker))
            except Exception as error:
                # An error here must not keep the other versions waiting for ever.
                _log.exception("a broadcast of weights failed")
                await self._stop(present[0].worker)
                _fail(loads, GroupLoadError(f"a broadcast failed: {type(error).__name__}: {error}"))
            finally:
                for load in loads:
                    if not load.done.done():
                        load.done.set_exception(GroupLoadError(f"{load.worker} has left the group"))

    async def _wait_for_places(self) -> None:
        """Let all loads of a version begin, but do not wait long for a worker that does not
        answer: it is a group by itself later."""
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        until = loop.time() + PLACE_S
        while self._placing and loop.time() < until:
            await asyncio.sleep(_POLL_S)

    async def _run_round(self, loads: list[_Load]) -> None:
        """Send one version to the workers of ``loads``."""
        manifest = loads[0].manifest
        limit_s = compute_broadcast_timeout_s(manifest.nbytes)
        # A worker may be forgotten while the trainer answers.
        ranks = [self._ranks[load.worker] for load in loads]
        lives = [self._lives[load.worker] for load in loads]
        world_size = 1 + sum(ranks)
        members = [f"{load.worker}.{life}" for load, life in zip(loads, lives, strict=True)]
        request = StartBroadcastRequest(
            manifest.version, manifest.trial, members, world_size, limit_s
        )
        try:
            start = await ask(
                self._caller, self._trainer, START_BROADCAST, request, timeout_s=self._timeout_s
            )
        except RpcError as error:
            _fail(loads, GroupLoadError(f"the trainer could not start to send weights: {error}"))
            return
        if not start.offered:
            text = f"the trainer has begun to change version {manifest.version}"
            _fail(loads, NotOffered(text))
            return
        gone = [
            load.worker
            for load, life in zip(loads, lives, strict=True)
            if self._lives[load.worker] != life
        ]
        if gone:
            # The others would wait for a rank that never comes, and could not be called back.
            await self._stop(gone[0])
            _fail(loads, GroupLoadError(f"{gone[0]} left before the group was formed"))
            return
        self.groups_formed += bool(start.unique_id)
        calls: dict[asyncio.Task[UpdateWeightsAnswer], _Load] = {}
        rank = 1
        for load, size in zip(loads, ranks, strict=True):
            seat = GroupSeat(start.unique_id, rank, world_size, start.pack_bytes, limit_s)
            rank += size
            calls[asyncio.create_task(self._update(load, seat, 2 * limit_s))] = load
        try:
            await self._settle_calls(calls)
        finally:
            for call in calls:
                call.cancel()

    async def _settle_calls(self, calls: dict[asyncio.Task[UpdateWeightsAnswer], _Load]) -> None:
        """Give each worker's answer to whoever waits for it. End the group at the first error."""
        stopped = False
        pending = set(calls)
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in ended:
                failed = _settle(calls[call], call)
                if failed and not stopped:
                    # NCCL would wait for the dead one; the others notice by their own deadline.
                    stopped = True
                    await self._stop(calls[call].worker)

    async def _update(self, load: _Load, seat: GroupSeat, limit_s: float) -> UpdateWeightsAnswer:
        return await ask(
            self._caller,
            load.worker,
            UPDATE_WEIGHTS,
            UpdateWeightsRequest(load.manifest, seat),
            timeout_s=self._timeout_s + limit_s,
        )

    async def _stop(self, worker: str) -> None:
        try:
            answer = await ask(
                self._caller, self._trainer, STOP_BROADCAST, Nothing(), timeout_s=self._timeout_s
            )
        except RpcError as error:
            _log.warning("the trainer did not end a group: %s", error)
            return
        cause = f" (the trainer: {answer.error})" if answer.error else ""
        _log.warning("a broadcast of weights did not reach %s%s; the group ends", worker, cause)


def _fail(loads: list[_Load], error: GroupLoadError) -> None:
    for load in loads:
        if not load.done.done():
            load.done.set_exception(error)


def _settle(load: _Load, call: asyncio.Task[UpdateWeightsAnswer]) -> bool:
    """Give a worker's answer or error to whoever waits for it. Return whether it is an error."""
    error = call.exception()
    if error is None:
        if not load.done.done():
            load.done.set_result(call.result())
        return False
    if isinstance(error, RemoteError) and error.kind == "BroadcastError":
        error = GroupLoadError(f"{load.worker}: {error.message}")
    if not load.done.done():
        load.done.set_exception(error)
    return True
