"""Off-policy corrections against loops written from their papers, gradients and statistics
included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from realhf.algorithms.options import policy_gradient_options
from realhf.algorithms.policy_loss import PolicyObjective
from realhf.algorithms.presets import CORRECTIONS
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import (
    PredictedTokens,
    component_weights,
    replace_keys,
    select_weighted_part,
    summary,
)
from realhf.api.model import TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.micro_batches import Ranks, split_micro_batches
from tests.algorithms.policy_gradient.test_decoupled_objective import GivenOutputs
from tests.algorithms.test_aggregation import ragged

Weight = Callable[[list[float], int], float]


def geometric(log_ratios: list[float]) -> float:
    return math.exp(sum(log_ratios) / len(log_ratios))


def product(log_ratios: list[float]) -> float:
    return math.prod(math.exp(x) for x in log_ratios)


PAPERS: dict[str, Weight] = {
    "none": lambda own, t: 1.0,
    "decoupled": lambda own, t: math.exp(own[t]) if math.exp(own[t]) <= 5 else 0.0,
    "tis": lambda own, t: min(math.exp(own[t]), 2.0),
    "seq_tis": lambda own, t: min(product(own), 2.0),
    "seq_mis": lambda own, t: product(own) if 0.5 <= product(own) <= 2 else 0.0,
    "mis": lambda own, t: min(math.exp(own[t]), 2.0) if 0.999 <= geometric(own) <= 1.001 else 0.0,
    "icepop": lambda own, t: math.exp(own[t]) if 0.5 <= math.exp(own[t]) <= 5 else 0.0,
}
"""The weight of token ``t`` of a row with these log ratios of proximal to behaviour probability."""
BY_SEQUENCE = ("seq_tis", "seq_mis")


def minibatch(seed: int, junk: float = 0.0) -> SequenceSample:
    """Rows of all kinds, one with a ratio of about 1; ``junk`` stands outside the mask."""
    sample = ragged(seed)
    g = torch.Generator().manual_seed(seed)
    tokens = PredictedTokens.from_sample(sample)
    old = sample["packed_logprobs"]
    apart = torch.randn(len(old), generator=g)
    apart = torch.where(tokens.sequence % 2 == 0, apart, 1e-4 * apart)
    shifted = {
        "packed_logprobs": old,
        "proximal_logprobs": old + apart,
        "advantages": torch.randn(len(old), generator=g),
    }
    shifted = {key: torch.where(tokens.mask, value, junk) for key, value in shifted.items()}
    sample = replace_keys(
        sample.select(["packed_input_ids", "loss_mask", "rollout_index"]), shifted=shifted
    )
    every = torch.ones(tokens.n_sequences, dtype=torch.bool)
    part = select_weighted_part(sample, component_weights(sample, "seq_mean_token_mean"), every)
    assert part is not None
    return part


def train(
    options: Any, part: SequenceSample, current: torch.Tensor, n_mbs: int = 1
) -> tuple[float, Any, Any]:
    """Loss, gradient and figures of an update, as an engine sums its micro-batches."""
    loss = 0.0
    gradient = torch.zeros_like(current)
    stats = {}
    for piece in split_micro_batches(part, MicroBatchSpec(n_mbs=n_mbs), Ranks()):
        own = current[piece.place].clone().requires_grad_()
        value, found = PolicyObjective(options, 0)(GivenOutputs(own), piece.sample)  # type: ignore[arg-type]
        (gradient[piece.place],) = torch.autograd.grad(value, own)
        loss += float(value.detach())
        stats = {
            k: max(stats.get(k, v), v) if k.endswith("_max") else stats.get(k, 0.0) + v
            for k, v in found.items()
        }
    return loss, gradient, summary([TrainResult(stats, 1.0, False)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_that_of_its_paper(name: str) -> None:
    options = resolve({"correction": name})
    assert options.use_decoupled_loss == (name != "none") and not options.needs_actor_inf
    touched = 0.0
    for seed in range(4):
        part = minibatch(seed)
        tokens = PredictedTokens.from_sample(part)
        n = len(part["advantages"])
        current = part["proximal_logprobs"] + 0.3 * torch.randn(
            n, generator=torch.Generator().manual_seed(9 + seed)
        )
        loss, gradient, stats = train(options, part, current)
        lp = current.double().requires_grad_()
        prox = part["proximal_logprobs"].double()
        old = part["packed_logprobs"]
        total = torch.zeros((), dtype=torch.float64)
        used = []
        kept = []
        for row in range(tokens.n_sequences):
            places = [t for t in range(n) if tokens.mask[t] and tokens.sequence[t] == row]
            own = [float(prox[t]) - float(old[t].double()) for t in places]
            weights = [PAPERS[name](own, i) for i in range(len(own))]
            used += weights[:1] if name in BY_SEQUENCE else weights
            kept += [any(weights)] if weights else []
            for t, w in zip(places, weights, strict=True):
                rho = (lp[t] - (old[t].double() if name == "none" else prox[t])).exp()
                a = float(part["advantages"][t])
                total = total + float(part["loss_weights"][t]) * w * torch.maximum(
                    -a * rho, -a * rho.clamp(0.8, 1.2)
                )
        (expected,) = torch.autograd.grad(total, lp)
        assert loss == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
        if name != "none":
            ess = sum(used) ** 2 / (len(used) * sum(w * w for w in used))
            assert stats["effective_sample_size"] == pytest.approx(ess, rel=1e-4)
            assert stats["rejected_sequences"] == pytest.approx(1 - sum(kept) / len(kept))
            touched += stats.get("rejected_fraction", 0.0) + stats.get("truncated_fraction", 0.0)
        cut = train(options, part, current, n_mbs=3)
        assert cut[0] == pytest.approx(loss, rel=1e-5, abs=1e-7) and cut[2] == pytest.approx(
            stats, rel=1e-5
        )
        spoilt = minibatch(seed, math.nan)
        other = train(options, spoilt, torch.where(tokens.mask, current, math.nan))
        assert other[0] == loss and torch.equal(other[1], gradient) and other[2] == stats
    assert (touched > 0) == (name != "none"), "the bounds of this case are met"


def test_shares_say_what_was_left_out_and_what_was_cut() -> None:
    """Of a row within the bounds of its mean and one outside: the first has a token above the
    cap."""
    options = resolve(
        {"correction": "mis", "behav_imp_sequence_cap": 1.5, "behav_imp_sequence_floor": 0.5}
    )
    part = minibatch(0)
    tokens = PredictedTokens.from_sample(part)
    rows = [
        row
        for row in range(tokens.n_sequences)
        if int((tokens.mask & (tokens.sequence == row)).sum()) > 1
    ]
    first, second = (tokens.mask & (tokens.sequence == row) for row in rows[:2])
    apart = torch.zeros(len(tokens.mask))
    apart[torch.nonzero(first)[0]], apart[torch.nonzero(first)[1]] = 1.0, -1.0
    apart[second] = 1.0
    part = replace_keys(part, shifted={"proximal_logprobs": part["packed_logprobs"] + apart})
    stats = train(options, part, part["proximal_logprobs"])[2]
    n = int(tokens.mask.sum())
    n_rows = int(tokens.sequences_with(tokens.mask).sum())
    assert stats["truncated_fraction"] == pytest.approx(1 / n)
    assert stats["rejected_fraction"] == pytest.approx(int(second.sum()) / n)
    assert stats["rejected_sequences"] == pytest.approx(1 / n_rows)


def test_options_beside_a_correction() -> None:
    """What is set stays, what is not comes from the paper, and what cannot be is refused."""
    got = resolve({"correction": "icepop", "behav_imp_weight_cap": 8.0})
    assert (got.behav_imp_weight_floor, got.behav_imp_weight_cap, got.behav_imp_weight_level) == (
        0.5,
        8.0,
        "token",
    )
    filtered = resolve({"correction": "mis", "behav_imp_weight_mode": "none"})
    assert (filtered.behav_imp_weight_mode, filtered.behav_imp_sequence_cap) == ("none", 1.001)
    assert not resolve({"correction": "none"}, sampler_differs=True).use_decoupled_loss
    for given in (
        {"correction": "tis"},
        {"correction": "none"},
        {"correction": "seq_mis", "algo": "gspo"},
    ):
        first = resolve(given, sampler_differs=True)
        again = resolve(first.to_plain_values(policy_gradient_options(given)))
        assert vars(again) == {**vars(first), "use_decoupled_loss": again.use_decoupled_loss}
    refused = {
        r"ppo.correction=tiss: unknown .*; did you mean 'tis'": {"correction": "tiss"},
        r"ppo.correction=tis: contradicts use_decoupled_loss=false": {
            "correction": "tis",
            "use_decoupled_loss": False,
        },
        r"ppo.correction=none: contradicts use_decoupled_loss=true": {
            "correction": "none",
            "use_decoupled_loss": True,
        },
        r"ppo.recompute_logprob has no effect": {"correction": "tis", "recompute_logprob": True},
        r"ppo.behav_imp_sequence_cap has no effect": {"behav_imp_sequence_cap": 1.1},
        r"ppo.behav_imp_sequence_floor=2: must be below": {
            "correction": "mis",
            "behav_imp_sequence_floor": 2.0,
        },
        r"ppo.behav_imp_weight_floor must be": {
            "correction": "icepop",
            "behav_imp_weight_floor": 6.0,
        },
    }
    for message, given in refused.items():
        with pytest.raises(ValueError, match=message):
            resolve(given)
