"""A run whose model is cut over two workers, one of which is killed, goes on with one worker and
with four, from the same checkpoint, with the same losses."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.process_family import gone
from tests.test_ranks_end_to_end import CUT, PATIENCE_S, family, launched, rank, rows

pytestmark = [pytest.mark.slow, pytest.mark.several_hosts, pytest.mark.timeout(1500)]

FOUR = ("actor.workers=[0,1,2,3]", "actor.backend=fsdp2")


def killed(root: Path) -> float:
    """Run until there is a checkpoint, kill a rank, and return after how many seconds the launch
    has named it."""
    run = launched(root, *CUT)
    try:
        end = time.monotonic() + PATIENCE_S
        while len(rows(root)) < 7:
            assert run.poll() is None and time.monotonic() < end, run.stdout and run.stdout.read()
            time.sleep(0.02)
        processes = [*family(run.pid)]
        began = time.monotonic()
        rank(run.pid, 1).kill()
        output, _ = run.communicate(timeout=PATIENCE_S)
        took = time.monotonic() - began
    finally:
        run.kill()
    assert run.returncode == 1
    assert "error: model_worker/1 ended before the run did: killed by SIGKILL" in output
    assert gone(processes, PATIENCE_S)
    return took


def finished(root: Path, *options: str) -> list[float]:
    """Go on with the run in a folder to its end; return the loss of every step."""
    run = launched(root, *options, "recover_mode=resume")
    try:
        output, _ = run.communicate(timeout=2 * PATIENCE_S)
    finally:
        run.kill()
    assert run.returncode == 0 and "resumed after step" in output, output
    found = rows(root)
    assert len(found) == 60
    return [row["policy/loss"] for row in found]


def test_one_worker_and_four_go_on_from_the_checkpoint_of_two(tmp_path: Path) -> None:
    """Both find it where it was made: the run knows its models by their folders."""
    root = tmp_path / "run"
    kept = tmp_path / "kept"
    took = killed(root)
    print(f"\nthe killed rank was named and the launch had ended after {took:.1f} s")
    before = [row["policy/loss"] for row in rows(root)]
    shutil.copytree(root, kept, symlinks=True)
    together = finished(root, *FOUR)
    shutil.rmtree(root)
    kept.rename(root)
    alone = finished(root, "actor.workers=[0]")
    assert together == pytest.approx(alone, rel=1e-4)
    assert together[: len(before)] == pytest.approx(before, rel=1e-4)
    assert together[-1] < together[0] - 1
