"""Fills in the open options of the section ppo, from a preset or an algorithm of somebody's own, and refuses what
contradicts or would do nothing; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from realhf.algorithms.options import (
    GAE,
    OF_STATES,
    OF_SUCCESS,
    PASS_AT_K,
    RETURN_TO_GO,
    PolicyGradientOptions,
    ResolvedOptions,
    policy_gradient_options,
)
from realhf.algorithms.presets import COMMON, CORRECTIONS, PRESETS
from realhf.api.algorithm import ADVANTAGES, CLIP_OPTIONS, LOSS, Algorithm, algorithm_of, is_own
from realhf.api.keys import NONE, SOLVED
from realhf.api.option import problems
from realhf.registry import registered_names

DEFAULT_CAP: float = CORRECTIONS["decoupled"].options["behav_imp_weight_cap"]
"""Largest behaviour weight that is kept, where the options set no cap."""
_NEEDS_GROUPS = ("grpo", "grpo_nostd", "rloo", "reinforce_pp_baseline", *OF_SUCCESS)
_HAS_NO_EFFECT = MappingProxyType({"reinforce": CLIP_OPTIONS, "cispo": ("c_clip",)})
"""For each loss, the options that it does not read."""
_OF_REWARDS = (
    *("adv_estimator", "credit", "step_advantage_weight", "discount", "pass_at_k", "adv_norm", "kl_target"),
    *("reward_scaling", "reward_bias", "max_reward_clip"),
)
"""Options about rewards, and about advantages by them."""
_WEIGHT_BOUNDS = ("behav_imp_weight_cap", "behav_imp_weight_floor", "behav_imp_weight_level")
_SEQUENCE_BOUNDS = ("behav_imp_sequence_cap", "behav_imp_sequence_floor")
_OF_WEIGHTS = ("behav_imp_weight_mode", *_WEIGHT_BOUNDS, *_SEQUENCE_BOUNDS)


def resolve(
    config: PolicyGradientOptions | Mapping[str, Any],
    *,
    loss_scale_len: int | None = None,
    sampler_differs: bool = False,
    scored_by_model: bool = False,
    own: Any = None,
) -> ResolvedOptions:
    """Fill in the preset of ``config.algo``, or what an algorithm of somebody's own there sets, whose options are
    ``own``, a section or a mapping (None: their defaults). ``loss_scale_len`` is the divisor of ``loss_agg=constant``
    where the option of that name is not set; ``sampler_differs`` says that tokens are sampled by other weights or with
    another arithmetic than the trainer's, so that the objective is decoupled unless the options say otherwise;
    ``scored_by_model`` that a reward model has a part in the rewards. Raises ValueError naming the option that is
    missing, unknown, out of range, or without effect."""
    config = policy_gradient_options(config)
    if wrong := [*problems(config, "ppo", registered_names)]:
        raise ValueError("\n".join(wrong))
    algorithm = algorithm_of(config.algo) if is_own(config.algo) else None
    preset = PRESETS[config.algo].options if algorithm is None else _own_preset(config.algo, algorithm)
    if algorithm is not None:
        config = _with_off_policy(config, algorithm.preset, sampler_differs=sampler_differs)
    config = _corrected(config)
    given = {every.name: getattr(config, every.name) for every in fields(config)}
    chosen = {name: item for name, item in given.items() if item is not None}
    value = {**COMMON, **preset, **chosen}
    if algorithm is not None and (wrong := [*_of_its_own(config, value, algorithm)]):
        raise ValueError("\n".join(f"ppo.{line}" for line in wrong))
    value["use_decoupled_loss"] = _decouples(config, sampler_differs)
    value["recompute_logprob"] = _recomputes(config, value)
    check_effects(config, value)
    if value["eps_clip_higher"] is None:
        value["eps_clip_higher"] = value["eps_clip"]
    value |= _dapo(config, value, loss_scale_len, algorithm, scored_by_model)
    value["loss_scale_len"] = _divisor(value, loss_scale_len)
    resolved = ResolvedOptions(**{**value, **_off_policy(config, value)})
    if algorithm is not None:
        resolved.algorithm, resolved.own = algorithm, algorithm.own(own)
    return resolved


def _own_preset(reference: str, algorithm: Algorithm) -> Mapping[str, Any]:
    """Return what an algorithm sets in the section. Raises ValueError for an option that is unknown, has a default of
    its own, so that nobody could tell whether it was set, or cannot be what it is set to."""
    try:
        wrong = [*problems(policy_gradient_options(algorithm.preset), "ppo", registered_names)]
    except ValueError as error:
        wrong = [str(error)]
    for name in algorithm.preset:
        if not wrong and getattr(PolicyGradientOptions, name) is not None:
            wrong.append(f"ppo.{name} has a value without a preset; let people set it")
    if wrong:
        raise ValueError("\n".join(f"ppo.algo={reference}: its preset: {line}" for line in wrong))
    return algorithm.defaults(reference)


def _with_off_policy(
    config: PolicyGradientOptions, preset: Mapping[str, Any], *, sampler_differs: bool
) -> PolicyGradientOptions:
    """Return the options with what a preset of somebody's own says of off-policy tokens, and of sets of attempts, where
    it can be: a correction that was chosen has no part of the preset's."""

    def filled(*names: str) -> PolicyGradientOptions:
        return replace(
            config, **{name: preset[name] for name in names if name in preset and getattr(config, name) is None}
        )

    if (config.adv_estimator or preset.get("adv_estimator")) == PASS_AT_K:
        config = filled(PASS_AT_K)
    if config.correction is not None:
        return config
    if config.use_decoupled_loss is not False:
        config = filled("correction", "use_decoupled_loss")
    if not config.use_decoupled_loss and config.correction in (None, "none"):
        config = filled("recompute_logprob")
    decoupled = _decouples(config, sampler_differs)
    if decoupled or config.recompute_logprob:
        config = filled("prox_logp_method", *(_OF_WEIGHTS if decoupled else ()))
    return config


