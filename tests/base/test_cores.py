"""How many cores a process may use, in a container with a limit too. Files stand in for those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.base.cores import usable_cores


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.base.cores.os.sched_getaffinity", lambda pid: set(range(96)))


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 96),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        (
            "3:cpu,cpuacct:/x\n2:memory:/\n",
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 96),
        ("0::/\n", {"cpu.max": "nonsense"}, 96),
        ("0::/gone\n", {}, 96),
    ],
)
def test_the_limit_of_a_control_group_counts(tmp_path: Path, own: str, files: dict[str, str], cores: int):
    """A pod of 8 cores on a machine of 96 began 96 threads, which it stopped again and again."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(text)
    assert usable_cores(tmp_path / "top", tmp_path / "own") == cores


def test_without_control_groups_what_it_is_bound_to_counts(tmp_path: Path):
    assert usable_cores(tmp_path, tmp_path / "none") == 96
