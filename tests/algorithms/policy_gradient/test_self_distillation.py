"""Self-distillation: what the policy says of its tokens with feedback in the prompt, against a
plain loop in float64, and the advantage that is made of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.resolution import resolve
from realhf.algorithms.self_distillation import SelfTeacherInterface
from realhf.algorithms.train_step import PredictedTokens, replace_keys
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import context, on_policy, tiny_actor

ROLLOUTS = [[(3, 5), (3, 8), (6, 4)], [(2, 6), (4, 3), (2, 2), (3, 7)]]
"""Tokens of prompt and completion of each row; the first two rows of either group are one
rollout."""
FAILED = 4
UNTOLD = 2
WITHOUT_MASK = 6
TEMPERATURE = 0.7


def told_batch(
    seed: int = 0,
) -> tuple[SequenceSample, list[tuple[list[int], list[bool], list[int], list[int]]]]:
    """A train input with feedback, and of each row its ids, its mask, its prompt and the prompt
    with feedback."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for number, (prompt, completion) in enumerate(row for group in ROLLOUTS for row in group):
        ids = torch.randint(0, 50, (prompt + completion,), generator=g).tolist()
        mask = [False] * prompt + (torch.rand(completion, generator=g) < 0.6).tolist()
        mask[-1] = True
        if number in (FAILED, WITHOUT_MASK):
            mask = [False] * len(mask)
        feedback = torch.randint(
            0, 50, (int(torch.randint(1, 6, (), generator=g)),), generator=g
        ).tolist()
        rows.append(
            (
                ids,
                mask,
                ids[:prompt],
                [-1] if number in (FAILED, UNTOLD) else [*ids[:prompt], *feedback],
            )
        )
    n = len(rows)
    outcome = [3 if number == FAILED else 0 for number in range(n)]
    tensors = {
        "packed_input_ids": torch.tensor([one for ids, *_ in rows for one in ids]),
        "loss_mask": torch.tensor([one for _, mask, *_ in rows for one in mask]),
        "prompt_mask": torch.tensor(
            [place < len(prompt) for ids, _, prompt, _ in rows for place in range(len(ids))]
        ),
        "feedback_prompt_ids": torch.tensor([one for *_, told in rows for one in told]),
        "rewards": torch.tensor([1.0, 1.0, 0.0, 0.25, math.nan, 0.5, 0.0]),
        "outcome": torch.tensor(outcome, dtype=torch.uint8),
        "rollout_index": torch.tensor([0, 0, 1, 0, 0, 1, 2], dtype=torch.int32),
    }
    sizes = iter(rows)
    lengths = []
    for group in ROLLOUTS:
        lengths.append([len(next(sizes)[0]) for _ in group])
    told = iter(rows)
    by_key = dict.fromkeys(("packed_input_ids", "loss_mask", "prompt_mask"), lengths)
    by_key["feedback_prompt_ids"] = [[len(next(told)[3]) for _ in group] for group in ROLLOUTS]
    ones = [[1] * len(group) for group in ROLLOUTS]
    return SequenceSample.from_tensors(
        ["a", "b"], tensors, {key: by_key.get(key, ones) for key in tensors}
    ), rows


@torch.no_grad()
def said(network: torch.nn.Module, ids: list[int]) -> list[float]:
    """The log-probability of every token but the first, one after the other."""
    logits = network(input_ids=torch.tensor([ids])).logits[0].double() / TEMPERATURE
    return [float(logits[place - 1].log_softmax(0)[ids[place]]) for place in range(1, len(ids))]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [{}, {"n_mbs": 3}, {"max_tokens_per_mb": 24}], ids=str)
def test_the_policy_judges_its_tokens_with_and_without_feedback(
    micro_batches: dict[str, int], tmp_path: Any
) -> None:
    """Rows of every length, several of a rollout, a failed one, one that was told nothing, one that
    trains nothing."""
    actor = tiny_actor()
    network = copy.deepcopy(actor.engine.model).double()  # type: ignore[attr-defined]
    sample, rows = told_batch()
    made, stats = SelfTeacherInterface(TEMPERATURE).inference(
        actor, sample, context(tmp_path, **micro_batches)
    )
    expected = []
    for ids, mask, prompt, told in rows:
        without = said(network, ids)
        with_feedback = said(network, [*told, *ids[len(prompt) :]]) if told != [-1] else []
        shift = len(told) - len(prompt)
        for place in range(1, len(ids)):
            counts = mask[place] and told != [-1]
            expected.append(
                with_feedback[place - 1 + shift] - without[place - 1] if counts else 0.0
            )
    assert sum(value != 0 for value in expected) > 10
    torch.testing.assert_close(
        made["feedback_logratios"], torch.tensor(expected), atol=2e-5, rtol=1e-4
    )
    assert stats["told"] == pytest.approx(4 / 5)


