"""Every loss formula against loops, and what garbage in masked positions may not do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import (
    LossTerms,
    cispo_loss,
    kl_estimate,
    kl_penalty,
    ppo_loss,
    reinforce_loss,
)
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens, token_weights, weighted_sum
from realhf.api.sample import MicroBatchSpec
from realhf.api.trace import TrainedRows
from realhf.registry import policy_losses
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor

LENGTHS = [4, 1, 6, 3]


def random_terms(seed=0):
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    old = -3 * torch.rand(n, generator=g)
    current = (old + torch.randn(n, generator=g)).requires_grad_()
    mask = torch.rand(n, generator=g) < 0.7
    mask[LENGTHS[0]] = False  # the second sequence has no trainable token
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    advantages = torch.randn(len(LENGTHS), generator=g)[sequence]
    return LossTerms(current, old, advantages, mask, sequence, len(LENGTHS))


def test_clip_counters():
    options = resolve({"eps_clip": 0.2, "c_clip": 3.0})
    old = torch.zeros(5)
    ratio = torch.tensor([1.5, 1.5, 0.5, 4.0, 1.0])
    adv = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0])
    terms = LossTerms(
        ratio.log(), old, adv, torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.int64), 1
    )
    got = ppo_loss(terms, options)
    assert got.clipped.tolist() == [True, False, True, False, False]
    assert got.dual_clipped.tolist() == [False, False, False, True, False]


def test_cispo_and_reinforce_gradients():
    terms = random_terms(3)
    cispo = cispo_loss(terms, resolve({"algo": "cispo", "eps_clip": 0.3, "eps_clip_higher": 0.5}))
    (grad,) = torch.autograd.grad(cispo.loss.sum(), terms.logprobs)
    weight = (terms.logprobs.detach() - terms.old).exp().clamp(0.7, 1.5)
    torch.testing.assert_close(grad, torch.where(terms.mask, -weight * terms.advantages, 0.0))
    plain = reinforce_loss(terms, resolve({"algo": "reinforce"}))
    (grad,) = torch.autograd.grad(plain.loss.sum(), terms.logprobs)
    torch.testing.assert_close(grad, torch.where(terms.mask, -terms.advantages, 0.0))


def test_sequence_ratio_gradient_is_that_of_the_own_token():
    """GSPO-token: d(s_i)/d(lp_t) = s_i at every unclipped token of the sequence."""
    terms = random_terms(5)
    options = resolve({"algo": "gspo", "eps_clip": 100.0, "eps_clip_higher": 100.0})
    (grad,) = torch.autograd.grad(ppo_loss(terms, options).loss.sum(), terms.logprobs)
    for t in range(len(grad)):
        own = terms.mask & (terms.sequence == terms.sequence[t])
        ratio = (terms.logprobs.detach() - terms.old)[own].mean().exp() if terms.mask[t] else 0.0
        assert float(grad[t]) == pytest.approx(float(-terms.advantages[t] * ratio), rel=1e-4)


@pytest.mark.parametrize(
    "given", [{"algo": "gspo"}, *({"loss": name} for name in policy_losses)], ids=str
)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_garbage_in_masked_positions_is_harmless(given: dict[str, str], junk: float) -> None:
    """It holds for every loss that has a name, and for the ratio of sequences."""
    options = resolve(given)
    loss_fn = policy_losses.get(options.loss)

    def value_and_gradient(spoil):
        terms = random_terms(1)
        data: dict[str, Any] = {}
        for name in ("logprobs", "old", "advantages"):
            tensor = getattr(terms, name).detach().clone()
            if spoil:
                tensor[~terms.mask] = junk
            data[name] = tensor
        data["logprobs"].requires_grad_()
        terms = LossTerms(
            **data, mask=terms.mask, sequence=terms.sequence, n_sequences=terms.n_sequences
        )
        loss = weighted_sum(loss_fn(terms, options).loss, terms.mask / terms.mask.sum(), terms.mask)
        (grad,) = torch.autograd.grad(loss, terms.logprobs)
        return loss.detach(), grad

    clean = value_and_gradient(False)
    spoilt = value_and_gradient(True)
    assert torch.equal(clean[0], spoilt[0]) and torch.equal(clean[1], spoilt[1])


def test_huge_ratio_is_clamped_and_counted():
    lp = torch.tensor([0.0], requires_grad=True)
    one = torch.ones(1, dtype=torch.bool)
    terms = LossTerms(
        lp, torch.tensor([-500.0]), torch.tensor([-1.0]), one, torch.zeros(1, dtype=torch.int64), 1
    )
    got = ppo_loss(terms, resolve({}))
    assert got.clamped == 1 and float(got.loss.detach()) == pytest.approx(math.exp(20.0))


def test_empty_mask_gives_zero_with_graph():
    x = torch.ones(3, requires_grad=True)
    mask = torch.zeros(3, dtype=torch.bool)
    sequence = torch.zeros(3, dtype=torch.int64)
    one = torch.zeros(1).long()
    tokens = PredictedTokens(mask, sequence, one, one)
    loss = weighted_sum(x, token_weights(tokens, "seq_mean_token_mean"), mask)
    (grad,) = torch.autograd.grad(loss, x)
    assert float(loss.detach()) == 0 and grad.tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_penalty_pulls_harder_the_further_a_token_lies_below_the_reference(estimator):
    """A clamped value used to have no gradient: k3 pulled with -12.5 at 2.6 nats and with exactly 0
    at 2.7."""
    apart = torch.tensor(
        [-2.6, -2.7, -4.5, -15.0, -19.9, -20.1, -200.0, 0.0, 3.0, 50.0], requires_grad=True
    )
    value, cut = kl_penalty(apart, torch.zeros(10), estimator)
    (pull,) = torch.autograd.grad(value.sum(), apart)
    expected = apart.detach() if estimator == "k2" else 1 - (-apart.detach()).clamp(max=20).exp()
    torch.testing.assert_close(pull, expected)
    assert cut == (2 if estimator == "k3" else 0) and bool(value.isfinite().all())
    far = value.detach()[:7].tolist()
    assert far == sorted(far) and far[0] == pytest.approx(
        0.5 * 2.6**2 if estimator == "k2" else math.exp(2.6) - 3.6
    )


def test_kl_estimators():
    a = torch.tensor([-1.0, -2.0, 0.0])
    b = torch.tensor([-1.5, -1.0, -50.0])
    x = [0.5, -1.0, 50.0]
    assert kl_estimate(a, b, "k1").tolist() == pytest.approx([0.5, -1.0, 10.0])
    assert kl_estimate(a, b, "k2").tolist() == pytest.approx([0.125, 0.5, 10.0])
    k3 = [min(10.0, math.exp(-v) - 1 + v) for v in x]
    assert kl_estimate(a, b, "k3").tolist() == pytest.approx(k3)
    with pytest.raises(ValueError, match="k9"):
        kl_estimate(a, b, "k9")


class Kept:
    """A recorder in memory."""

    keeps = True

    def __init__(self):
        self.rows: list[TrainedRows] = []

    def record_played(self, sample):
        raise AssertionError("nothing is played here")

    def record_trained(self, rows):
        self.rows.append(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"ppo_n_minibatches": 3, "sample_reuse": 2}, {"algo": "gspo"}],
    ids=["one update", "six", "gspo"],
)
def test_what_is_kept_is_what_was_trained(rollout_batch, tmp_path, options):
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    stats = []
    kept = Kept()
    for recorder in (None, kept):
        model = tiny_actor()
        first = model.engine.logprobs(sample, temperature=1.0, mb_spec=MicroBatchSpec())
        own = context(tmp_path, n_mbs=2)
        own = own if recorder is None else replace(own, recorder=recorder)
        stats.append(PolicyGradientInterface(dict(options)).train_step(model, sample, own))
    assert stats[0] == stats[1], "keeping changes nothing"
    (rows,) = kept.rows
    tokens = PredictedTokens.from_sample(sample)
    valid = torch.tensor(OUTCOME) == 0
    assert list(rows.ids) == ["t0", "t1", "t2", "t3"] and list(rows.rows) == [3, 3, 3, 3]
    assert list(rows.lengths) == [n - 1 for group in GROUPS for n in group]
    assert (rows.mask == (tokens.mask & valid[tokens.sequence]).numpy()).all()
    seen = ~np.isnan(rows.current)
    assert (seen[rows.mask] == (rows.advantages != 0)[rows.mask]).all(), (
        "rows without signal are not scored"
    )
    trained = seen & rows.mask
    assert trained.sum() > 20
    before = trained & ~np.isnan(rows.before)
    assert before.sum() == trained.sum() or (before.sum() > 4 and "sample_reuse" in options)
    np.testing.assert_allclose(rows.before[before], first.numpy()[before], rtol=1e-4, atol=1e-5)
    if not options:
        np.testing.assert_allclose(
            rows.ratio[trained],
            np.exp(rows.current - rows.behaviour)[trained],
            rtol=1e-4,
            err_msg="old is the engine",
        )
        clipped = rows.clipped[trained].mean()
        assert (
            clipped
            == pytest.approx(stats[1]["clip_fraction"] + stats[1]["dual_clip_fraction"], abs=0.05)
            != 0
        )
    if "sample_reuse" in options:
        assert not np.allclose(rows.current[before], rows.before[before], atol=1e-4), (
            "the last pass came later"
        )
