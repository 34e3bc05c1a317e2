"""Tokens that were sampled under a token mask: training corrects for the mask, and compares engine
and trainer without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface, RecordedStep
from realhf.algorithms.policy_loss import MISMATCH, PolicyObjective
from realhf.algorithms.resolution import resolve
from realhf.algorithms.token_advantages import kl_of_behaviour
from realhf.algorithms.train_step import replace_keys
from realhf.api.keys import UNMASKED_LOGPROBS
from realhf.api.sample import SequenceSample

STEP = 4
ALLOWED = (0, 2, 3)
LOGITS = torch.tensor([0.3, 1.2, -0.4, 0.9, 0.1, -1.0])
VALUES = torch.tensor([1.0, 5.0, -0.5, 2.0, -4.0, 3.0])
CORRECTIONS: list[dict[str, Any]] = [
    {"correction": "decoupled"},
    {"correction": "tis"},
    {"correction": "decoupled", "prox_logp_method": "loglinear"},
    {"correction": "tis", "algo": "cispo"},
    {"correction": "tis", "algo": "reinforce"},
]


class Outputs:
    """A forward pass with given log-probabilities, which keeps what it is told to keep."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self._logprobs = logprobs
        self.kept: dict[str, torch.Tensor] = {}

    def logprobs(self, *, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, None]:
        del temperature, with_entropy
        return self._logprobs, None

    def keep(self, name: str, values: torch.Tensor) -> None:
        self.kept[name] = values


def evaluate(
    options: Any, current: torch.Tensor, part: SequenceSample
) -> tuple[torch.Tensor, dict[str, float]]:
    outputs: Any = Outputs(current)
    return PolicyObjective(options, STEP)(outputs, part)


def one_token_each(tokens: tuple[int, ...]) -> tuple[SequenceSample, torch.Tensor]:
    """A minibatch of one sampled token for each of ``tokens``, which were sampled under a mask that
    allows ``ALLOWED``, and their probabilities under that mask. The loss weights are the
    probabilities, so that a sum over the minibatch is an expectation."""
    n = len(tokens)
    unmasked = LOGITS.log_softmax(-1)[list(tokens)]
    masked = unmasked - LOGITS.log_softmax(-1)[list(ALLOWED)].logsumexp(-1)
    sample = SequenceSample.from_tensors(
        ["s"],
        {
            "packed_input_ids": torch.tensor([[9, token] for token in tokens]).flatten(),
            "loss_mask": torch.tensor([False, True] * n),
            "packed_logprobs": masked,
        },
        {
            "packed_input_ids": [[2] * n],
            "loss_mask": [[2] * n],
            "packed_logprobs": [[1] * n],
        },
    )
    shifted = {
        UNMASKED_LOGPROBS: unmasked,
        "packed_versions": torch.full((n,), STEP, dtype=torch.int32),
        "advantages": VALUES[list(tokens)],
        "loss_weights": masked.exp(),
    }
    return replace_keys(sample, shifted=shifted), masked


@pytest.mark.parametrize("given", CORRECTIONS, ids=str)
def test_the_gradient_is_that_of_the_policy_without_a_mask(given: dict[str, Any]) -> None:
    """In expectation over the masked samples it is the gradient of the policy's own expected
    advantage on the allowed tokens."""
    part, _ = one_token_each(ALLOWED)
    logits = LOGITS.clone().requires_grad_()
    current = logits.log_softmax(-1)[list(ALLOWED)]
    loss, stats = evaluate(resolve(given), current, part)
    loss.backward()
    expected = LOGITS.clone().requires_grad_()
    own = expected.softmax(-1)[list(ALLOWED)]
    (-(own * VALUES[list(ALLOWED)]).sum()).backward()
    torch.testing.assert_close(logits.grad, expected.grad, rtol=1e-4, atol=1e-6)
    mass = float(LOGITS.softmax(-1)[list(ALLOWED)].sum())
    assert stats["behav_weight_max"] == pytest.approx(mass, rel=1e-4), "never above 1"


def test_without_the_unmasked_values_the_gradient_would_be_another() -> None:
    """The same minibatch as if the mask had not been there: an interpolated proximal policy then
    takes the masked probabilities for the policy's, and nothing is corrected."""
    part, _ = one_token_each(ALLOWED)
    blind = part.select([key for key in part.keys if key != UNMASKED_LOGPROBS])
    options = resolve({"correction": "decoupled", "prox_logp_method": "loglinear"})
    grads = []
    for each in (part, blind):
        logits = LOGITS.clone().requires_grad_()
        current = logits.log_softmax(-1)[list(ALLOWED)]
        evaluate(options, current, each)[0].backward()
        grads.append(logits.grad)
    assert (grads[0] - grads[1]).abs().max() > 0.02


def test_a_mask_is_no_mismatch_and_hides_none() -> None:
    """Where engine and trainer agree, the mismatch is 0 however much the mask forbade; a wrong
    log-probability shows under a mask as it does elsewhere."""
    part, masked = one_token_each(ALLOWED)
    unmasked = part[UNMASKED_LOGPROBS]
    assert bool(((masked - unmasked) > 0.5).all()), "the mask forbids a good part"
    options = resolve({"correction": "decoupled"})
    for error in (0.0, 0.7):
        current = unmasked + torch.tensor([0.0, error, 0.0])
        outputs: Any = Outputs(current.requires_grad_())
        _, stats = PolicyObjective(options, STEP)(outputs, part)
        assert stats["mismatch_abs"] == pytest.approx(error, abs=1e-6)
        assert outputs.kept[MISMATCH].tolist() == pytest.approx([0.0, error, 0.0], abs=1e-6)
        assert (stats["mismatch_kl"] > 0.1) == (error > 0)


def test_the_kl_of_rewards_is_that_of_the_policy(rollout_batch: Any) -> None:
    sample = rollout_batch([[9, 4], [6, 5]], [1.0, 0.0, 0.5, 0.2])
    unmasked = sample["packed_logprobs"] - 0.8
    masked_sample = replace_keys(sample, shifted={UNMASKED_LOGPROBS: unmasked})
    as_if_free = replace_keys(sample, shifted={"packed_logprobs": unmasked})
    options = resolve({"kl_ctl": 0.1, "kl_estimator": "k1"})
    mask = torch.ones(len(unmasked), dtype=torch.bool)
    found = kl_of_behaviour(masked_sample, options, mask)
    assert torch.equal(found, kl_of_behaviour(as_if_free, options, mask))
    assert not torch.equal(found, kl_of_behaviour(sample, options, mask))


def test_the_train_call_passes_both_to_the_loss_and_records_the_comparable_one(
    rollout_batch: Any,
) -> None:
    sample = rollout_batch([[9, 4], [6, 5]], [1.0, 0.0, 0.5, 0.2])
    unmasked = sample["packed_logprobs"] - 0.8
    sample = replace_keys(sample, shifted={UNMASKED_LOGPROBS: unmasked})
    prepared, _ = PolicyGradientInterface({"correction": "decoupled"}).prepare(sample)
    assert {"packed_logprobs", UNMASKED_LOGPROBS} <= set(prepared.keys)
    rows = RecordedStep(STEP, prepared).rows(None)
    assert torch.equal(torch.from_numpy(rows.behaviour), unmasked)