def test_where_nothing_was_told_nothing_is_computed(tmp_path: Any) -> None:
    sample, _ = told_batch()
    untold = {"feedback_prompt_ids": torch.full((7,), -1)}
    lengths = {"feedback_prompt_ids": [[1] * 3, [1] * 4]}
    sample = sample.select(sample.keys - {"feedback_prompt_ids"}).update(
        SequenceSample.from_tensors(sample.ids, untold, lengths)
    )
    made, stats = SelfTeacherInterface().inference(None, sample, context(tmp_path))  # type: ignore[arg-type]
    assert not made["feedback_logratios"].any() and stats["told"] == 0


@pytest.mark.parametrize(("rl", "distill"), [(0.0, 1.0), (1.0, 0.5)])
def test_the_advantage_is_the_share_of_the_reward_and_that_of_the_feedback(
    rl: float, distill: float, tmp_path: Any
) -> None:
    """Cut to +-10; of a failed rollout, and outside the mask, nothing, whatever stands there."""
    actor = tiny_actor()
    (sample, _) = told_batch()
    sample = on_policy(actor, sample, tmp_path)
    tokens = PredictedTokens.from_sample(sample)
    gaps = torch.linspace(-14, 14, len(tokens.mask))
    sample = replace_keys(
        sample, shifted={"feedback_logratios": torch.where(tokens.mask, gaps, math.nan)}
    )
    of_rewards = PolicyGradientInterface({}).prepare(sample)[0]["advantages"]
    options = {"algo": "sdpo", "rl_weight": rl, "distill_weight": distill}
    made, stats = PolicyGradientInterface(options).prepare(sample)
    held = gaps.clamp(-10, 10)
    expected = torch.where(tokens.mask, rl * of_rewards + distill * held, 0.0)
    torch.testing.assert_close(made["advantages"], expected)
    apart = (gaps.exp() - 1 - gaps).clamp(-10, 10)[tokens.mask]
    assert stats["kl_teacher"] == pytest.approx(float(apart.mean()), rel=1e-4)
    broken = replace_keys(sample, shifted={"feedback_logratios": torch.full_like(gaps, math.nan)})
    with pytest.raises(ValueError, match="feedback_inf: a log-probability is not a number"):
        PolicyGradientInterface(options).prepare(broken)


@pytest.mark.slow
def test_two_steps_bring_the_policy_nearer_to_itself_with_feedback(tmp_path: Any) -> None:
    """On the same tokens: what feedback makes likelier is likelier without it afterwards, and the
    other way round."""
    actor = tiny_actor(lr=3e-3)
    (sample, _) = told_batch()
    teacher = SelfTeacherInterface()
    interface = PolicyGradientInterface({"algo": "sdpo"})
    first = teacher.inference(actor, sample, context(tmp_path))[0]["feedback_logratios"]
    before = actor.engine.logprobs(sample, temperature=1.0, mb_spec=context(tmp_path).mb_spec)
    for step in range(2):
        batch = on_policy(actor, sample, tmp_path)
        batch = batch.update(teacher.inference(actor, sample, context(tmp_path, step))[0])
        stats = interface.train_step(actor, batch, context(tmp_path, step))
        assert stats["n_updates"] == 1 and stats["kl_teacher"] > 0
    after = actor.engine.logprobs(sample, temperature=1.0, mb_spec=context(tmp_path).mb_spec)
    assert float((first * (after - before)).sum()) > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"feedback": "any"}, "ppo.feedback has no effect with distill_weight 0"),
        (
            {"algo": "opd", "feedback_tokens": 99},
            "ppo.feedback_tokens has no effect with feedback 'none'",
        ),
        ({"algo": "sdpo", "feedback": "some"}, "ppo.feedback=some: unknown"),
        ({"algo": "sdpo", "feedback_tokens": 3}, "ppo.feedback_tokens=3: must be at least 16"),
        (
            {"algo": "sdpo", "feedback": "solved", "group_size": 1},
            "ppo.feedback=solved: another rollout of the group",
        ),
        ({"algo": "sdpo", "dynamic_sampling": 1.0}, "ppo.dynamic_sampling=1: with a teacher"),
        ({"algo": "sdpo", "reward_bias": 1.0}, "ppo.reward_bias has no effect with rl_weight 0"),
        (
            {"algo": "sdpo", "distill_weight": 0.0},
            "ppo.rl_weight=0, distill_weight=0: nothing would be learned",
        ),
    ],
)
def test_options_that_do_nothing_or_contradict_are_refused(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        resolve(options)


def test_what_it_needs_of_the_graph() -> None:
    assert resolve({"algo": "sdpo"}).scored_keys == ("feedback_logratios",)
    assert resolve({"algo": "opd"}).scored_keys == ("teacher_logprobs",)
    assert resolve({"algo": "sdpo", "feedback": "none"}).needs_teacher
