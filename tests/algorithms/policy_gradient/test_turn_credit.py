"""Advantages of turns: against loops over plain Python numbers, and against those of whole episodes."""

import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.advantages import grpo, grpo_nostd, of_tokens, reinforce, returns_by_turn, rloo, turn_advantages
from realhf.algorithms.inference import OutcomeRewardInterface
from realhf.algorithms.options import resolve
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.train_step import PredictedTokens, predicted
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor

ESTIMATORS = [grpo, grpo_nostd, rloo, reinforce]
EPISODES = st.lists(st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=5), min_size=1, max_size=6)


def loop(episodes, valid, discount, i, k):
    """The advantage of turn ``k`` of episode ``i`` in one group, as ``grpo`` has it."""

    def to_go(rewards):
        start = min(k, len(rewards) - 1)
        return sum(discount ** (j - start) * reward for j, reward in enumerate(rewards) if j >= start)

    others = [to_go(rewards) for rewards, ok in zip(episodes, valid, strict=True) if ok]
    if not valid[i] or len(others) < 2 or len({round(value, 9) for value in others}) == 1:
        return 0.0
    return (to_go(episodes[i]) - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)


def tabled(episodes, discount):
    rewards = torch.tensor([reward for rewards in episodes for reward in rewards], dtype=torch.float32)
    return returns_by_turn(rewards, torch.tensor([len(rewards) for rewards in episodes]), discount)


def test_two_episodes_by_hand():
    """Returns 1.5, 1 and 2 against 0.25; the second episode is over after one turn and keeps its return."""
    returns = tabled([[0.5, -1.0, 2.0], [0.25]], 1.0)
    assert returns.tolist() == [[1.5, 1.0, 2.0], [0.25, 0.25, 0.25]]
    assert tabled([[0.5, -1.0, 2.0], [0.25]], 0.5).tolist() == [[0.5, 0.0, 2.0], [0.25, 0.25, 0.25]]
    both, group = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    found = turn_advantages(returns.float(), both, group, grpo_nostd)
    assert found.tolist() == [[0.625, 0.375, 0.875], [-0.625, -0.375, -0.875]]


@settings(max_examples=60, deadline=None)
@given(EPISODES, st.sampled_from([1.0, 0.5]), st.data())
def test_equals_a_loop(episodes, discount, data):
    valid = data.draw(st.lists(st.booleans(), min_size=len(episodes), max_size=len(episodes)))
    returns, group = tabled(episodes, discount), torch.zeros(len(episodes), dtype=torch.int64)
    found = turn_advantages(returns.float(), torch.tensor(valid), group, grpo)
    for i, rewards in enumerate(episodes):
        for k in range(len(rewards)):
            assert found[i, k] == pytest.approx(loop(episodes, valid, discount, i, k), abs=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=30, deadline=None)
@given(episodes=EPISODES, seed=st.integers(0, 100))
def test_a_reward_at_the_end_alone_gives_every_turn_what_the_episode_gets(estimator, episodes, seed):
    """Bit for bit, with groups and failures as they come."""
    choice = random.Random(seed)
    group = torch.tensor(sorted(choice.randrange(2) for _ in episodes))
    valid = torch.tensor([choice.random() < 0.8 for _ in episodes])
    final = torch.tensor([rewards[-1] for rewards in episodes])
    returns = tabled([[0.0] * (len(rewards) - 1) + rewards[-1:] for rewards in episodes], 1.0)
    found = turn_advantages(returns.float(), valid, group, estimator)
    expected = estimator(final, valid, group)
    assert all(torch.equal(column, expected) for column in found.unbind(1))


