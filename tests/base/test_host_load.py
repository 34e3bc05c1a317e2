"""How busy a host is: readings, what comes of them over the wire, and the figures of a step."""

import os

import pytest

from realhf.base.host_resources import HostLoad, LoadOfSteps


def test_a_reading_of_this_host_grows_while_it_works():
    first = HostLoad.read()
    while (second := HostLoad.read()).busy_s == first.busy_s:  # the kernel counts in hundredths of a second
        sum(range(10_000))
    assert second.whole_s > first.whole_s and 0 < second.memory < 1
    assert HostLoad.from_list(second.to_list()) == second


@pytest.mark.parametrize(
    "said", [None, 1, [], [1.0, 2.0], [1, 2, "x"], [1, 2, float("nan")], [-1, 2, 0.5], [True, 2, 0.5]]
)
def test_what_is_no_reading_is_none(said):
    assert HostLoad.from_list(said) is None


def test_a_step_has_the_share_of_its_own_time():
    """Not that since the boot; a host keeps its share until it is read anew, and one that was started anew, or came
    just now, has none yet."""
    loads = LoadOfSteps()

    def figures(*others):
        own = f"host/{os.uname().nodename}/"
        found = loads.figures([(name, name, load) for name, load in others])
        assert 0 < found[f"{own}memory"] < 1
        return {name: value for name, value in found.items() if not name.startswith(own)}

    assert figures(("a", HostLoad(100.0, 1000.0, 0.5))) == {"host/a/memory": 0.5}
    second = figures(("a", HostLoad(103.0, 1004.0, 0.6)), ("b", HostLoad(7.0, 8.0, 0.1)))
    assert second == {"host/a/cpu": 0.75, "host/a/memory": 0.6, "host/b/memory": 0.1}
    assert figures(("a", HostLoad(103.0, 1004.0, 0.6)))["host/a/cpu"] == 0.75
    assert figures(("a", HostLoad(103.0, 1008.0, 0.6)))["host/a/cpu"] == 0.0
    assert figures(("a", HostLoad(1.0, 2.0, 0.2))) == {"host/a/memory": 0.2}
    assert figures(("a", HostLoad(2.0, 4.0, 0.2)), ("a", HostLoad(3.0, 6.0, 0.2)))["host/a/cpu"] == 0.5


def test_this_host_is_read_without_being_told_and_hosts_of_one_name_are_kept_apart():
    loads, own = LoadOfSteps(), os.uname().nodename
    others = [(own, "another", HostLoad(1.0, 2.0, 0.25)), ("a/b\n", "third", HostLoad(1.0, 2.0, 0.5))]
    first = loads.figures(others)
    assert {f"host/{own}/memory", f"host/{own}-2/memory", "host/a-b-/memory"} == {*first}
    assert loads.figures([others[1], others[0]])[f"host/{own}-2/memory"] == 0.25, "a name stays that of its host"
