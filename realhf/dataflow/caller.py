"""How the master's code calls workers: typed, through whatever carries the calls."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, TypeVar

from realhf.base.messages import Call, Message
from realhf.transport.rpc.roster import WorkerInfo

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Caller(Protocol):
    """The part of ``RpcMaster`` that the brain uses."""

    roster: dict[str, WorkerInfo]

    def call(
        self,
        worker: str,
        handler: str,
        payload: Any = None,
        *,
        timeout_s: float,
        step: int = -1,
        mfc: str = "",
    ) -> asyncio.Future[Any]:
        """Send a request to ``handler`` of ``worker`` and return what answers it."""
        ...


async def ask(
    caller: Caller, worker: str, call: Call[Q, A], request: Q, *, timeout_s: float, step: int = -1, mfc: str = ""
) -> A:
    """The worker's answer. Raises what ``RpcMaster.call`` does, or MessageError for an answer of another form."""
    payload = call.pack(request)
    return call.unpack_answer(
        await caller.call(worker, call.name, payload, timeout_s=timeout_s, step=step, mfc=mfc), worker
    )
