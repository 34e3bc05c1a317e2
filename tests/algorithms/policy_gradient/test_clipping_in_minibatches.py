"""Several updates on one batch: ratios leave 1 and clips bite, and every loss is what its formula
says.

The formulas stand here once more, in float64, token by token; of the code under test they use
nothing but the log-probabilities of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import PredictedTokens, replace_keys
from realhf.api.model import Model, TrainResult
from realhf.api.sample import MicroBatchSpec, SequenceSample
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor

SPEC = MicroBatchSpec()
MINIBATCHES = 3
PASSES = 2
Rows = list[list[int]]


class Witness:
    """Stands before the engine and notes each minibatch with the log-probabilities that it
    meets."""

    def __init__(self, engine):
        self._engine = engine
        self.seen: list[tuple[SequenceSample, list[float], TrainResult]] = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def train_batch(self, part, *args, **more):
        current = self._engine.logprobs(part, temperature=1.0, mb_spec=SPEC).double().tolist()
        result = self._engine.train_batch(part, *args, **more)
        self.seen.append((part, current, result))
        return result


def trained(options, sample, tmp_path):
    """A step of several updates, each of which moves the policy far."""
    model = tiny_actor(lr=0.03)
    witness = Witness(model.engine)
    interface = PolicyGradientInterface(
        {
            "ppo_n_minibatches": MINIBATCHES,
            "sample_reuse": PASSES,
            "loss_agg": "token_mean",
            **options,
        },
        skip_zero_advantage=False,
    )
    stats = interface.train_step(Model("actor", witness, None), sample, context(tmp_path))  # type: ignore[arg-type]
    assert stats["n_updates"] == MINIBATCHES * PASSES == len(witness.seen)
    return stats, witness


@pytest.fixture
def sample(rollout_batch, tmp_path):
    """A batch of the tiny actor's own."""
    drawn = rollout_batch(GROUPS, REWARDS, OUTCOME)
    own = LogprobInterface("packed_logprobs").inference(tiny_actor(), drawn, context(tmp_path))[0]
    return drawn.select(drawn.keys - {"packed_logprobs"}).update(own)


def rows_of(part):
    """The positions of the trained tokens of each sequence."""
    tokens = PredictedTokens.from_sample(part)
    rows: Rows = [[] for _ in range(tokens.n_sequences)]
    for t, (sequence, trains) in enumerate(
        zip(tokens.sequence.tolist(), tokens.mask.tolist(), strict=True)
    ):
        if trains:
            rows[sequence].append(t)
    return [row for row in rows if row]


def token_ratio(row, current, old):
    return [math.exp(current[t] - old[t]) for t in row]


def sequence_ratio(row, current, old):
    """The geometric mean of the tokens' ratios, for each of them."""
    return [math.exp(sum(current[t] - old[t] for t in row) / len(row))] * len(row)


def surrogate(ratio, advantage, low, high, dual=math.inf):
    """The loss of a token, and whether the clip decides it."""
    plain = -advantage * ratio
    cut = -advantage * min(max(ratio, low), high)
    loss = max(plain, cut)
    if advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss, cut > plain


def check(stats, witness, ratio_of, old_of, low, high, *, dual=math.inf, weight_of=None):
    """Compare losses and the number of clipped tokens of every minibatch; return all ratios after
    the first one."""
    clipped = tokens = 0
    later: list[float] = []
    for number, (part, current, result) in enumerate(witness.seen):
        advantages = part["advantages"].double().tolist()
        old = old_of(part)
        total = 0.0
        rows = rows_of(part)
        for row in rows:
            ratios = ratio_of(row, current, old)
            weights = [1.0] * len(row) if weight_of is None else weight_of(row, old, part)
            for t, ratio, weight in zip(row, ratios, weights, strict=True):
                loss, cut = surrogate(ratio, advantages[t], low, high, dual)
                total += weight * loss
                clipped += cut
            later += ratios if number else []
            if number == 0:
                assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-5), (
                    "nothing has moved before the first"
                )
        count = sum(len(row) for row in rows)
        tokens += count
        assert result.stats["loss"] == pytest.approx(total / count, rel=1e-4, abs=1e-6)
        assert result.stats["clip_fraction"] == sum(
            surrogate(ratio, advantages[t], low, high)[1]
            for row in rows
            for t, ratio in zip(row, ratio_of(row, current, old), strict=True)
        )
    assert stats["clip_fraction"] == pytest.approx(clipped / tokens) and clipped > 0, (
        "the clip must bite here"
    )
    assert stats["ratio_max"] == pytest.approx(max(1.0, *later), rel=1e-4)
    assert stats["ratio_mean"] == pytest.approx(
        (sum(later) + tokens - len(later)) / tokens, rel=1e-4
    )
    return later


