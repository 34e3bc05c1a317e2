"""Resolution of the section ``ppo``: defaults from a preset or a custom algorithm, and checks.

Options that contradict each other or have no effect are errors. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from realhf.api.algorithm import (
    ADVANTAGES,
    CLIP_OPTIONS,
    DECLARED_CLIP_OPTIONS,
    LOSS,
    Algorithm,
    is_user_algorithm,
    load_algorithm,
)
from realhf.api.keys import NONE, SOLVED
from realhf.api.option import problems
from realhf.registry import policy_losses, registered_names

DEFAULT_CAP: float = CORRECTIONS["decoupled"].options["behav_imp_weight_cap"]
"""Default upper bound of a behaviour weight."""
_NEEDS_GROUPS = ("grpo", "grpo_nostd", "rloo", "reinforce_pp_baseline", *OF_SUCCESS)
"""Estimators that compare the rollouts of a group."""
BUILTIN_CLIP_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ppo": CLIP_OPTIONS,
        "cispo": ("eps_clip", "eps_clip_higher", "ratio"),
        "reinforce": (),
    }
)
"""The ``CLIP_OPTIONS`` that each built-in loss reads, listed here so that torch is not imported."""
_OF_REWARDS = (
    *(
        "adv_estimator",
        "credit",
        "step_advantage_weight",
        "discount",
        "pass_at_k",
        "adv_norm",
        "kl_target",
    ),
    *("reward_scaling", "reward_bias", "max_reward_clip"),
)
"""Options about rewards and the advantages computed from them."""
_WEIGHT_BOUNDS = ("behav_imp_weight_cap", "behav_imp_weight_floor", "behav_imp_weight_level")
"""Options that bound behaviour weights."""
_SEQUENCE_BOUNDS = ("behav_imp_sequence_cap", "behav_imp_sequence_floor")
"""Options that exclude whole sequences by their behaviour weights."""
_OF_WEIGHTS = ("behav_imp_weight_mode", *_WEIGHT_BOUNDS, *_SEQUENCE_BOUNDS)
"""Options about behaviour weights."""


def resolve(
    config: PolicyGradientOptions | Mapping[str, Any],
    *,
    loss_scale_len: int | None = None,
    sampler_differs: bool = False,
    scored_by_model: bool = False,
    own: Any = None,
) -> ResolvedOptions:
    """Return the options with the values of the preset or custom algorithm ``config.algo`` filled
    in.

    Args:
        config: The options as given.
        loss_scale_len: Divisor of ``loss_agg=constant`` if the option of that name is not set, tokens.
        sampler_differs: Whether tokens are sampled by other weights or with another arithmetic than the
            trainer's, in which case the objective is decoupled by default.
        scored_by_model: Whether a reward model contributes to the rewards.
        own: Options of the custom algorithm, a section or a mapping; None for their defaults.

    Raises ValueError naming the option that is missing, unknown, out of range or without effect.
    """
    config = policy_gradient_options(config)
    if wrong := [*problems(config, "ppo", registered_names)]:
        raise ValueError("\n".join(wrong))
    algorithm = load_algorithm(config.algo) if is_user_algorithm(config.algo) else None
    preset = (
        PRESETS[config.algo].options if algorithm is None else _own_preset(config.algo, algorithm)
    )
    if algorithm is not None:
        config = _apply_off_policy(config, algorithm.preset, sampler_differs=sampler_differs)
    config = _apply_correction(config)
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    set_values = {name: item for name, item in values.items() if item is not None}
    value = {**COMMON, **preset, **set_values}
    if algorithm is not None and (wrong := [*_custom_algorithm_problems(config, value, algorithm)]):
        raise ValueError("\n".join(f"ppo.{line}" for line in wrong))
    value["use_decoupled_loss"] = _uses_decoupled_loss(config, sampler_differs)
    value["recompute_logprob"] = _recomputes_logprob(config, value)
    check_effects(config, value)
    if value["eps_clip_higher"] is None:
        value["eps_clip_higher"] = value["eps_clip"]
    value |= _dapo_options(config, value, loss_scale_len, algorithm, scored_by_model)
    value["loss_scale_len"] = _loss_divisor(value, loss_scale_len)
    resolved = ResolvedOptions(**{**value, **_off_policy_options(config, value)})
    if algorithm is not None:
        resolved.algorithm = algorithm
        resolved.own = algorithm.read_options(own)
    return resolved


def _own_preset(reference: str, algorithm: Algorithm) -> Mapping[str, Any]:
    """Return the options of the section ``ppo`` that a custom algorithm sets.

    Raises ValueError for an option that is unknown or out of range, or whose default is not None
    (in that case a value set by the user could not be distinguished from the default).
    """
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


def _apply_off_policy(
    config: PolicyGradientOptions, preset: Mapping[str, Any], *, sampler_differs: bool
) -> PolicyGradientOptions:
    """Return the options, with off-policy options and ``pass_at_k`` taken from a custom preset.

    Only options that have an effect are applied. A correction that the user chose replaces all
    off-policy options of the preset.
    """

    def fill(*names: str) -> PolicyGradientOptions:
        """Return ``config`` with the named options filled in from the preset where the user did not
        set them."""
        return replace(
            config,
            **{
                name: preset[name]
                for name in names
                if name in preset and getattr(config, name) is None
            },
        )

    if (config.adv_estimator or preset.get("adv_estimator")) == PASS_AT_K:
        config = fill(PASS_AT_K)
    if config.correction is not None:
        return config
    if config.use_decoupled_loss is not False:
        config = fill("correction", "use_decoupled_loss")
    if not config.use_decoupled_loss and config.correction in (None, "none"):
        config = fill("recompute_logprob")
    decoupled = _uses_decoupled_loss(config, sampler_differs)
    if decoupled or config.recompute_logprob:
        config = fill("prox_logp_method", *(_OF_WEIGHTS if decoupled else ()))
    return config


def _custom_algorithm_problems(
    config: PolicyGradientOptions, value: Mapping[str, Any], algorithm: Algorithm
) -> Iterator[str]:
    """Yield a line for every option that has no effect with, or contradicts, a custom algorithm."""
    algorithm_name = config.algo.rpartition(":")[2]
    uses_own_loss = algorithm.loss is not None and value[LOSS] == config.algo
    uses_own_advantages = algorithm.advantages is not None and value[ADVANTAGES] == config.algo
    if uses_own_loss:
        for name in CLIP_OPTIONS:
            if name not in algorithm.clip_options and getattr(config, name) is not None:
                yield f"{name} has no effect with the loss of {algorithm_name}: remove it"
    if uses_own_advantages and algorithm.compares and config.group_size < 2:
        yield f"group_size must be at least 2 for the advantages of {algorithm_name}"
    if algorithm.options is not None and not uses_own_loss and not uses_own_advantages:
        replaced = [
            f"ppo.{name}={getattr(config, name)}"
            for name in (LOSS, ADVANTAGES)
            if getattr(config, name)
        ]
        yield (
            f"algo={config.algo}: nothing of it that has options is left with "
            f"{' and '.join(replaced)}; take a preset"
        )


def _dapo_options(
    config: PolicyGradientOptions,
    value: Mapping[str, Any],
    longest: int | None,
    algorithm: Algorithm | None,
    scored_by_model: bool,
) -> dict[str, Any]:
    """Return the options of dynamic sampling and of the length penalty.

    If they cannot be combined with the other options, a preset's values are disabled, while values
    that the user set raise ValueError. ``longest`` is the maximum number of sampled tokens of an
    episode.
    """
    estimator = value["adv_estimator"]
    credit = value["credit"]
    compares = (
        algorithm.compares
        if algorithm is not None and estimator == config.algo
        else estimator in _NEEDS_GROUPS
    )
    reason = f"credit={credit}" if credit != "episode" else f"adv_estimator {estimator!r}"
    # Dynamic sampling drops groups with equal rewards of the environment. It needs that such a
    # group has no gradient; each of these gives it one.
    signal_of_equal_rewards = {
        "a teacher": value["distill_weight"] != 0,
        "a reward model": scored_by_model,
        reason: not compares or credit != "episode",
    }
    if config.dynamic_sampling and (
        sources := [name for name, present in signal_of_equal_rewards.items() if present]
    ):
        raise ValueError(
            f"ppo.dynamic_sampling={config.dynamic_sampling:g}: with {sources[0]} a group of equal "
            f"rewards teaches, too"
        )
    allows_penalty = credit == "episode" and estimator != "maxrl" and value["rl_weight"] != 0
    length = value.get("overlong_length", longest)
    if config.overlong_buffer and not allows_penalty:
        why = "takes no reward below 0" if credit == "episode" else "reads the rewards of turns"
        why = (
            f"{reason} {why}"
            if value["rl_weight"]
            else "it is a part of the reward, which teaches nothing with rl_weight 0"
        )
        raise ValueError(f"ppo.overlong_buffer={config.overlong_buffer:g}: {why}")
    if config.overlong_buffer and length is None:
        raise ValueError(
            f"ppo.overlong_buffer={config.overlong_buffer:g}: needs ppo.overlong_length here"
        )
    buffer = value["overlong_buffer"] if allows_penalty and length is not None else 0.0
    if config.overlong_length is not None and not buffer:
        raise ValueError("ppo.overlong_length has no effect without ppo.overlong_buffer: remove it")
    return {
        "dynamic_sampling": 0.0
        if any(signal_of_equal_rewards.values())
        else value["dynamic_sampling"],
        "overlong_buffer": buffer,
        "overlong_length": length if buffer else None,
    }


def _loss_divisor(value: Mapping[str, Any], default: int | None) -> int | None:
    """Return the divisor of ``loss_agg=constant``, None for another aggregation.

    Raises ValueError if it is missing or below 1.
    """
    if value["loss_agg"] != "constant":
        return None
    divisor = value.get("loss_scale_len", default)
    if divisor is None:
        raise ValueError(
            "ppo.loss_agg=constant divides by ppo.loss_scale_len: set it, for example to the most "
            "tokens "
            "that the policy can sample in an episode"
        )
    if divisor < 1:
        raise ValueError(f"ppo.loss_scale_len must be at least 1, got {divisor}")
    return divisor


def _apply_correction(config: PolicyGradientOptions) -> PolicyGradientOptions:
    """Return the options with unset ones taken from ``correction``.

    With ``behav_imp_weight_mode=none`` the bounds of the weights are not set. Raises ValueError if
    ``correction`` and ``use_decoupled_loss`` contradict each other.
    """
    decouples = None if config.correction is None else config.correction != "none"
    if (
        None not in (decouples, config.use_decoupled_loss)
        and config.use_decoupled_loss != decouples
    ):
        given = str(config.use_decoupled_loss).lower()
        raise ValueError(
            f"ppo.correction={config.correction}: contradicts use_decoupled_loss={given}, remove "
            f"one"
        )
    correction = CORRECTIONS[config.correction].options if config.correction is not None else {}
    unused = _WEIGHT_BOUNDS if config.behav_imp_weight_mode == "none" else ()
    unset = [name for name in correction if name not in unused and getattr(config, name) is None]
    return replace(config, **{name: correction[name] for name in unset})


def _uses_decoupled_loss(config: PolicyGradientOptions, sampler_differs: bool) -> bool:
    """Return whether the ratio is taken against the proximal policy, with a behaviour weight for
    each token.

    If sampler and trainer differ, their ratio is not 1 before the first update. Without the
    decoupled loss, the clip would act on this mismatch instead of the update, and nothing would
    correct it.
    """
    if config.use_decoupled_loss is not None:
        return config.use_decoupled_loss
    if config.correction is not None:
        return config.correction != "none"
    return sampler_differs and not config.recompute_logprob


def _recomputes_logprob(config: PolicyGradientOptions, value: Mapping[str, Any]) -> bool:
    """Return whether the ratio is taken against recomputed log-probabilities instead of the
    generator's.

    It is the default for sequence ratios. Their clip range is about 3e-4, less than the rounding
    difference of two programs with the same weights: against the generator's log-probabilities a
    third of the sequences would be clipped at random.
    """
    if config.recompute_logprob is not None:
        return config.recompute_logprob
    return (
        value["ratio"] == "sequence"
        and value["loss"] != "reinforce"
        and not value["use_decoupled_loss"]
    )


def _off_policy_options(config: PolicyGradientOptions, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the proximal policy and the behaviour weight, with defaults filled
    in."""
    decoupled = value["use_decoupled_loss"]
    cap = config.behav_imp_weight_cap
    floor = config.behav_imp_weight_floor
    return {
        "prox_logp_method": _proximal_method(config, value)
        if decoupled or value["recompute_logprob"]
        else None,
        "behav_imp_weight_mode": (config.behav_imp_weight_mode or "mask") if decoupled else "none",
        "behav_imp_weight_cap": DEFAULT_CAP if cap is None else cap,
        "behav_imp_weight_floor": 0.0 if floor is None else floor,
        # A sequence ratio clips whole sequences, so the weights are per sequence as well.
        "behav_imp_weight_level": config.behav_imp_weight_level or value["ratio"],
    }


