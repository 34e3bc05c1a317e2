"""The preset table and the options that must be refused."""

import math

import pytest
import torch

from realhf.algorithms.options import PolicyGradientOptions
from realhf.algorithms.policy_gradient import PolicyGradientInterface
from realhf.algorithms.presets import PRESETS
from realhf.algorithms.resolution import BUILTIN_CLIP_OPTIONS, resolve
from realhf.algorithms.token_advantages import KLController
from realhf.algorithms.train_step import PredictedTokens
from realhf.api.algorithm import reads_clip_options
from realhf.registry import policy_losses
from tests.algorithms.tiny_policy import GROUPS, OUTCOME, REWARDS, context, tiny_actor

TABLE = {
    "grpo": ("grpo", "token", "ppo", 0.2, 0.2, "seq_mean_token_mean"),
    "drgrpo": ("grpo_nostd", "token", "ppo", 0.2, 0.2, "constant"),
    "dapo": ("grpo", "token", "ppo", 0.2, 0.28, "token_mean"),
    "gspo": ("grpo", "sequence", "ppo", 3e-4, 4e-4, "seq_mean_token_mean"),
    "cispo": ("grpo", "token", "cispo", 1.0, 4.0, "token_mean"),
}


@pytest.mark.parametrize("algo", sorted(TABLE))
def test_rows_are_those_of_the_reference(algo):
    got = resolve(PolicyGradientOptions(algo=algo), loss_scale_len=64)
    cells = (
        got.adv_estimator,
        got.ratio,
        got.loss,
        got.eps_clip,
        got.eps_clip_higher,
        got.loss_agg,
    )
    assert cells == TABLE[algo] and not got.needs_reference


@pytest.mark.parametrize("algo", ["rloo", "reinforce"])
def test_rows_without_clipping(algo):
    got = resolve({"algo": algo, "kl_ctl": 0.05})
    assert (got.adv_estimator, got.loss, got.loss_agg) == (algo, "reinforce", "token_mean")
    assert got.needs_reference


def test_reinforce_pp_row():
    got = resolve({"algo": "reinforce_pp"})
    assert (got.adv_estimator, got.ratio, got.loss, got.eps_clip, got.loss_agg) == (
        "reinforce_pp",
        "token",
        "ppo",
        0.2,
        "token_mean",
    )
    assert (got.kl_ctl, got.kl_estimator, got.adv_norm, got.needs_reference) == (
        0.01,
        "k1",
        True,
        True,
    )
    other = resolve({"algo": "reinforce_pp", "kl_ctl": 0.0, "adv_norm": False, "discount": 0.99})
    assert not other.needs_reference and not other.adv_norm and other.discount == 0.99


def test_decoupled_defaults_and_what_they_ask_of_the_graph():
    got = resolve({"use_decoupled_loss": True, "kl_ctl": 0.1})
    assert (got.prox_logp_method, got.behav_imp_weight_mode) == ("actor_inf", "mask")
    assert got.behav_imp_weight_level == "token"
    assert (got.behav_imp_weight_cap, got.behav_imp_weight_floor) == (5.0, 0.0)
    assert got.needs_actor_inf and got.scored_keys == ("packed_ref_logprobs", "proximal_logprobs")
    for method in ("recompute", "loglinear"):
        own = resolve({"algo": "dapo", "use_decoupled_loss": True, "prox_logp_method": method})
        assert not own.needs_actor_inf and own.scored_keys == ()
    plain = resolve({})
    assert (plain.prox_logp_method, plain.behav_imp_weight_mode, plain.scored_keys) == (
        None,
        "none",
        (),
    )
    replaced = resolve({"recompute_logprob": True})
    assert replaced.needs_actor_inf and replaced.behav_imp_weight_mode == "none"


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("algo", [*PRESETS])
def test_what_a_worker_is_told_resolves_to_the_same(algo, differs):
    """What the launcher chose is resolved again where it trains; nothing of it may look as if
    somebody had set it."""
    given = PolicyGradientOptions(algo=algo)
    chosen = resolve(given, loss_scale_len=99, sampler_differs=differs)
    again = resolve(chosen.to_plain_values(given), loss_scale_len=chosen.loss_scale_len)
    assert again == chosen


