"""The decoupled objective of a minibatch against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from realhf.algorithms.policy_loss import PolicyObjective, loglinear_proximal
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens, replace_keys, token_weights
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.micro_batches import Ranks, split_micro_batches

GROUPS = [[9, 4], [1, 12, 6]]
STEP = 5
DECOUPLED: list[dict[str, Any]] = [
    {},
    {"behav_imp_weight_cap": 1.5, "behav_imp_weight_floor": 0.6},
    {
        "behav_imp_weight_mode": "truncate",
        "behav_imp_weight_cap": 1.5,
        "behav_imp_weight_floor": 0.6,
    },
    {"behav_imp_weight_mode": "none"},
    {"behav_imp_weight_level": "sequence", "behav_imp_weight_cap": 1.1},
    {
        "behav_imp_weight_level": "sequence",
        "behav_imp_weight_mode": "truncate",
        "behav_imp_weight_cap": 1.1,
    },
    {"algo": "gspo", "eps_clip": 0.1, "eps_clip_higher": 0.1},
    {"algo": "cispo", "eps_clip": 0.3, "eps_clip_higher": 0.3, "behav_imp_weight_cap": 1.2},
    {"algo": "rloo", "behav_imp_weight_mode": "truncate", "behav_imp_weight_cap": 1.2},
    {"c_clip": 1.2, "loss_agg": "token_mean"},
    {"ratio": "sequence", "c_clip": 1.3, "eps_clip_higher": 0.28},
    {"behav_imp_weight_mode": "none", "c_clip": 1.3, "eps_clip_higher": 0.28},
    {"prox_logp_method": "loglinear", "behav_imp_weight_cap": 1.3},
]


class GivenOutputs:
    """Stands for a forward pass: returns the log-probabilities that it was made with, whatever the
    temperature."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self._logprobs = logprobs

    def logprobs(self, *, temperature: float, with_entropy: bool) -> tuple[torch.Tensor, None]:
        return self._logprobs, None

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Nobody asks for it."""


def minibatch(rollout_batch: Any, options: Any, seed: int) -> tuple[torch.Tensor, SequenceSample]:
    """Current log-probabilities and the sample as the interface hands it to the engine."""
    sample = rollout_batch(GROUPS, [0.0] * 5, seed=seed)
    g = torch.Generator().manual_seed(100 + seed)
    tokens = PredictedTokens.from_sample(sample)
    old = sample["packed_logprobs"]
    per_sequence = torch.randn(tokens.n_sequences, generator=g)
    shifted = {
        "proximal_logprobs": old + 0.5 * torch.randn(len(old), generator=g),
        "packed_versions": torch.randint(-1, STEP + 1, (len(old),), generator=g, dtype=torch.int32),
        "advantages": torch.where(tokens.mask, per_sequence[tokens.sequence], 0.0),
        "loss_weights": token_weights(tokens, options.loss_agg),
    }
    current = (old + 0.5 * torch.randn(len(old), generator=g)).requires_grad_()
    return current, replace_keys(
        sample.select(["packed_input_ids", "loss_mask", "packed_logprobs"]), shifted=shifted
    )


def loop(
    current: list[float], part: SequenceSample, options: Any
) -> tuple[float, dict[str, float]]:
    """Loss and token sums of weight and of rejected tokens, after the formulas of section 10."""
    tokens = PredictedTokens.from_sample(part)
    mask = tokens.mask.tolist()
    seq = tokens.sequence.tolist()
    old = part["packed_logprobs"].tolist()
    adv = part["advantages"].tolist()
    agg = part["loss_weights"].tolist()
    versions = part["packed_versions"].tolist()
    prox = part["proximal_logprobs"].tolist()
    if options.prox_logp_method == "loglinear":
        alpha = [(STEP - v) / (STEP + 1 - v) if 0 <= v < STEP else 0.0 for v in versions]
        prox = [o + a * (c - o) for o, a, c in zip(old, alpha, current, strict=True)]
    total = 0.0
    sums = {"weight": 0.0, "bounded": 0.0}
    for t, inside in enumerate(mask):
        if not inside:
            continue
        own = [s for s in range(len(mask)) if mask[s] and seq[s] == seq[t]]
        rho = math.exp(current[t] - prox[t])
        if options.ratio == "sequence":
            rho = math.exp(sum(current[s] - prox[s] for s in own) / len(own))
        low = 1 - options.eps_clip
        high = 1 + options.eps_clip_higher
        if options.loss == "ppo":
            value = max(-adv[t] * rho, -adv[t] * min(max(rho, low), high))
            if options.c_clip is not None and adv[t] < 0:
                value = min(value, options.c_clip * -adv[t])
        else:
            value = (
                -adv[t]
                * current[t]
                * (min(max(rho, low), high) if options.loss == "cispo" else 1.0)
            )
        if options.behav_imp_weight_level == "sequence":
            w = math.exp(sum(prox[s] - old[s] for s in own) / len(own))
        else:
            w = math.exp(prox[t] - old[t])
        cap = options.behav_imp_weight_cap
        floor = options.behav_imp_weight_floor
        mode = options.behav_imp_weight_mode
        outside = mode != "none" and not floor <= w <= cap
        if mode == "none":
            w = 1.0
        elif outside:
            w = 0.0 if mode == "mask" else min(max(w, floor), cap)
        total += agg[t] * w * value
        sums["weight"] += w
        sums["bounded"] += outside
    return total, sums


@pytest.mark.parametrize("given", DECOUPLED, ids=str)
def test_loss_and_weights_equal_loops(rollout_batch: Any, given: dict[str, Any]) -> None:
    options = resolve({"use_decoupled_loss": True, **given})
    bounded = 0.0
    for seed in range(5):
        current, part = minibatch(rollout_batch, options, seed)
        loss, stats = PolicyObjective(options, STEP)(GivenOutputs(current), part)
        expected, sums = loop(current.tolist(), part, options)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert stats["behav_weight_mean"] == pytest.approx(sums["weight"], rel=1e-5)
        assert (
            stats.get("rejected_fraction", stats.get("truncated_fraction", 0.0)) == sums["bounded"]
        )
        bounded += sums["bounded"]
    wide = options.behav_imp_weight_cap == 5.0
    assert (bounded > 0) == (not wide), "the bounds of this case are met, or far away"


@pytest.mark.parametrize("given", DECOUPLED, ids=str)
def test_the_weight_is_constant_in_the_gradient(rollout_batch: Any, given: dict[str, Any]) -> None:
    """d loss / d lp of a decoupled objective is w times that of the same objective against the
    proximal policy."""
    options = resolve({"use_decoupled_loss": True, **given})
    current, part = minibatch(rollout_batch, options, 3)
    (gradient,) = torch.autograd.grad(
        PolicyObjective(options, STEP)(GivenOutputs(current), part)[0], current
    )
    prox = part["proximal_logprobs"]
    if options.prox_logp_method == "loglinear":
        prox = loglinear_proximal(
            current.detach(), part["packed_logprobs"], part["packed_versions"], STEP
        )
    plain = resolve({k: v for k, v in given.items() if not k.startswith(("behav", "prox"))})
    against = replace_keys(part, shifted={"packed_logprobs": prox})
    (unweighted,) = torch.autograd.grad(
        PolicyObjective(plain, STEP)(GivenOutputs(current), against)[0], current
    )
    tokens = PredictedTokens.from_sample(part)
    w = prox - part["packed_logprobs"]
    if options.behav_imp_weight_level == "sequence":
        w = torch.stack([w[tokens.mask & (tokens.sequence == s)].mean() for s in tokens.sequence])
    w = w.exp()
    cap = options.behav_imp_weight_cap
    floor = options.behav_imp_weight_floor
    w = {
        "mask": torch.where((w <= cap) & (w >= floor), w, 0.0),
        "truncate": w.clamp(floor, cap),
        "none": torch.ones_like(w),
    }[options.behav_imp_weight_mode]
    torch.testing.assert_close(gradient, torch.where(tokens.mask, w * unweighted, 0.0))
    assert float(gradient.abs().sum()) > 0


@pytest.mark.parametrize("algo", ["grpo", "gspo", "cispo", "dapo"])
def test_proximal_equal_to_behaviour_is_the_plain_objective(rollout_batch: Any, algo: str) -> None:
    decoupled = resolve({"algo": algo, "use_decoupled_loss": True})
    plain = resolve({"algo": algo})
    current, part = minibatch(rollout_batch, plain, 1)
    part = replace_keys(part, shifted={"proximal_logprobs": part["packed_logprobs"]})
    found = []
    for options in (decoupled, plain):
        loss, stats = PolicyObjective(options, STEP)(GivenOutputs(current), part)
        found.append(
            (
                loss.detach(),
                *torch.autograd.grad(loss, current),
                stats["clip_fraction"],
                stats["mismatch_kl"],
            )
        )
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:]


@pytest.mark.parametrize("given", DECOUPLED, ids=str)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_garbage_in_masked_positions_is_harmless(
    rollout_batch: Any, given: dict[str, Any], junk: float
) -> None:
    options = resolve({"use_decoupled_loss": True, **given})
    current, part = minibatch(rollout_batch, options, 2)
    outside = ~PredictedTokens.from_sample(part).mask
    found = []
    for spoil in (False, True):
        lp = current.detach().clone()
        own = {k: part[k].clone() for k in ("packed_logprobs", "proximal_logprobs")}
        if spoil:
            for tensor in (lp, *own.values()):
                tensor[outside] = junk
        lp.requires_grad_()
        loss, stats = PolicyObjective(options, STEP)(
            GivenOutputs(lp), replace_keys(part, shifted=own)
        )
        found.append((loss.detach(), *torch.autograd.grad(loss, lp), stats))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("given", DECOUPLED, ids=str)
def test_microbatches_add_up(rollout_batch: Any, given: dict[str, Any]) -> None:
    """Parts of a minibatch, on one worker or on several, sum to the whole: loss, gradient and
    statistics."""
    options = resolve({"use_decoupled_loss": True, **given})
    current, part = minibatch(rollout_batch, options, 4)
    whole, stats = PolicyObjective(options, STEP)(GivenOutputs(current), part)
    part = replace_keys(
        part, shifted={"advantages": part["advantages"], "current": current.detach()}
    )
    loss = 0.0
    sums = dict.fromkeys(stats, 0.0)
    pieces = [cut.sample for cut in split_micro_batches(part, MicroBatchSpec(n_mbs=2), Ranks())]
    assert len(pieces) == 2
    for piece in pieces:
        value, own = PolicyObjective(options, STEP)(
            GivenOutputs(piece["current"].requires_grad_()), piece
        )
        loss += float(value.detach())
        sums = {k: max(sums[k], v) if k.endswith("_max") else sums[k] + v for k, v in own.items()}
    assert loss == pytest.approx(float(whole.detach()), rel=1e-5, abs=1e-7)
    assert sums == pytest.approx(stats, rel=1e-6)


def test_recompute_logprob_replaces_the_behaviour_policy(rollout_batch: Any) -> None:
    plain = resolve({})
    recomputed = resolve({"recompute_logprob": True})
    current, part = minibatch(rollout_batch, plain, 6)
    got, stats = PolicyObjective(recomputed, STEP)(GivenOutputs(current), part)
    against = replace_keys(part, shifted={"packed_logprobs": part["proximal_logprobs"]})
    expected, other = PolicyObjective(plain, STEP)(GivenOutputs(current), against)
    assert torch.equal(got, expected) and "behav_weight_mean" not in stats
    assert (
        stats["ratio_mean"] == other["ratio_mean"]
        and stats["mismatch_abs"] != other["mismatch_abs"]
    )


def test_huge_weight_is_clamped_counted_and_rejected(rollout_batch: Any) -> None:
    options = resolve({"use_decoupled_loss": True})
    current, part = minibatch(rollout_batch, options, 0)
    mask = PredictedTokens.from_sample(part).mask
    part = replace_keys(part, shifted={"packed_logprobs": part["packed_logprobs"] - 500.0 * mask})
    loss, stats = PolicyObjective(options, STEP)(GivenOutputs(current), part)
    assert float(loss.detach()) == 0 and stats["rejected_fraction"] == float(mask.sum())
    assert stats["clamped_exponents"] == float(mask.sum())
    assert (
        stats["behav_weight_max"] == pytest.approx(math.exp(20.0))
        and stats["behav_weight_mean"] == 0
    )


def test_loglinear_proximal() -> None:
    old = torch.full((5,), -2.0)
    current = torch.full((5,), -1.0)
    got = loglinear_proximal(current, old, torch.tensor([5, 4, 2, -1, 7], dtype=torch.int32), STEP)
    assert got.tolist() == pytest.approx([-2.0, -1.5, -1.25, -2.0, -2.0])
