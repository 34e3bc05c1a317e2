"""Checkpoints of ranks: who writes what, and that any number of ranks goes on from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.api.parallel import Parallel
from realhf.backends.training.checkpoint import INDEX
from tests.backends.parallel import jobs, training
from tests.backends.parallel.rank_processes import results, run_ranks


def goes_on_as(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.nightly
@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_read_by_one_and_theirs_by_two(tmp_path: Path) -> None:
    """Saved after a call that only scored, which used to leave parameters whole that a rank has a
    part of: no checkpoint could be written then."""
    torch.set_num_threads(1)
    one = training.alone(training.tiny_model())
    expected = training.steps(one, "grpo", range(3), together=False)[2]
    old = training.alone(training.tiny_model())
    training.steps(old, "grpo", range(2), together=False)
    old.save_checkpoint(tmp_path / "one")
    files = results(run_ranks(2, training.saved_by, 2, Parallel(fsdp=2), tmp_path / "two"))
    assert files == [["__0_0.distcp", INDEX], ["__1_0.distcp"]]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(files[0] + files[1])
    again = training.alone(training.tiny_model())
    again.load_checkpoint(tmp_path / "two")
    assert again.version == 2
    goes_on_as(expected, training.steps(again, "grpo", [2], together=False)[0])
    for found in results(
        run_ranks(2, training.loaded_by, 2, Parallel(fsdp=2), [tmp_path / "one", tmp_path / "two"])
    ):
        for version, stats in found:
            assert version == 2
            goes_on_as(expected, stats)
    other = rf"checkpoint {tmp_path / 'two'} is not one of this model \(it has weights/.*norm.*\(actor.path"
    with pytest.raises(ValueError, match=other):
        training.alone(training.tiny_model(tied=False)).load_checkpoint(tmp_path / "two")
    for outcome in run_ranks(2, training.loaded_by_another, 2, Parallel(fsdp=2), tmp_path / "two"):
        assert outcome.error == "ValueError" and re.search(other, outcome.text), outcome.text


@pytest.mark.nightly
@pytest.mark.slow
def test_checkpoints_are_read_by_more_ranks_and_by_copies(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    one = training.alone(training.tiny_model())
    expected = training.steps(one, "grpo", range(3), together=False)[2]
    results(run_ranks(2, training.saved_by, 2, Parallel(fsdp=2), tmp_path / "cut"))
    results(run_ranks(2, training.saved_by, 2, Parallel(dp=2), tmp_path / "copies"))
    for parallel in (Parallel(fsdp=4), Parallel(dp=2)):
        for found in results(
            run_ranks(
                parallel.size,
                training.loaded_by,
                parallel.size,
                parallel,
                [tmp_path / "cut", tmp_path / "copies"],
            )
        ):
            for version, stats in found:
                assert version == 2
                goes_on_as(expected, stats)


@pytest.mark.slow
def test_copies_that_differ_are_refused_with_the_tensor() -> None:
    for rank, outcome in enumerate(results(run_ranks(2, training.copies_that_differ, 2))):
        assert (
            outcome[0] == "CopiesDiffer"
            and f"model.norm.weight differs between rank {rank}" in outcome[1]
        )


@pytest.mark.slow
def test_the_rank_whose_write_fails_says_so_and_the_others_that_it_did(tmp_path: Path) -> None:
    first, last = run_ranks(2, jobs.a_write_fails, 2, tmp_path)
    assert last.error == "OSError" and "No space left on device" in last.text
    assert first.error == "CollectiveBroken"
