"""The weight of the KL term in the reward: fixed, or steered to a target."""

import math

import pytest
import torch

from realhf.algorithms.options import resolve
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.token_advantages import KLController
from realhf.algorithms.train_step import PredictedTokens
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor


def test_without_a_target_it_stays():
    controller = KLController(resolve({"kl_ctl": 0.1}))
    controller.observe(1e6, 64)
    assert controller.value == 0.1


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (0.0, -0.2)])
def test_it_moves_by_the_error_cut_to_a_fifth(kl, error):
    controller = KLController(resolve({"kl_ctl": 0.1, "kl_target": 6.0, "kl_horizon": 1000.0}))
    controller.observe(kl, 50)
    assert controller.value == pytest.approx(0.1 * (1 + error * 50 / 1000))


def test_what_is_no_number_or_about_nothing_moves_nothing():
    controller = KLController(resolve({"kl_ctl": 0.1, "kl_target": 6.0}))
    controller.observe(math.nan, 50)
    controller.observe(9.0, 0)
    assert controller.value == 0.1


def test_more_sequences_than_the_horizon_move_it_by_a_fifth_and_it_comes_back():
    """A weight of 0 would stay 0 whatever the divergence: nothing steers it back."""
    controller = KLController(resolve({"kl_ctl": 0.1, "kl_target": 6.0, "kl_horizon": 1.0}))
    controller.observe(0.0, 1000)
    assert controller.value == pytest.approx(0.08)
    controller.observe(60.0, 1000)
    assert controller.value == pytest.approx(0.096)


def test_a_train_step_steers_the_next_one_and_a_resumed_run_goes_on(rollout_batch, tmp_path):
    """The divergence is that of whole sequences, and the weight of a step is known before its batch."""
    options = {"algo": "reinforce_pp", "kl_ctl": 0.1, "kl_target": 0.01, "kl_horizon": 100.0}
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    tokens = PredictedTokens.of(sample)
    mask = tokens.mask & (torch.tensor(OUTCOME)[tokens.sequence] == 0)
    apart = float((sample["packed_logprobs"] - sample["packed_ref_logprobs"])[mask].sum()) / 11
    interface = PolicyGradientInterface(options)
    first = interface.train_step(tiny_actor(), sample, context(tmp_path))
    assert first["kl_ctl"] == 0.1 and first["kl_of_sequence"] == pytest.approx(apart, rel=1e-4)
    resumed = PolicyGradientInterface(options)
    resumed.load_state_dict(interface.state_dict())
    second = resumed.train_step(tiny_actor(), sample, context(tmp_path, 1))
    error = max(-0.2, min(0.2, apart / 0.01 - 1))
    assert second["kl_ctl"] == pytest.approx(0.1 * (1 + error * 11 / 100)) != 0.1
    older = PolicyGradientInterface(options)
    older.load_state_dict({"nonfinite_in_a_row": 0})
    assert older.state_dict()["kl_ctl"] == 0.1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kl_target": 6.0}, "ppo.kl_target has no effect while kl_ctl is 0"),
        ({"kl_ctl": 0.1, "kl_horizon": 5.0}, "ppo.kl_horizon has no effect without ppo.kl_target"),
        ({"kl_ctl": 0.1, "kl_target": 0.0}, "ppo.kl_target=0.0: must be positive"),
        ({"gae_lambda": 0.5}, "ppo.gae_lambda has no effect with adv_estimator 'grpo'"),
    ],
)
def test_options_that_do_nothing_are_refused(options, names):
    with pytest.raises(ValueError, match=names):
        resolve(options)
