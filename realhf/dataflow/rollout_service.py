"""What rollout workers and the stream ask the master: ``allocate``, ``rejected``, ``arrived``, ``stopped``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from realhf.api.arrival import Arrival
from realhf.dataflow.rollout_control import RolloutControl
from realhf.transport.service_server import Request, ServiceServer

MAX_LEASES = 4096
MAX_HOLD_S = 60.0


class RolloutService:
    """Listens for requests and answers them on the running loop, each in a task of its own."""

    def __init__(self, control: RolloutControl, run_id: str) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = ServiceServer("the master's rollout control", run_id, self._on_request)
        self.endpoint = self._server.endpoint

    async def close(self) -> None:
        """Requests that wait are not answered any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._server.close)

    def _on_request(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._begin, request)

    def _begin(self, request: Request) -> None:
        task = self._loop.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        try:
            request.reply(await self._handle(request.client, request.method, request.payload))
        except Exception as error:
            request.fail(error)
            if not isinstance(error, (ValueError, KeyError, TypeError)):
                self._control.fail(error)

    async def _handle(self, client: str, method: str, fields: Mapping[str, Any]) -> Any:
        if method == "allocate":
            count = max(1, min(int(fields["count"]), MAX_LEASES))
            leases = await self._control.allocate(client, count, min(float(fields["hold_s"]), MAX_HOLD_S))
            return None if leases is None else [lease.to_map() for lease in leases]
        if method == "arrived":
            return await self._control.arrived([Arrival.from_map(entry) for entry in fields["arrivals"]])
        if method == "rejected":
            self._control.rejected(client, str(fields["id"]), int(fields["attempt"]), str(fields["outcome"]),
                                   str(fields["message"]))  # fmt: skip
        elif method == "stopped":
            self._control.worker_stopped(client)
        else:
            raise ValueError(f"there is no request {method!r}")
        return None