def _of_its_own(config: PolicyGradientOptions, value: Mapping[str, Any], algorithm: Algorithm) -> Iterator[str]:
    """Yield a line for every option that does nothing, or cannot be, beside an algorithm of somebody's own."""
    named = config.algo.rpartition(":")[2]
    loss = algorithm.loss is not None and value[LOSS] == config.algo
    advantages = algorithm.advantages is not None and value[ADVANTAGES] == config.algo
    if loss:
        for name in CLIP_OPTIONS:
            if name not in algorithm.clip_options and getattr(config, name) is not None:
                yield f"{name} has no effect with the loss of {named}: remove it"
    if advantages and algorithm.compares and config.group_size < 2:
        yield f"group_size must be at least 2 for the advantages of {named}"
    if algorithm.options is not None and not loss and not advantages:
        replaced = [f"ppo.{name}={getattr(config, name)}" for name in (LOSS, ADVANTAGES) if getattr(config, name)]
        yield f"algo={config.algo}: nothing of it that has options is left with {' and '.join(replaced)}; take a preset"


def _dapo(
    config: PolicyGradientOptions,
    value: Mapping[str, Any],
    longest: int | None,
    algorithm: Algorithm | None,
    scored_by_model: bool,
) -> dict[str, Any]:
    """Return the options of dynamic sampling and of the penalty for length. What a preset asks for is left out where it
    cannot be; what was set is an error there. Raises ValueError."""
    estimator, credit = value["adv_estimator"], value["credit"]
    compares = algorithm.compares if algorithm is not None and estimator == config.algo else estimator in _NEEDS_GROUPS
    of_what = f"credit={credit}" if credit != "episode" else f"adv_estimator {estimator!r}"
    # The environment's rewards are what groups are judged by: equal ones must mean that nothing can be learned.
    teaches = {
        "a teacher": value["distill_weight"] != 0,
        "a reward model": scored_by_model,
        of_what: not compares or credit != "episode",
    }
    if config.dynamic_sampling and (why := [name for name, does in teaches.items() if does]):
        raise ValueError(
            f"ppo.dynamic_sampling={config.dynamic_sampling:g}: with {why[0]} a group of equal rewards teaches, too"
        )
    graded = credit == "episode" and estimator != "maxrl" and value["rl_weight"] != 0
    length = value.get("overlong_length", longest)
    if config.overlong_buffer and not graded:
        why = "takes no reward below 0" if credit == "episode" else "reads the rewards of turns"
        why = (
            f"{of_what} {why}"
            if value["rl_weight"]
            else "it is a part of the reward, which teaches nothing with rl_weight 0"
        )
        raise ValueError(f"ppo.overlong_buffer={config.overlong_buffer:g}: {why}")
    if config.overlong_buffer and length is None:
        raise ValueError(f"ppo.overlong_buffer={config.overlong_buffer:g}: needs ppo.overlong_length here")
    buffer = value["overlong_buffer"] if graded and length is not None else 0.0
    if config.overlong_length is not None and not buffer:
        raise ValueError("ppo.overlong_length has no effect without ppo.overlong_buffer: remove it")
    return {
        "dynamic_sampling": 0.0 if any(teaches.values()) else value["dynamic_sampling"],
        "overlong_buffer": buffer,
        "overlong_length": length if buffer else None,
    }


