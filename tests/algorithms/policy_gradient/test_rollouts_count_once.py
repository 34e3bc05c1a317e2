"""Rollouts of several rows: what compares, averages or counts sequences sees each rollout once,
however it was cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.critic import CriticInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import minibatches
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import context, tiny_actor, tiny_critic

WHOLE = [[[6], [16], [16], [5]], [[4], [9], [7], [8]]]
"""Trained tokens of every row of every rollout of two groups."""
CUT = [[[6], [2] * 8, [2] * 8, [5]], [[4], [3, 3, 3], [7], [1, 7]]]
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, 1.0, 0.0]]
CASES: list[dict[str, Any]] = [
    {"algo": "grpo"}, {"algo": "drgrpo", "loss_scale_len": 40}, {"algo": "rloo"}, {"algo": "reinforce"},
    {"algo": "reinforce_pp", "kl_ctl": 0.0}, {"adv_estimator": "reinforce_pp_baseline"},
    {"algo": "grpo", "adv_norm": True}, {"algo": "grpo", "credit": "turn"}, {"algo": "rloo", "credit": "turn"},
]  # fmt: skip


def batch(rows, rewards, failed=()):
    """A train input in which every row is a token that nobody predicts and then the tokens that
    train. Cut or whole, what is said of each trained token is the same; ``failed`` are rollouts of
    the first group without a reward."""
    lengths = [[n + 1 for rollout in group for n in rollout] for group in rows]
    shifted = [[n - 1 for n in group] for group in lengths]
    ones = [[1] * len(group) for group in lengths]
    generator = torch.Generator().manual_seed(0)
    trained = sum(map(sum, shifted))
    drawn = {
        name: -3 * torch.rand(trained, generator=generator)
        for name in ("packed_logprobs", "packed_ref_logprobs")
    }
    versions = torch.randint(0, 5, (trained,), generator=generator).int()
    first = [token == 0 for group in lengths for n in group for token in range(n)]
    per_row = [
        (reward, number, number in failed and group is rows[0])
        for group, own in zip(rows, rewards, strict=True)
        for number, (rollout, reward) in enumerate(zip(group, own, strict=True))
        for _ in rollout
    ]
    tensors = {
        "packed_input_ids": torch.full((len(first),), 7),
        "loss_mask": ~torch.tensor(first),
        **drawn,
        "packed_versions": versions,
        "rewards": torch.tensor([reward for reward, _, _ in per_row]),
        "outcome": torch.tensor([3 if lost else 0 for _, _, lost in per_row], dtype=torch.uint8),
        "rollout_index": torch.tensor([number for _, number, _ in per_row], dtype=torch.int32),
        "seq_no_eos_mask": torch.tensor([number == 1 for _, number, _ in per_row]),
        "turn_ids": torch.where(torch.tensor(first), -1, 0).int(),
        "turn_rewards": torch.tensor([reward for reward, _, _ in per_row]),
        "values": torch.rand(trained, generator=generator),
    }
    by_length = {"packed_input_ids": lengths, "loss_mask": lengths, "turn_ids": lengths}
    by_length |= dict.fromkeys(
        ("packed_logprobs", "packed_ref_logprobs", "packed_versions", "values"), shifted
    )
    return SequenceSample.from_tensors(
        ["a", "b"], tensors, {key: by_length.get(key, ones) for key in tensors}
    )


def trained_parts(sample, options, tmp_path):
    """The statistics of a train step, and what each update of the engine got."""
    model = tiny_actor()
    parts = []
    train = model.engine.train_batch
    model.engine.train_batch = lambda part, *a, **k: (parts.append(part), train(part, *a, **k))[1]  # type: ignore
    return PolicyGradientInterface(options).train_step(model, sample, context(tmp_path)), parts


@pytest.mark.parametrize("failed", [(), (3,)], ids=["all valid", "one failed"])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_token_has_the_advantage_that_it_has_in_a_rollout_of_one_row(options, failed):
    """Failures of eight rows each used to move the mean of their group towards themselves, and were
    their own baseline; ``ppo.count=row`` still does so."""
    whole, cut = (
        PolicyGradientInterface(options).prepare(batch(rows, REWARDS, failed))
        for rows in (WHOLE, CUT)
    )
    assert torch.equal(cut[0]["advantages"], whole[0]["advantages"])
    assert cut[1] | {"n_sequences": 8.0, "n_trainable": whole[1]["n_trainable"]} == whole[1]
    assert cut[1]["n_sequences"] == 25 and cut[1]["n_rollouts"] == 8
    by_row = PolicyGradientInterface({**options, "count": "row"}).prepare(
        batch(CUT, REWARDS, failed)
    )
    bare = batch(CUT, REWARDS, failed)
    bare = PolicyGradientInterface(options).prepare(bare.select(bare.keys - {"rollout_index"}))
    assert torch.equal(by_row[0]["advantages"], bare[0]["advantages"]) and by_row[1] == bare[1]
    compares = options.get("algo") != "reinforce_pp"
    assert (
        torch.equal(by_row[0]["advantages"], whole[0]["advantages"]) != compares
        or "adv_norm" in options
    )
    assert by_row[1]["reward_mean"] != whole[1]["reward_mean"]


@pytest.mark.parametrize(
    "aggregation", [name for name, row in AGGREGATIONS.items() if not row.by_turn]
)
def test_a_token_weighs_what_it_weighs_in_a_rollout_of_one_row(tmp_path, aggregation):
    options = {"loss_agg": aggregation, "kl_loss_coef": 0.1}
    options |= {"loss_scale_len": 40} if aggregation == "constant" else {}
    (cut, parts), (whole, expected) = (
        trained_parts(batch(rows, REWARDS), options, tmp_path) for rows in (CUT, WHOLE)
    )
    assert torch.equal(parts[0]["loss_weights"], expected[0]["loss_weights"])
    assert torch.equal(parts[0]["packed_logprobs"], expected[0]["packed_logprobs"]), (
        "the same tokens"
    )
    for name in (
        "staleness/head_mean",
        "staleness/hist_4",
        "response_tokens_mean",
        "too_long_fraction",
    ):
        assert cut[name] == whole[name], name


def test_a_rollout_is_in_one_minibatch():
    """So that each update can count it once."""
    for n in (2, 3, 8):
        parts = minibatches(batch(CUT, REWARDS), n, (0, 0))
        owners = [{(i, k) for i, k in _rollouts(part)} for part in parts]
        assert len(parts) == n and sum(map(len, owners)) == len(set().union(*owners)) == 8
    assert len(minibatches(batch(CUT, REWARDS), 20, (0, 0))) == 8


def _rollouts(sample):
    group = sample.group_index("packed_input_ids").tolist()
    return [(sample.ids[i], int(k)) for i, k in zip(group, sample["rollout_index"], strict=True)]


@pytest.mark.slow
def test_the_divergence_that_steers_the_kl_reward_is_that_of_rollouts(tmp_path):
    """Of the actor and of the critic alike: spread over its rows, a rollout used to lie too near
    the reference."""
    options = {
        "algo": "rloo",
        "kl_ctl": 0.1,
        "kl_estimator": "k1",
        "kl_target": 2.0,
        "kl_horizon": 10.0,
    }
    moved = []
    for rows in (WHOLE, CUT):
        interface = PolicyGradientInterface(dict(options))
        sample = batch(rows, REWARDS)
        stats = interface.train_step(tiny_actor(), sample, context(tmp_path))
        critic = CriticInterface({**options, "algo": "ppo"})
        _trained(critic, tiny_critic(), sample, tmp_path)
        moved.append(
            (
                stats["kl_of_sequence"],
                interface.state_dict()["kl_ctl"],
                critic.state_dict()["kl_ctl"],
            )
        )
    assert moved[0] == moved[1] and moved[0][1] == moved[0][2] != 0.1


def _trained(critic, model, sample, tmp_path):
    assert critic.train_step(model, sample, context(tmp_path))["n_updates"] == 1


def test_rows_that_an_agent_judges_apart_are_compared_with_other_rollouts_alone():
    """A row has what its rollout would have with its reward; the rollout counts with the mean of
    its rows."""
    sample = batch([[[2, 2], [3]], [[1], [1]]], [[0.0, 0.5], [1.0, 1.0]])
    judged = SequenceSample.from_tensors(
        sample.ids,
        {"rewards": torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0])},
        {"rewards": [[1] * 3, [1] * 2]},
    )
    sample = sample.select(sample.keys - {"rewards"}).update(judged)
    found, stats = PolicyGradientInterface({"algo": "rloo"}).prepare(sample)
    assert found["advantages"].tolist() == [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0, 0]
    assert stats["reward_mean"] == 0.75 and stats["groups_with_signal"] == 1
