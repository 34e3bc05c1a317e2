"""What rollout workers and the stream ask the master: ``allocate``, ``rejected``, ``evaluated``, ``arrived``,
``stopped``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from realhf.api.calls import (
    ALLOCATE,
    ARRIVED,
    EVALUATED,
    REJECTED,
    STOPPED,
    AllocateAnswer,
    AllocateRequest,
    ArrivedAnswer,
    ArrivedRequest,
    EvaluatedRequest,
    Nothing,
    RejectedRequest,
)
from realhf.dataflow.rollouts.control import RolloutControl
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.service.server import LoopServiceServer, Request

MAX_LEASES = 4096
MAX_HOLD_S = 60.0


class RolloutService:
    """Listens for requests and answers them on the running loop, each in a task of its own. A request that makes no
    sense is told so; what goes wrong with any other ends the run."""

    def __init__(self, control: RolloutControl, run_id: str, network: Network = LOOPBACK) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = LoopServiceServer("the master's rollout control", run_id, self._begin, network=network)
        self.endpoint = self._server.endpoint

    async def close(self) -> None:
        """Requests that wait are not answered any more."""
        for task in self._tasks:
            task.cancel()
        await self._server.close()

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        try:
            answer = self._understood(request.client, request.method, request.payload)
        except ValueError as error:
            request.fail(error)
            return
        try:
            request.reply(await answer())
        except Exception as error:
            request.fail(error)
            self._control.fail(error)

    def _understood(self, client: str, method: str, payload: Any) -> Callable[[], Awaitable[Any]]:
        """What answers the request. Raises ValueError for one that makes no sense."""
        if method == ALLOCATE.name:
            return partial(self._allocate, client, ALLOCATE.unpack(payload))
        if method == ARRIVED.name:
            return partial(self._arrived, client, ARRIVED.unpack(payload))
        if method == REJECTED.name:
            return partial(self._rejected, client, REJECTED.unpack(payload))
        if method == EVALUATED.name:
            return partial(self._evaluated, client, EVALUATED.unpack(payload))
        if method == STOPPED.name:
            return partial(self._stopped, client)
        raise ValueError(f"there is no request {method!r}")

    async def _allocate(self, client: str, request: AllocateRequest) -> Any:
        count = max(1, min(request.count, MAX_LEASES))
        leases, parts = await self._control.allocate(client, count, min(request.hold_s, MAX_HOLD_S))
        return ALLOCATE.pack_answer(AllocateAnswer(leases, parts))

    async def _arrived(self, client: str, request: ArrivedRequest) -> Any:
        return ARRIVED.pack_answer(ArrivedAnswer(await self._control.arrived(request.arrivals, client)))

    async def _rejected(self, client: str, request: RejectedRequest) -> Any:
        self._control.rejected(client, request.id, request.attempt, request.outcome, request.message)
        return REJECTED.pack_answer(Nothing())

    async def _evaluated(self, client: str, request: EvaluatedRequest) -> Any:
        self._control.evaluated(client, request)
        return EVALUATED.pack_answer(Nothing())

    async def _stopped(self, client: str) -> Any:
        self._control.worker_stopped(client)
        return STOPPED.pack_answer(Nothing())