def _proximal_method(config: PolicyGradientOptions, value: Mapping[str, Any]) -> str:
    """Return how the proximal log-probabilities are obtained.

    If the objective is decoupled by default, no call is added to the graph: the train call
    recomputes them. If the user chose the objective, ``actor_inf`` computes them. It also does so
    for a critic whose rewards need them, because the critic has no policy to recompute them with.
    """
    if config.prox_logp_method is not None:
        return config.prox_logp_method
    critic_needs_them = (
        value["adv_estimator"] == GAE and value["recompute_logprob"] and value["kl_ctl"] != 0
    )
    set_by_user = config.use_decoupled_loss or config.recompute_logprob is not None
    return "actor_inf" if set_by_user or critic_needs_them else "recompute"


def check_effects(config: PolicyGradientOptions, value: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that has no effect or contradicts another.

    ``config`` has the options as given, ``value`` all options, including those of the preset.
    """
    for problem in (
        *_find_ineffective_options(config, value),
        *_find_contradictions(config, value),
    ):
        raise ValueError(f"ppo.{problem}")


def _unread_clip_options(loss: str) -> Sequence[str]:
    """Return those of ``CLIP_OPTIONS`` that a loss does not read.

    A registered loss that declares none reads none; a custom algorithm, whose loss is named by the
    reference of its file, is checked by its own ``clip_options``.
    """
    if loss in BUILTIN_CLIP_OPTIONS:
        read = BUILTIN_CLIP_OPTIONS[loss]
    elif loss in policy_losses:
        read = getattr(policy_losses.get(loss), DECLARED_CLIP_OPTIONS, ())
    else:
        read = CLIP_OPTIONS
    return [name for name in CLIP_OPTIONS if name not in read]


def _find_ineffective_options(
    config: PolicyGradientOptions, value: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for every option that is set but has no effect."""
    loss = value["loss"]
    estimator = value["adv_estimator"]
    decoupled = value["use_decoupled_loss"]
    recomputed = value["recompute_logprob"]
    no_kl = value["kl_ctl"] == 0
    credit = value["credit"]
    has_returns = estimator in (*RETURN_TO_GO, GAE) or credit != "episode"
    undeclared = (
        ""
        if loss in BUILTIN_CLIP_OPTIONS
        else ": remove it, or let the loss declare it with realhf.api.algorithm.reads_clip_options"
    )
    rules = [
        *((name, True, f"with loss {loss!r}{undeclared}") for name in _unread_clip_options(loss)),
        (
            "kl_estimator",
            no_kl and value["kl_loss_coef"] == 0,
            "while kl_ctl and kl_loss_coef are 0",
        ),
        ("discount", not has_returns, f"with adv_estimator {estimator!r}"),
        *((name, not value["rl_weight"], "with rl_weight 0") for name in _OF_REWARDS),
        ("step_advantage_weight", credit != "state", f"with credit {credit!r}"),
        (
            "gae_lambda",
            estimator != GAE,
            f"with adv_estimator {estimator!r}: remove it, or use gae",
        ),
        (
            "pass_at_k",
            estimator != PASS_AT_K,
            f"with adv_estimator {estimator!r}: remove it, or use pass_at_k",
        ),
        ("feedback", not value["distill_weight"], "with distill_weight 0"),
        ("feedback_tokens", value["feedback"] == NONE, "with feedback 'none'"),
        ("kl_target", no_kl, "while kl_ctl is 0: it is where the steering starts, set it"),
        ("kl_horizon", config.kl_target is None, "without ppo.kl_target"),
        ("loss_scale_len", value["loss_agg"] != "constant", f"with loss_agg {value['loss_agg']!r}"),
        (
            "prox_logp_method",
            not decoupled and not recomputed,
            "without use_decoupled_loss or recompute_logprob",
        ),
        *((name, not decoupled, "without use_decoupled_loss") for name in _OF_WEIGHTS),
        *(
            (name, config.behav_imp_weight_mode == "none", "with behav_imp_weight_mode=none")
            for name in _WEIGHT_BOUNDS
        ),
    ]
    for name, is_unused, why in rules:
        if is_unused and getattr(config, name) != getattr(PolicyGradientOptions, name):
            yield f"{name} has no effect {why}" + ("" if ": " in why else ": remove it")
    if decoupled and recomputed:
        yield (
            "recompute_logprob has no effect with use_decoupled_loss, which clips against the "
            "recomputed policy "
            "already: remove it"
        )
    bounded = any(getattr(config, name) is not None for name in _SEQUENCE_BOUNDS)
    if loss == "reinforce" and decoupled and config.behav_imp_weight_mode == "none" and not bounded:
        yield (
            "use_decoupled_loss has no effect with loss 'reinforce' and behav_imp_weight_mode=none"
        )
    if loss == "reinforce" and recomputed and no_kl:
        yield "recompute_logprob has no effect with loss 'reinforce' and without kl_ctl: remove it"


def _find_contradictions(config: PolicyGradientOptions, value: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every option that contradicts others."""
    estimator = value["adv_estimator"]
    recomputed = value["recompute_logprob"]
    if value["kl_estimator"] == "k1" and value["kl_loss_coef"] != 0:
        yield (
            f"kl_estimator=k1 has zero expected gradient in the loss (algo {config.algo!r}): use "
            f"k2 or k3, or "
            "kl_loss_coef=0 and kl_ctl"
        )
    if value["credit"] == "turn" and estimator in (*RETURN_TO_GO, *OF_SUCCESS):
        has = (
            "is about whole episodes"
            if estimator in OF_SUCCESS
            else "has a return-to-go of its own"
        )
        yield (
            f"credit=turn: adv_estimator {estimator!r} {has}; use grpo, grpo_nostd, rloo, "
            f"reinforce or gae"
        )
    if value["credit"] == "state" and estimator not in OF_STATES:
        yield (
            f"credit=state: adv_estimator {estimator!r} does not compare the members of a group; "
            f"use "
            f"{', '.join(OF_STATES)}"
        )
    if estimator == PASS_AT_K and not 2 <= (config.pass_at_k or 0) < config.group_size:
        yield (
            f"pass_at_k={config.pass_at_k}: adv_estimator=pass_at_k compares subsets of this size "
            f"of the "
            f"group_size={config.group_size} rollouts: set it from 2 to {config.group_size - 1}"
        )
    if config.prox_logp_method == "loglinear" and recomputed:
        yield (
            "prox_logp_method=loglinear recomputes nothing: with recompute_logprob use actor_inf "
            "or recompute"
        )
    if (
        estimator == GAE
        and recomputed
        and value["kl_ctl"] != 0
        and config.prox_logp_method == "recompute"
    ):
        yield (
            "prox_logp_method=recompute: with recompute_logprob and kl_ctl the critic needs what "
            "it computes, too; use "
            "actor_inf"
        )
    for name in ("reward_scaling", "reward_bias"):
        if not math.isfinite(value[name]) or (name == "reward_scaling" and not value[name]):
            yield (
                f"{name}={value[name]:g}: all rewards would be the same, or no numbers; give a "
                f"finite one" + (" other than 0" if name == "reward_scaling" else "")
            )
    if value["feedback"] == SOLVED and config.group_size < 2:
        yield (
            f"feedback={SOLVED}: another rollout of the group has to solve the task; set "
            f"group_size to at least 2"
        )
    if not value["rl_weight"] and not value["distill_weight"]:
        yield "rl_weight=0, distill_weight=0: nothing would be learned; set one of them"
    if not value["rl_weight"] and (estimator == GAE or value["kl_ctl"] != 0):
        yield (
            f"rl_weight=0: there is no reward to take the KL divergence off "
            f"(kl_ctl={value['kl_ctl']:g}) or to predict "
            f"(adv_estimator {estimator!r}); use kl_loss_coef, or another algo than {config.algo}"
        )
    if value["rl_weight"] not in (0, 1) and not value["distill_weight"]:
        yield (
            f"rl_weight={value['rl_weight']:g}: it is relative to ppo.distill_weight; without that "
            f"set "
            "actor.optimizer.lr"
        )
    if config.group_size < 2 and value["rl_weight"] and estimator in _NEEDS_GROUPS:
        yield f"group_size must be at least 2 for adv_estimator {estimator!r}"
    low = config.behav_imp_sequence_floor
    high = config.behav_imp_sequence_cap
    if low is not None and high is not None and low >= high:
        yield f"behav_imp_sequence_floor={low:g}: must be below behav_imp_sequence_cap={high:g}"
    floor = config.behav_imp_weight_floor
    cap = DEFAULT_CAP if config.behav_imp_weight_cap is None else config.behav_imp_weight_cap
    if floor is not None and floor >= cap:
        yield f"behav_imp_weight_floor must be above 0 and below the cap, got {floor}"
