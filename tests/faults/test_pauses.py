"""Real runs that stand still as a whole, as where a virtual machine is moved: they go on with the
processes they had.

``benchmarks/pause_soak.py`` does this at ten moments (``make test-freezes``)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.killed_run import VERIFIER, KilledRun, pause_again_and_again

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]
STUCK_S = 300.0


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_run_goes_on_after_all_of_it_stood_still(
    tmp_path: Path, policy: Path, synchronous: bool
) -> None:
    """Its deadlines counted the pause: one of four ended the master."""
    run = KilledRun(
        tmp_path, "paused", policy, steps=400, environment=VERIFIER, synchronous=synchronous
    )
    run.start()
    try:
        assert pause_again_and_again(run, 4, 40.0, random.Random(7), STUCK_S) >= 3
    finally:
        run.end()
    assert run.deaths() == []


def test_a_job_that_is_stopped_at_the_terminal_goes_on_with_fg(
    tmp_path: Path, policy: Path
) -> None:
    """Ctrl-Z stops the process group of the terminal, which is the launcher; its workers go on.
    With ``fg`` it goes on, too, kills nobody and ends well."""
    run = KilledRun(tmp_path, "stopped", policy, steps=12, environment=VERIFIER)
    run.start()
    try:
        run.wait_for_progress(0, STUCK_S)
        assert run._launcher is not None  # pyright: ignore[reportPrivateUsage]
        launcher = psutil.Process(run._launcher.pid)  # pyright: ignore[reportPrivateUsage]
        os.killpg(launcher.pid, signal.SIGSTOP)  # a group without a terminal does not heed SIGTSTP
        deadline = time.monotonic() + STUCK_S
        while launcher.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(20.0)
        os.killpg(launcher.pid, signal.SIGCONT)
        verdict = run.verdict(run.wait(STUCK_S))
    finally:
        run.end()
    assert not verdict.problems, (verdict, run.output.read_text())
    assert run.deaths() == []
