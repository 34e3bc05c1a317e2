"""What a process may use of cores and memory, in a container or job with limits too. Files stand in for those of the
kernel."""

import pytest

from realhf.base.host_resources import memory_left, memory_limit, usable_cores


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr("realhf.base.host_resources.os.sched_getaffinity", lambda pid: set(range(96)))


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
def test_the_limit_of_a_control_group_counts(tmp_path, own, files, cores):
    """A pod of 8 cores on a machine of 96 began 96 threads, which it stopped again and again."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(text)
    assert usable_cores(tmp_path / "top", tmp_path / "own") == cores


def test_without_control_groups_what_it_is_bound_to_counts(tmp_path):
    assert usable_cores(tmp_path, tmp_path / "none") == 96


GROWN = "anon 100\ninactive_file 300\nactive_file 200\n"


@pytest.mark.parametrize(
    ("own", "files", "limit", "left"),
    [
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "700\n"}, 1000, 300),
        ("0::/\n", {"memory.max": "1000", "memory.current": "700", "memory.stat": GROWN}, 1000, 800),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "700\n"}, None, None),
        ("0::/\n", {"memory.max": "1000", "memory.current": "1400"}, 1000, 0),
        (
            "0::/job/step\n",
            {"job/memory.max": "500", "job/memory.current": "400", "job/step/memory.max": "max"},
            500,
            100,
        ),
        (
            "4:memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "900", "memory/job/memory.usage_in_bytes": "800",
             "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50\n"},
            900,
            450,
        ),
        ("0::/gone\n", {}, None, None),
    ],
)  # fmt: skip
def test_the_memory_of_a_job_is_that_of_all_groups_around_it(tmp_path, own, files, limit, left):
    """Only the uppermost group of version 2 was looked at, so a batch job had the memory of its whole node; and what
    the kernel keeps of files, which it gives up, counted as used."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(text)
    assert memory_limit(tmp_path / "top", tmp_path / "own") == limit
    assert memory_left(tmp_path / "top", tmp_path / "own") == left
