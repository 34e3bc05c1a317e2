"""Ranks in processes of their own: what they add up, and how they fail together."""

from __future__ import annotations

import math

import pytest

from tests.backends.parallel import jobs
from tests.backends.parallel.rank_processes import results, run_ranks


def test_ranks_add_up_to_the_same_bits_and_are_alone_outside_a_group_call() -> None:
    found = results(run_ranks(3, jobs.sums, 3))
    for rank, own in enumerate(found):
        assert own["alone"] == (0, 1, [0, 1, 2]) and own["after"] == 1
        assert (own["rank"], own["size"]) == (rank, 3)
        assert own["sum"] == [0.0, 6.0, 12.0, 18.0]
        assert own["gradients"] == [[1.0, 2.0, 3.0], [6.0, 6.0], None], "None counts as 0, fp32 sum"
        assert own["exchanged"] == [b"", b"x", b"xx"]
        assert [numbers["all"] for numbers in own["gathered"]] == [1.0] * 3
        assert own["gathered"][2]["of_2"] == 2.1 and math.isnan(own["gathered"][1]["of_1"])

    shares = [[own["own"][case] for own in found] for case in range(4)]
    assert shares == [[[0, 1], [2, 3, 4, 5], [6]], [[], [0], []], [[0], [1, 2], [3]], [[0], [1, 2], [3, 4]]]


def test_ranks_that_come_for_different_calls_are_refused() -> None:
    for outcome in run_ranks(2, jobs.another_call, 2):
        assert outcome.error == "CollectiveBroken" and "is about call" in outcome.text


@pytest.mark.parametrize("how", ["raises", "killed", "stuck", "stuck beside NCCL"])
def test_a_failure_of_one_rank_breaks_off_all(how: str) -> None:
    """Also where one of the groups of a worker cannot be broken off: that used to keep the connections of all open."""
    outcomes = run_ranks(3, jobs.one_fails, 3, how)
    own = {"raises": "MemoryError", "killed": "Killed"}
    for outcome in outcomes[:2]:
        assert outcome.error == "CollectiveBroken" and "broke off the step" in outcome.text
    assert outcomes[2].error == own.get(how, "CollectiveBroken")


def test_groups_may_share_members_without_being_equal() -> None:
    sums = {"0": [11.0], "1": [110.0], "2": [111.0], "3": [101.0], "4": [11.0]}
    for rank, own in enumerate(results(run_ranks(3, jobs.overlapping, 3))):
        members = {"0": (0, 1), "1": (1, 2), "2": (0, 1, 2), "3": (0, 2), "4": (0, 1)}
        assert own == {name: sums[name] for name, workers in members.items() if rank in workers}


def test_hosts_with_and_without_gpus_are_told_apart() -> None:
    for outcome in run_ranks(3, jobs.one_sees_a_gpu, 3):
        assert outcome.error == "CollectiveBroken"
        assert "of the workers [0, 1, 2] that train together [0, 1] see no GPU" in outcome.text


def test_a_worker_that_does_not_come_is_named_with_the_option() -> None:
    outcomes = run_ranks(3, jobs.one_never_loads, 3)
    for outcome in outcomes[:2]:
        assert outcome.error == "CollectiveBroken"
        assert "rpc.connect_timeout_s) for the workers [2] to load" in outcome.text
