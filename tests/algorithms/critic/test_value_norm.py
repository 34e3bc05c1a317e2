"""The units that a critic predicts in, and the loss of its predictions."""

import math

import pytest
import torch

from realhf.algorithms.critic import ReturnMoments, value_loss


def test_before_anything_was_seen_the_units_are_those_of_rewards():
    moments = ReturnMoments(0.9)
    moments.observe(torch.zeros(0))
    values = torch.tensor([0.5, -2.0])
    assert (moments.mean, moments.std) == (0.0, 1.0)
    assert torch.equal(moments.normalised(values), values) and torch.equal(moments.restored(values), values)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_moments_are_weighted_means_of_the_batches_seen(decay):
    """Batch k of n has the weight decay^(n-1-k), and the weights sum to one from the first batch on."""
    generator = torch.Generator().manual_seed(1)
    batches = [2 + k + torch.randn(5 + k, generator=generator, dtype=torch.float64) for k in range(4)]
    moments = ReturnMoments(decay)
    for n, batch in enumerate(batches, 1):
        moments.observe(batch)
        weights = [decay ** (n - 1 - k) for k in range(n)]
        mean, square = (
            sum(w * float(power.mean()) for w, power in zip(weights, powers, strict=True)) / sum(weights)
            for powers in (batches[:n], [b * b for b in batches[:n]])
        )
        assert moments.mean == pytest.approx(mean)
        assert moments.std == pytest.approx(math.sqrt(square - mean**2))
    values = torch.tensor([0.1, 5.0])
    torch.testing.assert_close(moments.restored(moments.normalised(values)), values)


def test_equal_returns_do_not_blow_up_the_units():
    moments = ReturnMoments(0.9)
    moments.observe(torch.full((7,), 0.3))
    assert moments.mean == pytest.approx(0.3) and moments.std == 0.01


def test_moments_go_on_where_they_were_saved():
    first, second = ReturnMoments(0.9), ReturnMoments(0.9)
    first.observe(torch.tensor([1.0, 2.0]))
    second.load_state_dict(first.state_dict())
    for moments in (first, second):
        moments.observe(torch.tensor([5.0]))
    assert (first.mean, first.std) == (second.mean, second.std)


def test_a_return_that_is_no_number_is_refused():
    moments = ReturnMoments(0.9)
    with pytest.raises(ValueError, match="not finite"):
        moments.observe(torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="value_norm_decay=1"):
        ReturnMoments(1.0)


def test_the_value_loss_is_its_formula():
    """In float64, with and without the clip; the gradient vanishes where the clip decides."""
    predicted = torch.tensor([0.0, 0.5, 1.0, -1.0, 0.35], requires_grad=True)
    before = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1])
    target = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    losses, clipped = value_loss(predicted, before, target, 0.2)
    for v, old, r, loss, cut in zip(
        predicted.tolist(), before.tolist(), target.tolist(), losses.tolist(), clipped.tolist(), strict=True
    ):
        held = min(max(v, old - 0.2), old + 0.2)
        assert loss == pytest.approx(max((v - r) ** 2, (held - r) ** 2) / 2)
        assert cut == ((held - r) ** 2 > (v - r) ** 2)
    losses.sum().backward()
    assert predicted.grad is not None
    assert (
        [bool(g) for g in predicted.grad] == [not cut for cut in clipped.tolist()] == [True, False, False, True, True]
    )
    plain, nowhere = value_loss(predicted, before, target, None)
    torch.testing.assert_close(plain, (predicted - target).square() / 2)
    assert not bool(nowhere.any())
