"""The process that starts agents for a launcher ends with it, also while it is at work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from realhf.cluster.engines.engine_process import EngineProcess
from realhf.cluster.placement import ClusterError
from tests.process_family import family, gone

SLOW = "tests.cluster.engines.slow_engine"
LONG_S = 60.0
SOON_S = 17.0
"""Less than a helper that does not listen is given before it is killed."""
LAUNCHER = """
import sys
from realhf.cluster.engines.engine_process import EngineProcess
engine = EngineProcess(sys.argv[1])
try:
    engine.start({"file": sys.argv[2], "seconds": 60.0}, 60.0, "the start")
finally:
    engine.stop()
"""


def until(path: Path) -> None:
    end = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def launcher(made: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, SLOW, str(made)], env=environment)
    until(made)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_ends_takes_its_helper_along_while_that_starts_agents(
    tmp_path: Path, number: int
):
    """It would start agents for nobody otherwise, and be killed in the middle of it."""
    made = tmp_path / "made"
    process = launcher(made)
    helpers = [*family(process.pid)]
    began = time.monotonic()
    process.send_signal(number)
    process.wait(LONG_S)
    assert helpers and gone(helpers, SOON_S)
    assert time.monotonic() - began < SOON_S
    assert not made.exists(), "what had been started is taken back"


@pytest.mark.slow
def test_a_helper_that_is_late_is_told_to_end_and_not_waited_for(tmp_path: Path):
    others = {child.pid for child in psutil.Process().children()}
    engine = EngineProcess(SLOW)
    with pytest.raises(ClusterError, match=r"the start did not come about within 0\.5 s"):
        engine.start({"file": str(tmp_path / "made"), "seconds": LONG_S}, 0.5, "the start")
    until(tmp_path / "made")
    children = [child for child in psutil.Process().children() if child.pid not in others]
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < SOON_S
    assert (
        not (tmp_path / "made").exists()
        and children
        and gone([child.pid for child in children], 60)
    )


@pytest.mark.slow
def test_one_that_has_started_is_told_to_stop(tmp_path: Path):
    engine = EngineProcess(SLOW)
    engine.start({"file": str(tmp_path / "made"), "seconds": 0.0}, LONG_S, "the start")
    assert (tmp_path / "made").exists() and engine.problem() == ""
    engine.stop()
    assert not (tmp_path / "made").exists()
