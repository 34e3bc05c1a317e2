"""Estimators against loops over plain Python numbers."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.advantages import (
    at_last_token,
    first_of_turn,
    generalised_advantages,
    grpo,
    grpo_nostd,
    normalise,
    reinforce,
    reinforce_pp,
    return_to_go,
    returns_by_turn,
    rloo,
    spread_over_tokens,
    token_value_estimate,
    turn_advantages,
    turn_value_estimate,
)
from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens, drop_first_tokens
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor


def loop(kind, scores, valid, group):
    out = []
    for i, score in enumerate(scores):
        same = [
            j
            for j in range(len(scores))
            if valid[j] and (kind == "reinforce" or group[j] == group[i])
        ]
        values = [scores[j] for j in same]
        if not valid[i] or len(values) < 2 or len(set(values)) == 1:
            out.append(0.0)
        elif kind == "grpo":
            out.append((score - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6))
        elif kind == "rloo":
            out.append(score - statistics.fmean([scores[j] for j in same if j != i]))
        else:
            out.append(score - statistics.fmean(values))
    return out


@pytest.mark.parametrize("estimator", [grpo, grpo_nostd, rloo, reinforce])
def test_equals_loop(estimator):
    rng = random.Random(0)
    for _ in range(40):
        sizes = [rng.randrange(1, 6) for _ in range(4)]
        group = [i for i, size in enumerate(sizes) for _ in range(size)]
        scores = [rng.choice([0.0, 0.1, 1.0, rng.uniform(-20, 20)]) for _ in group]
        valid = [rng.random() < 0.8 for _ in group]
        given = [s if ok else float("nan") for s, ok in zip(scores, valid, strict=True)]
        scores = torch.tensor(scores).tolist()
        got = estimator(torch.tensor(given), torch.tensor(valid), torch.tensor(group))
        expected = torch.tensor(loop(estimator.__name__, scores, valid, group))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(got == 0, expected.abs() < 1e-12)


@pytest.mark.parametrize("estimator", [grpo, grpo_nostd, rloo, reinforce])
def test_equal_scores_give_exact_zeros(estimator):
    scores = torch.full((7,), 0.1)
    got = estimator(scores, torch.ones(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64))
    assert got.tolist() == [0.0] * 7


def test_valid_score_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        grpo(torch.tensor([1.0, float("nan")]), torch.tensor([True, True]), torch.tensor([0, 0]))


def test_normalise_whitens_the_masked_part():
    values = torch.tensor([1.0, 2.0, float("nan"), 6.0])
    mask = torch.tensor([True, True, False, True])
    got = normalise(values, mask)
    mean = 3.0
    std = statistics.pstdev([1.0, 2.0, 6.0])
    expected = [
        (1 - mean) / (std + 1e-5),
        (2 - mean) / (std + 1e-5),
        0.0,
        (6 - mean) / (std + 1e-5),
    ]
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_return_to_go_skips_what_is_masked(discount):
    rng = random.Random(1)
    for _ in range(20):
        lengths = [rng.randrange(0, 7) for _ in range(5)]
        sequence = [i for i, length in enumerate(lengths) for _ in range(length)]
        mask = [rng.random() < 0.6 for _ in sequence]
        rewards = [rng.uniform(-1, 1) if inside else math.nan for inside in mask]
        expected = [0.0] * len(mask)
        last = [0.0] * len(mask)
        for i in range(5):
            to_go = 0.0
            positions = [t for t in range(len(mask)) if sequence[t] == i and mask[t]]
            for t in reversed(positions):
                to_go = expected[t] = rewards[t] + discount * to_go
            if positions:
                last[positions[-1]] = 10.0 + i
        inside = torch.tensor(mask, dtype=torch.bool)
        of = torch.tensor(sequence, dtype=torch.int64)
        got = return_to_go(torch.tensor(rewards), inside, of, 5, discount)
        torch.testing.assert_close(got, torch.tensor(expected))
        assert at_last_token(torch.arange(10.0, 15.0), inside, of).tolist() == last


def test_reinforce_pp_scores():
    scores = torch.tensor([1.0, math.nan, 0.5, 0.25])
    valid = torch.tensor([True, False, True, True])
    group = torch.tensor([0, 0, 1, 1])
    assert reinforce_pp(scores, valid, group).tolist() == [1.0, 0.0, 0.5, 0.25]
    assert grpo_nostd(scores, valid, group).tolist() == [0.0, 0.0, 0.125, -0.125]
    with pytest.raises(ValueError, match="not finite"):
        reinforce_pp(scores, torch.ones(4, dtype=torch.bool), group)


ESTIMATORS = [grpo, grpo_nostd, rloo, reinforce]
EPISODES = st.lists(
    st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=5),
    min_size=1,
    max_size=6,
)


def by_loop(episodes, valid, discount, i, k):
    """The advantage of turn ``k`` of episode ``i`` in one group, as ``grpo`` has it."""

    def to_go(rewards):
        start = min(k, len(rewards) - 1)
        return sum(
            discount ** (j - start) * reward for j, reward in enumerate(rewards) if j >= start
        )

    others = [to_go(rewards) for rewards, ok in zip(episodes, valid, strict=True) if ok]
    if not valid[i] or len(others) < 2 or len({round(value, 9) for value in others}) == 1:
        return 0.0
    return (to_go(episodes[i]) - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)


def tabled(episodes, discount):
    rewards = torch.tensor(
        [reward for rewards in episodes for reward in rewards], dtype=torch.float32
    )
    return returns_by_turn(rewards, torch.tensor([len(rewards) for rewards in episodes]), discount)


def test_two_episodes_by_hand():
    """Returns 1.5, 1 and 2 against 0.25; the second episode is over after one turn and keeps its
    return."""
    returns = tabled([[0.5, -1.0, 2.0], [0.25]], 1.0)
    assert returns.tolist() == [[1.5, 1.0, 2.0], [0.25, 0.25, 0.25]]
    assert tabled([[0.5, -1.0, 2.0], [0.25]], 0.5).tolist() == [[0.5, 0.0, 2.0], [0.25, 0.25, 0.25]]
    both = torch.ones(2, dtype=torch.bool)
    group = torch.zeros(2, dtype=torch.int64)
    found = turn_advantages(returns.float(), both, group, grpo_nostd)
    assert found.tolist() == [[0.625, 0.375, 0.875], [-0.625, -0.375, -0.875]]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(EPISODES, st.sampled_from([1.0, 0.5]), st.data())
def test_equals_a_loop(episodes, discount, data):
    valid = data.draw(st.lists(st.booleans(), min_size=len(episodes), max_size=len(episodes)))
    returns = tabled(episodes, discount)
    group = torch.zeros(len(episodes), dtype=torch.int64)
    found = turn_advantages(returns.float(), torch.tensor(valid), group, grpo)
    for i, rewards in enumerate(episodes):
        for k in range(len(rewards)):
            assert found[i, k] == pytest.approx(by_loop(episodes, valid, discount, i, k), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=30, deadline=None)
@given(episodes=EPISODES, seed=st.integers(0, 100))
def test_a_reward_at_the_end_alone_gives_every_turn_what_the_episode_gets(
    estimator, episodes, seed
):
    """Bit for bit, with groups and failures as they come."""
    choice = random.Random(seed)
    group = torch.tensor(sorted(choice.randrange(2) for _ in episodes))
    valid = torch.tensor([choice.random() < 0.8 for _ in episodes])
    final = torch.tensor([rewards[-1] for rewards in episodes])
    returns = tabled([[0.0] * (len(rewards) - 1) + rewards[-1:] for rewards in episodes], 1.0)
    found = turn_advantages(returns.float(), valid, group, estimator)
    expected = estimator(final, valid, group)
    assert all(torch.equal(column, expected) for column in found.unbind(1))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(EPISODES, st.integers(-8, 8).map(lambda n: n / 4), st.sampled_from([0.5, 2.0]))
def test_a_constant_on_every_last_reward_changes_nothing_and_a_scale_scales(episodes, move, scale):
    """The same number added to every last reward changes no advantage; scaling all scales it."""
    valid, group = (
        torch.ones(len(episodes), dtype=torch.bool),
        torch.zeros(len(episodes), dtype=torch.int64),
    )

    def found(changed):
        return turn_advantages(tabled(changed, 1.0).float(), valid, group, grpo_nostd)

    before = found(episodes)
    moved = found([[*rewards[:-1], rewards[-1] + move] for rewards in episodes])
    scaled = found([[scale * reward for reward in rewards] for rewards in episodes])
    torch.testing.assert_close(moved, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scaled, scale * before, atol=1e-4, rtol=1e-4)


def test_tokens_get_the_advantage_of_their_turn():
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    turn = torch.tensor([0, -1, 1, -1, 0], dtype=torch.int32)
    mask = torch.tensor([True, False, True, False, True])
    sequence = torch.tensor([0, 0, 0, 1, 1])
    counts = torch.tensor([2, 1])
    assert spread_over_tokens(table, turn, sequence, mask, counts).tolist() == [
        1.0,
        0.0,
        2.0,
        0.0,
        3.0,
    ]
    for wrong in (-1, 1):
        turn[-1] = wrong
        with pytest.raises(ValueError, match="turn_ids"):
            spread_over_tokens(table, turn, sequence, mask, counts)


def with_turns(sample, rewards, *, at_end):
    """The sample with two turns in each sequence, the second from its middle on; the reward is in
    the second turn alone, or in both halves."""
    lengths = [n for group in sample.seqlens["packed_input_ids"] for n in group]
    ids = torch.cat([(torch.arange(n) >= n // 2).int() for n in lengths])
    ids = torch.where(sample["loss_mask"], ids, -1).int()
    parts = [(0.0, reward) if at_end else (reward, -reward) for reward in rewards]
    counts = [[2] * len(group) for group in sample.seqlens["packed_input_ids"]]
    turns = {"turn_ids": ids, "turn_rewards": torch.tensor(parts).flatten()}
    lengths_of = {"turn_ids": sample.seqlens["packed_input_ids"], "turn_rewards": counts}
    return sample.update(SequenceSample.from_tensors(sample.ids, turns, lengths_of))


SHAPED = {"reward_scaling": 2.0, "reward_bias": 0.5, "max_reward_clip": 2.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"algo": "rloo", "kl_ctl": 0.1}, {"algo": "drgrpo", "loss_scale_len": 9}]
)
def test_a_train_step_with_a_reward_at_the_end_is_the_step_of_the_episode(
    rollout_batch, tmp_path, options
):
    """Bit for bit, with rewards scaled, moved and clipped, and a failed rollout without a
    number."""
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    scores = SequenceSample.from_tensors(
        sample.ids,
        {"env_rewards": torch.tensor(REWARDS), "outcome": sample["outcome"]},
        {"env_rewards": sample.seqlens["rewards"], "outcome": sample.seqlens["rewards"]},
    )
    scored, _ = OutcomeRewardInterface(**SHAPED).inference(None, scores, context(tmp_path))  # type: ignore[arg-type]
    batch = with_turns(
        sample.select(sample.keys - {"rewards"}).update(scored), REWARDS, at_end=True
    )
    one, other = (
        PolicyGradientInterface({**options, **SHAPED, "credit": credit}).train_step(
            tiny_actor(), batch, context(tmp_path)
        )
        for credit in ("episode", "turn")
    )
    assert one["grad_norm"] > 0
    assert {key: value for key, value in one.items() if value == value} == {
        key: value for key, value in other.items() if value == value
    }


def test_a_train_step_tells_the_turns_of_an_episode_apart(rollout_batch):
    """What a first turn earns and a second one loses pushes the two apart; the episode as a whole
    has nothing."""
    sample = with_turns(
        rollout_batch(GROUPS, [0.0] * len(REWARDS)),
        [float(n) for n in range(len(REWARDS))],
        at_end=False,
    )
    prepared, _ = PolicyGradientInterface({"credit": "turn"}).prepare(sample)
    tokens = PredictedTokens.from_sample(sample)
    turn = drop_first_tokens(sample, "turn_ids")
    found = prepared["advantages"]
    assert not bool(found[tokens.mask & (turn == 0)].any()), (
        "the return from the first turn on is 0 for all"
    )
    assert bool(found[tokens.mask & (turn == 1)].any()) and "turn_ids" not in prepared.keys
    whole, _ = PolicyGradientInterface({}).prepare(sample)
    assert not bool(whole["advantages"].any())


def test_options_about_turns_that_do_nothing_or_contradict_are_refused(rollout_batch, tmp_path):
    with pytest.raises(
        ValueError, match=r"ppo.credit=turn: adv_estimator 'reinforce_pp' has a return-to-go"
    ):
        resolve({"algo": "reinforce_pp", "credit": "turn"})
    with pytest.raises(ValueError, match=r"ppo.discount has no effect"):
        resolve({"discount": 0.5})
    assert resolve({"discount": 0.5, "credit": "turn"}).turn_keys == ("turn_ids", "turn_rewards")
    with pytest.raises(
        ValueError, match=r"ppo.credit=turn, or a ppo.loss_agg by turn, needs the key turn_ids"
    ):
        PolicyGradientInterface({"credit": "turn"}).train_step(
            tiny_actor(), rollout_batch(GROUPS, REWARDS, OUTCOME), context(tmp_path)
        )


SEEDS = st.integers(0, 10_000)
DISCOUNTS = st.sampled_from([1.0, 0.9, 0.5])
LAMBDAS = st.sampled_from([1.0, 0.95, 0.3, 0.0])


def by_definition(rewards, values, discount, lam):
    """A_t is the sum over l of (discount lam)^l delta_(t+l), with delta_t = r_t + discount V_(t+1)
    - V_t."""
    after = [*values, 0.0][1:]
    deltas = [r + discount * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((discount * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def drawn(seed, most=7):
    """Sequences of random lengths, some without any sampled token, with NaN where nobody may
    look."""
    choice = random.Random(seed)
    masks = [
        [choice.random() < 0.6 for _ in range(choice.randrange(most))]
        for _ in range(choice.randrange(1, 5))
    ]
    flat = [m for mask in masks for m in mask]
    rewards = torch.tensor([choice.uniform(-1, 1) if m else float("nan") for m in flat])
    values = torch.tensor([choice.uniform(-1, 1) if m else float("nan") for m in flat])
    sequence = torch.tensor([i for i, mask in enumerate(masks) for _ in mask], dtype=torch.int64)
    return masks, rewards, values, torch.tensor(flat, dtype=torch.bool), sequence


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SEEDS, DISCOUNTS, LAMBDAS)
def test_tokens_of_the_environment_are_skipped_and_not_discounted(seed, discount, lam):
    """The loop knows the policy's tokens alone."""
    masks, rewards, values, mask, sequence = drawn(seed)
    found = token_value_estimate(rewards, values, mask, sequence, len(masks), discount, lam)
    assert not bool(found.advantages[~mask].any()) and not bool(found.returns[~mask].any())
    assert torch.equal(found.valued, mask)
    for i in range(len(masks)):
        mine = torch.nonzero(mask & (sequence == i)).flatten()
        expected = by_definition(rewards[mine].tolist(), values[mine].tolist(), discount, lam)
        assert found.advantages[mine].tolist() == pytest.approx(expected, abs=1e-5)
        returned = [a + v for a, v in zip(expected, values[mine].tolist(), strict=True)]
        assert found.returns[mine].tolist() == pytest.approx(returned, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_with_lambda_and_discount_of_one_the_critic_is_only_a_baseline(seed):
    """Advantages are returns minus values, and the returns are those of the rewards, whatever the
    values say."""
    masks, rewards, values, mask, sequence = drawn(seed)
    found = token_value_estimate(rewards, values, mask, sequence, len(masks), 1.0, 1.0)
    other = token_value_estimate(rewards, 3 * values, mask, sequence, len(masks), 1.0, 1.0)
    torch.testing.assert_close(found.returns, other.returns, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        found.advantages[mask], (found.returns - values)[mask], atol=1e-5, rtol=1e-5
    )


def test_numbers_worked_out_by_hand():
    """One episode of two turns of two tokens with text of the environment between them, and one of
    a single token."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    sequence = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])
    rewards = torch.tensor([9.0, 0.0, 0.0, 9.0, 9.0, 0.0, 1.0, 2.0])
    values = torch.tensor([9.0, 0.2, 0.4, 9.0, 9.0, 0.6, 0.8, 0.5])
    found = token_value_estimate(rewards, values, mask, sequence, 2, 1.0, 0.5)
    # deltas .2, .2, .2, .2; the last token: 1 - .8
    assert found.advantages.tolist() == pytest.approx([0, 0.375, 0.35, 0, 0, 0.3, 0.2, 1.5])
    assert found.returns.tolist() == pytest.approx([0, 0.575, 0.75, 0, 0, 0.9, 1.0, 2.0])


def turns_of(seed):
    """Rows of episodes: each turn has rewards, and tokens in this row or not."""
    choice = random.Random(seed)
    rows = []
    for _ in range(choice.randrange(1, 4)):
        tokens = [
            [choice.uniform(-1, 1) for _ in range(choice.randrange(3))]
            for _ in range(choice.randrange(1, 5))
        ]
        rows.append(
            (
                tokens,
                [choice.uniform(-1, 1) for _ in tokens],
                [choice.uniform(-1, 1) for _ in tokens],
            )
        )
    mask = []
    turn = []
    sequence = []
    rewards = []
    values = []
    for i, (tokens, _, value) in enumerate(rows):
        for k, of_turn in enumerate(tokens):
            # Each turn begins with a token of the environment.
            for n, reward in enumerate([None, *of_turn]):
                mask.append(reward is not None)
                turn.append(-1 if reward is None else k)
                sequence.append(i)
                rewards.append(float("nan") if reward is None else reward)
                values.append(value[k] if n == 1 else float("nan"))
    return {
        "rows": rows,
        "mask": torch.tensor(mask, dtype=torch.bool),
        "turn": torch.tensor(turn, dtype=torch.int32),
        "sequence": torch.tensor(sequence, dtype=torch.int64),
        "rewards": torch.tensor(rewards),
        "values": torch.tensor(values),
        "turn_rewards": torch.tensor([reward for _, earned, _ in rows for reward in earned]),
        "counts": torch.tensor([len(earned) for _, earned, _ in rows]),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(SEEDS, DISCOUNTS, LAMBDAS)
def test_a_turn_is_one_decision(seed, discount, lam):
    """Its tokens have one advantage, and what turns without tokens earn belongs to the turn before,
    discounted."""
    drawn_turns = turns_of(seed)
    rows = drawn_turns.pop("rows")
    found = turn_value_estimate(discount=discount, lam=lam, **drawn_turns)
    mask, sequence, turn = (drawn_turns[name] for name in ("mask", "sequence", "turn"))
    for i, (tokens, earned, value) in enumerate(rows):
        played = [k for k in range(len(tokens)) if tokens[k]]
        ends = [*played, len(tokens)][1:]
        gained = [
            sum(discount ** (j - k) * (earned[j] + sum(tokens[j])) for j in range(k, end))
            for k, end in zip(played, ends, strict=True)
        ]
        advantage = 0.0
        after = 0.0
        later = {}
        for n in range(len(played) - 1, -1, -1):
            gap = discount ** (ends[n] - played[n])
            advantage = gained[n] + gap * after - value[played[n]] + gap * lam * advantage
            after = value[played[n]]
            later[played[n]] = advantage
        for k in played:
            mine = torch.nonzero(mask & (sequence == i) & (turn == k)).flatten()
            assert found.advantages[mine].tolist() == pytest.approx(
                [later[k]] * len(mine), abs=1e-5
            )
            assert found.valued[mine].tolist() == [True] + [False] * (len(mine) - 1)
            assert float(found.returns[mine[0]]) == pytest.approx(later[k] + value[k], abs=1e-5)
    assert not bool(found.advantages[~mask].any()) and not bool(found.valued[~mask].any())
    assert not bool(found.returns[~found.valued].any())


def test_a_turn_of_one_token_each_is_the_advantage_by_token():
    mask = torch.ones(4, dtype=torch.bool)
    sequence = torch.tensor([0, 0, 0, 1])
    rewards = torch.tensor([0.0, 0.5, 1.0, -1.0])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    by_token = token_value_estimate(rewards, values, mask, sequence, 2, 0.9, 0.8)
    turn = torch.tensor([0, 1, 2, 0])
    counts = torch.tensor([3, 1])
    by_turn = turn_value_estimate(
        torch.zeros(4), rewards, counts, values, turn, mask, sequence, 0.9, 0.8
    )
    assert all(torch.equal(a, b) for a, b in zip(by_token, by_turn, strict=True))


def test_nothing_sampled_has_no_advantage_and_no_return():
    mask = torch.zeros(3, dtype=torch.bool)
    nothing = torch.full((3,), float("nan"))
    sequence = torch.tensor([0, 0, 2])
    for found in (
        token_value_estimate(nothing, nothing, mask, sequence, 3, 1.0, 0.9),
        turn_value_estimate(
            nothing,
            torch.ones(3),
            torch.ones(3).long(),
            nothing,
            torch.full((3,), -1),
            mask,
            sequence,
            1.0,
            0.9,
        ),
    ):
        assert (
            not bool(found.advantages.any())
            and not bool(found.returns.any())
            and not bool(found.valued.any())
        )
    assert generalised_advantages(
        torch.zeros(0, 0), torch.zeros(0, 0), torch.zeros(0, 0) > 0, 1.0, 1.0
    ).shape == (0, 0)


def test_a_token_outside_of_its_turns_is_refused():
    mask = torch.ones(2, dtype=torch.bool)
    sequence = torch.zeros(2, dtype=torch.int64)
    for wrong in (-1, 1):
        turn = torch.tensor([0, wrong])
        with pytest.raises(ValueError, match="turn_ids"):
            turn_value_estimate(
                torch.zeros(2),
                torch.ones(1),
                torch.tensor([1]),
                torch.zeros(2),
                turn,
                mask,
                sequence,
                1.0,
                1.0,
            )


def test_the_first_token_of_a_turn_is_that_of_its_own_sequence():
    """Two sequences whose turns have the same number stand beside each other."""
    turn = torch.tensor([0, 0, -1, 1, 1, 1])
    sequence = torch.tensor([0, 0, 0, 0, 1, 1])
    mask = turn >= 0
    assert first_of_turn(turn, mask, sequence).tolist() == [True, False, False, True, True, False]