@settings(max_examples=40, deadline=None)
@given(EPISODES, st.integers(-8, 8).map(lambda n: n / 4), st.sampled_from([0.5, 2.0]))
def test_a_constant_on_every_last_reward_changes_nothing_and_a_scale_scales(episodes, move, scale):
    """The same number added to every last reward changes no advantage; scaling all scales it."""
    valid, group = torch.ones(len(episodes), dtype=torch.bool), torch.zeros(len(episodes), dtype=torch.int64)

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
    sequence, counts = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2, 1])
    assert of_tokens(table, turn, sequence, mask, counts).tolist() == [1.0, 0.0, 2.0, 0.0, 3.0]
    for wrong in (-1, 1):
        turn[-1] = wrong
        with pytest.raises(ValueError, match="turn_ids"):
            of_tokens(table, turn, sequence, mask, counts)


def with_turns(sample, rewards, *, at_end):
    """The sample with two turns in each sequence, the second from its middle on; the reward is in the second turn
    alone, or in both halves."""
    lengths = [n for group in sample.seqlens["packed_input_ids"] for n in group]
    ids = torch.cat([(torch.arange(n) >= n // 2).int() for n in lengths])
    ids = torch.where(sample["loss_mask"], ids, -1).int()
    parts = [(0.0, reward) if at_end else (reward, -reward) for reward in rewards]
    counts = [[2] * len(group) for group in sample.seqlens["packed_input_ids"]]
    turns = {"turn_ids": ids, "turn_rewards": torch.tensor(parts).flatten()}
    lengths_of = {"turn_ids": sample.seqlens["packed_input_ids"], "turn_rewards": counts}
    return sample.update(SequenceSample.from_tensors(sample.ids, turns, lengths_of))


SHAPED = {"reward_scaling": 2.0, "reward_bias": 0.5, "max_reward_clip": 2.5}


@pytest.mark.parametrize("options", [{}, {"algo": "rloo", "kl_ctl": 0.1}, {"algo": "drgrpo", "loss_scale_len": 9}])
def test_a_train_step_with_a_reward_at_the_end_is_the_step_of_the_episode(rollout_batch, tmp_path, options):
    """Bit for bit, with rewards scaled, moved and clipped, and a failed rollout without a number."""
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    scores = SequenceSample.from_tensors(
        sample.ids,
        {"env_rewards": torch.tensor(REWARDS), "outcome": sample["outcome"]},
        {"env_rewards": sample.seqlens["rewards"], "outcome": sample.seqlens["rewards"]},
    )
    scored, _ = OutcomeRewardInterface(**SHAPED).inference(None, scores, context(tmp_path))  # type: ignore[arg-type]
    batch = with_turns(sample.select(sample.keys - {"rewards"}).update(scored), REWARDS, at_end=True)
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
    """What a first turn earns and a second one loses pushes the two apart; the episode as a whole has nothing."""
    sample = with_turns(
        rollout_batch(GROUPS, [0.0] * len(REWARDS)), [float(n) for n in range(len(REWARDS))], at_end=False
    )
    prepared, _ = PolicyGradientInterface({"credit": "turn"}).prepare(sample)
    tokens, turn = PredictedTokens.of(sample), predicted(sample, "turn_ids")
    found = prepared["advantages"]
    assert not bool(found[tokens.mask & (turn == 0)].any()), "the return from the first turn on is 0 for all"
    assert bool(found[tokens.mask & (turn == 1)].any()) and "turn_ids" not in prepared.keys
    whole, _ = PolicyGradientInterface({}).prepare(sample)
    assert not bool(whole["advantages"].any())


def test_options_about_turns_that_do_nothing_or_contradict_are_refused(rollout_batch, tmp_path):
    with pytest.raises(ValueError, match=r"ppo.credit=turn: adv_estimator 'reinforce_pp' has a return-to-go"):
        resolve({"algo": "reinforce_pp", "credit": "turn"})
    with pytest.raises(ValueError, match=r"ppo.discount has no effect"):
        resolve({"discount": 0.5})
    assert resolve({"discount": 0.5, "credit": "turn"}).turn_keys == ("turn_ids", "turn_rewards")
    with pytest.raises(ValueError, match=r"ppo.credit=turn needs the key turn_ids"):
        PolicyGradientInterface({"credit": "turn"}).train_step(
            tiny_actor(), rollout_batch(GROUPS, REWARDS, OUTCOME), context(tmp_path)
        )
