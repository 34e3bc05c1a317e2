"""Holds the parts of one server process, and the helpers that all routes share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from isal import isal_zlib
from starlette.requests import Request
from starlette.responses import Response

from realhf.trajectory.base.records import GroupRecord
from realhf.trajectory.base.refusal import invalid
from realhf.trajectory.http.auth import Tokens
from realhf.trajectory.http.config import ConfigError, TrajectoryConfig
from realhf.trajectory.http.metrics import Metrics
from realhf.trajectory.state import replays, views
from realhf.trajectory.state.engine import Engine
from realhf.trajectory.store.base import PayloadLost
from realhf.trajectory.store.open import open_store
from realhf.trajectory.wire.body_budget import BodyBudget
from realhf.trajectory.wire.offload import Offload

logger = logging.getLogger(__name__)


class Service:
    """Holds engine, parser process, tokens and metrics of one configuration."""

    def __init__(self, config: TrajectoryConfig) -> None:
        self.config = config
        self.tokens = Tokens(config)
        try:
            store = open_store(config.store, durable=config.durable)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.engine = Engine(store, config.state_options())
        self.offload = Offload()
        self.bodies = BodyBudget(config.all_bodies_bytes)
        self.metrics = Metrics(self.engine, self.bodies)
        self.ready = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Restore the state. Raises StoreFailure."""
        await self.engine.open()
        self.ready = True
        self.start(self.metrics.watch_loop())
        logger.info(
            "store %s: %d groups, step %d",
            self.engine.store.name,
            len(self.engine.state.groups),
            self.engine.state.run.step,
        )

    async def close(self) -> None:
        """Stop the work beside the requests, then close the engine and the parser process."""
        self.ready = False
        for task in list(self._tasks):
            task.cancel()
        await self.engine.close()
        await self.offload.close()

    async def latest(self) -> tuple[GroupRecord, bytes] | None:
        """Return the latest example and its bytes, or None if there is none, or none any more."""
        tried = None
        while (group := await self.engine.read(views.latest)) is not None and group.payload != tried:
            tried = group.payload
            try:
                [data] = await self.engine.store.read([tried])
            except PayloadLost:
                continue
            return group, data
        return None

    def start(self, work: Any) -> None:
        """Let a coroutine run to its end beside the requests."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.warning("%s: %s", task.get_name(), error)


def answer(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Make a JSON answer."""
    return Response(replays.encode_body(dict(body)), 200, dict(headers or {}), "application/json")


def idempotency(request: Request, body: bytes) -> tuple[str | None, str]:
    """Return key and fingerprint of a request. Raises Refusal 422 for a key that is too long."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None, ""
    if not 0 < len(key) <= replays.MAX_KEY_LENGTH:
        raise invalid(["header", "idempotency-key"], f"give 1 to {replays.MAX_KEY_LENGTH} characters")
    return key, f"{request.url.path} {len(body)} {isal_zlib.crc32(body):08x}"


def integer_header(request: Request, name: str) -> int | None:
    """Return an integer header, or None. Raises Refusal 422."""
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = int(text) if len(text) < 30 else None
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise invalid(["header", name], "Input should be a 64 bit integer", "int_parsing", text[:80])
    return value
