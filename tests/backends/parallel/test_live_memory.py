"""The memory plan of a sharded trainer beside the storages that are alive on two ranks."""

from __future__ import annotations

import pytest
import torch

from realhf.base.hf_config import (
    estimate_size,
    gathered_bytes,
    scoring_memory,
    trainer_memory,
    training_memory,
)
from tests.backends.parallel.live_memory import (
    SHAPE,
    TOKENS,
    peaks_on_ranks,
    value_peaks_on_ranks,
)
from tests.backends.parallel.rank_processes import results, run_ranks

RANKS = 2
CASES = [
    pytest.param("float32", False),
    pytest.param("float32", True, marks=pytest.mark.nightly),
    pytest.param("bfloat16", False, marks=pytest.mark.nightly),
    pytest.param("bfloat16", True, marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tied"), CASES)
def test_the_plan_of_a_sharded_trainer_is_what_two_ranks_have_in_use(
    dtype: str, tied: bool
) -> None:
    size = estimate_size({"model_type": "qwen3", **SHAPE, "tie_word_embeddings": tied})
    kept = trainer_memory(size, dtype, parts=RANKS)
    step = training_memory(size, dtype, TOKENS, checkpointing=False, parts=RANKS)
    scoring = scoring_memory(size, dtype, TOKENS, parts=RANKS)
    between = kept.weights + kept.masters + kept.moments
    planned = {
        "between": between,
        "step": between + kept.gradients + step.total,
        "scoring": between + scoring.total,
        "scoring after publication": between + scoring.total,
        "whole weights": between + gathered_bytes(size, dtype),
    }
    found = results(run_ranks(RANKS, peaks_on_ranks, RANKS, getattr(torch, dtype), tied))
    assert found[0]["step"] == found[1]["step"]
    assert found[1]["whole weights"] < found[0]["whole weights"], "only rank 0 keeps them"
    for name, nbytes in planned.items():
        assert found[0][name] == pytest.approx(nbytes, rel=0.1 if name != "between" else 0.01), name
    assert min(step.unsharded, scoring.unsharded) > 0.05 * between, "which counts in the result"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_plan_of_scoring_by_a_sharded_value_model_counts_no_head(tied: bool) -> None:
    size = estimate_size({"model_type": "qwen3", **SHAPE, "tie_word_embeddings": tied})
    planned = scoring_memory(size, "float32", TOKENS, parts=RANKS, predicts_tokens=False)
    found = results(run_ranks(RANKS, value_peaks_on_ranks, RANKS, torch.float32, tied))
    assert found == [pytest.approx(planned.total, rel=0.05)] * RANKS
