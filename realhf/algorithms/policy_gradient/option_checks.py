"""Refuses policy-gradient options because of each other: without effect, or contradictory. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from realhf.algorithms.policy_gradient.options import GAE, PolicyGradientOptions

RETURN_TO_GO = ("reinforce_pp", "reinforce_pp_baseline")
"""Estimators whose advantage is what a token and those after it earn; the others give one number per response."""
DEFAULT_CAP = 5.0
"""Largest behaviour weight that is kept, where the options set no cap."""

_NEEDS_GROUPS = ("grpo", "grpo_nostd", "rloo", "reinforce_pp_baseline")
_CLIP_OPTIONS = ("eps_clip", "eps_clip_higher", "c_clip", "ratio")
_HAS_NO_EFFECT = MappingProxyType({"reinforce": _CLIP_OPTIONS, "cispo": ("c_clip",)})
"""For each loss, the options that it does not read."""
_WEIGHT_BOUNDS = ("behav_imp_weight_cap", "behav_imp_weight_floor", "behav_imp_weight_level")


def check_effects(config: PolicyGradientOptions, value: Mapping[str, Any]) -> None:
    """Check ``value``: the options of ``config`` with those of the preset filled in, and whether log-probabilities are
    recomputed. Raises ValueError naming the option."""
    _check_effect(value, config)
    _check_off_policy(value, config)
    _check_ranges(value, config)


def _check_effect(value: Mapping[str, Any], config: PolicyGradientOptions) -> None:
    for name in _HAS_NO_EFFECT.get(value["loss"], ()):
        if getattr(config, name) is not None:
            raise ValueError(f"ppo.{name} has no effect with loss {value['loss']!r}: remove it")
    if config.kl_estimator is not None and value["kl_ctl"] == 0 and value["kl_loss_coef"] == 0:
        raise ValueError("ppo.kl_estimator has no effect while kl_ctl and kl_loss_coef are 0: remove it")
    if value["kl_estimator"] == "k1" and value["kl_loss_coef"] != 0:
        raise ValueError(
            f"ppo.kl_estimator=k1 has zero expected gradient in the loss (algo {config.algo!r}): use k2 "
            "or k3, or kl_loss_coef=0 and kl_ctl"
        )
    if config.credit == "turn" and value["adv_estimator"] in RETURN_TO_GO:
        raise ValueError(
            f"ppo.credit=turn: adv_estimator {value['adv_estimator']!r} has a return-to-go of its own; use grpo, "
            "grpo_nostd, rloo, reinforce or gae"
        )
    if config.discount != 1.0 and value["adv_estimator"] not in (*RETURN_TO_GO, GAE) and config.credit != "turn":
        raise ValueError(f"ppo.discount has no effect with adv_estimator {value['adv_estimator']!r}: remove it")
    if config.gae_lambda != 1.0 and value["adv_estimator"] != GAE:
        raise ValueError(
            f"ppo.gae_lambda has no effect with adv_estimator {value['adv_estimator']!r}: remove it, or use gae"
        )
    if config.kl_target is not None and value["kl_ctl"] == 0:
        raise ValueError("ppo.kl_target has no effect while kl_ctl is 0: it is where the steering starts, set it")
    if config.kl_horizon != PolicyGradientOptions.kl_horizon and config.kl_target is None:
        raise ValueError("ppo.kl_horizon has no effect without ppo.kl_target: remove it")
    if config.loss_scale_len is not None and value["loss_agg"] != "constant":
        raise ValueError(f"ppo.loss_scale_len has no effect with loss_agg {value['loss_agg']!r}: remove it")


def _check_off_policy(value: Mapping[str, Any], config: PolicyGradientOptions) -> None:
    decoupled, mode = value["use_decoupled_loss"], config.behav_imp_weight_mode
    recomputed = value["recompute_logprob"]
    if decoupled and recomputed:
        raise ValueError(
            "ppo.recompute_logprob has no effect with use_decoupled_loss, which clips against the "
            "recomputed policy already: remove it"
        )
    if config.prox_logp_method is not None and not decoupled and not recomputed:
        raise ValueError(
            "ppo.prox_logp_method has no effect without use_decoupled_loss or recompute_logprob: remove it"
        )
    if config.prox_logp_method == "loglinear" and recomputed:
        raise ValueError(
            "ppo.prox_logp_method=loglinear recomputes nothing: with recompute_logprob use actor_inf or recompute"
        )
    if value["adv_estimator"] == GAE and recomputed and value["kl_ctl"] != 0 and config.prox_logp_method == "recompute":
        raise ValueError(
            "ppo.prox_logp_method=recompute: with recompute_logprob and kl_ctl the critic needs what it computes, too; "
            "use actor_inf"
        )
    for name in ("behav_imp_weight_mode", *_WEIGHT_BOUNDS):
        if getattr(config, name) is not None and not decoupled:
            raise ValueError(f"ppo.{name} has no effect without use_decoupled_loss: remove it")
    for name in _WEIGHT_BOUNDS:
        if getattr(config, name) is not None and mode == "none":
            raise ValueError(f"ppo.{name} has no effect with behav_imp_weight_mode=none: remove it")
    if value["loss"] != "reinforce":
        return
    if decoupled and mode == "none":
        raise ValueError("ppo.use_decoupled_loss has no effect with loss 'reinforce' and behav_imp_weight_mode=none")
    if recomputed and value["kl_ctl"] == 0:
        raise ValueError("ppo.recompute_logprob has no effect with loss 'reinforce' and without kl_ctl: remove it")


def _check_ranges(value: Mapping[str, Any], config: PolicyGradientOptions) -> None:
    if config.group_size < 2 and value["adv_estimator"] in _NEEDS_GROUPS:
        raise ValueError(f"ppo.group_size must be at least 2 for adv_estimator {value['adv_estimator']!r}")
    floor = config.behav_imp_weight_floor
    cap = DEFAULT_CAP if config.behav_imp_weight_cap is None else config.behav_imp_weight_cap
    if floor is not None and floor >= cap:
        raise ValueError(f"ppo.behav_imp_weight_floor must be above 0 and below the cap, got {floor}")
