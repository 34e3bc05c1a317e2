"""``actor_train`` alone on a worker: one step of GRPO, against the same step in plain torch."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.mfc.graph_calls import (
    ACTOR_STEP,
    EPS_CLIP,
    EPS_CLIP_HIGHER,
    KL_LOSS,
    TEMPERATURE,
    TRAIN_GROUPS,
    TRAIN_OUTCOME,
)
from tests.mfc.mfc_bench import replaced, sequences, shortened


def grpo_advantages(rewards):
    """(R - mean) / (std + 1e-6) of the valid rollouts of each group, 0 of the others."""
    found = []
    start = 0
    for group in TRAIN_GROUPS:
        places = range(start, start + len(group))
        valid = [rewards[place] for place in places if TRAIN_OUTCOME[place] == 0]
        mean = sum(valid) / len(valid)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in valid) / (len(valid) - 1))
        found += [
            (rewards[p] - mean) / (std + 1e-6) if TRAIN_OUTCOME[p] == 0 else 0.0 for p in places
        ]
        start += len(group)
    return found


def grpo_loss(model, sample):
    """Shao et al. 2024, eq. 3, with the clip range of the options: the mean over the rollouts that
    did not fail of the mean over their sampled tokens of max(-A rho, -A clip(rho)) + beta (exp(ref
    - lp) - 1 - (ref - lp)). Returns it and the figures that a step reports."""
    advantages = grpo_advantages(sample["rewards"].tolist())
    rows = zip(
        *(
            sequences(sample, key)
            for key in ("packed_input_ids", "loss_mask", "packed_logprobs", "packed_ref_logprobs")
        ),
        advantages,
        TRAIN_OUTCOME,
        strict=True,
    )
    losses = []
    ratios = []
    n_clipped = 0
    for ids, mask, behaviour, reference, advantage, code in rows:
        if code:
            continue
        logits = model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE
        every = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = mask[1:]
        logprobs = every[sampled]
        ratio = (logprobs - behaviour[sampled].double()).exp()
        plain = -advantage * ratio
        held = -advantage * ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP_HIGHER)
        apart = reference[sampled].double() - logprobs
        losses.append((torch.maximum(plain, held) + KL_LOSS * (apart.exp() - 1 - apart)).mean())
        ratios += ratio.tolist()
        n_clipped += int((held > plain).sum())
    figures = {
        "ratio_mean": sum(ratios) / len(ratios),
        "ratio_max": max(ratios),
        "clip_fraction": n_clipped / len(ratios),
    }
    return torch.stack(losses).mean(), figures


class PlainTrainer:
    """AdamW of torch on the weights in a folder, in float64; biases and norms do not decay."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        wide = [p for p in self.model.parameters() if p.ndim > 1]
        narrow = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [
            {"params": wide, "weight_decay": ACTOR_STEP.weight_decay},
            {"params": narrow, "weight_decay": 0.0},
        ]
        betas = (ACTOR_STEP.beta1, ACTOR_STEP.beta2)
        self._adamw = torch.optim.AdamW(groups, lr=ACTOR_STEP.lr, betas=betas, eps=ACTOR_STEP.eps)

    def step(self, sample):
        """One step on the loss; returns its figures."""
        self._adamw.zero_grad()
        loss, figures = grpo_loss(self.model, sample)
        loss.backward()
        limit = ACTOR_STEP.gradient_clipping
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        assert float(norm) > limit, "the bound of the norm acts"
        self._adamw.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), **figures}


