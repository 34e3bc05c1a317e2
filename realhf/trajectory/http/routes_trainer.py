"""Endpoints for trainers (register, pull, acknowledge), and the report of whether a batch was sent
or lost.

Source: docs/reference/trajectory.md 2.3, 2.8, 3.9, 3.10.

The report is queued just before the final, empty chunk of the response, when all earlier chunks
have left the process. The client therefore cannot send its next request before the report takes
effect, and if the process is killed before the report, the batch is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from realhf.trajectory.http.auth import cookie_name, new_cookie
from realhf.trajectory.http.service import (
    Lease,
    PolicyVersion,
    Registration,
    TrajectoryService,
    accepts_msgpack,
    answer,
    idempotency,
    may_reset,
)
from realhf.trajectory.records import PAYLOAD_LOST, invalid
from realhf.trajectory.state import delivery, registry
from realhf.trajectory.state.delivery import LeasedBatch, NoBatch, PullRequest
from realhf.trajectory.store.base import PayloadLost
from realhf.trajectory.wire.encode import encode_batch
from realhf.trajectory.wire.intake import MSGPACK_TYPES
from realhf.web.bodies import BODY
from realhf.web.refusal import Refusal

logger = logging.getLogger(__name__)
DRAINED = "trajectory.drained"
"""Key in an ASGI scope; true if a batch counts as sent only once it has left the process."""
_NOT_REGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


def router(service: TrajectoryService) -> APIRouter:
    """Return a router with the trainer endpoints of ``service``."""
    routes = APIRouter(tags=["trainers"])
    engine = service.engine

    @routes.post("/register")
    async def register(registration: Registration, request: Request) -> Response:
        """Start a run, or continue the one of the same group, project and batch size. Another run
        is replaced. ``X-Join: 1`` joins any run, ``X-Reset: 1`` always starts a new one."""
        key, fingerprint = idempotency(request, request.scope.get(BODY, b""))
        join, force_new = (request.headers.get(name) == "1" for name in ("x-join", "x-reset"))
        if join and force_new:
            raise invalid(["header", "x-reset"], "X-Join and X-Reset contradict each other")
        options = (
            registration.model_dump(),
            join,
            may_reset(service, request),
            force_new,
            _identity(request),
        )
        (body, headers), _ = await engine.write(
            registry.run_once, key, fingerprint, registry.register, *options
        )
        return answer(body, headers | new_cookie(request))

    @routes.get("/batch")
    async def batch(request: Request) -> Response:
        """Return the next batch, or null and the reason in ``X-Batch-Reason``."""
        with service.metrics.time_request("pull"):
            if not request.scope.get(DRAINED):
                raise Refusal(
                    501,
                    "this ASGI server does not tell when a batch has left it: use run-api, or "
                    "uvicorn",
                )
            await engine.read(registry.check_epoch, request.headers.get("x-epoch"))
            pulled = await engine.write(delivery.pull, _pull_request(request))
            if isinstance(pulled, NoBatch):
                body = _NOT_REGISTERED if pulled.unregistered else {"batch": None}
                cookie = {} if pulled.holding else new_cookie(request)
                return answer(body, {"X-Batch-Reason": pulled.reason} | cookie)
            try:
                return await _respond(service, request, pulled)
            except (
                PayloadLost
            ) as error:  # one batch at a time: whoever asks again gets the next one
                logger.error("step %d: %s; these groups go to quarantine", pulled.step, error)
                await engine.write(delivery.isolate_lost, pulled, error.refs)
                return answer({"batch": None}, {"X-Batch-Reason": PAYLOAD_LOST})

    @routes.post("/batch/ack")
    async def ack(lease: Lease) -> Response:
        """Acknowledge a consumed batch and delete it. 404: unknown lease; 409: the batch has since
        been delivered to another trainer."""
        return answer(await engine.write(delivery.ack, lease.lease_id))

    @routes.post("/batch/nack")
    async def nack(lease: Lease) -> Response:
        """Give a batch back; the next trainer that pulls gets it."""
        return answer(await engine.write(delivery.nack, lease.lease_id))

    @routes.post("/batch/renew")
    async def renew(lease: Lease) -> Response:
        """Extend the lease of a batch by another timeout."""
        return answer(await engine.write(delivery.renew, lease.lease_id))

    @routes.post("/policy_version")
    async def policy_version(policy: PolicyVersion) -> Response:
        """Set the version of the weights with which rollouts are sampled."""
        return answer(await engine.write(registry.set_policy_version, policy.version))

    return routes


def _name(request: Request) -> str | None:
    return request.headers.get("x-trainer-id") or request.query_params.get("trainer_id")


def _identity(request: Request) -> str:
    """Return the client's name, under which its leases are held."""
    cookie = cookie_name(request)
    peer = request.client.host if request.client else "unknown"
    return _name(request) or (f"cookie {cookie}" if cookie else f"peer {peer}")


