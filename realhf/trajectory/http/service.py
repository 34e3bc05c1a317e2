"""Service behind the HTTP routes: the state engine, the parser process, metrics, request body
models, and helpers shared by the routes.

Source: docs/reference/trajectory.md 2.3 to 2.6, 3.2, 3.9 to 3.11.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import psutil
from isal import isal_zlib
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat
from starlette.requests import Request
from starlette.responses import Response

from realhf.trajectory.http.auth import ROLES, Role
from realhf.trajectory.http.config import TrajectoryConfig
from realhf.trajectory.records import GroupRecord, invalid
from realhf.trajectory.state import registry, views
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.store.base import PayloadLost
from realhf.trajectory.store.open import open_store
from realhf.trajectory.wire.intake import MSGPACK_TYPES, Offload
from realhf.web.bodies import BodyBudget
from realhf.web.settings import SettingError

logger = logging.getLogger(__name__)


class TrajectoryService:
    """Engine, parser process and metrics of one server configuration."""

    def __init__(self, config: TrajectoryConfig) -> None:
        self.config = config
        try:
            store = open_store(config.store, durable=config.durable)
        except ValueError as error:
            raise SettingError(str(error)) from error
        self.engine = StateEngine(store, config)
        self.offload = Offload()
        self.bodies = BodyBudget(config.all_bodies_bytes)
        self.metrics = Metrics(self.engine, self.bodies)
        self.ready = False
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Restore the state. Raises StoreFailure."""
        await self.engine.open()
        self.ready = True
        self._watch = asyncio.create_task(self.metrics.watch_loop())
        logger.info(
            "store %s: %d groups, step %d",
            self.engine.store.name,
            len(self.engine.state.groups),
            self.engine.state.run.step,
        )

    async def close(self) -> None:
        """Stop background work, then close the engine and the parser process."""
        self.ready = False
        if self._watch is not None:
            self._watch.cancel()
        await self.engine.close()
        await self.offload.close()

    async def latest(self) -> tuple[GroupRecord, bytes] | None:
        """Return the latest group and its bytes; None if there is no such group, or if its bytes
        are lost."""
        tried = None
        while (
            group := await self.engine.read(views.latest)
        ) is not None and group.payload != tried:
            tried = group.payload
            try:
                [data] = await self.engine.store.read([tried])
            except PayloadLost:
                continue
            return group, data
        return None


