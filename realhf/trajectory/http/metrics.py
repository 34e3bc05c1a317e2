"""Exports Prometheus metrics of one server: totals from the state at each scrape, latencies as they happen.

Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from realhf.trajectory.state.engine import Engine
from realhf.trajectory.wire.body_budget import BodyBudget

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_VERSIONS = (0, 1, 2, 4, 8, 16, 32, 64)
_LAG_EVERY_S = 0.1


class Metrics:
    """Holds latency histograms by request kind, event-loop lag, and a collector over the engine's state."""

    def __init__(self, engine: Engine, bodies: BodyBudget) -> None:
        self._registry = CollectorRegistry()
        self._latency = Histogram(
            "trajectory_request_seconds", "time to answer", ["kind"], buckets=_SECONDS, registry=self._registry
        )
        self._staleness = Histogram(
            "trajectory_staleness_versions",
            "policy versions a delivered group lay behind",
            buckets=_VERSIONS,
            registry=self._registry,
        )
        self._unavailable = Counter("trajectory_unavailable", "answers with status 503", registry=self._registry)
        self._lag = Gauge(
            "trajectory_event_loop_lag_seconds",
            "largest delay of the event loop since the last scrape",
            registry=self._registry,
        )
        self._registry.register(StateCollector(engine, bodies))
        self._worst_lag = 0.0

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Time one request of a kind."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._latency.labels(kind).observe(time.perf_counter() - began)

    def delivered(self, behind: int) -> None:
        """Count a group that was handed out when it was ``behind`` policy versions old."""
        self._staleness.observe(behind)

    def unavailable(self) -> None:
        """Count an answer with status 503."""
        self._unavailable.inc()

    async def watch_loop(self) -> None:
        """Measure the delay of the event loop until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self._worst_lag = max(self._worst_lag, time.perf_counter() - began - _LAG_EVERY_S)

    def text(self) -> bytes:
        """Return the metrics in the Prometheus exposition format."""
        self._lag.set(max(0.0, self._worst_lag))
        self._worst_lag = 0.0
        return generate_latest(self._registry)


class StateCollector(Collector):
    """Reads metrics off the state."""

    def __init__(self, engine: Engine, bodies: BodyBudget) -> None:
        self._engine = engine
        self._bodies = bodies
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the state as it is now."""
        state = self._engine.state
        names = {env.env_id: env.name for env in state.envs.values()}
        groups, sequences = state.queue.env_groups(), state.queue.env_sequences()
        for name, values in (("groups", groups), ("sequences", sequences)):
            family = GaugeMetricFamily(f"trajectory_queue_{name}", f"{name} queued", labels=["env"])
            by_name: Tally[str] = Tally()
            for env_id, value in values.items():
                by_name[names.get(env_id, "none") if env_id is not None else "none"] += value
            for label, value in by_name.items():
                family.add_metric([label], value)
            yield family
        buffered = GaugeMetricFamily("trajectory_buffered_groups", "groups in the mix buffer", labels=["env"])
        for env_id, held in state.buffers.items():
            buffered.add_metric([names.get(env_id, "none") if env_id is not None else "none"], len(held))
        yield buffered
        quarantined = GaugeMetricFamily("trajectory_quarantined_groups", "groups in quarantine", labels=["reason"])
        for reason, number in Tally(group.reason for group in state.quarantine.values()).items():
            quarantined.add_metric([reason], number)
        yield quarantined
        yield from self._totals()

    def _totals(self) -> Iterator[Metric]:
        state = self._engine.state
        gauges = {
            "queue_bytes": state.queue.nbytes,
            "held_bytes": state.waiting_bytes,
            "leases": len(state.leases),
            "step": state.run.step,
            "epoch": state.run.epoch,
            "environments": len(state.envs),
            "quarantine_bytes": state.quarantine_bytes,
            "resident_bytes": self._process.memory_info().rss,
            "body_bytes": self._bodies.held,
        }
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"trajectory_{name}", name.replace("_", " "), value=value)
        counters = state.counters
        for name in (
            "pushed_groups",
            "pushed_sequences",
            "formed",
            "redelivered",
            "acked",
            "nacked",
            "responses_lost",
            "refused_full",
            "replayed",
            "resets",
            "continued",
            "store_losses",
            "replays_forgotten_early",
        ):
            yield CounterMetricFamily(f"trajectory_{name}", name.replace("_", " "), value=counters[name])
        yield CounterMetricFamily("trajectory_bodies_refused", "bodies beyond the budget", value=self._bodies.refused)
        nulls = CounterMetricFamily("trajectory_null_batches", "pulls without a batch", labels=["reason"])
        for name, value in counters.items():
            if name.startswith("null:"):
                nulls.add_metric([name.removeprefix("null:")], value)
        yield nulls
