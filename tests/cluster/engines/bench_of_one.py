"""A scheduler of an engine with a run folder, on the loopback."""

from __future__ import annotations

import json
import time
from pathlib import Path

from realhf.cluster.scheduler import ClusterScheduler
from realhf.scheduler.base import WorkerExit, WorkerLine, WorkerSpec

LIMIT_S = 300.0
"""Starting Ray takes a minute on a busy machine."""


def run_folder(folder: Path) -> Path:
    """A run folder whose plan needs nothing."""
    run = folder / "exp" / "run"
    (run / "logs").mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps({"spec": {"models": {}, "source": {}}, "plugins": []}))
    return run


def started(scheduler: ClusterScheduler, run: Path, host: str) -> tuple[str, WorkerExit]:
    """Start the master here and a worker on a host, wait for the ends of both; what the worker said, and its end."""

    def spec(name: str, where: str = "") -> WorkerSpec:
        log = run / "logs" / f"{name.replace('/', '-')}.log"
        return WorkerSpec(name, "tests.cluster.engines.ends_with_three", (), log, events=True, host=where)

    scheduler.start(spec("master"))
    scheduler.start(spec("rollout_worker/0", host))
    said, ends = "", {}
    deadline = time.monotonic() + LIMIT_S
    while len(ends) < 2:
        assert time.monotonic() < deadline
        for event in scheduler.wait(1.0):
            if isinstance(event, WorkerExit):
                ends[event.name] = event
            elif isinstance(event, WorkerLine) and event.name == "rollout_worker/0":
                said += event.text
    return said, ends["rollout_worker/0"]