def weights(folder):
    """The tensors of a model, by name, in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()


@pytest.mark.slow
def test_two_steps_are_those_of_plain_torch(fresh, policy, train_sample):
    """The second one has moments, and other tokens."""
    plain = PlainTrainer(policy)
    for step in range(2):
        sample = train_sample(step)
        outputs, stats = fresh.run("actor_train", sample, step=step)
        assert outputs is None
        expected = plain.step(sample)
        assert expected["clip_fraction"] > 0.02 and expected["ratio_max"] > 1.5
        assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-3)
        assert stats["lr"] == pytest.approx(ACTOR_STEP.lr) and (
            stats["n_updates"],
            stats["skipped"],
        ) == (1, 0)
    before = weights(policy)
    trained = weights(fresh.export("actor", "two steps"))
    moved = 0.0
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, atol=2e-5, rtol=0, msg=name)
        moved = max(moved, float((tensor - before[name]).abs().max()))
    assert moved > 50 * 2e-5, "the steps are far larger than what they may differ by"


@pytest.mark.slow
def test_statistics_of_a_step(fresh, train_sample):
    stats = fresh.run("actor_train", train_sample()).stats
    names = (
        "n_groups",
        "groups_with_signal",
        "n_sequences",
        "n_rollouts",
        "n_invalid",
        "n_trainable",
    )
    assert [stats[name] for name in names] == [2, 1, 8, 8, 1, 7]
    assert stats["reward_mean"] == pytest.approx((1.0 + 0.25 + 4 * 0.5) / 7)
    sampled = [n - n // 2 for group in TRAIN_GROUPS for n in group]
    assert stats["n_tokens"] == stats["n_trained_tokens"] == sum(sampled) - sampled[3]


@pytest.mark.slow
def test_a_step_depends_on_its_batch_and_not_on_who_held_it(fresh, train_sample):
    sample = train_sample(3)
    stats = fresh.run("actor_train", sample).stats
    two = weights(fresh.export("actor", "two owners"))
    fresh.restore()
    again = fresh.run("actor_train", sample, n_owners=1).stats
    one = weights(fresh.export("actor", "one owner"))
    assert again == stats and all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda s: replaced(
                s, "rewards", torch.where(s["rewards"] == 0.25, torch.nan, s["rewards"])
            ),
            "a valid sequence has a reward that is not finite",
        ),
        (
            lambda s: shortened(s, "packed_logprobs"),
            "packed_logprobs of sample 'g1@4' has 9 entries for a sequence of 11 tokens, not 10",
        ),
        (
            lambda s: replaced(s, "rewards", s["rewards"].double()),
            "rewards of sample 'g0@4' is f64, not f32",
        ),
        (
            lambda s: replaced(s, "packed_input_ids", s["packed_input_ids"] - 400),
            "packed_input_ids of sample 'g0@4' has the token -",
        ),
    ],
    ids=["a reward of NaN", "a short key", "another type", "unknown tokens"],
)
def test_a_bad_input_is_one_error_changes_nothing_and_the_next_call_is_served(
    fresh, policy, train_sample, spoil, words
):
    assert words in fresh.error_of("actor_train", spoil(train_sample(4)))
    before = weights(policy)
    after = weights(fresh.export("actor", "spoiled"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert fresh.run("actor_train", train_sample(4)).stats["n_updates"] == 1


@pytest.mark.slow
def test_a_key_that_its_owner_does_not_have_is_named(fresh, train_sample):
    assert "does not hold rewards of g" in fresh.error_of(
        "actor_train", train_sample(4), lost="rewards"
    )


@pytest.mark.slow
def test_a_gradient_that_is_no_number_is_skipped_and_counted(fresh, policy, train_sample):
    """Log-probabilities of a sampler that broke: the update is left out, and the third one in a row
    ends the run."""
    sample = train_sample(5)
    broken = replaced(sample, "packed_logprobs", sample["packed_logprobs"] * torch.nan)
    found = [fresh.run("actor_train", broken, step=step).stats for step in range(3)]
    assert [stats["skipped"] for stats in found] == [1, 1, 1] and "stop" not in found[1]
    assert "not finite in 3 updates in a row" in found[2]["stop"]
    before = weights(policy)
    after = weights(fresh.export("actor", "skipped"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert fresh.run("actor_train", sample, step=3).stats["skipped"] == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_call_is_named(bench, train_sample):
    assert "'model_worker/1' died" in bench.error_of_kill("actor_train", train_sample(6))
