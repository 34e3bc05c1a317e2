"""What rollout workers and the stream ask the master: ``allocate``, ``rejected``, ``arrived``, ``stopped``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from realhf.api.streaming import Arrival
from realhf.dataflow.rollouts.control import RolloutControl
from realhf.transport.service.loop import LoopServiceServer
from realhf.transport.service.server import Request

MAX_LEASES = 4096
MAX_HOLD_S = 60.0


class RolloutService:
    """Listens for requests and answers them on the running loop, each in a task of its own. A request that makes no
    sense is told so; what goes wrong with any other ends the run."""

    def __init__(self, control: RolloutControl, run_id: str) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = LoopServiceServer("the master's rollout control", run_id, self._begin)
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
        except (ValueError, KeyError, TypeError) as error:
            request.fail(error)
            return
        try:
            request.reply(await answer())
        except Exception as error:
            request.fail(error)
            self._control.fail(error)

    def _understood(self, client: str, method: str, fields: Mapping[str, Any]) -> Callable[[], Awaitable[Any]]:
        """What answers the request. Raises ValueError, KeyError or TypeError for one that makes no sense."""
        if method == "allocate":
            count = max(1, min(int(fields["count"]), MAX_LEASES))
            return partial(self._allocate, client, count, min(float(fields["hold_s"]), MAX_HOLD_S))
        if method == "arrived":
            return partial(self._control.arrived, [Arrival.from_map(entry) for entry in fields["arrivals"]])
        if method == "rejected":
            words = str(fields["outcome"]), str(fields["message"])
            return partial(self._rejected, client, str(fields["id"]), int(fields["attempt"]), *words)
        if method == "stopped":
            return partial(self._stopped, client)
        raise ValueError(f"there is no request {method!r}")

    async def _allocate(self, client: str, count: int, hold_s: float) -> list[dict[str, Any]] | None:
        leases = await self._control.allocate(client, count, hold_s)
        return None if leases is None else [lease.to_map() for lease in leases]

    async def _rejected(self, client: str, sample_id: str, attempt: int, outcome: str, message: str) -> None:
        self._control.rejected(client, sample_id, attempt, outcome, message)

    async def _stopped(self, client: str) -> None:
        self._control.worker_stopped(client)
