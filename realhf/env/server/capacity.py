"""Leases of slots to sessions and requests, and the metrics of the environment server.

WebSocket sessions and stateless HTTP requests lease slots from the same set, so that neither takes
a slot that the other holds. Source: docs/reference/environment.md 2.2, 2.3.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from realhf.env.server import wire
from realhf.env.server.interfaces import SlotPool
from realhf.web.refusal import Refusal

_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class _PoolCollector(Collector):
    """Prometheus collector of the pool's own metrics, which are read when ``/metrics`` is
    requested."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], about: str, label: str) -> None:
        self._read = read
        self._about = about
        self._label = label

    def collect(self) -> Iterable[Metric]:
        """Yield a gauge for every metric of the pool."""
        for name, value in self._read().items():
            split = isinstance(value, Mapping)
            family = GaugeMetricFamily(
                f"realhf_env_pool_{name}",
                f"{self._about}: {name.replace('_', ' ')}",
                labels=[self._label] if split else [],
            )
            for label, number in value.items() if split else [(None, value)]:
                family.add_metric([] if label is None else [label], number)
            yield family


class ServerMetrics:
    """Metrics of one server process.

    ``read_pool`` returns the pool's metrics by name; a value that is a map has one number per value
    of the label ``label``. ``about``: what the pool holds.
    """

    def __init__(
        self, read_pool: Callable[[], Mapping[str, Any]], about: str = "pool", label: str = "rule"
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(read_pool, about, label))
        self.sessions_active = Gauge(
            "realhf_env_sessions_active", "open sessions", registry=self._registry
        )
        self.sessions_opened = Counter(
            "realhf_env_sessions_opened", "accepted sessions", registry=self._registry
        )
        self.sessions_rejected = Counter(
            "realhf_env_sessions_rejected", "sessions refused for capacity", registry=self._registry
        )
        self.sessions_reaped = Counter(
            "realhf_env_sessions_reaped", "idle sessions closed", registry=self._registry
        )
        self.sessions_unused = Counter(
            "realhf_env_sessions_unused",
            "sessions closed because no first message came",
            registry=self._registry,
        )
        self.workers_killed = Counter(
            "realhf_env_workers_killed",
            "commands killed because their client vanished",
            registry=self._registry,
        )
        self.errors = Counter(
            "realhf_env_errors", "error frames", ["code"], registry=self._registry
        )
        self.injected_faults = Counter(
            "realhf_env_injected_faults",
            "simulated faults of steps",
            ["kind"],
            registry=self._registry,
        )
        self.episodes = Counter(
            "realhf_env_episodes",
            "episodes that ended",
            ["outcome", "template"],
            registry=self._registry,
        )
        self.reset_seconds = Histogram(
            "realhf_env_reset_seconds",
            "time of a reset",
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.loop_lag_seconds = Histogram(
            "realhf_env_loop_lag_seconds",
            "how late the event loop is",
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.step_seconds = Histogram(
            "realhf_env_step_seconds",
            "time of a step",
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )

    def page(self) -> bytes:
        """Return the text of ``/metrics``."""
        return generate_latest(self._registry)


RETRY_AFTER_S = 1
"""Seconds after which a client that was refused because no slot was free may try again."""
_SCRUB_WAIT_S = 8.0
"""Seconds to wait for a slot that is being cleaned; on a busy machine, forking a simulator takes
that long."""
_LOG = logging.getLogger(__name__)


class SlotLeases:
    """Leases of slots, at most ``max_leases`` at once; ``active`` is the number of current leases.
    Belongs to one event loop."""

    def __init__(
        self, pool: SlotPool, max_leases: int, threads: Executor, metrics: ServerMetrics
    ) -> None:
        self.active = 0
        self.max_leases = max_leases
        self._pool = pool
        self._threads = threads
        self._metrics = metrics
        self._releases: set[asyncio.Future[None]] = set()
        self._closed = False

    async def take(self) -> Any | None:
        """Lease a slot and return it; None if ``max_leases`` are in use. If all free slots are
        still being cleaned or replaced, wait for one, up to ``_SCRUB_WAIT_S``."""
        if self._closed or self.active >= self.max_leases:
            return None
        self._count(1)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SCRUB_WAIT_S
        try:
            while True:
                acquired = loop.run_in_executor(self._threads, self._pool.acquire)
                try:
                    return await asyncio.shield(acquired)
                except asyncio.CancelledError:
                    acquired.add_done_callback(self._return_unused)
                    raise
                except RuntimeError:
                    if loop.time() > deadline:
                        self._count(-1)
                        return None
                await asyncio.sleep(0.005)
        except BaseException:
            self._count(-1)
            raise

    def give_back(self, slot: Any) -> None:
        """Give back a slot that nothing uses any more; a thread cleans it."""
        self._count(-1)
        self._release(slot)

    def give_back_after(self, slot: Any, work: asyncio.Future[Any] | None) -> None:
        """Give back the slot once ``work`` is done, because its thread may still use the slot.
        Until then the lease counts as active."""
        if work is None or work.done():
            self.give_back(slot)
            return
        _LOG.warning("a slot stays leased: a thread is still in it")

        def on_done(work: asyncio.Future[Any]) -> None:
            if not work.cancelled() and (error := work.exception()) is not None:
                _LOG.warning("a request whose client has left failed: %s", error)
            self.give_back(slot)

        work.add_done_callback(on_done)

    def _return_unused(self, acquired: asyncio.Future[Any]) -> None:
        """Give back a slot that a thread acquired for a client that has left in the meantime."""
        if not acquired.cancelled() and acquired.exception() is None:
            self._release(acquired.result())

    def _release(self, slot: Any) -> None:
        released = asyncio.get_running_loop().run_in_executor(
            self._threads, self._pool.release, slot
        )
        self._releases.add(released)
        released.add_done_callback(self._on_released)

    @property
    def cleaning_count(self) -> int:
        """Number of slots that were given back and are being cleaned."""
        return len(self._releases)

    def close(self) -> None:
        """Stop granting leases."""
        self._closed = True

    async def wait_until_cleaned(self, timeout_s: float) -> None:
        """Wait until all slots that were given back are cleaned, up to ``timeout_s``."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout_s)

    def refuse(self) -> Refusal:
        """Count a client that is refused because no slot is free, and return the refusal (503)."""
        self._metrics.sessions_rejected.inc()
        numbers = f"{self.active}/{self.max_leases}"
        return Refusal(
            503,
            f"Server at capacity: {numbers} sessions active. Cannot accept new connections.",
            {"Retry-After": str(RETRY_AFTER_S)},
            code=wire.CAPACITY_REACHED,
            active_sessions=self.active,
            max_sessions=self.max_leases,
        )

    def _on_released(self, future: asyncio.Future[None]) -> None:
        self._releases.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            _LOG.error("a slot could not be released: %s", error)

    def _count(self, change: int) -> None:
        self.active += change
        self._metrics.sessions_active.set(self.active)


def capacity_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal because no slot is free. It is the same over HTTP, in a
    handshake and in an error frame."""
    return {"code": refusal.code, "message": refusal.detail, **refusal.more}


async def watch_loop_lag(metrics: ServerMetrics, every_s: float = 0.25) -> None:
    """Measure the event loop's delay repeatedly, until cancelled."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(every_s)
        metrics.loop_lag_seconds.observe(max(0.0, time.perf_counter() - began - every_s))
