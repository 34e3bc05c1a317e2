"""Several updates from one batch: how it is cut, and that a ratio which has moved reaches the
clip."""

from __future__ import annotations

import pytest
import torch

from realhf.algorithms.inference import LogprobInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import PredictedTokens, minibatches
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import (
    GROUPS,
    OUTCOME,
    REWARDS,
    context,
    on_policy,
    tiny_actor,
    weights,
)


def test_parts_hold_every_sequence_once_and_balance_tokens(rollout_batch):
    sample = rollout_batch(GROUPS, [float(i) for i in range(12)])
    parts = minibatches(sample, 4, (3, 0))
    assert sorted(r for part in parts for r in part["rewards"].tolist()) == [
        float(i) for i in range(12)
    ]
    loads = [part.n_tokens("packed_input_ids") for part in parts]
    assert max(loads) - min(loads) <= max(map(max, GROUPS))
    assert max(len(part["rewards"]) for part in parts) > 1

    def rewards(seed):
        return [part["rewards"].tolist() for part in minibatches(sample, 4, seed)]

    assert rewards((3, 0)) == rewards((3, 0)) != rewards((3, 1))
    assert len(minibatches(sample, 20, (0, 0))) == 12


def test_a_clipped_token_has_no_gradient(rollout_batch, tmp_path):
    """Where all ratios lie beyond the clip on the side that it guards, an update changes
    nothing."""
    model = tiny_actor()
    sample = on_policy(model, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
    advantages = PolicyGradientInterface({}).prepare(sample)[0]["advantages"]
    moved = {"packed_logprobs": sample["packed_logprobs"] - 0.5 * advantages.sign()}
    sample = sample.select(sample.keys - {"packed_logprobs"}).update(
        SequenceSample.from_tensors(
            sample.ids, moved, {"packed_logprobs": sample.seqlens["packed_logprobs"]}
        )
    )
    stats = PolicyGradientInterface({}).train_step(model, sample, context(tmp_path))
    assert stats["clip_fraction"] == 1 and stats["grad_norm"] == 0


@pytest.mark.slow
def test_minibatches_repeat_bit_identically_and_depend_on_seed_and_microbatches_not(
    rollout_batch, tmp_path
):
    def trained(**spec):
        model = tiny_actor()
        sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
        stats = PolicyGradientInterface(
            {"ppo_n_minibatches": 3, "sample_reuse": 2, "kl_loss_coef": 0.1}
        ).train_step(model, sample, context(tmp_path, **spec))
        assert stats["n_updates"] == 6 and model.engine.version == 0
        return weights(model)

    assert torch.equal(trained(), trained())
    torch.testing.assert_close(trained(max_tokens_per_mb=16), trained(), atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"algo": "gspo"}, {"use_decoupled_loss": True, "prox_logp_method": "recompute"}]
)
def test_the_proximal_policy_is_that_before_the_first_update_in_every_pass(
    rollout_batch, tmp_path, options
):
    seen: list[tuple[int, SequenceSample]] = []
    model = tiny_actor()
    sample = on_policy(model, rollout_batch(GROUPS, REWARDS, OUTCOME), tmp_path)
    before = LogprobInterface("own").inference(model, sample, context(tmp_path))[0]["own"]
    score = model.engine.logprobs
    train = model.engine.train_batch

    def count(given, **more):
        seen.append((len(seen), given))
        return score(given, **more)

    parts: list[SequenceSample] = []
    model.engine.logprobs = count  # type: ignore[method-assign]
    model.engine.train_batch = lambda part, *a, **k: (parts.append(part), train(part, *a, **k))[1]  # type: ignore
    PolicyGradientInterface({**options, "ppo_n_minibatches": 2, "sample_reuse": 2}).train_step(
        model, sample, context(tmp_path)
    )
    assert len(seen) == 1 and len(parts) == 4
    known = {round(float(value), 5) for value in before}
    for part in parts:
        mask = PredictedTokens.from_sample(part).mask
        assert {round(float(value), 5) for value in part["proximal_logprobs"][mask]} <= known