def _divisor(value: Mapping[str, Any], default: int | None) -> int | None:
    """Return the divisor: the same number for the part that validates and the part that trains. It never has a silent
    default."""
    if value["loss_agg"] != "constant":
        return None
    divisor = value.get("loss_scale_len", default)
    if divisor is None:
        raise ValueError(
            "ppo.loss_agg=constant divides by ppo.loss_scale_len: set it, for example to the most tokens "
            "that the policy can sample in an episode"
        )
    if divisor < 1:
        raise ValueError(f"ppo.loss_scale_len must be at least 1, got {divisor}")
    return divisor


def _corrected(config: PolicyGradientOptions) -> PolicyGradientOptions:
    """Return the options with those of ``correction`` in the place of what is not set; without a weight it has no
    bounds. Raises ValueError where they contradict it."""
    corrects = None if config.correction is None else config.correction != "none"
    if None not in (corrects, config.use_decoupled_loss) and config.use_decoupled_loss != corrects:
        set_to = str(config.use_decoupled_loss).lower()
        raise ValueError(f"ppo.correction={config.correction}: contradicts use_decoupled_loss={set_to}, remove one")
    sets = CORRECTIONS[config.correction].options if config.correction is not None else {}
    idle = _WEIGHT_BOUNDS if config.behav_imp_weight_mode == "none" else ()
    open_ones = [name for name in sets if name not in idle and getattr(config, name) is None]
    return replace(config, **{name: sets[name] for name in open_ones})


def _decouples(config: PolicyGradientOptions, sampler_differs: bool) -> bool:
    """Return whether the ratio is taken against the proximal policy and tokens carry a behaviour weight.

    Where sampler and trainer differ, their ratio is off 1 before any update: the clip would act on this difference in
    place of the update, and nothing would correct for it.
    """
    if config.use_decoupled_loss is not None:
        return config.use_decoupled_loss
    if config.correction is not None:
        return config.correction != "none"
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


def check_effects(config: PolicyGradientOptions, value: Mapping[str, Any]) -> None:
    """Check ``value``: the options of ``config`` with those of the preset filled in, and whether log-probabilities are
    recomputed. Raises ValueError naming the option."""
    for wrong in (*_without_effect(config, value), *_contradictions(config, value)):
        raise ValueError(f"ppo.{wrong}")


