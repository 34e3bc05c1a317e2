"""Credit by states, GiGPO, against a loop written from the paper, on rollouts of several rows and
failed ones."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
import torch

from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.resolution import resolve
from realhf.algorithms.train_step import PredictedTokens, drop_first_tokens
from realhf.api.sample import SequenceSample
from tests.algorithms.tiny_policy import context, tiny_actor


@dataclass
class Played:
    """A rollout: the state and reward of each turn, and in how many rows its turns stand."""

    states: list[int]
    rewards: list[float]
    failed: bool
    cuts: list[int] = field(default_factory=list)


def drawn(seed: int) -> list[list[Played]]:
    """Ragged groups whose rollouts meet in few states and come back to them."""
    choice = random.Random(seed)
    groups = []
    for _ in range(choice.randrange(1, 4)):
        group = []
        for _ in range(choice.randrange(1, 5)):
            n = choice.randrange(1, 6)
            states = [0] + [choice.choice([0, 7, -(1 << 50)]) for _ in range(n - 1)]
            rewards = [choice.choice([0.0, 0.0, 0.5, 1.0, -0.25]) for _ in range(n)]
            cuts = sorted(choice.sample(range(1, n), choice.randrange(0, n)))
            group.append(Played(states, rewards, choice.random() < 0.2, cuts))
        groups.append(group)
    return groups


def batch(groups: list[list[Played]]) -> SequenceSample:
    """Each turn is two sampled tokens behind one of the environment; every row reports all turns of
    its rollout, as those of a conversation whose old reasoning was dropped do. What is outside the
    mask, or failed, is NaN."""
    ids = []
    lengths = []
    counts = []
    rewards = []
    states = []
    outcome = []
    rollout = []
    totals = []
    for group in groups:
        lengths.append([])
        counts.append([])
        for number, played in enumerate(group):
            ends = [*played.cuts, len(played.states)]
            for first, end in zip([0, *played.cuts], ends, strict=True):
                turns = [
                    -1 if place == 0 or played.failed else turn
                    for turn in range(first, end)
                    for place in range(3)
                ]
                ids += turns
                lengths[-1].append(len(turns))
                own = not played.failed
                counts[-1].append(len(played.states) if own else 1)
                rewards += played.rewards if own else [0.0]
                states += played.states if own else [0]
                outcome.append(3 if played.failed else 0)
                rollout.append(number)
                totals.append(math.nan if played.failed else sum(played.rewards))
    turn_ids = torch.tensor(ids, dtype=torch.int32)
    shifted = [[n - 1 for n in row] for row in lengths]
    ones = [[1] * len(row) for row in lengths]
    tensors = {
        "packed_input_ids": torch.arange(len(ids)) % 50,
        "loss_mask": turn_ids >= 0,
        "packed_logprobs": torch.full((sum(map(sum, shifted)),), -1.0),
        "rewards": torch.tensor(totals),
        "outcome": torch.tensor(outcome, dtype=torch.uint8),
        "rollout_index": torch.tensor(rollout, dtype=torch.int32),
        "turn_ids": turn_ids,
        "turn_rewards": torch.tensor(rewards),
        "turn_states": torch.tensor(states),
    }
    tensors["packed_logprobs"][~predicted_mask(turn_ids, lengths)] = math.nan
    seqlens = dict.fromkeys(("packed_input_ids", "loss_mask", "turn_ids"), lengths)
    seqlens |= {"packed_logprobs": shifted, "turn_rewards": counts, "turn_states": counts}
    return SequenceSample.from_tensors(
        [f"t{n}" for n in range(len(groups))],
        tensors,
        {key: seqlens.get(key, ones) for key in tensors},
    )


def predicted_mask(turn_ids: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    parts = turn_ids.split([n for row in lengths for n in row])
    return torch.cat([part[1:] >= 0 for part in parts])


def normalised(own: float, others: list[float], estimator: str) -> float:
    """F of the paper: the std, or 1; rloo scales by n / (n - 1)."""
    if len(others) < 2 or len(set(others)) == 1:
        return 0.0
    centred = own - statistics.fmean(others)
    if estimator == "rloo":
        return centred * len(others) / (len(others) - 1)
    return centred / (statistics.stdev(others) + 1e-6) if estimator == "grpo" else centred


def by_loop(
    groups: list[list[Played]], estimator: str, discount: float, omega: float
) -> dict[tuple[int, int, int], float]:
    """A(a_t) = A_E + omega A_S of every turn (group, rollout, turn), as the paper writes it."""
    found = {}
    for g, group in enumerate(groups):
        valid = [(i, played) for i, played in enumerate(group) if not played.failed]
        totals = [sum(played.rewards) for _, played in valid]
        to_go = {
            (i, t): sum(
                discount ** (s - t) * played.rewards[s] for s in range(t, len(played.rewards))
            )
            for i, played in valid
            for t in range(len(played.rewards))
        }
        to_go = {
            key: torch.tensor(value, dtype=torch.float64).float().item()
            for key, value in to_go.items()
        }
        for i, played in valid:
            for t, state in enumerate(played.states):
                same = [
                    to_go[j, s]
                    for j, other in valid
                    for s, at in enumerate(other.states)
                    if at == state
                ]
                step = normalised(to_go[i, t], same, estimator)
                found[g, i, t] = normalised(sum(played.rewards), totals, estimator) + omega * step
    return found


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "grpo_nostd", "rloo"])
@pytest.mark.parametrize(("discount", "omega"), [(0.95, 1.0), (0.5, 0.25), (1.0, 2.0)])
def test_every_token_has_the_advantage_of_the_paper(estimator, discount, omega):
    """With and without std; a turn counts once, in however many rows its rollout stands."""
    options = {
        "algo": "gigpo",
        "adv_estimator": estimator,
        "discount": discount,
        "step_advantage_weight": omega,
    }
    shared = 0
    for seed in range(12):
        groups = drawn(seed)
        sample = batch(groups)
        prepared, stats = PolicyGradientInterface(options).prepare(sample)
        expected = by_loop(groups, estimator, discount, omega)
        tokens = PredictedTokens.from_sample(sample)
        turn = drop_first_tokens(sample, "turn_ids").tolist()
        rollout = sample["rollout_index"].tolist()
        advantages = prepared["advantages"].tolist()
        for place, sequence in enumerate(tokens.sequence.tolist()):
            key = (int(tokens.group[sequence]), rollout[sequence], turn[place])
            assert advantages[place] == pytest.approx(expected.get(key, 0.0), abs=2e-5), (seed, key)
        alone = [
            key
            for key in expected
            if len([1 for other in expected if same_state(groups, key, other)]) == 1
        ]
        assert stats["shared_states"] == pytest.approx(
            1 - len(alone) / len(expected) if expected else 0.0
        )
        shared += len(expected) - len(alone)
    assert shared > 100


def test_where_nobody_has_a_result_nothing_is_trained(tmp_path):
    sample = batch([[Played([0, 1], [math.nan] * 2, True), Played([0], [math.nan], True)]])
    stats = PolicyGradientInterface({"algo": "gigpo"}).train_step(
        tiny_actor(), sample, context(tmp_path)
    )
    assert (
        stats["n_updates"] == 0
        and stats["shared_states"] == 0
        and all(map(math.isfinite, stats.values()))
    )


def same_state(groups, one, other):
    return (
        one[0] == other[0]
        and groups[one[0]][one[1]].states[one[2]] == groups[other[0]][other[1]].states[other[2]]
    )


@pytest.mark.slow
def test_where_no_state_is_met_twice_it_is_the_step_of_the_episode(tmp_path):
    """Bit for bit, in loss and gradient; and a second visitor changes them."""
    groups = [[Played([4 * i + t for t in range(3)], [0.0, 0.5 * i, 0.0], False) for i in range(4)]]
    lost = [*groups[0], Played([0], [math.nan], True)]
    met = [*groups[0][:3], Played([0, 5, 6], [0.0, 1.5, 0.0], False)]
    results = [
        PolicyGradientInterface({"algo": algo}).train_step(
            tiny_actor(), batch([group]), context(tmp_path)
        )
        for algo, group in (("grpo", lost), ("gigpo", lost), ("grpo", met), ("gigpo", met))
    ]
    plain, same, plain_met, other = (
        {key: value for key, value in each.items() if value == value} for each in results
    )
    assert plain["grad_norm"] > 0 and same.pop("shared_states") == 0.0 and same == plain
    assert other["grad_norm"] != plain_met["grad_norm"] and other["shared_states"] == 6 / 12


def test_options_that_do_nothing_or_contradict_are_refused(tmp_path):
    made = resolve({"algo": "gigpo"})
    assert (made.credit, made.discount, made.step_advantage_weight, made.adv_estimator) == (
        "state",
        0.95,
        1.0,
        "grpo",
    )
    for options, told in (
        (
            {"step_advantage_weight": 2.0},
            "ppo.step_advantage_weight has no effect with credit 'episode'",
        ),
        (
            {"algo": "gigpo", "credit": "turn", "step_advantage_weight": 2.0},
            "no effect with credit 'turn'",
        ),
        ({"algo": "gigpo", "step_advantage_weight": 0.0}, "ppo.step_advantage_weight"),
        (
            {"algo": "ppo", "credit": "state"},
            "ppo.credit=state: adv_estimator 'gae' .* use grpo, grpo_nostd, rloo",
        ),
        ({"algo": "reinforce", "credit": "state"}, "ppo.credit=state: adv_estimator 'reinforce'"),
    ):
        with pytest.raises(ValueError, match=told):
            resolve(options)
    sample = batch(drawn(1))
    with pytest.raises(ValueError, match=r"ppo.credit=state needs the key turn_states"):
        PolicyGradientInterface({"algo": "gigpo"}).train_step(
            tiny_actor(), sample.select(sample.keys - {"turn_states"}), context(tmp_path)
        )
