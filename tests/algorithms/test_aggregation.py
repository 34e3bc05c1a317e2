"""Weights of tokens against loops, components of a loss that do not dilute each other, and the page
of the tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.algorithms.aggregation import AGGREGATIONS
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.policy_loss import PolicyObjective
from realhf.algorithms.presets import PRESETS, TABLES, page
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import (
    PredictedTokens,
    component_weights,
    replace_keys,
    select_weighted_part,
)
from realhf.api.sample import MicroBatchSpec, SequenceSample
from realhf.backends.training.micro_batches import Ranks, split_micro_batches
from realhf.registry import advantage_estimators, policy_losses
from tests.algorithms.policy_gradient.test_decoupled_objective import GivenOutputs
from tests.algorithms.tiny_policy import context, tiny_actor

ROOT = Path(__file__).resolve().parents[2]


def ragged(seed: int) -> SequenceSample:
    """Three groups of rollouts, each of one to three rows; one rollout failed; turns of one to
    three tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    rollouts = [
        [[draw(2, 9) for _ in range(draw(1, 4))] for _ in range(draw(2, 4))] for _ in range(3)
    ]
    lengths = [[n for rows in group for n in rows] for group in rollouts]
    flat = [n for group in lengths for n in group]
    failed = draw(0, len(rollouts[0]))
    owner = [
        (i, k) for i, group in enumerate(rollouts) for k, rows in enumerate(group) for _ in rows
    ]
    mask = torch.rand(sum(flat), generator=g) < 0.7
    turns = torch.tensor([t // 3 for n in flat for t in range(n)]).int()
    one = [[1] * len(group) for group in lengths]
    shifted = [[n - 1 for n in group] for group in lengths]
    total = sum(map(sum, shifted))
    tensors = {
        "packed_input_ids": torch.randint(0, 50, (sum(flat),), generator=g),
        "loss_mask": mask,
        "turn_ids": torch.where(mask, turns, -1),
        "packed_logprobs": -3 * torch.rand(total, generator=g),
        "packed_ref_logprobs": -3 * torch.rand(total, generator=g),
        "rewards": torch.tensor([float((i + k) % 2) for i, k in owner]),
        "outcome": torch.tensor(
            [3 if own == (0, failed) else 0 for own in owner], dtype=torch.uint8
        ),
        "rollout_index": torch.tensor([k for _, k in owner], dtype=torch.int32),
    }
    rules = {"packed_input_ids": lengths, "loss_mask": lengths, "turn_ids": lengths}
    rules |= {"packed_logprobs": shifted, "packed_ref_logprobs": shifted}
    return SequenceSample.from_tensors(
        ["a", "b", "c"], tensors, {key: rules.get(key, one) for key in tensors}
    )


def cells(sample: SequenceSample) -> list[tuple[int, int, int, int, int]]:
    """(position, group, rollout, row, turn) of every trained token, in plain numbers."""
    tokens = PredictedTokens.from_sample(sample)
    found = []
    at = 0
    turns = sample["turn_ids"].tolist()
    start = 0
    group = sample.group_index("packed_input_ids").tolist()
    index = sample["rollout_index"].tolist()
    for row, n in enumerate(sample.lengths("packed_input_ids").values.tolist()):
        for t in range(1, n):
            if tokens.mask[at]:
                found.append(
                    (
                        at,
                        group[row],
                        100 * group[row] + index[row],
                        row,
                        100 * row + turns[start + t],
                    )
                )
            at += 1
        start += n
    return found


def loop(
    values: list[float], own: list[tuple[int, int, int, int, int]], aggregation: str, constant: int
) -> float:
    """The aggregated loss, by nested means and sums."""

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / len(numbers)

    def parts(
        of: list[tuple[int, int, int, int, int]], column: int
    ) -> list[list[tuple[int, int, int, int, int]]]:
        return [
            [cell for cell in of if cell[column] == key]
            for key in sorted({cell[column] for cell in of})
        ]

    def tokens(of: list[tuple[int, int, int, int, int]]) -> list[float]:
        return [values[cell[0]] for cell in of]

    return {
        "token_mean": lambda: mean(tokens(own)),
        "seq_mean_token_mean": lambda: mean([mean(tokens(o)) for o in parts(own, 2)]),
        "seq_mean_token_sum": lambda: mean([sum(tokens(o)) for o in parts(own, 2)]),
        "constant": lambda: mean([sum(tokens(o)) / constant for o in parts(own, 2)]),
        "prompt_mean_token_mean": lambda: mean([mean(tokens(o)) for o in parts(own, 1)]),
        "turn_mean_token_mean": lambda: mean([mean(tokens(t)) for t in parts(own, 4)]),
        "seq_mean_turn_mean": lambda: mean(
            [mean([mean(tokens(t)) for t in parts(o, 4)]) for o in parts(own, 2)]
        ),
    }[aggregation]()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_aggregation_equals_loops(aggregation: str) -> None:
    """Rollouts of several rows count once, and turns of different rows are different turns."""
    for seed in range(4):
        sample = ragged(seed)
        weights = component_weights(sample, aggregation, 7)["loss_weights"]
        values = torch.randn(
            len(weights), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        expected = loop(values.tolist(), cells(sample), aggregation, 7)
        assert float((weights.double() * values).sum()) == pytest.approx(
            expected, rel=1e-5, abs=1e-7
        )
        assert bool((weights[~PredictedTokens.from_sample(sample).mask] == 0).all())


def test_turns_that_nobody_told_are_refused() -> None:
    bare = ragged(0)
    bare = bare.select(bare.keys - {"turn_ids"})
    with pytest.raises(ValueError, match="turn_ids"):
        component_weights(bare, "turn_mean_token_mean")
    with pytest.raises(ValueError, match=r"ppo\.loss_agg by turn, needs the key turn_ids"):
        PolicyGradientInterface({"loss_agg": "seq_mean_turn_mean"}).train_step(None, bare, None)  # type: ignore[arg-type]
    assert (
        resolve({"loss_agg": "seq_mean_turn_mean"}).turn_keys == ("turn_ids",)
        and resolve({}).turn_keys == ()
    )


def mixed(seed: int, junk: float = 0.0) -> SequenceSample:
    """A batch of which some tokens train by reward, some by cross-entropy, some by both; ``junk``
    outside the mask."""
    sample = ragged(seed)
    g = torch.Generator().manual_seed(seed)
    mask = PredictedTokens.from_sample(sample).mask
    drawn = {
        key: torch.randint(0, 3, mask.shape, generator=g) / 2
        for key in ("rl_weights", "kl_weights", "ce_weights")
    }
    return replace_keys(
        sample, shifted={key: torch.where(mask, value, junk) for key, value in drawn.items()}
    )


def objective(
    options: Any, sample: SequenceSample, current: torch.Tensor, n_mbs: int = 1
) -> tuple[float, Any, Any]:
    """Loss, gradient and statistics of the micro-batches of a minibatch, as an engine sums them."""
    part = select_weighted_part(
        sample,
        component_weights(sample, options.loss_agg, 7),
        torch.ones(PredictedTokens.from_sample(sample).n_sequences).bool(),
    )
    assert part is not None
    loss = 0.0
    gradient = torch.zeros_like(current)
    stats = {}
    for piece in split_micro_batches(part, MicroBatchSpec(n_mbs=n_mbs), Ranks()):
        own = current[piece.place].clone().requires_grad_()
        value, found = PolicyObjective(options, 0)(GivenOutputs(own), piece.sample)  # type: ignore[arg-type]
        (gradient[piece.place],) = torch.autograd.grad(value, own)
        loss += float(value.detach())
        stats = {
            name: stats.get(name, 0.0) + number
            for name, number in found.items()
            if not name.endswith("_max")
        }
    return loss, gradient, stats


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean_token_mean"]
)
def test_each_component_is_aggregated_over_its_own_tokens(aggregation: str) -> None:
    """Loss and gradient in plain numbers: -A lp on tokens with an rl weight, k2 to the reference with a kl weight, and
    -lp with a ce weight. What stands outside the mask, and how the batch is cut, changes nothing."""
    options = resolve(
        {"algo": "reinforce", "loss_agg": aggregation, "kl_loss_coef": 0.3, "kl_estimator": "k2"}
    )
    for seed in range(3):
        sample = mixed(seed)
        n = len(PredictedTokens.from_sample(sample).mask)
        g = torch.Generator().manual_seed(50 + seed)
        advantages = torch.randn(n, generator=g)
        current = -3 * torch.rand(n, generator=g)
        sample = replace_keys(sample, shifted={"advantages": advantages})
        loss, gradient, stats = objective(options, sample, current)
        lp = current.double().requires_grad_()
        ref = sample["packed_ref_logprobs"].double()
        by_token = {
            "rl_weights": -advantages * lp,
            "kl_weights": 0.3 * (lp - ref) ** 2 / 2,
            "ce_weights": -lp,
        }
        expected: Any = 0.0
        for key, values in by_token.items():
            share = sample[key].tolist()
            own = [cell for cell in cells(sample) if share[cell[0]] != 0]
            expected = expected + loop(
                [s * v for s, v in zip(share, values, strict=True)], own, aggregation, 7
            )
        (wanted,) = torch.autograd.grad(expected, lp)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-7)
        assert stats["n_trained_tokens"] == sum(
            sample["rl_weights"][cell[0]] != 0 for cell in cells(sample)
        )
        spoilt = replace_keys(mixed(seed, math.nan), shifted={"advantages": advantages})
        outside = ~PredictedTokens.from_sample(sample).mask
        other = objective(options, spoilt, current.masked_fill(outside, math.nan))
        assert other[0] == loss and torch.equal(other[1], gradient) and other[2] == stats
        cut = objective(options, sample, current, n_mbs=3)
        assert cut[0] == pytest.approx(loss, rel=1e-5) and cut[2] == pytest.approx(stats, rel=1e-5)
        torch.testing.assert_close(cut[1], gradient)


def test_a_batch_without_components_is_one_where_all_tokens_count() -> None:
    options = resolve({"kl_loss_coef": 0.1})
    sample = ragged(1)
    n = len(PredictedTokens.from_sample(sample).mask)
    g = torch.Generator().manual_seed(2)
    sample = replace_keys(sample, shifted={"advantages": torch.randn(n, generator=g)})
    current = -3 * torch.rand(n, generator=g)
    told = replace_keys(sample, shifted={"rl_weights": torch.ones(n), "kl_weights": torch.ones(n)})
    plain = objective(options, sample, current)
    same = objective(options, told, current)
    assert plain[0] == same[0] and torch.equal(plain[1], same[1]) and plain[2] == same[2]


@pytest.mark.slow
def test_a_train_step_reads_the_components(tmp_path: Path) -> None:
    """Rows without an advantage are trained where cross-entropy wants them, advantages are those of
    the tokens that rewards train, and a failed rollout trains by no component."""
    sample = ragged(3)
    sample = sample.select(sample.keys - {"packed_ref_logprobs"})
    equal = SequenceSample.from_tensors(
        sample.ids,
        {"rewards": torch.ones(len(sample["rewards"]))},
        {"rewards": sample.seqlens["rewards"]},
    )
    flat = sample.select(sample.keys - {"rewards"}).update(equal)
    n = len(PredictedTokens.from_sample(sample).mask)
    interface = PolicyGradientInterface({})
    assert interface.train_step(tiny_actor(), flat, context(tmp_path))["n_updates"] == 0
    half = (torch.arange(n) % 2).float()
    told = replace_keys(flat, shifted={"ce_weights": half})
    stats = interface.train_step(tiny_actor(), told, context(tmp_path))
    assert (
        stats["n_updates"] == 1 and stats["loss_ce"] == pytest.approx(stats["loss"], abs=1e-6) != 0
    )
    split = replace_keys(sample, shifted={"rl_weights": half, "ce_weights": 1 - half})
    prepared, counted = interface.prepare(split)
    assert bool((prepared["advantages"][half == 0] == 0).all()) and bool(
        (prepared["advantages"] != 0).any()
    )
    failed = torch.repeat_interleave(
        sample["outcome"] != 0, torch.tensor(sample.lengths("packed_logprobs").values)
    )
    assert not bool(PredictedTokens.from_sample(prepared).mask[failed].any()) and bool(failed.any())
    assert counted["n_tokens"] == float(
        (PredictedTokens.from_sample(prepared).mask & (half > 0)).sum()
    )


def test_the_page_is_that_of_the_tables() -> None:
    """``python -m realhf.algorithms.presets`` makes it again, up to what was measured."""
    tables, measured, _ = (
        (ROOT / "docs" / "algorithms.md")
        .read_text(encoding="utf-8")
        .partition("\n## What they learn\n")
    )
    assert tables == page() and measured


def test_the_page_names_every_estimator_and_every_loss() -> None:
    """Those without a preset stood in the reference alone, and nobody found them."""
    by_option = {table.option: table for table in TABLES}
    for option, registry, key, default in (
        ("ppo.adv_estimator", advantage_estimators, "adv_estimator", "grpo"),
        ("ppo.loss", policy_losses, "loss", "ppo"),
    ):
        rows = by_option[option].rows
        ours = {name for name in registry if registry.get(name).__module__.startswith("realhf.")}
        assert {*rows} == ours, "tests of the docs register others in the same process"
        for preset, row in PRESETS.items():
            assert f"`{preset}`" in rows[row.options.get(key, default)][-1]
    assert by_option["ppo.adv_estimator"].rows["maxrl"][-1] == "none"
