"""The soak in its short form, with real kills, and its verdict; a thousand bad connections leave
nothing behind."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.aws.server.program import EnvServerProcess

pytestmark = pytest.mark.sim
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("env_soak")


def _verdict(soak, name: str, step: float) -> bool:
    samples = []
    for number in range(50):
        figures = {
            "pss_mb": 600.0 + 9 * (number % 5),
            "files": 270 + number % 6,
            "processes": 22 + number % 2,
        }
        figures[name] += step * number
        samples.append(soak.Sample(number * 100, float(number), soak.Footprint(**figures)))
    return soak.growth(samples)[name]["passes"]


@pytest.mark.parametrize(("name", "leak"), [("pss_mb", 1.0), ("files", 0.5), ("processes", 0.1)])
def test_the_verdict_tells_growth_from_noise(soak, name: str, leak: float) -> None:
    assert _verdict(soak, name, 0.0)
    assert not _verdict(soak, name, leak)


@pytest.mark.nightly
def test_a_short_soak_with_kills(tmp_path: Path) -> None:
    figures = tmp_path / "soak.json"
    words = [
        "--episodes",
        "90",
        "--slots",
        "2",
        "--kill-every",
        "15",
        "--samples",
        "30",
        "--json",
        str(figures),
    ]
    words += ["--plot", str(tmp_path / "soak.png")]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "env_soak.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert figures.exists(), done.stderr[-2000:]
    result = json.loads(figures.read_text())
    assert (
        result["kills"] == {"client": 2, "worker": 2, "simulator": 2} and result["episodes"] >= 86
    )
    assert result["lost"] <= 6 and result["not_achieved"] <= 4
    assert result["growth"]["processes"]["passes"] and result["growth"]["files"]["passes"], result[
        "growth"
    ]
    assert (tmp_path / "soak.png").stat().st_size > 1000


POOL = 8
CONNECTIONS = 1000


@pytest.mark.nightly
def test_a_thousand_bad_connections_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    connections = importlib.import_module("env_connections")
    with EnvServerProcess(POOL, "--web", "off") as server:
        connections.storm(server, POOL, 10 * POOL)
        before = connections.rested(server, POOL)
        assert before.free_slots == POOL
        assert connections.storm(server, POOL, CONNECTIONS) == CONNECTIONS // 2, (
            "each got 503 and Retry-After"
        )
        assert connections.rested(server, POOL, before) == before
        (freed,) = connections.freed_after_s(server, 1)
        assert freed < 20
