"""Whoever keeps rollouts gets what the train step saw of every token; the step itself stays the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import PredictedTokens
from realhf.api.sample import MicroBatchSpec
from realhf.api.trace import TrainedRows
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor


class Kept:
    """A recorder in memory."""

    keeps = True

    def __init__(self):
        self.rows: list[TrainedRows] = []

    def played(self, sample):
        raise AssertionError("nothing is played here")

    def trained(self, rows):
        self.rows.append(rows)


@pytest.mark.parametrize(
    "options", [{}, {"ppo_n_minibatches": 3, "sample_reuse": 2}, {"algo": "gspo"}], ids=["one update", "six", "gspo"]
)
def test_what_is_kept_is_what_was_trained(rollout_batch, tmp_path, options):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    stats, kept = [], Kept()
    for recorder in (None, kept):
        model = tiny_actor()
        first = model.engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
        own = context(tmp_path, n_mbs=2)
        own = own if recorder is None else replace(own, recorder=recorder)
        stats.append(PolicyGradientInterface(dict(options)).train_step(model, sample, own))
    assert stats[0] == stats[1], "keeping changes nothing"
    (rows,) = kept.rows
    tokens = PredictedTokens.of(sample)
    valid = torch.tensor(OUTCOME) == 0
    assert list(rows.ids) == ["t0", "t1", "t2", "t3"] and list(rows.rows) == [3, 3, 3, 3]
    assert list(rows.lengths) == [n - 1 for group in GROUPS for n in group]
    assert (rows.mask == (tokens.mask & valid[tokens.sequence]).numpy()).all()
    seen = ~np.isnan(rows.current)
    assert (seen[rows.mask] == (rows.advantages != 0)[rows.mask]).all(), "rows without signal are not scored"
    trained = seen & rows.mask
    assert trained.sum() > 20
    before = trained & ~np.isnan(rows.before)
    assert before.sum() == trained.sum() or (before.sum() > 4 and "sample_reuse" in options)
    np.testing.assert_allclose(rows.before[before], first.numpy()[before], rtol=1e-4, atol=1e-5)
    if not options:
        np.testing.assert_allclose(
            rows.ratio[trained], np.exp(rows.current - rows.behaviour)[trained], rtol=1e-4, err_msg="old is the engine"
        )
        clipped = rows.clipped[trained].mean()
        assert clipped == pytest.approx(stats[1]["clip_fraction"] + stats[1]["dual_clip_fraction"], abs=0.05) != 0
    if "sample_reuse" in options:
        assert not np.allclose(rows.current[before], rows.before[before], atol=1e-4), "the last pass came later"
