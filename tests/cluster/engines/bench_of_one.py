"""A scheduler of an engine with a run folder, on the loopback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from realhf.cluster.placement import ClusterError
from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import WorkerExit, WorkerLine, WorkerSpec
from realhf.scheduler.process import describe_failure
from tests.cluster.key_ring import log_of

LIMIT_S = 300.0
"""Starting Ray takes a minute on a busy machine."""


def started(scheduler: ClusterScheduler, run: Path, host: str) -> tuple[str, WorkerExit]:
    """Start the master here and a worker on a host, wait for the ends of both; what the worker
    said, and its end."""

    def spec(name: str, where: str = "") -> WorkerSpec:
        module = "tests.cluster.engines.ends_with_three"
        return WorkerSpec(name, module, (), log_of(run, name), events=True, host=where)

    scheduler.start(spec("master"))
    scheduler.start(spec("rollout_worker/0", host))
    said = ""
    ends = {}
    deadline = time.monotonic() + LIMIT_S
    while len(ends) < 2:
        assert time.monotonic() < deadline
        for event in scheduler.wait(1.0):
            if isinstance(event, WorkerExit):
                ends[event.name] = event
            elif isinstance(event, WorkerLine) and event.name == "rollout_worker/0":
                said += event.text
    return said, ends["rollout_worker/0"]


def refusal(scheduler: ClusterScheduler, spec: WorkerSpec) -> str:
    """Start what cannot be started, and stop the scheduler; what is said, as a person sees it."""
    try:
        with pytest.raises(ClusterError) as found:
            scheduler.start(spec)
    finally:
        scheduler.stop(1.0)
    return describe_failure(found.value)
