"""Run folders for the tests, written by hand, and the page's server over them."""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from benchmarks.view.made_up_run import MadeUpRun
from realhf.view.run import RunList
from realhf.view.server import create_app

URL = "http://127.0.0.1:8765"


def write_run(
    folder: Path, *, steps: int = 3, config: str = "seed: 1\nppo:\n  lr: 0.1\n", ended: bool = True
) -> Path:
    """A small run that ended, or was killed after ``steps`` steps."""
    (folder / "trace").mkdir(parents=True)
    rows = [
        {"step": step, "reward/mean": step / 10, "time/step": 1.5} for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(config)
    held = {"overall": {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 10, "failed": 1}}
    (folder / "evaluations.json").write_text(json.dumps({"0": {"sampled": held}}))
    span = {
        "name": "train/actor_train",
        "ph": "X",
        "ts": 1_000_000,
        "pid": 1,
        "tid": 2,
        "dur": 500_000,
    }
    (folder / "trace" / "master.jsonl").write_text(json.dumps(span) + "\n")
    if ended:
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    return folder


def made_up(folder: Path, *, steps: int = 1, groups: int, **options: Any) -> None:
    """A made-up run of so many steps, each of so many groups."""
    run = MadeUpRun(folder, **options)
    for _ in range(steps):
        run.add_step(groups)
    run.close()


def kept_answers(report: Path) -> dict[str, Any]:
    """What a report holds in place of a server."""
    (found,) = re.findall(r'id="answers">([^<]*)</script>', report.read_text())
    return json.loads(gzip.decompress(base64.b64decode(found)))


def add_step(folder: Path, values: Mapping[str, Any]) -> None:
    """One more line of metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def client(*folders: Path, follow: bool = False) -> TestClient:
    """The page's server, without a socket. The runs of the folders are known already."""
    runs = RunList(folders)
    runs.refresh()
    return TestClient(create_app(runs, follow=follow), base_url=URL)


@contextmanager
def served(*folders: Path, follow: bool = True, port: int = 0) -> Iterator[str]:
    """The page's server on a port of the loopback, by default a free one, in a thread; yields its
    address."""
    runs = RunList(folders)
    runs.refresh()
    config = uvicorn.Config(
        create_app(runs, follow=follow), log_level="error", ws="none", lifespan="off"
    )
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
