"""What a process may use of cores and memory, in a container or job with limits too. Files stand in
for those of the kernel."""

import os

import pytest

from realhf.base.host_resources import (
    HostLoad,
    HostLoadMetrics,
    memory_left,
    memory_limit,
    usable_cores,
)


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(
        "realhf.base.host_resources.os.sched_getaffinity", lambda pid: set(range(96))
    )


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
    """Only the uppermost group of version 2 was looked at, so a batch job had the memory of its
    whole node; and what the kernel keeps of files, which it gives up, counted as used."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text(text)
    assert memory_limit(tmp_path / "top", tmp_path / "own") == limit
    assert memory_left(tmp_path / "top", tmp_path / "own") == left


def test_a_reading_of_this_host_grows_while_it_works():
    first = HostLoad.read()
    while (
        second := HostLoad.read()
    ).busy_s == first.busy_s:  # the kernel counts in hundredths of a second
        sum(range(10_000))
    assert second.whole_s > first.whole_s and 0 < second.memory < 1
    assert HostLoad.from_list(second.to_list()) == second


@pytest.mark.parametrize(
    "said",
    [None, 1, [], [1.0, 2.0], [1, 2, "x"], [1, 2, float("nan")], [-1, 2, 0.5], [True, 2, 0.5]],
)
def test_what_is_no_reading_is_none(said):
    assert HostLoad.from_list(said) is None


def test_a_step_has_the_share_of_its_own_time():
    """Not that since the boot; a host keeps its share until it is read anew, and one that was
    started anew, or came just now, has none yet."""
    loads = HostLoadMetrics()

    def figures(*others):
        own = f"host/{os.uname().nodename}/"
        found = loads.measure([(name, name, load) for name, load in others])
        assert 0 < found[f"{own}memory"] < 1
        return {name: value for name, value in found.items() if not name.startswith(own)}

    assert figures(("a", HostLoad(100.0, 1000.0, 0.5))) == {"host/a/memory": 0.5}
    second = figures(("a", HostLoad(103.0, 1004.0, 0.6)), ("b", HostLoad(7.0, 8.0, 0.1)))
    assert second == {"host/a/cpu": 0.75, "host/a/memory": 0.6, "host/b/memory": 0.1}
    assert figures(("a", HostLoad(103.0, 1004.0, 0.6)))["host/a/cpu"] == 0.75
    assert figures(("a", HostLoad(103.0, 1008.0, 0.6)))["host/a/cpu"] == 0.0
    assert figures(("a", HostLoad(1.0, 2.0, 0.2))) == {"host/a/memory": 0.2}
    assert (
        figures(("a", HostLoad(2.0, 4.0, 0.2)), ("a", HostLoad(3.0, 6.0, 0.2)))["host/a/cpu"] == 0.5
    )


def test_this_host_is_read_without_being_told_and_hosts_of_one_name_are_kept_apart():
    loads = HostLoadMetrics()
    own = os.uname().nodename
    others = [
        (own, "another", HostLoad(1.0, 2.0, 0.25)),
        ("a/b\n", "third", HostLoad(1.0, 2.0, 0.5)),
    ]
    first = loads.measure(others)
    assert {f"host/{own}/memory", f"host/{own}-2/memory", "host/a-b-/memory"} == {*first}
    assert loads.measure([others[1], others[0]])[f"host/{own}-2/memory"] == 0.25, (
        "a name stays that of its host"
    )
