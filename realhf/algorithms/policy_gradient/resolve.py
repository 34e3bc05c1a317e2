"""Resolves the options of a policy gradient, most of them left to a preset, to all of their values. It does not import
torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from realhf.algorithms.policy_gradient.option_checks import DEFAULT_CAP, check_effects
from realhf.algorithms.policy_gradient.options import GAE, PolicyGradientOptions, ResolvedOptions
from realhf.algorithms.policy_gradient.presets import COMMON, PRESETS
from realhf.api.config.option import problems
from realhf.builtins import registered_names


def resolve(
    config: PolicyGradientOptions | Mapping[str, Any],
    *,
    loss_scale_len: int | None = None,
    sampler_differs: bool = False,
) -> ResolvedOptions:
    """Fill in the preset of ``config.algo``. ``loss_scale_len`` is the divisor of ``loss_agg=constant`` where the
    option of that name is not set; ``sampler_differs`` says that tokens are sampled by other weights or with another
    arithmetic than the trainer's, so that the objective is decoupled unless the options say otherwise. Raises
    ValueError naming the option that is missing, unknown, out of range, or without effect."""
    config = policy_gradient_options(config)
    if wrong := [*problems(config, "ppo", registered_names)]:
        raise ValueError("\n".join(wrong))
    given = {every.name: getattr(config, every.name) for every in fields(config)}
    value = {**COMMON, **PRESETS[config.algo], **{name: item for name, item in given.items() if item is not None}}
    value["use_decoupled_loss"] = _decouples(config, sampler_differs)
    value["recompute_logprob"] = _recomputes(config, value)
    check_effects(config, value)
    if value["eps_clip_higher"] is None:
        value["eps_clip_higher"] = value["eps_clip"]
    value["loss_scale_len"] = _divisor(config, value, loss_scale_len)
    return ResolvedOptions(**{**value, **_off_policy(config, value)})


def policy_gradient_options(options: PolicyGradientOptions | Mapping[str, Any]) -> PolicyGradientOptions:
    """Build options from plain data. Raises ValueError that names an unknown option and a close one."""
    if isinstance(options, PolicyGradientOptions):
        return options
    known = [every.name for every in fields(PolicyGradientOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(f"ppo.{name} is not an option" + (f"; did you mean {close[0]!r}?" if close else ""))
    return PolicyGradientOptions(**dict(options))


def _divisor(config: PolicyGradientOptions, value: Mapping[str, Any], default: int | None) -> int | None:
    """Return the divisor: the same number for the part that validates and the part that trains. It never has a silent
    default."""
    if value["loss_agg"] != "constant":
        return None
    divisor = default if config.loss_scale_len is None else config.loss_scale_len
    if divisor is None:
        raise ValueError(
            "ppo.loss_agg=constant divides by ppo.loss_scale_len: set it, for example to the most tokens "
            "that the policy can sample in an episode"
        )
    if divisor < 1:
        raise ValueError(f"ppo.loss_scale_len must be at least 1, got {divisor}")
    return divisor


def _decouples(config: PolicyGradientOptions, sampler_differs: bool) -> bool:
    """Return whether the ratio is taken against the proximal policy and tokens carry a behaviour weight.

    Where sampler and trainer differ, their ratio is off 1 before any update: the clip would act on this difference in
    place of the update, and nothing would correct for it.
    """
    if config.use_decoupled_loss is not None:
        return config.use_decoupled_loss
    return sampler_differs and not config.recompute_logprob


def _recomputes(config: PolicyGradientOptions, value: Mapping[str, Any]) -> bool:
    """Return whether the ratio is taken against recomputed log-probabilities in place of the generator's.

    The ratio of a sequence is clipped within about 3e-4, less than the rounding by which two programs differ for the
    same weights: against the generator's own numbers a third of the sequences would be clipped by chance.
    """
    if config.recompute_logprob is not None:
        return config.recompute_logprob
    return value["ratio"] == "sequence" and value["loss"] != "reinforce" and not value["use_decoupled_loss"]


def _off_policy(config: PolicyGradientOptions, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about the proximal policy and the behaviour weight, with their defaults."""
    decoupled = value["use_decoupled_loss"]
    cap, floor = config.behav_imp_weight_cap, config.behav_imp_weight_floor
    return {
        "prox_logp_method": _method(config, value) if decoupled or value["recompute_logprob"] else None,
        "behav_imp_weight_mode": (config.behav_imp_weight_mode or "mask") if decoupled else "none",
        "behav_imp_weight_cap": DEFAULT_CAP if cap is None else cap,
        "behav_imp_weight_floor": 0.0 if floor is None else floor,
        # A clip of whole sequences leaves nothing for weights of single tokens to repair.
        "behav_imp_weight_level": config.behav_imp_weight_level or value["ratio"],
    }


def _method(config: PolicyGradientOptions, value: Mapping[str, Any]) -> str:
    """Return where the proximal log-probabilities come from. What nobody chose does not change the graph: the train
    call recomputes. A critic needs those of the reward too, and has no policy to recompute them with."""
    if config.prox_logp_method is not None:
        return config.prox_logp_method
    shared = value["adv_estimator"] == GAE and value["recompute_logprob"] and value["kl_ctl"] != 0
    return "actor_inf" if config.use_decoupled_loss or config.recompute_logprob is not None or shared else "recompute"