def _pull_request(request: Request) -> PullRequest:
    return PullRequest(
        _identity(request),
        anonymous=not _name(request),
        ack=request.headers.get("x-ack"),
        explicit=request.headers.get("x-ack-mode", "").lower() == "explicit",
    )


async def _respond(
    service: TrajectoryService, request: Request, batch: LeasedBatch
) -> BatchResponse:
    """Read and encode a leased batch. If that fails, the batch is given back."""
    msgpack, coding = _accepted_encoding(request)
    try:
        payloads = [group.payload for group in batch.groups]
        data = await service.engine.store.read(payloads)
        pieces, used = await encode_batch(
            payloads, data, msgpack=msgpack, coding=coding, level=service.config.gzip_level
        )
    except PayloadLost:
        raise
    except BaseException:
        service.engine.write_until_kept(delivery.mark_lost, batch)
        raise
    oldest, newest = batch.versions
    if not batch.redelivered:
        for group in batch.groups:
            service.metrics.count_delivered(
                service.engine.state.run.current_version - group.policy_version
            )
    headers = {
        "Content-Type": MSGPACK_TYPES[0] if msgpack else "application/json",
        "X-Lease-Id": batch.lease_id,
        "X-Batch-Step": str(batch.step),
        "X-Min-Policy-Version": str(oldest),
        "X-Max-Policy-Version": str(newest),
        "X-Epoch": str(batch.epoch),
        "X-Redelivered": "1" if batch.redelivered else "0",
        "Vary": "Accept-Encoding, Accept",
    } | ({"Content-Encoding": used} if used else {})

    def report(sent: bool) -> None:
        service.engine.write_until_kept(delivery.mark_sent if sent else delivery.mark_lost, batch)

    return BatchResponse(pieces, headers, report)


def _accepted_encoding(request: Request) -> tuple[bool, str]:
    """Return (whether the client accepts MessagePack, the content coding to use for it)."""
    codings = request.headers.get("accept-encoding", "").lower()
    msgpack = accepts_msgpack(request)
    if msgpack and "zstd" in codings:
        return True, "zstd"
    return msgpack, "gzip" if "gzip" in codings else ""


_MIN_BYTES = 64 << 10
"""Minimum bytes of one write; smaller pieces are joined first."""


class BatchResponse(Response):
    """ASGI response that carries a batch. ``report(sent)`` is called exactly once; it must not
    block, so it may only queue its work."""

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        headers: Mapping[str, str],
        report: Callable[[bool], None],
    ) -> None:
        self.background = None
        self._pieces = pieces
        self._headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
        ]
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces, then report."""
        disconnected = asyncio.ensure_future(_until_gone(receive))
        sent = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            for piece in _merge_pieces(self._pieces):
                if disconnected.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            await asyncio.sleep(0)
            sent = not disconnected.done()
        finally:
            disconnected.cancel()
            self._report(sent)
        if sent:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        with suppress(asyncio.CancelledError):
            await disconnected


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _merge_pieces(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Join small pieces, and yield large ones unchanged."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= _MIN_BYTES:
            yield waiting[0] if len(waiting) == 1 else b"".join(waiting)
            waiting = []
            size = 0
    if waiting:
        yield b"".join(waiting)
