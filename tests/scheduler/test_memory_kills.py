"""A worker that the kernel kills for memory is told from one that anybody else kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from realhf.api.environment import EnvironmentService
from realhf.launch.processes import failure_message
from realhf.scheduler import local
from realhf.scheduler.base import WorkerExit
from realhf.scheduler.local import OOM_KILLED, RECENT_KILL_S, OomKillMonitor

MIB = 1 << 20
LIMIT = 300 * MIB
V1 = Path("/sys/fs/cgroup/memory")
PROGRAM = """
import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.local import LocalScheduler
scheduler = LocalScheduler()
for module, argv in (("eater", ()), ("timeit", ("-n1", "-r1", "import os; os.kill(os.getpid(), 9)"))):
    scheduler.start(WorkerSpec("model_worker/0", module, argv, Path(sys.argv[2])))
    ends = []
    while not ends:
        ends = [event for event in scheduler.wait(1.0) if isinstance(event, WorkerExit)]
    print(ends[0].exit_code, ends[0].reason, flush=True)
    for _ in range(6):
        scheduler.wait(1.0)
scheduler.stop()
"""


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_of_", ".")).write_text(text)


@pytest.mark.parametrize("layout", ["second", "container", "first", "machine"])
def test_a_kill_in_the_own_group_is_seen_for_a_while(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = tmp_path / "groups"
    proc = tmp_path / "proc"
    clock = [100.0]
    monkeypatch.setattr(local, "process_clock", SimpleNamespace(now=lambda: clock[0]))
    line = {
        "second": "0::/job/run",
        "container": "0::/",
        "first": "4:memory:/job\n0::/",
        "machine": "0::/",
    }[layout]
    write(proc / "self", cgroup=f"{line}\n")
    write(proc, vmstat="nr_free_pages 1\noom_kill 3\n")
    folder = {
        "second": groups / "job" / "run",
        "container": groups,
        "first": groups / "memory" / "job",
    }.get(layout)
    name = "memory.oom_control" if layout == "first" else "memory.events"
    if folder is not None:
        write(
            folder,
            **{"memory_of_max": "max\n", "memory_of_limit_in_bytes": "9223372036854771712\n"},
        )
        (folder / name).write_text("oom 0\noom_kill 3\n")
        (
            folder.parent / ("memory.limit_in_bytes" if layout == "first" else "memory.max")
        ).write_text(f"{512 * MIB}\n")
    kills = OomKillMonitor(groups, proc)
    assert kills.explain_sigkill(MIB) == "", "those before it are not its own"
    counter = proc / "vmstat" if folder is None else folder / name
    counter.write_text("oom 1\noom_kill 4\n")
    said = kills.explain_sigkill(3 << 29)
    assert said.startswith(f"{OOM_KILLED}: it had 1.5 GiB at its peak, and ")
    assert ("its group may take 0.5" in said) == (layout in ("second", "first")), said
    clock[0] += RECENT_KILL_S + 1
    assert kills.explain_sigkill(MIB) == "", "that was another"


def test_the_options_that_help_a_worker_of_the_kind_are_named(tmp_path: Path) -> None:
    cause = f"{OOM_KILLED}: it had 3.2 GiB at its peak, and its group may take 3.5"
    said = {
        name: failure_message(WorkerExit(name, -9, tmp_path / "log", 0, cause))
        for name in ("model_worker/0", "env/0")
    }
    assert (
        "model_worker/0 was killed by the kernel because memory ran out: it had 3.2 GiB"
        in said["model_worker/0"]
    )
    assert (
        "mb_spec.max_tokens_per_mb" in said["model_worker/0"] and "env.pool_size" in said["env/0"]
    )
    assert "\n" not in said["model_worker/0"], "the end of a log says nothing about it"
    server = EnvironmentService("some.module", section="env.of.aws")
    mixed = failure_message(WorkerExit("env/0", -9, tmp_path / "log", 0, cause), server)
    assert "lower env.of.aws.pool_size" in mixed


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit, where this machine lets one be made."""
    own = next(
        (
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ":memory:" in line
        ),
        "",
    )
    folder = V1 / own.lstrip("/") / f"realhf-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    yield folder
    for _ in range(50):
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_kernel_kills_a_worker(tmp_path: Path, group: Path) -> None:
    (tmp_path / "eater.py").write_text(
        "held = []\nwhile True:\n    held.append(bytearray(b'x' * (1 << 22)))\n"
    )
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    command = [
        "sh",
        "-c",
        join,
        "sh",
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "pid"),
        str(tmp_path / "log"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    first, second = done.stdout.splitlines()
    assert (
        first.startswith(f"{-signal.SIGKILL} {OOM_KILLED}: it had 0.")
        and "its group may take 0.3" in first
    )
    assert second == f"{-signal.SIGKILL} killed by SIGKILL", done.stderr