def answer(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(registry.encode_body(dict(body)), 200, dict(headers or {}), "application/json")


def accepts_msgpack(request: Request) -> bool:
    """Return whether the client wants MessagePack."""
    kinds = request.headers.get("accept", "").lower()
    return any(kind in kinds for kind in MSGPACK_TYPES)


def may_reset(service: TrajectoryService, request: Request) -> bool:
    """Return whether the client may end the current run."""
    resets = service.config.resets
    return resets == "open" or (resets == "token" and Role.ADMIN in request.scope[ROLES])


def idempotency(request: Request, body: bytes) -> tuple[str | None, str]:
    """Return the idempotency key of a request (None if it has none) and the request's fingerprint.
    Raises Refusal 422 for an empty or too long key."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None, ""
    if not 0 < len(key) <= registry.MAX_KEY_LENGTH:
        raise invalid(
            ["header", "idempotency-key"], f"give 1 to {registry.MAX_KEY_LENGTH} characters"
        )
    return key, f"{request.url.path} {len(body)} {isal_zlib.crc32(body):08x}"


def integer_header(request: Request, name: str) -> int | None:
    """Return the value of an integer header, or None without the header. Raises Refusal 422 if it
    is not an integer."""
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = int(text) if len(text) < 30 else None
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise invalid(
            ["header", name], "Input should be a 64 bit integer", "int_parsing", text[:80]
        )
    return value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""String that can be encoded as UTF-8. JSON may contain half of a surrogate pair, which cannot be
sent in an answer or stored."""


class Registration(BaseModel):
    """Registration of a trainer and its run. ``batch_size`` is in sequences, lengths are in
    tokens."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Int64
    max_token_len: Int64
    checkpoint_dir: Text
    save_checkpoint_interval: Int64
    starting_step: Int64
    num_steps: Int64
    max_staleness: Int64 | None = Field(
        None, description="policy versions a group may lie behind (null: no bound)"
    )
    trainer_id: Text | None = Field(None, description="a name of the trainer's own, for logs")


class RegisterEnv(BaseModel):
    """Registration of a rollout handler. ``group_size`` is in sequences, ``min_batch_allocation`` a
    fraction of every batch."""

    max_token_length: Int64
    desired_name: Text
    weight: FiniteFloat
    group_size: Int64
    min_batch_allocation: FiniteFloat | None = None


class EnvIdentifier(BaseModel):
    """The id of a registered environment."""

    env_id: Int64


class PolicyVersion(BaseModel):
    """Version of the weights with which rollouts are sampled from now on."""

    version: Int64


class Lease(BaseModel):
    """Reference to a batch by its ``X-Lease-Id``."""

    lease_id: Text


class Requeue(BaseModel):
    """Groups to move from quarantine to the tail of the queue."""

    ids: list[Int64]


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64)
_LAG_EVERY_S = 0.1
_COUNTERS = (
    "pushed_groups", "pushed_sequences", "formed", "redelivered", "acked", "nacked", "responses_lost", "refused_full",
    "replayed", "resets", "continued", "store_losses", "replays_forgotten_early",
)  # fmt: skip
"""Counters of ``TrajectoryState`` that are each exported as a metric."""


class Metrics(Collector):
    """Prometheus metrics: request latency by kind, event-loop lag, and values read from the
    engine's state."""

    def __init__(self, engine: StateEngine, bodies: BodyBudget) -> None:
        self._engine, self._bodies, self._process = engine, bodies, psutil.Process()
        self._registry = CollectorRegistry()
        self._latency = Histogram(
            "trajectory_request_seconds",
            "time to answer",
            ["kind"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._staleness = Histogram(
            "trajectory_staleness_versions",
            "policy versions a delivered group lay behind",
            buckets=_VERSIONS,
            registry=self._registry,
        )
        self._unavailable = Counter(
            "trajectory_unavailable", "answers with status 503", registry=self._registry
        )
        self._lag = Gauge(
            "trajectory_event_loop_lag_seconds",
            "largest delay of the event loop since the last scrape",
            registry=self._registry,
        )
        self._registry.register(self)
        self._worst_lag = 0.0

    @contextmanager
    def time_request(self, kind: str) -> Iterator[None]:
        """Context manager that measures the duration of one request of this kind."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._latency.labels(kind).observe(time.perf_counter() - began)

    def count_delivered(self, behind: int) -> None:
        """Count a delivered group; ``behind`` is its age in policy versions."""
        self._staleness.observe(behind)

    def count_unavailable(self) -> None:
        """Count an answer with HTTP status 503."""
        self._unavailable.inc()

    async def watch_loop(self) -> None:
        """Measure the event loop's delay repeatedly, until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self._worst_lag = max(self._worst_lag, time.perf_counter() - began - _LAG_EVERY_S)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus exposition format."""
        self._lag.set(max(0.0, self._worst_lag))
        self._worst_lag = 0.0
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the current state."""
        state = self._engine.state
        counters = self._engine.state.counters
        buffered = {env_id: len(held) for env_id, held in state.buffers.items()}
        yield self._by_env("queue_groups", "groups queued", state.queue.env_groups())
        yield self._by_env("queue_sequences", "sequences queued", state.queue.env_sequences())
        yield self._by_env("buffered_groups", "groups in the mix buffer", buffered)
        reasons = Tally(group.reason for group in state.quarantine.values())
        yield _labelled_family(
            GaugeMetricFamily, "quarantined_groups", "groups in quarantine", "reason", reasons
        )
        gauges = {
            "queue_bytes": state.queue.nbytes,
            "held_bytes": state.waiting_bytes,
            "leases": len(state.leases),
            "step": state.run.step,
            "epoch": state.run.epoch,
            "environments": len(state.envs),
            "quarantine_bytes": state.quarantine_bytes,
            "resident_bytes": self._process.memory_info().rss,
            "body_bytes": self._bodies.used_bytes,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"trajectory_{name}", name.replace("_", " "), value=value)
        for name in _COUNTERS:
            yield CounterMetricFamily(
                f"trajectory_{name}", name.replace("_", " "), value=counters[name]
            )
        yield CounterMetricFamily(
            "trajectory_bodies_refused",
            "bodies beyond the budget",
            value=self._bodies.refused_count,
        )
        nulls = {
            name.removeprefix("null:"): value
            for name, value in counters.items()
            if name.startswith("null:")
        }
        yield _labelled_family(
            CounterMetricFamily, "null_batches", "pulls without a batch", "reason", nulls
        )

    def _by_env(self, name: str, about: str, values: Mapping[int | None, int]) -> Metric:
        """Build a gauge of the values summed by environment name; the label "none" stands for
        groups of an unknown environment."""
        envs = self._engine.state.envs
        by_name = Tally[str]()
        for env_id, value in values.items():
            by_name[envs[env_id].name if env_id in envs else "none"] += value
        return _labelled_family(GaugeMetricFamily, name, about, "env", by_name)


def _labelled_family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    label: str,
    values: Mapping[str, int],
) -> Metric:
    family = kind(f"trajectory_{name}", about, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family
