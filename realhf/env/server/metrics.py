"""Publishes metrics of the environment server as Prometheus text, without task content
(docs/reference/environment.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class _PoolCollector(Collector):
    """Reads the pool's own metrics when the page is asked for."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], about: str, label: str) -> None:
        self._read, self._about, self._label = read, about, label

    def collect(self) -> Iterable[Metric]:
        """Yield a gauge for every number of the pool."""
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
    """Counts what one server process does. ``read_pool`` returns the pool's metrics (a map is one value per ``label``),
    ``about`` says what the pool is."""

    def __init__(self, read_pool: Callable[[], Mapping[str, Any]], about: str = "pool", label: str = "rule") -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PoolCollector(read_pool, about, label))
        self.sessions_active = Gauge("realhf_env_sessions_active", "open sessions", registry=self._registry)
        self.sessions_opened = Counter("realhf_env_sessions_opened", "accepted sessions", registry=self._registry)
        self.sessions_rejected = Counter(
            "realhf_env_sessions_rejected", "sessions refused for capacity", registry=self._registry
        )
        self.sessions_reaped = Counter("realhf_env_sessions_reaped", "idle sessions closed", registry=self._registry)
        self.sessions_unused = Counter(
            "realhf_env_sessions_unused", "sessions closed because no first message came", registry=self._registry
        )
        self.workers_killed = Counter(
            "realhf_env_workers_killed", "commands killed because their client vanished", registry=self._registry
        )
        self.errors = Counter("realhf_env_errors", "error frames", ["code"], registry=self._registry)
        self.injected_faults = Counter(
            "realhf_env_injected_faults", "simulated faults of steps", ["kind"], registry=self._registry
        )
        self.episodes = Counter(
            "realhf_env_episodes", "episodes that ended", ["outcome", "template"], registry=self._registry
        )
        self.reset_seconds = Histogram(
            "realhf_env_reset_seconds", "time of a reset", buckets=_LATENCY_BUCKETS, registry=self._registry
        )
        self.loop_lag_seconds = Histogram(
            "realhf_env_loop_lag_seconds",
            "how late the event loop is",
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.step_seconds = Histogram(
            "realhf_env_step_seconds", "time of a step", buckets=_LATENCY_BUCKETS, registry=self._registry
        )

    def page(self) -> bytes:
        """Return the text of ``/metrics``."""
        return generate_latest(self._registry)
