"""Ranks in processes of their own: what they add up, and how they fail together."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from realhf.api.model import ForwardOutputs
from realhf.api.parallel import CollectiveBroken
from realhf.api.sample import SequenceSample
from realhf.backends.parallel.process_groups import GroupRanks, RendezvousStore, TorchWorld
from realhf.backends.training.torch_engine import TorchEngine
from tests.backends.parallel import jobs, training
from tests.backends.parallel.rank_processes import results, run_ranks

pytestmark = pytest.mark.slow


def test_ranks_add_up_to_the_same_bits_and_are_alone_outside_a_group_call() -> None:
    found = results(run_ranks(3, jobs.sums, 3))
    for rank, own in enumerate(found):
        assert own["alone"] == (0, 1, [0, 1, 2]) and own["after"] == 1
        assert (own["rank"], own["size"]) == (rank, 3)
        assert own["sum"] == [0.0, 6.0, 12.0, 18.0]
        assert own["gradients"] == [[1.0, 2.0, 3.0], [6.0, 6.0], None], "None counts as 0, fp32 sum"
        assert [numbers["all"] for numbers in own["gathered"]] == [1.0] * 3
        assert own["gathered"][2]["of_2"] == 2.1 and math.isnan(own["gathered"][1]["of_1"])

    shares = [[own["own"][case] for own in found] for case in range(4)]
    assert shares == [
        [[0, 1], [2, 3, 4, 5], [6]],
        [[], [0], []],
        [[0], [1, 2], [3]],
        [[0], [1, 2], [3, 4]],
    ]


def test_ranks_that_come_for_different_calls_are_refused() -> None:
    for outcome in run_ranks(2, jobs.another_call, 2):
        assert outcome.error == "CollectiveBroken" and "is about call" in outcome.text


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["raises", "killed", "stuck", "stuck beside NCCL"])
def test_a_failure_of_one_rank_breaks_off_all(how: str) -> None:
    """Also where one of the groups of a worker cannot be broken off: that used to keep the
    connections of all open."""
    outcomes = run_ranks(3, jobs.one_fails, 3, how)
    own = {"raises": "MemoryError", "killed": "Killed"}
    for outcome in outcomes[:2]:
        assert outcome.error == "CollectiveBroken" and "aborted the step" in outcome.text
    assert outcomes[2].error == own.get(how, "CollectiveBroken")


@pytest.fixture
def lonely_world() -> Iterator[TorchWorld]:
    """A world of one rank, whose collectives do nothing: so nothing fails in them when it is broken
    off."""
    meeting = RendezvousStore(1, 60.0)
    world = TorchWorld(meeting.address, 0, [0], join_s=60.0, timeout_s=60.0)
    world.create_groups([[0]])
    yield world
    world.close()


@pytest.mark.parametrize("loss", ["finite", "not finite"])
def test_a_rank_that_is_broken_off_without_an_error_neither_steps_nor_answers(
    lonely_world: TorchWorld, loss: str
) -> None:
    """A GPU ends a collective that is broken off with a part of its sums and says nothing: the
    optimizer used to step on them, or to skip the step, and the rank answered success."""
    ranks = GroupRanks(lonely_world, [0], sharded=False, device=torch.device("cpu"))
    options = {"optimizer": training.OptimizerConfig(lr=1e-2), "total_train_steps": 10}
    engine = TorchEngine(training.tiny_model(), None, ranks=ranks, **options)
    before = torch.cat([weight.reshape(-1).clone() for weight in engine.weights().values()])

    def broken(outputs: ForwardOutputs, part: SequenceSample) -> tuple[Tensor, dict[str, float]]:
        lonely_world.abort("rank 2 failed")
        return -outputs.logprobs()[0].sum() * (1 if loss == "finite" else math.nan), {}

    with (
        pytest.raises(CollectiveBroken, match="aborted: rank 2 failed"),
        ranks.together("step 1"),
    ):
        engine.train_batch(training.batch(0), broken, mb_spec=training.SPEC)
    assert torch.equal(
        torch.cat([weight.reshape(-1) for weight in engine.weights().values()]), before
    )


def test_a_call_that_was_broken_off_at_its_very_end_has_failed(lonely_world: TorchWorld) -> None:
    ranks = GroupRanks(lonely_world, [0], sharded=True, device=torch.device("cpu"))
    with ranks.together("step 1"):
        pass
    with (
        pytest.raises(CollectiveBroken, match="rank 0 of 1 aborted step 2"),
        ranks.together("step 2"),
    ):
        lonely_world.abort("rank 1 failed")


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