def _without_effect(config: PolicyGradientOptions, value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every option that is set and that nothing reads."""
    loss, estimator = value["loss"], value["adv_estimator"]
    decoupled, recomputed = value["use_decoupled_loss"], value["recompute_logprob"]
    no_kl, credit = value["kl_ctl"] == 0, value["credit"]
    of_later = estimator in (*RETURN_TO_GO, GAE) or credit != "episode"
    rules = [
        *((name, True, f"with loss {loss!r}") for name in _HAS_NO_EFFECT.get(loss, ())),
        ("kl_estimator", no_kl and value["kl_loss_coef"] == 0, "while kl_ctl and kl_loss_coef are 0"),
        ("discount", not of_later, f"with adv_estimator {estimator!r}"),
        *((name, not value["rl_weight"], "with rl_weight 0") for name in _OF_REWARDS),
        ("step_advantage_weight", credit != "state", f"with credit {credit!r}"),
        ("gae_lambda", estimator != GAE, f"with adv_estimator {estimator!r}: remove it, or use gae"),
        ("pass_at_k", estimator != PASS_AT_K, f"with adv_estimator {estimator!r}: remove it, or use pass_at_k"),
        ("feedback", not value["distill_weight"], "with distill_weight 0"),
        ("feedback_tokens", value["feedback"] == NONE, "with feedback 'none'"),
        ("kl_target", no_kl, "while kl_ctl is 0: it is where the steering starts, set it"),
        ("kl_horizon", config.kl_target is None, "without ppo.kl_target"),
        ("loss_scale_len", value["loss_agg"] != "constant", f"with loss_agg {value['loss_agg']!r}"),
        ("prox_logp_method", not decoupled and not recomputed, "without use_decoupled_loss or recompute_logprob"),
        *((name, not decoupled, "without use_decoupled_loss") for name in _OF_WEIGHTS),
        *((name, config.behav_imp_weight_mode == "none", "with behav_imp_weight_mode=none") for name in _WEIGHT_BOUNDS),
    ]
    for name, idle, why in rules:
        if idle and getattr(config, name) != getattr(PolicyGradientOptions, name):
            yield f"{name} has no effect {why}" + ("" if ": " in why else ": remove it")
    if decoupled and recomputed:
        yield (
            "recompute_logprob has no effect with use_decoupled_loss, which clips against the recomputed policy "
            "already: remove it"
        )
    bounded = any(getattr(config, name) is not None for name in _SEQUENCE_BOUNDS)
    if loss == "reinforce" and decoupled and config.behav_imp_weight_mode == "none" and not bounded:
        yield "use_decoupled_loss has no effect with loss 'reinforce' and behav_imp_weight_mode=none"
    if loss == "reinforce" and recomputed and no_kl:
        yield "recompute_logprob has no effect with loss 'reinforce' and without kl_ctl: remove it"


def _contradictions(config: PolicyGradientOptions, value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every option that cannot be beside the others."""
    estimator, recomputed = value["adv_estimator"], value["recompute_logprob"]
    if value["kl_estimator"] == "k1" and value["kl_loss_coef"] != 0:
        yield (
            f"kl_estimator=k1 has zero expected gradient in the loss (algo {config.algo!r}): use k2 or k3, or "
            "kl_loss_coef=0 and kl_ctl"
        )
    if value["credit"] == "turn" and estimator in (*RETURN_TO_GO, *OF_SUCCESS):
        has = "is about whole episodes" if estimator in OF_SUCCESS else "has a return-to-go of its own"
        yield f"credit=turn: adv_estimator {estimator!r} {has}; use grpo, grpo_nostd, rloo, reinforce or gae"
    if value["credit"] == "state" and estimator not in OF_STATES:
        yield (
            f"credit=state: adv_estimator {estimator!r} does not compare the members of a group; use "
            f"{', '.join(OF_STATES)}"
        )
    if estimator == PASS_AT_K and not 2 <= (config.pass_at_k or 0) < config.group_size:
        yield (
            f"pass_at_k={config.pass_at_k}: adv_estimator=pass_at_k compares sets of so many of the "
            f"group_size={config.group_size} rollouts: set it from 2 to {config.group_size - 1}"
        )
    if config.prox_logp_method == "loglinear" and recomputed:
        yield "prox_logp_method=loglinear recomputes nothing: with recompute_logprob use actor_inf or recompute"
    if estimator == GAE and recomputed and value["kl_ctl"] != 0 and config.prox_logp_method == "recompute":
        yield (
            "prox_logp_method=recompute: with recompute_logprob and kl_ctl the critic needs what it computes, too; use "
            "actor_inf"
        )
    for name in ("reward_scaling", "reward_bias"):
        if not math.isfinite(value[name]) or (name == "reward_scaling" and not value[name]):
            yield f"{name}={value[name]:g}: all rewards would be the same, or no numbers; give a finite one" + (
                " other than 0" if name == "reward_scaling" else ""
            )
    if value["feedback"] == SOLVED and config.group_size < 2:
        yield f"feedback={SOLVED}: another rollout of the group has to solve the task; set group_size to at least 2"
    if not value["rl_weight"] and not value["distill_weight"]:
        yield "rl_weight=0, distill_weight=0: nothing would be learned; set one of them"
    if not value["rl_weight"] and (estimator == GAE or value["kl_ctl"] != 0):
        yield (
            f"rl_weight=0: there is no reward to take the KL divergence off (kl_ctl={value['kl_ctl']:g}) or to predict "
            f"(adv_estimator {estimator!r}); use kl_loss_coef, or another algo than {config.algo}"
        )
    if value["rl_weight"] not in (0, 1) and not value["distill_weight"]:
        yield (
            f"rl_weight={value['rl_weight']:g}: it is a share beside ppo.distill_weight; without that set "
            "actor.optimizer.lr"
        )
    if config.group_size < 2 and value["rl_weight"] and estimator in _NEEDS_GROUPS:
        yield f"group_size must be at least 2 for adv_estimator {estimator!r}"
    low, high = config.behav_imp_sequence_floor, config.behav_imp_sequence_cap
    if low is not None and high is not None and low >= high:
        yield f"behav_imp_sequence_floor={low:g}: must be below behav_imp_sequence_cap={high:g}"
    floor = config.behav_imp_weight_floor
    cap = DEFAULT_CAP if config.behav_imp_weight_cap is None else config.behav_imp_weight_cap
    if floor is not None and floor >= cap:
        yield f"behav_imp_weight_floor must be above 0 and below the cap, got {floor}"