def behaviour(part):
    return part["packed_logprobs"].double().tolist()


def proximal(part):
    return part["proximal_logprobs"].double().tolist()


@pytest.mark.slow
def test_ppo_clips_on_both_sides(sample, tmp_path):
    stats, witness = trained({}, sample, tmp_path)
    later = check(stats, witness, token_ratio, behaviour, 0.8, 1.2)
    assert min(later) < 0.8 and max(later) > 1.2


@pytest.mark.slow
def test_clip_higher_leaves_more_room_above(sample, tmp_path):
    """The same steps with more room above: fewer tokens are clipped, and no ratio below 0.8 is any
    freer."""
    narrow, _ = trained({}, sample, tmp_path)
    stats, witness = trained({"eps_clip_higher": 1.0}, sample, tmp_path)
    later = check(stats, witness, token_ratio, behaviour, 0.8, 2.0)
    assert (
        any(1.2 < ratio < 2.0 for ratio in later)
        and stats["clip_fraction"] < narrow["clip_fraction"]
    )


@pytest.mark.slow
def test_the_dual_clip_bounds_what_a_negative_advantage_costs(sample, tmp_path):
    stats, witness = trained({"c_clip": 1.3}, sample, tmp_path)
    check(stats, witness, token_ratio, behaviour, 0.8, 1.2, dual=1.3)
    assert stats["dual_clip_fraction"] > 0


@pytest.mark.slow
def test_gspo_clips_whole_sequences(sample, tmp_path):
    """Against the policy at the start of the step; with a wide range, and with the published
    one."""
    options = {"algo": "gspo", "eps_clip": 0.05, "eps_clip_higher": 0.1}
    stats, witness = trained(options, sample, tmp_path)
    later = check(stats, witness, sequence_ratio, proximal, 0.95, 1.1)
    assert min(later) < 0.95 and max(later) > 1.1
    published, strict = trained({"algo": "gspo"}, sample, tmp_path)
    check(published, strict, sequence_ratio, proximal, 1 - 3e-4, 1 + 4e-4)


def of_tokens(row, prox, part):
    """What a token's proximal over its behaviour probability is, and 0 above 1.5."""
    raw = [math.exp(prox[t] - behaviour(part)[t]) for t in row]
    return [weight if weight <= 1.5 else 0.0 for weight in raw]


def of_sequences(row, prox, part):
    """The geometric mean of these, cut to 1.02."""
    return [min(1.02, math.exp(sum(prox[t] - behaviour(part)[t] for t in row) / len(row)))] * len(
        row
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "weight_of"),
    [
        ({"behav_imp_weight_cap": 1.5}, of_tokens),
        (
            {
                "behav_imp_weight_level": "sequence",
                "behav_imp_weight_mode": "truncate",
                "behav_imp_weight_cap": 1.02,
            },
            of_sequences,
        ),
    ],
    ids=["token", "sequence"],
)
def test_decoupled_clips_against_the_start_of_the_step_and_weighs_against_the_sampler(
    sample: SequenceSample,
    tmp_path: Path,
    given: dict[str, Any],
    weight_of: Callable[..., list[float]],
) -> None:
    """Tokens were sampled by a policy that lies beside the trainer's, as that of another engine
    does."""
    beside = torch.randn(len(sample["packed_logprobs"]), generator=torch.Generator().manual_seed(5))
    stale = replace_keys(
        sample, shifted={"packed_logprobs": sample["packed_logprobs"] + 0.3 * beside}
    )
    options = {"use_decoupled_loss": True, "prox_logp_method": "recompute", **given}
    stats, witness = trained(options, stale, tmp_path)
    check(stats, witness, token_ratio, proximal, 0.8, 1.2, weight_of=weight_of)
    assert stats.get("rejected_fraction", 0.0) + stats.get("truncated_fraction", 0.0) > 0
    start = tiny_actor().engine.logprobs(sample, temperature=1.0, mb_spec=SPEC)
    mask = PredictedTokens.from_sample(sample).mask
    apart = (start - stale["packed_logprobs"])[mask].abs().max()
    assert float(apart) > 0.5, "the weights have something to correct"