def test_any_cell_may_be_overridden():
    got = resolve(
        {"algo": "grpo", "loss_agg": "token_mean", "eps_clip_higher": 0.4, "kl_loss_coef": 0.01}
    )
    assert (got.loss_agg, got.eps_clip, got.eps_clip_higher, got.kl_loss_coef) == (
        "token_mean",
        0.2,
        0.4,
        0.01,
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"algo": "grop"}, "ppo.algo=grop: unknown .*; did you mean 'grpo'"),
        ({"group_sise": 4}, "ppo.group_sise.*group_size"),
        ({"adv_estimator": "gea"}, "ppo.adv_estimator=gea: unknown .*; did you mean 'gae'"),
        ({"loss": "pop"}, "ppo.loss=pop: unknown .*; did you mean 'ppo'"),
        ({"loss_agg": "mean"}, "ppo.loss_agg"),
        ({"ratio": "word"}, "ppo.ratio"),
        ({"kl_estimator": "k4", "kl_ctl": 0.1}, "ppo.kl_estimator"),
        ({"kl_estimator": "k1", "kl_loss_coef": 0.1}, "k1 has zero expected gradient"),
        ({"kl_estimator": "k2"}, "ppo.kl_estimator has no effect"),
        ({"kl_estimator": "k3"}, "ppo.kl_estimator has no effect"),
        ({"algo": "reinforce_pp", "kl_loss_coef": 0.1}, "k1 has zero expected gradient"),
        ({"discount": 0.9}, "ppo.discount has no effect"),
        ({"algo": "reinforce_pp", "discount": 0.0}, "ppo.discount=0.0: must be positive"),
        (
            {"algo": "reinforce_pp", "adv_estimator": "reinforce_pp_baseline", "group_size": 1},
            "ppo.group_size must be",
        ),
        (
            {"use_decoupled_loss": True, "recompute_logprob": True},
            "ppo.recompute_logprob has no effect",
        ),
        ({"prox_logp_method": "recompute"}, "ppo.prox_logp_method has no effect"),
        (
            {"use_decoupled_loss": True, "prox_logp_method": "recomput"},
            "ppo.prox_logp_method.*'recompute'",
        ),
        (
            {"recompute_logprob": True, "prox_logp_method": "loglinear"},
            "loglinear recomputes nothing",
        ),
        ({"behav_imp_weight_mode": "mask"}, "ppo.behav_imp_weight_mode has no effect"),
        (
            {"recompute_logprob": True, "behav_imp_weight_cap": 2.0},
            "ppo.behav_imp_weight_cap has no effect",
        ),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_mode": "clip"},
            "ppo.behav_imp_weight_mode=clip: unknown",
        ),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_level": "word"},
            "ppo.behav_imp_weight_level=word: unknown",
        ),
        (
            {
                "use_decoupled_loss": True,
                "behav_imp_weight_mode": "none",
                "behav_imp_weight_cap": 2.0,
            },
            "ppo.behav_imp_weight_cap has no effect",
        ),
        (
            {
                "use_decoupled_loss": True,
                "behav_imp_weight_mode": "none",
                "behav_imp_weight_level": "token",
            },
            "ppo.behav_imp_weight_level has no effect",
        ),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_cap": 0.0},
            "ppo.behav_imp_weight_cap=0.0: must be positive",
        ),
        (
            {"use_decoupled_loss": True, "behav_imp_weight_floor": 5.0},
            "ppo.behav_imp_weight_floor must be",
        ),
        (
            {"algo": "rloo", "use_decoupled_loss": True, "behav_imp_weight_mode": "none"},
            "ppo.use_decoupled_loss has no effect",
        ),
        ({"algo": "rloo", "recompute_logprob": True}, "ppo.recompute_logprob has no effect"),
        ({"algo": "reinforce", "eps_clip": 0.2}, "ppo.eps_clip has no effect"),
        ({"algo": "rloo", "ratio": "sequence"}, "ppo.ratio has no effect"),
        ({"algo": "cispo", "c_clip": 3.0}, "ppo.c_clip has no effect"),
        ({"c_clip": 1.0}, "ppo.c_clip=1.0: must be above 1"),
        ({"eps_clip": -0.1}, "ppo.eps_clip=-0.1: must be at least 0"),
        ({"group_size": 1}, "ppo.group_size must be at least 2"),
        ({"ppo_n_minibatches": 0}, "ppo.ppo_n_minibatches"),
        ({"algo": "drgrpo"}, "ppo.loss_agg=constant divides by ppo.loss_scale_len: set it"),
        ({"algo": "drgrpo", "loss_scale_len": 0}, "ppo.loss_scale_len=0: must be at least 1"),
        (
            {"loss_scale_len": 160},
            "ppo.loss_scale_len has no effect with loss_agg 'seq_mean_token_mean'",
        ),
        (
            {"algo": "gspo", "use_decoupled_loss": True, "recompute_logprob": True},
            "ppo.recompute_logprob has no effect",
        ),
        (
            {"algo": "gspo", "recompute_logprob": False, "prox_logp_method": "recompute"},
            "prox_logp_method has no effect",
        ),
        ({"kl_target": 6.0}, "ppo.kl_target has no effect while kl_ctl is 0"),
        ({"kl_ctl": 0.1, "kl_horizon": 5.0}, "ppo.kl_horizon has no effect without ppo.kl_target"),
        ({"kl_ctl": 0.1, "kl_target": 0.0}, "ppo.kl_target=0.0: must be positive"),
        ({"gae_lambda": 0.5}, "ppo.gae_lambda has no effect with adv_estimator 'grpo'"),
        ({"max_reward_clip": 0.0}, "ppo.max_reward_clip=0.0: must be positive"),
        ({"reward_scaling": 0.0}, "ppo.reward_scaling=0: all rewards would be the same"),
        ({"reward_scaling": float("nan")}, "ppo.reward_scaling=nan: "),
        ({"reward_bias": float("inf")}, "ppo.reward_bias=inf: "),
        ({"kl_ctl": float("inf")}, "ppo.kl_ctl=inf: must be at least 0 and finite"),
    ],
)
def test_refused_options_are_named(options, names):
    with pytest.raises(ValueError, match=names):
        resolve(options)


