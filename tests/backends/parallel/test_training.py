"""The same losses, log-probabilities and tokens, whatever the number of workers is and however the
model is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realhf.api.parallel import Parallel
from realhf.backends.training.torch_backend import ValueModel
from tests.backends.parallel import training
from tests.backends.parallel.rank_processes import results, run_ranks

slow = pytest.mark.slow
CASES = [
    pytest.param(Parallel(dp=2), "grpo", True, marks=slow, id="dp2-grpo"),
    pytest.param(Parallel(fsdp=2), "grpo", True, id="fsdp2-grpo"),
    pytest.param(Parallel(dp=2), "mixed", True, marks=slow, id="dp2-mixed"),
    pytest.param(Parallel(dp=4), "sft", False, marks=slow, id="dp4-sft"),
    pytest.param(Parallel(fsdp=4), "sft", False, marks=slow, id="fsdp4-sft"),
    pytest.param(Parallel(dp=4), "grpo", True, marks=slow, id="dp4-grpo"),
    pytest.param(Parallel(fsdp=4), "grpo", True, marks=slow, id="fsdp4-grpo"),
    pytest.param(Parallel(dp=2), "sft", False, marks=slow, id="dp2-sft"),
    pytest.param(Parallel(fsdp=2), "sft", False, marks=slow, id="fsdp2-sft"),
    pytest.param(Parallel(dp=2, fsdp=2), "grpo", False, marks=slow, id="dp2-fsdp2-grpo"),
]


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal but for the positions that were computed: what sequences on different ranks share is
    computed on each."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if "positions" in name:  # Tells how much padding there is, and what rows have in common.
            continue
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.nightly
@pytest.mark.parametrize(("parallel", "name", "tied"), CASES)
def test_five_steps_are_those_of_one_worker(parallel: Parallel, name: str, tied: bool) -> None:
    torch.set_num_threads(1)
    one = training.alone(training.tiny_model(tied))
    expected = training.steps(one, name, range(5), together=False)
    outcomes = results(
        run_ranks(parallel.size, training.on_ranks, parallel.size, parallel, name, tied)
    )
    for rank, found in enumerate(outcomes):
        assert found["stats"] == outcomes[0]["stats"], (
            f"rank {rank} reports what rank 0 does, to the bit"
        )
        for own, alone in zip(found["stats"], expected, strict=True):
            close(own, alone)
        assert found["scores"] == pytest.approx(training.scores(one), abs=1e-5)
        if "refused" in found:
            assert rank == 1 and "were not gathered" in found["refused"]
            continue
        assert found["tokens"] == training.tokens(one)
        assert found["weights"].keys() == one.weights().keys()
        for name_of, tensor in one.weights().items():
            torch.testing.assert_close(
                torch.tensor(found["weights"][name_of]), tensor, atol=1e-5, rtol=1e-4
            )


@pytest.mark.slow
def test_whole_weights_are_there_until_they_have_been_used() -> None:
    torch.set_num_threads(1)
    alone = training.alone(training.tiny_model())
    for found in results(run_ranks(2, training.released_on_ranks, 2)):
        for number in range(2):
            assert found[f"tokens {number}"] == [training.tokens(alone)] * 2
            assert found[f"names {number}"] == len(alone.weights())
            refused = "actor: its whole weights were not gathered on this worker"
            assert found[f"refused {number}"] == [refused] * 2, "released"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [Parallel(dp=2), Parallel(fsdp=2)], ids=["dp2", "fsdp2"])
def test_every_published_algorithm_trains_on_two_workers_as_on_one(parallel: Parallel) -> None:
    torch.set_num_threads(1)
    outcomes = results(run_ranks(2, training.published_on_ranks, 2, parallel))
    assert outcomes[0] == outcomes[1], "every rank reports what rank 0 does, to the bit"
    for name in training.PUBLISHED:
        expected = training.published_steps(training.alone, name)
        assert any(row["n_updates"] > 0 and row["grad_norm"] > 0 for row in expected), name
        for found, alone in zip(outcomes[0][name], expected, strict=True):
            close(found, alone)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [Parallel(dp=2), Parallel(fsdp=2), Parallel(dp=4), Parallel(fsdp=4)],
    ids=["dp2", "fsdp2", "dp4", "fsdp4"],
)
def test_five_steps_of_ppo_are_those_of_one_worker(parallel: Parallel) -> None:
    """Also with fewer sequences than ranks, and with one sequence. Losses are equal to 1e-5; the
    norm of a critic's gradient is the square root of sums that differ more in the last bits after
    four steps of AdamW."""
    torch.set_num_threads(1)
    expected = training.ppo_steps(
        training.alone(training.tiny_model()), training.alone(ValueModel(training.tiny_model()))
    )
    outcomes = results(run_ranks(parallel.size, training.ppo_on_ranks, parallel.size, parallel))
    for found in outcomes:
        assert found == outcomes[0], "every rank reports what rank 0 does, to the bit"
        for own, alone in zip(found, expected, strict=True):
            assert own.keys() == alone.keys()
            for name in own:
                if not name.endswith("positions_per_token"):  # Tells how much padding there is.
                    close = 1e-4 if name.endswith("grad_norm") else 1e-5
                    assert own[name] == pytest.approx(
                        alone[name], rel=close, abs=1e-5, nan_ok=True
                    ), name
    assert all(row["critic/loss"] > 0 for row in expected)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [Parallel(dp=2), Parallel(fsdp=2)], ids=["dp2", "fsdp2"])
def test_ranks_that_lay_rows_out_differently_are_refused(parallel: Parallel) -> None:
    """Each would compute its share of other rows: some sequences twice, and some never."""
    for outcome in run_ranks(2, training.one_shares_no_prefixes, 2, parallel):
        assert outcome.error == "RuntimeError" and "actor: rank" in outcome.text
        assert "lay rows out differently" in outcome.text and "'packs': False" in outcome.text
