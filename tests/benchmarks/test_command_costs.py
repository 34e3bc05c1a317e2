"""The timers of the environment's benchmark, and the table that it prints."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/environment"
ROW = re.compile(r"^\s*(\S.*?)\s{2,}(-?[0-9.]+)(?:\s|$)", re.MULTILINE)


class Work:
    """Two functions, of which one calls the other."""

    def outer(self) -> None:
        spend(0.02)
        self.inner()

    def inner(self) -> None:
        spend(0.04)


def spend(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_counts_for_the_innermost_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from stage_timers import StageTimers

    class Timed(Work):
        pass

    timers = StageTimers()
    timers.time(Timed, "outer", "outside")
    timers.time(Timed, "inner", "inside")
    timers.time(Timed, "absent", "never")
    Timed().outer()
    assert timers.calls == 2 and set(timers.ns) == {"outside", "inside"}
    assert 20e6 <= timers.ns["outside"] < 30e6 and 40e6 <= timers.ns["inside"] < 50e6


@pytest.mark.nightly
def test_stages_and_processes_of_a_command_are_printed() -> None:
    program = [sys.executable, str(FOLDER / "command_costs.py"), "--repeats", "2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    processes, *stages = re.split(r"\n\n", done.stdout)
    figures = {name: float(us) for name, us in ROW.findall(processes)}
    whole = figures.pop("all")
    assert set(figures) == {"CLI workers", "simulators", "environment server", "client and policy"}
    assert whole == pytest.approx(sum(figures.values()), abs=4) and min(figures.values()) > 50
    for part in stages[:3]:
        rows = {name: float(us) for name, us in ROW.findall(part)}
        clocks = rows.pop("of which timers")
        assert rows.pop("all") == pytest.approx(sum(rows.values()), abs=2)
        assert len(rows) >= 5 and clocks > 0 and min(rows.values()) > -20, part