def test_the_option_decides_the_divisor_and_else_the_experiment():
    assert (
        resolve({"algo": "drgrpo", "loss_scale_len": 77}, loss_scale_len=160).loss_scale_len == 77
    )
    assert resolve({"algo": "drgrpo"}, loss_scale_len=160).loss_scale_len == 160
    assert resolve({"algo": "grpo"}, loss_scale_len=160).loss_scale_len is None, (
        "nothing is divided by it"
    )


def test_the_ratio_of_sequences_is_taken_against_recomputed_log_probabilities():
    for options in ({"algo": "gspo"}, {"algo": "grpo", "ratio": "sequence"}):
        got = resolve(options)
        assert (got.recompute_logprob, got.prox_logp_method, got.scored_keys) == (
            True,
            "recompute",
            (),
        )
    assert resolve({"algo": "gspo", "recompute_logprob": True}).needs_actor_inf
    decoupled = resolve({"algo": "gspo", "use_decoupled_loss": True})
    assert not decoupled.recompute_logprob and decoupled.needs_actor_inf
    for options in (
        {"algo": "gspo", "recompute_logprob": False},
        {"algo": "grpo"},
        {"algo": "gspo", "ratio": "token"},
    ):
        assert resolve(options).prox_logp_method is None


def test_without_a_target_it_stays():
    controller = KLController(resolve({"kl_ctl": 0.1}))
    controller.observe(1e6, 64)
    assert controller.value == 0.1


@pytest.mark.parametrize(
    ("kl", "error"), [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (0.0, -0.2)]
)
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


@pytest.mark.slow
def test_a_train_step_steers_the_next_one_and_a_resumed_run_goes_on(rollout_batch, tmp_path):
    """The divergence is that of whole sequences, and the weight of a step is known before its
    batch."""
    options = {"algo": "reinforce_pp", "kl_ctl": 0.1, "kl_target": 0.01, "kl_horizon": 100.0}
    sample = rollout_batch(GROUPS, REWARDS, OUTCOME)
    tokens = PredictedTokens.from_sample(sample)
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


def test_a_registered_loss_declares_the_clip_options_that_it_reads(monkeypatch):
    """An option that a loss does not read would do nothing, and is refused; also with a loss of
    one's own, which declares what it reads."""
    monkeypatch.setattr(policy_losses, "_entries", {**policy_losses._entries})

    @policy_losses.register("silent")
    def silent(terms, options):
        return None

    @policy_losses.register("declared")
    @reads_clip_options("eps_clip")
    def declared(terms, options):
        return None

    with pytest.raises(ValueError, match=r"eps_clip has no effect.*'silent'.*reads_clip_options"):
        resolve({"loss": "silent", "eps_clip": 0.3})
    assert resolve({"loss": "silent"}).loss == "silent"
    assert resolve({"loss": "declared", "eps_clip": 0.3}).eps_clip == 0.3
    with pytest.raises(ValueError, match="ratio has no effect"):
        resolve({"loss": "declared", "ratio": "sequence"})
    with pytest.raises(ValueError, match="'eps' is not one of eps_clip"):
        reads_clip_options("eps")


def test_every_built_in_loss_has_a_row_of_the_clip_options_that_it_reads():
    builtin = {name for name, entry in policy_losses._entries.items() if _is_builtin(entry)}
    assert builtin == {*BUILTIN_CLIP_OPTIONS}


def _is_builtin(entry):
    return isinstance(entry, str) or entry.__module__ == "realhf.algorithms.policy_loss"
