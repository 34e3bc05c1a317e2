"""A server that is short of descriptors or room on its disk refuses for a while, and gives
everything out afterwards.

Source: docs/reference/trajectory.md 3.8, 3.10, 3.11.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from realhf.base.loopback import free_port
from tests.trajectory.conftest import start
from tests.trajectory.groups import group

NO_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode if shutil.which(
    "unshare"
) else 1  # fmt: skip
ON_A_SMALL_DISK = (
    'mount -t tmpfs -o size=64m none "$0" && while :; do setpriv --pdeathsig KILL "$@"; sleep 0.1; '
    "done"
)


@contextmanager
def serving(folder: Path, *flags: str, before: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """``run-api`` over a folder, behind a command: the pid of the command, the URL."""
    port = free_port()
    tied = ("setpriv", "--pdeathsig", "KILL")  # none outlives a test run that is killed
    command = [
        *tied, *before, sys.executable, "-m", "realhf.trajectory", "--port", str(port), "--store",
        f"sqlite:{folder}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, *flags], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url), "the server comes up")
        yield process.pid, url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def numbered(number: int, nbytes: int) -> dict[str, object]:
    return group(4, group_overrides={"number": number, "filler": "x" * nbytes})


def numbers(answer: httpx.Response) -> list[int]:
    return [item["group_overrides"]["number"] for item in answer.json()["batch"] or []]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_without_descriptors_loses_nothing_that_it_acknowledged(tmp_path):
    """It used to take a file that it could not open for one that was lost: one pull walked through
    the queue, put what fitted into quarantine and deleted the rest."""
    with serving(tmp_path) as (_, url), httpx.Client(base_url=url) as api:
        start(api)
        for number in range(60):
            assert api.post("/scored_data", json=numbered(number, 20_000)).status_code == 200
    own = {"X-Trainer-Id": "t"}
    with (
        serving(tmp_path, "--quarantine-bytes", "100000") as (pid, url),
        httpx.Client(base_url=url, timeout=60, headers=own) as api,
    ):
        assert api.get("/status").json()["queue_size"] == 60
        assert (
            resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
            == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        )
        before = resource.prlimit(
            pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        starved = [api.get("/batch") for _ in range(3)]
        assert all(answer.status_code in (200, 503) for answer in starved)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        seen = [
            number for answer in starved if answer.status_code == 200 for number in numbers(answer)
        ]
        while found := numbers(api.get("/batch")):
            seen += found
        assert seen == list(range(60)), "each of them once, in order"
        kept = api.get("/quarantine").json()
        assert (kept["total"], kept["dropped"]) == (0, 0)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(NO_MOUNT != 0, reason="no mount of one's own here")
def test_a_full_disk_can_be_drained_also_after_a_kill(tmp_path):
    """Pushes are refused while there is room for the way out. When somebody else takes that room,
    too, the batches still go out and are acknowledged, and a server that was killed starts
    again."""
    before = ("unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, str(tmp_path))
    with (
        serving(tmp_path, before=before) as (pid, url),
        httpx.Client(base_url=url, timeout=60) as api,
    ):
        inside = Path(f"/proc/{pid}/root{tmp_path}")
        start(api)
        accepted = []
        for number in range(200):
            if api.post("/scored_data", json=numbered(number, 500_000)).status_code != 200:
                break
            accepted.append(number)
        assert 50 < len(accepted) < 125, "pushes are refused before the disk is full"
        assert is_ready(url), "a full disk is no reason to send the trainers away"
        with (
            (inside / "somebody else's").open("wb") as file,
            pytest.raises(OSError, match="No space"),
        ):
            while True:
                file.write(b"x" * 65536)
                file.flush()
        assert os.statvfs(inside).f_bavail == 0
        explicit = {"X-Trainer-Id": "t", "X-Ack-Mode": "explicit"}
        seen = []
        for batch in range(len(accepted) // 2):
            if batch == 10:
                os.kill(int((inside / "lock").read_text()), signal.SIGKILL)
                wait_until(lambda: is_ready(url), "it starts on the full disk")
            answer = api.get("/batch", headers=explicit)
            assert answer.status_code == 200, answer.text
            seen += numbers(answer)
            assert (
                api.post("/batch/ack", json={"lease_id": answer.headers["x-lease-id"]}).status_code
                == 200
            )
        assert seen == accepted[: len(seen)]
        assert len(seen) >= len(accepted) - 1
        wait_until(
            lambda: api.post("/scored_data", json=numbered(0, 500_000)).status_code == 200,
            "there is room again",
        )
